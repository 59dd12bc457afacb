"""KVTiersHiCacheStorage: implements SGLang's HiCache storage with a kvtiers tier for each rank.

SGLang's threads call, and wait for the result. They name pages by indices into SGLang's host memory. The memory pool
gives the addresses of each page's parts.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args

from ....tiers.blocking import Pieces
from ....tiers.blocks.keys import OffloadKey, make_offload_key
from ....tiers.errors import ConfigError
from ....tiers.metrics import Metrics
from ....tiers.plain_logs import get_logger
from ...base import CacheConfig, ModelConfig, OffloadingConfig, ParallelConfig
from ...ranks.place import ignored_options
from ..door import Door, check_options, counted_revision, serve_metrics, weights_digest
from ..release import Release
from .identity import counted

if TYPE_CHECKING:
    from ....tiers.exporter import MetricsServer

logger = get_logger(__name__)

#: Kinds of host memory whose pages hold all that a page needs.
POOLS = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
#: Options that SGLang reads itself.
_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold",
            "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys")  # fmt: skip

_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_POOL = ["get_page_buffer_meta(_)"]
RELEASE = Release(
    "sglang",
    tested=("0.5.23",),
    used={
        _STORAGE: ["HiCacheStorage", "HiCacheStorageConfig", "HiCacheStorageExtraInfo", "PoolName"],
        f"{_STORAGE}:HiCacheStorageConfig": [
            "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_size", "is_mla_model",
            "should_split_heads", "enable_storage_metrics", "model_name", "extra_config",
        ],
        f"{_STORAGE}:PoolName": ["KV"],
        "sglang.srt.observability.metrics_collector:StorageMetrics": [
            "prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth",
        ],
        "sglang.srt.runtime_context": ["get_server_args()"],
        "sglang.srt.arg_groups.overrides": ["resolution_result(_, _)"],
        "sglang.srt.mem_cache.pool_host.mha:MHATokenToKVPoolHost": _POOL,
        "sglang.srt.mem_cache.pool_host.mla:MLATokenToKVPoolHost": _POOL,
    },
    own=("close",),
)  # fmt: skip


class KVTiersHiCacheStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where mypy runs
    """Keeps pages in a tier. Any of SGLang's threads may call.

    Args:
        storage_config: SGLang's, with kvtiers' options in ``extra_config``.
        kwargs: not used.

    Raises:
        ConfigError: names the wrong option, or the name that this SGLang lacks.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:  # noqa: ARG002
        RELEASE.check(KVTiersHiCacheStorage)
        self._config = storage_config
        self._options = dict(storage_config.extra_config or {})
        check_options(self._options, ("identity",), _SGLANGS)
        if not self._options.get("interface_v1"):
            raise ConfigError("is missing; write 1: SGLang then hands over pages in place", field="interface_v1")
        if storage_config.should_split_heads:
            raise ConfigError("splits pages by heads, which kvtiers does not; leave it out", field="tp_lcm_size")
        self._shard = storage_config.pp_rank * storage_config.attn_cp_size + storage_config.attn_cp_rank
        self._place = self._shard * storage_config.tp_size + storage_config.tp_rank
        self._stats = StorageMetrics()
        self._door: Door | None = None
        self._server: MetricsServer | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tier for this memory.

        Raises:
            ConfigError: kvtiers cannot keep pages of this kind.
            StoreError: the storage failed with a permanent error.
        """
        super().register_mem_pool_host(mem_pool_host)
        kind = type(mem_pool_host).__name__
        if kind not in POOLS:
            raise ConfigError(f"pages of {kind} are not supported; {' and '.join(POOLS)} are", field="host memory")
        parts = mem_pool_host.get_page_buffer_meta(torch.arange(mem_pool_host.page_size))[1]
        self._parts = len(parts)
        config = self._identity(mem_pool_host, parts)
        metrics = Metrics()
        self._door = Door(config, self._options, sum(parts), metrics, f"r{config.parallel.rank}")
        self._server = serve_metrics(self._options, metrics, self._place)

    def _identity(self, pool: Any, parts: Sequence[int]) -> OffloadingConfig:
        config, arguments = self._config, get_server_args()
        options = counted(arguments, ignore=ignored_options(self._options))
        options |= {"sglang": RELEASE.version, "parts": f"{len(parts)}x{parts[0]}"}
        name = config.model_name or arguments.model_path
        weights = weights_digest(arguments.model_path, arguments.revision, arguments.download_dir)
        if weights is None:
            text = f"{arguments.model_path} is neither a folder nor in the local hub cache, so its weights are unknown"
            raise ConfigError(f"{text}; give --revision", field="model_path")
        return OffloadingConfig(
            model=ModelConfig(name, pool.dtype, counted_revision(weights, options)),
            cache=CacheConfig(pool.page_size, hash_algorithm="sglang"),
            parallel=ParallelConfig(
                config.tp_size,
                config.pp_size,
                config.attn_cp_size,
                config.dcp_size,
                # Ranks of a pipeline stage have equal MLA pages, so SGLang stores only one rank's pages.
                rank=self._shard if config.is_mla_model else self._place,
            ),
            kv_cache_layout=pool.layout,
            inference_engine="sglang",
            engine=options | {"is_mla": config.is_mla_model},
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse pools besides the KV pool: kvtiers does not store them, and a page is useless without them.

        Raises:
            ConfigError: names the pool.
        """
        if host_pool_name != PoolName.KV:
            text = f"{host_pool_name}: this model keeps more than KV for each token, which kvtiers does not store yet"
            raise ConfigError(text, field="host pool")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # ---- pages -----------------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:  # noqa: ARG002
        if self._door is None:
            return 0
        found = self._door.exists([_key(key) for key in keys], prefix_only=True)
        return next((index for index, is_there in enumerate(found) if not is_there), len(keys))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> list[bool]:
        return self._move(keys, host_indices, is_store=False)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> list[bool]:
        return self._move(keys, host_indices, is_store=True)

    def _move(self, keys: list[str], host_indices: torch.Tensor, *, is_store: bool) -> list[bool]:
        if (door := self._door) is None:
            return [False] * len(keys)
        began = time.perf_counter()
        call: Callable[[Sequence[OffloadKey], Sequence[Pieces]], list[bool]] = door.store if is_store else door.load
        done = call([_key(key) for key in keys], list(self._pages(host_indices)))
        if self._config.enable_storage_metrics and (count := sum(done)):
            stats = self._stats
            gb_per_s = count * door.tier.block_bytes / (time.perf_counter() - began) / 1e9
            (stats.backup_pgs if is_store else stats.prefetch_pgs).append(count)
            (stats.backup_bandwidth if is_store else stats.prefetch_bandwidth).append(gb_per_s)
        return done

    def _pages(self, host_indices: torch.Tensor) -> Iterator[Pieces]:
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        parts = [
            memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            for address, size in zip(addresses, sizes, strict=True)
        ]
        for first in range(0, len(parts), self._parts):
            yield parts[first : first + self._parts]

    # ---- the rest of the interface ---------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Not used with ``interface_v1``."""
        raise NotImplementedError("kvtiers needs interface_v1: 1")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        """Not used with ``interface_v1``."""
        raise NotImplementedError("kvtiers needs interface_v1: 1")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not used with ``interface_v1``."""
        raise NotImplementedError("kvtiers needs interface_v1: 1")

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not used with ``interface_v1``."""
        raise NotImplementedError("kvtiers needs interface_v1: 1")

    def clear(self) -> None:
        """Remove nothing: other engines use the same pages. ``kvtiers rm`` removes a model's pages."""
        logger.warning("HiCache asked to clear the storage; kvtiers removes nothing, because others may use it")

    def get_stats(self) -> StorageMetrics:
        """Return the counts of pages moved since the last call."""
        stats, self._stats = self._stats, StorageMetrics()
        return stats

    def close(self) -> None:
        """End the tier. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._door is not None:
            self._door.close()


def _key(page_hash: str) -> OffloadKey:
    return make_offload_key(bytes.fromhex(page_hash), 0)
