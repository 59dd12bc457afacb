"""Whether a prompt's blocks are in a bucket: milliseconds a batch of questions.

    python -m tests.benchmarks.bench_lookups

Beside them one HEAD, the least that a batch takes. The far server answers each request after FAR_S, and is our own
fault server; SeaweedFS is a real one, on loopback.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from unittest import mock

from rich.console import Console
from rich.table import Table

from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from kvtiers.tiers.testing.servers import find_weed, seaweed_server

FAR_S = 0.025
ASKED = 64
BATCHES = 9
BUCKET = "kvtiers"
FOLDER = "model_0123456789ab_r0"


def block_names(count: int) -> list[str]:
    """As ``FileMapper`` lays blocks out."""
    hashes = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(count)]
    return [f"{FOLDER}/{digits[:3]}/{digits[3:5]}_g0/{digits}.bin" for digits in hashes]


def measure(where: str, endpoint_url: str, table: Table) -> None:
    """A row."""
    names = block_names(ASKED)
    with closing(S3Store(S3Options(bucket=BUCKET, endpoint_url=endpoint_url))) as store:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda name: store.put(name, [memoryview(b"block")]), names))
        times = [ms_of(lambda: store.size_many(names)) for _ in range(BATCHES)]
        one = statistics.median(ms_of(lambda: store.size(names[0])) for _ in range(BATCHES))
    table.add_row(where, *(f"{ms:.1f}" for ms in (one, times[0], statistics.median(times[1:]))))


def ms_of(ask: Callable[[], object]) -> float:
    """Milliseconds that it takes."""
    started = time.perf_counter()
    ask()
    return (time.perf_counter() - started) * 1e3


@contextmanager
def far_server() -> Iterator[str]:
    """Its URL."""
    credentials = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    with mock.patch.dict("os.environ", credentials), HttpFaultServer(buckets=[BUCKET], requests_max=1) as server:
        server.answer_after_s = FAR_S
        yield server.endpoint_url


@contextmanager
def near_server() -> Iterator[str]:
    """Its URL."""
    with seaweed_server() as server, mock.patch.dict("os.environ", server.s3.environment):
        server.s3.client().create_bucket(Bucket=BUCKET)
        yield server.s3.endpoint_url


def main() -> None:
    """Measure and print."""
    table = Table(title=f"{ASKED} keys asked together, all there: ms a batch")
    for column in ("server", "one HEAD", "the first batch", "later ones (median)"):
        table.add_column(column, justify="right")
    with far_server() as url:
        measure(f"{FAR_S * 1e3:.0f} ms away", url, table)
    if find_weed() is None:
        Console().print("not measured: SeaweedFS (no weed)")
    else:
        with near_server() as url:
            measure("SeaweedFS", url, table)
    Console().print(table)


if __name__ == "__main__":
    main()
