"""CPUPrimaryTier: slots, states and what bad calls must not do."""

from __future__ import annotations

import logging

import pytest

from kvtiers.connector.base import CPULoadStoreSpec
from kvtiers.connector.manager.eviction import ARCPolicy
from kvtiers.connector.manager.primary import Block, BlockState, CPUPrimaryTier, SlotCounts
from kvtiers.tiers.base import OffloadingEvent, ReqContext
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.tier.events import EVENT_KEYS_MAX
from tests.identity import block_key

REQ = ReqContext("r")
KEYS = [block_key(number) for number in range(64)]


def store(primary: CPUPrimaryTier, *keys: OffloadKey) -> list[int]:
    """Store keys to the end; their slots."""
    output = primary.prepare_store(keys, REQ)
    assert output is not None
    assert output.keys_to_store == keys
    primary.complete_store(keys)
    return slots(output.store_spec)


def slots(spec: object) -> list[int]:
    assert isinstance(spec, CPULoadStoreSpec)
    return list(map(int, spec.block_ids))


def find(primary: CPUPrimaryTier, key: OffloadKey) -> Block:
    block = primary.find(key)
    assert block is not None
    return block


def test_a_block_is_loadable_once_its_store_completed() -> None:
    primary = CPUPrimaryTier(4)
    assert primary.lookup(KEYS[0], REQ) is False
    output = primary.prepare_store(KEYS[:2], REQ)
    assert output is not None
    assert primary.lookup(KEYS[0], REQ) is None
    with pytest.raises(KeyError):
        primary.prepare_load(KEYS[:1], REQ)
    primary.complete_store(KEYS[:2])
    assert primary.lookup(KEYS[0], REQ) is True
    assert slots(primary.prepare_load([KEYS[1], KEYS[0]], REQ)) == slots(output.store_spec)[::-1]


def test_slots_move_from_state_to_state() -> None:
    primary = CPUPrimaryTier(4)
    assert primary.slot_counts() == SlotCounts(free=4, ready=0, pinned=0, pending=0, quarantined=0)
    primary.prepare_store(KEYS[:3], REQ)
    assert primary.slot_counts() == SlotCounts(free=1, ready=0, pinned=0, pending=3, quarantined=0)
    primary.complete_store(KEYS[:2])
    primary.complete_store(KEYS[2:3], success=False)
    assert primary.slot_counts() == SlotCounts(free=2, ready=2, pinned=0, pending=0, quarantined=0)
    primary.prepare_load([KEYS[0]], REQ)
    primary.prepare_load([KEYS[0]], REQ)
    assert primary.slot_counts() == SlotCounts(free=2, ready=1, pinned=1, pending=0, quarantined=0)
    primary.complete_load([KEYS[0]])
    assert primary.slot_counts().pinned == 1
    primary.complete_load([KEYS[0]])
    assert primary.slot_counts() == SlotCounts(free=2, ready=2, pinned=0, pending=0, quarantined=0)


def test_a_failed_store_leaves_nothing() -> None:
    primary = CPUPrimaryTier(2)
    primary.prepare_store(KEYS[:2], REQ)
    primary.complete_store(KEYS[:2], success=False)
    assert primary.lookup(KEYS[0], REQ) is False
    assert primary.slot_counts().free == 2
    assert list(primary.take_events()) == []


def test_the_last_blocks_of_the_oldest_store_leave_first() -> None:
    """A prefix is useless without its first blocks, so they are the last to go."""
    primary = CPUPrimaryTier(4)
    store(primary, *KEYS[:4])
    output = primary.prepare_store(KEYS[4:6], REQ)
    assert output is not None
    assert output.evicted_keys == (KEYS[3], KEYS[2])
    primary.complete_store(KEYS[4:6])
    primary.touch([KEYS[0]])
    output = primary.prepare_store([KEYS[6]], REQ)
    assert output is not None
    assert output.evicted_keys == (KEYS[1],)


def test_a_prefix_keeps_its_order_where_its_end_is_told_in_another() -> None:
    """As by vLLM, which names the blocks of what ended in a set."""
    primary = CPUPrimaryTier(8)
    primary.prepare_store(KEYS[:8], REQ)
    shuffled = [KEYS[i] for i in (5, 2, 7, 0, 4, 6, 1, 3)]
    assert [block.key for block in primary.end_store(shuffled, True)] == KEYS[:8]
    primary.prepare_load(KEYS[4:8], REQ)
    primary.complete_load(shuffled[:1])  # of several loads, in any order
    primary.complete_load([key for key in shuffled[1:] if key in KEYS[4:8]])
    assert primary.slot_counts().ready == 8
    output = primary.prepare_store(KEYS[8:15], REQ)
    assert output is not None
    assert output.evicted_keys == tuple(KEYS[i] for i in (3, 2, 1, 0, 5, 7, 6))


@pytest.mark.parametrize("uses", [1, 2])
def test_the_use_that_a_block_was_promoted_for_is_no_second_use_to_arc(uses: int) -> None:
    """A burst of prompts found in storage would else drive out what is used all the time, as with LRU."""
    primary = CPUPrimaryTier(8, ARCPolicy(8))
    hot, passing = KEYS[:4], KEYS[10:14]
    store(primary, *hot)
    primary.touch(hot)
    primary.end_promotion(primary.reserve(passing), success=True)
    for _ in range(uses):
        primary.prepare_load(passing, REQ)
        primary.touch(passing)
        primary.complete_load(passing)
    output = primary.prepare_store(KEYS[20:24], REQ)
    assert output is not None
    assert set(output.evicted_keys) == set(passing if uses == 1 else hot)


def test_a_promoted_block_that_its_request_did_not_load_is_used_by_any_touch() -> None:
    primary = CPUPrimaryTier(2)
    primary.end_promotion(primary.reserve(KEYS[:2]), success=True)
    primary.touch(KEYS[1:2])
    output = primary.prepare_store(KEYS[5:6], REQ)
    assert output is not None
    assert output.evicted_keys == (KEYS[0],)


def test_blocks_loaded_twice_may_end_in_one_call() -> None:
    primary = CPUPrimaryTier(4)
    store(primary, *KEYS[:2])
    primary.prepare_load(KEYS[:2], REQ)
    primary.prepare_load(KEYS[:2], REQ)
    primary.complete_load([KEYS[1], KEYS[0], KEYS[1], KEYS[0]])
    assert primary.slot_counts() == SlotCounts(free=2, ready=2, pinned=0, pending=0, quarantined=0)


def test_blocks_in_use_and_blocks_of_the_call_are_not_evicted() -> None:
    primary = CPUPrimaryTier(3)
    store(primary, *KEYS[:3])
    primary.prepare_load([KEYS[0]], REQ)
    before = primary.slot_counts()
    assert primary.prepare_store([KEYS[1], *KEYS[3:5]], REQ) is None
    assert primary.slot_counts() == before
    output = primary.prepare_store([KEYS[1], KEYS[3]], REQ)
    assert output is not None
    assert (output.keys_to_store, output.evicted_keys) == ((KEYS[3],), (KEYS[2],))


def test_keys_given_twice_are_stored_once() -> None:
    primary = CPUPrimaryTier(4)
    output = primary.prepare_store([KEYS[0], KEYS[1], KEYS[0]], REQ)
    assert output is not None
    assert output.keys_to_store == (KEYS[0], KEYS[1])
    again = primary.prepare_store([KEYS[0]], REQ)  # by another request, still pending
    assert again is not None
    assert again.keys_to_store == ()
    primary.complete_store([KEYS[0], KEYS[0], KEYS[1]])
    assert primary.slot_counts() == SlotCounts(free=2, ready=2, pinned=0, pending=0, quarantined=0)
    assert len(slots(primary.prepare_load([KEYS[0], KEYS[0]], REQ))) == 2
    primary.complete_load([KEYS[0]])
    assert primary.slot_counts().pinned == 1
    primary.complete_load([KEYS[0]])
    assert primary.slot_counts().pinned == 0


def test_a_load_of_one_absent_key_takes_none() -> None:
    primary = CPUPrimaryTier(4)
    store(primary, KEYS[0])
    with pytest.raises(KeyError):
        primary.prepare_load([KEYS[0], KEYS[1]], REQ)
    assert primary.slot_counts().pinned == 0


def test_bad_completions_are_counted_logged_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    primary = CPUPrimaryTier(8)
    store(primary, *KEYS[:2])
    primary.pin(find(primary, KEYS[1]))  # a tier's job: not the engine's to end
    primary.reserve([KEYS[2]])
    before = primary.slot_counts()
    shown = {s.labels["where"] for s in primary.metrics.snapshot() if not s.value}
    assert shown == {"complete_load", "complete_store"}
    primary.complete_load([KEYS[0], KEYS[1], KEYS[2], KEYS[9]])
    primary.complete_store([KEYS[0], KEYS[2], KEYS[9]])
    primary.complete_store([KEYS[2]], success=False)
    assert primary.slot_counts() == before
    assert primary.lookup(KEYS[2], REQ) is None  # a promotion is not the engine's to declare done
    counted = primary.metrics.value
    assert counted("kvtiers_contained_errors_total", "engine", "complete_load") == 4
    assert counted("kvtiers_contained_errors_total", "engine", "complete_store") == 4
    assert len([r for r in caplog.records if "not prepared" in r.message]) == 2


def test_a_request_larger_than_the_region_stores_its_first_blocks_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    primary = CPUPrimaryTier(4)
    store(primary, KEYS[1], KEYS[9])
    for _ in range(2):
        output = primary.prepare_store(KEYS[:10], REQ)
        assert output is not None
        assert output.keys_to_store in ((KEYS[0], KEYS[2], KEYS[3]), ())
    primary.complete_store([KEYS[0], KEYS[2], KEYS[3]])
    assert [primary.lookup(key, REQ) for key in KEYS[:6]] == [True] * 4 + [False] * 2
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(messages) == 1
    assert "region holds 4 blocks, request 'r' needs 10: nothing of it can be stored beyond" in messages[0]


def test_a_reservation_takes_as_many_of_the_first_as_fit() -> None:
    primary = CPUPrimaryTier(4)
    store(primary, *KEYS[:3])
    primary.prepare_load([KEYS[0]], REQ)
    blocks = primary.reserve(KEYS[10:20])
    assert [block.key for block in blocks] == KEYS[10:13]
    assert primary.slot_counts() == SlotCounts(free=0, ready=0, pinned=1, pending=3, quarantined=0)
    assert primary.end_promotion(blocks[:2], success=True) == blocks[:2]
    assert primary.end_promotion(blocks[2:], success=False) == []
    assert primary.slot_counts() == SlotCounts(free=1, ready=2, pinned=1, pending=0, quarantined=0)
    assert primary.lookup(KEYS[10], REQ) is True
    assert blocks[2].state is BlockState.GONE


def test_pins_and_loads_both_keep_a_block() -> None:
    primary = CPUPrimaryTier(1)
    store(primary, KEYS[0])
    block = find(primary, KEYS[0])
    primary.pin(block)
    primary.prepare_load([KEYS[0]], REQ)
    primary.unpin(block)
    assert primary.prepare_store([KEYS[1]], REQ) is None
    primary.pin(block)
    primary.complete_load([KEYS[0]])
    assert primary.prepare_store([KEYS[1]], REQ) is None
    primary.unpin(block)
    assert primary.prepare_store([KEYS[1]], REQ) is not None


def test_reset_quarantines_what_is_in_use_and_keeps_what_the_engine_stores() -> None:
    primary = CPUPrimaryTier(8)
    store(primary, *KEYS[:3])
    pinned = find(primary, KEYS[0])
    primary.pin(pinned)
    primary.prepare_load([KEYS[1]], REQ)
    primary.prepare_store([KEYS[3]], REQ)
    loading = primary.reserve([KEYS[4]])
    list(primary.take_events())
    primary.reset_cache()
    assert primary.slot_counts() == SlotCounts(free=4, ready=0, pinned=0, pending=1, quarantined=3)
    assert [primary.lookup(key, REQ) for key in KEYS[:5]] == [False, None, False, None, False]
    assert list(primary.take_events()) == [OffloadingEvent(tuple(KEYS[:3]), "CPU", removed=True)]
    store(primary, KEYS[0])  # the key again, in another slot
    assert primary.end_promotion(loading, success=True) == []
    primary.unpin(pinned)
    primary.complete_load([KEYS[1]])
    primary.complete_store([KEYS[3]])
    assert primary.slot_counts() == SlotCounts(free=6, ready=2, pinned=0, pending=0, quarantined=0)
    assert [primary.lookup(key, REQ) for key in KEYS[:5]] == [True, False, False, True, False]


@pytest.mark.parametrize("ends_first", ["load", "pin"])
def test_a_block_that_is_loaded_at_a_reset_is_never_found_again(ends_first: str) -> None:
    primary = CPUPrimaryTier(2)
    store(primary, KEYS[0])
    block = find(primary, KEYS[0])
    primary.pin(block)
    for _ in range(2):
        primary.prepare_load([KEYS[0]], REQ)
    primary.reset_cache()
    assert primary.lookup(KEYS[0], REQ) is None
    with pytest.raises(KeyError):
        primary.prepare_load([KEYS[0]], REQ)
    output = primary.prepare_store([KEYS[0]], REQ)  # the end of the loads would be told by the same key
    assert output is not None
    assert output.keys_to_store == ()
    primary.reset_cache()
    primary.complete_load([KEYS[0]])
    if ends_first == "pin":
        primary.unpin(block)
    assert primary.slot_counts().quarantined == 1
    primary.complete_load([KEYS[0]])
    assert primary.lookup(KEYS[0], REQ) is False
    if ends_first == "load":
        assert primary.slot_counts().quarantined == 1
        primary.unpin(block)
    assert primary.slot_counts() == SlotCounts(free=2, ready=0, pinned=0, pending=0, quarantined=0)


def test_shutdown_frees_what_was_loaded_at_a_reset() -> None:
    primary = CPUPrimaryTier(2)
    store(primary, *KEYS[:2])
    pinned = find(primary, KEYS[1])
    primary.pin(pinned)
    primary.prepare_load(KEYS[:2], REQ)
    primary.reset_cache()
    primary.shutdown()
    assert primary.slot_counts() == SlotCounts(free=1, ready=0, pinned=0, pending=0, quarantined=1)
    primary.unpin(pinned)
    assert primary.slot_counts().free == 2


def test_shutdown_frees_all_but_what_tiers_may_touch() -> None:
    primary = CPUPrimaryTier(8)
    store(primary, *KEYS[:3])
    primary.prepare_load([KEYS[0]], REQ)
    primary.prepare_store([KEYS[3]], REQ)
    pinned = find(primary, KEYS[1])
    primary.pin(pinned)
    loading = primary.reserve([KEYS[4]])
    primary.shutdown()
    assert primary.slot_counts() == SlotCounts(free=6, ready=0, pinned=0, pending=0, quarantined=2)
    assert primary.lookup(KEYS[0], REQ) is False
    assert primary.prepare_store([KEYS[5]], REQ) is None
    assert primary.reserve([KEYS[5]]) == []
    primary.complete_load([KEYS[0]])
    primary.complete_store([KEYS[3]])
    primary.unpin(pinned)
    primary.end_promotion(loading, success=True)
    assert primary.slot_counts().free == 8


def test_events_tell_what_appeared_and_left() -> None:
    primary = CPUPrimaryTier(2)
    store(primary, *KEYS[:2])
    store(primary, KEYS[2])
    primary.end_promotion(primary.reserve([KEYS[3]]), success=True)
    assert list(primary.take_events()) == [
        OffloadingEvent((KEYS[0], KEYS[1]), "CPU", removed=False),
        OffloadingEvent((KEYS[1],), "CPU", removed=True),
        OffloadingEvent((KEYS[2],), "CPU", removed=False),
        OffloadingEvent((KEYS[0],), "CPU", removed=True),
        OffloadingEvent((KEYS[3],), "CPU", removed=False),
    ]
    assert list(primary.take_events()) == []


def test_events_that_nobody_takes_are_bounded_by_their_keys() -> None:
    primary = CPUPrimaryTier(4096)
    keys = [block_key(number) for number in range(4096)]
    for _ in range(EVENT_KEYS_MAX // 4096):
        store(primary, *keys)
        primary.reset_cache()
    told = [key for event in primary.take_events() for key in event.keys]
    assert len(told) == EVENT_KEYS_MAX


def test_a_region_without_slots_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="num_blocks: 0"):
        CPUPrimaryTier(0)


def test_cost_does_not_grow_with_what_is_pinned() -> None:
    """10,000 pinned blocks at the eviction end of the queue; each store must not walk over them."""
    primary = CPUPrimaryTier(20_000)
    keys = [OffloadKey(number.to_bytes(8, "little")) for number in range(60_000)]
    store(primary, *keys[:20_000])
    primary.prepare_load(keys[10_000:20_000], REQ)
    steps = 0

    class Counting(set[OffloadKey]):
        def __contains__(self, key: object) -> bool:
            nonlocal steps
            steps += 1
            return super().__contains__(key)

    for start in range(20_000, 60_000, 8):
        assert primary._make_room(8, protected=Counting()) is not None
        primary.end_promotion(primary.reserve(keys[start : start + 8]), success=True)
    assert steps <= 40_000
