"""Concurrency: more threads where blocks wait and more bring more, fewer where they wait for each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtiers.tiers.server.concurrency import SETTLED_BATCHES, Concurrency

BLOCKS = 128
Storage = Callable[[int], float]  # threads -> blocks a second


def far(threads: int) -> float:
    """Each answer comes after 30 ms, however many are asked for."""
    return threads / 0.03


def link(blocks_per_s: float) -> Storage:
    """As far, and they share a link."""
    return lambda threads: min(far(threads), blocks_per_s)


def run(concurrency: Concurrency, storage: Storage, batches: int, busy: float = 0.1, blocks: int = BLOCKS) -> list[int]:
    """The threads that the batches got."""
    got = []
    for _ in range(batches):
        threads = concurrency.threads
        seconds = blocks / storage(min(threads, blocks))
        concurrency.learn(threads, blocks, seconds, busy * seconds)
        got.append(threads)
    return got


def test_far_storage_gets_all_the_threads_there_may_be() -> None:
    assert run(Concurrency(8, 50), far, 5) == [8, 16, 32, 50, 50]


def test_a_busy_worker_gets_no_more() -> None:
    assert run(Concurrency(8, 64), far, 3, busy=0.9) == [8, 8, 8]


def test_a_step_that_brought_nothing_is_taken_back_and_tried_again_later() -> None:
    concurrency = Concurrency(8, 64)
    full = link(600.0)
    assert run(concurrency, full, 5) == [8, 16, 32, 16, 16]
    assert set(run(concurrency, full, SETTLED_BATCHES - 2)) == {16}
    assert run(concurrency, far, 4) == [16, 32, 64, 64]


@pytest.mark.parametrize(("blocks_per_s", "settles_at"), [(10.0, 8), (6.0, 4), (1.5, 1), (0.2, 1)])
def test_a_slow_link_is_shared_by_few(blocks_per_s: float, settles_at: int) -> None:
    """Or none of them ends within its timeout."""
    assert run(Concurrency(8, 64), link(blocks_per_s), 8)[-1] == settles_at


def test_after_a_slow_time_threads_come_back() -> None:
    concurrency = Concurrency(8, 64)
    assert run(concurrency, link(1.0), 4)[-1] == 1
    assert run(concurrency, far, 8)[-1] == 64


def test_a_batch_with_fewer_blocks_than_threads_says_nothing_of_more() -> None:
    concurrency = Concurrency(8, 64)
    assert run(concurrency, far, 3, blocks=4) == [8, 8, 8]
    assert run(concurrency, link(1.0), 2, blocks=4) == [8, 4]  # but of fewer


def test_a_lone_block_that_is_slow_says_nothing() -> None:
    """Decoding stores blocks one by one, and a put that is tried again takes seconds."""
    concurrency = Concurrency(8, 64)
    run(concurrency, far, 6)
    concurrency.learn(64, 1, 3.0, 0.0)
    assert concurrency.threads == 64
    concurrency.learn(64, 2, 3.0, 0.0)  # they may have shared a link; one step down
    assert concurrency.threads == 32
    run(concurrency, far, 1)
    assert concurrency.threads == 64


def test_what_a_batch_with_other_threads_took_is_not_believed() -> None:
    concurrency = Concurrency(8, 64)
    concurrency.learn(8, BLOCKS, 0.5, 0.0)
    concurrency.learn(8, BLOCKS, 0.5, 0.0)  # it began before the first ended
    assert concurrency.threads == 16
    concurrency.learn(16, 0, 0.0, 0.0)
    assert concurrency.threads == 16


def test_a_server_that_refuses_is_not_asked_for_more() -> None:
    concurrency = Concurrency(8, 64)
    concurrency.learn(8, BLOCKS, 0.5, 0.0, failed=True)
    assert concurrency.threads == 8
    concurrency.learn(8, BLOCKS, 100.0, 0.0, failed=True)
    assert concurrency.threads == 4


def test_the_first_number_is_never_too_many() -> None:
    assert run(Concurrency(32, 8), far, 2) == [32, 32]
