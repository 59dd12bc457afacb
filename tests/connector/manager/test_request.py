"""Request: the states of a waiting request, and who may change them. ``test_tiering_machine`` checks them in use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtiers.connector.manager import request as request_module
from kvtiers.connector.manager.options import TieringOptions
from kvtiers.connector.manager.primary import BlockState, CPUPrimaryTier
from kvtiers.connector.manager.request import Request, State
from kvtiers.tiers.base import ReqContext
from tests.identity import block_key

KEYS = [block_key(number) for number in range(4)]


@pytest.fixture
def request_() -> Request:
    return Request(ReqContext("r"), CPUPrimaryTier(1), TieringOptions(), {}, came_at=0.0, barred=0)


def test_a_request_goes_from_a_lookup_to_a_held_block(request_: Request) -> None:
    states = [request_.state]
    request_.owe(KEYS[0])
    states.append(request_.state)
    request_.take_answers({KEYS[0]})
    request_.begin_round()
    request_.hit(KEYS[0], 0)
    request_.hit(KEYS[1], 0)
    assert request_.take_slots([0], now=0.0) == {}
    request_.end_step(0.0)
    states.append(request_.state)
    (block,) = request_.take_slots([2], now=0.0)[0]
    request_.await_block(block)
    request_.end_step(0.0)
    states.append(request_.state)
    assert request_.miss_hits(tiers=1) == 1
    request_.end_step(0.0)
    states.append(request_.state)
    request_.load_ended(1, request_.primary.end_promotion([block], success=True), now=0.0)
    states.append(request_.state)
    assert (block.state, block.pins) == (BlockState.READY, 1)
    request_.end()
    states.append(request_.state)
    assert block.pins == 0
    assert states == [
        *(State.IDLE, State.ASKING, State.WAITING_FOR_SHARE, State.WAITING_FOR_ROOM),
        *(State.LOADING, State.HELD, State.ENDED),
    ]


def test_a_request_holds_nothing_once_a_load_that_it_did_not_wait_for_has_failed(request_: Request) -> None:
    request_.hit(KEYS[0], 0)
    (block,) = request_.take_slots([1], now=0.0)[0]
    request_.look_again()
    request_.end_step(0.0)
    states = [request_.state]
    request_.primary.end_promotion([block], success=False)
    request_.load_ended(1, (), now=0.0)
    states.append(request_.state)
    assert states == [State.HELD, State.IDLE]


def test_an_illegal_transition_is_an_assertion(request_: Request) -> None:
    request_.end()
    with pytest.raises(AssertionError, match="ENDED -> ASKING"):
        request_.owe(KEYS[0])


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
