"""Lookups: which questions are answered by a LIST, which by HEADs, and what is remembered of a folder."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tiers.errors import StoreError, StoreTimeoutError, StoreUnavailableError
from tiers.stores.s3_lookup import (
    ASKER_S,
    ASKERS_MAX,
    BELIEVED_S,
    FOLDERS_MAX,
    KEYS_PER_ASKER,
    LIST_KEYS_MIN,
    Answers,
    Lookups,
)

PAGE_NAMES = 1000
WAIT_S_MAX = 120.0


class Bucket:
    """Objects, what was asked, and the clock that each request moves on."""

    def __init__(self, names: Sequence[str]) -> None:
        self.sizes = dict.fromkeys(sorted(names), 7)
        self.lists: list[str] = []
        self.heads: list[str] = []
        self.list_s = self.head_s = 0.0
        self.list_error: StoreError | None = None
        self.now = 100.0
        self.lookups = Lookups(askers_max=ASKERS_MAX, silence_s_max=60, clock=lambda: self.now, list_s_min=WAIT_S_MAX)

    def list_sizes(self, folder: str, after: str) -> tuple[list[tuple[str, int]], bool]:
        self.lists.append(folder)
        self.now += self.list_s
        if self.list_error is not None:
            raise self.list_error
        found = [(name, size) for name, size in self.sizes.items() if name.startswith(f"{folder}/") and name > after]
        return found[:PAGE_NAMES], len(found) > PAGE_NAMES

    def size(self, key: str) -> int | None:
        self.heads.append(key)
        self.now += self.head_s
        return self.sizes.get(key)

    def learn(self) -> None:
        """How long HEADs take. No LIST before that is known."""
        self.ask([f"others/{i}" for i in range(LIST_KEYS_MIN)])
        assert (self.lists, len(self.heads)) == ([], LIST_KEYS_MIN)

    def ask(self, names: Sequence[str]) -> Answers:
        """As a store does. Names are the keys."""
        self.lists, self.heads = [], []
        answers: Answers = {}
        self.lookups.answer_by_listing({name: name for name in names}, answers, self.list_sizes)
        self.lookups.answer_by_asking([name for name in names if name not in answers], answers, self.size)
        assert answers == {name: self.sizes.get(name) for name in names}
        return answers


def names_of(count: int, start: int = 0) -> list[str]:
    return [f"m/{i:07d}" for i in range(start, start + count)]


def every(count: int, total: int) -> list[str]:
    """So many names, scattered over so many."""
    return [f"m/{i * total // count:07d}" for i in range(count)]


def test_the_first_batch_shows_what_heads_take_and_the_second_what_a_list_takes() -> None:
    bucket = Bucket(names_of(60))
    bucket.ask(every(30, 60))
    assert (bucket.lists, len(bucket.heads)) == ([], 30)
    bucket.ask(every(30, 60))
    assert (len(bucket.lists), bucket.heads) == (1, [])


def test_a_list_is_not_waited_for_longer_than_heads_would_take() -> None:
    """Whoever asks has a deadline. A first LIST of a large folder took 0.7 s where 0.5 s were all that it had."""
    bucket = Bucket(names_of(60))
    bucket.learn()
    bucket.lookups._list_s_min = 0.01
    ends = threading.Event()
    list_sizes = bucket.list_sizes

    def hang(folder: str, after: str) -> tuple[list[tuple[str, int]], bool]:
        ends.wait(WAIT_S_MAX)
        return list_sizes(folder, after)

    bucket.list_sizes = hang  # type: ignore[method-assign]
    try:
        bucket.ask(every(30, 60))
        assert len(bucket.heads) == 30
        bucket.list_sizes = list_sizes  # type: ignore[method-assign]
        bucket.ask(every(30, 60))
        assert (bucket.lists, len(bucket.heads)) == ([], 30), "it did not pay"
    finally:
        ends.set()


@pytest.mark.parametrize("is_list_better", [True, False])
def test_then_the_faster_way_is_taken(is_list_better: bool) -> None:
    bucket = Bucket(names_of(60))
    bucket.head_s = 0.001
    bucket.list_s = 0.029 if is_list_better else 0.031
    for _ in range(2):
        bucket.ask(every(30, 60))
    for _ in range(2):
        bucket.ask(every(30, 60))
        assert (len(bucket.lists), len(bucket.heads)) == ((1, 0) if is_list_better else (0, 30))
    bucket.ask(every(20, 60))
    assert (len(bucket.lists), len(bucket.heads)) == (0, 20), "a page costs the same for fewer"
    bucket.ask(every(40, 60))
    assert (len(bucket.lists), len(bucket.heads)) == (1, 0)


def test_few_keys_are_not_worth_a_list() -> None:
    bucket = Bucket(names_of(20))
    bucket.ask(names_of(LIST_KEYS_MIN - 1))
    assert (bucket.lists, len(bucket.heads)) == ([], LIST_KEYS_MIN - 1)


def test_a_full_folder_is_left_alone() -> None:
    """A page of it answers a few questions only."""
    bucket = Bucket(names_of(20_000))
    bucket.head_s, bucket.list_s = 0.001, 0.05
    bucket.learn()
    asked = every(200, 20_000)
    bucket.ask(asked)
    assert len(bucket.lists) == 1
    assert 0 < len(bucket.heads) < 200, "the page that was read anyway is made use of"
    bucket.ask(asked)
    assert (bucket.lists, len(bucket.heads)) == ([], 200)
    bucket.now += BELIEVED_S  # it may have been emptied
    bucket.ask(asked)
    assert len(bucket.lists) == 1


def test_pages_go_on_while_they_answer_enough() -> None:
    bucket = Bucket(names_of(2500))
    bucket.head_s = 0.001
    bucket.learn()
    bucket.ask(every(1300, 2600))
    assert (len(bucket.lists), bucket.heads) == (3, [])


def test_pages_end_when_they_take_longer_than_heads() -> None:
    bucket = Bucket(names_of(2500))
    bucket.head_s = 0.001
    bucket.list_error = StoreUnavailableError("not yet")
    bucket.ask(every(1300, 2600))
    bucket.list_error = None
    bucket.now += BELIEVED_S
    bucket.list_s = 0.6
    bucket.ask(every(1300, 2600))
    assert (len(bucket.lists), len(bucket.heads)) == (1, 1300 - 500)


@pytest.mark.parametrize("fault", ["error", "disorder"])
def test_a_folder_that_cannot_be_listed_is_left_alone(fault: str) -> None:
    bucket = Bucket(names_of(30))
    if fault == "error":
        bucket.list_error = StoreUnavailableError("no right to list")
    else:
        bucket.sizes = dict(reversed(bucket.sizes.items()))
    bucket.learn()
    bucket.ask(names_of(30))
    assert (len(bucket.lists), len(bucket.heads)) == (1, 30)
    for _ in range(2):
        bucket.ask(names_of(30))
        assert (bucket.lists, len(bucket.heads)) == ([], 30)


def by_folder(name: str) -> list[str]:
    return name.split("/")


@pytest.mark.parametrize("neighbour", ["ab-x/0", "ab.bin"])
def test_servers_that_list_folder_by_folder(neighbour: str) -> None:
    """SeaweedFS: "m/ab/…" before "m/ab-x/…", so what starts after the second has not seen the first."""
    inside = [f"m/ab/{i:02}" for i in range(30)]
    beside = f"m/{neighbour}"
    bucket = Bucket([*inside, beside])
    bucket.sizes = dict(sorted(bucket.sizes.items(), key=lambda item: by_folder(item[0])))

    def list_sizes(folder: str, after: str) -> tuple[list[tuple[str, int]], bool]:
        found = [(name, size) for name, size in bucket.sizes.items() if by_folder(name) > by_folder(after)]
        return found[:20], len(found) > 20

    bucket.list_sizes = list_sizes  # type: ignore[method-assign]
    bucket.learn()
    bucket.ask([*inside, beside])
    bucket.ask([*inside[15:], beside])


def test_page_that_ends_in_a_folder_says_nothing_of_its_neighbours() -> None:
    inside = [f"m/ab/{i:04}" for i in range(1010)]
    beside = [f"m/ab-{i:02}" for i in range(20)]
    bucket = Bucket([*inside, *beside])

    def list_sizes(folder: str, after: str) -> tuple[list[tuple[str, int]], bool]:
        bucket.lists.append(folder)
        found = sorted(
            ((name, size) for name, size in bucket.sizes.items() if by_folder(name) > by_folder(after)),
            key=lambda item: by_folder(item[0]),
        )
        return found[:PAGE_NAMES], len(found) > PAGE_NAMES

    bucket.learn()
    bucket.list_sizes = list_sizes  # type: ignore[method-assign]
    bucket.ask(["m/aa", *beside])
    assert bucket.lists


def test_nothing_to_ask_teaches_nothing() -> None:
    bucket = Bucket(names_of(30))
    bucket.head_s = 0.5
    bucket.learn()
    bucket.ask(names_of(30))
    assert bucket.heads == []
    assert bucket.lookups._head_s == 0.5


def test_folders_remembered_are_limited() -> None:
    bucket = Bucket([])
    for folder in range(FOLDERS_MAX + 10):
        bucket.ask([f"{folder}/{i}" for i in range(LIST_KEYS_MIN)])
    assert len(bucket.lookups._listings) <= FOLDERS_MAX


def test_a_far_server_is_asked_by_more_threads() -> None:
    """Passes only if so many ask at once. The first two of a process are alone, and say how far the server is.

    A question by itself says nothing: it may have waited for its connection.
    """
    spent = threading.local()  # a clock for each thread: what one waits is not another's
    lookups = Lookups(askers_max=ASKERS_MAX, silence_s_max=60, clock=lambda: getattr(spent, "s", 0.0))
    keys = names_of(24)
    few = 24 // KEYS_PER_ASKER
    spent.s = 0.0
    assert ask_together(lookups, keys[:1], 1, spent, 10 * ASKER_S) == 1
    assert ask_together(lookups, keys[:2], 1, spent, ASKER_S / 100) == 1
    for askers, head_s in ((few, 2 * ASKER_S), (24, ASKER_S / 2), (12, ASKER_S / 100), (few, 0)):
        assert ask_together(lookups, keys, askers, spent, head_s) == askers


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
    lookups.answer_by_asking(keys, answers, size)
    assert answers == dict.fromkeys(keys)
    return len(seen)


def test_silence_ends_the_asking() -> None:
    bucket = Bucket([])

    def hang(key: str) -> int | None:
        bucket.now += 61
        raise StoreTimeoutError("no answer", key=key)

    answers: Answers = {}
    bucket.lookups.answer_by_asking(names_of(3), answers, hang)
    errors = list(map(str, answers.values()))
    assert "no answer" in errors[0]
    assert all("not asked" in error for error in errors[1:])
