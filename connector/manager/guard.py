"""GuardedTier: a wall around a tier. Nothing that a tier raises gets past it into the engine (S4)."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any, Final, TypeVar

from kvtiers.connector.manager.options import LOAD_DEADLINE_S, LOAD_GRACE_S
from kvtiers.tiers.base import JobResult, OffloadingEvent, ReqContext, SecondaryTierManager
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.metrics import Metrics
from kvtiers.tiers.plain_logs import get_logger

logger = get_logger(__name__)

_T = TypeVar("_T")

#: The part of its time that a tier's shutdown is told. What is left is for what it closes after that.
SHUTDOWN_SHARE: Final = 0.8

_BY_SIGNALS: Final = (KeyboardInterrupt, SystemExit)

REQUESTS_MAX: Final = 65_536  # whose lookups are told from each other; beyond, those longest known may count twice

#: What of a tier may fail, as ``kvtiers_contained_errors_total`` names it.
_GUARDED: Final = (
    *("drain_jobs", "get_finished", "lookup", "on_request_finished", "on_schedule_end", "shutdown", "shutdown_s"),
    *("submit_load", "submit_store", "take_answered", "take_events", "touch"),
)

#: What ``GuardedTier.call`` returns where the tier raised.
RAISED: Final = object()


class GuardedTier:
    """One tier, called by name. What it does wrong is counted, and logged the first time. Scheduler thread only.

    Also what is no Exception (a CancelledError, a Rust extension's panic) comes from a tier's code, and would end the
    engine. Only what signals raise passes: vLLM's own handler raises SystemExit once, wherever the engine is.

    Attributes:
        name: for logs and metrics: the tier's own where it has one, else its type.
    """

    def __init__(self, tier: SecondaryTierManager, metrics: Metrics) -> None:
        self.tier = tier
        own = getattr(tier, "name", None)
        self.name = tier.tier_type if own in (None, "") else str(own)  # labels are text
        self._metrics = metrics
        self._logged: set[str] = set()
        self._answered: OrderedDict[str, set[OffloadKey]] = OrderedDict()  # of requests that have not finished
        self._lookups = {True: 0, False: 0}  # since the last step's end
        self._count_lookups()
        for where in _GUARDED:
            metrics.inc("kvtiers_contained_errors_total", self.name, where, by=0)  # alerts see no first 1 of a series

    def call(self, method: str, *args: Any) -> Any:
        """What the tier returns, or RAISED."""
        try:
            return getattr(self.tier, method)(*args)
        except _BY_SIGNALS:
            raise
        except BaseException as e:  # noqa: BLE001 - a tier is foreign code: this is where its errors end
            self.contain(method, _shown(e))
            return RAISED

    def collect(self, method: str, kind: type[_T]) -> list[_T]:
        """What the tier yields, up to where it raises. What is of another kind is left out, and hides nothing else."""
        collected: list[_T] = []
        try:
            for item in getattr(self.tier, method)():
                if isinstance(item, kind):
                    collected.append(item)
                else:
                    self.contain(method, f"{_shown(item)} is no {kind.__name__}")
        except _BY_SIGNALS:
            raise
        except BaseException as e:  # noqa: BLE001 - as in call
            self.contain(method, _shown(e))
        return collected

    def take_events(self) -> list[OffloadingEvent]:
        """The tier's events that are what they should be: an engine reads them where nobody catches anything."""
        events = []
        for event in self.collect("take_events", OffloadingEvent):
            try:
                keys = tuple(event.keys)
                if not isinstance(event.medium, str) or not all(isinstance(key, bytes) for key in keys):
                    raise TypeError("keys are bytes, a medium is a name")
                events.append(OffloadingEvent(keys, event.medium, bool(event.removed)))
            except Exception as e:  # noqa: BLE001 - whatever a tier calls keys
                self.contain("take_events", f"{_shown(event)}: {_shown(e)}")
        return events

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """The tier's answer; what is none, or raises, is a miss."""
        try:
            answer = self.tier.lookup(key, req_context)
            if answer is None:
                return None
            hit = bool(answer)
        except _BY_SIGNALS:
            raise
        except BaseException as e:  # noqa: BLE001 - as in call
            self.contain("lookup", _shown(e))
            hit = False
        self.note_answer(key, req_context, hit=hit)
        return hit

    def take_answered(self) -> dict[str, frozenset[OffloadKey]] | None:
        """See ``SecondaryTierManager``; None also of a tier that does not know this call, or fails in it."""
        if not hasattr(self.tier, "take_answered"):
            return None
        try:
            answered = self.tier.take_answered()
            return None if answered is None else {req_id: frozenset(keys) for req_id, keys in answered.items()}
        except _BY_SIGNALS:
            raise
        except BaseException as e:  # noqa: BLE001 - as in call
            self.contain("take_answered", _shown(e))
            return None

    def note_answer(self, key: OffloadKey, req_context: ReqContext, *, hit: bool) -> None:
        """Count what a request was told of a key, the first time: while it waits, engines ask in each step."""
        if not req_context.req_id:  # of nobody knows whom, and nobody says when they finish
            self._lookups[hit] += 1
            return
        answered = self._answered.get(req_context.req_id)
        if answered is None:
            answered = self._answered[req_context.req_id] = set()
            if len(self._answered) > REQUESTS_MAX:
                self._answered.popitem(last=False)
        if key not in answered:
            answered.add(key)
            self._lookups[hit] += 1

    def on_request_finished(self, req_context: ReqContext) -> None:
        """See ``SecondaryTierManager``."""
        self._answered.pop(req_context.req_id, None)
        self.call("on_request_finished", req_context)

    def on_schedule_end(self) -> None:
        """See ``SecondaryTierManager``."""
        self.call("on_schedule_end")
        if any(self._lookups.values()):
            self._count_lookups()

    def _count_lookups(self) -> None:
        for result, hit in (("hit", True), ("miss", False)):
            self._metrics.inc("kvtiers_lookups_total", self.name, result, by=self._lookups[hit])
            self._lookups[hit] = 0

    def job_of(self, result: JobResult, jobs: Mapping[int, _T]) -> _T | None:
        """The job that a result is of; None where it is of none."""
        try:
            return jobs.get(result.job_id)
        except Exception:  # noqa: BLE001 - whatever a tier calls a job (it may have no hash), it is none of these
            return None

    def succeeded_in(self, result: JobResult, keys: Collection[OffloadKey]) -> frozenset[OffloadKey]:
        """The keys of a job that succeeded. A failed job that names none has none: as with vLLM, all share its fate."""
        try:
            return frozenset(keys if result.success else set(keys).intersection(result.successful_keys or ()))
        except Exception as e:  # noqa: BLE001 - whatever a tier calls its keys, its job has ended
            self.contain("get_finished", f"job {_shown(result.job_id)}: success or successful_keys: {_shown(e)}")
            return frozenset()

    def checked(self, result: JobResult, keys: Collection[OffloadKey]) -> JobResult:
        """The result of a job of these keys, with values of the types that it should have."""
        done = self.succeeded_in(result, keys)
        try:
            moved = float(result.transfer_time), int(result.transfer_bytes)
        except Exception as e:  # noqa: BLE001 - as above
            self.contain("get_finished", f"job {_shown(result.job_id)}: transfer_time or transfer_bytes: {_shown(e)}")
            moved = 0.0, 0
        in_order = tuple(key for key in keys if key in done)
        return JobResult(result.job_id, len(done) == len(set(keys)), in_order, *moved)

    def limit_shutdown(self, within_s: float) -> bool:
        """Tell the tier how long its shutdown may take, less what it closes after that.

        Returns:
            False if it does not bound its shutdown, so that what was accepted is to be drained before.
        """
        try:
            own_s = self.tier.shutdown_s
            if own_s is None:
                return False
            if own_s > within_s * SHUTDOWN_SHARE:
                self.tier.shutdown_s = within_s * SHUTDOWN_SHARE
        except Exception as e:  # noqa: BLE001 - as above
            self.contain("shutdown_s", _shown(e))
            return False
        return True

    def contain(self, where: str, what: str) -> None:
        """Count a tier's fault."""
        self._metrics.inc("kvtiers_contained_errors_total", self.name, where)
        if where not in self._logged:
            self._logged.add(where)
            logger.warning("tier %s: %s: %s (further ones are only counted)", self.name, where, what)

    def contain_unknown(self, result: JobResult) -> None:
        """Count a result of a job that the tier does not have."""
        self.contain("get_finished", f"job {_shown(result.job_id)} is unknown or was reported before")


def load_deadline_s(tier: SecondaryTierManager) -> float:
    """Seconds after which a tier is done with a load, as far as anybody can tell.

    A tier that states no deadline of its own has the default, whatever the others state.

    Raises:
        ConfigError: what it states is no number of seconds.
    """
    own = getattr(tier, "job_deadline_s", None)
    if own is None or own == math.inf:
        return LOAD_DEADLINE_S
    if not isinstance(own, Real) or not float(own) > 0:
        raise ConfigError(
            f"job_deadline_s: {own!r} is not accepted; a tier states seconds, above 0, or None",
            field=f"tier {type(tier).__name__}",
        )
    return float(own) + LOAD_GRACE_S


def _shown(thing: object) -> str:
    try:
        return repr(thing)
    except Exception:  # noqa: BLE001 - its author's code, too
        return f"{type(thing).__name__} (its repr raises)"


def shut_down_tiers(
    tiers: Sequence[GuardedTier], timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> set[int]:
    """Shut all tiers down, all at once: each may take as long as all of them may.

    Returns:
        Indices of the tiers that did not end in time. Their threads go on, so nothing may call those tiers any more.
    """
    errors: dict[int, str] = {}

    def shut_down(index: int) -> None:
        try:
            tiers[index].tier.shutdown()
        except BaseException as e:  # noqa: BLE001 - a thread's edge
            errors[index] = _shown(e)

    threads = [
        threading.Thread(target=shut_down, args=(index,), name=f"kvtiers-shutdown-{tier.name}", daemon=True)
        for index, tier in enumerate(tiers)
    ]
    for tier in tiers:
        tier.limit_shutdown(timeout_s)
    deadline = clock() + timeout_s
    for index, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError:  # there is none to be had, of so many processes or at the interpreter's end
            shut_down(index)
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - clock()))
    stuck = {index for index, thread in enumerate(threads) if thread.is_alive()}
    errors |= dict.fromkeys(stuck, f"did not end within {timeout_s:g} s")
    for index, error in errors.items():
        tiers[index].contain("shutdown", error)
    return stuck
