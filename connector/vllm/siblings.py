"""Loads of the connectors beside ours, where vLLM has several (``MultiConnector``).

One that loads within a step says only after it which blocks it could not fill. vLLM then computes them again; what that
step has computed over them, for whichever request that shares them, is wrong and must not be stored.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from connector.vllm import translate
from tiers.errors import ConfigError

#: Whether vLLM says which steps have such loads: from 0.29 on.
STEPS_SAY_SO = "has_sync_kv_loads" in {field.name for field in dataclasses.fields(SchedulerOutput)}

_SEVERAL = "MultiConnector"
_MAKES_KV_UP = "DecodeBenchConnector"

#: Those of vLLM's connectors that load between steps, or nothing (read in 0.28 to 0.33).
_BETWEEN_STEPS = (
    "ExampleHiddenStatesConnector",
    "HF3FSKVConnector",
    "LMCacheMPConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",  # from 0.33 on also within steps where it is told to, but its loads never fail
    "SimpleCPUOffloadConnector",
)


def check_none_makes_kv_up() -> None:
    """Refuse vLLM's benchmark of decoding: it fills blocks with a constant and calls them loaded.

    Raises:
        ConfigError: it is beside the connector that is under construction.
    """
    if any(each.get("kv_connector") == _MAKES_KV_UP for each in _all_connectors()):
        raise ConfigError(
            f"{_MAKES_KV_UP} makes KV up, which would be stored as good: use one of both", field="connectors"
        )


def loading_within_steps() -> list[str]:
    """Names of the connectors that may load within a step, beside the one that is under construction."""
    return [str(each.get("kv_connector")) for each in _all_connectors() if not _loads_between_steps(each)]


def refusal(names: list[str]) -> ConfigError:
    """The error for an engine with such connectors, where what is wrong could not be kept out."""
    return ConfigError(
        f"{', '.join(names)} may load within a step, and what is computed over a load that failed would be stored as "
        f"good. Accepted beside this way: SharedStorageConnector, {', '.join(_BETWEEN_STEPS)} (the Mooncake store with "
        "load_async). Beside others use SharedStorageConnector or, from vLLM 0.29 on, KVTiersSpec",
        field="connectors",
    )


def _all_connectors() -> list[Mapping[str, Any]]:
    """Those of the engine that is under construction, where it has several, ours included."""
    vllm_configs = translate.find_arguments("vllm_config", "VllmConfig")
    configs: list[Any] = [getattr(each, "kv_transfer_config", None) for each in vllm_configs]
    several = [each for each in configs if getattr(each, "kv_connector", None) == _SEVERAL]
    # One MultiConnector may be in another, and each gives its connectors a config of their own: the engine's has all.
    return list(_leaves(several[-1].kv_connector_extra_config)) if several else []


def _leaves(extra_config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for each in extra_config.get("connectors", ()):
        if each.get("kv_connector") == _SEVERAL and not each.get("kv_connector_module_path"):
            yield from _leaves(each.get("kv_connector_extra_config") or {})
        else:
            yield each


def _loads_between_steps(connector: Mapping[str, Any]) -> bool:
    name, module = connector.get("kv_connector"), connector.get("kv_connector_module_path")
    if module:
        return (module, name) == ("connector.vllm.shared_storage", "SharedStorageConnector")
    options = connector.get("kv_connector_extra_config") or {}
    return name in _BETWEEN_STEPS and (name != "MooncakeStoreConnector" or bool(options.get("load_async", True)))


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


class DoubtfulRequests:
    """Requests of which nothing may be stored: they joined in a step in doubt, or a load failed that they may stand on.

    Only those that join can have blocks which another connector loads in that step. vLLM sets a request back whose load
    failed, or ends it, and offers what an ended one holds once more. A manager is shown neither steps nor their
    outcome, nor which blocks a request has: they are looked up the stack, as vLLM asks in another order from 0.33 on.
    Scheduler thread only.

    Args:
        steps_max: that are under way at once.
        tokens_per_block: of each group.
        tokens_per_hash: of vLLM's hashes.
    """

    def __init__(self, steps_max: int, tokens_per_block: Sequence[int], tokens_per_hash: int) -> None:
        self._loads = SiblingLoads(steps_max)
        self._untrusted = Untrusted(steps_max)
        self._tokens_per_block = tokens_per_block
        self._tokens_per_hash = tokens_per_hash
        self._joined: deque[set[str]] = deque(maxlen=steps_max)  # in a step in doubt whose outcome may not be known
        self._spoiled: set[str] = set()
        self._step: Any = None

    def look(self) -> None:
        """To be called in every step, once or more often."""
        step = translate.find_argument("scheduler_output", SchedulerOutput.__name__)
        if step is None or step is self._step:
            return
        self._step = step
        self._untrusted.begin_step()
        requests = next(translate.find_arguments("self", "OffloadingConnectorScheduler"))._req_status
        cached = step.scheduled_cached_reqs
        joins = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        joins |= {
            req_id: tokens
            for req_id, tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if req_id in cached.resumed_req_ids
        }
        for req_id, tokens in joins.items():
            if self._untrusted.has_any(self._blocks(requests[req_id], 0, tokens)):
                self._spoiled.add(req_id)
        self._joined.append(set(joins) if self._loads.in_doubt(step) else set())
        for req_id in set().union(*self._joined) & step.num_scheduled_tokens.keys():
            known = requests[req_id]
            self._untrusted.note(self._blocks(known, known.num_locally_computed_tokens))

    def hear(self) -> None:
        """To be called when vLLM has the outcome of a step."""
        output = translate.find_argument("kv_connector_output", KVConnectorOutput.__name__)
        if output is not None and output.invalid_block_ids:
            self._untrusted.load_failed()
            self._spoiled.update(*self._joined)  # one that was admitted before the outcome is not set back

    def has(self, req_id: str) -> bool:
        """Whether this is one until a later step."""
        self.look()
        return any(req_id in joined for joined in self._joined)

    def has_for_good(self, req_id: str) -> bool:
        """Whether this is one until it ends."""
        self.look()
        return req_id in self._spoiled

    def forget(self, req_id: str) -> None:
        """It has ended, and is offered no more."""
        for req_ids in (self._spoiled, *self._joined):
            req_ids.discard(req_id)

    def _blocks(self, known: Any, first_token: int, end_token: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Those of a request with tokens of this range, as far as they are whole."""
        for tokens, group in zip(self._tokens_per_block, known.group_states, strict=True):
            hashes_per_block = tokens // self._tokens_per_hash
            hashes = itertools.islice(known.req.block_hashes, hashes_per_block - 1, None, hashes_per_block)
            end = None if end_token is None else -(-end_token // tokens)
            yield from itertools.islice(zip(group.block_ids, hashes, strict=False), first_token // tokens, end)
