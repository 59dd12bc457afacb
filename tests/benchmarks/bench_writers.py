"""How long a writer waits for room where many writers share a root: ``python -m tests.benchmarks.bench_writers``.

Each call of the storage takes 30 ms (``--delay-ms``), as a bucket in another region would. The writers are records; one
of them asks for a grant. Beside it: the least that any protocol needs which publishes before it reads, five calls one
after the other (publish, measurement, listing, records all at once, measurement), and reading one record at a time.

The second table is what puts feel of that: blocks of 1 MiB by four threads, through the bound and without one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

from rich.console import Console
from rich.table import Table

from kvtiers.tiers.capacity import usage
from kvtiers.tiers.capacity.account import Account, BoundedStore
from kvtiers.tiers.capacity.usage import Measured, publish_measured
from kvtiers.tiers.store import KeyInfo
from kvtiers.tiers.stores.memory import MemoryStore

BLOCK_BYTES = 1 << 20
ROOT_BYTES = 1 << 40
LEAST_CALLS = 5
THREADS = 4


class FarStore(MemoryStore):
    """Each call waits for a network."""

    capabilities = replace(MemoryStore.capabilities, latency_bound=True)

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        time.sleep(self.delay_s)
        return super().put(key, parts, overwrite=overwrite)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        time.sleep(self.delay_s)
        super().get_into(key, parts)

    def size(self, key: str) -> int | None:
        time.sleep(self.delay_s)
        return super().size(key)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        time.sleep(self.delay_s)
        return super().keys(prefix)


def grant_s(writers: int, delay_s: float, readers: int, rounds: int) -> float:
    """Seconds of a grant, the median."""
    store = FarStore(0.0)
    publish_measured(store, Measured("m", 0, 0, {}, 0.0), None)
    for _ in range(writers - 1):
        Account(store, ROOT_BYTES).take(BLOCK_BYTES, "k")
    asker = Account(store, ROOT_BYTES)
    store.delay_s = delay_s
    times = []
    with mock.patch.object(usage, "READERS_MAX", readers):
        for _ in range(rounds + 1):  # the first also gives it a name
            asker._available = 0
            began = time.perf_counter()
            asker.take(BLOCK_BYTES, "k")
            times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def blocks_a_second(writers: int, delay_s: float, blocks: int, *, bounded: bool) -> float:
    """Blocks that four threads store in a second while other writers share the root."""
    store = FarStore(0.0)
    publish_measured(store, Measured("m", 0, 0, {}, 0.0), None)
    for _ in range(writers - 1):
        Account(store, ROOT_BYTES).take(BLOCK_BYTES, "k")
    target = BoundedStore(store, Account(store, ROOT_BYTES)) if bounded else store
    block = [memoryview(bytes(BLOCK_BYTES))]
    target.put("the first takes a grant", block)
    store.delay_s = delay_s
    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        # One name: the memory that blocks take is not what is measured.
        list(threads.map(lambda _: target.put("b", block, overwrite=True), range(blocks)))
    return blocks / (time.perf_counter() - began)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay-ms", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=1024)
    arguments = parser.parse_args()
    delay_s = arguments.delay_ms / 1e3
    table = Table(title=f"A grant of room, {arguments.delay_ms:g} ms a call, median of {arguments.rounds}")
    for column in ("writers", "s", "one record at a time, s", "least, s"):
        table.add_column(column, justify="right")
    for writers in (1, 10, 50, 100):
        ours, serial = (grant_s(writers, delay_s, readers, arguments.rounds) for readers in (usage.READERS_MAX, 1))
        table.add_row(str(writers), f"{ours:.2f}", f"{serial:.2f}", f"{LEAST_CALLS * delay_s:.2f}")
    Console().print(table)
    title = f"Blocks of 1 MiB a second, {THREADS} threads, {arguments.delay_ms:g} ms a call, {arguments.blocks} blocks"
    table = Table(title=title)
    for column in ("writers", "within a bound", "without one", "ratio"):
        table.add_column(column, justify="right")
    for writers in (1, 100):
        ours, bare = (blocks_a_second(writers, delay_s, arguments.blocks, bounded=bounded) for bounded in (True, False))
        table.add_row(str(writers), f"{ours:.1f}", f"{bare:.1f}", f"{ours / bare:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
