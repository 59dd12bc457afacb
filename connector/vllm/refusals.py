"""Refuses engines whose workers are on several hosts, or that use an incompatible connector beside kvtiers'."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from ...tiers.errors import ConfigError
from ..vllm_config import shared_storage_instead

#: kvtiers' connectors, and vLLM's connectors that load between steps or not at all (source: vLLM 0.28 to 0.33).
_LOAD_BETWEEN_STEPS = (
    "ExampleHiddenStatesConnector",
    "HF3FSKVConnector",
    "KVTiersConnector",
    "LMCacheMPConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",  # unless it has load_async: false
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",  # from 0.33 on: unless it has sync_load_budget_bytes
    "SharedStorageConnector",
    "SimpleCPUOffloadConnector",
)


def check_siblings() -> None:
    """Refuse a second KVTiersConnector in a ``MultiConnector``, and connectors that may load within a step.

    Such a connector reports only after a step which blocks it could not fill. vLLM recomputes these blocks, but KV that
    the step computed from them would be stored as valid blocks. Unknown connectors are also refused.
    Call this in a worker, after vLLM has created all connectors of the process.

    Raises:
        ConfigError: names the refused connectors.
    """
    with_region = 0
    left = [get_kv_transfer_group()] if has_kv_transfer_group() else []
    refused = []
    while left:
        each = left.pop()
        if type(each).__name__ == "MultiConnector":
            left += each._connectors
        elif not _loads_between_steps(each):
            refused.append(type(each).__name__)
        with_region += type(each).__name__ == "KVTiersConnector"
    if refused:
        raise _no_sibling(", ".join(refused))
    if with_region > 1:
        raise ConfigError(
            f"MultiConnector holds KVTiersConnector {with_region} times, and their regions would have the same name: "
            "write one KVTiersConnector with the tiers of all of them, in the order in which they are to be asked",
            field="connectors",
        )


def check_step(scheduler_output: Any) -> None:
    """Refuse a step in which another connector loads. kvtiers' own connectors never load within a step.

    Raises:
        ConfigError: another connector loads in this step. vLLM reports this from 0.29 on.
    """
    if getattr(scheduler_output, "has_sync_kv_loads", False):
        raise _no_sibling("a connector of this engine")


def _loads_between_steps(connector: Any) -> bool:
    kind = type(connector)
    if kind.__name__ not in _LOAD_BETWEEN_STEPS or not kind.__module__.startswith(("vllm.", "kvtiers.connector.vllm.")):
        return False
    options = connector._kv_transfer_config.kv_connector_extra_config or {}
    return bool(options.get("load_async", True)) and not options.get("sync_load_budget_bytes")


def _no_sibling(who: str) -> ConfigError:
    return ConfigError(
        f"{who} may load within a step, and KV computed from a failed load would be stored as good. Take it out "
        "of MultiConnector, or leave out load_async: false and sync_load_budget_bytes. Accepted beside kvtiers: "
        f"{', '.join(_LOAD_BETWEEN_STEPS)}",
        field="connectors",
    )


def check_one_host(vllm_config: Any) -> None:
    """Refuse an engine whose options place workers on several hosts.

    Each host has its own region, and the tiers see only the scheduler's. In this region the KV of workers on other
    hosts is zeros, which would be stored as valid blocks. Call this in the scheduler's process, once the workers run.

    Raises:
        ConfigError: the workers are on several hosts, or not where the scheduler is.
    """
    parallel = vllm_config.parallel_config
    options = getattr(vllm_config.kv_transfer_config, "kv_connector_extra_config", None) or {}
    count = getattr(parallel, "nnodes_within_dp", 1)  # exists in 0.32 and 0.33; older releases may lack it
    if count > 1:
        raise several_hosts(f"--nnodes puts the workers on {count} hosts", options)
    check_one_scheduler(vllm_config)
    if parallel.distributed_executor_backend == "ray" and parallel.placement_group is not None:
        nodes = _ray_nodes(parallel.placement_group)
        if len(nodes) > 1:
            raise several_hosts(f"Ray has put scheduler and workers on {len(nodes)} nodes", options)


def check_one_scheduler(vllm_config: Any) -> None:
    """Refuse an engine in which each worker has its own scheduler and region: their lookups would differ.

    Raises:
        ConfigError: ``external_launcher`` gives each worker its own scheduler.
    """
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            "external_launcher gives each worker its own scheduler, and they would not agree on what is stored; use "
            "another executor, such as mp or ray",
            field="distributed_executor_backend",
        )


def several_hosts(why: str, options: Mapping[str, Any]) -> ConfigError:
    """The error for an engine with workers on several hosts, with the ``--kv-transfer-config`` to write instead.

    Args:
        options: of vLLM's OffloadingConnector.
    """
    instead = shared_storage_instead(options)
    other = f"Give each worker a tier of its own: --kv-transfer-config '{json.dumps(instead)}'. Or run"
    return ConfigError(
        f"{why}: KV of workers that are not on the scheduler's host cannot be stored this way. "
        f"{other if instead else 'Run'} each engine on one host",
        field="tiers",
    )


def _ray_nodes(placement_group: Any) -> set[str]:
    """Ray's ids of the nodes that run this process and its workers."""
    import ray
    from ray.util import placement_group_table

    device = current_platform.ray_device_key
    places = placement_group_table(placement_group)["bundles_to_node_id"]
    nodes = {places[index] for index, bundle in enumerate(placement_group.bundle_specs) if bundle.get(device)}
    return nodes | {ray.get_runtime_context().get_node_id()}
