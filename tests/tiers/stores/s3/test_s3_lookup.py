"""Lookups: how many threads ask a bucket, and when they stop."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtiers.tiers.errors import StoreTimeoutError
from kvtiers.tiers.stores.s3.many_objects import ASKER_S, ASKERS_MAX, KEYS_PER_ASKER, Answers, Lookups
from tests.clock import Clock

WAIT_S_MAX = 120.0
KEYS = [f"m/{i:07d}" for i in range(24)]


def test_nothing_to_ask_teaches_nothing() -> None:
    clock = Clock()
    lookups = Lookups(askers_max=ASKERS_MAX, silence_s_max=60, clock=clock)

    def size(key: str) -> int | None:
        clock.advance(0.5)
        return None

    lookups.answer(KEYS[:5], {}, size)
    lookups.answer([], {}, size)
    assert lookups._head_s == 0.5


def test_a_far_server_is_asked_by_more_threads() -> None:
    """Passes only if so many ask at once. The first two of a process are alone, and say how far the server is.

    A question by itself says nothing: it may have waited for its connection.
    """
    spent = threading.local()  # a clock for each thread: what one waits is not another's
    lookups = Lookups(askers_max=ASKERS_MAX, silence_s_max=60, clock=lambda: getattr(spent, "s", 0.0))
    few = 24 // KEYS_PER_ASKER
    spent.s = 0.0
    assert ask_together(lookups, KEYS[:1], 1, spent, 10 * ASKER_S) == 1
    assert ask_together(lookups, KEYS[:2], 1, spent, ASKER_S / 100) == 1
    for askers, head_s in ((few, 2 * ASKER_S), (24, ASKER_S / 2), (12, ASKER_S / 100), (few, 0)):
        assert ask_together(lookups, KEYS, askers, spent, head_s) == askers


def ask_together(lookups: Lookups, keys: Sequence[str], askers: int, spent: threading.local, head_s: float) -> int:
    """How many threads asked; each waits with its first question until ``askers`` do."""
    together = threading.Barrier(askers)
    seen = set[int]()

    def size(key: str) -> int | None:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            together.wait(WAIT_S_MAX)
        spent.s = getattr(spent, "s", 0.0) + head_s
        return None

    answers: Answers = {}
    lookups.answer(keys, answers, size)
    assert answers == dict.fromkeys(keys)
    return len(seen)


def test_silence_ends_the_asking() -> None:
    clock = Clock()
    lookups = Lookups(askers_max=ASKERS_MAX, silence_s_max=60, clock=clock)

    def hang(key: str) -> int | None:
        clock.advance(61)
        raise StoreTimeoutError("no answer", key=key)

    answers: Answers = {}
    lookups.answer(KEYS[:3], answers, hang)
    errors = list(map(str, answers.values()))
    assert "no answer" in errors[0]
    assert all("not asked" in error for error in errors[1:])
