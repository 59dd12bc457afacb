"""Request: what a request waits for. ``test_tiering_machine`` checks its fields in use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtiers.connector.manager import request as request_module
from kvtiers.connector.manager.options import TieringOptions
from kvtiers.connector.manager.primary import BlockState, CPUPrimaryTier
from kvtiers.connector.manager.request import Request
from kvtiers.tiers.base import ReqContext
from tests.identity import block_key

KEYS = [block_key(number) for number in range(4)]


@pytest.fixture
def request_() -> Request:
    return Request(ReqContext("r"), CPUPrimaryTier(1), TieringOptions(), {}, came_after=0, excluded_tiers=0)


def test_request_advances_from_an_owed_answer_to_a_held_block(request_: Request) -> None:
    request_.owe(KEYS[0])
    request_.take_answers({KEYS[0]})
    request_.begin_round()
    request_.hit(KEYS[0], 0)
    request_.hit(KEYS[1], 0)
    assert not request_.owed
    assert request_.take_slots([0], now=0.0) == {}
    assert request_.capped_until == request_.options.load_deadline_s
    request_.end_step(0.0)
    (block,) = request_.take_slots([2], now=0.0)[0]
    assert request_.starved_since == 0.0
    request_.await_block(block)
    assert request_.miss_hits(tiers=1) == 1
    assert not request_.hits
    request_.load_ended(1, request_.primary.end_promotion([block], success=True), now=0.0)
    assert (request_.coming, request_.held) == (set(), {KEYS[0]: block})
    assert (block.state, block.pins) == (BlockState.READY, 1)
    request_.stop()
    assert (request_.held, block.pins) == ({}, 0)


def test_request_holds_nothing_after_a_load_that_it_did_not_await_has_failed(request_: Request) -> None:
    request_.hit(KEYS[0], 0)
    (block,) = request_.take_slots([1], now=0.0)[0]
    request_.look_again()
    request_.end_step(0.0)
    assert request_ in request_.waiting
    request_.primary.end_promotion([block], success=False)
    request_.load_ended(1, (), now=0.0)
    request_.end_step(0.0)
    assert request_ not in request_.waiting


def test_only_the_methods_of_a_request_write_its_fields() -> None:
    """As far as the text shows: a write through a variable of another name is not seen."""
    written = re.compile(
        r"\brequest\.\w+(\[[^]]*\])? [-+|&]?= "
        r"|\brequest\.\w+\.(add|append|clear|discard|move_to_end|pop|popitem|remove|setdefault|update)\("
        r"|\bdel \w*\.?request\."
    )
    assert written.search("job.request.loading -= 1")
    assert written.search("request.hits[key] = hit")
    assert written.search("request.owed.add(key)")
    modules = set(Path(request_module.__file__).parent.glob("*.py")) - {Path(request_module.__file__)}
    assert len(modules) > 5
    for module in modules:
        assert not written.search(module.read_text()), module.name
