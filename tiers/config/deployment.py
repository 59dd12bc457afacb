"""Load a deployment's YAML file into frozen models. Every error names the path, the value and what is accepted.

::

    blocks_per_chunk: 4          # engine blocks in one stored block
    region:
      size: 4GiB
      eviction_policy: arc
    tiers:                       # looked up in this order; every block is stored to all of them
      - type: fs
        root_dir: /mnt/nvme/kv

Do not put secrets into this file: stores read them from the environment or from separate files.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, SerializeAsAny, ValidationError

from ..errors import ConfigError
from .mistakes import Mistakes, did_you_mean, explain, join, kind_of, show
from .places import shared_places
from .tier_options import TIER_MODELS, AnyTierConfig, ExternalTierConfig, Model, TierConfig
from .values import AbsolutePath, DurationIn, SizeIn, matching
from .variables import AS_WRITTEN, expand
from .yaml_file import read_yaml

ENTRY_POINT_GROUP = "kvtiers.tiers"
STORE_ENTRY_POINT_GROUP = "kvtiers.stores"


class RegionConfig(Model):
    """The CPU memory that every block passes through."""

    size: Annotated[int, SizeIn(4096)] = Field(description="CPU memory for blocks.")
    eviction_policy: Literal["lru", "arc"] = Field("lru", description="How to choose the blocks to evict.")
    promotion_wait_s: Annotated[float, DurationIn(0, 60)] = Field(
        0.5,
        description="How long a hit waits for room in the region before it is a miss.",
    )
    instance_id: (
        Annotated[str, matching(r"^[A-Za-z0-9._-]{1,128}$", "1 to 128 letters, digits, '.', '_' and '-'")] | None
    ) = Field(None, description="The region's name in /dev/shm. Default: the engine's ID.")


def _check_host_name(address: str) -> str:
    try:
        address.encode("idna")  # socket does the same, but raises UnicodeError there, not OSError
    except UnicodeError:
        raise ValueError("is not a valid host name: a part of it is empty or too long") from None
    if not address.isprintable():
        raise ValueError("is not a valid host name: it contains control characters")
    return address


class MetricsConfig(Model):
    """Prometheus metrics, served by the engine."""

    port: Annotated[int, Field(ge=0, le=65_535)] | None = Field(
        None, description="Port of /metrics. 0: any free port, which is logged. null: not served."
    )
    address: Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_check_host_name)] = Field(
        "127.0.0.1", description="Address to listen on. Every client that can connect can read the metrics."
    )


class HandlerConfig(Model):
    """Copies between a GPU and the region. The first use of a method is logged."""

    method: Literal["batch", "kernel", "copy"] | None = Field(
        None,
        description="How to copy, where possible: batched driver calls, a kernel, or torch's copy_. null: chosen "
        "for each job.",
    )
    pin: bool = Field(True, description="Page-lock the region, for faster copies.")

    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``connector.transfer.gpu_handler.create_handlers``."""
        return {name: value for name, value in self if value is not None}


class IdentityConfig(Model):
    """Options that do not count for the namespace, besides those known not to change KV."""

    ignore: tuple[Annotated[str, Field(min_length=1, max_length=255)], ...] = Field(
        (),
        description="Options by their names in the log, such as kernel_config.moe_backend. If one of them changes KV, "
        "the model's output is wrong.",
    )


class DeploymentConfig(Model):
    """The top level of the file."""

    region: RegionConfig
    blocks_per_chunk: Annotated[int, Field(ge=1, le=4096)] = Field(
        1,
        description="Engine blocks in a stored block. More blocks make fewer and larger files. Use 1 for models with "
        "sliding windows, chunked attention or recurrent states.",
    )
    tiers: tuple[SerializeAsAny[AnyTierConfig], ...] = Field(
        (),
        description="Storage tiers, asked in this order. Every block is stored in all. Locations must not overlap.",
    )
    handler: HandlerConfig = Field(default_factory=HandlerConfig, description="Copies between a GPU and the region.")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="Where metrics are served.")
    identity: IdentityConfig = Field(
        default_factory=IdentityConfig, description="Options that do not count for the namespace."
    )
    trace_requests: AbsolutePath | None = Field(
        None,
        description="File of one engine for `kvtiers explain`, with a line for each request. At 64 MiB it becomes "
        "FILE.1. Way `spec` only. null: no file.",
    )


def load_config(path: str | os.PathLike[str], registered: Collection[str] = ()) -> DeploymentConfig:
    """Read a deployment's YAML file. Relative paths in it are relative to the file's folder.

    Args:
        registered: tier types registered with ``register_tier``, accepted besides the built-in types.

    Raises:
        ConfigError: lists every mistake with its path, the value and what is accepted.
    """
    data = read_yaml(path)
    if data is None:
        raise ConfigError(f"is empty; it must be a mapping with the keys {_names(DeploymentConfig)}", field=str(path))
    return parse_config(data, registered, folder=os.path.dirname(os.path.abspath(path)))


def load_named(path: str | os.PathLike[str], registered: Collection[str] = ()) -> DeploymentConfig:
    """Load a file, as ``load_config`` does; each mistake begins with the file's name."""
    try:
        return load_config(path, registered)
    except Mistakes as e:
        raise Mistakes(
            [(f"{os.fspath(path)}: {field}" if field else os.fspath(path), text) for field, text in e.found]
        ) from None


def parse_config(data: object, registered: Collection[str] = (), *, folder: str | None = None) -> DeploymentConfig:
    """Validate a deployment given as plain data. Keys that begin with ``x-`` are ignored (for YAML anchors).

    Args:
        folder: relative paths are relative to it; None: to the working directory.

    Raises:
        ConfigError: lists every mistake with its path, the value and what is accepted.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"must be a mapping with the keys {_names(DeploymentConfig)}, not {kind_of(data)}")
    data = {name: value for name, value in data.items() if not (isinstance(name, str) and name.startswith("x-"))}
    mistakes: list[tuple[str, str]] = []
    tiers: dict[int, AnyTierConfig] = {}
    raw_tiers = data.pop("tiers", ())
    if not isinstance(raw_tiers, list | tuple):
        mistakes.append(
            ("tiers", f"{show(raw_tiers)} is not a list of tiers; begin each tier with a dash, such as '- type: fs'")
        )
        raw_tiers = ()
    for index, raw in enumerate(raw_tiers):
        try:
            tiers[index] = parse_tier(raw, registered, folder=folder)
        except Mistakes as e:
            mistakes += [(join(f"tiers[{index}]", field), message) for field, message in e.found]
    mistakes += shared_places(tiers)
    try:
        config = DeploymentConfig.model_validate(data | {"tiers": ()}, context={"folder": folder})
    except ValidationError as e:
        mistakes = explain(e, DeploymentConfig, data) + mistakes
    if mistakes:
        raise Mistakes(mistakes)
    return config.model_copy(update={"tiers": tuple(_with_unique_names(list(tiers.values())))})


def _with_unique_names(tiers: list[AnyTierConfig]) -> list[AnyTierConfig]:
    """Name unnamed built-in tiers whose type occurs twice, so that metrics and logs can tell them apart."""
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
            default = "" if given.count(name) == count else ", for one of them by default"
            raise ConfigError(f"{name!r} is the name of {count} tiers{default}; names must differ", field="tiers")
    return named


def parse_tier(data: object, registered: Collection[str] = (), *, folder: str | None = None) -> AnyTierConfig:
    """Validate one tier's options; its ``type`` chooses the model.

    Raises:
        ConfigError: see ``parse_config``.
    """
    if not isinstance(data, dict):
        known = known_types(registered)
        raise Mistakes([("", f"{show(data)} is not a mapping; a tier has a type, one of {', '.join(known)}")])
    tier_type = data.get("type")
    model: type[TierConfig] | type[ExternalTierConfig]
    shown = show(tier_type)  # the text before expansion, because a variable's value may be secret
    try:
        tier_type = expand(tier_type)
    except ValueError as e:
        raise Mistakes([("type", f"{shown} {e}")]) from None
    if tier_type != data.get("type"):
        shown += ", with its variables replaced,"
    if not isinstance(tier_type, str):
        problem = "is required" if tier_type is None else f"{shown} is not a tier type"
        raise Mistakes([("type", f"{problem}; accepted: {', '.join(known_types(registered))}")])
    data = data | {"type": tier_type}
    if data.get("module_path") in (None, ""):  # the same as leaving it out
        data = {name: value for name, value in data.items() if name != "module_path"}
    data = as_store_tier(data)
    tier_type = data["type"]
    if tier_type != "store" and "module_path" in data:
        model = ExternalTierConfig
    elif tier_type in TIER_MODELS:
        model = TIER_MODELS[tier_type]
    elif tier_type in (known := known_types(registered)):
        model = ExternalTierConfig
    else:
        meant = did_you_mean(tier_type, known)
        accepted = f"accepted: {', '.join(known)}, or a class with module_path"
        told = f"did you mean {meant}? ({accepted})" if meant else accepted
        raise Mistakes([("type", f"{shown} is not a tier type; {told}")])
    try:
        tier = model.model_validate(data, context={"folder": folder})
    except ValidationError as e:
        # "from None": pydantic's exception contains the values, which may be secret.
        raise Mistakes(explain(e, model, data)) from None
    if isinstance(tier, TierConfig):
        try:
            tier.check()
        except ConfigError as e:
            raise Mistakes([(e.field, e.message)]) from None
    return tier


def as_store_tier(data: dict[str, Any]) -> dict[str, Any]:
    """Translate a type that a package registered for its store into ``type: store`` with the package's module."""
    tier_type = data["type"]
    if tier_type in TIER_MODELS or "module_path" in data:
        return data
    place = _store_entry_points().get(tier_type)
    if place is None:
        return data
    return {"name": tier_type} | data | {"type": "store", "module_path": place}


def json_schema() -> dict[str, Any]:
    """JSON schema of the YAML file, for editors."""
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
    for name, definition in definitions.items():
        if name != ExternalTierConfig.__name__:  # whose options are its own
            _accept_variables(definition.get("properties", {}))
    _accept_variables(schema["properties"])
    schema["patternProperties"] = {"^x-": {}}
    # ExternalTierConfig allows any key. Without this condition it would also match a built-in tier with a bad key.
    definitions["ExternalTierConfig"]["anyOf"] = [
        {
            "required": ["module_path"],
            "properties": {"module_path": {"type": "string", "minLength": 1}, "type": {"not": {"const": "store"}}},
        },
        {"properties": {"type": {"not": {"enum": sorted(TIER_MODELS)}}}},
    ]
    return schema


def _accept_variables(properties: dict[str, dict[str, Any]]) -> None:
    """Let an editor accept ``$NAME`` for each value but lists and mappings."""
    for name in properties.keys() - AS_WRITTEN:
        accepted = properties[name]
        if "$ref" not in accepted and accepted.get("type") not in ("array", "object"):
            properties[name] = {"anyOf": [accepted, {"type": "string", "pattern": r"\$"}]}


def known_types(registered: Collection[str]) -> list[str]:
    """All tier types that need no ``module_path``, sorted.

    Slow: reading the entry points of all installed packages takes some milliseconds.
    """
    installed = [entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)]
    return sorted({*TIER_MODELS, *registered, *installed, *_store_entry_points()})


def _names(model: type[BaseModel]) -> str:
    return ", ".join(sorted(model.model_fields))


def _store_entry_points() -> dict[str, str]:
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=STORE_ENTRY_POINT_GROUP)}
