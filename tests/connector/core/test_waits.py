"""Wait: what a request waits for. ``test_manager_machine`` checks its fields in use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtiers.connector.core import waits
from kvtiers.connector.core.options import ManagerOptions
from kvtiers.connector.core.slots import BlockState, Slots
from kvtiers.connector.core.waits import Wait
from kvtiers.tiers.base import ReqContext
from tests.identity import block_key

KEYS = [block_key(number) for number in range(4)]


@pytest.fixture
def wait() -> Wait:
    return Wait(ReqContext("r"), Slots(1), ManagerOptions(), {}, came_after=0, excluded_tiers=0)


def test_wait_advances_from_an_owed_answer_to_a_held_block(wait: Wait) -> None:
    wait.owe(KEYS[0])
    wait.take_answers({KEYS[0]})
    wait.begin_round()
    wait.hit(KEYS[0], 0)
    wait.hit(KEYS[1], 0)
    assert not wait.owed
    assert wait.take_slots([0], now=0.0) == {}
    assert wait.capped_since == 0.0
    wait.end_step(0.0)
    (block,) = wait.take_slots([2], now=0.0)[0]
    assert wait.starved_since == 0.0
    wait.await_block(block)
    assert wait.miss_hits(tiers=1) == 1
    assert not wait.hits
    wait.load_ended(1, wait.slots.end_promotion([block], success=True), now=0.0)
    assert (wait.coming, wait.held) == (set(), {KEYS[0]: block})
    assert (block.state, block.pins) == (BlockState.READY, 1)
    wait.stop()
    assert (wait.held, block.pins) == ({}, 0)


def test_wait_holds_no_block_after_failure_of_a_load_not_awaited(wait: Wait) -> None:
    wait.hit(KEYS[0], 0)
    (block,) = wait.take_slots([1], now=0.0)[0]
    wait.await_block(block)
    wait.filling_ended(block.key)
    wait.end_step(0.0)
    assert wait in wait.served
    wait.slots.end_promotion([block], success=False)
    wait.load_ended(1, (), now=0.0)
    wait.end_step(0.0)
    assert wait not in wait.served


def test_only_methods_of_wait_write_its_fields() -> None:
    """As far as the text shows: a write through a variable of another name is not seen."""
    written = re.compile(
        r"\bwait\.\w+(\[[^]]*\])? [-+|&]?= "
        r"|\bwait\.\w+\.(add|append|clear|discard|move_to_end|pop|popitem|remove|setdefault|update)\("
        r"|\bdel \w*\.?wait\."
    )
    assert written.search("job.wait.loading -= 1")
    assert written.search("wait.hits[key] = hit")
    assert written.search("wait.owed.add(key)")
    modules = set(Path(waits.__file__).parent.glob("*.py")) - {Path(waits.__file__)}
    assert len(modules) > 5
    for module in modules:
        assert not written.search(module.read_text()), module.name
