"""Engines that kvtiers refuses because of the hosts of their workers, or of the connectors beside ours."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from kvtiers.tiers.errors import ConfigError

#: vLLM's connectors that load between steps, or load nothing (read in 0.28 to 0.33), and kvtiers' own.
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
    """Refuse connectors beside ours (``MultiConnector``) that may load within a step.

    Such a connector says only after a step which blocks it could not fill. vLLM computes those blocks again, but what
    the step computed from them would be stored as good. A connector that kvtiers does not know is refused as
    well. Call this in a worker, after vLLM has made all connectors of the process.

    Raises:
        ConfigError: names these connectors.
    """
    left = [get_kv_transfer_group()] if has_kv_transfer_group() else []
    refused = []
    while left:
        each = left.pop()
        if type(each).__name__ == "MultiConnector":
            left += each._connectors
        elif not _loads_between_steps(each):
            refused.append(type(each).__name__)
    if refused:
        raise _no_sibling(", ".join(refused))


def check_step(scheduler_output: Any) -> None:
    """Refuse a step in which another connector loads. kvtiers' own connectors never load within a step.

    Raises:
        ConfigError: there is such a load. vLLM says so from 0.29 on.
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
    """Refuse an engine with workers on several hosts, by how vLLM was told to start them.

    Each host has a region of its own, and the tiers see the scheduler's. There the KV of workers on other hosts is
    zeros, which would be sealed as good. Call this where the scheduler is, once the workers run.

    Raises:
        ConfigError: the workers are on several hosts, or not where the scheduler is.
    """
    parallel = vllm_config.parallel_config
    count = getattr(parallel, "nnodes_within_dp", 1)  # read in 0.32 and 0.33; older ones may lack it
    if count > 1:
        raise several_hosts(f"--nnodes puts the workers on {count} hosts")
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise several_hosts("external_launcher gives each worker a scheduler, and so a region, of its own")
    if parallel.distributed_executor_backend == "ray" and parallel.placement_group is not None:
        nodes = _ray_nodes(parallel.placement_group)
        if len(nodes) > 1:
            raise several_hosts(f"Ray has put scheduler and workers on {len(nodes)} nodes")


def several_hosts(why: str) -> ConfigError:
    """The refusal of an engine with workers on several hosts."""
    return ConfigError(
        f"{why}: KV of workers that are not on the scheduler's host cannot be stored this way. Accepted are engines on "
        "one host each (such as data parallel ones), or SharedStorageConnector on storage that all hosts share",
        field="tiers",
    )


def _ray_nodes(placement_group: Any) -> set[str]:
    """Ray's ids of the nodes that have this process and its workers."""
    import ray
    from ray.util import placement_group_table

    device = current_platform.ray_device_key
    places = placement_group_table(placement_group)["bundles_to_node_id"]
    nodes = {places[index] for index, bundle in enumerate(placement_group.bundle_specs) if bundle.get(device)}
    return nodes | {ray.get_runtime_context().get_node_id()}
