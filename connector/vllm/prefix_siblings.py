"""Loads of the connectors beside ours, where vLLM has several (``MultiConnector``).

One that loads within a step says only after it which blocks it could not fill. vLLM then computes them again; what that
step has computed over them, for whichever request that shares them, is wrong and must not be stored.
"""

from __future__ import annotations

from typing import Any


class SiblingLoads:
    """Says in which steps nothing may be stored. Scheduler thread only.

    Args:
        steps_max: that are under way at once. A step is built before the outcome of so many less one is known.
    """

    def __init__(self, steps_max: int) -> None:
        self._steps_max = steps_max
        self._steps_left = 0
        self._on_gpu: dict[str, int] = {}  # request -> tokens, of those asked for since the last step

    def asked(self, req_id: str, tokens_on_gpu: int) -> None:
        """To be called when vLLM asks what of a request can be loaded."""
        self._on_gpu[req_id] = tokens_on_gpu

    def in_doubt(self, scheduler_output: Any) -> bool:
        """Whether what this step's requests hold may turn out to be wrong. To be called once a step."""
        if self._are_in(scheduler_output):
            self._steps_left = self._steps_max
        self._on_gpu.clear()
        is_in_doubt = self._steps_left > 0
        self._steps_left = max(0, self._steps_left - 1)
        return is_in_doubt

    def _are_in(self, scheduler_output: Any) -> bool:
        told: bool | None = getattr(scheduler_output, "has_sync_kv_loads", None)
        if told is not None:  # ours are asynchronous, so it speaks of others
            return told
        # A vLLM that does not say: who waits for an asynchronous load is not in the batch in the step that asks for it.
        cached = scheduler_output.scheduled_cached_reqs
        computed = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
        computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return any(tokens > self._on_gpu.get(req_id, tokens) for req_id, tokens in computed)
