"""Converts a deployment's YAML to vLLM's ``--kv-transfer-config`` for each of the three ways, and back for ``spec``.

Does not import vllm.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from ..tiers.config.deployment import DeploymentConfig, RegionConfig, load_named, parse_config
from ..tiers.config.tier_options import FsspecTierConfig, S3TierConfig, StoreTierConfig, TierConfig
from ..tiers.errors import ConfigError, public_url
from ..tiers.plain_logs import get_logger
from ..tiers.registry import SecondaryTierFactory
from .ranks.place import OF_A_REQUEST, REQUEST_PARAMETERS, ignored_options, shareable

logger = get_logger(__name__)

#: Environment variable that names the deployment's file if the connector's options do not.
CONFIG_VARIABLE = "KVTIERS_CONFIG"
_INLINE = ("cpu_bytes_to_use", "eviction_policy", "tiers")
#: Options that are accepted elsewhere: in the file, or by other connectors.
_ELSEWHERE = {*DeploymentConfig.model_fields, *RegionConfig.model_fields, "secondary_tiers", "tier"}
#: Other options of KVTiersSpec, and the options of vLLM's OffloadingConnector and TieringOffloadingSpec.
_OURS = ("config_file", "identity", "storage_after_reset")
_VLLMS = (
    "spec_name", "spec_module_path", "blocks_per_chunk", "block_size", "canonical_layout", "offload_prompt_only",
    "self_describing_kv_events", "backpressure",
)  # fmt: skip
_REFUSED_BY_BOTH = {
    **dict.fromkeys(REQUEST_PARAMETERS, OF_A_REQUEST),
    "sync_load_budget_bytes": "kvtiers loads between steps; leave it out",
    "store_threshold": "kvtiers stores every block that vLLM offers; leave it out",
    "max_tracker_size": "it belongs to store_threshold, and kvtiers stores every block that vLLM offers; leave it out",
    "cache_policy_module_path": "the region evicts by lru or arc; write eviction_policy instead",
    "tier_poll_interval_s": "the engine serves kvtiers' tiers in each step; leave it out",
}
#: Way -> option of vLLM that the way does not support -> why, and what to do. (``canonical_layout``: see KVTiersSpec.)
_REFUSED: Mapping[str, Mapping[str, str]] = {
    "spec": {
        **_REFUSED_BY_BOTH,
        **dict.fromkeys(("spec_name", "spec_module_path"), 'it goes with "way": "tier" only; leave it out'),
        "backpressure": "way spec limits stores to a slow tier by itself; leave it out",
    },
    "tier": {
        **_REFUSED_BY_BOTH,
        "storage_after_reset": "vLLM does not tell tiers about resets; leave it out, or use way spec",
    },
}


def vllm_config(deployment_path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the value of vLLM's ``--kv-transfer-config`` for a deployment, for each way that it supports.

    The values contain no secrets: if a place needs a secret, the value names the file instead.

    Returns:
        Way -> value of ``--kv-transfer-config``:

        - ``spec``: KVTiersSpec; everything in the file applies.
        - ``tier``: kvtiers' tiers behind vLLM's own TieringOffloadingSpec.
        - ``shared_storage``: a tier of each rank, by the first tier that other processes can read, if there is one.

    Raises:
        ConfigError: lists the file's mistakes.
    """
    deployment = load_named(deployment_path, SecondaryTierFactory.tier_types())
    path = os.path.abspath(deployment_path)
    offloading = {"kv_connector": "KVTiersConnector", "kv_role": "kv_both"}
    ways: dict[str, Any] = {
        "spec": {**offloading, "kv_connector_extra_config": {"config_file": path}},
        "tier": {**offloading, "kv_connector_extra_config": {"way": "tier", "config_file": path}},
    }
    shared = _shared_storage(deployment, path)
    return ways | ({"shared_storage": shared} if shared else {})


def shared_storage_instead(extra_config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``--kv-transfer-config`` of the way ``shared_storage`` for an engine that was given another way.

    Args:
        extra_config: options of vLLM's OffloadingConnector, as ``connector_options`` returns them.

    Returns:
        None if no tier can be a tier of each rank. If the options may hold a secret, a file is named instead.

    Raises:
        ConfigError: lists the mistakes.
    """
    registered = SecondaryTierFactory.tier_types()
    given = extra_config.get("secondary_tiers") or [extra_config]
    file = next((each["config_file"] for each in given if "config_file" in each), None)
    if file is not None:
        return _shared_storage(load_named(file, registered), os.path.abspath(file))
    tiers = [each["tier"] for each in given if "tier" in each] or extra_config.get("tiers", [])
    chunk = {name: extra_config[name] for name in ("blocks_per_chunk",) if name in extra_config}
    deployment = parse_config({"region": {"size": "1MiB"}, "tiers": tiers, **chunk}, registered)
    return _shared_storage(deployment, "/path/to/kvtiers.yaml")


def connector_options(extra_config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Convert the ``kv_connector_extra_config`` of KVTiersConnector to the options of vLLM's OffloadingConnector.

    Args:
        extra_config: ``way`` (``spec``, the default, or ``tier``), and the options of ``deployment_from``. If they
            name no deployment, the file in ``KVTIERS_CONFIG`` is used. Options of vLLM and unknown options are passed
            on to vLLM.

    Raises:
        ConfigError: see ``deployment_from``; or the way is unknown, or does not support an option of vLLM.
    """
    options = dict(extra_config)
    way = options.pop("way", "spec")
    if way not in tuple(_REFUSED):
        raise ConfigError(f"{way!r} is not accepted; write {' or '.join(_REFUSED)}", field="way")
    if not {"config_file", *_INLINE} & options.keys() and environ.get(CONFIG_VARIABLE):
        options["config_file"] = environ[CONFIG_VARIABLE]
    for name in sorted(options.keys() & _REFUSED[way].keys()):
        raise ConfigError(f"is not accepted by way {way}: {_REFUSED[way][name]}", field=name)
    if way == "spec":
        return {"spec_name": "KVTiersSpec", "spec_module_path": "kvtiers.vllm", **options}
    deployment = deployment_from(options)
    chunk = {} if "block_size" in options else {"blocks_per_chunk": deployment.blocks_per_chunk}
    entry = {"type": "KVTiersTier", "module_path": "kvtiers.vllm"}
    ignored = ignored_options(options)
    file = options.get("config_file")
    several = len(deployment.tiers) > 1
    if deployment.trace_requests is not None:
        logger.warning("trace_requests: way tier writes no lines, because vLLM's own manager finds the blocks")
    return {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": deployment.region.size,
        "eviction_policy": deployment.region.eviction_policy,
        **chunk,
        **{name: value for name, value in options.items() if name not in (*_INLINE, *_OURS)},
        **({"identity": {"ignore": [*ignored]}} if ignored else {}),
        "secondary_tiers": [
            {**entry, "tier": dict(tier)}
            if file is None
            else {**entry, "config_file": file} | ({"index": index} if several else {})
            for index, tier in enumerate(deployment.tiers)
        ],
    }


def deployment_from(extra_config: Mapping[str, Any]) -> DeploymentConfig:
    """Return the deployment that the ``kv_connector_extra_config`` of the way ``spec`` describes.

    Args:
        extra_config: either ``config_file``, or inline ``cpu_bytes_to_use`` (a size) with optional ``eviction_policy``
            and ``tiers``. Other options of the spec and of vLLM's connector are ignored.

    Raises:
        ConfigError: lists every mistake; or names an option that belongs in the file or to another connector, or that
            is misspelled.
    """
    for name in sorted(extra_config.keys() - {*_INLINE, *_OURS, *_VLLMS}):
        accepted = ", ".join((*_OURS, *_INLINE, *_VLLMS))
        if name not in _ELSEWHERE and not get_close_matches(name.lower(), (*_OURS, *_INLINE), cutoff=0.75):
            logger.warning("%s in kv_connector_extra_config is not read by KVTiersSpec, which knows %s", name, accepted)
            continue  # another release of vLLM may accept it
        absent = "" if {"tiers", "config_file"} & extra_config.keys() else " (tiers is absent)"
        raise ConfigError(
            f"is not an option of KVTiersSpec{absent}; accepted are {accepted}; write the deployment's other options "
            "in the file that config_file names",
            field=name,
        )
    registered = SecondaryTierFactory.tier_types()
    config_file = extra_config.get("config_file")
    if config_file is not None:
        if set(_INLINE) & extra_config.keys():
            raise ConfigError(
                "give either config_file, or cpu_bytes_to_use, tiers and eviction_policy", field="config_file"
            )
        return load_named(config_file, registered)
    if "cpu_bytes_to_use" not in extra_config:
        raise ConfigError("is required without config_file; write a size such as 4GiB", field="cpu_bytes_to_use")
    if "tiers" not in extra_config:
        logger.warning("tiers: none are given, so blocks are kept only in the region and are lost at exit")
    region = {"size": extra_config["cpu_bytes_to_use"]}
    if "eviction_policy" in extra_config:
        region["eviction_policy"] = extra_config["eviction_policy"]
    inline = {name: extra_config[name] for name in ("identity", "tiers") if name in extra_config}
    return parse_config({"region": region, **inline}, registered)


def keeps_storage(extra_config: Mapping[str, Any]) -> bool:
    """Whether ``storage_after_reset: keep`` is set: the engine keeps using storage after vLLM resets its connector.

    Raises:
        ConfigError: the value is not accepted.
    """
    chosen = extra_config.get("storage_after_reset", "off")
    if chosen not in ("off", "keep", False):  # YAML 1.1 reads off as False
        raise ConfigError(f"{chosen!r} is not accepted; write off or keep", field="storage_after_reset")
    return bool(chosen == "keep")


def why_not_shared(deployment_path: str | os.PathLike[str]) -> str:
    """Explain which tier's key rules out the way ``shared_storage`` for a deployment.

    Raises:
        ConfigError: lists the file's mistakes.
    """
    deployment = load_named(deployment_path, SecondaryTierFactory.tier_types())
    reasons = []
    for index, tier in enumerate(deployment.tiers):
        try:
            shareable(tier)
        except ConfigError as e:
            reasons.append(f"tiers[{index}].{e}")
    return "; ".join(reasons) or "tiers: the list is empty"


def _shared_storage(deployment: DeploymentConfig, path: str) -> dict[str, Any] | None:
    shared = _first_place(deployment, path)
    return shared and {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_module_path": "kvtiers.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": shared,
    }


def _first_place(deployment: DeploymentConfig, path: str) -> dict[str, Any] | None:
    for index, tier in enumerate(deployment.tiers):
        try:
            shareable(tier)
        except ConfigError:
            continue
        assert isinstance(tier, TierConfig)
        if _may_hold_secrets(tier):
            return {"config_file": path, "index": index} if len(deployment.tiers) > 1 else {"config_file": path}
        chunk = {"blocks_per_chunk": deployment.blocks_per_chunk} if deployment.blocks_per_chunk > 1 else {}
        return {"tier": {"type": tier.type, **tier.model_dump(mode="json", exclude_unset=True)}, **chunk}
    return None


def _may_hold_secrets(tier: TierConfig) -> bool:
    if isinstance(tier, StoreTierConfig):
        return bool(tier.options)
    if isinstance(tier, FsspecTierConfig):
        return bool(tier.storage_options) or public_url(tier.url) != tier.url
    return isinstance(tier, S3TierConfig) and public_url(tier.endpoint_url or "") != (tier.endpoint_url or "")
