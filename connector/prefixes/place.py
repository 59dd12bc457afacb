"""The storage of SharedStorageConnector's prefixes, beside a tier's blocks or at a URL, as the options of a tier."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...tiers.capacity.records import PREFIXES_FOLDER
from ...tiers.config.deployment import load_named, parse_tier
from ...tiers.config.tier_options import (
    BoundedTierConfig,
    ExternalTierConfig,
    FsspecTierConfig,
    FsTierConfig,
    NfsTierConfig,
    S3TierConfig,
    TierConfig,
)
from ...tiers.config.values import parse_duration
from ...tiers.config.variables import escape, expand
from ...tiers.errors import ConfigError
from ...tiers.registry import SecondaryTierFactory
from ...tiers.stores.files.mounts import file_system_type
from ...tiers.stores.fsspec_driver import LOCAL

#: Options of a tier that may be given beside ``shared_storage_path``.
SETTINGS = ("read_only", "max_bytes", "ttl", "min_free")
_WAYS = ("shared_storage_path", "tier", "config_file")
#: Other options in ``kv_connector_extra_config``.
_OPTIONS = ("index", "storage_options", "lookup_deadline_s", "load_deadline_s", "storage_after_reset", "identity")
#: Parameters that vLLM reads from a request's ``kv_transfer_params``, and never from the connector's options.
REQUEST_PARAMETERS = ("kv_load_tiers", "max_load_tokens", "max_offload_tokens")
OF_A_REQUEST = "it is a parameter of a request; write it into the request's kv_transfer_params"

_PLACES = ("bucket", "prefix", "root_dir", "url")  # options that ``shared_storage_path`` is translated to


def shared_place(extra_config: Mapping[str, Any]) -> BoundedTierConfig:
    """Return the storage that a SharedStorageConnector's options name.

    Args:
        extra_config: exactly one of these; the connector's own options are ignored:

            - ``shared_storage_path`` (see ``place_at``), optionally with ``storage_options`` and ``SETTINGS``
            - ``tier``: a tier's options
            - ``config_file``: a deployment's YAML, with ``index`` if the file has several tiers

    Raises:
        ConfigError: not exactly one of the three is given, an option is unknown, or the tier cannot store prefixes.
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
    else:
        settings = {name: extra_config[name] for name in SETTINGS if name in extra_config}
        return place_at(extra_config["shared_storage_path"], extra_config.get("storage_options"), **settings)
    if ways == ["tier"]:
        try:
            return place_of_prefixes(parse_tier(extra_config["tier"], SecondaryTierFactory.tier_types()))
        except ConfigError as e:
            raise ConfigError(e.message, field=f"tier.{e.field}".rstrip(".")) from None
    config_file = extra_config["config_file"]
    tiers = load_named(config_file, SecondaryTierFactory.tier_types()).tiers
    index = extra_config.get("index", 0 if len(tiers) == 1 else None)
    if not isinstance(index, int) or not 0 <= index < len(tiers):
        raise ConfigError(f"{config_file} has {len(tiers)} tiers; write 0..{len(tiers) - 1}", field="index")
    try:
        return place_of_prefixes(tiers[index])
    except ConfigError as e:
        raise ConfigError(f"tiers[{index}] cannot store plain prefixes: {e}", field="config_file") from e


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


def place_of_prefixes(tier: TierConfig | ExternalTierConfig) -> BoundedTierConfig:
    """Return the place beside a tier's blocks, with the tier's limits. A bucket or URL is accessed as the tier does.

    Raises:
        ConfigError: names the tier's option that cannot be honored for prefix files.
    """
    if not isinstance(tier, FsTierConfig | NfsTierConfig | FsspecTierConfig | S3TierConfig):
        raise ConfigError(f"{tier.type} has no place for prefix files; fs, nfs, s3 and fsspec have", field="type")
    if tier.encrypt != "none":
        raise ConfigError("prefix files are plain safetensors, which a key cannot protect", field="encrypt")
    if isinstance(tier, S3TierConfig):
        return tier.model_copy(update={"prefix": "/".join(filter(None, (tier.prefix.strip("/"), PREFIXES_FOLDER)))})
    # A local folder is accessed as such, also one that is given as a URL: fsspec's driver would follow links in it.
    if isinstance(tier, FsspecTierConfig):
        folder = local_folder(tier.url)
        if folder is None:
            return tier.model_copy(update={"url": f"{tier.url.rstrip('/')}/{PREFIXES_FOLDER}"})
    else:
        folder = tier.root_dir
    kept = {name: getattr(tier, name) for name in SETTINGS if name in tier.model_fields_set}
    return place_at(escape(os.path.join(folder, PREFIXES_FOLDER)), **kept)  # it is parsed again


def place_at(url: str, storage_options: Mapping[str, Any] | None = None, **settings: Any) -> BoundedTierConfig:
    """Return a place that belongs to no tier.

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
        options: dict[str, Any] = {"type": kind, "root_dir": escape(folder)}
    elif scheme == "s3" and not storage_options:
        bucket, _, prefix = rest.partition("/")
        options = {"type": "s3", "bucket": escape(bucket), "prefix": escape(prefix.strip("/"))}
    else:
        options = {"type": "fsspec", "url": escape(url), "storage_options": storage_options or {}}
    try:
        place = parse_tier({**options, **settings})
    except ConfigError as e:
        if e.field in _PLACES:
            raise ConfigError(e.message, field="shared_storage_path") from None
        raise
    assert isinstance(place, BoundedTierConfig)
    return place


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
