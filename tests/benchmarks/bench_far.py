"""The s3 tier on a server that is far away, as object stores are: each answer comes late, each connection is slow.

    python -m tests.benchmarks.bench_far [--answer-after-s 0.03] [--connection-mb-s 90] [--json FILE]

nginx on loopback waits before each answer and limits what a connection reads (its echo module does the waiting). Blocks
are loaded and stored by a tier that keeps to 8 requests under way for each of its two workers (``n_read_threads: 8``)
and by one as it is by default, and the same from a server that is near, to see what that loses there. The most that
could be had is the connections' rate times their number, as long as processors last.

Lookups: how many of a prompt's blocks are found before ``lookup_deadline_s``, by a tier that has just been made and
then by the same one again. The server lists nothing, like a bucket with too many blocks for that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.builtin import BuiltInTier
from kvtiers.tiers.testing.servers import STUB_BUCKET, S3Server, nginx_stub
from tests.benchmarks.bench_fs import KIB, MIB
from tests.identity import FakeSpec, block_key

JOBS = 6  # loads of one tier
SIZES = {256 * KIB: 512, MIB: 256, 4 * MIB: 96, 16 * MIB: 32}  # block bytes -> blocks
KEYS = (256, 512, 1024, 2048, 4096)
FIXED: dict[str, Any] = {"n_read_threads": 8, "n_write_threads": 8}
TIERS: dict[str, dict[str, Any]] = {"8 at once": FIXED, "default": {}}


@dataclass(frozen=True)
class Moves:
    """One tier, MB/s. ``load`` is the median of the second half of its loads; ``at_once``: of each of two workers."""

    server: str
    tier: str
    block_bytes: int
    store: float
    load_first: float
    load: float
    at_once: int


@dataclass(frozen=True)
class Lookup:
    """Blocks of a prompt that were found in time, from its first one on, and what that took."""

    keys: int
    found_first: int
    seconds_first: float
    found_again: int
    seconds_again: float


@contextmanager
def tier_on(url: str, view: memoryview, prefix: str, **options: Any) -> Iterator[BuiltInTier]:
    """A tier whose workers have begun."""
    tier = BuiltInTier(FakeSpec(), view, "s3", bucket=STUB_BUCKET, endpoint_url=url, prefix=prefix, **options)
    try:
        time.sleep(1.0)
        yield tier
    finally:
        tier.shutdown()


def run(tier: BuiltInTier, submit: Callable[[JobMetadata], None], keys: Sequence[OffloadKey]) -> float:
    """Seconds of one job."""
    started = time.perf_counter()
    submit(JobMetadata(1, keys, np.arange(len(keys), dtype=np.int32)))
    tier.drain_jobs()
    (result,) = tier.get_finished()
    assert result.success
    return time.perf_counter() - started


def moves(server: str, url: str) -> Iterator[Moves]:
    """Each size and tier."""
    for block_bytes, count in SIZES.items():
        view = SharedOffloadRegion.anonymous(count, block_bytes).create_kv_memoryview()
        rows = np.asarray(view)
        rows[:] = np.random.default_rng(1).integers(-128, 128, rows.shape, np.int8)
        keys = [block_key(number) for number in range(count)]
        megabytes = count * block_bytes / 1e6
        for name, options in TIERS.items():
            with tier_on(url, view, f"{name[0]}-{block_bytes}", **options) as tier:
                store_s = run(tier, tier.submit_store, keys)
                loads = [megabytes / run(tier, tier.submit_load, keys) for _ in range(JOBS)]
                at_once = sum(server.seats.loads_first for server in tier._channel._children)
            later = statistics.median(loads[JOBS // 2 :])
            yield Moves(server, name, block_bytes, megabytes / store_s, loads[0], later, at_once)


def lookups(url: str) -> Iterator[Lookup]:
    """Each number of keys."""
    view = SharedOffloadRegion.anonymous(max(KEYS), 4 * KIB).create_kv_memoryview()
    keys = [block_key(number) for number in range(max(KEYS))]
    with tier_on(url, view, "lookups") as tier:
        run(tier, tier.submit_store, keys)
    for count in KEYS:
        with tier_on(url, view, "lookups") as tier:
            found = []
            for _ in range(2):
                started = time.perf_counter()
                answers: dict[OffloadKey, bool | None] = dict.fromkeys(keys[:count])
                while None in answers.values():
                    for key in [key for key, answer in answers.items() if answer is None]:
                        answers[key] = tier.lookup(key)
                    tier.on_schedule_end()
                    time.sleep(0.002)
                took_s = time.perf_counter() - started
                leading = [*answers.values(), False].index(False)
                found.append((leading, took_s))
                time.sleep(6.0)  # longer than "absent" is believed
        yield Lookup(count, *found[0], *found[1])


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer-after-s", type=float, default=0.03)
    parser.add_argument("--connection-mb-s", type=int, default=90)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    distance = {"answer_after_s": arguments.answer_after_s, "connection_mb_s": arguments.connection_mb_s}
    far = f"{arguments.answer_after_s * 1e3:.0f} ms, {arguments.connection_mb_s} MB/s a connection"
    console = Console()
    table = Table("server", "block", "tier", "store", "first load", "later loads", "at once", title="MB/s")
    all_moves, all_lookups = [], []
    try:
        with mock.patch.dict("os.environ", S3Server("", "stub", "stub").environment):
            for server, options in ((far, distance), ("near", {})):
                with nginx_stub(**options) as url:
                    for row in moves(server, url):
                        all_moves.append(row)
                        figures = (f"{value:,.0f}" for value in (row.store, row.load_first, row.load))
                        table.add_row(server, f"{row.block_bytes // KIB} KiB", row.tier, *figures, str(row.at_once))
            with nginx_stub(**distance) as url:
                all_lookups = list(lookups(url))
    except FileNotFoundError as e:
        console.print(f"skipped: {e}")
        return
    console.print(table)
    table = Table("keys", "found", "s", "asked again", "s", title=f"Lookups: {far}, not listed")
    for each in all_lookups:
        again = (f"{each.found_again:,}", f"{each.seconds_again:.3f}")
        table.add_row(f"{each.keys:,}", f"{each.found_first:,}", f"{each.seconds_first:.3f}", *again)
    console.print(table)
    if arguments.json:
        content = {"moves": list(map(asdict, all_moves)), "lookups": list(map(asdict, all_lookups))}
        arguments.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
