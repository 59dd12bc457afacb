"""GuardedTier: wraps a tier, and keeps its exceptions and its malformed reports from the engine (promise S4)."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from numbers import Real
from typing import Final, Literal, TypeVar, get_args

from ...tiers.base import JobMetadata, JobResult, OffloadingEvent, ReqContext, SecondaryTierManager
from ...tiers.blocks.keys import OffloadKey
from ...tiers.errors import ConfigError
from ...tiers.metrics import Metrics
from ...tiers.plain_logs import get_logger

logger = get_logger(__name__)

_T = TypeVar("_T")

JOB_DEADLINE_S: Final = 20.0  # deadline of a tier that states no deadline
REPORT_S: Final = 1.0  # added to a tier's own deadline, so that it can end its I/O and report

#: Share of the shutdown time limit that a tier gets as ``shutdown_s``. The tier closes its resources in the rest.
SHUTDOWN_SHARE: Final = 0.8

_BY_SIGNALS: Final = (KeyboardInterrupt, SystemExit)

REQUESTS_MAX: Final = 65_536  # requests remembered to count each lookup once; lookups of older requests may count twice

#: Methods and attributes of a tier that may fail: labels of ``kvtiers_contained_errors_total``.
_Guarded = Literal[
    "drain_jobs", "explain_miss", "get_finished", "lookup", "nearest", "on_request_finished", "on_schedule_end",
    "shutdown", "shutdown_s", "submit_load", "submit_store", "take_answered", "take_events", "take_reasons", "touch",
]  # fmt: skip


class _Contained:
    """Context manager that catches and counts the tier's exceptions."""

    def __init__(self, tier: GuardedTier, where: _Guarded) -> None:
        self._tier = tier
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is None or isinstance(error, _BY_SIGNALS):
            return False
        self._tier.contain(self._where, _shown(error))
        return True


class GuardedTier:
    """Wraps one tier: counts its faults, logs each kind once, and ends each job once. Scheduler thread only.

    A BaseException that is not an Exception (a CancelledError, a Rust extension's panic) is caught too, because it
    would end the engine. Only the exceptions that signals raise pass through: vLLM's signal handler raises SystemExit
    once, in whatever code runs at that time.

    Attributes:
        name: name in logs and metrics: the tier's own name if it has one, else its type.
        raised: jobs whose submission raised, and when each of them counts as ended. The tier may have begun some blocks
            before it raised. If their slots were freed at once, the tier could overwrite the slots' next blocks.
    """

    def __init__(
        self, tier: SecondaryTierManager, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tier = tier
        self.name = str(tier.name or tier.tier_type)  # metric labels must be text
        self.raised: dict[int, float] = {}
        self._clock = clock
        self._metrics = metrics
        self._logged: set[str] = set()
        self._jobs: dict[int, JobMetadata] = {}  # jobs that were submitted and have not ended
        self._reports_until = -math.inf  # time by which all jobs should be reported, unless storage hangs
        self._answered: OrderedDict[str, set[OffloadKey]] = OrderedDict()  # unfinished request -> its counted keys
        self._lookups = {True: 0, False: 0}  # hits and misses since the last step's end
        self._count_lookups()
        for where in get_args(_Guarded):
            metrics.inc("kvtiers_contained_errors_total", self.name, where, by=0)  # alerts miss a new series' first 1

    @cached_property
    def deadline_s(self) -> float:
        """Seconds within which the tier is expected to end a job: its ``job_deadline_s`` and a second to report.

        Read once, at the start. A tier that states no deadline has the default, whatever other tiers state.

        Raises:
            ConfigError: the tier's ``job_deadline_s`` is not a number above 0.
        """
        own: object = self.tier.job_deadline_s  # a foreign tier may state anything
        if own is None or own == math.inf:
            return JOB_DEADLINE_S
        if not isinstance(own, Real) or not float(own) > 0:
            raise ConfigError(
                f"job_deadline_s: {own!r} is not accepted; a tier states seconds, above 0, or None",
                field=f"tier {type(self.tier).__name__}",
            )
        return float(own) + REPORT_S

    @cached_property
    def load(self) -> str:
        """Whether to load the tier's blocks: "auto", "always" or "never".

        Raises:
            ConfigError: the tier's ``load`` is something else.
        """
        own: object = self.tier.load  # a foreign tier may state anything
        if own not in ("auto", "always", "never"):
            raise ConfigError(
                f"load: {own!r} is not accepted; a tier states 'auto', 'always' or 'never'",
                field=f"tier {type(self.tier).__name__}",
            )
        return str(own)

    def check_values(self) -> None:
        """Read ``deadline_s`` and ``load`` now, so that a wrong value ends the start and not the first job.

        Raises:
            ConfigError: see ``deadline_s`` and ``load``.
        """
        _ = self.deadline_s, self.load

    # -- lookups -----------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return the tier's answer. A miss if the tier raises, or if its answer has no truth value."""
        try:  # not ``_Contained``, which would take a fifth of the time per key
            answer = self.tier.lookup(key, req_context)
            if answer is None:
                return None
            hit = bool(answer)
        except _BY_SIGNALS:
            raise
        except BaseException as e:  # noqa: BLE001 - as in ``_Contained``
            self.contain("lookup", _shown(e))
            hit = False
        self.note_answer(key, req_context, hit=hit)
        return hit

    def take_answered(self) -> dict[str, frozenset[OffloadKey]] | None:
        """See ``SecondaryTierManager``. None also if the tier raises."""
        with _Contained(self, "take_answered"):
            answered = self.tier.take_answered()
            return None if answered is None else {req_id: frozenset(keys) for req_id, keys in answered.items()}
        return None

    def note_answer(self, key: OffloadKey, req_context: ReqContext, *, hit: bool) -> bool:
        """Count a request's hit or miss of a key once: while a request waits, engines repeat its lookups every step.

        Returns False if it was counted before.
        """
        if req_context.req_id:  # without a request id, repeats cannot be recognized and no end is reported
            answered = self._answered.get(req_context.req_id)
            if answered is None:
                answered = self._answered[req_context.req_id] = set()
                if len(self._answered) > REQUESTS_MAX:
                    self._answered.popitem(last=False)
            if key in answered:
                return False
            answered.add(key)
        self._lookups[hit] += 1
        return True

    def on_request_finished(self, req_context: ReqContext) -> None:
        """See ``SecondaryTierManager``."""
        self._answered.pop(req_context.req_id, None)
        with _Contained(self, "on_request_finished"):
            self.tier.on_request_finished(req_context)

    def on_schedule_end(self) -> None:
        """See ``SecondaryTierManager``."""
        with _Contained(self, "on_schedule_end"):
            self.tier.on_schedule_end()
        if any(self._lookups.values()):
            self._count_lookups()

    def _count_lookups(self) -> None:
        for result, hit in (("hit", True), ("miss", False)):
            self._metrics.inc("kvtiers_lookups_total", self.name, result, by=self._lookups[hit])
            self._lookups[hit] = 0

    # -- jobs --------------------------------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether the tier may still report a job. It reports jobs before their deadline, unless storage hangs."""
        return len(self._jobs) > len(self.raised) and self._clock() < self._reports_until

    def submit_store(self, job: JobMetadata) -> bool:
        """Submit a store. False: the tier raised, and ``take_ended`` returns the job after ``deadline_s`` at latest."""
        return self._submit("submit_store", self.tier.submit_store, job)

    def submit_load(self, job: JobMetadata) -> bool:
        """Submit a load. See ``submit_store``."""
        return self._submit("submit_load", self.tier.submit_load, job)

    def _submit(self, where: _Guarded, submit: Callable[[JobMetadata], None], job: JobMetadata) -> bool:
        self._reports_until = self._clock() + self.deadline_s
        self._jobs[job.job_id] = job
        self.raised[job.job_id] = self._reports_until  # removed below unless ``submit`` raises
        with _Contained(self, where):
            submit(job)
            del self.raised[job.job_id]
        return job.job_id not in self.raised

    def take_ended(self) -> Iterator[JobResult]:
        """Return the jobs that ended, each once: reported by the tier, or raised at submission and past the deadline.

        Every value of a result has its proper type, and ``successful_keys`` are keys of the job, in its order.
        """
        for result in self._collected("get_finished", self.tier.get_finished, JobResult):
            job = self._job_of(result)
            if job is None:
                self.contain("get_finished", f"job {_shown(result.job_id)} is unknown or was reported before")
            else:
                yield self._end(self._checked(result, job))
        now = self._clock()
        for job_id in [job_id for job_id, until in self.raised.items() if now >= until]:
            yield self._end(JobResult(job_id, success=False))

    def _end(self, result: JobResult) -> JobResult:
        del self._jobs[result.job_id]
        self.raised.pop(result.job_id, None)
        return result

    def _job_of(self, result: JobResult) -> JobMetadata | None:
        try:
            return self._jobs.get(result.job_id)
        except Exception:  # noqa: BLE001 - a foreign job_id, which may not even be hashable: an unknown job
            return None

    def _checked(self, result: JobResult, job: JobMetadata) -> JobResult:
        """Convert a result to proper types. If a failed job names no keys, all of its keys failed, as in vLLM."""
        keys: tuple[OffloadKey, ...] = ()
        moved = 0.0, 0
        try:
            if result.success:
                keys = tuple(job.keys)
            else:
                done = set(result.successful_keys or ())
                keys = tuple(key for key in job.keys if key in done)
            moved = float(result.transfer_time), int(result.transfer_bytes)
        except Exception as e:  # noqa: BLE001 - a foreign tier may report anything, but its job has ended
            self.contain("get_finished", f"job {_shown(result.job_id)}: its result has an invalid value: {_shown(e)}")
        return JobResult(job.job_id, len(keys) == len(job.keys), keys, *moved)

    # -- other calls -------------------------------------------------------------------------------------------------

    def touch(self, keys: Collection[OffloadKey]) -> None:
        """See ``SecondaryTierManager``."""
        with _Contained(self, "touch"):
            self.tier.touch(keys)

    def drain_jobs(self) -> None:
        """See ``SecondaryTierManager``."""
        with _Contained(self, "drain_jobs"):
            self.tier.drain_jobs()

    def take_events(self) -> list[OffloadingEvent]:
        """Return the tier's well-formed events. Drops all other events, because engines catch no exceptions here."""
        events = []
        for event in self._collected("take_events", self.tier.take_events, OffloadingEvent):
            with _Contained(self, "take_events"):  # a foreign tier may put anything into an event
                keys = tuple(event.keys)
                if not isinstance(event.medium, str) or not all(isinstance(key, bytes) for key in keys):
                    raise TypeError(f"{_shown(event)}: keys must be bytes, and the medium a string")
                events.append(OffloadingEvent(keys, event.medium, bool(event.removed)))
        return events

    def _collected(self, where: _Guarded, give: Callable[[], Iterable[object]], kind: type[_T]) -> list[_T]:
        """Return the tier's items until it raises. Items of another type are counted as errors and left out."""
        collected: list[_T] = []
        with _Contained(self, where):
            for item in give():
                if isinstance(item, kind):
                    collected.append(item)
                else:
                    self.contain(where, f"{_shown(item)} is not of type {kind.__name__}")
        return collected

    def explain_miss(self, key: OffloadKey, req_context: ReqContext) -> str:
        """See ``SecondaryTierManager``. "" if the tier raises."""
        with _Contained(self, "explain_miss"):
            return str(self.tier.explain_miss(key, req_context))
        return ""

    def take_reasons(self) -> list[tuple[str, list[OffloadKey]]]:
        """See ``SecondaryTierManager``. Reasons from the first one that is malformed are left out."""
        reasons: list[tuple[str, list[OffloadKey]]] = []
        with _Contained(self, "take_reasons"):
            for reason, keys in self.tier.take_reasons():
                if not set(map(type, keys := list(keys))) <= {bytes}:
                    raise TypeError(f"keys of the reason {_shown(reason)} must be bytes")
                if reasons and reasons[-1][0] == reason:
                    reasons[-1][1].extend(keys)
                else:
                    reasons.append((str(reason), keys))
        return reasons

    def nearest(self) -> dict[str, str] | None:
        """The tier's ``nearest``, without names and values that are not strings. None if the tier raises."""
        with _Contained(self, "nearest"):
            found: object = self.tier.nearest  # a foreign tier may state anything
            if type(found) is dict:
                return {name: text for name, text in found.items() if type(name) is type(text) is str}
        return None

    def limit_shutdown(self, within_s: float) -> bool:
        """Limit the tier's ``shutdown_s`` to ``SHUTDOWN_SHARE`` of ``within_s``.

        Returns:
            False if the tier does not limit its shutdown. Then drain the jobs that it accepted first.
        """
        with _Contained(self, "shutdown_s"):
            own_s = self.tier.shutdown_s
            if own_s is not None and own_s > within_s * SHUTDOWN_SHARE:
                self.tier.shutdown_s = within_s * SHUTDOWN_SHARE
            return own_s is not None
        return False

    def contain(self, where: _Guarded, what: str) -> None:
        """Count a fault of the tier, and log the first one in each ``where``."""
        self._metrics.inc("kvtiers_contained_errors_total", self.name, where)
        if where not in self._logged:
            self._logged.add(where)
            logger.warning("tier %s: %s: %s (further ones are only counted)", self.name, where, what)


def _shown(thing: object) -> str:
    try:
        return repr(thing)
    except Exception:  # noqa: BLE001 - repr is the tier author's code, too
        return f"{type(thing).__name__} (its repr raises)"


def shut_down_tiers(
    tiers: Sequence[GuardedTier], timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> set[int]:
    """Shut all tiers down in parallel, so that each may use the whole time limit.

    Returns:
        Indices of the tiers that did not end in time. Their threads go on, so these tiers must not be called any more.
    """
    errors: dict[int, str] = {}

    def shut_down(index: int) -> None:
        try:
            tiers[index].tier.shutdown()
        except BaseException as e:  # noqa: BLE001 - nothing catches exceptions outside this thread
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
        except RuntimeError:  # no thread can be started: too many processes, or the interpreter is exiting
            shut_down(index)
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - clock()))
    stuck = {index for index, thread in enumerate(threads) if thread.is_alive()}
    errors |= dict.fromkeys(stuck, f"did not end within {timeout_s:g} s")
    for index, error in errors.items():
        tiers[index].contain("shutdown", error)
    return stuck
