"""KVTiersConnector: plugs kvtiers into vLLM's KV offloading.

::

    {"kv_connector": "KVTiersConnector", "kv_role": "kv_both",
     "kv_connector_extra_config": {"config_file": "/etc/kvtiers.yaml"}}

or inline, ``"cpu_bytes_to_use": "4GiB", "tiers": [{"type": "fs", …}]``.

- ``"way": "spec"`` (default): kvtiers provides the CPU region and the tiering, too.
- ``"way": "tier"``: kvtiers' tiers run behind vLLM's own TieringOffloadingSpec.

If kvtiers is installed, vLLM finds the connector by its plug-in entry point. If kvtiers is only on the path, add
``"kv_connector_module_path": "kvtiers.vllm"``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from ...vllm import register
from ..ranks.place import ignored_options
from ..vllm_config import connector_options, deployment_from, keeps_storage
from . import refusals, translate
from .contract import implements
from .handed import handing_over
from .logs import log_as_vllm
from .metrics import shared_types
from .open_lookups import OpenLookups
from .rank_manager import RankManager
from .spec import KVTiersManager, KVTiersSpec


@implements
class KVTiersConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """vLLM's OffloadingConnector with KVTiersSpec or KVTiersTier. It hands them vLLM's whole config.

    The scheduler's process and each worker's process have one object. vLLM calls each object from one thread.

    Args:
        vllm_config, role, kv_cache_config: from vLLM.

    Raises:
        ConfigError: names the option in ``kv_connector_extra_config`` that is wrong or does not fit the engine.
    """

    # The manager, in the scheduler's process. None: vLLM's own manager, which does not decide about loads.
    _judging: KVTiersManager | RankManager | None = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        log_as_vllm()
        vllm_config = self._with_spec(vllm_config)
        with handing_over(vllm_config, kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)
        manager = None if self.connector_scheduler is None else self.connector_scheduler.manager
        self._open_lookups: OpenLookups | None = getattr(manager, "open_lookups", None)  # vLLM's own managers have none
        if isinstance(manager, KVTiersManager | RankManager):
            self._judging = manager

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Take a worker's KV tensors. vLLM calls this after it has created all connectors of the process."""
        refusals.check_siblings()
        super().register_kv_caches(kv_caches)

    @classmethod
    def options_of(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """Convert ``kv_connector_extra_config`` to the options of vLLM's OffloadingConnector.

        Raises:
            ConfigError: as for the class.
        """
        return connector_options(extra_config)

    @classmethod
    def _with_spec(cls, vllm_config: Any) -> Any:
        """Return a copy of ``vllm_config`` whose connector options name the spec."""
        transfer = copy.copy(vllm_config.kv_transfer_config)
        transfer.kv_connector_extra_config = cls.options_of(transfer.kv_connector_extra_config)
        changed = copy.copy(vllm_config)
        changed.kv_transfer_config = transfer
        return changed

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Any) -> bool:
        """Return False, because KV is not transferred layer by layer.

        With full CUDA graphs, vLLM calls this before it loads the model. So wrong options stop vLLM within seconds.

        Raises:
            ConfigError: as for the class. vLLM's config wraps it in pydantic's ValidationError, which shows its text.
        """
        log_as_vllm()
        options = cls.options_of(extra_config)
        if options["spec_name"] == KVTiersSpec.__name__:  # for the other way, connector_options has read them
            deployment_from(options)
            ignored_options(options)
            keeps_storage(options)
        return False

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        """Create the metrics of the configured spec, in the process that exports them."""
        return super().build_prom_metrics(
            cls._with_spec(vllm_config), shared_types(metric_types), labelnames, per_engine_labelvalues
        )

    def on_new_request(self, request: Any) -> None:
        """Start a request, before vLLM looks up any of its blocks."""
        translate.hold_back_stream(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Return how many more tokens of a request can be loaded, and whether they arrive between steps.

        (None, False): not known yet, ask again.

        vLLM calls this in every step. While nothing has changed for a waiting request, its keys are not looked up
        again.
        """
        translate.hold_back_stream(request)  # releases without on_new_request start requests here
        if self._open_lookups is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._open_lookups.continue_wait(request.request_id, num_computed_tokens):
            return None, False
        if self._judging is not None:
            self._judging.note_request(request.request_id, request.num_tokens, num_computed_tokens)
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._open_lookups.note_asked(request.request_id, num_computed_tokens, is_open=answer[0] is None)
        if isinstance(self._judging, KVTiersManager) and answer[0] is not None:
            self._judging.note_prompt(
                request.request_id,
                tokens=request.num_tokens,
                engine_tokens=num_computed_tokens,
                loaded_tokens=answer[0],
            )
        return answer

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Choose a step's loads and stores.

        Raises:
            ConfigError: another connector loads within this step.
        """
        refusals.check_step(scheduler_output)
        if self._judging is not None:
            steps = self._judging.decisions.steps
            scheduled = () if steps.are_decodes else translate.scheduled(scheduler_output)
            steps.began(scheduled, time.monotonic())
        return super().build_connector_meta(scheduler_output)

    def take_events(self) -> Iterable[Any]:
        """Return events. vLLM calls this once per step, when the step's output has arrived."""
        if self._judging is not None:
            self._judging.decisions.steps.ended(time.monotonic())
        return super().take_events()  # type: ignore[no-any-return]


register()  # when it reads stats, MultiConnector looks classes up by name only, even if a module path was given
