"""From a deployment's YAML to vLLM's ``--kv-transfer-config``, for each of the three ways in. Imports no vllm."""

from __future__ import annotations

import os
from typing import Any

from tiers.config import load_config
from tiers.registry import SecondaryTierFactory
from tiers.tier_config import ExternalTierConfig, FsspecTierConfig, FsTierConfig, S3TierConfig, TierConfig


def vllm_config(deployment_path: str | os.PathLike[str]) -> dict[str, Any]:
    """What to give vLLM for a deployment.

    Returns:
        Way in -> the value of ``--kv-transfer-config``: ``spec`` (our spec: everything in the file applies), ``tier``
        (our tiers behind vLLM's own TieringOffloadingSpec) and, where a tier has a place that other processes can
        read, ``shared_storage`` (prefixes in the first such place).

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
    shared = next((place for place in map(_shared_place, deployment.tiers) if place), None)
    if shared:
        ways["shared_storage"] = {
            "kv_connector": "SharedStorageConnector",
            "kv_connector_module_path": "connector.vllm.shared_storage",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": shared,
        }
    return ways


def _shared_place(tier: TierConfig | ExternalTierConfig) -> dict[str, Any] | None:
    """Folder or URL of a tier's storage, beside its blocks."""
    if isinstance(tier, TierConfig) and tier.protection != "none":
        return None  # prefix files are plain safetensors, which the tier's keys do not protect
    if isinstance(tier, FsTierConfig):
        return {"shared_storage_path": os.path.join(os.path.abspath(tier.root_dir), "prefixes")}
    if isinstance(tier, FsspecTierConfig):
        return {"shared_storage_path": f"{tier.url.rstrip('/')}/prefixes", "storage_options": tier.storage_options}
    if isinstance(tier, S3TierConfig):
        folder = "/".join(part for part in (tier.bucket, tier.prefix.strip("/"), "prefixes") if part)
        place: dict[str, Any] = {"shared_storage_path": f"s3://{folder}"}
        client = {"endpoint_url": tier.endpoint_url, "region_name": tier.region}
        options: dict[str, Any] = {"client_kwargs": {name: value for name, value in client.items() if value}}
        if tier.profile:
            options["profile"] = tier.profile
        if options["client_kwargs"] or tier.profile:
            place["storage_options"] = options
        return place
    return None
