"""Reads the options that name one tier for each rank, for SharedStorageConnector, SGLang and LMCache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...tiers.config.deployment import load_named, parse_config, parse_tier
from ...tiers.config.tier_options import BoundedTierConfig, ExternalTierConfig, FsspecTierConfig, TierConfig
from ...tiers.config.values import parse_duration
from ...tiers.config.variables import escape, expand
from ...tiers.errors import ConfigError
from ...tiers.registry import SecondaryTierFactory
from ...tiers.stores.files.mounts import file_system_type
from ...tiers.stores.fsspec_driver import LOCAL

#: Options of a tier that may be given beside ``shared_storage_path``.
SETTINGS = ("read_only", "max_bytes", "ttl", "min_free", "load")
_WAYS = ("shared_storage_path", "tier", "config_file")
#: Other options in ``kv_connector_extra_config``.
_OPTIONS = (
    "index", "storage_options", "blocks_per_chunk", "cpu_bytes_to_use", "lookup_deadline_s", "load_deadline_s",
    "storage_after_reset", "identity",
)  # fmt: skip
#: Parameters that vLLM reads from a request's ``kv_transfer_params``, and never from the connector's options.
REQUEST_PARAMETERS = ("kv_load_tiers", "max_load_tokens", "max_offload_tokens")
OF_A_REQUEST = "it is a parameter of a request; write it into the request's kv_transfer_params"
LOAD_DEADLINE_S = 20.0
CPU_BYTES = "1GiB"

_PLACES = ("bucket", "prefix", "root_dir", "url")  # options of the tier that ``shared_storage_path`` becomes


def rank_tier(extra_config: Mapping[str, Any]) -> BoundedTierConfig:
    """Return the tier that a SharedStorageConnector's options name.

    Args:
        extra_config: exactly one of these; the connector's own options are ignored:

            - ``shared_storage_path`` (see ``place_at``), optionally with ``storage_options`` and ``SETTINGS``
            - ``tier``: a tier's options
            - ``config_file``: a deployment's YAML, with ``index`` if the file has several tiers

    Raises:
        ConfigError: not exactly one of the three is given, an option is unknown, or the tier cannot be shared by
            processes.
    """
    for name in sorted(extra_config.keys() - {*_WAYS, *_OPTIONS, *SETTINGS}):
        if name in REQUEST_PARAMETERS:
            raise ConfigError(f"is not accepted by SharedStorageConnector: {OF_A_REQUEST}", field=name)
        accepted = ", ".join((*_WAYS, *_OPTIONS, *SETTINGS))
        raise ConfigError(f"is not an option of SharedStorageConnector; accepted are {accepted}", field=name)
    ways = [name for name in _WAYS if extra_config.get(name)]
    if len(ways) != 1:
        raise ConfigError(
            f"{' and '.join(ways) or 'nothing'} is given; write one of shared_storage_path (a folder or a URL such as "
            "s3://bucket/folder), tier and config_file",
            field="shared_storage_path",
        )
    if ways != ["shared_storage_path"]:
        for name in {"storage_options", *SETTINGS} & extra_config.keys():
            raise ConfigError(f"is an option of the tier; write it there, not beside {ways[0]}", field=name)
        tier = _named(extra_config, ways[0])
    else:
        settings = {name: extra_config[name] for name in SETTINGS if name in extra_config}
        tier = place_at(extra_config["shared_storage_path"], extra_config.get("storage_options"), **settings)
    if "lookup_deadline_s" in extra_config:
        lookup_deadline_s = seconds_of(extra_config, "lookup_deadline_s", 0.0)
        tier = tier.model_copy(update={"lookup_deadline_s": lookup_deadline_s})
    return tier


def _named(extra_config: Mapping[str, Any], way: str) -> BoundedTierConfig:
    if way == "tier":
        try:
            return shareable(parse_tier(extra_config["tier"], SecondaryTierFactory.tier_types()))
        except ConfigError as e:
            raise ConfigError(e.message, field=f"tier.{e.field}".rstrip(".")) from None
    config_file = extra_config["config_file"]
    tiers = load_named(config_file, SecondaryTierFactory.tier_types()).tiers
    index = extra_config.get("index", 0 if len(tiers) == 1 else None)
    if not isinstance(index, int) or not 0 <= index < len(tiers):
        raise ConfigError(f"{config_file} has {len(tiers)} tiers; write 0..{len(tiers) - 1}", field="index")
    try:
        return shareable(tiers[index])
    except ConfigError as e:
        raise ConfigError(f"tiers[{index}] cannot be a tier of each rank: {e}", field="config_file") from e


def chunk_of(extra_config: Mapping[str, Any]) -> int:
    """Return the number of the engine's blocks in one stored block.

    The connector's own ``blocks_per_chunk`` overrides the ``blocks_per_chunk`` of ``config_file``. The default is 1.

    Raises:
        ConfigError: the value is not accepted.
    """
    if "blocks_per_chunk" in extra_config:
        options = {"region": {"size": CPU_BYTES}, "blocks_per_chunk": extra_config["blocks_per_chunk"]}
        return parse_config(options).blocks_per_chunk
    file = extra_config.get("config_file")
    return load_named(file, SecondaryTierFactory.tier_types()).blocks_per_chunk if file else 1


def staging_bytes(options: Mapping[str, Any], name: str = "cpu_bytes_to_use", default: str = CPU_BYTES) -> int:
    """Return the memory of one rank through which blocks pass on their way between the engine and the tier.

    Args:
        name: the option that has the size.

    Raises:
        ConfigError: the value is not a size.
    """
    try:
        return parse_config({"region": {"size": options.get(name, default)}}).region.size
    except ConfigError as e:
        raise ConfigError(e.message, field=name) from None


def ignored_options(extra_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``identity.ignore``, from the connector's options if they have ``identity``, else from ``config_file``.

    Args:
        extra_config: an engine's options for kvtiers, in any of the ways.

    Raises:
        ConfigError: lists the mistakes.
    """
    if "identity" in extra_config:
        return parse_config({"region": {"size": "1MiB"}, "identity": extra_config["identity"]}).identity.ignore
    file = extra_config.get("config_file")
    return () if file is None else load_named(file, SecondaryTierFactory.tier_types()).identity.ignore


def seconds_of(extra_config: Mapping[str, Any], name: str, default: float) -> float:
    """Return one of the connector's own options, in seconds.

    Raises:
        ConfigError: the value is not a duration above 0.
    """
    value = extra_config.get(name, default)
    try:
        seconds = parse_duration(value)
    except ValueError as e:
        raise ConfigError(f"{value!r} {e}", field=name) from None
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{value!r} is not accepted; write a duration above 0s", field=name)
    return seconds


def shareable(tier: TierConfig | ExternalTierConfig) -> BoundedTierConfig:
    """Return the tier, if the scheduler's process can read the blocks that a worker's process stores in it.

    Raises:
        ConfigError: names the tier's type, or its URL.
    """
    if not isinstance(tier, BoundedTierConfig):
        raise ConfigError(f"{tier.type} cannot be shared by processes; write fs, nfs, s3 or fsspec", field="type")
    if isinstance(tier, FsspecTierConfig) and "memory" in (part.partition("://")[0] for part in tier.url.split("::")):
        raise ConfigError("memory:// cannot be shared by processes, because each process has its own", field="url")
    return tier


def place_at(url: str, storage_options: Mapping[str, Any] | None = None, **settings: Any) -> BoundedTierConfig:
    """Return the tier at a place.

    Args:
        url: a folder, or any fsspec URL, as it is written in a configuration: variables are replaced. A bucket,
            ``s3://bucket/folder``, is accessed as by an ``s3`` tier; with ``storage_options``, through s3fs.
        storage_options: passed to the fsspec file system; not for a folder.
        settings: options named in ``SETTINGS``.

    Raises:
        ConfigError: names the option that is not accepted.
    """
    try:
        url = expand(url)
    except ValueError as e:
        raise ConfigError(str(e), field="shared_storage_path") from None
    folder = local_folder(url)
    scheme, _, rest = url.partition("://")
    if folder is not None:
        kind = "nfs" if file_system_type(folder).startswith("nfs") else "fs"
        # A user may name a link. Tiers follow no link at their root, because other users might put a link there.
        options: dict[str, Any] = {"type": kind, "root_dir": escape(os.path.realpath(folder))}
    elif scheme == "s3" and not storage_options:
        bucket, _, prefix = rest.partition("/")
        options = {"type": "s3", "bucket": escape(bucket), "prefix": escape(prefix.strip("/"))}
    else:
        options = {"type": "fsspec", "url": escape(url), "storage_options": storage_options or {}}
    try:
        tier = parse_tier({**options, **settings})
    except ConfigError as e:
        if e.field in _PLACES:
            raise ConfigError(e.message, field="shared_storage_path") from None
        raise
    try:
        return shareable(tier)
    except ConfigError as e:
        raise ConfigError(e.message, field="shared_storage_path") from None


def local_folder(url: str) -> str | None:
    """Return the absolute path of a local folder, given as a path or a URL; None for a remote URL.

    Raises:
        ConfigError: the value is not a non-empty string.
    """
    if not isinstance(url, str) or not url:
        raise ConfigError(
            f"{url!r} is not accepted; write a folder or a URL such as s3://bucket/folder", field="shared_storage_path"
        )
    scheme, separator, rest = url.partition("://")
    if separator and scheme not in LOCAL:
        return None
    return os.path.abspath(os.path.expanduser(rest if separator else url))
