"""S3 through the whole tier (sealed and verified), by client, next to what plain HTTP can do.

    python -m tests.benchmarks.bench_s3 [--quick] [--json FILE] [--png FILE] [--where PLACE ...]

Servers on loopback: nginx as a DAV stub, which shows what the client itself costs, by http and https (nginx-tls), and
SeaweedFS, a real S3. The ceiling ``http`` is plain http.client: the same blocks with their trailers, unsigned and
unsealed, sent from and received into the region by as many threads. ``socket`` goes further down, to requests written
by hand: what is left of an HTTP client without HTTP. They exist for the stub only, for a real server wants signatures.
``bare obstore`` is a client in Rust alone, where it is installed (pip install obstore): nothing is sealed, checksummed
or verified.

Ratios are what counts: within a round every client moves the same blocks one after the other, in changing order, and
the median of the rounds' ratios is reported, so that a machine whose speed drifts does not decide. Before each PUT as
many pages are freed as the server will take, as in bench_fs: without, who put first in a round was up to four times as
fast as the last, because a host takes back what its guest has free.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from kvtiers.tiers.testing.servers import STUB_BUCKET, S3Server, find_nginx, find_weed, nginx_stub, seaweed_server
from tests.benchmarks.bench_fs import KIB, MIB, free_pages, stall_while
from tests.benchmarks.s3_contenders import (
    CEILING,
    THREADS,
    BareObstoreContender,
    Contender,
    NixlContender,
    Region,
    make_contender,
)
from tests.certificate import make_certificate

SIZES = (256 * KIB, MIB, 4 * MIB, 16 * MIB)
PLACES = ("nginx", "nginx-tls", "seaweed")
SERVERS_FOLDER = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())  # where they keep objects
HEADS = 4_000
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
BARE = (BareObstoreContender.name,) if importlib.util.find_spec("obstore") else ()
CLIENTS = (*BARE, "kvtiers", "kvtiers, threads", "boto3", "s3fs")
HTTP_GOAL, BOTO3_GOAL, CPU_GOAL_MS, STALL_GOAL_MS = 0.8, 3.0, 0.35, 2.0
HEADS_GOAL, HEADS_BOTO3_GOAL = 8_000, 7.0


#: What a client is, in the plot's legend.
LABELS = {
    "http": "http (ceiling, no seal)",
    "socket": "socket (ceiling, no seal)",
    "kvtiers": "kvtiers, in processes",
    "kvtiers, threads": "kvtiers, in threads",
    "boto3": "kvtiers by boto3",
    "s3fs": "kvtiers by s3fs",
    "nixl": "NIXL (no seal)",
}


@dataclass(frozen=True)
class Row:
    """One client with one block size on one server. Speeds in MB/s, times in ms, ratios to the ceiling."""

    where: str
    client: str
    block_bytes: int
    put: float
    get: float
    put_ratio: float | None
    get_ratio: float | None
    put_cpu_ms: float
    get_cpu_ms: float
    put_stall_p50: float
    put_stall_p99: float
    get_stall_p50: float
    get_stall_p99: float
    put_rounds: Sequence[float] = ()  # the speeds that put is the median of
    get_rounds: Sequence[float] = ()


@dataclass(frozen=True)
class Heads:
    """Existence checks a second, and the client's CPU microseconds for each."""

    where: str
    client: str
    per_second: float
    cpu_us: float


# -- driving -----------------------------------------------------------------------------------------------------------


def timed(region: Region, contender: Contender, run: Callable[[], None]) -> tuple[float, float]:
    """MB/s, and CPU milliseconds of the client's processes a block."""
    cpu = contender.cpu_s()
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    return region.count * region.block_bytes / seconds / 1e6, (contender.cpu_s() - cpu) / region.count * 1e3


def measure(where: str, region: Region, contenders: list[Contender], rounds: int) -> list[Row]:
    """All contenders on one server with one block size. Round 0 warms up and stays for the HEADs."""
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for round_ in range(rounds + 1):
        order = contenders[round_ % len(contenders) :] + contenders[: round_ % len(contenders)]
        for way in ("put", "get"):
            for contender in order:
                run = partial(getattr(contender, way), round_)
                if way == "put":
                    free_pages(region.rows, SERVERS_FOLDER)
                result = timed(region, contender, run)
                if round_:
                    seen.setdefault((contender.name, way), []).append(result)
        for contender in contenders if round_ else ():
            contender.remove(round_)
    rows = []
    for contender in contenders:
        put_stall = stall_while(partial(contender.put, rounds + 1))
        get_stall = stall_while(partial(contender.get, rounds + 1))
        contender.remove(rounds + 1)

        def median(way: str, of: int, name: str = contender.name) -> float:
            return statistics.median(result[of] for result in seen[name, way])

        def ratio(way: str, name: str = contender.name) -> float | None:
            ceiling = seen.get((CEILING, way))
            if ceiling is None:
                return None
            return statistics.median(a[0] / b[0] for a, b in zip(seen[name, way], ceiling, strict=True))

        rows.append(
            Row(
                where, contender.name, region.block_bytes, median("put", 0), median("get", 0), ratio("put"),
                ratio("get"), median("put", 1), median("get", 1), *put_stall, *get_stall,
                *([speed for speed, _ in seen[contender.name, way]] for way in ("put", "get")),
            )
        )  # fmt: skip
    return rows


def measure_heads(where: str, contender: Contender) -> Heads:
    """Medians of three."""
    speeds, cpu = [], []
    for _ in range(3):
        start, cpu_s = time.perf_counter(), contender.cpu_s()
        contender.heads(HEADS)
        speeds.append(HEADS / (time.perf_counter() - start))
        cpu.append((contender.cpu_s() - cpu_s) / HEADS * 1e6)
    return Heads(where, contender.name, statistics.median(speeds), statistics.median(cpu))


@contextmanager
def server(where: str) -> Iterator[S3Server]:
    """The server, its bucket, and its credentials in the environment."""
    with ExitStack() as stack:
        if where == "nginx":
            reached = S3Server(stack.enter_context(nginx_stub()), "key", "secret")
        elif where == "nginx-tls":
            folder = make_certificate(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            stack.enter_context(mock.patch.dict("os.environ", {"AWS_CA_BUNDLE": str(folder / "ca.pem")}))
            reached = S3Server(stack.enter_context(nginx_stub(folder / "server.pem")), "key", "secret")
        else:
            reached = stack.enter_context(seaweed_server()).s3
            reached.client().create_bucket(Bucket=STUB_BUCKET)
        stack.enter_context(mock.patch.dict("os.environ", reached.environment))
        yield reached


def congestion_control() -> str:
    """TCP's, which decides: bbr's idea of loopback depends on what else its connection has sent.

    Measured at 1 MiB: with bbr nginx worked 0.38 ms a GET for clients that only read, and 0.2 for ``http``, which also
    writes by the same connections; with cubic 0.17 for both.
    """
    return CONGESTION_CONTROL.read_text().strip()


def nixl() -> tuple[str, ...]:
    """NIXL, where it is installed: pip install --no-deps nixl nixl-cu12 (nixl-cu13 needs a CUDA machine's library)."""
    return (NixlContender.name,) if importlib.util.find_spec("nixl") else ()


def run(where: str, total_bytes: int, rounds: int, job_blocks: int | None) -> Iterator[tuple[list[Row], list[Heads]]]:
    """What was measured with one block size after the other."""
    # NIXL's client, and s3fs over https, frame their bodies in a way that only a real S3 takes apart again.
    names = {
        "nginx": (CEILING, "socket", *CLIENTS),
        "nginx-tls": (CEILING, *CLIENTS[:-1]),
        "seaweed": (*CLIENTS, *nixl()),
    }
    for size in SIZES:
        with server(where) as reached:  # a new one each time: SeaweedFS keeps what was deleted, and it lies in memory
            region = Region(size, total_bytes, job_blocks)
            contenders = [make_contender(name, reached, region) for name in names[where]]
            rows = measure(where, region, contenders, rounds)
            heads = [measure_heads(where, contender) for contender in contenders] if size == SIZES[0] else []
            yield rows, heads
            for contender in contenders:
                contender.remove(0)
                contender.close()


# -- showing -----------------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row], heads: Sequence[Heads]) -> None:
    console = Console(width=None if os.isatty(1) else 150)
    table = Table(
        title=f"S3 through the whole tier, {THREADS} threads, {congestion_control()}, MB/s (median of rounds)"
    )
    for column in ("", "block", "client", "PUT", "of http", "GET", "of http", "CPU ms a block PUT / GET",
                   "stall ms PUT p50 / p99", "GET p50 / p99"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        is_ours = row.client == "kvtiers"
        judged_ratio = is_ours and row.block_bytes >= MIB
        judged_cpu = is_ours and row.block_bytes == SIZES[0]
        table.add_row(
            row.where,
            size_text(row.block_bytes),
            row.client,
            f"{row.put:.0f}",
            _ratio(row.put_ratio, judged_ratio),
            f"{row.get:.0f}",
            _ratio(row.get_ratio, judged_ratio),
            f"{_judged(row.put_cpu_ms, not judged_cpu or row.put_cpu_ms <= CPU_GOAL_MS)} / "
            f"{_judged(row.get_cpu_ms, not judged_cpu or row.get_cpu_ms <= CPU_GOAL_MS)}",
            _stall(row.put_stall_p50, row.put_stall_p99, is_ours),
            _stall(row.get_stall_p50, row.get_stall_p99, is_ours),
        )
    console.print(table)
    for where in dict.fromkeys(row.where for row in rows):
        by_client = {row.client: row for row in rows if row.where == where and row.block_bytes == SIZES[0]}
        ours, theirs = by_client["kvtiers"], by_client["boto3"]
        asked = {one.client: one for one in heads if one.where == where}
        put, get = ours.put / theirs.put, ours.get / theirs.get
        checks = ", ".join(
            f"{one.client} {one.per_second:,.0f}/s by {one.cpu_us:.0f} µs of CPU" for one in asked.values()
        )
        times = asked["kvtiers"].per_second / asked["boto3"].per_second
        console.print(
            f"{where}: kvtiers is {_judged(put, put >= BOTO3_GOAL)}x boto3 at {size_text(SIZES[0])} PUT and "
            f"{_judged(get, get >= BOTO3_GOAL)}x GET; existence checks: {checks}; kvtiers is "
            f"{_judged(times, times >= HEADS_BOTO3_GOAL)}x boto3"
        )
    console.print(
        f"goals of kvtiers: >= {HTTP_GOAL} of http from 1 MiB; >= {BOTO3_GOAL:g}x boto3 at 256 KiB; "
        f"CPU <= {CPU_GOAL_MS} ms a 256 KiB block; stall p99 <= {STALL_GOAL_MS:g} ms; "
        f">= {HEADS_GOAL:,} checks/s on the stub, >= {HEADS_BOTO3_GOAL:g}x boto3. Missed goals are red."
    )


def size_text(size: int) -> str:
    return f"{size // KIB} KiB" if size < MIB else f"{size // MIB} MiB"


def _judged(value: float, reached: bool) -> str:
    return f"{value:.2f}" if reached else f"[red]{value:.2f}[/red]"


def _stall(p50: float, p99: float, judged: bool) -> str:
    return f"{p50:.2f} / {_judged(p99, not judged or p99 <= STALL_GOAL_MS)}"


def _ratio(value: float | None, judged: bool) -> str:
    return "" if value is None else _judged(value, not judged or value >= HTTP_GOAL)


def bars(
    axis: Any, places: Sequence[float], speeds: Sequence[float], rounds: Sequence[Sequence[float]], **style: Any
) -> None:
    """Bars of medians, with whiskers from the slowest round to the fastest where the rounds were recorded."""
    spread = None
    if all(rounds):
        spread = [
            [speed - min(of) for speed, of in zip(speeds, rounds, strict=True)],
            [max(of) - speed for speed, of in zip(speeds, rounds, strict=True)],
        ]
    axis.bar(places, speeds, yerr=spread, capsize=2, error_kw={"elinewidth": 1}, **style)


def name_axes(axis: Any, title: str, *, recorded: bool) -> None:
    """The title, what the axes show, and the legend."""
    axis.set_title(title)
    axis.set_xlabel("bytes of a block")
    axis.set_ylabel("MB/s: median; whiskers: all rounds" if recorded else "MB/s, median of the rounds")
    axis.set_ylim(bottom=0, top=1.3 * axis.get_ylim()[1])  # room for the legend


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bars of PUT and GET for each server; needs matplotlib."""
    figure = draw(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw(rows: Sequence[Row]) -> Any:
    """The figure of ``plot``."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")

    places = list(dict.fromkeys(row.where for row in rows))
    colors = {client: f"C{i}" for i, client in enumerate(dict.fromkeys(row.client for row in rows))}
    figure, axes = pyplot.subplots(len(places), 2, figsize=(11, 4 * len(places)), squeeze=False)
    for i, where in enumerate(places):
        here = [row for row in rows if row.where == where]
        clients = list(dict.fromkeys(row.client for row in here))
        sizes = list(dict.fromkeys(row.block_bytes for row in here))
        width = 0.8 / len(clients)
        for j, way in enumerate(("put", "get")):
            axis = axes[i][j]
            for k, client in enumerate(clients):
                mine = [row for row in here if row.client == client]
                at = [sizes.index(row.block_bytes) + k * width for row in mine]
                rounds = [getattr(row, f"{way}_rounds") for row in mine]
                label = LABELS.get(client, client)
                bars(
                    axis,
                    at,
                    [getattr(row, way) for row in mine],
                    rounds,
                    width=width,
                    label=label,
                    color=colors[client],
                )
            axis.set_xticks([n + 0.4 - width / 2 for n in range(len(sizes))], [size_text(size) for size in sizes])
            name_axes(axis, f"{way.upper()}, {where}, {THREADS} threads", recorded=all(row.put_rounds for row in here))
            axis.legend(ncols=2, fontsize="x-small", loc="upper left")
    figure.tight_layout()
    return figure


def save(rows: Sequence[Row], heads: Sequence[Heads], path: Path) -> None:
    """The rows as JSON."""
    report = {
        "congestion_control": congestion_control(),
        "rows": [asdict(row) for row in rows],
        "heads": [asdict(one) for one in heads],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1))


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less data and fewer rounds")
    parser.add_argument("--job-blocks", type=int, help="blocks in each of a tier's jobs; default: all in one job")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--png", type=Path, help="draw the rows into this file (needs matplotlib)")
    parser.add_argument("--where", nargs="*", choices=PLACES, help="default: whichever is installed")
    args = parser.parse_args()
    installed = dict(zip(PLACES, (find_nginx(), find_nginx(), find_weed()), strict=True))
    places = args.where or [name for name, path in installed.items() if path is not None]
    missing = [name for name in PLACES if name not in places]
    missing += [] if nixl() else ["nixl (not installed)"]
    missing += [] if BARE else ["bare obstore (not installed)"]
    if missing:
        print(f"not measured: {', '.join(missing)}")
    total, rounds = (64 * MIB, 3) if args.quick else (256 * MIB, 5)
    rows: list[Row] = []
    heads: list[Heads] = []
    for where in places:
        for more_rows, more_heads in run(where, total, rounds, args.job_blocks):
            rows += more_rows
            heads += more_heads
            if args.json:  # each time: a client that takes the process with it must not take the rows
                save(rows, heads, args.json)
    show(rows, heads)
    if args.png:
        try:
            plot(rows, args.png)
        except ImportError:
            print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
