"""From a deployment's YAML to vLLM's ``--kv-transfer-config``, for each of the three ways in. Imports no vllm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tiers.config import DeploymentConfig, load_config
from tiers.errors import ConfigError, public_url
from tiers.registry import SecondaryTierFactory
from tiers.tier_config import (
    ExternalTierConfig,
    FsspecTierConfig,
    FsTierConfig,
    S3TierConfig,
    TierConfig,
)

_LIMITS = ("max_bytes", "ttl")

#: Options of tiers that would not hold for prefix files -> why.
_HINDRANCES = {
    **dict.fromkeys(("auth", "encrypt"), "prefix files are plain safetensors, which no key protects"),
    **dict.fromkeys(_LIMITS, "nothing removes prefix files, so they would not be bounded"),
    **dict.fromkeys(
        ("sse", "sse_kms_key_id", "role_arn", "storage_class"), "prefix files are written by s3fs, which is not told"
    ),
}


def vllm_config(deployment_path: str | os.PathLike[str]) -> dict[str, Any]:
    """What to give vLLM for a deployment.

    Returns:
        Way in -> the value of ``--kv-transfer-config``: ``spec`` (our spec: everything in the file applies), ``tier``
        (our tiers behind vLLM's own TieringOffloadingSpec) and, where a tier has a place that other processes can
        read, ``shared_storage`` (prefixes in the first such place). None has a secret in it: where a place needs one,
        the file is named instead.

    Raises:
        ConfigError: lists the file's mistakes.
    """
    deployment = load_config(deployment_path, SecondaryTierFactory.tier_types())
    path = os.path.abspath(deployment_path)
    offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    chunk = {"blocks_per_chunk": deployment.blocks_per_chunk}
    entry = {"type": "KVTiersTier", "module_path": "connector.vllm.tier", "config_file": path}
    several = len(deployment.tiers) > 1
    ways: dict[str, Any] = {
        "spec": {
            **offloading,
            "kv_connector_extra_config": {
                "spec_name": "KVTiersSpec",
                "spec_module_path": "connector.vllm.spec",
                "config_file": path,
                **chunk,
            },
        },
        "tier": {
            **offloading,
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": deployment.region.size_bytes,
                "eviction_policy": deployment.region.eviction_policy,
                **chunk,
                "secondary_tiers": [
                    {**entry, "index": index} if several else dict(entry) for index in range(len(deployment.tiers))
                ],
            },
        },
    }
    shared = _first_place(deployment, path)
    if shared:
        ways["shared_storage"] = {
            "kv_connector": "SharedStorageConnector",
            "kv_connector_module_path": "connector.vllm.shared_storage",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": shared,
        }
    return ways


def shared_place(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """``shared_storage_path``, ``storage_options`` and ``read_only`` of a SharedStorageConnector.

    Args:
        extra_config: has them, or ``config_file`` and, for a file with several tiers, ``index``.

    Raises:
        ConfigError: neither or both are given, or the tier has no such place.
    """
    path, config_file = extra_config.get("shared_storage_path"), extra_config.get("config_file")
    if bool(path) == bool(config_file):
        raise ConfigError(
            "is required, or config_file: a folder or a URL such as s3://bucket/folder", field="shared_storage_path"
        )
    if not config_file:
        read_only = extra_config.get("read_only", False)
        if not isinstance(read_only, bool):
            raise ConfigError(f"{read_only!r} is not accepted; write true or false", field="read_only")
        return {
            "shared_storage_path": path,
            "storage_options": extra_config.get("storage_options"),
            "read_only": read_only,
        }
    tiers = load_config(config_file, SecondaryTierFactory.tier_types()).tiers
    index = extra_config.get("index", 0 if len(tiers) == 1 else None)
    if not isinstance(index, int) or not 0 <= index < len(tiers):
        raise ConfigError(f"{config_file} has {len(tiers)} tiers; write 0..{len(tiers) - 1}", field="index")
    try:
        return _shared_place(tiers[index])
    except ConfigError as e:
        raise ConfigError(
            f"tiers[{index}] is no storage for plain and unbounded prefixes: {e}", field="config_file"
        ) from e


def why_not_shared(deployment_path: str | os.PathLike[str]) -> str:
    """Which key of each tier keeps the way ``shared_storage`` from a deployment that has it not.

    Raises:
        ConfigError: lists the file's mistakes.
    """
    reasons = []
    for index, tier in enumerate(load_config(deployment_path, SecondaryTierFactory.tier_types()).tiers):
        try:
            _shared_place(tier)
        except ConfigError as e:
            reasons.append(f"tiers[{index}].{e}")
    return "; ".join(reasons) or "tiers: there are none"


def _first_place(deployment: DeploymentConfig, path: str) -> dict[str, Any] | None:
    for index, tier in enumerate(deployment.tiers):
        try:
            place = _shared_place(tier)
        except ConfigError:
            continue
        if _may_hold_secrets(tier):
            return {"config_file": path, "index": index} if len(deployment.tiers) > 1 else {"config_file": path}
        return place
    return None


def _may_hold_secrets(tier: TierConfig | ExternalTierConfig) -> bool:
    if isinstance(tier, FsspecTierConfig):
        return bool(tier.storage_options) or public_url(tier.url) != tier.url
    return isinstance(tier, S3TierConfig) and public_url(tier.endpoint_url or "") != (tier.endpoint_url or "")


def _shared_place(tier: TierConfig | ExternalTierConfig) -> dict[str, Any]:
    """Folder or URL of a tier's storage, beside its blocks.

    Raises:
        ConfigError: names the key that would not hold for prefix files.
    """
    if not isinstance(tier, (FsTierConfig, FsspecTierConfig, S3TierConfig)):
        raise ConfigError(f"{tier.type} has no place for prefix files; fs, s3 and fsspec have", field="type")
    for name, reason in _HINDRANCES.items():
        if name in _LIMITS and tier.read_only:
            continue
        if getattr(tier, name, None) not in (None, "none"):
            raise ConfigError(reason, field=name)
    if isinstance(tier, S3TierConfig) and tier.embedded:
        raise ConfigError("only kvtiers demo has such a server; give an endpoint_url", field="embedded")
    access = {"read_only": True} if tier.read_only else {}
    if isinstance(tier, FsTierConfig):
        return {"shared_storage_path": os.path.join(os.path.abspath(tier.root_dir), "prefixes"), **access}
    if isinstance(tier, FsspecTierConfig):
        url = f"{tier.url.rstrip('/')}/prefixes"
        return {"shared_storage_path": url, "storage_options": tier.storage_options, **access}
    folder = "/".join(part for part in (tier.bucket, tier.prefix.strip("/"), "prefixes") if part)
    place: dict[str, Any] = {"shared_storage_path": f"s3://{folder}", **access}
    client = {"endpoint_url": tier.endpoint_url, "region_name": tier.region, "verify": tier.ca_bundle}
    options: dict[str, Any] = {"client_kwargs": {name: value for name, value in client.items() if value}}
    if not tier.verify:
        options["client_kwargs"]["verify"] = False
    if tier.profile:
        options["profile"] = tier.profile
    if tier.addressing_style != "auto":
        options["config_kwargs"] = {"s3": {"addressing_style": tier.addressing_style}}
    if any(options.values()):
        place["storage_options"] = options
    return place
