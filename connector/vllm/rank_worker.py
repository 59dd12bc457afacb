"""RankWorker: a worker's side of RankTiersSpec."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker as VllmWorker
from vllm.v1.kv_offload.base import TransferResult as VllmTransferResult

from ...tiers.base import SecondaryTierManager
from ...tiers.blocks.keys import OffloadKey
from ..base import CanonicalKVCaches, EngineSpec
from ..core.pacing import SHUTDOWN_S
from ..ranks.transfers import RankTransfers
from ..region.shared_region import SharedOffloadRegion
from ..transfer.gpu_handler import create_handlers
from .contract import implements
from .metrics import StatsExporter
from .rank_messages import RankReport, report_of
from .spec import JOBS_MAX, gpu_blocks


@implements
class RankWorker(VllmWorker):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """A rank's transfers. The worker's thread only.

    vLLM asserts that transfers succeed. So a failed load is reported as ended, and its blocks as failed.

    Args:
        tier: this rank's tier, over ``region``. This object shuts both down.
        apart: the identity of the rank's namespace.
        kv_caches: the KV tensors.
        fails_requests: report requests that failed to load, because blocks of several groups may have the same ids.
    """

    def __init__(
        self,
        tier: SecondaryTierManager,
        region: SharedOffloadRegion,
        apart: EngineSpec,
        kv_caches: CanonicalKVCaches,
        *,
        blocks_per_chunk: int,
        load_deadline_s: float,
        fails_requests: bool,
    ) -> None:
        self._region = region
        self._rank_bit = 1 << apart.config.parallel.rank
        self._revisions = {str(apart.config.model.revision): self._rank_bit}  # for the first report
        self._resets = 0
        self._stats = StatsExporter(apart.metrics)
        self._fails_requests = fails_requests
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._failed: set[str] = set()  # requests, for the next report
        self._loading: dict[int, str] = {}  # job -> request
        views = [region.create_next_view(each.page_size_bytes * blocks_per_chunk) for each in kv_caches.tensors]
        self._transfers = RankTransfers(
            tier,
            apart.metrics,
            create_handlers(kv_caches, views, blocks_per_chunk, jobs_max=JOBS_MAX),
            slots=region.geometry.num_blocks,
            slot_bytes=region.geometry.row_stride,
            blocks_per_chunk=blocks_per_chunk,
            load_deadline_s=load_deadline_s,
        )

    def note_resets(self, resets: int) -> None:
        """Take a step's ``RankStep.resets``, before its transfers are submitted."""
        if resets != self._resets:
            self._resets = resets
            self._transfers.drop_copies()

    def note_uses(self, keys: Collection[OffloadKey]) -> None:
        """Take a step's ``RankStep.uses``."""
        self._transfers.touch(keys)

    def end_loads(self, req_ids: Collection[str]) -> None:
        """Take a step's ``RankStep.late``. Blocks that have not arrived are reported as failed."""
        for job_id, req_id in self._loading.items():
            if req_id in req_ids:
                self._transfers.give_up(job_id, "the load takes longer than computing")

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        if dst_spec.resets != self._resets:
            self._transfers.drop_store(job_id, dst_spec.keys)
            return True
        self._transfers.store(job_id, dst_spec.keys, gpu_blocks(src_spec))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ARG002
        self._loading[job_id] = src_spec.req_id
        self._transfers.load(job_id, src_spec.keys, gpu_blocks(dst_spec))
        return True

    def get_finished(self) -> list[VllmTransferResult]:
        results = []
        for ended in self._transfers.take_ended():
            req_id = self._loading.pop(ended.job_id, "")
            if ended.failed_blocks:
                self._failed.add(req_id)
                if self._fails_requests:
                    self._failed_requests.add(req_id)
                else:
                    self._failed_blocks.update(ended.failed_blocks)
            results.append(VllmTransferResult(ended.job_id, True, ended.moved_bytes, ended.took_s))
        return results

    def take_failed_blocks(self) -> set[int]:
        """Return the ids of blocks that were not loaded since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Return the requests that were not loaded since the last call; empty unless ``fails_requests``."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def report(self, meta: Any) -> RankReport | None:
        """Add this rank's report to vLLM's own report."""
        stored, lost = self._transfers.take_report()
        failed, self._failed = self._failed, set()
        revisions, self._revisions = self._revisions, {}
        ranks = dict.fromkeys(stored, self._rank_bit)
        return report_of(meta, stored=ranks, lost=lost, failed=failed, revisions=revisions)

    def take_stats(self) -> Any:
        """Return the changes of this rank's metrics."""
        return self._stats.take()

    def wait(self, job_ids: Collection[int]) -> None:
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        """Finish waiting stores for a bounded time, then shut down."""
        self._transfers.shutdown(SHUTDOWN_S)
        self._region.cleanup()
