from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.tier import lookup as lookup_module
from kvtiers.tiers.tier.lookup import FAILED_S_MIN, AsyncLookup, LookupOptions
from tests.clock import Clock
from tests.identity import block_key
from tests.tiers.tier.asking import Asking, Probe
from tests.waiting import wait_for

KEYS = [block_key(n) for n in range(100)]


class Storage:
    """A probe over a set of keys that records its batches and can be held up."""

    def __init__(self, present: Sequence[OffloadKey] = ()) -> None:
        self.present = set(present)
        self.batches: list[list[OffloadKey]] = []
        self.open = threading.Event()
        self.open.set()
        self.error: BaseException | None = None

    def __call__(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        self.batches.append(list(keys))
        found: list[bool | None] = [key in self.present for key in keys]
        assert self.open.wait(120)
        if self.error:
            raise self.error
        return found


Make = Callable[..., AsyncLookup]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Asking] = []

    def build(probe: Probe, threads: int = 2, turn_keys: int = 128, **options: float) -> AsyncLookup:
        monkeypatch.setattr(lookup_module, "NEAR_TURN_KEYS", turn_keys)
        made.append(Asking(probe, threads, clock))
        limits = LookupOptions(asked_max=threads * turn_keys, **options)  # type: ignore[arg-type]
        return AsyncLookup(made[-1], options=limits, clock=clock)

    yield build
    for asking in made:
        if isinstance(asking.probe, Paced):
            asking.probe.go.release(len(LONG))
        assert asking.end()


def ask(lookup: AsyncLookup, *keys: OffloadKey) -> None:
    """Ask for all keys in one step."""
    for key in keys:
        lookup.lookup(key)
    lookup.flush()


def answer(lookup: AsyncLookup, key: OffloadKey) -> bool:
    def is_known() -> bool:
        lookup.take_replies()
        return lookup.lookup(key) is not None

    wait_for(is_known)
    found = lookup.lookup(key)
    assert found is not None
    return found


def test_lookup_is_sent_at_the_end_of_the_step_and_then_answered(make: Make) -> None:
    storage = Storage(KEYS[:50])
    lookup = make(storage, threads=1)  # of two, the second may be at the storage first
    assert [lookup.lookup(key) for key in KEYS] == [None] * 100
    assert storage.batches == []  # nothing leaves before the step's end
    lookup.flush()
    assert [answer(lookup, key) for key in KEYS] == [True] * 50 + [False] * 50
    assert [key for batch in storage.batches for key in batch] == KEYS
    counts = lookup.take_counts()
    assert (counts.hits, counts.misses, counts.failed, counts.expired) == (50, 50, [], 0)


def test_questions_of_a_large_step_are_split_into_batches(make: Make) -> None:
    storage = Storage(KEYS)
    lookup = make(storage, turn_keys=30)
    ask(lookup, *KEYS)
    assert all(answer(lookup, key) for key in KEYS)
    assert sorted(map(len, storage.batches)) == [10, 30, 30, 30]
    assert {batch[0] for batch in storage.batches} == {KEYS[0], KEYS[30], KEYS[60], KEYS[90]}  # in their order


def test_unanswered_lookup_is_a_miss_after_the_deadline(make: Make, clock: Clock) -> None:
    """L2. A late answer is ignored, because a load may have failed in the meantime."""
    storage = Storage(KEYS)
    storage.open.clear()
    lookup = make(storage, deadline_s=0.2, absent_ttl_s=5)
    ask(lookup, KEYS[0])
    wait_for(lambda: storage.batches)
    clock.now += 0.19
    lookup.flush()
    assert lookup.lookup(KEYS[0]) is None
    clock.now += 0.02
    lookup.flush()
    assert lookup.lookup(KEYS[0]) is False
    storage.open.set()
    assert lookup._asks.end()  # type: ignore[attr-defined]
    lookup.flush()
    assert lookup.lookup(KEYS[0]) is False
    counts = lookup.take_counts()
    assert (counts.expired, counts.hits, counts.misses) == (1, 0, 0)


def test_expired_questions_are_not_sent(make: Make, clock: Clock) -> None:
    """Their answers would be ignored, and later questions would wait for them."""
    storage = Storage(KEYS)
    storage.open.clear()
    lookup = make(storage, deadline_s=0.2, absent_ttl_s=5, threads=1)
    for key in KEYS[:3]:
        lookup.lookup(key)
        lookup.flush()
        wait_for(lambda: storage.batches)
    clock.now += 0.3
    lookup.flush()
    assert [lookup.lookup(key) for key in KEYS[:3]] == [False] * 3
    storage.open.set()
    ask(lookup, KEYS[3])
    assert answer(lookup, KEYS[3]) is True
    assert storage.batches == [[KEYS[0]], [KEYS[3]]]
    counts = lookup.take_counts()
    assert (counts.expired, counts.failed, counts.misses) == (3, [], 0)


@pytest.mark.parametrize("error", [OSError("io"), SystemExit()])
def test_error_of_a_probe_is_a_miss_and_later_probes_work(make: Make, error: BaseException, clock: Clock) -> None:
    storage = Storage(KEYS)
    storage.error = error
    lookup = make(storage, threads=1, absent_ttl_s=1)
    ask(lookup, KEYS[0])
    assert answer(lookup, KEYS[0]) is False
    assert lookup.take_counts().failed == [KEYS[0]]
    storage.error = None
    clock.now += 2
    ask(lookup, KEYS[0])
    assert answer(lookup, KEYS[0]) is True


def test_one_stuck_probe_does_not_stop_the_next(make: Make) -> None:
    stuck = threading.Event()

    def probe(keys: Sequence[OffloadKey]) -> list[bool | None]:
        if KEYS[0] in keys:
            assert stuck.wait(120)
        return [True] * len(keys)

    lookup = make(probe, threads=2)
    ask(lookup, KEYS[0])
    wait_for(lambda: bool(lookup._under_way))
    ask(lookup, KEYS[1])
    assert answer(lookup, KEYS[1]) is True
    assert lookup.lookup(KEYS[0]) is None
    stuck.set()


def test_answers_expire(make: Make, clock: Clock) -> None:
    storage = Storage(KEYS[:1])
    lookup = make(storage, present_ttl_s=10, absent_ttl_s=1)
    ask(lookup, *KEYS[:2])
    assert [answer(lookup, key) for key in KEYS[:2]] == [True, False]
    clock.now += 2
    assert lookup.lookup(KEYS[0]) is True
    assert lookup.lookup(KEYS[1]) is None
    clock.now += 9
    assert lookup.lookup(KEYS[0]) is None


def test_doubt_invalidates_positive_answers(make: Make, clock: Clock) -> None:
    storage = Storage(KEYS[:2])
    lookup = make(storage, present_ttl_s=10, absent_ttl_s=5)
    ask(lookup, *KEYS[:3])
    assert [answer(lookup, key) for key in KEYS[:3]] == [True, True, False]
    clock.now += 1
    lookup.doubt()
    assert [lookup.lookup(key) for key in KEYS[:3]] == [None, None, False]
    lookup.mark(KEYS[1:2], present=True)
    lookup.flush()
    assert [answer(lookup, key) for key in KEYS[:3]] == [True, True, False]
    assert storage.batches == [KEYS[:3], KEYS[:1]]


def test_marks_overrule_answers_under_way(make: Make) -> None:
    """After a failed load, an older "present" must not make the engine load the block again and again (vllm#49176)."""
    storage = Storage(KEYS)
    storage.open.clear()
    lookup = make(storage, absent_ttl_s=50)
    ask(lookup, KEYS[0])
    lookup.mark([KEYS[0]], present=False)
    storage.open.set()
    assert lookup._asks.end()  # type: ignore[attr-defined]
    lookup.flush()
    assert lookup.lookup(KEYS[0]) is False
    lookup.mark([KEYS[0]], present=True)
    assert lookup.lookup(KEYS[0]) is True


def test_failed_load_is_a_miss_for_a_while_whatever_the_ttl(make: Make, clock: Clock) -> None:
    """Otherwise a block that is present but unreadable would be loaded again and again."""
    lookup = make(Storage(KEYS), deadline_s=0.2, absent_ttl_s=0)
    lookup.mark(KEYS[:1], present=False)
    clock.now += FAILED_S_MIN / 2
    assert lookup.lookup(KEYS[0]) is False
    clock.now += FAILED_S_MIN
    ask(lookup, KEYS[0])
    assert answer(lookup, KEYS[0]) is True


def test_forget_discards_answers_under_way(make: Make, clock: Clock) -> None:
    """The collector removed the block after the storage was asked for it."""
    storage = Storage(KEYS)
    storage.open.clear()
    lookup = make(storage)
    ask(lookup, KEYS[0])
    wait_for(lambda: storage.batches == [KEYS[:1]])
    lookup.forget(KEYS[:1])
    storage.present.clear()
    storage.open.set()
    clock.now += 0.01
    ask(lookup, KEYS[0])
    assert answer(lookup, KEYS[0]) is False


@pytest.mark.parametrize("present", [True, False])
def test_lookup_surely_asks_again_after_an_error_and_a_timeout(make: Make, clock: Clock, present: bool) -> None:
    storage = Storage(KEYS if present else [])
    storage.error = OSError("io")
    lookup = make(storage, threads=1, absent_ttl_s=1, deadline_s=1)
    key = KEYS[0]

    def ask_surely() -> bool | None:
        found = lookup.lookup_surely(key)
        lookup.flush()
        return found

    assert ask_surely() is None
    assert answer(lookup, key) is False  # an error is a miss for requests
    assert ask_surely() is None
    storage.error = None
    storage.open.clear()
    clock.now += 2
    assert ask_surely() is None
    wait_for(lambda: len(storage.batches) == 2)
    clock.now += 1.5
    assert ask_surely() is None
    assert lookup.lookup(key) is False  # so is a timeout
    storage.open.set()
    clock.now += 2
    wait_for(lambda: ask_surely() is present)
    assert not lookup._said_absent


def test_cache_is_bounded_and_forgets_the_oldest_answers(make: Make) -> None:
    lookup = make(Storage(), keys_max=10)
    lookup.mark(KEYS, present=True)
    assert [lookup.lookup(key) for key in KEYS] == [None] * 90 + [True] * 10


def test_expired_answers_are_used_in_the_step_that_receives_them(make: Make, clock: Clock) -> None:
    """Otherwise a request whose keys are answered one by one would never get all answers."""
    storage = Storage(KEYS[:2])
    lookup = make(storage, deadline_s=0.2, present_ttl_s=0.001, absent_ttl_s=0)
    assert [lookup.lookup(key) for key in KEYS[:4]] == [None] * 4
    lookup.flush()
    answer(lookup, KEYS[0])
    clock.now += 0.1
    assert [lookup.lookup(key) for key in KEYS[:4]] == [True, True, False, False]
    clock.now += 0.11
    assert [lookup.lookup(key) for key in KEYS[:4]] == [None] * 4
    lookup.flush()
    wait_for(lambda: storage.batches == [KEYS[:4]] * 2)


class Paced:
    """A probe of a storage that answers ``per_second`` keys by the test's clock. Each probe waits for a ``go``.

    All keys before ``stored`` are there.
    """

    def __init__(self, clock: Clock, keys: Sequence[OffloadKey], stored: int, per_second: float) -> None:
        self.clock = clock
        self.numbers = {key: number for number, key in enumerate(keys)}
        self.stored = stored
        self.per_second = per_second
        self.asked: list[int] = []
        self.go = threading.Semaphore(0)

    def __call__(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        assert self.go.acquire(timeout=120)
        self.clock.now += len(keys) / self.per_second
        self.asked += [self.numbers[key] for key in keys]
        return [self.numbers[key] < self.stored for key in keys]


def look_up_prefix(lookup: AsyncLookup, storage: Paced, keys: Sequence[OffloadKey], req_id: str) -> int:
    """Look keys up like an engine: in each step up to the first miss, until all are answered. Returns the hits."""
    for _ in range(20_000):
        undecided = False
        hits = 0
        lookup.take_replies()
        for key in keys:
            found = lookup.lookup(key, req_id)
            if found is False:
                break
            undecided |= found is None
            hits += 1
        lookup.flush()
        if not undecided:
            return hits
        storage.go.release()
        wait_for(lambda: not lookup._asks.is_empty())  # type: ignore[attr-defined]
    raise AssertionError("still undecided")


LONG = [block_key(n) for n in range(16_000)]


def test_long_prompt_is_found_completely_while_the_storage_answers(make: Make, clock: Clock) -> None:
    storage = Paced(clock, LONG, stored=len(LONG), per_second=2_000)
    lookup = make(storage, deadline_s=0.2, total_s=15.0, threads=1)
    began = clock.now
    assert look_up_prefix(lookup, storage, LONG, "r") == len(LONG)
    assert clock.now - began == pytest.approx(8.0)
    assert storage.asked == list(range(len(LONG)))  # the first first, none twice
    assert lookup.take_counts().expired == 0


def test_request_ends_its_wait_with_the_known_prefix(make: Make, clock: Clock) -> None:
    storage = Paced(clock, LONG, stored=len(LONG), per_second=2_000)
    lookup = make(storage, deadline_s=0.2, total_s=3.0, threads=1)
    began = clock.now
    hits = look_up_prefix(lookup, storage, LONG, "r")
    took_s = clock.now - began
    assert 3.0 <= took_s < 3.2
    assert 6_000 <= hits <= took_s * 2_000 + 1
    counts = lookup.take_counts()
    assert (counts.hits, counts.expired) == (hits, 0)
    assert counts.given_up > 9_000
    assert set(lookup.take_answered()["r"]) == set(LONG)
    assert lookup.lookup(LONG[-1], "r") is False  # it does not begin to wait again
    lookup.finish("r")
    assert lookup.lookup(LONG[-1], "r") is None


def test_miss_stops_questions_for_later_keys_of_its_request(make: Make, clock: Clock) -> None:
    storage = Paced(clock, LONG, stored=700, per_second=2_000)
    lookup = make(storage, threads=1)
    assert look_up_prefix(lookup, storage, LONG, "r") == 700
    assert len(storage.asked) < 700 + 256
    assert LONG[-1] not in lookup._asked


def test_keys_behind_a_miss_are_answered_if_the_request_asks_for_them(make: Make, clock: Clock) -> None:
    """As with a sliding window, whose first blocks may be missing."""
    storage = Paced(clock, LONG, stored=500, per_second=2_000)
    lookup = make(storage, threads=1, absent_ttl_s=0.5)
    wanted = LONG[1_000:0:-1]

    while None in [lookup.lookup(key, "r") for key in wanted]:
        lookup.flush()
        if lookup._under_way:
            storage.go.release()
            wait_for(lambda: not lookup._asks.is_empty())  # type: ignore[attr-defined]
    assert [lookup.lookup(key, "r") for key in wanted] == [False] * 501 + [True] * 499


def test_requests_take_turns(make: Make, clock: Clock) -> None:
    storage = Paced(clock, LONG, stored=len(LONG), per_second=2_000)
    lookup = make(storage, threads=1)
    for key in LONG[:8_000]:
        lookup.lookup(key, "long")
    lookup.flush()
    for key in LONG[8_000:8_010]:
        lookup.lookup(key, "short")
    lookup.flush()
    assert look_up_prefix(lookup, storage, LONG[8_000:8_010], "short") == 10
    assert storage.asked.index(8_009) < 1_000


def test_key_that_several_requests_want_is_sent_once(make: Make, clock: Clock) -> None:
    storage = Storage(KEYS)
    storage.open.clear()
    lookup = make(storage, threads=1)
    for req_id in ("a", "b", "c"):
        for key in KEYS[:3]:
            assert lookup.lookup(key, req_id) is None
    assert lookup.lookup(KEYS[50], "d") is None
    lookup.flush()
    wait_for(lambda: storage.batches)
    assert lookup.take_answered() == {}
    lookup.finish("c")
    storage.open.set()
    answered: dict[str, list[OffloadKey]] = {}

    def all_heard() -> bool:
        answered.update(lookup.take_answered())
        return len(answered) == 3

    wait_for(all_heard)
    assert answered == {"a": KEYS[:3], "b": KEYS[:3], "d": KEYS[50:51]}
    assert sorted(key for batch in storage.batches for key in batch) == sorted([*KEYS[:3], KEYS[50]])


def test_keys_of_a_finished_request_are_sent_for_the_others(make: Make, clock: Clock) -> None:
    storage = Storage(KEYS)
    storage.open.clear()
    lookup = make(storage, threads=1, turn_keys=1)
    for req_id in ("first", "second"):
        for key in KEYS[:5]:
            lookup.lookup(key, req_id)
    lookup.flush()
    wait_for(lambda: storage.batches)
    lookup.finish("first")
    assert set(lookup.take_answered()["second"]) == set(KEYS[1:5])  # it asks again
    storage.open.set()
    ask(lookup, *KEYS[:5])
    assert [answer(lookup, key) for key in KEYS[:5]] == [True] * 5


def test_silence_expires_all_questions_and_tells_their_requests(make: Make, clock: Clock) -> None:
    storage = Storage(KEYS)
    storage.open.clear()
    lookup = make(storage, deadline_s=0.2, threads=2, turn_keys=1, absent_ttl_s=5)
    for req_id, key in zip("abcdef", KEYS, strict=False):
        lookup.lookup(key, req_id)
    lookup.flush()
    wait_for(lambda: len(storage.batches) == 2)
    clock.now += 0.19
    lookup.flush()
    assert lookup.take_answered() == {}
    clock.now += 0.02
    lookup.flush()
    assert lookup.take_answered() == {req_id: [key] for req_id, key in zip("abcdef", KEYS, strict=False)}
    assert [lookup.lookup(key, req_id) for req_id, key in zip("abcdef", KEYS, strict=False)] == [False] * 6
    storage.open.set()


def test_late_answer_does_not_answer_a_later_question(make: Make, clock: Clock) -> None:
    """In the meantime the block may have been removed or found unreadable."""
    storage = Storage(KEYS)
    storage.open.clear()
    lookup = make(storage, deadline_s=0.2, threads=1, absent_ttl_s=0)
    ask(lookup, KEYS[0])
    wait_for(lambda: storage.batches)
    clock.now += 0.3
    lookup.flush()
    clock.now += 0.01
    storage.present.clear()
    assert lookup.lookup(KEYS[0]) is None
    lookup.flush()
    storage.open.set()
    assert answer(lookup, KEYS[0]) is False
