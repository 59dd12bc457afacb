"""Interfaces and value types of the engine side: the classes that an engine calls, and their arguments and results.

The scheduler process owns an ``OffloadingManager``: it decides which block is where and never touches bytes.
Each worker process owns ``OffloadingHandler`` objects: they copy between its KV tensors and the CPU region and decide
nothing. The scheduler sends each worker pairs of ``LoadStoreSpec``. Names follow vLLM's ``vllm/v1/kv_offload``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..tiers.base import OffloadingEvent, ReqContext
from ..tiers.blocks.keys import OffloadKey
from ..tiers.metrics import Metrics

if TYPE_CHECKING:
    import torch


# ---- identity: the model and the engine, as a spec describes them ----------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model.

    Attributes:
        name: hub id or path.
        dtype: type of the KV cache, such as ``torch.bfloat16`` or "bfloat16".
        revision: revision of the weights; None if the engine does not know it.
    """

    name: str
    dtype: object
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The engine's paged cache.

    Attributes:
        tokens_per_hash: tokens that one block hash covers.
        blocks_per_chunk: GPU blocks in one offloaded block (vLLM's block_size_factor).
        hash_algorithm: how block hashes are computed; part of the namespace.
    """

    tokens_per_hash: int
    blocks_per_chunk: int = 1
    hash_algorithm: str = "sha256"


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes of tensor, pipeline, prefill-context and decode-context parallelism, and this process's rank."""

    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    rank: int = 0
    world_size: int = 1
    is_parallelism_agnostic: bool = False


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers whose blocks are allocated together."""

    tokens_per_block: int
    layer_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OffloadingConfig:
    """The engine's identity, as ``spec.config``. A missing attribute of a foreign spec means the same as a default.

    Attributes:
        platform: the kernels that pack KV, if they differ in the byte order.
        inference_engine: defines the layout of the bytes; "": FileMapper's default.
        engine: options of the engine that count, in a form that is safe to show; written to ``config.json``.
        ranks_apart: each rank stores its own blocks; no block has the bytes of several ranks.
    """

    model: ModelConfig
    cache: CacheConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    groups: tuple[KVCacheGroup, ...] = ()
    engine_id: str = "kvtiers"
    extra_config: dict[str, Any] = field(default_factory=dict)
    canonical_layout: bool = False
    kv_cache_layout: str | None = None
    replicated_layout: bool = False
    platform: str | None = None
    inference_engine: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)
    ranks_apart: bool = False


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The ``offloading_spec`` that tiers take: an engine's identity, and where its tiers count."""

    config: OffloadingConfig
    metrics: Metrics

    @property
    def blocks_per_chunk(self) -> int:
        """Engine blocks in one offloaded block."""
        return self.config.cache.blocks_per_chunk


# ---- load/store specs: where a transfer reads from or writes to ------------------------------------------------


class LoadStoreSpec(ABC):
    """One end of a transfer."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Name of the memory or storage that holds this end."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """An end given by a list of block ids.

    Attributes:
        block_ids: (n,) int32.

    Raises:
        ValueError: the ids are not a flat sequence, or an id does not fit in int32.
    """

    def __init__(self, block_ids: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        try:
            given = np.asarray(block_ids)
            self.block_ids: NDArray[np.int32] = np.asarray(given, dtype=np.int32)
            # If the input is already an array or a tensor, numpy wraps large ids. A wrapped id names another block.
            fits = np.array_equal(self.block_ids, given)
        except OverflowError:
            fits = False
        if not fits:
            raise ValueError("block_ids has an id that is not an int32")
        if self.block_ids.ndim != 1:
            raise ValueError(f"block_ids has {self.block_ids.ndim} dimensions; write a flat sequence of ids")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the engine's paged KV tensors, ordered by KV cache group.

    Args:
        block_ids: (n,) GPU block ids, group after group.
        group_sizes: ``group_sizes[i]`` blocks belong to group i; their sum is n. None: one group.
        block_indices: ``block_indices[i]`` is the logical index, in the request, of group i's first block. Blocks of a
            group are logically contiguous. If an offloaded block holds ``factor`` GPU blocks, the first
            ``block_indices[i] % factor`` positions of the group's first offloaded block are skipped. None: all 0.

    Raises:
        ValueError: lengths or sums do not match.
    """

    def __init__(
        self,
        block_ids: Sequence[int] | NDArray[np.integer[Any]],
        group_sizes: Sequence[int] | None = None,
        block_indices: Sequence[int] | None = None,
    ) -> None:
        super().__init__(block_ids)
        n = len(self.block_ids)
        self.group_sizes: tuple[int, ...] = (n,) if group_sizes is None else tuple(group_sizes)
        self.block_indices: tuple[int, ...] = (
            (0,) * len(self.group_sizes) if block_indices is None else tuple(block_indices)
        )
        if any(size < 0 for size in self.group_sizes) or sum(self.group_sizes) != n:
            raise ValueError(f"group_sizes {self.group_sizes} must be 0 or more each and sum to the {n} block_ids")
        if len(self.block_indices) != len(self.group_sizes) or any(index < 0 for index in self.block_indices):
            raise ValueError(
                f"block_indices {self.block_indices} must hold one index of 0 or more "
                f"for each of the {len(self.group_sizes)} groups"
            )

    @staticmethod
    def medium() -> str:
        return "GPU"


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the CPU region."""

    @staticmethod
    def medium() -> str:
        return "CPU"


# ---- KV tensors in canonical form ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """One KV tensor as blocks of bytes.

    Attributes:
        tensor: (num_blocks, page_size_bytes) int8, CUDA or CPU; the last dimension has stride 1. A raw tensor whose
            first dimension is not num_blocks, such as (2, num_blocks, …), is split into several canonical tensors.
        page_size_bytes: bytes of one block in this tensor.
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """One layer's page inside a canonical tensor.

    Attributes:
        tensor_idx: index into ``CanonicalKVCaches.tensors``.
        page_size_bytes: bytes of the layer's page without padding, at most the tensor's page size.
    """

    tensor_idx: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """All KV tensors of a worker.

    Attributes:
        tensors: each tensor once.
        group_data_refs: for each KV cache group, the refs of its layers.
    """

    tensors: Sequence[CanonicalKVCacheTensor]
    group_data_refs: Sequence[Sequence[CanonicalKVCacheRef]]


# ---- scheduler side --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """The keys to store, and the slots reserved for them.

    Attributes:
        keys_to_store: the keys that are not yet in the region, in the order of ``store_spec``.
        store_spec: the slots to copy them to.
        evicted_keys: keys that were evicted to make room.
    """

    keys_to_store: tuple[OffloadKey, ...]
    store_spec: LoadStoreSpec
    evicted_keys: tuple[OffloadKey, ...]


class OffloadingManager(ABC):
    """Decides which block is where. Scheduler thread only. Methods do no I/O and do not wait unless they say so."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: ready to load. False: absent. None: ask again later; the scheduler delays the request."""

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Return where to read the keys, in their order, and protect them from eviction until ``complete_load``.

        Raises:
            KeyError: a key is not ready (``lookup`` did not answer True in this step).
        """

    def touch(self, keys: Collection[OffloadKey]) -> None:  # noqa: B027 - optional hook
        """Note that the keys were used."""

    @abstractmethod
    def complete_load(self, keys: Collection[OffloadKey]) -> None:
        """Note that the load of these keys has ended, successfully or not."""

    @abstractmethod
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve room for the keys. None: there is not enough room."""

    @abstractmethod
    def complete_store(self, keys: Collection[OffloadKey], success: bool = True) -> None:
        """Note that the store of these keys has ended: they become loadable, or are removed if ``success`` is False."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events since the last call."""
        return ()

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027 - optional hook
        """Note that the request has finished: no more lookups will come for it."""

    def on_schedule_end(self) -> None:  # noqa: B027 - optional hook
        """Note that a scheduler step has ended."""

    def drain(self) -> None:  # noqa: B027 - optional hook
        """Wait until every stored block is in every tier. May block, within the tiers' limits."""

    def reset_cache(self) -> None:  # noqa: B027 - optional hook
        """Forget every block that is not in use. May block until running transfers end."""

    def shutdown(self) -> None:  # noqa: B027 - optional hook
        """Release everything."""


# ---- worker side -----------------------------------------------------------------------------------------------

TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Outcome of a transfer.

    Attributes:
        transfer_size: bytes copied; 0 if the transfer failed.
        transfer_time: seconds that the copy took, measured by the device if there is one.
    """

    job_id: int
    success: bool
    transfer_size: int
    transfer_time: float


class OffloadingHandler(ABC):
    """Copies blocks in one direction. Only one thread at a time may call it."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a copy from ``spec[0]`` to ``spec[1]``. False: not accepted; no result will be reported."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the last call, each exactly once. Does not wait."""

    @abstractmethod
    def wait(self, job_ids: Collection[int]) -> None:
        """Wait until these transfers have ended. Unknown ids and ids already reported count as ended."""

    def shutdown(self) -> None:  # noqa: B027 - optional hook
        """Wait for running transfers, then release everything."""


class OffloadingSpec(ABC):
    """Creates the manager and the handlers of one engine.

    Attributes:
        config: the engine's identity.
        blocks_per_chunk: GPU blocks in one offloaded block.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        self.config = config
        self.blocks_per_chunk = config.cache.blocks_per_chunk

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's side."""

    @abstractmethod
    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield the worker's side: (source type, destination type, handler) for each direction."""
