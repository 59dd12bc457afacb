"""SharedStorageConnector: plugs a tier per rank into vLLM's KV offloading, for engines on one or several hosts.

::

    {"kv_connector": "SharedStorageConnector", "kv_connector_module_path": "kvtiers.vllm",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"shared_storage_path": "/mnt/nvme/kv"}}

The place may be a folder on each host's own disk, or storage that all hosts share. ``connector.vllm.ranks`` describes
the parts. There is no CPU cache: blocks pass through ``cpu_bytes_to_use`` bytes of each rank on their way.

If a rank cannot load a block, the connector reports the block to vLLM as failed. vLLM computes it again under
``kv_load_failure_policy: recompute``, and it is then stored again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ...tiers.daemon_pool import DaemonPool
from ...tiers.plain_logs import get_logger
from ...vllm import register
from ..ranks.place import LOAD_DEADLINE_S, chunk_of, ignored_options, rank_tier, seconds_of, staging_bytes
from ..vllm_config import keeps_storage
from . import weights
from .connector import KVTiersConnector
from .contract import implements
from .rank_manager import RankManager
from .rank_messages import RankReport, RankStep
from .rank_worker import RankWorker

logger = get_logger(__name__)

_ADAPTER_THREADS = 4  # threads; an adapter holds at most one, even if its files are on a mount that hangs
ADAPTER_DEADLINE_S = 5.0  # time to read a LoRA adapter's files; then its prompts are computed and not stored


@dataclass(frozen=True, slots=True)
class _Read:
    """A read of an adapter's files, and the time until which requests wait for it."""

    revision: Future[str | None]
    until: float


@implements
class SharedStorageConnector(KVTiersConnector):
    """KVTiersConnector with RankTiersSpec.

    The scheduler's process and each worker's process have one object. vLLM calls each object from one thread.

    ``kv_connector_extra_config`` accepts the place (see ``connector.ranks.place.rank_tier``), ``blocks_per_chunk``,
    ``cpu_bytes_to_use``, ``lookup_deadline_s``, ``load_deadline_s``, ``storage_after_reset`` and ``identity``.

    Raises:
        ConfigError: names the option that is wrong or does not fit the engine.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "recompute") == "fail":
            logger.warning(
                "kv_load_failure_policy is 'fail': a request that loads a damaged block will fail; write 'recompute'"
            )
        self._adapters = weights.Adapters()
        self._adapter_pool = None
        if self.connector_scheduler is not None:
            self._adapter_pool = DaemonPool(_ADAPTER_THREADS, "kvtiers-adapters")
        self._reads: dict[tuple[int, str], _Read] = {}  # the latest one of each adapter
        self._asked: dict[str, _Read] = {}  # request -> read of its adapter

    @classmethod
    def options_of(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """Convert ``kv_connector_extra_config`` to the options of vLLM's OffloadingConnector.

        Raises:
            ConfigError: an option is missing or not accepted.
        """
        rank_tier(extra_config)
        ignored_options(extra_config)
        keeps_storage(extra_config)
        staging_bytes(extra_config)
        seconds_of(extra_config, "load_deadline_s", LOAD_DEADLINE_S)
        spec = {"spec_name": "RankTiersSpec", "spec_module_path": "kvtiers.vllm"}
        return {**extra_config, **spec, "blocks_per_chunk": chunk_of(extra_config)}

    @property
    def _rank_manager(self) -> RankManager:
        assert self.connector_scheduler is not None
        manager = self.connector_scheduler.manager
        assert isinstance(manager, RankManager)
        return manager

    @property
    def _rank_worker(self) -> RankWorker:
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        assert isinstance(worker, RankWorker)
        return worker

    # -- scheduler ---------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Start a request, and the reading of its LoRA adapter's files."""
        self._ask_adapter(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Return how many tokens of a request can be loaded. None: not known yet, ask again."""
        self._ask_adapter(request)  # releases without on_new_request start requests here
        if not self._has_adapter(request.request_id):
            return None, False
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] is None or self._rank_manager.loads.accept(request.request_id, found[0]):
            return found
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> RankStep:
        """Choose a step's loads and stores. See ``KVTiersConnector``."""
        return self._rank_manager.step_of(super().build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the ranks' reports."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self._rank_manager.note(vars(report))  # to vLLM, it is a report of any connector
        super().update_connector_output(connector_output)

    def _ask_adapter(self, request: Any) -> None:
        """Read the files of a request's adapter on a thread. Until then no block of the request is loaded or stored.

        vLLM's block hashes contain an adapter's name. The key also contains a digest of its files, because the adapter
        may be trained again under the same name.
        """
        lora, req_id = getattr(request, "lora_request", None), request.request_id
        if lora is None or req_id in self._rank_manager.adapters:
            return
        assert self._adapter_pool is not None
        self._rank_manager.adapters[req_id] = None
        adapter = lora.lora_int_id, lora.lora_path
        read = self._reads.get(adapter)
        if read is None or read.revision.done():
            revision = self._adapter_pool.submit(self._adapters.revision, lora)
            read = self._reads[adapter] = _Read(revision, time.monotonic() + ADAPTER_DEADLINE_S)
        self._asked[req_id] = read

    def _has_adapter(self, req_id: str) -> bool:
        """Whether the adapter's files were read, or the time limit passed. Always true of requests without adapter."""
        read = self._asked.get(req_id)
        if read is None:
            return True
        revision = read.revision
        if not revision.done() and time.monotonic() < read.until:
            return False
        del self._asked[req_id]
        if revision.done() and not revision.cancelled() and revision.exception() is None:
            self._rank_manager.adapters[req_id] = revision.result()
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        """Forget a request's read of its adapter."""
        self._asked.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        """As ``request_finished``. vLLM calls this method if connectors may have several KV cache groups."""
        self._asked.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)

    # -- worker ------------------------------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Copy blocks that are about to be overwritten. vLLM calls this first in a step."""
        self._rank_worker.note_resets(_step(kv_connector_metadata)["resets"])
        super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads, and the stores of the step before."""
        step = _step(self._connector_metadata)
        self._rank_worker.note_resets(step["resets"])
        self._rank_worker.note_uses(step["uses"])
        super().start_load_kv(forward_context, **kwargs)
        self._rank_worker.end_loads(step["late"])  # a load may be late in the step that starts it

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests whose loads ended, and the requests whose loads failed. vLLM calls this from 0.30 on."""
        theirs: Any = getattr(super(), "get_transfer_results", None)
        results = theirs(finished_req_ids)
        failed: set[str] = getattr(results, "failed_recving", set())
        failed |= self._rank_worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that failed to load."""
        return self._rank_worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> RankReport | None:
        """Return this rank's stored and lost blocks since the last step, with vLLM's own report."""
        return self._rank_worker.report(super().build_connector_worker_meta())

    def get_kv_connector_stats(self) -> Any:
        """Return the changes of this process's metrics."""
        if self.connector_worker is not None and self.connector_worker.worker is not None:
            return self._rank_worker.take_stats()
        return super().get_kv_connector_stats()

    def shutdown(self) -> None:
        """End the transfers of this process and its tier."""
        if self._adapter_pool is not None:
            self._adapter_pool.shutdown(0.0)
        super().shutdown()


def _step(meta: Any) -> Mapping[str, Any]:
    assert isinstance(meta, RankStep)
    return vars(meta)  # to vLLM, it is metadata of any connector


register()  # when it reads stats, MultiConnector looks classes up by name only
