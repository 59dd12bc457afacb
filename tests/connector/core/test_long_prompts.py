"""L6: of a long prompt all that is stored is found, through BlockManager and a tier on slow storage."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.options import ManagerOptions
from kvtiers.connector.core.slots import Slots
from kvtiers.tiers.base import ReqContext
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.seal import TRAILER_BYTES
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.tier.lookup import LookupOptions
from kvtiers.tiers.tier.store_tier import StoreTierManager, TierOptions
from tests.clock import Clock
from tests.identity import FakeSpec, block_key
from tests.promises import Record
from tests.tiers.server.in_threads import in_threads

ROW_BYTES = 4096
KEYS = [block_key(number) for number in range(16_000)]
REQ = ReqContext("long")


class SlowStore(MemoryStore):
    """Has every block. Answers so many lookups a second, by the test's clock, once for each ``go``; no load ends."""

    def __init__(self, clock: Clock, per_second: float) -> None:
        super().__init__()
        self.clock = clock
        self.per_second = per_second
        self.go = threading.Semaphore(0)
        self.end = threading.Event()

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        assert self.go.acquire(timeout=600)
        self.clock.now += len(keys) / self.per_second
        return [ROW_BYTES + TRAILER_BYTES] * len(keys)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        if key.endswith(".bin"):
            assert self.end.wait(600)
        super().get_into(key, parts)


class Rig:
    """A manager over one tier on a SlowStore, and an engine that asks key by key for one prompt."""

    def __init__(self, *, per_second: float, total_s: float) -> None:
        self.clock = Clock()
        self.store = SlowStore(self.clock, per_second)
        spec = FakeSpec()
        view = memoryview(bytearray(len(KEYS) * ROW_BYTES)).cast("b", (len(KEYS), ROW_BYTES))
        lookup = LookupOptions(asked_max=1, deadline_s=0.2, total_s=total_s)
        self.tier = StoreTierManager(
            spec,
            view,
            "slow",
            make_backend=in_threads(self.store, clock=self.clock),
            mapper=FileMapper.from_offloading_spec("", spec),
            options=TierOptions(lookup=lookup, job_deadline_s=1e6),
            clock=self.clock,
        )
        self.manager = BlockManager(
            Slots(len(KEYS)),
            [self.tier],
            ManagerOptions(lookup_total_s=total_s, load_share=1, load_deadline_s=1e6),
            clock=self.clock,
        )

    def ask(self) -> list[bool | None]:
        """Until the first miss."""
        answers = []
        for key in KEYS:
            answers.append(self.manager.lookup(key, REQ))
            if answers[-1] is False:
                break
        return answers

    def look_up(self) -> tuple[int, int]:
        """Step until all is known. Returns how much of the prompt is found, and how often the tier was not asked."""
        steps_without_news = 0
        for _ in range(10_000):
            answers = self.ask()
            if not self.manager._waits.by_id[REQ.req_id].owed:
                assert all(self.manager.is_coming(key, REQ) for key in KEYS[: answers.count(None)])
                return answers.count(None), steps_without_news
            self.manager.on_schedule_end()
            while self.manager.continue_wait(REQ.req_id):
                assert None in self.ask()
                self.manager.on_schedule_end()
                self.store.go.release()
                while not self.tier._channel._looked:
                    self.tier._channel.wait(0.05)
                steps_without_news += 1
        raise AssertionError("still undecided")


@contextmanager
def rig(*, per_second: float, total_s: float = 15.0) -> Iterator[Rig]:
    made = Rig(per_second=per_second, total_s=total_s)
    try:
        yield made
    finally:
        made.store.go.release(len(KEYS))
        made.store.end.set()
        made.manager.shutdown()


def test_whole_long_prompt_is_found_on_slow_storage(record: Record) -> None:
    with rig(per_second=2_000) as slow:
        began = slow.clock.now
        found, _ = slow.look_up()
        took_s = slow.clock.now - began
        assert found == len(KEYS)
        assert took_s == pytest.approx(8.0)
        record("L6", stored=len(KEYS), answers_per_s=2_000, found=found, after_s=took_s)


def test_request_continues_with_the_prefix_found_within_the_lookup_limit(record: Record) -> None:
    with rig(per_second=2_000, total_s=3.0) as slow:
        began = slow.clock.now
        found, _ = slow.look_up()
        took_s = slow.clock.now - began
        assert 3.0 <= took_s < 3.3
        assert 6_000 <= found <= 2_000 * took_s + 1
        assert slow.ask()[found:] == [False]  # nor does it wait again
        record("L6", stored=len(KEYS), answers_per_s=2_000, bound_s=3.0, found=found, after_s=took_s)


def test_wait_without_new_answers_continues_without_lookups() -> None:
    with rig(per_second=20_000) as fast:
        found, steps_without_news = fast.look_up()
        assert found == len(KEYS)
        assert steps_without_news >= len(KEYS) / 256
        assert fast.manager.continue_wait(REQ.req_id)  # for its loads
        fast.manager.on_request_finished(REQ)
        assert not fast.manager.continue_wait(REQ.req_id)
