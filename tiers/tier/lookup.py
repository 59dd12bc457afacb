"""AsyncLookup: presence questions answered off the scheduler's thread, as the storage's speed allows.

``lookup`` never waits: the first question about a key is queued and answered None; ``flush``, at the end of each
scheduler step, hands the step's questions to the probe threads; a later ``lookup`` finds the answer.

- Order: a request's keys are asked in the order in which it named them, so a prompt's first blocks are known first.
  Requests take turns. A turn is as many keys as the storage answers well within the deadline.
- Silence: when no probe has returned for ``deadline_s``, what is asked is absent. While answers arrive, the rest waits;
  but keys of a probe that is ``SILENT_TURNS_MAX`` times as late are absent whatever others answer.
- Bound: after ``total_s`` a request gets "absent" for all that it still waits for. Others keep waiting.
- Misses: when a key is absent, the keys that its request named later are not asked any more, unless a probe has them
  already. A prefix ends there. A request that wants them all the same (a sliding window) names them again.

Who owns what: the scheduler's thread owns all tables and calls everything public. A probe thread takes keys off a
request's queue, reads ``_asked`` and ``_epoch``, and puts answers into a SimpleQueue. There is no lock.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.plain_logs import get_logger

logger = get_logger(__name__)

FAILED_S_MIN = 1.0  # a block whose load failed is absent for so long at least
SILENT_TURNS_MAX = 5
TURN_SHARE = 0.25  # of the deadline: what a turn should take; after one of twice that the next one is smaller
TURN_KEYS_FIRST = 32  # before anything is known of the storage's speed
TURN_GROWTH = 4
LATENCY_SHARE = 0.75  # a turn of half the keys that takes as much of the time as this is not slow, but far
REQUESTS_MAX = 65_536  # remembered; only an engine that never reports a request's end has as many

#: Answers parallel to the keys: True present, False absent, None could not be asked (counts as absent).
Probe = Callable[[Sequence[OffloadKey]], Sequence[bool | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOptions:
    """Limits of an AsyncLookup.

    Attributes:
        threads: probe threads; more than one, so that a stuck probe does not stop all admissions.
        deadline_s: how long the storage may be silent before what it was asked counts as absent.
        total_s: how long a request waits for answers at most.
        present_ttl_s: how long a positive answer is believed. Short enough to notice another host's collector.
        absent_ttl_s: how long a negative answer is believed. Short, because another replica may store the block. Any
            answer is believed for ``deadline_s`` at least, and by the request that got it for as long as that waits
            for others, because a request needs those to all its keys at once; a failed load makes its block absent
            for ``FAILED_S_MIN`` at least.
        keys_max: cached answers of each kind.
        batch_keys_max: keys in one probe.
    """

    threads: int = 2
    deadline_s: float = 0.2
    total_s: float = 15.0
    present_ttl_s: float = 60.0
    absent_ttl_s: float = 1.0
    keys_max: int = 262_144
    batch_keys_max: int = 256


@dataclass(slots=True)
class LookupCounts:
    """Answers since the last ``take_counts``.

    Attributes:
        hits, misses: as the storage answered; what was read from the cache is not counted.
        failed: keys that the storage could not be asked for.
        expired: keys for which the storage was silent.
        given_up: keys that a request stopped waiting for after ``total_s``.
        late: answers to questions that had expired or been overruled.
    """

    hits: int = 0
    misses: int = 0
    failed: list[OffloadKey] = field(default_factory=list)
    expired: int = 0
    given_up: int = 0
    late: int = 0


@dataclass(slots=True, eq=False)
class _Asker:
    """A request that waits for answers.

    Attributes:
        queue: keys that no probe has yet. Probe threads take from its left end.
        epoch: of its last question.
        question: what ``_asked`` says of keys that it asks in this epoch.
        owed: keys that it waits for, those that others asked first included.
        came_at: since when it waits.
        queued_at: when it was flushed with new keys last.
        idle_at: since when it waits for nothing.
        is_fresh: it has asked since the last flush.
        is_over: it waits no longer, as ``total_s`` has passed.
        is_gone: it has finished.
    """

    req_id: str
    came_at: float
    question: _Question = field(init=False)
    queue: deque[OffloadKey] = field(default_factory=deque)
    owed: int = 0
    queued_at: float = 0.0
    idle_at: float | None = None
    is_fresh: bool = False
    is_over: bool = False
    is_gone: bool = False


@dataclass(slots=True, eq=False)
class _Turn:
    """What a probe thread is asking.

    Attributes:
        silent_since: when the keys were handed over, or the last answer of any probe before it began.
        is_expired: written by the scheduler's thread only.
    """

    keys: list[OffloadKey]
    epoch: int
    silent_since: float
    took_s: float = 0.0
    found: Sequence[bool | None] = ()
    is_expired: bool = False


@dataclass(slots=True, eq=False)
class _Question:
    """That a key is asked. One object serves all keys that a request asks within an epoch.

    Attributes:
        epoch: number of ``mark``s, ``forget``s and the like before it. A probe that began in an earlier epoch may
            not have seen what they tell, so its answer is not taken.
    """

    asker: _Asker
    epoch: int


class AsyncLookup:
    """Presence of keys in one tier.

    Args:
        probe: asks the storage; runs on a probe thread; may raise, which means None for all its keys.
        name: prefix of the threads' names.
        is_far: many keys take the storage about as long as one.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        name: str,
        options: LookupOptions,
        is_far: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._probe = probe
        self._options = options
        self._clock = clock
        # key -> (present, believed until). OrderedDict: to find its first entry, a dict walks over the places of those
        # that were removed before, 15 to 63 ms a step where the cache is full.
        self._answers: OrderedDict[OffloadKey, tuple[bool, float]] = OrderedDict()
        self._doubted_until = float("-inf")  # a positive answer believed until before this is older than a doubt
        self._asked: dict[OffloadKey, _Question] = {}
        self._also: dict[OffloadKey, list[_Asker]] = {}  # who else waits for a key that is asked
        self._askers: dict[str, _Asker] = {}  # by request, the oldest first
        self._fresh: list[_Asker] = []
        self._looked_at = clock()  # last flush, or the first question since
        self._answered_at = float("-inf")  # by any probe; written by probe threads
        self._epoch = 0
        self._turn_keys = min(TURN_KEYS_FIRST, options.batch_keys_max)
        self._doubles = is_far  # each whole turn is twice as large as the last, until one is slow or the largest
        self._last_turn = (0, 0.0)  # its keys, and how long it took
        self._answered: dict[str, list[OffloadKey]] = {}  # by request, since the last take_answered
        self._turns: SimpleQueue[_Asker | None] = SimpleQueue()
        self._replies: SimpleQueue[_Turn] = SimpleQueue()
        self._under_way: list[_Turn | None] = [None] * options.threads  # only thread i writes place i
        self._counts = LookupCounts()
        self._threads = [
            threading.Thread(target=self._work, args=(place,), name=f"{name}-lookup{place}", daemon=True)
            for place in range(options.threads)
        ]
        for thread in self._threads:
            thread.start()

    def lookup(self, key: OffloadKey, req_id: str = "") -> bool | None:
        """True present, False absent, None asked. ``req_id`` "" is for callers that are no request."""
        answer = self._answers.get(key)
        if answer is not None:
            present, until = answer
            if self._clock() < until and not (present and until < self._doubted_until):
                return present
        return self._ask(key, req_id, answer)

    def flush(self) -> None:
        """Hand this step's questions to the probe threads, and give up those that were asked too long ago."""
        self._take_replies()
        now = self._looked_at = self._clock()
        self._give_up(now)
        for asker in self._fresh:
            asker.is_fresh = False
            self._turns.put(asker)
        self._fresh.clear()

    def take_answered(self) -> dict[str, list[OffloadKey]]:
        """The keys of each request that may be told another answer than None, since the last call."""
        if not self._replies.empty():
            self._take_replies()
        answered, self._answered = self._answered, {}
        return answered

    def finish(self, req_id: str) -> None:
        """The request waits for nothing any more."""
        asker = self._askers.pop(req_id, None)
        if asker is not None:
            asker.is_gone = True
            self._drop_queue(asker)
            self._answered.pop(req_id, None)

    def mark(self, keys: Collection[OffloadKey], *, present: bool, rest_s: float = FAILED_S_MIN) -> None:
        """Note what a finished store or a failed load has shown; it overrules answers on their way.

        Args:
            rest_s: how long keys that are not present stay so at least.
        """
        # With a minimum, or a block that is there and cannot be read would be loaded again and again.
        ttl_s = self._options.present_ttl_s if present else max(rest_s, self._options.absent_ttl_s)
        self._epoch += 1
        self._end_asking(keys)
        self._record(keys, present, self._clock() + ttl_s)

    def forget(self, keys: Collection[OffloadKey]) -> None:
        """Forget what is known of these keys: the storage is asked again."""
        self._epoch += 1  # an answer on its way may be older than the removal
        self._end_asking(keys)
        for key in keys:
            self._answers.pop(key, None)

    def doubt(self) -> None:
        """Believe no positive answer from before any more: the storage may not answer at all now."""
        self._doubted_until = self._clock() + max(self._options.deadline_s, self._options.present_ttl_s)

    def take_counts(self) -> LookupCounts:
        """Counts since the last call."""
        counts, self._counts = self._counts, LookupCounts()
        return counts

    def shutdown(self, timeout_s: float) -> bool:
        """End the threads. False: some are stuck in a probe; they are daemons, and touch no slots."""
        for asker in self._askers.values():
            asker.queue.clear()
        for _ in self._threads:
            self._turns.put(None)
        deadline = self._clock() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    # -- questions -------------------------------------------------------------------------------------------------

    def _ask(self, key: OffloadKey, req_id: str, old: tuple[bool, float] | None) -> bool | None:
        """The answer to a key of which nothing is known that is still believed; ``old`` is the last one."""
        if not self._replies.empty():
            self._take_replies()
            if (present := self._known(key)) is not None:
                return present
        asker = self._askers.get(req_id)
        if asker is None:
            asker = self._remember(req_id)
        elif asker.is_over:
            return False
        question = self._asked.get(key)
        if question is not None:
            if question.asker is not asker:
                self._join(asker, key)
            # A step may take long, and not every engine tells when it ends.
            if self._clock() - self._looked_at < self._options.deadline_s:
                return None
            self.flush()
            return False if asker.is_over else self._known(key)
        if old is not None and req_id and not old[0] and old[1] > asker.came_at:
            return False  # too old for others; but who asks for all keys again and again would never end
        if asker.question.epoch != self._epoch:
            asker.question = _Question(asker, self._epoch)
        self._asked[key] = asker.question
        asker.queue.append(key)
        asker.owed += 1
        if not asker.is_fresh:
            asker.is_fresh = True
            if not self._fresh:
                self._looked_at = self._clock()
            self._fresh.append(asker)
        return None

    def _remember(self, req_id: str) -> _Asker:
        if len(self._askers) >= REQUESTS_MAX:
            self.finish(next(iter(self._askers)))
        asker = self._askers[req_id] = _Asker(req_id, self._clock())
        asker.question = _Question(asker, self._epoch)
        return asker

    def _join(self, asker: _Asker, key: OffloadKey) -> None:
        also = self._also.setdefault(key, [])
        if asker not in also:
            also.append(asker)
            asker.owed += 1

    def _end_question(self, key: OffloadKey, question: _Question) -> None:
        """Nobody waits for this key any more; those who did ask again, and are told what is known."""
        del self._asked[key]
        for asker in (question.asker, *self._also.pop(key, ())):
            asker.owed -= 1
            if not asker.is_gone:
                self._answered.setdefault(asker.req_id, []).append(key)

    def _end_asking(self, keys: Iterable[OffloadKey]) -> None:
        if self._asked:
            for key in keys:
                if (question := self._asked.get(key)) is not None:
                    self._end_question(key, question)

    def _drop_queue(self, asker: _Asker) -> None:
        """Ask nothing more for a request that no probe has yet. Who waits for such a key as well asks again."""
        while asker.queue:
            try:
                key = asker.queue.pop()
            except IndexError:  # a probe thread took it
                return
            question = self._asked.get(key)
            if question is not None and question.asker is asker:
                self._end_question(key, question)

    # -- limits ----------------------------------------------------------------------------------------------------

    def _give_up(self, now: float) -> None:
        """End what the storage is silent about, and the waits that have taken too long."""
        options = self._options
        for turn in self._under_way:
            if turn is None or turn.is_expired:
                continue
            if (
                now - max(turn.silent_since, self._answered_at) >= options.deadline_s
                or now - turn.silent_since >= SILENT_TURNS_MAX * options.deadline_s
            ):
                turn.is_expired = True
                self._expire([key for key in turn.keys if self._is_answered_by(turn, key)], now)
        for asker in list(self._askers.values()):
            if asker.is_fresh:
                asker.queued_at = now
            elif asker.queue and now - max(asker.queued_at, self._answered_at) >= options.deadline_s:
                keys = list(asker.queue)
                asker.queue.clear()
                self._expire([key for key in keys if key in self._asked], now)
            if asker.owed:
                asker.idle_at = None
                if now - asker.came_at >= options.total_s:
                    self._end_wait(asker, now)
            elif asker.idle_at is None:
                asker.idle_at = now
            elif now - asker.idle_at >= options.deadline_s and not asker.is_over:
                del self._askers[asker.req_id]

    def _expire(self, keys: Sequence[OffloadKey], now: float) -> None:
        """The storage is silent about these keys: they are absent. A late answer is not believed.

        A load may have failed meanwhile.
        """
        self._epoch += 1
        self._counts.expired += len(keys)
        self._end_asking(keys)
        self._record(keys, False, now + self._options.absent_ttl_s)

    def _end_wait(self, asker: _Asker, now: float) -> None:
        """A request has waited for ``total_s``: all that it does not know by now is absent, for this request."""
        self._counts.given_up += asker.owed
        if asker.req_id:
            asker.is_over = True
            awaited = [
                key for key, each in self._asked.items() if each.asker is asker or asker in self._also.get(key, ())
            ]
            self._answered.setdefault(asker.req_id, []).extend(awaited)
        else:
            asker.came_at = now  # nobody in particular, and never finished
            self._record(list(asker.queue), False, now + self._options.absent_ttl_s)
        self._drop_queue(asker)

    # -- answers ---------------------------------------------------------------------------------------------------

    def _known(self, key: OffloadKey) -> bool | None:
        """The last answer, while it is believed."""
        present, until = self._answers.get(key, (False, float("-inf")))
        if self._clock() >= until or (present and until < self._doubted_until):
            return None
        return present

    def _record(self, keys: Iterable[OffloadKey], present: bool, until: float) -> None:
        answers = self._answers
        answer = (present, until)
        for key in keys:
            if key in answers:
                answers.move_to_end(key)  # the oldest leave first
            answers[key] = answer
        while len(answers) > self._options.keys_max:
            answers.popitem(last=False)

    def _is_answered_by(self, turn: _Turn, key: OffloadKey) -> bool:
        """Whether the turn's answer is to the key's question, and not to one that expired or was overruled."""
        question = self._asked.get(key)
        return question is not None and question.epoch <= turn.epoch

    def _take_replies(self) -> None:
        while True:
            try:
                turn = self._replies.get_nowait()
            except Empty:
                return
            self._learn(turn)
            self._take(turn)

    def _take(self, turn: _Turn) -> None:
        options, counts = self._options, self._counts
        present, absent = [], []
        dropping: set[_Asker] = set()
        for key, found in zip(turn.keys, turn.found, strict=True):
            if not self._is_answered_by(turn, key):
                counts.late += found is not None
                continue
            question = self._asked[key]
            self._end_question(key, question)
            if found:
                present.append(key)
                continue
            absent.append(key)
            dropping.add(question.asker)
            if found is None:
                counts.failed.append(key)
            else:
                counts.misses += 1
        counts.hits += len(present)
        now = self._clock()
        self._record(present, True, now + max(options.present_ttl_s, options.deadline_s))
        self._record(absent, False, now + max(options.absent_ttl_s, options.deadline_s))
        for asker in dropping:
            self._drop_queue(asker)

    def _learn(self, turn: _Turn) -> None:
        """How many keys the next turn is to have."""
        count, took_s = len(turn.keys), turn.took_s
        before, before_s = self._last_turn
        self._last_turn = count, took_s
        wanted_s = TURN_SHARE * self._options.deadline_s
        if self._doubles and count >= self._turn_keys:
            # The first turns of a far storage measure its distance and the opening of connections, not its speed.
            self._doubles = took_s <= 2 * wanted_s or count <= TURN_KEYS_FIRST
            if self._doubles:
                self._turn_keys = min(self._options.batch_keys_max, 2 * count)
                self._doubles = self._turn_keys < self._options.batch_keys_max
                return
        fits = count * wanted_s / took_s if took_s else float("inf")
        if took_s > 2 * wanted_s:
            is_far = 2 * count <= max(before, self._turn_keys) and took_s > LATENCY_SHARE * before_s
            if not is_far:  # else fewer keys would take as long
                self._turn_keys = max(1, int(min(count / 2, fits)) if took_s > 4 * wanted_s else count // 2)
        elif count >= self._turn_keys and fits > count:  # a smaller one says little: the storage may be far, not slow
            self._turn_keys = int(min(self._options.batch_keys_max, TURN_GROWTH * count, fits))

    def _work(self, place: int) -> None:
        while (asker := self._turns.get()) is not None:
            keys = _take_left(asker.queue, self._turn_keys)
            if asker.queue:
                self._turns.put(asker)
            turn = _Turn(keys, self._epoch, max(asker.queued_at, self._answered_at))
            self._under_way[place] = turn
            turn.keys = [key for key in keys if key in self._asked]
            if turn.keys:
                began_at = self._clock()
                turn.found = self._found(turn.keys)
                self._answered_at = self._clock()
                turn.took_s = self._answered_at - began_at
                self._replies.put(turn)
            self._under_way[place] = None

    def _found(self, keys: list[OffloadKey]) -> Sequence[bool | None]:
        try:
            found = self._probe(keys)
            if len(found) != len(keys):
                raise ValueError(f"{len(found)} answers to {len(keys)} keys")
        except BaseException as e:  # noqa: BLE001 - a thread's edge: an unanswered question is a miss
            logger.warning("lookup of %d keys failed: %s: %s", len(keys), type(e).__name__, e)
            return [None] * len(keys)
        return found


def _take_left(queue: deque[OffloadKey], count: int) -> list[OffloadKey]:
    keys = []
    try:
        for _ in range(count):
            keys.append(queue.popleft())
    except IndexError:  # there are fewer
        pass
    return keys
