"""Looks up and deletes many objects, with one request per object, from several threads.

A LIST is cheaper only in a namespace with few blocks. Names are hashes, so in a large namespace a page of 1,000 names
holds few of the wanted ones. A LIST is also slow while a request waits: SeaweedFS took 0.2 to 0.7 s for 1,000 blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from ...errors import StoreError, StoreTimeoutError
from ..watchdog import run_in_threads

# Keys per thread, enough to justify its start, which takes 0.1 ms. Fewer if they would take longer than ASKER_S.
KEYS_PER_ASKER: Final = 8
ASKER_S: Final = 0.004
ASKERS_MAX: Final = 128
DELETERS_MAX: Final = 8
DELETE_KEYS_MAX: Final = 1000  # S3's limit for one batch delete

Answers = dict[str, int | Exception | None]

_ENDLESS: Final = float("inf")


class Lookups:
    """Looks up keys and remembers how long a HEAD takes. Any thread may call; a race on this time costs only speed.

    Args:
        askers_max: most threads at once.
        silence_s_max: after this long without a response, the remaining keys get StoreTimeoutErrors.
        clock: returns monotonic seconds.
    """

    def __init__(self, *, askers_max: int, silence_s_max: float, clock: Callable[[], float]) -> None:
        self._askers_max = min(ASKERS_MAX, askers_max)
        self._silence_s_max = silence_s_max
        self._clock = clock
        self._head_s = _ENDLESS  # the fastest HEAD of the last batch; infinite: unknown

    def answer(self, keys: Sequence[str], answers: Answers, size: Callable[[str], int | None]) -> None:
        """Look up each key, in threads that end with this call. Threads are three times as fast as asyncio here.

        Args:
            keys: each key once.
            answers: filled with the result for each key.
            size: looks up one key; raises only StoreErrors.
        """
        if not keys:
            return
        waiting = iter(keys)  # next() on a list iterator is atomic
        answered_at = self._clock()
        fastest_s = _ENDLESS

        def ask(count: int | None = None) -> None:
            nonlocal answered_at, fastest_s
            for key in islice(waiting, count):
                try:
                    started = self._clock()
                    if started - answered_at > self._silence_s_max:
                        raise StoreTimeoutError("not asked: the server stopped answering", key=key)
                    answers[key] = size(key)
                    answered_at = self._clock()
                    fastest_s = min(fastest_s, answered_at - started)
                except StoreError as e:
                    answers[key] = e.with_traceback(None)  # the traceback refers to ``answers``

        if self._head_s == _ENDLESS:
            ask(2)  # in this thread alone, to measure how far away the server is
            self._learn(len(keys), fastest_s)
        is_near = self._head_s * KEYS_PER_ASKER <= ASKER_S
        keys_each = KEYS_PER_ASKER if is_near else max(1, int(ASKER_S / self._head_s))
        run_in_threads("kvtiers-s3-head", min(self._askers_max, -(-len(keys) // keys_each)), ask)
        self._learn(len(keys), fastest_s)

    def _learn(self, num_keys: int, fastest_s: float) -> None:
        if num_keys > 1:  # a single HEAD may have waited for its connection
            self._head_s = fastest_s


def delete_each(names: Sequence[str], delete: Callable[[str], None]) -> dict[str, StoreError]:
    """Delete objects one by one, for servers that refuse DeleteObjects. Returns the errors of objects not deleted.

    Uses several threads, which end before this returns. A retryable error was already retried, so after one the
    remaining objects are not tried.

    Args:
        names: each name once.
        delete: deletes one object; retries, and raises only StoreErrors.
    """
    lasting: list[StoreError] = []
    outcomes: dict[str, StoreError | None] = {}
    waiting = iter(names)  # next() on a list iterator is atomic

    def delete_waiting() -> None:
        for name in waiting:
            error = lasting[0] if lasting else None
            if error is None:
                try:
                    delete(name)
                except StoreError as e:
                    error = e.with_traceback(None)  # the traceback refers to ``lasting``
                    if e.retryable:
                        lasting.append(error)
            outcomes[name] = error

    run_in_threads("kvtiers-s3-delete", min(DELETERS_MAX, len(names)), delete_waiting)
    return {name: error for name in names if (error := outcomes[name]) is not None}
