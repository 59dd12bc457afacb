"""The engine side's interfaces and values: what an engine calls, and what it hands over.

Two processes meet here. The scheduler owns an ``OffloadingManager`` (which block is where; never touches bytes).
Each worker owns ``OffloadingHandler`` objects (copies between its KV tensors and the CPU region; never decides).
What goes from one to the other is a pair of ``LoadStoreSpec``. Names follow vLLM's ``vllm/v1/kv_offload``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtiers.tiers.base import OffloadingEvent, ReqContext
from kvtiers.tiers.blocks.keys import OffloadKey

if TYPE_CHECKING:
    import torch


# ---- identity: what a spec says about the model and the engine -------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model.

    Attributes:
        name: hub id or path.
        dtype: of the KV cache, such as ``torch.bfloat16`` or "bfloat16".
        revision: of the weights; None where the engine does not know it.
    """

    name: str
    dtype: object
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The engine's paged cache.

    Attributes:
        tokens_per_hash: tokens one block hash covers.
        blocks_per_chunk: GPU blocks in one offloaded block (block_size_factor).
        hash_algorithm: how block hashes are made; part of the namespace.
    """

    tokens_per_hash: int
    blocks_per_chunk: int = 1
    hash_algorithm: str = "sha256"


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes of tensor, pipeline, prefill-context and decode-context parallelism, and this process's place in them."""

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
    """What a spec offers as ``spec.config``. An attribute that is absent elsewhere means its neutral value here."""

    model: ModelConfig
    cache: CacheConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    groups: tuple[KVCacheGroup, ...] = ()
    engine_id: str = "kvtiers"
    extra_config: dict[str, Any] = field(default_factory=dict)
    canonical_layout: bool = False
    kv_cache_layout: str | None = None
    replicated_layout: bool = False


# ---- load/store specs: where a transfer reads from or writes to ------------------------------------------------


class LoadStoreSpec(ABC):
    """One end of a transfer."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Name of the memory or storage this end is in."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """An end that is a list of block ids.

    Attributes:
        block_ids: (n,) int32.

    Raises:
        ValueError: they are no flat sequence, or one is no int32.
    """

    def __init__(self, block_ids: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        try:
            given = np.asarray(block_ids)
            self.block_ids: NDArray[np.int32] = np.asarray(given, dtype=np.int32)
            # numpy wraps what is an array, or a tensor, already, and a wrapped id names another block.
            fits = np.array_equal(self.block_ids, given)
        except OverflowError:
            fits = False
        if not fits:
            raise ValueError("block_ids has an id that is no int32")
        if self.block_ids.ndim != 1:
            raise ValueError(f"block_ids has {self.block_ids.ndim} dimensions; accepted is a flat sequence of ids")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the engine's paged KV tensors, ordered by KV cache group.

    Args:
        block_ids: (n,) GPU block ids, group after group.
        group_sizes: ``group_sizes[i]`` blocks belong to group i; their sum is n. None: one group.
        block_indices: ``block_indices[i]`` is the logical index, in the request, of group i's first block. Blocks of a
            group are logically contiguous. Where an offloaded block holds ``factor`` GPU blocks, the first
            ``block_indices[i] % factor`` positions of the group's first offloaded block are skipped. None: all 0.

    Raises:
        ValueError: lengths or sums do not fit.
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
            num_blocks is not leading, such as (2, num_blocks, …), is split into several of these.
        page_size_bytes: bytes of one block in this tensor.
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """One layer's page inside a canonical tensor.

    Attributes:
        tensor_idx: index into ``CanonicalKVCaches.tensors``.
        page_size_bytes: un-padded bytes of the layer's page, at most the tensor's page size.
    """

    tensor_idx: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """All KV tensors of a worker.

    Attributes:
        tensors: each tensor once.
        group_data_refs: per KV cache group, the refs of its layers.
    """

    tensors: Sequence[CanonicalKVCacheTensor]
    group_data_refs: Sequence[Sequence[CanonicalKVCacheRef]]


# ---- scheduler side --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """What to store where.

    Attributes:
        keys_to_store: the keys not yet there, in the order of ``store_spec``.
        store_spec: where to put them.
        evicted_keys: keys that had to leave for them.
    """

    keys_to_store: tuple[OffloadKey, ...]
    store_spec: LoadStoreSpec
    evicted_keys: tuple[OffloadKey, ...]


class OffloadingManager(ABC):
    """Which block is where. Scheduler thread only; no I/O, no waiting."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: ready to load. False: absent. None: ask again, the scheduler delays the request."""

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Where to read the keys, in their order; protected from eviction until ``complete_load``.

        Raises:
            KeyError: a key is not ready (``lookup`` did not answer True in this step).
        """

    def touch(self, keys: Collection[OffloadKey]) -> None:  # noqa: B027 - optional hook
        """The keys were used."""

    @abstractmethod
    def complete_load(self, keys: Collection[OffloadKey]) -> None:
        """The load of these keys ended, well or not."""

    @abstractmethod
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve room. None when there is none."""

    @abstractmethod
    def complete_store(self, keys: Collection[OffloadKey], success: bool = True) -> None:
        """The store of these keys ended: loadable from now on, or removed where ``success`` is False."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events since the last call."""
        return ()

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027 - optional hook
        """The request will not ask again."""

    def on_schedule_end(self) -> None:  # noqa: B027 - optional hook
        """A scheduler step ended."""

    def drain(self) -> None:  # noqa: B027 - optional hook
        """Wait until what was stored is in every tier. May block, within the tiers' limits."""

    def reset_cache(self) -> None:  # noqa: B027 - optional hook
        """Forget every block that is not in use. May block until running transfers end."""

    def shutdown(self) -> None:  # noqa: B027 - optional hook
        """Release everything."""


# ---- worker side -----------------------------------------------------------------------------------------------

TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What became of a transfer.

    Attributes:
        transfer_size: bytes copied; 0 where it failed.
        transfer_time: seconds the copy took, measured by the device where there is one.
    """

    job_id: int
    success: bool
    transfer_size: int
    transfer_time: float


class OffloadingHandler(ABC):
    """Copies in one direction. One thread at a time calls it."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a copy from ``spec[0]`` to ``spec[1]``. False: not accepted, and nothing will be reported."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Transfers that ended since the last call, each once. Does not wait."""

    @abstractmethod
    def wait(self, job_ids: Collection[int]) -> None:
        """Wait until these transfers ended. Unknown or reported ids are done."""

    def shutdown(self) -> None:  # noqa: B027 - optional hook
        """Wait for what runs, then release everything."""


class OffloadingSpec(ABC):
    """Wires a manager and handlers for one engine.

    Attributes:
        config: the engine's identity.
        blocks_per_chunk: GPU blocks in one offloaded block.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        self.config = config
        self.blocks_per_chunk = config.cache.blocks_per_chunk

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """The scheduler's side."""

    @abstractmethod
    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """The worker's side: (source type, destination type, handler) for each direction."""
