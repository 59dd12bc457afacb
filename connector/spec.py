"""DeploymentSpec: makes the manager and the handlers from an engine's identity and a deployment's config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..tiers.base import SecondaryTierManager
from ..tiers.config.deployment import DeploymentConfig
from ..tiers.config.tier_options import TierConfig
from ..tiers.config.values import human_bytes
from ..tiers.errors import ConfigError
from ..tiers.metrics import Metrics
from ..tiers.plain_logs import get_logger
from ..tiers.registry import SecondaryTierFactory
from .base import (
    CanonicalKVCaches,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingConfig,
    OffloadingHandler,
    OffloadingSpec,
)
from .core.eviction import create_policy
from .core.guard import GuardedTier, shut_down_tiers
from .core.manager import BlockManager
from .core.options import LOOKUP_TOTAL_S, ManagerOptions
from .core.slots import Slots
from .core.trace_file import TraceFile
from .region.region_header import row_stride
from .region.shared_region import SharedOffloadRegion

if TYPE_CHECKING:
    from ..tiers.exporter import MetricsServer

logger = get_logger(__name__)


class DeploymentSpec(OffloadingSpec):
    """One engine's region, tiers and handlers.

    The scheduler process calls ``get_manager`` and each worker process calls ``get_handlers``. A single-process engine
    calls both on one object; its region is anonymous.

    Args:
        config: the engine's identity.
        deployment: the region and the tiers. Its ``blocks_per_chunk`` must equal the engine's.
        cpu_page_size: bytes of one worker's part of a stored block: the sum of its canonical tensors' page sizes, times
            ``blocks_per_chunk``.
        rank: rank of this worker; None: this is a scheduler in a process of its own.
        in_process: True: this process is both the scheduler and the only worker.
        blocks_per_token, step_tokens_max: see ``ManagerOptions``.

    Attributes:
        metrics: metrics of the region and of all tiers.
        region: the region; ``shutdown`` frees it.

    Raises:
        ConfigError: the region is smaller than one block, or two settings contradict each other.
        RegionError: the region cannot be created or joined.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        deployment: DeploymentConfig,
        cpu_page_size: int,
        *,
        rank: int | None = 0,
        in_process: bool = True,
        blocks_per_token: float = 0.0,
        step_tokens_max: int = 8192,
    ) -> None:
        super().__init__(config)
        if deployment.blocks_per_chunk != config.cache.blocks_per_chunk:
            raise ConfigError(
                f"is {deployment.blocks_per_chunk}, the engine's is {config.cache.blocks_per_chunk}; "
                "both must be the same",
                field="blocks_per_chunk",
            )
        workers = config.parallel.world_size
        if in_process and workers != 1:
            raise ConfigError(f"is {workers}; an engine in one process has 1 worker", field="parallel.world_size")
        if cpu_page_size < 1:
            raise ConfigError(f"{cpu_page_size} is not accepted; write 1 or more bytes", field="cpu_page_size")
        self.deployment = deployment
        self._blocks_per_token, self._step_tokens_max = blocks_per_token, step_tokens_max
        self.metrics = Metrics()
        region = deployment.region
        row_bytes = row_stride(cpu_page_size, workers)
        num_blocks = region.size // row_bytes
        if not num_blocks:
            raise ConfigError(
                f"{human_bytes(region.size)} do not hold one block; a block here has {human_bytes(row_bytes)}",
                field="region.size",
            )
        if in_process:
            self.region = SharedOffloadRegion.anonymous(num_blocks, cpu_page_size)
        else:
            instance_id = region.instance_id or config.engine_id
            self.region = SharedOffloadRegion(instance_id, num_blocks, cpu_page_size, workers, rank)
        self._manager: BlockManager | None = None
        self._handlers: list[OffloadingHandler] = []
        self._metrics_server: MetricsServer | None = None
        self._trace: TraceFile | None = None

    def get_manager(self) -> BlockManager:
        """Return the scheduler's side, with its tiers running. Repeated calls return the same manager.

        Raises:
            ConfigError: a tier's options are wrong, or ``metrics.port`` is set without prometheus_client.
            StoreError: a tier's storage failed with an error that a retry does not fix.
        """
        if self._manager is None:
            self._manager = self._make_manager()
            self._metrics_server = self._serve_metrics()
            if self.deployment.trace_requests is not None:
                self._trace = TraceFile(self.deployment.trace_requests)
                self._manager.slots.record.write = self._trace.write
        return self._manager

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        # Imported here because it imports torch, which the scheduler does not need.
        from .transfer.gpu_handler import create_handlers

        if not self._handlers:
            sizes = [tensor.page_size_bytes * self.blocks_per_chunk for tensor in kv_caches.tensors]
            views = [self.region.create_next_view(size) for size in sizes]
            self._handlers = list(
                create_handlers(kv_caches, views, self.blocks_per_chunk, **self.deployment.handler.options())
            )
        store, load = self._handlers
        yield GPULoadStoreSpec, CPULoadStoreSpec, store
        yield CPULoadStoreSpec, GPULoadStoreSpec, load

    def shutdown(self) -> None:
        """Shut down the handlers, then the manager, then the region that both use. Idempotent."""
        for handler in self._handlers:
            handler.shutdown()
        self._handlers = []
        if self._manager is not None:
            self._manager.shutdown()
        if self._metrics_server is not None:
            self._metrics_server.close()
            self._metrics_server = None
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        self.region.cleanup()

    def _serve_metrics(self) -> MetricsServer | None:
        where = self.deployment.metrics
        if where.port is None:
            return None
        from ..tiers.exporter import serve_or_warn  # needs prometheus_client

        return serve_or_warn(self.metrics, where.port, where.address)

    def _make_manager(self) -> BlockManager:
        region = self.deployment.region
        view = self.region.create_kv_memoryview()
        num_blocks = self.region.geometry.num_blocks
        slots = Slots(num_blocks, create_policy(region.eviction_policy, num_blocks), metrics=self.metrics)
        tiers: list[SecondaryTierManager] = []
        try:
            for tier in self.deployment.tiers:
                tiers.append(SecondaryTierFactory.create_secondary_tier(dict(tier), view, self))
            # Only from our own tiers' options: in a foreign tier's options these keys may mean anything.
            own = [tier for tier in self.deployment.tiers if isinstance(tier, TierConfig)]
            options = ManagerOptions(
                promotion_wait_s=region.promotion_wait_s,
                # A larger limit in a tier's config says that a hit in that tier is worth the wait.
                lookup_total_s=max([LOOKUP_TOTAL_S, *(tier.lookup_deadline_s for tier in own)]),
                blocks_per_token=self._blocks_per_token,
                step_tokens_max=self._step_tokens_max,
            )
            return BlockManager(slots, tiers, options)
        except BaseException:
            # Guarded, so that an error while shutting down does not hide the error that caused the shutdown.
            shut_down_tiers([GuardedTier(tier, self.metrics) for tier in tiers], ManagerOptions().shutdown_s)
            raise
