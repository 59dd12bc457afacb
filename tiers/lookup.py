"""AsyncLookup: presence questions answered off the scheduler's thread, in batches, with a deadline and a cache.

``lookup`` never waits: the first question about a key is queued and answered None; ``flush``, at the end of each
scheduler step, hands all questions of the step to a probe thread as one batch; a later ``lookup`` finds the answer.
No key stays "asked": a question that is not answered within the deadline, counted from its hand-over, is answered
"absent", and one that has waited as long for the step's end is handed over before that.

Who owns what: the scheduler's thread owns both tables and calls everything public. Probe threads see only the batch
they were handed and put their answers into a SimpleQueue. There is no lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from tiers.keys import OffloadKey
from tiers.plain_logs import get_logger

logger = get_logger(__name__)

FAILED_S_MIN = 1.0  # a block whose load failed is absent for so long at least

#: Answers parallel to the keys: True present, False absent, None could not be asked (counts as absent).
Probe = Callable[[Sequence[OffloadKey]], Sequence[bool | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOptions:
    """Limits of an AsyncLookup.

    Attributes:
        threads: probe threads; more than one, so that a stuck probe does not stop all admissions.
        deadline_s: how long a probe may have a question before the answer is "absent".
        present_ttl_s: how long a positive answer is believed. Short enough to notice another host's collector.
        absent_ttl_s: how long a negative answer is believed. Short, because another replica may store the block. Any
            answer is believed for ``deadline_s`` at least, because a request needs those to all its keys at once; a
            failed load makes its block absent for ``FAILED_S_MIN`` at least.
        keys_max: cached answers of each kind.
        batch_keys_max: keys in one probe; a larger step is split over the threads. A probe is answered as a whole, and
            at 0.6 ms a key (three lookups on NFS) 1,024 keys would miss the deadline.
    """

    threads: int = 2
    deadline_s: float = 0.2
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
        expired: questions that were not answered in time.
        late: answers to questions that had expired or been overruled.
    """

    hits: int = 0
    misses: int = 0
    failed: list[OffloadKey] = field(default_factory=list)
    expired: int = 0
    late: int = 0


class AsyncLookup:
    """Presence of keys in one tier.

    Args:
        probe: asks the storage; runs on a probe thread; may raise, which means None for the whole batch.
        name: prefix of the threads' names.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        name: str,
        options: LookupOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._probe = probe
        self._options = options
        self._clock = clock
        # key -> (present, believed until). OrderedDict: to find its first entry, a dict walks over the places of those
        # that were removed before, 15 to 63 ms a step where the cache is full.
        self._answers: OrderedDict[OffloadKey, tuple[bool, float]] = OrderedDict()
        self._doubted_until = float("-inf")  # a positive answer believed until before this is older than a doubt
        self._asked: dict[OffloadKey, float] = {}  # key -> handed to a probe at; infinite while it is in _batch
        self._batch: list[OffloadKey] = []
        self._batch_since = 0.0  # when its first question came
        self._questions: SimpleQueue[tuple[list[OffloadKey], float] | None] = SimpleQueue()
        self._replies: SimpleQueue[tuple[list[OffloadKey], float, Sequence[bool | None] | None]] = SimpleQueue()
        self._counts = LookupCounts()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-lookup{i}", daemon=True) for i in range(options.threads)
        ]
        for thread in self._threads:
            thread.start()

    def lookup(self, key: OffloadKey) -> bool | None:
        """True present, False absent, None asked."""
        now = self._clock()
        known = self._known(key, now)
        if known is None and not self._replies.empty():
            self._take_replies()
            known = self._known(key, now)
        if known is not None:
            return known
        asked_at = self._asked.get(key)
        if asked_at is None:
            if not self._batch:
                self._batch_since = now
            self._asked[key] = math.inf
            self._batch.append(key)
            return None
        if asked_at == math.inf:
            # A step may take long, and not every engine tells when it ends.
            if now - self._batch_since >= self._options.deadline_s:
                self.flush()
            return None
        if now - asked_at < self._options.deadline_s:
            return None
        # Forgotten, so that the late reply is not believed: a load may have failed meanwhile.
        del self._asked[key]
        self._counts.expired += 1
        self._record(key, False, now)
        return False

    def flush(self) -> None:
        """Hand this step's questions to the probe threads."""
        self._take_replies()
        if not self._batch:
            return
        now = self._clock()
        keys = [key for key in self._batch if key in self._asked]
        self._batch = []
        for key in keys:
            self._asked[key] = now
        size = self._options.batch_keys_max
        for start in range(0, len(keys), size):
            self._questions.put((keys[start : start + size], now))

    def mark(self, keys: Iterable[OffloadKey], *, present: bool, rest_s: float = FAILED_S_MIN) -> None:
        """Note what a finished store or a failed load has shown; it overrules answers on their way.

        Args:
            rest_s: how long keys that are not present stay so at least.
        """
        now = self._clock()
        for key in keys:
            self._asked.pop(key, None)
            # With a minimum, or a block that is there and cannot be read would be loaded again and again.
            self._record(key, present, now, ttl_s_min=0.0 if present else rest_s)

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget what is known of these keys: the storage is asked again."""
        for key in keys:
            self._asked.pop(key, None)  # an answer on its way may be older than the removal
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
        for _ in self._threads:
            self._questions.put(None)
        deadline = self._clock() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _known(self, key: OffloadKey, now: float) -> bool | None:
        """The last answer, while it is believed."""
        present, until = self._answers.get(key, (False, now))
        if now >= until or (present and until < self._doubted_until):
            return None
        return present

    def _record(self, key: OffloadKey, present: bool, now: float, *, ttl_s_min: float = 0.0) -> None:
        options = self._options
        answers = self._answers
        answers.pop(key, None)  # to the young end, so that the oldest leave first
        answers[key] = (present, now + max(ttl_s_min, options.present_ttl_s if present else options.absent_ttl_s))
        if len(answers) > options.keys_max:
            answers.popitem(last=False)

    def _take_replies(self) -> None:
        while True:
            try:
                keys, asked_at, found = self._replies.get_nowait()
            except Empty:
                return
            now = self._clock()
            counts = self._counts
            if found is None:
                for key in [key for key in keys if self._asked.get(key) == asked_at]:
                    del self._asked[key]
                    counts.expired += 1
                    self._record(key, False, now)
                continue
            for key, present in zip(keys, found, strict=True):
                # Else this reply is to a question that has expired or was overruled.
                if self._asked.get(key) != asked_at:
                    counts.late += present is not None
                    continue
                del self._asked[key]
                self._record(key, bool(present), now, ttl_s_min=self._options.deadline_s)
                if present is None:
                    counts.failed.append(key)
                elif present:
                    counts.hits += 1
                else:
                    counts.misses += 1

    def _work(self) -> None:
        while (question := self._questions.get()) is not None:
            keys, asked_at = question
            if self._clock() - asked_at >= self._options.deadline_s:
                self._replies.put((keys, asked_at, None))  # nobody would believe the answers, and others wait
                continue
            found: Sequence[bool | None]
            try:
                found = self._probe(keys)
                if len(found) != len(keys):
                    raise ValueError(f"{len(found)} answers to {len(keys)} keys")
            except BaseException as e:  # noqa: BLE001 - a thread's edge: an unanswered question is a miss
                logger.warning("lookup of %d keys failed: %s: %s", len(keys), type(e).__name__, e)
                found = [None] * len(keys)
            self._replies.put((keys, asked_at, found))
