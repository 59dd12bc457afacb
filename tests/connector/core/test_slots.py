"""Slots: slots, states and what bad calls must not do."""

from __future__ import annotations

import logging

import pytest

from kvtiers.connector.base import CPULoadStoreSpec
from kvtiers.connector.core.eviction import ARCPolicy
from kvtiers.connector.core.slots import Block, BlockState, SlotCounts, Slots
from kvtiers.tiers.base import OffloadingEvent, ReqContext
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.tier.events import EVENT_KEYS_MAX
from tests.identity import block_key

REQ = ReqContext("r")
KEYS = [block_key(number) for number in range(64)]


def store(slots: Slots, *keys: OffloadKey) -> list[int]:
    """Store keys to the end; their slots."""
    output = slots.prepare_store(keys, REQ)
    assert output is not None
    assert output.keys_to_store == keys
    slots.end_store(keys)
    return slot_ids(output.store_spec)


def lookup(slots: Slots, key: OffloadKey) -> bool | None:
    """Whether a block is ready; None: it has a slot, and is not."""
    block = slots.find(key)
    return False if block is None else block.state is BlockState.READY or None


def slot_ids(spec: object) -> list[int]:
    assert isinstance(spec, CPULoadStoreSpec)
    return list(map(int, spec.block_ids))


def find(slots: Slots, key: OffloadKey) -> Block:
    block = slots.find(key)
    assert block is not None
    return block


def test_block_is_loadable_after_its_store() -> None:
    slots = Slots(4)
    assert lookup(slots, KEYS[0]) is False
    output = slots.prepare_store(KEYS[:2], REQ)
    assert output is not None
    assert lookup(slots, KEYS[0]) is None
    with pytest.raises(KeyError):
        slots.prepare_load(KEYS[:1])
    slots.end_store(KEYS[:2])
    assert lookup(slots, KEYS[0]) is True
    assert slot_ids(slots.prepare_load([KEYS[1], KEYS[0]])) == slot_ids(output.store_spec)[::-1]


def test_slot_counts_follow_stores_and_loads() -> None:
    slots = Slots(4)
    assert slots.counts() == SlotCounts(free=4, ready=0, pinned=0, pending=0, quarantined=0)
    slots.prepare_store(KEYS[:3], REQ)
    assert slots.counts() == SlotCounts(free=1, ready=0, pinned=0, pending=3, quarantined=0)
    slots.end_store(KEYS[:2])
    slots.end_store(KEYS[2:3], success=False)
    assert slots.counts() == SlotCounts(free=2, ready=2, pinned=0, pending=0, quarantined=0)
    slots.prepare_load([KEYS[0]])
    slots.prepare_load([KEYS[0]])
    assert slots.counts() == SlotCounts(free=2, ready=1, pinned=1, pending=0, quarantined=0)
    slots.complete_load([KEYS[0]])
    assert slots.counts().pinned == 1
    slots.complete_load([KEYS[0]])
    assert slots.counts() == SlotCounts(free=2, ready=2, pinned=0, pending=0, quarantined=0)


def test_failed_store_leaves_no_block() -> None:
    slots = Slots(2)
    slots.prepare_store(KEYS[:2], REQ)
    slots.end_store(KEYS[:2], success=False)
    assert lookup(slots, KEYS[0]) is False
    assert slots.counts().free == 2
    assert list(slots.take_events()) == []


def test_last_blocks_of_the_oldest_store_are_evicted_first() -> None:
    """A prefix is useless without its first blocks, so they are the last to go."""
    slots = Slots(4)
    store(slots, *KEYS[:4])
    output = slots.prepare_store(KEYS[4:6], REQ)
    assert output is not None
    assert output.evicted_keys == (KEYS[3], KEYS[2])
    slots.end_store(KEYS[4:6])
    slots.touch([KEYS[0]])
    output = slots.prepare_store([KEYS[6]], REQ)
    assert output is not None
    assert output.evicted_keys == (KEYS[1],)


def test_prefix_is_evicted_from_its_end_though_completed_in_any_order() -> None:
    """As by vLLM, which names the blocks of what ended in a set."""
    slots = Slots(8)
    slots.prepare_store(KEYS[:8], REQ)
    shuffled = [KEYS[i] for i in (5, 2, 7, 0, 4, 6, 1, 3)]
    assert [block.key for block in slots.end_store(shuffled, True)] == KEYS[:8]
    slots.prepare_load(KEYS[4:8])
    slots.complete_load(shuffled[:1])  # of several loads, in any order
    slots.complete_load([key for key in shuffled[1:] if key in KEYS[4:8]])
    assert slots.counts().ready == 8
    output = slots.prepare_store(KEYS[8:15], REQ)
    assert output is not None
    assert output.evicted_keys == tuple(KEYS[i] for i in (3, 2, 1, 0, 5, 7, 6))


@pytest.mark.parametrize("uses", [1, 2])
def test_load_and_first_use_of_promoted_block_count_as_one_use_for_arc(uses: int) -> None:
    """A burst of prompts found in storage would else drive out what is used all the time, as with LRU."""
    slots = Slots(8, ARCPolicy(8))
    hot, passing = KEYS[:4], KEYS[10:14]
    store(slots, *hot)
    slots.touch(hot)
    slots.end_promotion(slots.reserve(passing), success=True)
    for _ in range(uses):
        slots.prepare_load(passing)
        slots.touch(passing)
        slots.complete_load(passing)
    output = slots.prepare_store(KEYS[20:24], REQ)
    assert output is not None
    assert set(output.evicted_keys) == set(passing if uses == 1 else hot)


def test_touch_of_promoted_block_without_load_counts_as_use() -> None:
    slots = Slots(2)
    slots.end_promotion(slots.reserve(KEYS[:2]), success=True)
    slots.touch(KEYS[1:2])
    output = slots.prepare_store(KEYS[5:6], REQ)
    assert output is not None
    assert output.evicted_keys == (KEYS[0],)


def test_two_loads_of_a_block_may_end_in_one_call() -> None:
    slots = Slots(4)
    store(slots, *KEYS[:2])
    slots.prepare_load(KEYS[:2])
    slots.prepare_load(KEYS[:2])
    slots.complete_load([KEYS[1], KEYS[0], KEYS[1], KEYS[0]])
    assert slots.counts() == SlotCounts(free=2, ready=2, pinned=0, pending=0, quarantined=0)


def test_loaded_blocks_and_blocks_of_the_same_call_are_not_evicted() -> None:
    slots = Slots(3)
    store(slots, *KEYS[:3])
    slots.prepare_load([KEYS[0]])
    before = slots.counts()
    assert slots.prepare_store([KEYS[1], *KEYS[3:5]], REQ) is None
    assert slots.counts() == before
    output = slots.prepare_store([KEYS[1], KEYS[3]], REQ)
    assert output is not None
    assert (output.keys_to_store, output.evicted_keys) == ((KEYS[3],), (KEYS[2],))


def test_duplicate_keys_are_stored_once() -> None:
    slots = Slots(4)
    output = slots.prepare_store([KEYS[0], KEYS[1], KEYS[0]], REQ)
    assert output is not None
    assert output.keys_to_store == (KEYS[0], KEYS[1])
    again = slots.prepare_store([KEYS[0]], REQ)  # by another request, still pending
    assert again is not None
    assert again.keys_to_store == ()
    slots.end_store([KEYS[0], KEYS[0], KEYS[1]])
    assert slots.counts() == SlotCounts(free=2, ready=2, pinned=0, pending=0, quarantined=0)
    assert len(slot_ids(slots.prepare_load([KEYS[0], KEYS[0]]))) == 2
    slots.complete_load([KEYS[0]])
    assert slots.counts().pinned == 1
    slots.complete_load([KEYS[0]])
    assert slots.counts().pinned == 0


def test_load_with_an_absent_key_pins_nothing() -> None:
    slots = Slots(4)
    store(slots, KEYS[0])
    with pytest.raises(KeyError):
        slots.prepare_load([KEYS[0], KEYS[1]])
    assert slots.counts().pinned == 0


def test_wrong_completions_are_counted_logged_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    slots = Slots(8)
    store(slots, *KEYS[:2])
    slots.pin(find(slots, KEYS[1]))  # a tier's job: not the engine's to end
    slots.reserve([KEYS[2]])
    before = slots.counts()
    shown = {s.labels["where"] for s in slots.metrics.snapshot() if not s.value}
    assert shown == {"complete_load", "complete_store"}
    slots.complete_load([KEYS[0], KEYS[1], KEYS[2], KEYS[9]])
    slots.end_store([KEYS[0], KEYS[2], KEYS[9]])
    slots.end_store([KEYS[2]], success=False)
    assert slots.counts() == before
    assert lookup(slots, KEYS[2]) is None  # a promotion is not the engine's to declare done
    counted = slots.metrics.value
    assert counted("kvtiers_contained_errors_total", "engine", "complete_load") == 4
    assert counted("kvtiers_contained_errors_total", "engine", "complete_store") == 4
    assert len([r for r in caplog.records if "not prepared" in r.message]) == 2


def test_request_larger_than_the_region_stores_its_first_blocks_and_logs_why(caplog: pytest.LogCaptureFixture) -> None:
    slots = Slots(4)
    store(slots, KEYS[1], KEYS[9])
    for _ in range(2):
        output = slots.prepare_store(KEYS[:10], REQ)
        assert output is not None
        assert output.keys_to_store in ((KEYS[0], KEYS[2], KEYS[3]), ())
    slots.end_store([KEYS[0], KEYS[2], KEYS[3]])
    assert [lookup(slots, key) for key in KEYS[:6]] == [True] * 4 + [False] * 2
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(messages) == 1
    assert "region holds 4 blocks, request 'r' needs 10: only its first 4 blocks can be stored" in messages[0]


def test_reservation_takes_as_many_leading_keys_as_fit() -> None:
    slots = Slots(4)
    store(slots, *KEYS[:3])
    slots.prepare_load([KEYS[0]])
    blocks = slots.reserve(KEYS[10:20])
    assert [block.key for block in blocks] == KEYS[10:13]
    assert slots.counts() == SlotCounts(free=0, ready=0, pinned=1, pending=3, quarantined=0)
    assert slots.end_promotion(blocks[:2], success=True) == blocks[:2]
    assert slots.end_promotion(blocks[2:], success=False) == []
    assert slots.counts() == SlotCounts(free=1, ready=2, pinned=1, pending=0, quarantined=0)
    assert lookup(slots, KEYS[10]) is True
    assert blocks[2].state is BlockState.GONE


def test_pins_and_loads_both_keep_a_block_from_eviction() -> None:
    slots = Slots(1)
    store(slots, KEYS[0])
    block = find(slots, KEYS[0])
    slots.pin(block)
    slots.prepare_load([KEYS[0]])
    slots.unpin(block)
    assert slots.prepare_store([KEYS[1]], REQ) is None
    slots.pin(block)
    slots.complete_load([KEYS[0]])
    assert slots.prepare_store([KEYS[1]], REQ) is None
    slots.unpin(block)
    assert slots.prepare_store([KEYS[1]], REQ) is not None


def test_reset_quarantines_blocks_in_use_and_keeps_running_stores() -> None:
    slots = Slots(8)
    store(slots, *KEYS[:3])
    pinned = find(slots, KEYS[0])
    slots.pin(pinned)
    slots.prepare_load([KEYS[1]])
    slots.prepare_store([KEYS[3]], REQ)
    loading = slots.reserve([KEYS[4]])
    list(slots.take_events())
    slots.reset_cache()
    assert slots.counts() == SlotCounts(free=4, ready=0, pinned=0, pending=1, quarantined=3)
    assert [lookup(slots, key) for key in KEYS[:5]] == [False, None, False, None, False]
    assert list(slots.take_events()) == [OffloadingEvent(tuple(KEYS[:3]), "CPU", removed=True)]
    store(slots, KEYS[0])  # the key again, in another slot
    assert slots.end_promotion(loading, success=True) == []
    slots.unpin(pinned)
    slots.complete_load([KEYS[1]])
    slots.end_store([KEYS[3]])
    assert slots.counts() == SlotCounts(free=6, ready=2, pinned=0, pending=0, quarantined=0)
    assert [lookup(slots, key) for key in KEYS[:5]] == [True, False, False, True, False]


@pytest.mark.parametrize("ends_first", ["load", "pin"])
def test_block_that_is_loaded_during_a_reset_is_not_found_afterwards(ends_first: str) -> None:
    slots = Slots(2)
    store(slots, KEYS[0])
    block = find(slots, KEYS[0])
    slots.pin(block)
    for _ in range(2):
        slots.prepare_load([KEYS[0]])
    slots.reset_cache()
    assert lookup(slots, KEYS[0]) is None
    with pytest.raises(KeyError):
        slots.prepare_load([KEYS[0]])
    output = slots.prepare_store([KEYS[0]], REQ)  # the end of the loads would be told by the same key
    assert output is not None
    assert output.keys_to_store == ()
    slots.reset_cache()
    slots.complete_load([KEYS[0]])
    if ends_first == "pin":
        slots.unpin(block)
    assert slots.counts().quarantined == 1
    slots.complete_load([KEYS[0]])
    assert lookup(slots, KEYS[0]) is False
    if ends_first == "load":
        assert slots.counts().quarantined == 1
        slots.unpin(block)
    assert slots.counts() == SlotCounts(free=2, ready=0, pinned=0, pending=0, quarantined=0)


def test_shutdown_frees_blocks_that_were_loaded_during_a_reset() -> None:
    slots = Slots(2)
    store(slots, *KEYS[:2])
    pinned = find(slots, KEYS[1])
    slots.pin(pinned)
    slots.prepare_load(KEYS[:2])
    slots.reset_cache()
    slots.shutdown()
    assert slots.counts() == SlotCounts(free=1, ready=0, pinned=0, pending=0, quarantined=1)
    slots.unpin(pinned)
    assert slots.counts().free == 2


def test_shutdown_frees_all_slots_except_slots_used_by_tiers() -> None:
    slots = Slots(8)
    store(slots, *KEYS[:3])
    slots.prepare_load([KEYS[0]])
    slots.prepare_store([KEYS[3]], REQ)
    pinned = find(slots, KEYS[1])
    slots.pin(pinned)
    loading = slots.reserve([KEYS[4]])
    slots.shutdown()
    assert slots.counts() == SlotCounts(free=6, ready=0, pinned=0, pending=0, quarantined=2)
    assert lookup(slots, KEYS[0]) is False
    assert slots.prepare_store([KEYS[5]], REQ) is None
    assert slots.reserve([KEYS[5]]) == []
    slots.complete_load([KEYS[0]])
    slots.end_store([KEYS[3]])
    slots.unpin(pinned)
    slots.end_promotion(loading, success=True)
    assert slots.counts().free == 8


def test_events_report_stored_and_removed_blocks() -> None:
    slots = Slots(2)
    store(slots, *KEYS[:2])
    store(slots, KEYS[2])
    slots.end_promotion(slots.reserve([KEYS[3]]), success=True)
    assert list(slots.take_events()) == [
        OffloadingEvent((KEYS[0], KEYS[1]), "CPU", removed=False),
        OffloadingEvent((KEYS[1],), "CPU", removed=True),
        OffloadingEvent((KEYS[2],), "CPU", removed=False),
        OffloadingEvent((KEYS[0],), "CPU", removed=True),
        OffloadingEvent((KEYS[3],), "CPU", removed=False),
    ]
    assert list(slots.take_events()) == []


def test_untaken_events_are_bounded() -> None:
    slots = Slots(4096)
    keys = [block_key(number) for number in range(4096)]
    for _ in range(EVENT_KEYS_MAX // 4096):
        store(slots, *keys)
        slots.reset_cache()
    told = [key for event in slots.take_events() for key in event.keys]
    assert len(told) == EVENT_KEYS_MAX


def test_region_without_slots_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="num_blocks: 0"):
        Slots(0)


def test_eviction_does_not_visit_pinned_blocks() -> None:
    """10,000 pinned blocks at the eviction end of the queue; each store must not walk over them."""
    slots = Slots(20_000)
    keys = [OffloadKey(number.to_bytes(8, "little")) for number in range(60_000)]
    store(slots, *keys[:20_000])
    slots.prepare_load(keys[10_000:20_000])
    steps = 0

    class Counting(set[OffloadKey]):
        def __contains__(self, key: object) -> bool:
            nonlocal steps
            steps += 1
            return super().__contains__(key)

    for start in range(20_000, 60_000, 8):
        assert slots._make_room(8, protected=Counting()) is not None
        slots.end_promotion(slots.reserve(keys[start : start + 8]), success=True)
    assert steps <= 40_000
