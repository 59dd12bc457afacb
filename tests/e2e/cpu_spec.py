"""vLLM's own TieringOffloadingSpec on vLLM's CPU platform.

vLLM's spec refuses every platform that is not CUDA, ROCm or XPU when it makes the worker; its scheduler's side runs
anywhere. This puts a worker that copies between CPU tensors under it and leaves the rest alone, so that a tier behind
it, vLLM's or ours, meets vLLM's real manager.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtiers.connector.vllm.spec import KVTiersWorker


class CpuTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """TieringOffloadingSpec with a worker for CPU tensors."""

    def get_worker(self, kv_caches: Any) -> Any:
        # By position: until 0.29 the chunks were called blocks.
        num_chunks = self.num_chunks if hasattr(self, "num_chunks") else self.num_blocks
        region = SharedOffloadRegion(
            self._engine_id,
            num_chunks,
            self.config.parallel.rank,
            self.kv_bytes_per_chunk,
            self.cpu_page_size_per_worker,
        )
        region.create_next_view = region.create_next_worker_view  # its name in kvtiers
        return KVTiersWorker(kv_caches, region, self.blocks_per_chunk)
