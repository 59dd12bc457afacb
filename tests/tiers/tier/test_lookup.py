from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import pytest

from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.tier import lookup as lookup_module
from kvtiers.tiers.tier.lookup import FAILED_S_MIN, AsyncLookup, LookupOptions
from tests.clock import Clock
from tests.identity import block_key

KEYS = [block_key(n) for n in range(100)]
LONG = [block_key(n) for n in range(16_000)]


class Storage:
    """Answers probes with what it had when they began, as soon as it is asked for answers.

    Attributes:
        asked: the keys of each probe.
        held: no probe with one of these keys is answered; None: no probe at all is.
        fails: the lookups of probes that begin now fail.
    """

    def __init__(self, clock: Clock, present: Collection[OffloadKey], per_second: float) -> None:
        self.present = set(present)
        self.asked: list[list[OffloadKey]] = []
        self.held: Collection[OffloadKey] | None = ()
        self.fails = False
        self._clock = clock
        self._per_second = per_second
        self._under_way: dict[int, list[bool | None]] = {}

    def look(self, keys: Sequence[OffloadKey], name_prefix: str = "") -> int:
        self.asked.append(list(keys))
        self._under_way[len(self.asked) - 1] = [None if self.fails else key in self.present for key in keys]
        return len(self.asked) - 1

    def take_looked(self) -> list[tuple[int, Sequence[bool | None]]]:
        free = [n for n in self._under_way if self.held is not None and not set(self.held) & set(self.asked[n])]
        self._clock.now += sum(len(self.asked[number]) for number in free) / self._per_second
        return [(number, self._under_way.pop(number)) for number in free]


class Bench:
    def __init__(self, lookup: AsyncLookup, storage: Storage) -> None:
        self.lookup = lookup
        self.storage = storage

    def ask(self, keys: Sequence[OffloadKey], req_id: str = "") -> list[bool | None]:
        """Ask for all keys in one step. Returns what is known of them."""
        known = [self.lookup.lookup(key, req_id) for key in keys]
        self.lookup.flush()
        return known

    def answers(self, keys: Sequence[OffloadKey], req_id: str = "") -> list[bool | None]:
        """What is known of the keys in the next step, of which the storage has been asked."""
        self.lookup.take_replies()
        return self.ask(keys, req_id)

    def look_up_prefix(self, keys: Sequence[OffloadKey], req_id: str) -> int:
        """Look keys up like an engine: in each step up to the first miss, until all are answered. Returns the hits."""
        while True:
            undecided = False
            hits = 0
            self.lookup.take_replies()
            for key in keys:
                found = self.lookup.lookup(key, req_id)
                if found is False:
                    break
                undecided |= found is None
                hits += 1
            self.lookup.flush()
            if not undecided:
                return hits


Make = Callable[..., Bench]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Make:
    def build(
        present: Collection[OffloadKey] = KEYS,
        *,
        turns: int = 2,
        turn_keys: int = 128,
        per_second: float = float("inf"),
        **options: float,
    ) -> Bench:
        monkeypatch.setattr(lookup_module, "NEAR_TURN_KEYS", turn_keys)
        storage = Storage(clock, present, per_second)
        limits = LookupOptions(asked_max=turns * turn_keys, **options)  # type: ignore[arg-type]
        return Bench(AsyncLookup(storage, options=limits, clock=clock), storage)

    return build


def test_lookup_is_sent_at_the_end_of_the_step_and_then_answered(make: Make) -> None:
    bench = make(KEYS[:50])
    assert [bench.lookup.lookup(key) for key in KEYS] == [None] * 100
    assert bench.storage.asked == []  # nothing leaves before the step's end
    bench.lookup.flush()
    assert bench.answers(KEYS) == [True] * 50 + [False] * 50
    assert bench.storage.asked == [KEYS]
    counts = bench.lookup.take_counts()
    assert (counts.hits, counts.misses, counts.failed, counts.expired) == (50, 50, [], 0)


def test_questions_of_a_large_step_are_split_into_turns_in_their_order(make: Make) -> None:
    bench = make(turn_keys=30)
    bench.ask(KEYS)
    assert bench.storage.asked == [KEYS[:30], KEYS[30:60]]
    bench.lookup.take_replies()
    assert bench.answers(KEYS) == [True] * 100
    assert bench.storage.asked[2:] == [KEYS[60:90], KEYS[90:]]


def test_unanswered_lookup_is_a_miss_after_the_deadline(make: Make, clock: Clock) -> None:
    """L2. A late answer is ignored, because a load may have failed in the meantime."""
    bench = make(deadline_s=0.2, absent_ttl_s=5)
    bench.storage.held = None
    bench.ask(KEYS[:1])
    clock.now += 0.19
    assert bench.answers(KEYS[:1]) == [None]
    clock.now += 0.02
    bench.lookup.flush()
    assert bench.answers(KEYS[:1]) == [False]
    bench.storage.held = ()
    assert bench.answers(KEYS[:1]) == [False]
    counts = bench.lookup.take_counts()
    assert (counts.expired, counts.hits, counts.misses) == (1, 0, 0)


def test_expired_questions_are_not_sent(make: Make, clock: Clock) -> None:
    """Their answers would be ignored, and later questions would wait for them."""
    bench = make(deadline_s=0.2, absent_ttl_s=5, turns=1)
    bench.storage.held = None
    for key in KEYS[:3]:
        bench.ask([key])
    clock.now += 0.3
    bench.lookup.flush()
    assert bench.ask(KEYS[:3]) == [False] * 3
    bench.storage.held = ()
    bench.lookup.flush()
    bench.ask(KEYS[3:4])
    assert bench.answers(KEYS[3:4]) == [True]
    assert bench.storage.asked == [[KEYS[0]], [KEYS[3]]]
    counts = bench.lookup.take_counts()
    assert (counts.expired, counts.failed, counts.misses) == (3, [], 0)


def test_error_of_a_probe_is_a_miss_and_later_probes_work(make: Make, clock: Clock) -> None:
    bench = make(absent_ttl_s=1)
    bench.storage.fails = True
    bench.ask(KEYS[:1])
    assert bench.answers(KEYS[:1]) == [False]
    assert bench.lookup.take_counts().failed == KEYS[:1]
    bench.storage.fails = False
    clock.now += 2
    bench.ask(KEYS[:1])
    assert bench.answers(KEYS[:1]) == [True]


def test_one_stuck_probe_does_not_stop_the_next_probe(make: Make) -> None:
    bench = make()
    bench.storage.held = KEYS[:1]
    bench.ask(KEYS[:1])
    bench.ask(KEYS[1:2])
    assert bench.answers(KEYS[:2]) == [None, True]


def test_cached_answers_expire_after_their_ttl(make: Make, clock: Clock) -> None:
    bench = make(KEYS[:1], present_ttl_s=10, absent_ttl_s=1)
    bench.ask(KEYS[:2])
    assert bench.answers(KEYS[:2]) == [True, False]
    clock.now += 2
    assert bench.ask(KEYS[:2]) == [True, None]
    clock.now += 9
    assert bench.ask(KEYS[:1]) == [None]


def test_doubt_invalidates_positive_answers(make: Make, clock: Clock) -> None:
    bench = make(KEYS[:2], present_ttl_s=10, absent_ttl_s=5)
    bench.ask(KEYS[:3])
    assert bench.answers(KEYS[:3]) == [True, True, False]
    clock.now += 1
    bench.lookup.doubt()
    assert [bench.lookup.lookup(key) for key in KEYS[:3]] == [None, None, False]
    bench.lookup.mark(KEYS[1:2], present=True)
    bench.lookup.flush()
    assert bench.answers(KEYS[:3]) == [True, True, False]
    assert bench.storage.asked == [KEYS[:3], KEYS[:1]]


def test_mark_overrides_a_pending_answer(make: Make) -> None:
    """After a failed load, an older "present" must not make the engine load the block again and again (vllm#49176)."""
    bench = make(absent_ttl_s=50)
    bench.ask(KEYS[:1])
    bench.lookup.mark(KEYS[:1], present=False)
    assert bench.answers(KEYS[:1]) == [False]
    bench.lookup.mark(KEYS[:1], present=True)
    assert bench.ask(KEYS[:1]) == [True]


def test_failed_load_is_a_miss_for_a_minimum_time_at_any_ttl(make: Make, clock: Clock) -> None:
    """Otherwise a block that is present but unreadable would be loaded again and again."""
    bench = make(deadline_s=0.2, absent_ttl_s=0)
    bench.lookup.mark(KEYS[:1], present=False)
    clock.now += FAILED_S_MIN / 2
    assert bench.ask(KEYS[:1]) == [False]
    clock.now += FAILED_S_MIN
    assert bench.ask(KEYS[:1]) == [None]
    assert bench.answers(KEYS[:1]) == [True]


def test_forget_discards_pending_answers(make: Make, clock: Clock) -> None:
    """The collector removed the block after the storage was asked for it."""
    bench = make()
    bench.ask(KEYS[:1])
    bench.lookup.forget(KEYS[:1])
    bench.storage.present.clear()
    clock.now += 0.01
    assert bench.answers(KEYS[:1]) == [None]
    assert bench.answers(KEYS[:1]) == [False]


def test_cache_is_bounded_and_forgets_the_oldest_answers(make: Make) -> None:
    bench = make([], keys_max=10)
    bench.lookup.mark(KEYS, present=True)
    assert bench.ask(KEYS) == [None] * 90 + [True] * 10


def test_expired_answers_are_used_in_the_step_that_receives_them(make: Make, clock: Clock) -> None:
    """Otherwise a request whose keys are answered one by one would never get all answers."""
    bench = make(KEYS[:2], deadline_s=0.2, present_ttl_s=0.001, absent_ttl_s=0)
    bench.ask(KEYS[:4])
    bench.lookup.take_replies()
    clock.now += 0.1
    assert bench.ask(KEYS[:4]) == [True, True, False, False]
    clock.now += 0.11
    assert bench.ask(KEYS[:4]) == [None] * 4
    assert bench.storage.asked == [KEYS[:4]] * 2


def test_long_prompt_is_found_completely_while_the_storage_answers(make: Make, clock: Clock) -> None:
    bench = make(LONG, deadline_s=0.2, total_s=15.0, turns=1, per_second=2_000)
    began = clock.now
    assert bench.look_up_prefix(LONG, "r") == len(LONG)
    assert clock.now - began == pytest.approx(8.0)
    assert [key for keys in bench.storage.asked for key in keys] == LONG  # the first first, none twice
    assert bench.lookup.take_counts().expired == 0


def test_request_ends_its_wait_with_the_known_prefix(make: Make, clock: Clock) -> None:
    bench = make(LONG, deadline_s=0.2, total_s=3.0, turns=1, per_second=2_000)
    began = clock.now
    hits = bench.look_up_prefix(LONG, "r")
    took_s = clock.now - began
    assert 3.0 <= took_s < 3.2
    assert 5_900 <= hits <= took_s * 2_000 + 1
    counts = bench.lookup.take_counts()
    assert (counts.hits, counts.expired) == (hits, 0)
    assert counts.given_up > 9_000
    assert set(bench.lookup.take_answered()["r"]) == set(LONG)
    assert bench.lookup.lookup(LONG[-1], "r") is False  # it does not begin to wait again
    bench.lookup.flush()
    assert bench.lookup.take_counts().given_up == 0
    bench.lookup.finish("r")
    assert bench.lookup.lookup(LONG[-1], "r") is None


def test_requests_that_end_their_waits_together_get_each_key_once(make: Make, clock: Clock) -> None:
    bench = make(LONG, deadline_s=100.0, total_s=3.0, turns=1)
    bench.storage.held = None
    for req_id, keys in (("a", LONG[:1_000]), ("b", LONG[500:1_500])):
        bench.ask(keys, req_id)
    clock.now += 3.1
    bench.lookup.flush()
    assert bench.lookup.take_counts().given_up == 2_000
    answered = bench.lookup.take_answered()
    assert sorted(answered["a"]) == sorted(LONG[:1_000])
    assert sorted(answered["b"]) == sorted(LONG[500:1_500])


def test_request_given_up_but_never_finished_is_forgotten(make: Make, clock: Clock) -> None:
    """The engine may never report its end."""
    bench = make(deadline_s=100.0, total_s=3.0)
    bench.storage.held = None
    bench.ask(KEYS, "r")
    clock.now += 3.1
    bench.lookup.flush()
    bench.storage.held = ()
    for passed_s in (0.0, lookup_module.OVER_S, 1.0):
        assert bench.lookup._askers
        clock.now += passed_s
        bench.lookup.flush()
    assert not bench.lookup._askers


def test_miss_stops_questions_for_later_keys_of_its_request(make: Make) -> None:
    bench = make(LONG[:700], turns=1)
    assert bench.look_up_prefix(LONG, "r") == 700
    assert sum(map(len, bench.storage.asked)) < 700 + 256
    assert LONG[-1] not in bench.lookup._asked


def test_keys_behind_a_miss_are_answered_if_the_request_asks_for_them(make: Make) -> None:
    """As with a sliding window, whose first blocks may be missing."""
    bench = make(LONG[:500], turns=1, absent_ttl_s=0.5, per_second=500)
    wanted = LONG[1_000:0:-1]
    while None in (known := bench.answers(wanted, "r")):
        pass
    assert known == [False] * 501 + [True] * 499


def test_short_request_does_not_wait_for_all_keys_of_a_long_request(make: Make) -> None:
    bench = make(LONG, turns=1)
    bench.ask(LONG[:8_000], "long")
    bench.ask(LONG[8_000:8_010], "short")
    assert bench.look_up_prefix(LONG[8_000:8_010], "short") == 10
    assert sum(map(len, bench.storage.asked)) < 1_000


def test_key_that_several_requests_want_is_sent_once(make: Make) -> None:
    bench = make()
    for req_id in ("a", "b", "c"):
        for key in KEYS[:3]:
            assert bench.lookup.lookup(key, req_id) is None
    assert bench.ask(KEYS[50:51], "d") == [None]
    bench.lookup.finish("c")
    assert bench.lookup.take_answered() == {"a": KEYS[:3], "b": KEYS[:3], "d": KEYS[50:51]}
    assert bench.storage.asked == [KEYS[:3], KEYS[50:51]]


def test_keys_of_a_finished_request_are_sent_for_other_requests(make: Make) -> None:
    bench = make(turns=1, turn_keys=1)
    bench.storage.held = None
    for req_id in ("first", "second"):
        bench.ask(KEYS[:5], req_id)
    bench.lookup.finish("first")
    assert set(bench.lookup.take_answered()["second"]) == set(KEYS[1:5])  # it asks again
    bench.storage.held = ()
    while None in (known := bench.answers(KEYS[:5], "second")):
        pass
    assert known == [True] * 5


def test_silent_storage_expires_all_questions_and_answers_their_requests(make: Make, clock: Clock) -> None:
    bench = make(deadline_s=0.2, turn_keys=1, absent_ttl_s=5)
    bench.storage.held = None
    asked = dict(zip("abcdef", KEYS, strict=False))
    for req_id, key in asked.items():
        bench.ask([key], req_id)
    clock.now += 0.19
    bench.lookup.flush()
    assert bench.lookup.take_answered() == {}
    clock.now += 0.02
    bench.lookup.flush()
    assert bench.lookup.take_answered() == {req_id: [key] for req_id, key in asked.items()}
    assert [bench.lookup.lookup(key, req_id) for req_id, key in asked.items()] == [False] * 6


def test_late_answer_does_not_answer_a_later_question(make: Make, clock: Clock) -> None:
    """In the meantime the block may have been removed or found unreadable."""
    bench = make(deadline_s=0.2, absent_ttl_s=0)
    bench.storage.held = None
    bench.ask(KEYS[:1])
    clock.now += 0.3
    bench.lookup.flush()
    clock.now += 0.01
    bench.storage.present.clear()
    assert bench.ask(KEYS[:1]) == [None]
    bench.storage.held = ()
    assert bench.answers(KEYS[:1]) == [False]
