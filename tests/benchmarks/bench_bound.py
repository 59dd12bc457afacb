"""What a bound costs in a bucket of a thousand engines: ``python -m tests.benchmarks.bench_bound``.

The real collector runs over a simulated bucket, by a virtual clock; no byte is stored. A simulated block stands for
many real ones (``--scale``): its size, the keys of a listing request and the collector's page are scaled alike, so
requests, sums and times are those of the real root.

Assumed: blocks of 4 MiB; 120 ms for a request that lists 1,000 keys, 50 ms and 0.25 ms a key for one that deletes up to
1,000 (all are made one after the other); 20 ms for a small record; $0.005 per 1,000 PUT and LIST requests, $0.0004 per
1,000 GET requests, deletions free. Writers hear "full" a poll late. Half of all accesses are to new blocks; the others
reuse a block whose age in accesses is drawn from a Zipf-like law. Exact LRU is computed for the same accesses, with
98 % of the same bytes, without any delay. S3 does not record reads, so both go by the time of writing. The cost of the
blocks' own requests is not included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.capacity import walker as walker_module
from kvtiers.tiers.capacity.collector import Collector
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.records import OWN_PREFIX
from kvtiers.tiers.capacity.usage import Usage, publish_usage
from kvtiers.tiers.store import Capabilities, KeyInfo
from kvtiers.tiers.stores.memory import MemoryStore
from tests.identity import FakeSpec, block_key

BLOCK_BYTES = 4 << 20
POLL_S = 5.0
LIST_S, DELETE_S, DELETE_KEY_S, RECORD_S = 0.120, 0.050, 0.00025, 0.020
PUT_DOLLARS, GET_DOLLARS = 0.005 / 1000, 0.0004 / 1000
PAGE = 1000
MAPPER = FileMapper.from_offloading_spec("", FakeSpec())


class Bucket(MemoryStore):
    """Records are real blobs; blocks are numbers in the order of their hashes, with the time of their put.

    Args:
        slots: how many simulated blocks fit at most; block ``n`` has the n-th name.
        scale: real blocks for each simulated one.
    """

    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=True)

    def __init__(self, slots: int, scale: int) -> None:
        self.now = 1e9
        super().__init__(clock=lambda: self.now)
        self.scale = scale
        self.block_bytes = BLOCK_BYTES * scale
        self.put_at = np.zeros(slots)  # 0: not stored
        self.stored = 0
        self.lists = self.puts = self.gets = self.deletes = 0
        self.prefix = MAPPER.block_prefix

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        self.puts += 1
        self.now += RECORD_S
        return super().put(key, parts, overwrite=overwrite)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self.gets += 1
        self.now += RECORD_S
        super().get_into(key, parts)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        self.lists += 1
        self.now += LIST_S if not prefix else RECORD_S
        yield from super().keys(prefix or OWN_PREFIX)
        if prefix:
            return
        listed = 0
        for number in range(len(self.put_at)):
            at = self.put_at[number]
            if at:
                listed += self.scale
                if listed >= PAGE:
                    listed = 0
                    self.lists += 1 if self.scale <= PAGE else self.scale // PAGE
                    self.now += LIST_S * max(1.0, self.scale / PAGE)
                yield KeyInfo(f"{self.prefix}{number}", self.block_bytes, float(int(at)))

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        requests = max(1, len(keys) * self.scale // PAGE)
        self.deletes += requests
        self.now += DELETE_S * requests + DELETE_KEY_S * len(keys) * self.scale
        for key in keys:
            self.put_at[int(key.removeprefix(self.prefix))] = 0.0
        self.stored -= len(keys)
        return [None] * len(keys)

    @property
    def stored_bytes(self) -> int:
        return self.stored * self.block_bytes


class Workload:
    """Accesses of a fleet: each is to a new block, or to one of the past, recent ones more often."""

    def __init__(self, seed: int, slots: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._slots = slots
        self._order: list[int] = []  # block of each past access that put or found something
        self.number = 0

    def take(self, count: int) -> list[int]:
        """The next accesses, as block numbers; a number that is new is that of a new block."""
        fresh = self._rng.random(count) < 0.5
        u = self._rng.random(count)
        accesses = []
        for is_new, share in zip(fresh, u, strict=True):
            if is_new or not self._order:
                block, self.number = self.number, self.number + 1
            else:
                # Log-uniform over all past accesses: the density falls with 1/age, as with Zipf's law.
                back = int(len(self._order) ** share)
                block = self._order[-max(1, back)]
            self._order.append(block)
            accesses.append(block)
        return accesses


class ExactLRU:
    """The same bytes, and nothing but the least recently written goes. S3 does not record reads."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: dict[int, None] = {}
        self.hits = self.asked = 0

    def access(self, block: int, *, counts: bool) -> None:
        self.asked += counts
        if block in self.blocks:
            self.hits += counts
            return
        self.blocks[block] = None
        if len(self.blocks) > self.capacity:
            del self.blocks[next(iter(self.blocks))]


@dataclass
class Row:
    label: str
    overshoot: float
    lowest: float
    lists_h: float
    puts_h: float
    gets_h: float
    dollars_h: float
    wanted: float
    put: float
    hits: float
    exact_hits: float


def collector_over(bucket: Bucket, max_bytes: int) -> Collector:
    policy = CapacityPolicy(max_bytes=max_bytes, poll_s=POLL_S, every_s=3600.0, block_bytes=BLOCK_BYTES)

    def clock() -> float:
        return bucket.now

    return Collector(bucket, policy, clock=clock, monotonic=clock, since_boot=clock)


def poll(collector: Collector, bucket: Bucket) -> float:
    """A poll and its pause. Returns how long they took."""
    began = bucket.now
    collector.poll()
    if not collector.is_urgent:
        bucket.now = max(bucket.now, began + POLL_S)
    return bucket.now - began


def fleet(label: str, blocks: int, scale: int, writers: int, bytes_per_s: float, hours: float) -> Row:
    """Writers at full speed on a root that is full from the start."""
    capacity = blocks // scale
    slots = 4 * capacity
    bucket = Bucket(slots, scale)
    max_bytes = capacity * bucket.block_bytes
    workload, exact = Workload(1, slots), ExactLRU(int(capacity * 0.98))
    rng = np.random.default_rng(2)
    slot_of: dict[int, int] = {}
    block_in: dict[int, int] = {}
    free = list(rng.permutation(slots))
    stored_at: dict[int, float] = {}

    def store(block: int) -> None:
        while True:
            slot = free.pop()
            if not bucket.put_at[slot]:
                break
        old = block_in.get(slot)
        if old is not None and slot_of.get(old) == slot:
            del slot_of[old]
        slot_of[block], block_in[slot] = slot, block
        bucket.put_at[slot] = bucket.now
        bucket.stored += 1
        stored_at[block] = bucket.now

    def is_stored(block: int) -> bool:
        slot = slot_of.get(block)
        return slot is not None and bucket.put_at[slot] > 0

    rate = writers * bytes_per_s / bucket.block_bytes * 1.0
    for block in workload.take(int(capacity * 3.5)):  # the past
        exact.access(block, counts=False)
    turnover_s = capacity / rate
    for position, block in enumerate(list(exact.blocks)):
        store(block)
        bucket.put_at[slot_of[block]] = bucket.now - turnover_s * (1 - position / len(exact.blocks))
    publish_usage(bucket, Usage(listed=1, listed_at=bucket.now, bytes=bucket.stored_bytes))
    collector = collector_over(bucket, max_bytes)
    began, owed = bucket.now, 0.0
    hits = asked = wanted = put = 0
    highest = lowest = bucket.stored_bytes
    settled = False
    counts, measured_at = (0, 0, 0), 0.0
    full_before = ""
    pending = 0
    while bucket.now - began < hours * 3600:
        passed = poll(collector, bucket)
        collector.note_put(pending)  # published a poll late
        pending = 0
        if not settled and collector.knows_bytes and bucket.now - began > hours * 900:
            settled, counts, measured_at = True, (bucket.lists, bucket.puts, bucket.gets), bucket.now
            highest = lowest = bucket.stored_bytes
        owed += passed * rate
        # Writers put what they miss: an access costs a put only then, so the rate is one of puts.
        while owed >= 1:
            (block,) = workload.take(1)
            exact.access(block, counts=settled)
            asked += settled
            if is_stored(block):
                hits += settled
                continue
            owed -= 1
            wanted += settled
            if full_before:
                continue
            if len(free) < 10:
                free.extend(int(slot) for slot in rng.permutation(np.flatnonzero(bucket.put_at == 0)))
            store(block)
            put += settled
            pending += bucket.block_bytes
        full_before = collector.full  # heard a poll late
        highest, lowest = max(highest, bucket.stored_bytes), min(lowest, bucket.stored_bytes)
    measured_h = (bucket.now - measured_at) / 3600
    lists, puts, gets = (
        now - before for now, before in zip((bucket.lists, bucket.puts, bucket.gets), counts, strict=True)
    )
    # Each of the other writers publishes and asks in every poll; the collector reads all records.
    polls = int(measured_h * 3600 / POLL_S)
    puts += writers * polls
    gets += 2 * writers * polls
    dollars = (lists + puts) * PUT_DOLLARS + gets * GET_DOLLARS
    return Row(
        label,
        highest / max_bytes - 1,
        lowest / max_bytes,
        lists / measured_h,
        puts / measured_h,
        gets / measured_h,
        dollars / measured_h,
        wanted * bucket.block_bytes / measured_h / 3600,
        put * bucket.block_bytes / measured_h / 3600,
        hits / max(1, asked),
        exact.hits / max(1, exact.asked),
    )


def halved(blocks: int, scale: int) -> tuple[float, float, float]:
    """Hours until a root is below its mark after ``max_bytes`` was halved, and the LIST requests and dollars for it."""
    capacity = blocks // scale
    bucket = Bucket(capacity, scale)
    bucket.put_at[:] = bucket.now - np.random.default_rng(3).random(capacity) * 86_400
    bucket.stored = capacity
    collector = collector_over(bucket, bucket.stored_bytes // 2)
    collector.note_put(0)
    began = bucket.now
    while collector.full or bucket.stored_bytes > collector._policy.max_bytes:  # type: ignore[operator]
        poll(collector, bucket)
    return (bucket.now - began) / 3600, bucket.lists, bucket.lists * PUT_DOLLARS


class Endless(Bucket):
    """As many blocks as one likes, without memory for them."""

    def __init__(self, count: int) -> None:
        super().__init__(0, 1)
        self.count = count
        self.blocks_of: list[str] = [MAPPER.relative_name(block_key(number)) for number in range(PAGE)]

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        yield from super().keys(prefix)
        if not prefix:
            for number in range(self.count):
                if number and number % PAGE == 0:
                    self.lists += 1
                    self.now += LIST_S
                yield KeyInfo(self.blocks_of[number % PAGE], self.block_bytes, self.now - 3600.0)


def cost_of_a_poll(blocks: int) -> tuple[float, float, float]:
    """CPU milliseconds, LIST requests and all requests of a poll during a listing, while nothing is missing."""
    bucket = Endless(blocks)
    publish_usage(bucket, Usage(listed=1, listed_at=bucket.now - 7200.0, bytes=blocks * bucket.block_bytes))
    collector = collector_over(bucket, 4 * blocks * bucket.block_bytes)
    collector.note_put(1)
    poll(collector, bucket)  # begins to work, and begins a listing
    before, began = (bucket.lists, bucket.lists + bucket.puts + bucket.gets), time.process_time()
    collector.note_put(1)
    poll(collector, bucket)
    cpu_ms = 1000 * (time.process_time() - began)
    return cpu_ms, bucket.lists - before[0], bucket.lists + bucket.puts + bucket.gets - before[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000_000)
    parser.add_argument("--scale", type=int, default=5000, help="real blocks for each simulated one")
    parser.add_argument("--writers", type=int, default=1000)
    parser.add_argument(
        "--hours", type=float, default=8.0, help="of virtual time; the last three quarters are measured"
    )
    options = parser.parse_args()
    console = Console(width=150)
    real = options.blocks * BLOCK_BYTES / 1e12
    title = f"{options.blocks:,} blocks of 4 MiB, {real:,.0f} TB, a bucket"
    table = Table(title=f"{title} (one simulated block for {options.scale:,})")
    names = "writers|over max_bytes|least used|LIST/h|PUT/h|GET/h|$/h|TB/h wanted|TB/h put|hits|of exact LRU"
    for name in names.split("|"):
        table.add_column(name, justify="right")
    scaled: dict[str, Any] = {
        "is_block": lambda key: not key.startswith(OWN_PREFIX),
        "PAGE_KEYS": max(1, PAGE // options.scale),
        "SAMPLE_BLOBS_MIN": 500,
        "SAMPLE_BLOBS_MAX": 1000,
    }
    with (
        mock.patch.multiple(walker_module, **scaled),
        mock.patch("kvtiers.tiers.capacity.collector.KEYS_PER_S", 1000 / options.scale),
    ):
        some = options.writers * 3 // 10
        for writers, label, rate, hours in (
            (some, f"{some} at 20 MB/s", 20e6, options.hours),
            (options.writers, f"{options.writers} at 20 MB/s", 20e6, options.hours),
            (options.writers, f"{options.writers} at 2 GB/s", 2e9, options.hours / 4),
        ):
            row = fleet(label, options.blocks, options.scale, writers, rate, hours)
            table.add_row(
                row.label,
                f"{row.overshoot:+.1%}",
                f"{row.lowest:.1%}",
                f"{row.lists_h:,.0f}",
                f"{row.puts_h:,.0f}",
                f"{row.gets_h:,.0f}",
                f"{row.dollars_h:.2f}",
                f"{row.wanted / 1e12 * 3600:,.1f}",
                f"{row.put / 1e12 * 3600:,.1f}",
                f"{row.hits:.3f}",
                f"{row.hits / max(1e-9, row.exact_hits):.3f}",
            )
        console.print(table)
        hours, lists, dollars = halved(options.blocks, options.scale)
        console.print(f"max_bytes halved: below it after {hours:.1f} h, {lists:,.0f} LIST requests, ${dollars:.2f}")
    table = Table(title="a poll while nothing is missing, during a listing")
    for name in ("blocks", "CPU ms", "LIST", "all requests"):
        table.add_column(name, justify="right")
    for blocks in (10_000, 1_000_000, 100_000_000):
        cpu_ms, lists_of_poll, requests = cost_of_a_poll(blocks)
        table.add_row(f"{blocks:,}", f"{cpu_ms:.1f}", f"{lists_of_poll:.0f}", f"{requests:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
