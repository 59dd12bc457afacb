"""Loads of the connectors beside ours, where vLLM has several (``MultiConnector``).

One that loads within a step says only after it which blocks it could not fill. vLLM then computes them again; what that
step has computed over them, for whichever request that shares them, is wrong and must not be stored. KVTiersConnector
refuses such a connector; SharedStorageConnector stores nothing while it is not known that the load came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group

from tiers.errors import ConfigError

#: Those of vLLM's connectors that load between steps, or nothing (read in 0.28 to 0.33), and kvtiers' own.
_BETWEEN_STEPS = (
    "ExampleHiddenStatesConnector",
    "HF3FSKVConnector",
    "KVTiersConnector",
    "LMCacheMPConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",  # from 0.33 on also within steps where it is told to, but its loads never fail
    "SharedStorageConnector",
    "SimpleCPUOffloadConnector",
)


def check_none_makes_kv_up() -> None:
    """Refuse vLLM's benchmark of decoding: it fills blocks with a constant and calls them loaded.

    To be called in a worker, once vLLM has made the connectors of its process.

    Raises:
        ConfigError: it is one of them.
    """
    if any(type(each).__name__ == "DecodeBenchConnector" for each in _all_connectors()):
        raise ConfigError(
            "DecodeBenchConnector makes KV up, which would be stored as good: use one of both", field="connectors"
        )


def check_none_loads_within_steps() -> None:
    """Refuse connectors that may load within a step: what is computed over a load that failed would be stored.

    To be called as ``check_none_makes_kv_up``.

    Raises:
        ConfigError: names them.
    """
    check_none_makes_kv_up()
    names = [type(each).__name__ for each in _all_connectors() if not _loads_between_steps(each)]
    if names:
        raise no_loads_within_steps(", ".join(names))


def no_loads_within_steps(who: str) -> ConfigError:
    """The refusal of such a connector."""
    return ConfigError(
        f"{who} may load within a step, and what is computed over a load that failed would be stored as good. Accepted "
        f"beside KVTiersConnector: {', '.join(_BETWEEN_STEPS)} (the Mooncake store with load_async). Beside others use "
        "SharedStorageConnector",
        field="connectors",
    )


def _all_connectors() -> list[Any]:
    """The connectors of this worker; of a MultiConnector those that it holds."""
    left = [get_kv_transfer_group()] if has_kv_transfer_group() else []
    leaves = []
    while left:
        each = left.pop()
        inside = getattr(each, "_connectors", None)
        if type(each).__name__ == "MultiConnector" and inside is not None:
            left += inside
        else:
            leaves.append(each)
    return leaves


def _loads_between_steps(connector: Any) -> bool:
    name = type(connector).__name__
    if name == "MooncakeStoreConnector":
        options = connector._kv_transfer_config.kv_connector_extra_config or {}
        return bool(options.get("load_async", True))
    return name in _BETWEEN_STEPS and type(connector).__module__.startswith(("vllm.", "connector.vllm."))


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
        if told is not None:  # ours are asynchronous (but for sync_load_budget_bytes), so it speaks of others
            return told
        # A vLLM that does not say: who waits for an asynchronous load is not in the batch in the step that asks for it.
        cached = scheduler_output.scheduled_cached_reqs
        computed = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
        computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return any(tokens > self._on_gpu.get(req_id, tokens) for req_id, tokens in computed)


class Untrusted:
    """Blocks of the GPU that steps in doubt have filled, where then a load failed. Scheduler thread only.

    vLLM looks for the blocks of a failed load in its running requests. Of one that has ended or was preempted by then
    they stay in its prefix cache as good, and under ``recompute`` also those that have not been computed again. A block
    here is an id and the hash of what should be there: when vLLM has given the id to others, it is a good one again.

    Args:
        steps_max: that are under way at once.
    """

    def __init__(self, steps_max: int) -> None:
        self._in_doubt: deque[dict[int, bytes]] = deque([{}], maxlen=steps_max)
        self._hashes: dict[int, bytes] = {}  # by id, so there are no more than the GPU has

    def begin_step(self) -> None:
        """What is noted from now on is the next step's."""
        self._in_doubt.append({})

    def note(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """This step, which is in doubt, has them."""
        self._in_doubt[-1].update(blocks)

    def load_failed(self) -> None:
        """Of a step whose outcome has become known."""
        for blocks in self._in_doubt:
            self._hashes.update(blocks)
            blocks.clear()

    def has_any(self, blocks: Iterable[tuple[int, bytes]]) -> bool:
        """Whether one of these is such a block, so that what was computed behind it is none either."""
        return bool(self._hashes) and any(self._hashes.get(block_id) == expected for block_id, expected in blocks)
