"""vLLM's names and values in ours, and back. The one module that knows what changed between vLLM's versions.

What changed (source: ``vllm/v1/kv_offload`` of each release):

- 0.28: TransferJob, LookupResult, ``get_worker`` and OffloadingConfig came.
- 0.29: sha256 block hashes are the same in every process without PYTHONHASHSEED, too.
- 0.30: ``BLOCK_QUERIES`` and ``BLOCK_HITS`` of its metrics' names became ``CHUNK_…``.
- 0.31: ``block_ids`` of a job became ``chunk_ids``; ``transfer_bytes`` of a result, ``backpressure_detector`` and
  ``max_load_tokens`` of a request came.
- 0.32: ``cache_hit_source`` came.
- 0.33: ``expedited`` loads, ``on_reset_flushed``, ``config_info`` and the manager's ``lock`` came. Blocks of a prompt
  that comes in parts are not mistaken any more (see ``hold_back_stream``).
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
)
from vllm.v1.kv_offload.base import OffloadingEvent as VllmEvent
from vllm.v1.kv_offload.tiering.base import JobResult as VllmJobResult
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvtiers.connector.base import CacheConfig, KVCacheGroup, ModelConfig, OffloadingConfig, ParallelConfig
from kvtiers.connector.model_files import value_digest
from kvtiers.connector.vllm import versions
from kvtiers.connector.vllm.identity import identity, identity_digest, log_identity, readable
from kvtiers.connector.vllm.weights import kv_revision
from kvtiers.connector.vllm_config import ignored_options
from kvtiers.tiers.base import JobMetadata, JobResult, OffloadingEvent
from kvtiers.tiers.blocks.file_mapper import MODEL_NAME_BYTES_MAX, VllmLayout
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.metrics import Metrics
from kvtiers.tiers.plain_logs import get_logger

logger = get_logger(__name__)

#: Names of vLLM's metrics. 0.28 and 0.29 keep the same ones as BLOCK_…
if hasattr(TieringOffloadingMetrics, "CHUNK_QUERIES"):
    CHUNK_QUERIES, CHUNK_HITS = TieringOffloadingMetrics.CHUNK_QUERIES, TieringOffloadingMetrics.CHUNK_HITS
else:
    CHUNK_QUERIES, CHUNK_HITS = TieringOffloadingMetrics.BLOCK_QUERIES, TieringOffloadingMetrics.BLOCK_HITS

_MISTAKES_BLOCKS_OF_STREAMS = (versions.release() or (0, 0)) < (0, 33)
_READS_MAX_LOAD_TOKENS = (versions.release() or (0, 31)) >= (0, 31)
_LEAKS_ADAPTERS_ON_CPU = (versions.release() or (0, 0)) < (0, 33)
_JOB_RESULT_FIELDS = frozenset(field.name for field in dataclasses.fields(VllmJobResult))
_URL_END = 150
KERNEL_BLOCK_TOKENS = 16  # all of CUDA's attention kernels take such a block whole

#: Where our tiers keep their blocks, as vLLM's events and hit sources call it.
_LOCALITIES = {
    **dict.fromkeys(("fs", "memory"), Locality.LOCAL),
    **dict.fromkeys(("fsspec", "nfs", "s3"), Locality.REMOTE),
}


@dataclasses.dataclass(frozen=True, slots=True)
class VllmOffloadingConfig(OffloadingConfig):
    """The identity of an engine whose kernels choose how KV is packed.

    Attributes:
        platform: see ``kv_platform``.
        engine: the options in the engine's ``identity``, in a form that can be shown; written to ``config.json``.
    """

    platform: str | None = None
    engine: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSpec:
    """What a tier of ours takes as its ``offloading_spec``."""

    config: VllmOffloadingConfig
    metrics: Metrics
    vllm_layout: VllmLayout | None = None  # where a region's rows are the bytes that vLLM's own fs tier would write

    @property
    def blocks_per_chunk(self) -> int:
        """Engine blocks in one offloaded block."""
        return self.config.cache.blocks_per_chunk


def warn_of_seeded_hashes(version: str = versions.VERSION, environ: Mapping[str, str] = os.environ) -> None:
    """Say where no other process will find what this one stores."""
    if version.startswith("0.28.") and environ.get("PYTHONHASHSEED", "random") == "random":
        logger.warning(
            "vLLM 0.28 seeds its block hashes at random in each process: set the same PYTHONHASHSEED for all of them, "
            "or none finds what another stored"
        )


def warn_of_adapters(vllm_config: Any) -> None:
    """Say, once in a process, that vLLM's block hashes know adapters by name and path."""
    if getattr(vllm_config, "lora_config", None) is not None:
        _warn_of_adapters()


@cache
def _warn_of_adapters() -> None:
    logger.warning(
        "LoRA adapters are known by name and path, as in vLLM's own prefix cache: give an adapter that was trained "
        "again another name or path, or KV of the one before is loaded for it"
    )


def warn_of_reset() -> None:
    """Say that storage is not used any more.

    vLLM resets its connector when weights may have been changed in place, and tells neither whether they were nor what
    they are now. Blocks are stored under the weights that the engine was started with. So from a reset on, what storage
    holds may be another model's KV, and what is computed may not be stored under this name.
    """
    logger.warning(
        "vLLM has reset its connector, as it does when weights are changed in place, and to sleep or pause: what "
        "storage holds is KV of the weights before, so from here on nothing is loaded from there or stored; an "
        "engine that is started again uses it again. Where weights stay the same, write 'storage_after_reset': 'keep'"
    )


def check_adapters(vllm_config: Any) -> None:
    """Refuse LoRA where vLLM applies adapters to requests that name none.

    In a batch with a LoRA request, vLLM's CPU kernels before 0.33 take -1, their mark for "no adapter", as an index:
    it selects the last of the ``max_loras`` slots. Such KV, once stored, would be loaded after a restart as the base
    model's, also by a release without the fault.

    Raises:
        ConfigError: says what may be done.
    """
    if _LEAKS_ADAPTERS_ON_CPU and getattr(vllm_config, "lora_config", None) is not None and current_platform.is_cpu():
        raise ConfigError(
            f"vLLM {versions.VERSION} on CPUs applies an adapter to requests that name none when both are in one "
            "batch, and the wrong KV would be stored as the base model's: take vLLM 0.33 or later, leave "
            "out --enable-lora, or run without a KV connector",
            field="enable_lora",
        )


def engine_spec(spec: Any, vllm_config: Any, *, by_token: bool = False) -> EngineSpec:
    """The engine's identity out of a spec of vLLM's (or the OffloadingConfig in it) and its VllmConfig.

    Args:
        by_token: what is stored is in the order of tokens, however kernels cut pages.

    Raises:
        ConfigError: see ``check_adapters``.
    """
    warn_of_seeded_hashes()
    check_adapters(vllm_config)
    config = getattr(spec, "config", spec)
    parallel = config.parallel
    canonical = bool(getattr(config, "canonical_layout", False))
    found = _identity_of(vllm_config)
    return EngineSpec(
        VllmOffloadingConfig(
            model=ModelConfig(
                _model_name(vllm_config, config.model.name),
                config.model.dtype,
                "+".join(filter(None, (kv_revision(vllm_config), identity_digest(found)))) or None,
            ),
            cache=CacheConfig(
                tokens_per_hash=config.cache.tokens_per_hash,
                blocks_per_chunk=config.cache.blocks_per_chunk,
                hash_algorithm=_hash_algorithm(vllm_config),
            ),
            parallel=ParallelConfig(
                tp_size=parallel.tp_size,
                pp_size=parallel.pp_size,
                pcp_size=parallel.pcp_size,
                dcp_size=parallel.dcp_size,
                rank=parallel.rank,
                world_size=parallel.world_size,
                # vLLM also says so of its direct layout, where a page of TP=1 is not the two pages of TP=2 one after
                # the other: shared, they give full hits and wrong tokens. Only canonical pages are alike.
                is_parallelism_agnostic=canonical and bool(parallel.is_parallelism_agnostic),
            ),
            groups=tuple(KVCacheGroup(group.tokens_per_block, tuple(group.layer_names)) for group in config.groups),
            engine_id=config.engine_id,
            extra_config=dict(config.extra_config),
            canonical_layout=canonical,
            kv_cache_layout=getattr(config, "kv_cache_layout", None),
            replicated_layout=bool(getattr(config, "replicated_layout", False)),
            platform=kv_platform(vllm_config, [group.tokens_per_block for group in config.groups], by_token=by_token),
            engine=readable(found),
        ),
        Metrics(),
    )


def vllm_layout(spec: Any) -> VllmLayout:
    """Where vLLM's own ``fs`` tier would keep a spec's blocks: as the installed version says."""
    from vllm.v1.kv_offload.file_mapper import FileMapper as VllmsFileMapper

    # As that tier calls it. By position: the third parameter had other names.
    mapper = VllmsFileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, True)
    return VllmLayout(mapper.base_path.lstrip("/"), mapper.rank, mapper.get_run_config())


class Role(NamedTuple):
    """What ``kv_role`` lets an engine do with storage. (vLLM's OffloadingConnector does not look at it.)"""

    loads: bool = True
    stores: bool = True


def role_of(vllm_config: Any | None) -> Role:
    """kv_producer: only stores; kv_consumer: only loads; else both. Says so where it is not both."""
    kv_role = getattr(getattr(vllm_config, "kv_transfer_config", None), "kv_role", None)
    role = Role(loads=kv_role != "kv_producer", stores=kv_role != "kv_consumer")
    if role != Role():
        does = "stored in" if role.stores else "loaded from"
        logger.warning("kv_role is %s: KV is only %s storage; write kv_both for both", kv_role, does)
    return role


def _model_name(vllm_config: Any | None, name: str) -> str:
    """A model's name; of one in a bucket its URL, as vLLM's name of it is a folder in one host's cache.

    A path as it is given, but where it is no name of a folder of ours.
    """
    url = str(getattr(getattr(vllm_config, "model_config", None), "model_weights", None) or "")
    scheme, separator, place = url.partition("://")
    # The end will do, and folders' names are bounded: the revision has a digest of the whole URL.
    if separator:
        return f"{scheme}/{place.strip('/')[-_URL_END:]}"
    if name.startswith("."):
        name = os.path.abspath(name)
    if len(name.encode()) > MODEL_NAME_BYTES_MAX:
        end = name.encode()[-_URL_END:].decode(errors="ignore")
        name = f"{value_digest(name)[:16]}/{end}"
    return name


def _identity_of(vllm_config: Any) -> dict[str, Any]:
    if getattr(vllm_config, "model_config", None) is None:
        raise ConfigError("vLLM's config has none, so KV of different models could be mixed up", field="model_config")
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    ignore = ignored_options(getattr(transfer, "kv_connector_extra_config", None) or {})
    found = identity(vllm_config, ignore=ignore)
    log_identity(found)
    return found


def kv_platform(vllm_config: Any, block_sizes: Iterable[int], *, by_token: bool = False) -> str:
    """Whose kernels lay out the KV: "cuda", "cuda:" and a digest, or "cpu:amx".

    vLLM's CPU backend packs the same KV in another order where the machine has AMX: with the same sizes, and wrong
    tokens for who takes one for the other. So do ROCm's attention backends with keys, under one name of layout, and
    CUDA's where their kernels' blocks are smaller than vLLM's: of 64 tokens, say, so that a block of 128 has its heads
    twice. How small they are no config tells, only that all take 16. (``kv_groups.is_in_token_order`` knows others that
    all lay out alike.) The digest has what vLLM chooses a backend by, beyond the options in ``identity``.

    Args:
        block_sizes: tokens of a block, of each group.
        by_token: see ``engine_spec``.
    """
    if current_platform.is_cpu():
        return f"cpu:{_cpu_kernels(vllm_config.model_config, block_sizes)}"
    is_rocm = current_platform.is_rocm()
    name = "rocm" if is_rocm else str(current_platform.device_name or current_platform.device_type or "unknown")
    if not is_rocm and (by_token or max(block_sizes, default=0) <= KERNEL_BLOCK_TOKENS):
        return name
    gpu = None
    with suppress(Exception):  # the driver's; no reason not to start
        gpu = current_platform.get_device_name() if is_rocm else [*current_platform.get_device_capability()]
    return f"{name}:{value_digest([gpu, vllm.__version__.split('.')[:2]])}"


def _cpu_kernels(model: Any, block_sizes: Iterable[int]) -> str:
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        head_size = model.get_head_size()
        return "+".join(sorted({_get_attn_isa(model.dtype, size, head_size) for size in block_sizes}))
    except Exception as e:  # noqa: BLE001 - a private function of vLLM's, which may go or change with any release
        logger.debug("how this CPU's kernels pack KV is not known: %r", e)
    # Machines that differ in what vLLM's kernels look at share nothing.
    supports_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f"{platform.machine()}{'+amx' if supports_amx else ''}"


def _hash_algorithm(vllm_config: Any | None) -> str:
    cache = getattr(vllm_config, "cache_config", None)
    return str(getattr(cache, "prefix_caching_hash_algo", "sha256"))


# ---- calls and values ------------------------------------------------------------------------------------------


def lookup_result(answer: bool | None, *, is_coming: bool = False) -> LookupResult:
    """A tier's answer to ``lookup``, as vLLM's.

    Args:
        is_coming: the key was found, though it is not readable yet. In a group with a sliding window vLLM goes on to
            earlier blocks where it hears RETRY, until it has asked for all there are.
    """
    if answer is None:
        return LookupResult.HIT_PENDING if is_coming else LookupResult.RETRY
    return LookupResult.HIT if answer else LookupResult.MISS


def barred(places: Iterable[tuple[Medium, Locality | None]], req_context: Any) -> int:
    """Bit mask of the places that a request may not load from, by ``kv_load_tiers`` in its parameters."""
    allows = req_context.load_tier_filter.allows
    return sum(1 << index for index, place in enumerate(places) if not allows(*place))


def job_metadata(job: Any) -> JobMetadata:
    """A job of vLLM's. ``job.keys`` may be a set: its order of iteration is that of the ids."""
    ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return JobMetadata(job.job_id, tuple(job.keys), ids, job.req_context)


def prompt_order(keys: Sequence[bytes], req_context: Any) -> list[int]:
    """Where the keys of a store are in ``keys``, in the order of their prompt: a prefix is of use up to its first gap.

    vLLM names them in a set, and from 0.31 on says at which token of its request each ends.
    """
    position_of: Any = getattr(req_context, "get_offload_key_position", {}.get)
    positions = [math.inf if (end := position_of(key)) is None else end for key in keys]
    return sorted(range(len(positions)), key=positions.__getitem__)


def job_result(result: JobResult) -> VllmJobResult:
    """A result of ours. vLLM takes ``successful_keys`` of None for "all share the fate of the job"."""
    fields = {
        "job_id": result.job_id,
        "success": result.success,
        "successful_keys": None if result.success else result.successful_keys or None,
        "transfer_time": result.transfer_time,
        "transfer_bytes": result.transfer_bytes,
    }
    return VllmJobResult(**{name: value for name, value in fields.items() if name in _JOB_RESULT_FIELDS})


def hold_back_stream(request: Any) -> None:
    """Offload nothing of a request whose prompt comes in parts while it runs, where vLLM mistakes its blocks.

    With each part vLLM tells its connector all blocks of the request. Before 0.33 it takes them for more of them, and
    so stores blocks under the names of later ones.
    """
    if _MISTAKES_BLOCKS_OF_STREAMS and getattr(request, "resumable", False):
        request.kv_transfer_params = {**(request.kv_transfer_params or {}), "max_offload_tokens": 0}


def warn_of_unread(request: Any) -> None:
    """Say, once in a process, that a request asks for a limit that this release of vLLM does not know."""
    if not _READS_MAX_LOAD_TOKENS and (request.kv_transfer_params or {}).get("max_load_tokens") is not None:
        _warn_of_unread("max_load_tokens")


@cache
def _warn_of_unread(name: str) -> None:
    logger.warning("%s in a request's kv_transfer_params has no effect: vLLM reads it from 0.31 on", name)


def medium(name: str) -> Medium:
    """vLLM's name for a medium of ours."""
    return Medium.CPU if name in ("CPU", "memory") else Medium.STORAGE


@cache
def hit_source(name: str) -> Any:
    """vLLM's ``CacheHitSource`` for "CPU" or a tier's type. vLLM has none for remote storage. From vLLM 0.32 on."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    if name in ("CPU", "memory"):
        return CacheHitSource.HOST
    return CacheHitSource.DISK if name == "fs" else CacheHitSource.EXTERNAL_UNSPECIFIED


def locality(tier_type: str) -> Locality | None:
    """Whether a tier's storage is this machine's, by the tier's type; None: not known."""
    return _LOCALITIES.get(tier_type)


def events(ours: Iterable[OffloadingEvent], where: Locality | None = None) -> Iterator[VllmEvent]:
    """Our events, as vLLM's."""
    for event in ours:
        yield VllmEvent(keys=list(event.keys), medium=medium(event.medium), removed=event.removed, locality=where)
