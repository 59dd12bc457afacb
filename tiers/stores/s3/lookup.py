"""Answers many "is it there?" questions to a bucket by HEADs from several threads.

A LIST would be cheaper only in a namespace of few blocks: names are hashes, so in a large one a page of 1,000 names has
few of those that were asked for. A LIST is also late where a request waits: 1,000 blocks took SeaweedFS 0.2 to 0.7 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from kvtiers.tiers.errors import StoreError, StoreTimeoutError
from kvtiers.tiers.stores.watchdog import run_in_threads

# A thread that asks gets so many keys, as it costs 0.1 ms to start; fewer if they would take it longer than ASKER_S.
KEYS_PER_ASKER: Final = 8
ASKER_S: Final = 0.004
ASKERS_MAX: Final = 128

Answers = dict[str, int | Exception | None]

_ENDLESS: Final = float("inf")


class Lookups:
    """Answers questions and remembers how long that took. Any thread; what is remembered wrongly costs only time.

    Args:
        askers_max: threads at once.
        silence_s_max: if there was no answer for so long, the keys that are left get StoreTimeoutErrors.
        clock: monotonic seconds.
    """

    def __init__(self, *, askers_max: int, silence_s_max: float, clock: Callable[[], float]) -> None:
        self._askers_max = min(ASKERS_MAX, askers_max)
        self._silence_s_max = silence_s_max
        self._clock = clock
        self._head_s = _ENDLESS  # the fastest HEAD of the last batch; endless: not known

    def answer(self, keys: Sequence[str], answers: Answers, size: Callable[[str], int | None]) -> None:
        """Ask for each key, by some threads that end with this call. Threads are three times as fast as asyncio here.

        Args:
            keys: each once.
            answers: by key; filled.
            size: asks for one; raises StoreErrors only.
        """
        if not keys:
            return
        waiting = iter(keys)  # next() of a list's iterator is atomic
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
                    answers[key] = e.with_traceback(None)  # which refers to ``answers``

        if self._head_s == _ENDLESS:
            ask(2)  # in this thread alone, to see how far away the server is
            self._learn(len(keys), fastest_s)
        is_near = self._head_s * KEYS_PER_ASKER <= ASKER_S
        keys_each = KEYS_PER_ASKER if is_near else max(1, int(ASKER_S / self._head_s))
        run_in_threads("kvtiers-s3-head", min(self._askers_max, -(-len(keys) // keys_each)), ask)
        self._learn(len(keys), fastest_s)

    def _learn(self, num_keys: int, fastest_s: float) -> None:
        if num_keys > 1:  # a single one may have waited for its connection
            self._head_s = fastest_s
