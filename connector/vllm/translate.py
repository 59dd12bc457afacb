"""Translates between vLLM's types and kvtiers' types. This module knows the differences between vLLM's releases.

Changes by release (source: ``vllm/v1/kv_offload`` of each release):

- 0.28: adds TransferJob, LookupResult, ``get_worker`` and OffloadingConfig.
- 0.29: sha256 block hashes are the same in every process even without PYTHONHASHSEED.
- 0.31: renames ``block_ids`` of a job to ``chunk_ids``; adds ``transfer_bytes`` of a result, ``backpressure_detector``,
  and ``max_load_tokens`` of a request.
- 0.32: adds ``cache_hit_source``.
- 0.33: adds ``expedited`` loads, ``on_reset_flushed``, ``config_info`` and the manager's ``lock``; no longer mixes up
  the blocks of a prompt that arrives in parts (see ``hold_back_stream``).
"""

from __future__ import annotations

import logging
import math
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    ReqContext,
)
from vllm.v1.kv_offload.base import OffloadingEvent as VllmEvent
from vllm.v1.kv_offload.tiering.base import JobResult as VllmJobResult

from ...tiers.base import JobMetadata, JobResult, OffloadingEvent
from ...tiers.blocks.file_mapper import MODEL_NAME_BYTES_MAX
from ...tiers.errors import ConfigError
from ...tiers.metrics import Metrics
from ...tiers.plain_logs import get_logger, log_once
from ..base import CacheConfig, EngineSpec, KVCacheGroup, ModelConfig, OffloadingConfig, ParallelConfig
from ..identity.model_files import value_digest
from ..identity.options import identity_digest, readable
from ..ranks.place import ignored_options
from . import versions
from .identity import identity, log_identity
from .weights import kv_revision

logger = get_logger(__name__)

_MISTAKES_BLOCKS_OF_STREAMS = (versions.release() or (0, 0)) < (0, 33)
_LEAKS_ADAPTERS_ON_CPU = (versions.release() or (0, 0)) < (0, 33)
_URL_END = 150
KERNEL_BLOCK_TOKENS = 16  # no CUDA attention kernel splits a block of up to 16 tokens

#: Tier type -> vLLM's name for where the tier keeps its blocks, for events and hit sources.
_LOCALITIES = {
    **dict.fromkeys(("fs", "memory"), Locality.LOCAL),
    **dict.fromkeys(("fsspec", "nfs", "s3"), Locality.REMOTE),
}


def warn_of_adapters(vllm_config: Any) -> None:
    """Warn, once per process, that vLLM's block hashes identify adapters only by name and path."""
    if getattr(vllm_config, "lora_config", None) is not None:
        log_once(
            logger,
            logging.WARNING,
            "LoRA adapters are known by name and path, as in vLLM's own prefix cache: give a retrained adapter a new "
            "name or path, or KV of the old adapter is loaded for it",
        )


def warn_of_reset() -> None:
    """Warn that the engine stops using its storage.

    vLLM resets its connector when weights may have been changed in place. It does not tell whether the weights changed,
    and to which weights. Blocks are stored under the weights at the engine's start. So after a reset the stored KV may
    belong to other weights, and newly computed KV must not be stored under the old name.
    """
    logger.warning(
        "vLLM has reset its connector, as it does when weights are changed in place, and to sleep or pause. Storage "
        "may hold KV of the old weights, so this engine no longer loads from storage or stores to it until it is "
        "restarted. If the weights never change, write 'storage_after_reset': 'keep'"
    )


def check_adapters(vllm_config: Any) -> None:
    """Refuse LoRA if vLLM applies adapters to requests without an adapter.

    In a batch with a LoRA request, vLLM's CPU kernels before 0.33 use -1, their mark for "no adapter", as an index,
    which selects the last of the ``max_loras`` slots. If the resulting KV were stored, it would be loaded after a
    restart as the base model's KV, even by a release without this bug.

    Raises:
        ConfigError: the message says how to fix the options.
    """
    if _LEAKS_ADAPTERS_ON_CPU and getattr(vllm_config, "lora_config", None) is not None and current_platform.is_cpu():
        raise ConfigError(
            f"on CPUs vLLM {versions.VERSION} applies an adapter to requests without one if they share a batch with "
            "LoRA requests, and the wrong KV would be stored as the base model's: use vLLM 0.33 or later, leave "
            "out --enable-lora, or run without a KV connector",
            field="enable_lora",
        )


def engine_spec(config: Any, vllm_config: Any, *, in_worker: bool = False) -> EngineSpec:
    """Build the engine's identity from vLLM's OffloadingConfig and VllmConfig.

    Args:
        in_worker: do not log the options that count; the scheduler's process logs them, once per engine.

    Raises:
        ConfigError: see ``check_adapters``.
    """
    check_adapters(vllm_config)
    parallel = config.parallel
    canonical = bool(getattr(config, "canonical_layout", False))
    found = _identity_of(vllm_config)
    if not in_worker:
        log_identity(vllm_config, found)
    return EngineSpec(
        OffloadingConfig(
            model=ModelConfig(
                _model_name(vllm_config, config.model.name),
                config.model.dtype,
                "+".join(filter(None, (kv_revision(vllm_config), identity_digest(found)))) or None,
            ),
            cache=CacheConfig(
                tokens_per_hash=config.cache.tokens_per_hash,
                blocks_per_chunk=config.cache.blocks_per_chunk,
                hash_algorithm=str(
                    getattr(getattr(vllm_config, "cache_config", None), "prefix_caching_hash_algo", "sha256")
                ),
            ),
            parallel=ParallelConfig(
                tp_size=parallel.tp_size,
                pp_size=parallel.pp_size,
                pcp_size=parallel.pcp_size,
                dcp_size=parallel.dcp_size,
                rank=parallel.rank,
                world_size=parallel.world_size,
                # vLLM sets this flag for its direct layout, too. There a page of TP=1 is not the concatenation of the
                # two pages of TP=2, so sharing would give full hits and wrong tokens. Only canonical pages are equal.
                is_parallelism_agnostic=canonical and bool(parallel.is_parallelism_agnostic),
            ),
            groups=tuple(KVCacheGroup(group.tokens_per_block, tuple(group.layer_names)) for group in config.groups),
            engine_id=config.engine_id,
            extra_config=dict(config.extra_config),
            canonical_layout=canonical,
            kv_cache_layout=getattr(config, "kv_cache_layout", None),
            replicated_layout=bool(getattr(config, "replicated_layout", False)),
            platform=kv_platform(vllm_config, [group.tokens_per_block for group in config.groups]),
            engine=readable(found),
        ),
        Metrics(),
    )


class Role(NamedTuple):
    """Whether ``kv_role`` allows an engine to load and to store. (vLLM's OffloadingConnector ignores ``kv_role``.)"""

    loads: bool = True
    stores: bool = True


def role_of(vllm_config: Any) -> Role:
    """Convert ``kv_role``: kv_producer only stores, kv_consumer only loads, others do both. Warns unless both."""
    kv_role = getattr(getattr(vllm_config, "kv_transfer_config", None), "kv_role", None)
    role = Role(loads=kv_role != "kv_producer", stores=kv_role != "kv_consumer")
    if role != Role():
        does = "stored in" if role.stores else "loaded from"
        logger.warning("kv_role is %s: KV is only %s storage; write kv_both for both", kv_role, does)
    return role


def _model_name(vllm_config: Any, name: str) -> str:
    """The model's name for namespaces.

    - A model in a bucket: the end of its URL, because vLLM's name for it is a folder in one host's cache.
    - A path: without a slash at its end, and absolute if it starts with a dot.
    - A name or path that is too long for a folder name: a digest and its end.
    """
    url = str(getattr(getattr(vllm_config, "model_config", None), "model_weights", None) or "")
    scheme, separator, place = url.partition("://")
    # The end is enough, since the revision has a digest of the whole URL. Folder names have a maximum length.
    if separator:
        return f"{scheme}/{place.strip('/')[-_URL_END:]}"
    if name.startswith("."):
        name = os.path.abspath(name)
    elif os.path.isabs(name):
        name = os.path.normpath(name)
    name = name.rstrip("/") or name
    if len(name.encode()) > MODEL_NAME_BYTES_MAX:
        end = name.encode()[-_URL_END:].decode(errors="ignore")
        name = f"{value_digest(name)[:16]}/{end}"
    return name


def _identity_of(vllm_config: Any) -> dict[str, Any]:
    if getattr(vllm_config, "model_config", None) is None:
        raise ConfigError(
            "is missing in vLLM's config; without it KV of different models could be mixed up", field="model_config"
        )
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    ignore = ignored_options(getattr(transfer, "kv_connector_extra_config", None) or {})
    return identity(vllm_config, ignore=ignore)


def kv_platform(vllm_config: Any, block_sizes: Iterable[int]) -> str:
    """Return the kernels that lay out the KV: "cuda", "cuda:" and a digest, or "cpu:amx".

    The same KV can have the same size but another byte order, and loading it with the other order gives wrong tokens:

    - CPU: vLLM packs KV in another order if the machine has AMX.
    - ROCm: attention backends order the K tensor differently under the same layout name.
    - CUDA: kernels may use smaller blocks than vLLM. With kernel blocks of 64 tokens, a block of 128 has its heads
      twice. No config tells the kernels' block size; it is only known that no kernel splits blocks of 16 tokens.

    The digest covers everything that decides vLLM's choice of a backend, besides the options in ``identity``.

    Args:
        block_sizes: tokens per block of each group.
    """
    if current_platform.is_cpu():
        return f"cpu:{_cpu_kernels(vllm_config.model_config, block_sizes)}"
    is_rocm = current_platform.is_rocm()
    name = "rocm" if is_rocm else str(current_platform.device_name or current_platform.device_type or "unknown")
    if not is_rocm and max(block_sizes, default=0) <= KERNEL_BLOCK_TOKENS:
        return name
    gpu = None
    with suppress(Exception):  # a driver error must not keep the engine from starting
        gpu = current_platform.get_device_name() if is_rocm else [*current_platform.get_device_capability()]
    return f"{name}:{value_digest([gpu, vllm.__version__.split('.')[:2]])}"


def _cpu_kernels(model: Any, block_sizes: Iterable[int]) -> str:
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        head_size = model.get_head_size()
        return "+".join(sorted({_get_attn_isa(model.dtype, size, head_size) for size in block_sizes}))
    except Exception as e:  # noqa: BLE001 - a private vLLM function, which any release may change or remove
        logger.debug("the KV layout of this CPU's kernels is not known: %r", e)
    # Fallback: machines with another architecture or AMX support do not share blocks.
    supports_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f"{platform.machine()}{'+amx' if supports_amx else ''}"


# ---- calls and values ------------------------------------------------------------------------------------------


def lookup_result(answer: bool | None, *, is_coming: bool = False) -> LookupResult:
    """Convert a tier's answer to ``lookup`` into vLLM's type.

    Args:
        is_coming: the key was found, but is not readable yet. (On RETRY, vLLM goes on to earlier blocks in a group with
            a sliding window, until it has looked up all of them.)
    """
    if answer is None:
        return LookupResult.HIT_PENDING if is_coming else LookupResult.RETRY
    return LookupResult.HIT if answer else LookupResult.MISS


def excluded_tiers(places: Iterable[tuple[Medium, Locality | None]], req_context: ReqContext) -> int:
    """Return a bit mask of the places that a request's parameter ``kv_load_tiers`` excludes from loading."""
    allows = req_context.load_tier_filter.allows
    return sum(1 << index for index, (kind, where) in enumerate(places) if not allows(medium=kind, locality=where))


def job_metadata(job: Any) -> JobMetadata:
    """Convert a vLLM job. ``job.keys`` may be a set; iterating it gives the keys in the order of the ids."""
    ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return JobMetadata(job.job_id, tuple(job.keys), ids, job.req_context)


def prompt_order(keys: Sequence[bytes], req_context: ReqContext) -> list[int]:
    """Return the indexes of ``keys`` in prompt order. Order matters: a prefix is usable only up to its first gap.

    vLLM passes the keys of a store as a set. From 0.31 on it tells at which token of the request each key ends.
    """
    position_of: Any = getattr(req_context, "get_offload_key_position", {}.get)
    positions = [math.inf if (end := position_of(key)) is None else end for key in keys]
    return sorted(range(len(positions)), key=positions.__getitem__)


def scheduled(output: Any) -> Iterator[tuple[str, int, int]]:
    """Yield the requests of a step (vLLM's SchedulerOutput): id, tokens that it computes, tokens computed before."""
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, counts[new.req_id], new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield req_id, counts[req_id], computed


def job_result(result: JobResult) -> VllmJobResult:
    """Convert a kvtiers result. For vLLM, ``successful_keys`` of None means that ``success`` holds for all keys."""
    return VllmJobResult(
        job_id=result.job_id,
        success=result.success,
        successful_keys=None if result.success else result.successful_keys or None,
        transfer_time=result.transfer_time,
        **({"transfer_bytes": result.transfer_bytes} if hasattr(VllmJobResult, "transfer_bytes") else {}),
    )


def hold_back_stream(request: Any) -> None:
    """Turn off offloading for a request whose prompt arrives in parts, with releases that mix up its blocks.

    With each part, vLLM tells its connector all blocks of the request. Before 0.33 the connector treats them as
    additional blocks, and so stores blocks under the names of later blocks.
    """
    if _MISTAKES_BLOCKS_OF_STREAMS and getattr(request, "resumable", False):
        request.kv_transfer_params = {**(request.kv_transfer_params or {}), "max_offload_tokens": 0}


def medium(name: str) -> Medium:
    """Convert kvtiers' name of a medium to vLLM's."""
    return Medium.CPU if name in ("CPU", "memory") else Medium.STORAGE


@cache
def hit_source(name: str) -> Any:
    """Return vLLM's ``CacheHitSource`` (0.32 and later) for "CPU" or a tier's type. None exists for remote storage."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    if name in ("CPU", "memory"):
        return CacheHitSource.HOST
    return CacheHitSource.DISK if name == "fs" else CacheHitSource.EXTERNAL_UNSPECIFIED


def locality(tier_type: str) -> Locality | None:
    """Whether storage of a tier's type is local to this machine or remote; None: unknown."""
    return _LOCALITIES.get(tier_type)


def events(ours: Iterable[OffloadingEvent], where: Locality | None = None) -> Iterator[VllmEvent]:
    """Convert kvtiers' events to vLLM's."""
    for event in ours:
        yield VllmEvent(keys=list(event.keys), medium=medium(event.medium), removed=event.removed, locality=where)
