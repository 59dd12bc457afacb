"""YAML -> frozen models. Every mistake names its path, the value and what is accepted.

::

    blocks_per_chunk: 4          # engine blocks in one stored block
    region:
      size: 4GiB
      eviction_policy: arc
    tiers:                       # asked in this order, all of them are stored to
      - type: fs
        root_dir: /mnt/nvme/kv

Secrets have no place here: stores take them from the environment or from files.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Collection
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, SerializeAsAny, ValidationError

from kvtiers.tiers.config.places import shared_places
from kvtiers.tiers.config.tier_options import TIER_MODELS, AnyTierConfig, ExternalTierConfig, Model, TierConfig
from kvtiers.tiers.config.values import Size
from kvtiers.tiers.config.yaml_file import read_yaml
from kvtiers.tiers.errors import ConfigError, printable, quoted, without_keys

ENTRY_POINT_GROUP = "kvtiers.tiers"
STORE_ENTRY_POINT_GROUP = "kvtiers.stores"
_MAY_HOLD_SECRETS = {"options", "storage_options", "url", "endpoint_url", "keys_file", "keys_env"}


class RegionConfig(Model):
    """The CPU region: the primary tier that every block passes through."""

    size: Size = Field(ge=4096, description="Bytes of CPU memory for blocks.")
    eviction_policy: Literal["lru", "arc"] = Field("lru", description="Which blocks leave the region first.")
    promotion_wait_s: Annotated[float, Field(ge=0, le=60)] = Field(
        0.5, description="How long a hit waits for room in the region before it counts as a miss."
    )
    instance_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")] | None = Field(
        None, description="Name of the region in /dev/shm; by default the engine's id."
    )


def _host_name(address: str) -> str:
    try:
        address.encode("idna")  # as socket does, which tells it by no OSError
    except UnicodeError:
        raise ValueError("is no host name: a part of it is empty or too long") from None
    if not address.isprintable():
        raise ValueError("is no host name: it holds control characters")
    return address


class MetricsConfig(Model):
    """Prometheus metrics served by the engine's process itself."""

    port: Annotated[int, Field(ge=0, le=65_535)] | None = Field(
        None, description="Serve /metrics on this port; 0 takes a free one and logs it. By default nothing is served."
    )
    address: Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_host_name)] = Field(
        "127.0.0.1", description="Address to serve on. Anyone who can reach it can read the metrics."
    )


class HandlerConfig(Model):
    """The copies between a GPU and the region. null: figures of vLLM's, from an H100; each first choice is logged."""

    method: Literal["batch", "kernel", "copy"] | None = Field(
        None,
        description="Copy always by batched driver calls, by a kernel, or by torch's copy_ in a loop. A job that it "
        "cannot take (the kernel: pages of no multiple of 8 bytes) goes by what comes next: kernel, batch, copy.",
    )
    store_kernel_bytes_max: Size | None = Field(
        None, description="Stores whose copies are no longer than this on average are made by the kernel. null: none."
    )
    load_kernel_bytes_max: Size | None = Field(None, description="Likewise for loads. null: below 28 KiB.")
    kernel_copies_min: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="Jobs of fewer copies are not made by the kernel. null: 16."
    )
    pin: bool = Field(True, description="Page-lock the region.")

    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``connector.transfer.gpu_handler.create_handlers``."""
        return {name: value for name, value in self if value is not None}


class IdentityConfig(Model):
    """Which of vLLM's options do not begin a namespace of their own, beyond those known to leave KV as it is."""

    ignore: tuple[Annotated[str, Field(min_length=1, max_length=255)], ...] = Field(
        (),
        description="Options that do not count, by the names that the log shows at the start "
        "(kernel_config.moe_backend, VLLM_SOMETHING). You vouch that KV is the same with any of their values; if it is "
        "not, tokens are wrong.",
    )


class DeploymentConfig(Model):
    """One deployment: the region and the tiers behind it."""

    region: RegionConfig
    blocks_per_chunk: Annotated[int, Field(ge=1, le=4096)] = Field(
        1,
        description="Engine blocks in one stored block. More means fewer, larger copies, files and requests. "
        "1 for models with a sliding window, chunked attention or recurrent states (docs/vllm.md).",
    )
    tiers: tuple[SerializeAsAny[AnyTierConfig], ...] = Field(
        (),
        description="Asked in this order; all of them are stored to. None may have another's place, or one inside it.",
    )
    handler: HandlerConfig = Field(
        default_factory=HandlerConfig, description="How KV is copied between a GPU and the region."
    )
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="Where the engine serves its metrics.")
    identity: IdentityConfig = Field(
        default_factory=IdentityConfig, description="Options of vLLM that do not count as part of what blocks are."
    )


def load_config(path: str | os.PathLike[str], registered: Collection[str] = ()) -> DeploymentConfig:
    """Read a deployment's YAML file.

    Args:
        registered: tier types made known to the factory by ``register_tier``, accepted beside the built-in ones.

    Raises:
        ConfigError: lists every mistake with its path, the value and what is accepted.
    """
    return parse_config(read_yaml(path), registered)


def parse_config(data: object, registered: Collection[str] = ()) -> DeploymentConfig:
    """Validate a deployment given as plain data.

    Raises:
        ConfigError: lists every mistake with its path, the value and what is accepted.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"a mapping with the keys {_names(DeploymentConfig)} is accepted, not {_kind(data)}")
    data = dict(data)
    mistakes: list[tuple[str, str]] = []
    tiers: dict[int, AnyTierConfig] = {}
    raw_tiers = data.pop("tiers", ())
    if not isinstance(raw_tiers, list | tuple):
        mistakes.append(("tiers", f"{_show(raw_tiers)} is not a list of tiers"))
        raw_tiers = ()
    for index, raw in enumerate(raw_tiers):
        try:
            tiers[index] = parse_tier(raw, registered)
        except _Mistakes as e:
            mistakes += [(_join(f"tiers[{index}]", field), message) for field, message in e.found]
    mistakes += shared_places(tiers)
    try:
        config = DeploymentConfig.model_validate(data | {"tiers": ()})
    except ValidationError as e:
        mistakes = _explain(e, DeploymentConfig) + mistakes
    if mistakes:
        raise _Mistakes(mistakes)
    return config.model_copy(update={"tiers": tuple(_named(list(tiers.values())))})


def _named(tiers: list[AnyTierConfig]) -> list[AnyTierConfig]:
    """Give every built-in tier a name of its own, so that metrics and logs tell two tiers of one type apart."""
    types = [tier.type for tier in tiers]
    named: list[AnyTierConfig] = []
    for index, tier in enumerate(tiers):
        if isinstance(tier, TierConfig) and tier.name is None and types.count(tier.type) > 1:
            tier = tier.model_copy(update={"name": f"{tier.type}{index}"})
        named.append(tier)
    names = [tier.name or tier.type for tier in named if isinstance(tier, TierConfig)]
    given = [tier.name for tier in tiers if isinstance(tier, TierConfig)]
    for name in names:
        if (count := names.count(name)) > 1:
            default = "" if given.count(name) == count else ", with one that has no other, which is called so"
            raise ConfigError(
                f"{name!r} is the name of {count} tiers{default}; accepted are different names", field="tiers"
            )
    return named


def parse_tier(data: object, registered: Collection[str] = ()) -> AnyTierConfig:
    """Validate one tier's options; its ``type`` chooses the model.

    Raises:
        ConfigError: as ``parse_config``.
    """
    known = sorted({*TIER_MODELS, *registered, *_entry_points(), *_store_entry_points()})
    if not isinstance(data, dict):
        raise _Mistakes([("", f"{_show(data)} is not a mapping; a tier has a type, one of {', '.join(known)}")])
    tier_type = data.get("type")
    model: type[TierConfig] | type[ExternalTierConfig]
    if not isinstance(tier_type, str):
        raise _Mistakes([("type", f"{_show(tier_type)} is no tier type; accepted: {', '.join(known)}")])
    if data.get("module_path") in (None, ""):  # as left out
        data = {name: value for name, value in data.items() if name != "module_path"}
    data = as_store_tier(data)
    tier_type = data["type"]
    if (tier_type != "store" and "module_path" in data) or (tier_type not in TIER_MODELS and tier_type in known):
        model = ExternalTierConfig
    elif tier_type in TIER_MODELS:
        model = TIER_MODELS[tier_type]
    else:
        raise _Mistakes(
            [
                (
                    "type",
                    f"{_show(tier_type)} is no tier type; accepted: {', '.join(known)}, or a class with module_path",
                )
            ]
        )
    try:
        tier = model.model_validate(data)
    except ValidationError as e:
        # "from None": pydantic's exception has the values.
        raise _Mistakes(_explain(e, model)) from None
    if isinstance(tier, TierConfig):
        try:
            tier.check()
        except ConfigError as e:
            raise _Mistakes([(e.field, e.message)]) from None
    return tier


def as_store_tier(data: dict[str, Any]) -> dict[str, Any]:
    """A tier's options, with ``type: store`` in place of a type that a package has registered for its store."""
    tier_type = data["type"]
    if tier_type in TIER_MODELS or "module_path" in data:
        return data
    place = _store_entry_points().get(tier_type)
    if place is None:
        return data
    return {"name": tier_type} | data | {"type": "store", "module_path": place}


def json_schema() -> dict[str, Any]:
    """JSON schema of the YAML, for editors."""
    schema = DeploymentConfig.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    tier_names = [model.__name__ for model in TIER_MODELS.values()]
    for model in TIER_MODELS.values():
        tier = model.model_json_schema()
        definitions.update(tier.pop("$defs", {}))
        tier["required"] = sorted({"type", *tier.get("required", ())})
        definitions[model.__name__] = tier
    schema["properties"]["tiers"]["items"] = {
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in (*tier_names, "ExternalTierConfig")]
    }
    definitions.pop("TierConfig", None)
    # Else it would take what the model of a built-in tier refuses: any key goes with a tier that is not ours.
    definitions["ExternalTierConfig"]["anyOf"] = [
        {
            "required": ["module_path"],
            "properties": {"module_path": {"type": "string", "minLength": 1}, "type": {"not": {"const": "store"}}},
        },
        {"properties": {"type": {"not": {"enum": sorted(TIER_MODELS)}}}},
    ]
    return schema


class _Mistakes(ConfigError):
    """ConfigError with one line a mistake."""

    def __init__(self, found: list[tuple[str, str]]) -> None:
        found = [(printable(without_keys(field)), printable(without_keys(message))) for field, message in found]
        self.found = found
        if len(found) == 1:
            super().__init__(found[0][1], field=found[0][0])
        else:
            super().__init__("\n".join(f"{field}: {message}" for field, message in found))


def _entry_points() -> list[str]:
    return [entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)]


def _store_entry_points() -> dict[str, str]:
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=STORE_ENTRY_POINT_GROUP)}


def _explain(error: ValidationError, model: type[BaseModel]) -> list[tuple[str, str]]:
    explained = []
    for item in error.errors(include_url=False):
        path = ""
        for part in item["loc"]:
            path = f"{path}[{part}]" if isinstance(part, int) else _join(path, str(part))
        message = item["msg"].removeprefix("Value error, ")
        shown = _kind(item["input"]) if _MAY_HOLD_SECRETS.intersection(item["loc"]) else _show(item["input"])
        if item["type"] == "missing":
            text = "is required"
        elif item["type"] == "extra_forbidden":
            owner = _model_at(model, item["loc"][:-1])
            text = f"is no key; accepted: {_names(owner)}"
        elif item["type"] == "value_error":
            text = f"{shown} {message}"
        else:
            text = f"{shown} is not accepted: {message[:1].lower()}{message[1:]}"
        explained.append((path, text))
    return explained


def _model_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return model


def _names(model: type[BaseModel]) -> str:
    return ", ".join(sorted(model.model_fields))


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent and child else parent or child


def _show(value: object) -> str:
    """A value that may be repeated: plain and short, or by its kind."""
    if value and not isinstance(value, (bool, int, float, str, date)):
        return _kind(value)
    try:
        text = quoted(value) if isinstance(value, str) else repr(value)
    except ValueError:  # a number of more digits than Python writes
        return _kind(value)
    return text if len(text) <= 80 else text[:77] + "…'"


def _kind(value: object) -> str:
    """What a value is, without what it says."""
    kinds = {dict: "a mapping", list: "a list", str: "a text", int: "a number", bytes: "binary", type(None): "nothing"}
    return kinds.get(type(value), f"a {type(value).__name__}")
