"""RankBlocks: a block counts as stored when all ranks have it, and as absent while one rank lacks it."""

from __future__ import annotations

import pytest

from kvtiers.connector.ranks import blocks
from kvtiers.connector.ranks.blocks import BELIEVED_S, USED_S, RankBlocks
from tests.clock import Clock
from tests.identity import block_key

NEWS_S = 11.0
A, B, C = map(block_key, range(3))


def test_block_is_stored_when_all_ranks_have_reported_it() -> None:
    known = RankBlocks(2, NEWS_S)
    assert known.to_store([A, B]) == [A, B]
    known.note({A: 0b01, B: 0b11}, ())
    assert known.is_absent(A)
    assert not known.is_absent(B)
    assert known.to_store([A, B, C]) == [C]
    known.note({A: 0b10}, ())
    assert not known.is_absent(A)
    assert known.to_store([A, B]) == []


def test_known_presence_of_block_is_trusted_for_a_minute() -> None:
    clock = Clock()
    known = RankBlocks(1, NEWS_S, clock)
    assert not known.is_present(A)
    known.answered(A, present=True)
    known.to_store([B])
    known.note({B: 1}, ())
    assert known.is_present(A)
    assert known.is_present(B)
    clock.now += BELIEVED_S
    assert not known.is_present(A)  # the scheduler's own tier is asked again
    assert known.to_store([A, B]) == []


def test_block_that_one_rank_could_not_store_is_absent_and_offered_again() -> None:
    clock = Clock()
    known = RankBlocks(2, NEWS_S, clock)
    known.to_store([A])
    known.note({A: 0b01}, [A])
    known.note({A: 0b01}, ())
    assert known.is_absent(A)
    assert known.to_store([A]) == [A]
    known.note({A: 0b11}, ())
    assert not known.is_absent(A)


def test_late_report_of_an_earlier_store_does_not_count_for_another_rank() -> None:
    known = RankBlocks(2, NEWS_S)
    known.to_store([A])
    known.note({}, [A])  # the second rank dropped it
    known.to_store([A])
    known.note({A: 0b01}, ())  # the first rank's first store
    known.note({A: 0b01}, ())  # and its second one
    assert known.is_absent(A)
    known.note({A: 0b10}, ())
    assert known.is_present(A)


def test_block_not_loaded_by_one_rank_is_absent_until_stored_or_for_a_minute() -> None:
    clock = Clock()
    known = RankBlocks(2, NEWS_S, clock)
    known.answered(A, present=True)
    known.answered(B, present=True)
    known.note({}, [A, B])
    assert known.is_absent(A)
    assert known.to_store([A, B]) == [A, B]
    known.note({A: 0b11}, [B])
    assert not known.is_absent(A)
    clock.now += BELIEVED_S - 1
    assert known.is_absent(B)
    clock.now += 2
    assert not known.is_absent(B)


def test_block_found_in_storage_is_not_offered_for_storing() -> None:
    known = RankBlocks(1, NEWS_S)
    known.answered(A, present=True)
    assert known.to_store([A, B]) == [B]
    known.answered(A, present=False)
    assert known.to_store([A]) == [A]


def test_use_of_stored_block_is_reported_once_a_minute() -> None:
    clock = Clock()
    known = RankBlocks(1, NEWS_S, clock)
    known.answered(A, present=True)
    told = []
    for wait_s in (0, USED_S - 1, 1):
        clock.now += wait_s
        known.note_uses([A, B])
        told.append(known.take_uses())
    assert told == [[A], [], [A]]


def test_wait_for_store_reports_ends_when_no_report_arrives_in_time() -> None:
    clock = Clock()
    known = RankBlocks(1, NEWS_S, clock)
    assert not known.awaits_news
    known.to_store([A, B])
    awaited = []
    for wait_s in (NEWS_S - 1, NEWS_S - 1, 2):
        clock.now += wait_s
        awaited.append(known.awaits_news)
        if len(awaited) == 1:
            known.note({A: 1}, ())
    assert awaited == [True, True, False]


def test_known_blocks_are_bounded_by_forgetting_least_recently_offered_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "KEYS_MAX", 2)
    known = RankBlocks(1, NEWS_S)
    known.answered(A, present=True)
    known.answered(B, present=True)
    assert known.to_store([A]) == []
    known.answered(C, present=True)
    assert known.to_store([A, C]) == []
    assert known.to_store([B]) == [B]


def test_unreported_blocks_are_bounded_when_a_rank_never_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "KEYS_MAX", 2)
    known = RankBlocks(2, NEWS_S)
    assert known.to_store([A, B, C]) == [A, B, C]
    assert known.to_store([A, B, C]) == [A]
    known.note({B: 0b11}, ())  # a report of a block that was forgotten counts for nothing
    assert not known.is_present(B)
    known.note({A: 0b11}, ())
    assert known.is_present(A)
