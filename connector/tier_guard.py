"""GuardedTier: a wall around a tier. Nothing that a tier raises gets past it into the engine (S4)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

from tiers.base import JobResult, ReqContext, SecondaryTierManager
from tiers.keys import OffloadKey
from tiers.metrics import Metrics

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: What ``GuardedTier.call`` returns where the tier raised.
RAISED: Final = object()


class GuardedTier:
    """One tier, called by name. What it does wrong is counted, and logged the first time. Scheduler thread only.

    Attributes:
        name: for logs and metrics: the tier's own where it has one, else its type.
    """

    def __init__(self, tier: SecondaryTierManager, metrics: Metrics) -> None:
        self.tier = tier
        self.name: str = getattr(tier, "name", None) or tier.tier_type
        self._metrics = metrics
        self._logged: set[str] = set()

    def call(self, method: str, *args: Any) -> Any:
        """What the tier returns, or RAISED."""
        try:
            return getattr(self.tier, method)(*args)
        except Exception as e:  # noqa: BLE001 - a tier is foreign code: this is where its errors end
            self.contain(method, repr(e))
            return RAISED

    def collect(self, method: str, kind: type[_T]) -> list[_T]:
        """What the tier yields, up to where it raises or yields something else."""
        collected: list[_T] = []
        try:
            for item in getattr(self.tier, method)():
                if not isinstance(item, kind):
                    raise TypeError(f"{item!r} is no {kind.__name__}")
                collected.append(item)
        except Exception as e:  # noqa: BLE001 - as in call
            self.contain(method, repr(e))
        return collected

    @property
    def job_deadline_s(self) -> float:
        """By which it ends a job, where it says so."""
        own = getattr(self.tier, "job_deadline_s", None)
        return float("inf") if own is None else float(own)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """The tier's answer; what is none, or raises, is a miss."""
        try:
            answer = self.tier.lookup(key, req_context)
            return None if answer is None else bool(answer)
        except Exception as e:  # noqa: BLE001 - as in call
            self.contain("lookup", repr(e))
            return False

    def job_of(self, result: JobResult, jobs: Mapping[int, _T]) -> _T | None:
        """The job that a result is of; None where it is of none."""
        try:
            return jobs.get(result.job_id)
        except Exception:  # noqa: BLE001 - whatever a tier calls a job (it may have no hash), it is none of these
            return None

    def succeeded_in(self, result: JobResult, keys: Collection[OffloadKey]) -> frozenset[OffloadKey]:
        """The keys of a job that succeeded. A failed job that names none has none: as with vLLM, all share its fate."""
        try:
            return frozenset(keys if result.success else result.successful_keys or ())
        except Exception as e:  # noqa: BLE001 - whatever a tier calls its keys, its job has ended
            self.contain("get_finished", f"job {result.job_id}: success or successful_keys: {e!r}")
            return frozenset()

    def contain(self, where: str, what: str) -> None:
        """Count a tier's fault."""
        self._metrics.inc("kvtiers_contained_errors_total", self.name, where)
        if where not in self._logged:
            self._logged.add(where)
            logger.warning("tier %s: %s: %s (further ones are only counted)", self.name, where, what)


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
            errors[index] = repr(e)

    threads = [
        threading.Thread(target=shut_down, args=(index,), name=f"kvtiers-shutdown-{tier.name}", daemon=True)
        for index, tier in enumerate(tiers)
    ]
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
