"""What an engine gets of lookups: through BlockManager, over files and over storage of a given speed.

    python -m tests.benchmarks.bench_engine_lookups [--where FOLDER] [--json FILE]

Requests wait for their prompts as in vLLM: in every other step all of them are asked of, key by key up to the first
miss, and in the others only whether they are waiting. The region has no room, so that what is measured is finding and
not loading; a block counts as found when it is a hit. Beside ours: the time that the storage itself takes for so many
answers, and the same loop over a dictionary.

A second table is about prompts without a hit, one or 16 at once, from their first lookup until their blocks are stored:
the time that the manager adds to each step, with the fs tier and without a tier.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.options import ManagerOptions
from kvtiers.connector.core.slots import Slots
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import ReqContext, SecondaryTierManager
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.blocks.seal import TRAILER_BYTES
from kvtiers.tiers.builtin import BuiltInTier
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.tier.store_tier import StoreTierManager
from tests.identity import FakeSpec, block_key
from tests.soak.ledger import settled_heap
from tests.tiers.server.in_threads import in_threads

ROW_BYTES = 4096
SIZES = ((1, 127), (1, 2_048), (1, 8_192), (32, 2_048))  # requests, keys of each
SPEEDS = (2_000, 5_300, 20_000)  # lookups a second
STEP_PAUSE_S = 0.0003  # as an idle engine's; a thread needs the GIL meanwhile
LIMIT_S = 60.0
PROMPT_KEYS = 64
AT_ONCE = (1, 16)
ROUNDS = 60
FORWARD_S = 0.005  # a forward pass between two steps
OWED_GOAL_US, FIRST_GOAL_MS, LATER_GOAL_MS = 1.0, 70.0, 15.0


@dataclass(frozen=True)
class Row:
    """One storage and size. CPU is the scheduler thread's.

    Attributes:
        seconds: until every request knew all.
        storage_s: what the storage takes for it at least; None where that is not known.
        first_ms, later_ms: a step in which all keys are new; the median of the others.
        later_us, dict_us: CPU for each key in those, and of the same loop over a dictionary.
        quiet_ms: the median of steps with ``continue_wait`` only, and with what answers take that come meanwhile.
    """

    storage: str
    requests: int
    keys: int
    found: int
    seconds: float
    storage_s: float | None
    first_ms: float
    later_ms: float
    later_us: float
    dict_us: float
    quiet_ms: float


class PacedStore(MemoryStore):
    """Has every block, and answers so many lookups a second."""

    def __init__(self, per_second: float) -> None:
        super().__init__()
        self._per_second = per_second
        self._turn = threading.Lock()

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        with self._turn:
            time.sleep(len(keys) / self._per_second)
        return [ROW_BYTES + TRAILER_BYTES] * len(keys)


@contextmanager
def paced_tier(per_second: float, view: memoryview) -> Iterator[SecondaryTierManager]:
    """A tier on storage of that speed."""
    spec = FakeSpec()
    mapper = FileMapper.from_offloading_spec("", spec)
    tier = StoreTierManager(spec, view, "paced", make_backend=in_threads(PacedStore(per_second)), mapper=mapper)
    try:
        yield tier
    finally:
        tier.shutdown()


@contextmanager
def files_tier(root: str, view: memoryview) -> Iterator[SecondaryTierManager]:
    """The fs tier, as it is by default."""
    tier = BuiltInTier(FakeSpec(), view, "fs", root_dir=root, min_free=0)
    try:
        time.sleep(1.0)  # its worker processes begin
        yield tier
    finally:
        tier.shutdown()


def make_files(tier: SecondaryTierManager, root: str, keys: Sequence[OffloadKey]) -> None:
    """Files of a block's size, all holes: nobody loads them."""
    assert isinstance(tier, StoreTierManager)
    for key in keys:
        path = os.path.join(root, tier.mapper.relative_name(key))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(ROW_BYTES + TRAILER_BYTES)


def cpu_s(step: Callable[[], None]) -> float:
    """CPU that this thread takes for it."""
    began = time.thread_time()
    step()
    return time.thread_time() - began


def measure(storage: str, tier: SecondaryTierManager, prompts: Sequence[Sequence[OffloadKey]], speed: float) -> Row:
    """Let requests find their prompts."""
    manager = BlockManager(Slots(1), [tier], ManagerOptions(promotion_wait_s=1e6))
    assert manager.prepare_store([block_key(10**12)], ReqContext("holds the region")) is not None
    contexts = [ReqContext(f"{storage}-{number}") for number in range(len(prompts))]
    states = manager._waits.by_id

    def ask() -> None:
        for context, keys in zip(contexts, prompts, strict=True):
            for key in keys:
                if manager.lookup(key, context) is False:
                    break
        manager.on_schedule_end()

    waiting: list[float] = []

    def ask_only_for_news() -> None:
        for context in contexts:
            manager.continue_wait(context.req_id)
        manager.on_schedule_end()

    began = time.monotonic()
    first_s = cpu_s(ask)
    later: list[float] = []
    while any(states[context.req_id].owed for context in contexts) and time.monotonic() - began < LIMIT_S:
        time.sleep(STEP_PAUSE_S)
        waiting.append(cpu_s(ask_only_for_news))
        time.sleep(STEP_PAUSE_S)
        later.append(cpu_s(ask))
    seconds = time.monotonic() - began
    count = sum(map(len, prompts))
    found = sum(len(states[context.req_id].hits) + len(states[context.req_id].coming) for context in contexts)
    for context in contexts:
        manager.on_request_finished(context)
    later_s = statistics.median(later) if later else 0.0
    return Row(
        storage, len(prompts), count // len(prompts), found, seconds, count / speed if speed else None, first_s * 1e3,
        later_s * 1e3, later_s / count * 1e6, over_a_dict(prompts), statistics.median(waiting) * 1e3,
    )  # fmt: skip


def over_a_dict(prompts: Sequence[Sequence[OffloadKey]]) -> float:
    """CPU for each key, µs, of asking a dictionary."""
    known = dict.fromkeys((key for keys in prompts for key in keys), None)

    def ask() -> None:
        for keys in prompts:
            for key in keys:
                known.get(key)

    return cpu_s(ask) / len(known) * 1e6


def rows(where: str) -> Iterator[Row]:
    """Every storage and size."""
    view = SharedOffloadRegion.anonymous(1, ROW_BYTES).create_kv_memoryview()
    prompts = {
        (requests, count): [
            [block_key(1_000_000 * place + 10_000 * request + n) for n in range(count)] for request in range(requests)
        ]
        for place, (requests, count) in enumerate(SIZES)
    }
    root = tempfile.mkdtemp(prefix="kvtiers-bench-", dir=where)
    try:
        for size in SIZES:
            with files_tier(root, view) as tier:
                make_files(tier, root, [key for keys in prompts[size] for key in keys])
                yield measure("fs", tier, prompts[size], 0.0)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for per_second in SPEEDS:
        for size in SIZES:
            with paced_tier(per_second, view) as tier:
                yield measure(f"{per_second:,}/s", tier, prompts[size], per_second)


@dataclass(frozen=True)
class StepRow:
    """Steps that serve prompts without a hit. Times are CPU time of the scheduler's thread.

    Attributes:
        tier: "none" is the region alone.
        prompt_ms: sum of all steps divided by the number of prompts.
        p99_ms, worst_ms: 99th percentile and maximum of single steps.
    """

    tier: str
    prompts: int
    prompt_ms: float
    p99_ms: float
    worst_ms: float


def new_prompts(manager: BlockManager, at_once: int, steps_ms: list[float], first: int) -> None:
    """Serve ``at_once`` new prompts, from their first lookup to the end of their store."""
    prompts = {
        ReqContext(f"new-{first}-{number}"): [block_key(first + PROMPT_KEYS * number + n) for n in range(PROMPT_KEYS)]
        for number in range(at_once)
    }
    asking, computed = dict(prompts), dict[ReqContext, Sequence[OffloadKey]]()
    while asking or computed:
        began = time.thread_time()
        for keys in computed.values():
            manager.complete_store(keys)
        for context in computed:
            manager.on_request_finished(context)
        computed = {}
        for context, keys in list(asking.items()):
            if manager.continue_wait(context.req_id):
                continue
            is_open = False
            for key in keys:  # as vLLM's connector: an open answer does not end the loop, a miss does
                answer = manager.lookup(key, context)
                is_open |= answer is None
                if answer is False:
                    break
            if not is_open:
                computed[context] = asking.pop(context)
        for context, keys in computed.items():
            manager.prepare_store(keys, context)
        manager.take_events()
        manager.on_schedule_end()
        steps_ms.append((time.thread_time() - began) * 1e3)
        time.sleep(FORWARD_S)


def step_rows(where: str) -> Iterator[StepRow]:
    """Without a tier and with the fs tier, each number of prompts."""
    slots = 4 * max(AT_ONCE) * PROMPT_KEYS
    view = SharedOffloadRegion.anonymous(slots, ROW_BYTES).create_kv_memoryview()
    root = tempfile.mkdtemp(prefix="kvtiers-bench-", dir=where)
    try:
        with files_tier(root, view) as tier:
            found: dict[tuple[str, int], list[float]] = {}
            managers = {name: BlockManager(Slots(slots), tiers) for name, tiers in (("none", []), ("fs", [tier]))}
            turns = [(at_once, name) for _ in range(ROUNDS) for at_once in AT_ONCE for name in managers]
            with settled_heap():
                for number, (at_once, name) in enumerate(turns):
                    new_prompts(managers[name], at_once, found.setdefault((name, at_once), []), 10_000 * number)
            for (name, at_once), steps_ms in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
                p99_ms = statistics.quantiles(steps_ms, n=100)[98]
                yield StepRow(name, at_once, sum(steps_ms) / (ROUNDS * at_once), p99_ms, max(steps_ms))
    finally:
        shutil.rmtree(root, ignore_errors=True)


HEAD = (
    "storage",
    "keys",
    "found",
    "s",
    "storage alone s",
    "first step ms",
    "later ms",
    "µs a key",
    "a dict",
    "quiet ms",
)


def cells(row: Row) -> list[str]:
    """A row as text."""
    keys = f"{row.keys:,}" if row.requests == 1 else f"{row.requests} x {row.keys:,}"
    return [
        row.storage, keys, f"{row.found:,}", f"{row.seconds:.2f}",
        "" if row.storage_s is None else f"{row.storage_s:.2f}", f"{row.first_ms:.1f}", f"{row.later_ms:.1f}",
        f"{row.later_us:.2f}", f"{row.dict_us:.2f}", f"{row.quiet_ms:.2f}",
    ]  # fmt: skip


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--where", default="/dev/shm", help="folder for the files")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--steps-only", action="store_true", help="only the second table")
    arguments = parser.parse_args()
    table = Table(*HEAD, title="Lookups through the manager; CPU is the scheduler thread's")
    measured = []
    for row in [] if arguments.steps_only else rows(arguments.where):
        measured.append(row)
        table.add_row(*cells(row))
    console = Console(width=120)
    if measured:
        console.print(table)
    steps = list(step_rows(arguments.where))
    table = Table(
        *("tier", "prompts at once", "ms a prompt", "p99 ms a step", "worst"),
        title=f"Prompts of {PROMPT_KEYS} keys that are not stored; CPU time of the scheduler's thread",
    )
    for step in steps:
        times = (f"{ms:.2f}" for ms in (step.prompt_ms, step.p99_ms, step.worst_ms))
        table.add_row(step.tier, str(step.prompts), *times)
    console.print(table)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    console.print(
        f"Goals: all found, or the prefix known after 15 s; {OWED_GOAL_US:g} µs a key; 32 x 2,048 keys "
        f"{FIRST_GOAL_MS:g} ms at first, {LATER_GOAL_MS:g} ms later. Load {load:.1f} on {cores} cores."
    )
    if arguments.json:
        content = {"rows": list(map(asdict, measured)), "steps": list(map(asdict, steps)), "load": load, "cores": cores}
        arguments.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
