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
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tiers.errors import ConfigError

CONFIG_FILE_BYTES_MAX = 1 << 20
ENTRY_POINT_GROUP = "kvtiers.tiers"

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", 1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SIZE_MAX = 1 << 60


def parse_size(value: object) -> int:
    """Bytes of "10GiB", "1.5 MiB", "4096" or 4096. KiB, MiB, … are powers of 1024, KB, MB, … of 1000.

    Raises:
        ValueError: says what would be accepted.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2] not in _UNITS:
            number = re.match(r"\s*(\d+)", value) if isinstance(value, str) else None
            raise ValueError(f"is not a size; write {number[1] if number else 10}GiB")
        size = int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if not 0 <= size <= _SIZE_MAX:
        raise ValueError("is out of range; accepted is 0 up to 1024PiB")
    return size


def _expand_path(value: object) -> object:
    return os.path.expanduser(os.path.expandvars(value)) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(parse_size), Field(json_schema_extra={"type": ["integer", "string"]})]
ExpandedPath = Annotated[str, BeforeValidator(_expand_path), Field(min_length=1, max_length=3072)]
Threads = Annotated[int, Field(ge=1, le=256)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


def default_threads() -> int:
    """Threads of one kind on a fast medium: copying keeps a core busy, so more than the cores buys nothing."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class RegionConfig(_Model):
    """The CPU region: the primary tier that every block passes through."""

    size: Size = Field(description="Bytes of CPU memory for blocks.")
    eviction_policy: Literal["lru", "arc"] = Field("lru", description="Which blocks leave the region first.")
    promotion_wait_s: Annotated[float, Field(ge=0, le=60)] = Field(
        0.5, description="How long a hit waits for room in the region before it counts as a miss."
    )
    instance_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")] | None = Field(
        None, description="Name of the region in /dev/shm; by default the engine's id."
    )

    @property
    def size_bytes(self) -> int:
        """``size`` in bytes."""
        return self.size


class TierConfig(_Model):
    """What every built-in tier takes."""

    type: str = Field(description="Which tier.")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = Field(
        None, description="Label in metrics and logs; by default the type, numbered where a type occurs twice."
    )
    n_read_threads: Threads = Field(default_factory=default_threads, description="Threads that prefer loads.")
    n_write_threads: Threads = Field(default_factory=default_threads, description="Threads that prefer stores.")
    task_bytes: Size = Field(
        4 << 20, description="Bytes one pool task moves: small blocks are handled in batches of this size."
    )
    jobs_max: Annotated[int, Field(ge=1, le=1_000_000)] = Field(1024, description="Jobs in flight; more are refused.")
    bytes_in_flight_max: Size = Field(
        8 << 30, description="Payload bytes of jobs in flight; stores beyond it are dropped and counted."
    )
    lookup_threads: Threads = Field(2, description="Threads that ask the storage whether blocks are there.")
    lookup_deadline_s: Seconds = Field(0.2, description="A lookup not answered by then is a miss.")
    present_ttl_s: Seconds = Field(60.0, description="How long 'present' is believed.")
    absent_ttl_s: Annotated[float, Field(ge=0, le=86_400)] = Field(1.0, description="How long 'absent' is believed.")
    lookup_cache_keys: Annotated[int, Field(ge=1, le=100_000_000)] = Field(
        262_144, description="Lookup answers kept in memory."
    )
    checksum: Literal["xxh3_64", "xxh3_128"] = Field("xxh3_64", description="Checksum of new blocks.")
    shutdown_s: Annotated[float, Field(ge=0, le=60)] = Field(
        4.0, description="How long shutdown waits for running jobs. vLLM kills its engine after 5 s."
    )
    parallel_agnostic: bool = Field(
        False,
        description="Share blocks between parallel layouts, where the engine says that its bytes allow it.",
    )


class FsTierConfig(TierConfig):
    """Blocks as files under a local folder."""

    type: Literal["fs"] = "fs"
    root_dir: ExpandedPath = Field(description="Folder of the blocks; made if absent. ~ and $VARIABLES are expanded.")
    min_free: Size = Field(1 << 30, description="Free space the tier leaves on the file system.")
    durability: Literal["none", "data"] = Field(
        "none", description="data: fsync each block before it is visible (0.6 -> 8 ms at 2 MiB)."
    )


class MemoryTierConfig(TierConfig):
    """Blocks in this process's memory: for tests and for trying things out."""

    type: Literal["memory"] = "memory"
    max_bytes: Size | None = Field(None, description="Beyond it the least recently used blocks leave.")


class ExternalTierConfig(BaseModel):
    """A tier that is not ours: its options are its own business."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    module_path: str | None = Field(None, description="Module with a class named like `type`.")


TIER_MODELS: dict[str, type[TierConfig]] = {
    "fs": FsTierConfig,
    "memory": MemoryTierConfig,
}

AnyTierConfig = TierConfig | ExternalTierConfig


class DeploymentConfig(_Model):
    """One deployment: the region and the tiers behind it."""

    region: RegionConfig
    blocks_per_chunk: Annotated[int, Field(ge=1, le=4096)] = Field(
        1,
        description="Engine blocks in one stored block. More means fewer, larger copies, files and requests.",
    )
    tiers: tuple[AnyTierConfig, ...] = Field((), description="Asked in this order; all of them are stored to.")


def load_config(path: str | os.PathLike[str], registered: Collection[str] = ()) -> DeploymentConfig:
    """Read a deployment's YAML file.

    Args:
        registered: tier types made known to the factory by ``register_tier``, accepted beside the built-in ones.

    Raises:
        ConfigError: lists every mistake with its path, the value and what is accepted.
    """
    try:
        raw = Path(path).read_bytes()[: CONFIG_FILE_BYTES_MAX + 1]
    except OSError as e:
        raise ConfigError(f"cannot be read: {e.strerror}", field=str(path)) from e
    if len(raw) > CONFIG_FILE_BYTES_MAX:
        raise ConfigError(f"is larger than {CONFIG_FILE_BYTES_MAX} bytes", field=str(path))
    try:
        data = yaml.safe_load(raw)
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"is no YAML: {e}", field=str(path)) from e
    return parse_config(data, registered)


def parse_config(data: object, registered: Collection[str] = ()) -> DeploymentConfig:
    """Validate a deployment given as plain data.

    Raises:
        ConfigError: lists every mistake with its path, the value and what is accepted.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"a mapping with the keys {_names(DeploymentConfig)} is accepted, not {_show(data)}")
    data = dict(data)
    mistakes: list[tuple[str, str]] = []
    tiers: list[AnyTierConfig] = []
    raw_tiers = data.pop("tiers", ())
    if not isinstance(raw_tiers, list | tuple):
        mistakes.append(("tiers", f"{_show(raw_tiers)} is not a list of tiers"))
        raw_tiers = ()
    for index, raw in enumerate(raw_tiers):
        try:
            tiers.append(parse_tier(raw, registered))
        except _Mistakes as e:
            mistakes += [(_join(f"tiers[{index}]", field), message) for field, message in e.found]
    try:
        config = DeploymentConfig.model_validate(data | {"tiers": ()})
    except ValidationError as e:
        mistakes = _explain(e, DeploymentConfig) + mistakes
    if mistakes:
        raise _Mistakes(mistakes)
    return config.model_copy(update={"tiers": tuple(_named(tiers))})


def _named(tiers: list[AnyTierConfig]) -> list[AnyTierConfig]:
    """Give every built-in tier a name of its own, so that metrics and logs tell two tiers of one type apart."""
    types = [tier.type for tier in tiers]
    named: list[AnyTierConfig] = []
    for index, tier in enumerate(tiers):
        if isinstance(tier, TierConfig) and tier.name is None and types.count(tier.type) > 1:
            tier = tier.model_copy(update={"name": f"{tier.type}{index}"})
        named.append(tier)
    names = [tier.name or tier.type for tier in named if isinstance(tier, TierConfig)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{name!r} is the name of {names.count(name)} tiers; accepted are different names", field="tiers"
            )
    return named


def parse_tier(data: object, registered: Collection[str] = ()) -> AnyTierConfig:
    """Validate one tier's options; its ``type`` chooses the model.

    Raises:
        ConfigError: as ``parse_config``.
    """
    known = sorted({*TIER_MODELS, *registered, *_entry_points()})
    if not isinstance(data, dict):
        raise _Mistakes([("", f"{_show(data)} is not a mapping; a tier has a type, one of {', '.join(known)}")])
    tier_type = data.get("type")
    model: type[TierConfig] | type[ExternalTierConfig]
    if not isinstance(tier_type, str):
        raise _Mistakes([("type", f"{_show(tier_type)} is no tier type; accepted: {', '.join(known)}")])
    if "module_path" in data or (tier_type not in TIER_MODELS and tier_type in known):
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
        return model.model_validate(data)
    except ValidationError as e:
        raise _Mistakes(_explain(e, model)) from e


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
    return schema


class _Mistakes(ConfigError):
    """ConfigError with one line a mistake."""

    def __init__(self, found: list[tuple[str, str]]) -> None:
        self.found = found
        if len(found) == 1:
            super().__init__(found[0][1], field=found[0][0])
        else:
            super().__init__("\n".join(f"{field}: {message}" for field, message in found))


def _entry_points() -> list[str]:
    return [entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)]


def _explain(error: ValidationError, model: type[BaseModel]) -> list[tuple[str, str]]:
    explained = []
    for item in error.errors(include_url=False):
        path = ""
        for part in item["loc"]:
            path = f"{path}[{part}]" if isinstance(part, int) else _join(path, str(part))
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            text = "is required"
        elif item["type"] == "extra_forbidden":
            owner = _model_at(model, item["loc"][:-1])
            text = f"is no key; accepted: {_names(owner)}"
        elif item["type"] == "value_error":
            text = f"{_show(item['input'])} {message}"
        else:
            text = f"{_show(item['input'])} is not accepted: {message[:1].lower()}{message[1:]}"
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
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…'"
