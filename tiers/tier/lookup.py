"""AsyncLookup: finds out which keys a tier has, without blocking the scheduler's thread.

``lookup`` never waits. The first lookup of a key queues a question and returns None. ``flush``, at the end of each
scheduler step, sends the step's questions to the tier's servers. A later ``lookup`` returns the answer.

- Order: a request's keys are asked in the order of its lookups, so the answers for a prompt's first blocks arrive
  first. Requests take turns. A turn is a group of keys that the storage answers well within the deadline. A turn that
  was sent is called a probe. A few probes are under way at once, so that the storage need not wait for the next
  scheduler step.
- Silence: when no probe has returned for ``deadline_s``, all pending keys count as absent. While some probes return,
  the keys of other probes keep waiting, for up to ``SILENT_TURNS_MAX`` times ``deadline_s``.
- Bound: after ``total_s`` a request gets "absent" for every key it still waits for. Other requests keep waiting.
- Misses: a prefix ends at its first miss, so the later keys of the same request are not asked, unless a probe already
  has them. A request that needs these keys nevertheless (a sliding window) looks them up again.

The scheduler's thread calls all methods.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from ..blocks.keys import OffloadKey
from ..plain_logs import get_logger

logger = get_logger(__name__)

FAILED_S_MIN = 1.0  # a block whose load failed counts as absent for at least this long
SILENT_TURNS_MAX = 5
NEAR_TURN_KEYS = 32  # near storage answers keys one by one: a slow disk must answer a turn within the deadline
FAR_TURN_KEYS = 64  # far storage answers all keys at once
NEAR_ASKED_MAX = 256  # keys under way at once on near storage: a slow disk must answer even the last key in time
OVER_S = 600.0  # a request that stopped waiting is forgotten after being idle for this long
ELSEWHERE_MAX = 8  # limit of the lookups in other namespaces that are under way
TOTAL_S = 15.0  # longest wait of a request if the storage keeps answering; computing a long prompt takes as long


class Asks(Protocol):
    """Sends lookups to the storage. Implemented by ``tiers.tier.channel.Channel``."""

    def look(self, keys: Sequence[OffloadKey], name_prefix: str = "") -> int:
        """Begin a probe and return its number. ``name_prefix``: looks in the namespace with this prefix."""

    def take_looked(self) -> list[tuple[int, Sequence[bool | None]]]:
        """Return the probes that have ended: number, and answers parallel to the keys (None: the lookup failed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOptions:
    """Limits of an AsyncLookup.

    Attributes:
        deadline_s: how long the storage may be silent before the pending keys count as absent. An answer is valid for
            at least as long.
        total_s: the longest time that a request waits for answers.
        present_ttl_s: how long a positive answer is valid. Short enough to notice removals by another host's collector.
        absent_ttl_s: how long a negative answer is valid. Short, because another replica may store the block. The
            answer does not expire for a request that is still waiting for other answers, because a request needs the
            answers to all its keys at once. After a failed load, the block is absent for at least ``FAILED_S_MIN``.
        keys_max: limit of the cached answers.
        asked_max: limit of the keys under way at once. Higher than the number of keys that are answered in a step.
    """

    deadline_s: float = 0.2
    total_s: float = TOTAL_S
    present_ttl_s: float = 60.0
    absent_ttl_s: float = 1.0
    keys_max: int = 262_144
    asked_max: int = 1024


@dataclass(slots=True)
class LookupCounts:
    """Answers since the last ``take_counts``.

    Attributes:
        hits, misses: number of answers of the storage; answers from the cache are not counted.
        failed: keys whose lookup failed.
        expired: number of keys for which the storage did not answer in time.
        given_up: number of keys that requests stopped waiting for after ``total_s``.
    """

    hits: int = 0
    misses: int = 0
    failed: list[OffloadKey] = field(default_factory=list)
    expired: int = 0
    given_up: int = 0


@dataclass(slots=True, eq=False)
class _Asker:
    """A request that waits for answers.

    Attributes:
        came_at: time of the request's first lookup.
        question: the value in ``_asked`` for all keys that the request asks in the current epoch. One tuple for each
            key would cost the garbage collector milliseconds a step.
        queue: keys that no probe has taken yet.
        owed: number of keys that the request waits for, including keys that another request asked first.
        queued_at: time of the last ``flush`` with new keys of the request.
        idle_at: time since which the request has not waited for any key; None while it waits.
        is_fresh: the request has asked for keys since the last flush.
        is_over: ``total_s`` has passed, so the request no longer waits.
    """

    req_id: str
    came_at: float
    question: tuple[_Asker, int] | None = None
    queue: deque[OffloadKey] = field(default_factory=deque)
    owed: int = 0
    queued_at: float = 0.0
    idle_at: float | None = None
    is_fresh: bool = False
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Turn:
    """One probe: keys of one request.

    Attributes:
        silent_since: when the keys were flushed. If a later time, when the last probe before this one returned.
    """

    keys: list[OffloadKey]
    epoch: int
    silent_since: float


class AsyncLookup:
    """Answers which keys are present in one tier.

    Args:
        asks: sends lookups to the storage.
        is_far: whether the storage takes about as long for many keys as for one (it is latency bound).
    """

    def __init__(
        self,
        asks: Asks,
        *,
        options: LookupOptions,
        is_far: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asks = asks
        self._options = options
        self._clock = clock
        # key -> (present, valid until, why it counts as absent if that is not the storage's answer). Not a plain dict:
        # a plain dict finds its first entry by scanning the slots of removed entries: 15 to 63 ms a step with a full
        # cache.
        self._answers: OrderedDict[OffloadKey, tuple[bool, float, str]] = OrderedDict()
        self._doubted_until = float("-inf")  # ``doubt`` invalidated the positive answers that expire before this
        # key -> the request that asks for it, and the epoch of its question. A probe that began in an earlier epoch may
        # not reflect the changes that ``mark``, ``forget`` and ``_expire`` have noted since, so its answer is ignored.
        self._asked: dict[OffloadKey, tuple[_Asker, int]] = {}
        self._joined: dict[OffloadKey, list[_Asker]] = {}  # key -> further requests that wait for the same answer
        self._askers: dict[str, _Asker] = {}  # request id -> request, the oldest first
        self._fresh: list[_Asker] = []
        self._answered_at = float("-inf")  # when any probe last returned
        self._epoch = 0  # how often ``mark``, ``forget`` and ``_expire`` were called; see ``_asked``
        self._turn_keys = FAR_TURN_KEYS if is_far else NEAR_TURN_KEYS
        asked_max = options.asked_max if is_far else min(options.asked_max, NEAR_ASKED_MAX)
        self._probes_max = max(1, asked_max // self._turn_keys)
        self._answered: dict[str, list[OffloadKey]] = {}  # request id -> keys answered since the last take_answered
        self._turns: deque[_Asker] = deque()
        self._under_way: dict[int, _Turn] = {}
        self._counts = LookupCounts()
        self._elsewhere: dict[int, OffloadKey] = {}  # number of a probe in another namespace -> its key
        self._found_elsewhere: list[OffloadKey] = []

    def lookup(self, key: OffloadKey, req_id: str = "") -> bool | None:
        """Whether the key is present; None: not known yet. ``req_id`` is "" for lookups outside of a request."""
        answer = self._answers.get(key)
        if answer is not None:
            present, until, _ = answer
            if self._clock() < until and not (present and until < self._doubted_until):
                return present
        return self._ask(key, req_id, answer)

    def why_absent(self, key: OffloadKey, req_id: str) -> str:
        """Why the last ``lookup`` of the key returned False: deadline, error or total. "": the block is not stored."""
        answer, asker = self._answers.get(key), self._askers.get(req_id)
        if answer is None or self._clock() >= answer[1]:
            return "total" if asker is not None and asker.is_over else ""
        return answer[2]

    def look_elsewhere(self, key: OffloadKey, name_prefix: str) -> None:
        """Ask whether another namespace has the block. See ``take_found_elsewhere``. Dropped if many are under way."""
        if len(self._elsewhere) < ELSEWHERE_MAX:
            self._elsewhere[self._asks.look([key], name_prefix)] = key

    def take_found_elsewhere(self) -> list[OffloadKey]:
        """Return the keys that ``look_elsewhere`` has found since the last call."""
        if self._elsewhere:
            self.take_replies()
        found, self._found_elsewhere = self._found_elsewhere, []
        return found

    def flush(self) -> None:
        """Send this step's questions, and give up questions that have waited too long."""
        self.take_replies()
        now = self._clock()
        for asker in self._fresh:
            asker.is_fresh = False
            asker.queued_at = now
            self._turns.append(asker)
        self._fresh.clear()
        self._give_up(now)
        self._send()

    def take_answered(self) -> dict[str, list[OffloadKey]]:
        """Return the newly answered keys by request: ``lookup`` may now return True or False for them."""
        self.take_replies()
        answered, self._answered = self._answered, {}
        return answered

    def finish(self, req_id: str) -> None:
        """Drop a request that has ended."""
        asker = self._askers.pop(req_id, None)
        if asker is not None:
            self._drop_queue(asker)
            self._answered.pop(req_id, None)

    def mark(self, keys: Collection[OffloadKey], *, present: bool, rest_s: float = FAILED_S_MIN) -> None:
        """Record that blocks are present after a store, or absent after a failed load. Overrules answers under way.

        Args:
            rest_s: minimum time for which absent keys stay absent.
        """
        # Without the minimum, a stored block that cannot be read would be loaded again and again.
        ttl_s = self._options.present_ttl_s if present else max(rest_s, self._options.absent_ttl_s)
        self._epoch += 1
        self._end_asking(keys)
        self._record(keys, present, self._clock() + ttl_s)

    def forget(self, keys: Collection[OffloadKey]) -> None:
        """Forget the answers for these keys, so that the storage is asked again."""
        self._epoch += 1  # an answer still under way may be older than the removal
        self._end_asking(keys)
        for key in keys:
            self._answers.pop(key, None)

    def doubt(self) -> None:
        """Invalidate all positive answers received so far: the storage may have stopped answering."""
        self._doubted_until = self._clock() + max(self._options.deadline_s, self._options.present_ttl_s)

    def take_counts(self) -> LookupCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, LookupCounts()
        return counts

    # -- questions -------------------------------------------------------------------------------------------------

    def _ask(self, key: OffloadKey, req_id: str, old: tuple[bool, float, str] | None) -> bool | None:
        """Ask for a key without a valid answer. ``old`` is the expired answer."""
        asker = self._askers.get(req_id)
        if asker is None:
            asker = self._askers[req_id] = _Asker(req_id, self._clock())
        elif asker.is_over:
            return False
        question = self._asked.get(key)
        if question is not None:
            if question[0] is not asker:
                joined = self._joined.setdefault(key, [])
                if asker not in joined:
                    joined.append(asker)
                    asker.owed += 1
            return None
        if old is not None and req_id and not old[0] and old[1] > asker.came_at:
            return False  # expired, but a request that repeats all its lookups would otherwise never get all answers
        if asker.question is None or asker.question[1] != self._epoch:
            asker.question = asker, self._epoch
        self._asked[key] = asker.question
        asker.queue.append(key)
        asker.owed += 1
        if not asker.is_fresh:
            asker.is_fresh = True
            self._fresh.append(asker)
        return None

    def _end_question(self, key: OffloadKey, first: _Asker) -> None:
        """End a key's question. The requests that waited for the answer look the key up again."""
        del self._asked[key]
        for asker in (first, *self._joined.pop(key, ())):
            asker.owed -= 1
            if asker.req_id in self._askers:
                self._answered.setdefault(asker.req_id, []).append(key)

    def _end_asking(self, keys: Iterable[OffloadKey]) -> None:
        if self._asked:
            for key in keys:
                if (question := self._asked.get(key)) is not None:
                    self._end_question(key, question[0])

    def _drop_queue(self, asker: _Asker) -> None:
        """Drop a request's keys that no probe has taken yet. Other requests that wait for these keys ask again."""
        while asker.queue:
            key = asker.queue.pop()
            question = self._asked.get(key)
            if question is not None and question[0] is asker:
                self._end_question(key, asker)

    # -- limits ----------------------------------------------------------------------------------------------------

    def _give_up(self, now: float) -> None:
        """Expire keys that the storage has not answered in time, and end waits that have taken too long."""
        options = self._options
        for turn in self._under_way.values():
            if (
                now - max(turn.silent_since, self._answered_at) >= options.deadline_s
                or now - turn.silent_since >= SILENT_TURNS_MAX * options.deadline_s
            ):
                self._expire([key for key in turn.keys if self._is_answered_by(turn, key)], now)
        over: set[_Asker] = set()
        for asker in list(self._askers.values()):
            if asker.queue and now - max(asker.queued_at, self._answered_at) >= options.deadline_s:
                keys = list(asker.queue)
                asker.queue.clear()
                self._expire([key for key in keys if key in self._asked], now)
            if asker.owed:
                asker.idle_at = None
                if asker.req_id and not asker.is_over and now - asker.came_at >= options.total_s:
                    over.add(asker)
            elif asker.idle_at is None:
                asker.idle_at = now
            elif now - asker.idle_at >= (OVER_S if asker.is_over else options.deadline_s):
                del self._askers[asker.req_id]
        if over:
            self._end_waits(over)

    def _expire(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Mark unanswered keys absent. A late answer is ignored, because a load may have failed meanwhile."""
        if not keys:
            return
        self._epoch += 1
        self._counts.expired += len(keys)
        self._end_asking(keys)
        self._record(keys, False, now + self._options.absent_ttl_s, "deadline")

    def _end_waits(self, over: Set[_Asker]) -> None:
        """End the waits of requests after ``total_s``: for these requests, all keys still unknown are absent."""
        self._counts.given_up += sum(asker.owed for asker in over)  # before ``_drop_queue``, which lowers ``owed``
        for asker in over:
            asker.is_over = True
            self._drop_queue(asker)
        for key, (first, _) in self._asked.items():
            for asker in (first, *self._joined.get(key, ())):
                if asker in over:
                    self._answered.setdefault(asker.req_id, []).append(key)

    # -- answers ---------------------------------------------------------------------------------------------------

    def _record(self, keys: Iterable[OffloadKey], present: bool, until: float, why: str = "") -> None:
        answers = self._answers
        answer = (present, until, why)
        for key in keys:
            if key in answers:
                answers.move_to_end(key)  # the oldest answers are evicted first
            answers[key] = answer
        while len(answers) > self._options.keys_max:
            answers.popitem(last=False)

    def _is_answered_by(self, turn: _Turn, key: OffloadKey) -> bool:
        """Whether the turn answers the key's current question, and not an expired or overruled question."""
        question = self._asked.get(key)
        return question is not None and question[1] <= turn.epoch

    def take_replies(self) -> None:
        """Take the answers that have arrived, and begin further probes."""
        looked = self._asks.take_looked()
        if not looked:
            return
        self._answered_at = self._clock()
        for number, answers in looked:
            if (turn := self._under_way.pop(number, None)) is not None:
                self._take_reply(turn, answers)
            elif (key := self._elsewhere.pop(number, None)) is not None and answers[0]:
                self._found_elsewhere.append(key)
        self._send()

    def _take_reply(self, turn: _Turn, answers: Sequence[bool | None]) -> None:
        options, counts = self._options, self._counts
        present: list[OffloadKey] = []
        absent: list[OffloadKey] = []
        failed: list[OffloadKey] = []
        dropping: set[_Asker] = set()
        for key, found in zip(turn.keys, answers, strict=True):
            if not self._is_answered_by(turn, key):
                continue
            first, _ = self._asked[key]
            self._end_question(key, first)
            if found:
                present.append(key)
                continue
            (failed if found is None else absent).append(key)
            dropping.add(first)
            if found is not None:
                counts.misses += 1
        counts.hits += len(present)
        counts.failed += failed
        now = self._clock()
        self._record(present, True, now + max(options.present_ttl_s, options.deadline_s))
        absent_until = now + max(options.absent_ttl_s, options.deadline_s)
        self._record(absent, False, absent_until)
        self._record(failed, False, absent_until, "error")
        for asker in dropping:
            self._drop_queue(asker)

    def _send(self) -> None:
        """Begin probes for the waiting requests, in turns."""
        while self._turns and len(self._under_way) < self._probes_max:
            asker = self._turns.popleft()
            taken = [asker.queue.popleft() for _ in range(min(self._turn_keys, len(asker.queue)))]
            if asker.queue:
                self._turns.append(asker)
            if keys := [key for key in taken if key in self._asked]:
                turn = _Turn(keys, self._epoch, max(asker.queued_at, self._answered_at))
                self._under_way[self._asks.look(keys)] = turn
