"""Refuses engines whose workers are not all on the scheduler's host.

Each host has a region of its own under one engine's name, and the tiers, beside the scheduler, see that host's. Of
workers elsewhere it holds zeros, which would be sealed as good; and what is loaded into it never reaches them.

Way ``spec`` counts who has mapped the region. Way ``tier`` has vLLM's region, which does not say, and goes by how vLLM
was told to start its workers.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from tiers.errors import ConfigError


def check_one_host(vllm_config: Any) -> None:
    """Go by the engine's config. To be asked where the scheduler is, once the workers run.

    Raises:
        ConfigError: the workers are on several hosts, or not where the scheduler is.
    """
    parallel = vllm_config.parallel_config
    count = getattr(parallel, "nnodes_within_dp", 1)  # read in 0.32 and 0.33; older ones may lack it
    if count > 1:
        raise refusal(f"--nnodes puts the workers on {count} hosts")
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise refusal("external_launcher gives each worker a scheduler, and so a region, of its own")
    if parallel.distributed_executor_backend == "ray" and parallel.placement_group is not None:
        nodes = _ray_nodes(parallel.placement_group)
        if len(nodes) > 1:
            raise refusal(f"Ray has put scheduler and workers on {len(nodes)} nodes")


def refusal(why: str) -> ConfigError:
    """The error for such an engine."""
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
