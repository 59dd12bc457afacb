"""A real host pool, storage and controller of SGLang, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host import mha
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.server_args import ServerArgs

PAGE = 16


def set_arguments(folder: Path, weights: bytes = b"weights", **options: Any) -> None:
    """Give this process SGLang's arguments, with a model whose weights are a file."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(weights)
    runtime_context.get_context()._server_args = ServerArgs(**{"model_path": str(model), **options})


def host_pool(pages: int, layout: str = "page_first", heads: int = 2, dim: int = 64, layers: int = 4) -> Any:
    """SGLang's host memory for MHA, filled with random numbers."""
    tensors = [torch.zeros(PAGE, heads, dim, dtype=torch.bfloat16) for _ in range(2 * layers)]
    pointers = torch.tensor([each.data_ptr() for each in tensors], dtype=torch.int64)
    buffers = KVBuffers(
        k=tuple(tensors[:layers]),
        v=tuple(tensors[layers:]),
        k_data_ptrs=pointers[:layers],
        v_data_ptrs=pointers[layers:],
        layout=KVBufferLayout.NHD,
    )
    info = mha.MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=heads, head_dim=dim, v_head_dim=dim, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    pool = mha.MHATokenToKVPoolHost(
        info, 0.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE, start_layer=0,
        end_layer=layers - 1, host_token_capacity=pages * PAGE,
    )  # fmt: skip
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def config_of(root: Path, *, options: dict[str, Any] | None = None, **changed: Any) -> HiCacheStorageConfig:
    """SGLang's config of a storage, with kvtiers' options."""
    tier = {"type": "fs", "root_dir": str(root), "min_free": 0, "lookup_deadline_s": 5.0}
    extra = {
        "backend_name": "kvtiers",
        "module_path": "kvtiers.sglang",
        "class_name": "KVTiersHiCacheStorage",
        "interface_v1": 1,
        "staging": "8MiB",
        "tier": tier,
        **(options or {}),
    }
    fields: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": True, "model_name": "org/model",
    }  # fmt: skip
    return HiCacheStorageConfig(**fields | {"extra_config": json.loads(json.dumps(extra))} | changed)


def open_storage(config: HiCacheStorageConfig, pool: Any) -> Any:
    """As HiCacheController does."""
    storage = StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    return storage


class Controller(HiCacheController):  # type: ignore[misc]  # SGLang is not installed where mypy runs
    """SGLang's controller with its storage calls only: no device, no threads, no other ranks."""

    def __init__(self, storage: Any, pool: Any) -> None:
        self.storage_backend = storage
        self.mem_pool_host = self.storage_host_pool = pool
        self.page_size = PAGE
        self.page_get_func = self._page_get_zero_copy
        self.page_set_func = self._page_set_zero_copy
        self.prefetch_sync_queue: Queue[Any] = Queue()

    def back_up(self, hashes: list[str], indices: torch.Tensor) -> int:
        """Store pages. Returns how many tokens SGLang believes to be stored."""
        operation = StorageOperation(indices, [], hash_value=hashes)
        self._page_backup_or_log(operation)
        return int(operation.completed_tokens)

    def fetch(self, hashes: list[str], indices: torch.Tensor) -> int:
        """Load pages. Returns how many were loaded."""
        operation = PrefetchOperation("request", [], None)
        operation.hash_value, operation.host_indices = hashes, indices
        return int(self._page_transfer(operation))

    def prefetch(self, key: Any, indices: torch.Tensor) -> tuple[list[str], int]:
        """Look a prompt's pages up and load what is there. Returns the pages, and how many were loaded."""
        operation = PrefetchOperation("request", key, None)
        operation.hash_value, _ = self._storage_hit_query(operation)
        operation.host_indices = indices[: len(operation.hash_value) * PAGE]
        return operation.hash_value, self._page_transfer(operation)
