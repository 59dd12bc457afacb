"""Why a request was not given more blocks: seeded causes, each of them named by ``kvtiers explain``."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtiers.connector.core import record as record_module
from kvtiers.connector.core import trace_file
from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.options import ManagerOptions
from kvtiers.connector.core.reasons import REASONS, RequestRecord, sentence, why
from kvtiers.connector.core.record import REASONS_MAX, UNUSED_BYTES, UNUSED_S, Record
from kvtiers.connector.core.slots import Slots
from kvtiers.connector.core.trace_file import TraceFile
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import ReqContext, SecondaryTierManager
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.errors import StorePermissionError, StoreUnavailableError
from kvtiers.tiers.metrics import Metrics
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.tier.lookup import LookupOptions
from kvtiers.tiers.tier.store_tier import StoreTierManager, TierOptions
from tests.clock import Clock
from tests.connector.commands.test_storage_commands import ok
from tests.connector.core.scripted_tier import ScriptedTier
from tests.connector.core.simulated_engine import look_up
from tests.identity import CONFIG, FakeSpec, block_key
from tests.tiers.server.in_threads import in_threads
from tests.waiting import PATIENT, wait_for

KEYS = [block_key(number) for number in range(32)]
BLOCK_TOKENS = 32


class Engine:
    """A manager over a region and real tiers, and what an engine does with it."""

    def __init__(
        self, num_blocks: int = 16, *, row_bytes: int = 4096, clock: Clock | None = None, **options: Any
    ) -> None:
        self.region = SharedOffloadRegion.anonymous(num_blocks, row_bytes)
        self.view = self.region.create_kv_memoryview()
        np.frombuffer(self.view, np.int8)[:] = 7
        self.slots = Slots(num_blocks)
        self.spec = FakeSpec(metrics=self.slots.metrics)
        self.lines: list[str] = []
        self.slots.record.write = self.lines.append
        self._clock = clock
        self._options = options
        self.manager = BlockManager(self.slots)

    def with_tiers(self, *tiers: SecondaryTierManager) -> Engine:
        clock = self._clock or time.monotonic
        self.manager = BlockManager(self.slots, tiers, ManagerOptions(**self._options), clock=clock)
        return self

    def files(self, root: Path, *, changed: dict[str, Any] | None = None, **options: Any) -> Engine:
        """With an fs tier."""
        spec = dataclasses.replace(self.spec, config=dataclasses.replace(CONFIG, **(changed or {})))
        settings = {
            "type": "fs",
            "name": "disk",
            "root_dir": str(root),
            "min_free": 0,
            "isolation": "thread",
            **PATIENT,
        }
        return self.with_tiers(SecondaryTierFactory.create_secondary_tier(settings | options, self.view, spec))

    def over(
        self, store: Store, lookup: LookupOptions | None = None, *, threads_clock: Clock | None = None, **options: Any
    ) -> Engine:
        """With a tier over this store."""
        clock = threads_clock or time.monotonic
        limits = TierOptions(lookup=lookup or LookupOptions(deadline_s=60), **{"job_deadline_s": 120.0} | options)
        self.mapper = FileMapper.from_offloading_spec("", self.spec)
        make = in_threads(store, n_write_threads=1, clock=clock)
        return self.with_tiers(
            StoreTierManager(
                self.spec, self.view, "far", make_backend=make, mapper=self.mapper, options=limits, clock=clock
            )
        )

    def scripted(self, name: str, keys: Sequence[Any] = (), *, auto: bool = True) -> ScriptedTier:
        """With a scripted tier that has these keys."""
        tier = ScriptedTier(self.view, name, auto=auto)
        tier.put(*keys)
        self.with_tiers(tier)
        return tier

    def wait(self, *step_s: float, keys: Sequence[Any] = KEYS[:1], req_id: str = "reader") -> None:
        """For each of these times, look the keys up, end the step, and let the time pass."""
        assert self._clock is not None
        for seconds in step_s:
            look_up(self.manager, keys, ReqContext(req_id))
            self.manager.on_schedule_end()
            self._clock.advance(seconds)

    def store(self, keys: Sequence[Any] = KEYS[:4], req_id: str = "writer") -> None:
        """Store blocks to all tiers, and wait for the tiers."""
        output = self.manager.prepare_store(keys, ReqContext(req_id))
        assert output is not None
        self.manager.complete_store(output.keys_to_store)
        self.drain()

    def drain(self) -> None:
        self.manager.drain()
        self.manager.on_schedule_end()

    @property
    def tier(self) -> StoreTierManager:
        tier = self.manager._tiers[0].tier
        assert isinstance(tier, StoreTierManager)
        return tier

    def step_until(self, is_so: Callable[[], Any]) -> Any:
        """Make steps until it is so."""

        def step() -> Any:
            self.manager.on_schedule_end()
            return is_so()

        return wait_for(step)

    def fate(self, key: Any) -> str:
        """What happened last to a block."""
        fate = self.slots.record._fates.get(key)
        return "" if fate is None else fate.reason

    def forget_region(self) -> None:
        """Have the region without blocks, as after other prompts."""
        self.slots.reset_cache()

    def ask(self, keys: Sequence[Any] = KEYS[:4], req_id: str = "reader") -> int:
        """Look keys up until they are answered, and load what was found. Returns how many were."""
        context = ReqContext(req_id)

        def found() -> list[bool]:
            answers = look_up(self.manager, keys, context)
            self.manager.on_schedule_end()
            return [] if None in answers else [bool(answer) for answer in answers]

        hits = sum(wait_for(found))
        if hits:
            self.manager.prepare_load(keys[:hits], context)
            self.manager.complete_load(keys[:hits])
        return hits

    def close(self) -> None:
        self.manager.shutdown()
        self.region.cleanup()

    def end(self, req_id: str = "reader") -> str:
        """End a request and the engine. Returns the request's line."""
        self.manager.on_request_finished(ReqContext(req_id))
        self.close()
        return next(line for line in self.lines if json.loads(line)["request"] == req_id)


class Gated(MemoryStore):
    """A store whose calls wait or fail as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.put_error: Exception | None = None
        self.get_error: Exception | None = None
        self.size_error: Exception | None = None
        self.gate, self.put_gate = threading.Event(), threading.Event()
        self.gate.set()
        self.put_gate.set()

    def put(self, *arguments: Any, **options: Any) -> Any:
        self.put_gate.wait()
        if self.put_error is not None:
            raise self.put_error
        return super().put(*arguments, **options)

    def get_into(self, *arguments: Any) -> Any:
        self.gate.wait()
        if self.get_error is not None:
            raise self.get_error
        return super().get_into(*arguments)

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        self.gate.wait()
        return [self.size_error] * len(keys) if self.size_error is not None else super().size_many(keys)


# ---- the causes: each returns the line of the request "reader"


def all_is_found(root: Path) -> str:
    engine = Engine().files(root)
    engine.store()
    engine.forget_region()
    assert engine.ask() == 4
    return engine.end()


def prompt_is_shorter_than_a_block(root: Path) -> str:
    engine = Engine().files(root)
    engine.slots.record.prompt("reader", tokens=20, engine_tokens=0, loaded_tokens=0, block_tokens=BLOCK_TOKENS)
    return engine.end()


def engine_has_the_prompt_itself(root: Path) -> str:
    engine = Engine().files(root)
    engine.slots.record.prompt("reader", tokens=70, engine_tokens=64, loaded_tokens=0, block_tokens=BLOCK_TOKENS)
    return engine.end()


def nobody_stored_it(root: Path) -> str:
    engine = Engine().files(root)
    engine.store()
    engine.ask(KEYS[8:12])
    return engine.end()


def another_engine_stored_it_with_another_layout(root: Path) -> str:
    other = Engine().files(root, changed={"kv_cache_layout": "HND"})
    other.store()
    other.close()
    engine = Engine().files(root)
    engine.step_until(lambda: engine.tier.nearest)
    engine.ask()
    engine.step_until(lambda: engine.slots.record._late.get(KEYS[0]))
    engine.store()  # it is computed and stored here before the request ends
    return engine.end()


def new_prompt_in_a_new_namespace(root: Path) -> str:
    other = Engine().files(root, changed={"kv_cache_layout": "HND"})
    other.store()
    other.close()
    engine = Engine().files(root)
    engine.step_until(lambda: engine.tier.nearest)
    engine.ask(KEYS[8:12])
    engine.step_until(lambda: not engine.tier._lookup._elsewhere)
    return engine.end()


def region_has_no_room_to_store(root: Path) -> str:
    engine = Engine(4).files(root)
    assert engine.manager.prepare_store(KEYS[8:12], ReqContext("busy")) is not None
    assert engine.manager.prepare_store(KEYS[:4], ReqContext("writer")) is None
    engine.ask()
    return engine.end()


def prompt_is_longer_than_the_region(root: Path) -> str:
    engine = Engine(4).files(root)
    engine.store(KEYS[:8])
    engine.ask(KEYS[4:8])
    return engine.end()


def store_waits_behind_too_many(root: Path) -> str:
    store = Gated()
    engine = Engine(16, store_backlog_share=0.25).over(store)
    store.put_gate.clear()
    for keys in (KEYS[8:12], KEYS[:4]):
        assert engine.manager.prepare_store(keys, ReqContext("writer")) is not None
        engine.manager.complete_store(keys)
    store.put_gate.set()
    engine.drain()
    engine.forget_region()
    engine.ask()
    return engine.end()


def store_meets_an_open_circuit(root: Path) -> str:
    engine = Engine().over(Gated(), circuit_probe_s=0.01)
    engine.tier._circuit.trip("a test")
    engine.store()
    engine.step_until(lambda: engine.tier._circuit.closed)
    engine.forget_region()
    engine.ask()
    return engine.end()


def store_is_late(root: Path) -> str:
    store, clock = Gated(), Clock()
    engine = Engine(clock=clock).over(store, job_deadline_s=10.0, threads_clock=clock)
    store.put_gate.clear()
    engine.manager.prepare_store(KEYS[:8], ReqContext("writer"))
    engine.manager.complete_store(KEYS[:8])
    clock.advance(6.0)
    engine.ask(KEYS[20:21], "another")  # the storage answers, so it is not cut off
    clock.advance(5.0)
    store.put_gate.set()
    wait_for(lambda: store.size(engine.mapper.relative_name(KEYS[0])))
    engine.drain()
    engine.forget_region()
    engine.ask(KEYS[7:8])  # the last block had not begun
    return engine.end()


def store_meets_a_full_queue(root: Path) -> str:
    store = Gated()
    engine = Engine().over(store, jobs_max=1)
    store.put_gate.clear()
    for keys in (KEYS[8:10], KEYS[:4]):
        engine.manager.prepare_store(keys, ReqContext("writer"))
        engine.manager.complete_store(keys)
    store.put_gate.set()
    engine.drain()
    engine.forget_region()
    engine.ask()
    return engine.end()


def storage_is_full(root: Path) -> str:
    engine = Engine().files(root, min_free="1024PiB")
    engine.store()
    engine.forget_region()
    engine.ask()
    return engine.end()


def storage_may_not_be_written(root: Path) -> str:
    store = Gated()
    engine = Engine().over(store)
    store.put_error = StorePermissionError("a test")
    engine.store()
    engine.forget_region()
    engine.ask()
    return engine.end()


def tier_is_read_only(root: Path) -> str:
    root.mkdir(exist_ok=True)
    engine = Engine().files(root, read_only=True)
    engine.store()
    engine.forget_region()
    engine.ask()
    return engine.end()


def copy_into_the_region_fails(root: Path) -> str:
    engine = Engine().files(root)
    engine.manager.prepare_store(KEYS[:4], ReqContext("writer"))
    engine.manager.complete_store(KEYS[:4], success=False)
    engine.ask()
    return engine.end()


def block_outlives_its_ttl(root: Path) -> str:
    engine = Engine().files(root, ttl="1s")
    engine.store()
    engine.forget_region()
    engine.step_until(lambda: engine.fate(KEYS[0]) != "stored")
    engine.ask()
    engine.store()
    return engine.end()


def block_makes_room_for_others(root: Path) -> str:
    engine = Engine(32, row_bytes=64 << 10).files(root, max_bytes="1MiB")
    for key in KEYS[:14]:
        engine.store([key])
    (key, *_) = engine.step_until(lambda: [key for key in KEYS if engine.fate(key) == "removed:capacity"])
    engine.forget_region()
    engine.ask([key])
    return engine.end()


def somebody_removes_the_files(root: Path) -> str:
    engine = Engine().files(root)
    engine.store()
    engine.forget_region()
    for path in root.rglob("*.bin"):
        path.unlink()
    assert engine.ask() == 0
    return engine.end()


def block_is_damaged(root: Path) -> str:
    engine = Engine().files(root)
    engine.store()
    engine.forget_region()
    for path in root.rglob("*.bin"):
        path.write_bytes(b"\x00" + path.read_bytes()[1:])
    assert engine.ask() == 0
    return engine.end()


def load_raises_io_errors(root: Path) -> str:
    store = Gated()
    engine = Engine().over(store)
    engine.store()
    engine.forget_region()
    store.get_error = StoreUnavailableError("a test")
    assert engine.ask() == 0
    return engine.end()


def load_hangs(root: Path) -> str:
    engine = Engine(clock=Clock(), load_deadline_s=3.0)
    engine.scripted("slow", KEYS[:4], auto=False)
    engine.wait(4.0, 0.0)
    assert engine.ask() == 0
    return engine.end()


def computes_fast(engine: Engine) -> None:
    """An engine that computes 64 tokens, four blocks, in 0.9 s, and a tier that loads four blocks in 4.2 s."""
    decisions = engine.manager.decisions
    for _ in range(100):
        decisions.steps.prefill.learn(64, 64 * 32, 0.9)
        decisions.ways[0].learn(4, 4.2)
    engine.manager.note_request("reader", 64, 0)


def loading_is_slower_than_computing(root: Path) -> str:
    engine = Engine(blocks_per_token=1 / 16).files(root)
    engine.store()
    engine.forget_region()
    computes_fast(engine)
    assert engine.ask() == 0
    return engine.end()


def loading_falls_behind_computing(root: Path) -> str:
    engine = Engine(clock=Clock(), blocks_per_token=1 / 16)
    engine.scripted("slow", KEYS[:4], auto=False)
    computes_fast(engine)
    for _ in range(100):
        engine.manager.decisions.ways[0].learn(4, 0.5)  # it was faster
    engine.wait(*[0.1] * 20)
    assert engine.ask() == 0
    return engine.end()


def load_of_another_request_falls_behind(root: Path) -> str:
    """Of a request that waits for the same blocks, and has decided nothing itself."""
    engine = Engine(clock=Clock(), blocks_per_token=1 / 16)
    engine.scripted("slow", KEYS[:4], auto=False)
    engine.slots.record.ended("slow", "stored", KEYS[:4])
    computes_fast(engine)
    engine.manager.note_request("first", 64, 0)
    for _ in range(100):
        engine.manager.decisions.ways[0].learn(4, 0.5)
    engine.wait(0.0, req_id="first")
    for _ in range(20):
        engine.manager.lookup(KEYS[0], ReqContext("reader"))
        engine.wait(0.1, req_id="first")
    assert engine.ask() == 0
    return engine.end()


def submission_of_a_load_raises(root: Path) -> str:
    engine = Engine(clock=Clock())
    engine.scripted("broken", KEYS[:4]).raising.add("submit_load")
    assert engine.ask() == 0
    return engine.end()


def tier_is_never_loaded_from(root: Path) -> str:
    engine = Engine().files(root, load="never")
    engine.store()
    assert engine.slots.metrics.total("kvtiers_stored_since_load_bytes", ("disk",)) is None  # it is no fault
    engine.forget_region()
    assert engine.ask() == 0
    return engine.end()


def region_has_no_room_to_load(root: Path) -> str:
    engine = Engine(4, clock=Clock())
    engine.scripted("near", KEYS[:4])
    assert engine.manager.prepare_store(KEYS[8:12], ReqContext("busy")) is not None
    engine.wait(0.4, 0.4, 0.4)
    assert engine.ask() == 0
    return engine.end()


def region_is_smaller_than_the_request(root: Path) -> str:
    engine = Engine(4, clock=Clock(), load_share=1.0)
    engine.scripted("near", KEYS[:8])
    engine.wait(0.4, 0.4, 0.4, 0.4, keys=KEYS[:8])
    assert engine.ask(KEYS[:8]) == 4
    return engine.end()


def loads_fill_the_tiers_share(root: Path) -> str:
    engine = Engine(8, clock=Clock(), load_share=0.25, load_deadline_s=3.0)
    engine.scripted("stuck", KEYS[:8], auto=False)
    engine.wait(0.0, keys=KEYS[4:6], req_id="first")
    engine.wait(2.0, 2.0, 2.0)
    assert engine.ask() == 0
    return engine.end()


def storage_is_silent(root: Path) -> str:
    store = Gated()
    engine = Engine().over(store, LookupOptions(deadline_s=0.05))
    store.gate.clear()
    threading.Timer(0.5, store.gate.set).start()
    assert engine.ask() == 0
    return engine.end()


def lookups_take_too_long(root: Path) -> str:
    engine = Engine(clock=Clock(), lookup_total_s=5.0)
    engine.scripted("slow").silent = True
    engine.wait(*[1.0] * 8)
    assert engine.ask() == 0
    return engine.end()


def lookup_raises_an_error(root: Path) -> str:
    store = Gated()
    engine = Engine().over(store)
    store.size_error = StoreUnavailableError("a test")
    assert engine.ask() == 0
    return engine.end()


def tier_is_cut_off(root: Path) -> str:
    engine = Engine().over(Gated(), circuit_probe_s=60.0)
    engine.store()
    engine.forget_region()
    engine.tier._circuit.trip("a test")
    assert engine.ask() == 0
    return engine.end()


def request_excludes_the_tiers(root: Path) -> str:
    engine = Engine().files(root)
    engine.store()
    engine.forget_region()
    engine.manager.excluded_tiers = lambda _: 1
    assert engine.ask() == 0
    return engine.end()


def cache_was_reset(root: Path) -> str:
    engine = Engine()
    engine.store()
    engine.manager.reset_cache()
    assert engine.ask() == 0
    return engine.end()


def region_evicted_it_and_there_is_no_tier(root: Path) -> str:
    engine = Engine(4)
    engine.store()
    engine.store(KEYS[8:12])
    assert engine.ask() == 0
    return engine.end()


def engine_only_produces(root: Path) -> str:
    """As ``KVTiersManager`` tells it for ``kv_role: kv_producer``."""
    engine = Engine()
    engine.slots.record.prompt("reader", tokens=99, engine_tokens=0, loaded_tokens=0, block_tokens=BLOCK_TOKENS)
    engine.slots.record.ignores_tiers("reader", "lookup:role")
    return engine.end()


CAUSES: list[tuple[Callable[[Path], str], str, str]] = [
    (all_is_found, "found", "4 of 4 blocks were loaded (4 from tier disk): every block"),
    (prompt_is_shorter_than_a_block, "too_short", "shorter than a stored block (32 tokens)"),
    (engine_has_the_prompt_itself, "engine", "64 were in the engine's cache"),
    (nobody_stored_it, "not_stored", "no engine with this namespace has stored"),
    (another_engine_stored_it_with_another_layout, "other_namespace", 'kv_cache_layout is "NHD" here, "HND" there'),
    (new_prompt_in_a_new_namespace, "not_stored", "no engine with this namespace has stored"),
    (region_has_no_room_to_store, "store:no_room", "the region had no room for the next block when it was computed"),
    (prompt_is_longer_than_the_region, "store:too_small", "has more blocks than the region"),
    (store_waits_behind_too_many, "store:backlog", "too many blocks of the region waited for tier far"),
    (store_meets_an_open_circuit, "store:circuit_open", "was not stored, because tier far was cut off"),
    (store_is_late, "store:deadline", "waited longer than job_deadline_s of tier far"),
    (store_meets_a_full_queue, "store:queue_full", "too many stores were under way in tier far"),
    (storage_is_full, "store:StoreFullError", "tier disk was full"),
    (storage_may_not_be_written, "store:StorePermissionError", "tier far failed (StorePermissionError)"),
    (tier_is_read_only, "store:read_only", "its tiers are read-only"),
    (copy_into_the_region_fails, "store:copy_failed", "its copy into the region failed"),
    (block_outlives_its_ttl, "removed:ttl", "tier disk removed the next block"),
    (block_makes_room_for_others, "removed:capacity", "to make room"),
    (somebody_removes_the_files, "removed:elsewhere", "by hand"),
    (block_is_damaged, "load:corrupt", "tier disk has the next block, but it is damaged"),
    (load_raises_io_errors, "load:StoreUnavailableError", "from tier far failed (StoreUnavailableError)"),
    (load_hangs, "load:late", "from tier slow took longer than 3 s and was given up"),
    (loading_is_slower_than_computing, "load:slower", "from tier disk would take 4.2 s, and computing it 0.9 s"),
    (loading_falls_behind_computing, "load:behind", "from tier slow was given up after"),
    (load_of_another_request_falls_behind, "load:behind", "from tier slow was given up after"),
    (submission_of_a_load_raises, "load:error", "from tier broken failed (error)"),
    (tier_is_never_loaded_from, "load:never", "its option load: never"),
    (region_has_no_room_to_load, "region:no_room", "tier near has the next block, but the region had no room"),
    (region_is_smaller_than_the_request, "region:too_small", "needs 8 blocks, and the region has 4"),
    (loads_fill_the_tiers_share, "region:tier_share", "fill its share of the region"),
    (storage_is_silent, "lookup:deadline", "tier far did not answer in time"),
    (lookups_take_too_long, "lookup:total", "tier slow had not answered all lookups"),
    (lookup_raises_an_error, "lookup:error", "tier far could not be asked"),
    (tier_is_cut_off, "lookup:circuit_open", "tier far is cut off"),
    (request_excludes_the_tiers, "lookup:request", "the request itself excludes the tiers"),
    (cache_was_reset, "region:reset", "the engine's cache was reset"),
    (region_evicted_it_and_there_is_no_tier, "region:evicted", "the region evicted the next block"),
    (engine_only_produces, "lookup:role", "kv_role does not let it load"),
]


@pytest.mark.parametrize(("cause", "reason", "words"), CAUSES, ids=[cause.__name__ for cause, _, _ in CAUSES])
def test_explain_names_the_seeded_cause(cause: Callable[[Path], str], reason: str, words: str, tmp_path: Path) -> None:
    line = cause(tmp_path / "kv")
    assert json.loads(line)["reason"] == reason
    (tmp_path / "requests.jsonl").write_text(line + "\n")
    told = ok("explain", str(tmp_path / "requests.jsonl"))
    assert words in told.splitlines()[0]
    assert f"100%  {reason}: " in told


# ---- what the causes leave out


def test_every_reason_has_a_text_for_records_with_and_without_facts() -> None:
    for reason in (*REASONS, "store:SomeError", "lookup:", "invented"):
        assert "{" not in why(reason)
        assert why(reason, "disk", {"deadline_s": "many", "expected_s": None})
        assert sentence(RequestRecord(time=0.0, request="r", reason=reason))
    assert why("store:SomeError", "disk") == "the next block was not stored: tier disk failed (SomeError)"


def test_reason_of_an_earlier_miss_is_dropped_once_the_block_is_found() -> None:
    engine = Engine()
    engine.slots.record.missed("reader", KEYS[1])
    engine.store()
    assert engine.ask() == 4
    assert json.loads(engine.end())["reason"] == "found"


def test_record_shows_where_blocks_were_found(tmp_path: Path) -> None:
    engine = Engine().files(tmp_path / "kv")
    engine.store(KEYS[:3])
    engine.forget_region()
    engine.store(KEYS[:1])
    assert engine.ask(KEYS[:4]) == 3
    assert engine.manager.prepare_store(KEYS[3:6], ReqContext("reader")) is not None
    line = json.loads(engine.end())
    assert (line["asked"], line["loaded"], line["computed"]) == (4, 3, 3)
    assert line["found"] == {"region": 1, "disk": 2}
    assert KEYS[3].hex().startswith(line["block"])
    assert engine.slots.metrics.value("kvtiers_requests_total", "not_stored") == 1


class Babbler(ScriptedTier):
    """A tier whose reasons make no sense."""

    nearest = {"namespace": 5, "differs": [], (): "fields"}  # type: ignore  # noqa: RUF012

    def __init__(self, view: memoryview, reasons: Any, explanation: str) -> None:
        super().__init__(view)
        self.reasons, self.explanation = reasons, explanation

    def take_reasons(self) -> Any:
        return self.reasons

    def explain_miss(self, *_: object) -> Any:
        return self.explanation


@pytest.mark.parametrize("explanation", ["", "{tier.__class__} %s \n"])
@pytest.mark.parametrize(
    "reasons", [5, [5], [("x",)], [("x", [[]])], [("x", 5)], [(None, [b"k"])], [("other_namespace", [KEYS[0]])], None]
)
def test_malformed_reasons_of_a_tier_are_contained(reasons: Any, explanation: str, tmp_path: Path) -> None:
    engine = Engine()
    engine.with_tiers(Babbler(engine.view, reasons, explanation))
    engine.store(KEYS[2:4])
    assert engine.ask() == 0
    (tmp_path / "requests.jsonl").write_text(engine.end() + "\n")
    assert ok("explain", str(tmp_path / "requests.jsonl"))


def test_memory_of_the_record_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "BLOCKS_MAX", 1000)
    monkeypatch.setattr(record_module, "REQUESTS_MAX", 100)
    metrics = Metrics()
    record = Record(metrics)
    for number in range(20):
        keys = [block_key(number * 500 + at) for at in range(500)]
        record.blocks("removed:ttl", keys, "disk")
        assert len(record._fates) <= 3000
        assert len(record._late) <= 3000
        assert record._fates.get(keys[0]) is not None
    for number in range(1000):
        record.missed(f"r{number}", KEYS[0], f"store:Error{number}")
        if number >= 500:
            record.end(f"r{number}")
    assert len(record._requests) <= 100
    counted = [sample for sample in metrics.snapshot() if sample.name == "kvtiers_requests_total"]
    assert len(counted) == REASONS_MAX + 1
    assert metrics.value("kvtiers_requests_total", "other") == 500 - REASONS_MAX


def test_warning_about_a_tier_without_loads_is_logged_once_an_hour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, metrics = Clock(), Metrics()
    record = Record(metrics, clock)

    def pass_time(seconds: float) -> list[str]:
        caplog.clear()
        clock.advance(seconds)
        record.look_at_use(["disk"])
        return [entry.getMessage() for entry in caplog.records]

    record.look_at_use(["disk"])
    metrics.inc("kvtiers_bytes_total", "disk", "store", by=UNUSED_BYTES)
    for number in range(3):
        record.missed(f"r{number}", KEYS[0], "store:circuit_open" if number else "", "disk")
        record.end(f"r{number}")
    assert pass_time(UNUSED_S - 1) == []
    (told,) = pass_time(61)
    assert told.startswith(
        "tier disk: stored 10.7 GB in 61 min, loaded 0. The likeliest reason: of 3 requests, 2 say: "
    )
    assert "tier disk was cut off" in told
    assert metrics.value("kvtiers_stored_since_load_bytes", "disk") == UNUSED_BYTES
    assert pass_time(UNUSED_S - 1) == []
    assert len(pass_time(61)) == 1
    metrics.inc("kvtiers_bytes_total", "disk", "load", by=1)
    assert pass_time(2 * UNUSED_S) == []
    assert metrics.value("kvtiers_stored_since_load_bytes", "disk") == 0


def test_engine_that_only_stores_gets_no_warning_about_tiers_without_loads(caplog: pytest.LogCaptureFixture) -> None:
    clock, metrics = Clock(), Metrics()
    record = Record(metrics, clock)
    record.expects_loads = False
    record.look_at_use(["disk"])
    metrics.inc("kvtiers_bytes_total", "disk", "store", by=UNUSED_BYTES)
    clock.advance(2 * UNUSED_S)
    record.look_at_use(["disk"])
    assert caplog.records == []
    assert metrics.value("kvtiers_stored_since_load_bytes", "disk") == UNUSED_BYTES


# ---- the file of trace_requests


def test_full_trace_file_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "FILE_BYTES_MAX", 1000)
    path = tmp_path / "requests.jsonl"
    for number in range(50):
        trace = TraceFile(str(path))
        trace.write(f"{number:099}")
        trace.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["requests.jsonl", "requests.jsonl.1"]
    lines = (tmp_path / "requests.jsonl.1").read_text().split() + path.read_text().split()
    assert [int(line) for line in lines] == list(range(50 - len(lines), 50))
    assert 10 <= len(lines) <= 20
    assert path.stat().st_mode & 0o777 == 0o600


def test_trace_file_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = TraceFile(str(tmp_path / "none" / "requests.jsonl"))
    for _ in range(3):
        trace.write("{}")
        wait_for(lambda: not trace._lines)
    trace.close()
    assert len([entry for entry in caplog.records if "trace_requests" in entry.getMessage()]) == 1


def test_trace_lines_waiting_for_a_hung_disk_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gate, began = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        began.set()
        gate.wait()

    monkeypatch.setattr(TraceFile, "_append", hang)
    trace = TraceFile(str(tmp_path / "requests.jsonl"))
    trace.write("{}")
    wait_for(began.is_set)
    for _ in range(2 * trace_file.LINES_MAX):
        trace.write("{}")
    assert len(trace._lines) == trace_file.LINES_MAX
    gate.set()
    trace.close()
