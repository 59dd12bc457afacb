"""``kvtiers bench``: measures how fast this machine moves blocks, and compares each hop with its upper bound."""

from __future__ import annotations

import os
import shutil
import statistics
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from ...tiers.base import JobMetadata
from ...tiers.blocks.keys import make_offload_key
from ...tiers.blocks.seal import TRAILER_BYTES, Seal
from ...tiers.capacity.walker import listed_bytes
from ...tiers.config.deployment import DeploymentConfig, MetricsConfig
from ...tiers.config.open_store import open_tool_store, store_recipe
from ...tiers.config.tier_options import BoundedTierConfig, TierConfig
from ...tiers.config.values import human_bytes
from ...tiers.errors import ConfigError, StoreError
from ...tiers.registry import SecondaryTierFactory
from ...tiers.store import Store
from ...tiers.stores.files.publish import PRIVATE_FOLDER, private_name
from ...tiers.stores.vectored_io import transfer
from ...tiers.tier.store_tier import StoreTierManager
from ..base import CacheConfig, KVCacheGroup, ModelConfig, OffloadingConfig
from ..region.region_header import row_stride
from ..spec import DeploymentSpec
from .options import AsJson, Config, TierName, size_option
from .output import Ticker, answer, say, show
from .places import load_deployment, tell_skipped
from .session import exit_on_signals, session

ROUNDS = 3
SETTLE_S = 0.5  # for worker processes to start and map the region, which an engine does while it loads its model
BAR_CELLS = 16


@dataclass(frozen=True, slots=True)
class Hop:
    """One path of blocks, with its speed: the median of ROUNDS.

    Attributes:
        ceiling_bytes_per_s: speed of the same bytes on the same path without kvtiers; None if not measured.
        ceiling_is: how the ceiling was measured.
    """

    name: str
    bytes_per_s: float
    ceiling_bytes_per_s: float | None = None
    ceiling_is: str = ""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds on a machine."""

    cores: int
    hops: list[Hop]


def bench(
    config: Config,
    tier: TierName = None,
    block_size: Annotated[str, typer.Option(metavar="SIZE", help="Size of a stored block.")] = "1MiB",
    total: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes moved in each round, at most the region's size.")
    ] = "256MiB",
    as_json: AsJson = False,
) -> None:
    """Measure the speed of each hop of this deployment on this machine. Removes its test blocks at the end."""
    session().if_interrupted = lambda: "the test blocks were removed; run it again to start over"
    deployment = load_deployment(config)
    with exit_on_signals():
        hops = _Bench(deployment, size_option("--block-size", block_size), size_option("--total", total)).run(tier)
    if as_json:
        answer(Speeds(len(os.sched_getaffinity(0)), hops))
    else:
        _show(hops)


class _Bench:
    """A region of random blocks in a namespace of its own, so that no engine has or finds them."""

    def __init__(self, deployment: DeploymentConfig, block_bytes: int, total_bytes: int) -> None:
        region_bytes = deployment.region.size
        if not 1 <= block_bytes <= region_bytes:
            raise ConfigError(
                f"{human_bytes(block_bytes)}; accepted is 1 B up to the region's size, {human_bytes(region_bytes)}",
                field="--block-size",
            )
        total_bytes = min(total_bytes, region_bytes)
        if total_bytes < block_bytes:
            raise ConfigError(
                f"{human_bytes(total_bytes)} is less than one block; write at least the value of --block-size, "
                f"{human_bytes(block_bytes)}",
                field="--total",
            )
        self._deployment = deployment
        groups = (KVCacheGroup(16, ("bench",)),)
        identity = OffloadingConfig(
            ModelConfig("kvtiers-bench", "int8", uuid.uuid4().hex),
            CacheConfig(16, deployment.blocks_per_chunk, hash_algorithm="random"),
            groups=groups,
        )
        region = deployment.region.model_copy(update={"size": total_bytes // block_bytes * row_stride(block_bytes, 1)})
        # Without metrics: their port belongs to an engine that may be running.
        own = deployment.model_copy(update={"region": region, "metrics": MetricsConfig()})
        self._spec = DeploymentSpec(identity, own, block_bytes)
        self._view = self._spec.region.create_kv_memoryview()
        self._rows = np.asarray(self._view)
        self._rows[:] = np.random.default_rng(1).integers(-128, 128, self._rows.shape, np.int8)
        self._keys = [make_offload_key(os.urandom(32), 0) for _ in range(len(self._rows))]
        self._jobs = 0

    def run(self, tier_name: str | None) -> list[Hop]:
        tiers = [tier for tier in self._deployment.tiers if isinstance(tier, TierConfig)]
        names = [tier.name or tier.type for tier in tiers]
        if tier_name not in (None, *names):
            raise ConfigError(f"no tier {tier_name!r}; accepted: {', '.join(names)}", field="--tier")
        others = [tier.type for tier in self._deployment.tiers if not isinstance(tier, TierConfig)]
        if others and tier_name is None:
            tell_skipped(others)
        for tier, name in zip(tiers, names, strict=True):
            if tier_name in (None, name) and isinstance(tier, BoundedTierConfig) and tier.read_only:
                raise ConfigError(
                    f"tier {name} only loads, and bench must store blocks; choose another tier with --tier",
                    field="read_only",
                )
            store_recipe(tier)  # fail now, not after minutes, if commands cannot open this store
        hops = []
        try:
            with Ticker("measuring") as ticker:
                ticker.tell(0, "the region")
                hops += self._memory()
                for config, name in zip(tiers, names, strict=True):
                    if tier_name in (None, name):
                        ticker.tell(0, name)
                        options = dict(self._unbounded(config))
                        made = SecondaryTierFactory.create_secondary_tier(options, self._view, self._spec)
                        try:
                            if isinstance(made, StoreTierManager):
                                made.stop_collector()
                                with closing(made.store or open_tool_store(config)) as store:
                                    hops += self._tier(made, store, getattr(config, "root_dir", None))
                        finally:
                            made.shutdown()
        finally:
            del self._rows
            self._view.release()
            self._spec.shutdown()
        return hops

    def _unbounded(self, config: TierConfig) -> TierConfig:
        """Return the tier without its limits: test blocks must not evict the deployment's blocks, nor be accounted.

        Raises:
            ConfigError: the test blocks do not fit within ``max_bytes``.
        """
        if not isinstance(config, BoundedTierConfig):
            return config
        if config.max_bytes is not None:
            with closing(open_tool_store(config)) as store:
                room = config.max_bytes - listed_bytes(store)
            needed = len(self._rows) * (self._rows.shape[1] + TRAILER_BYTES)
            if needed > room:
                raise ConfigError(
                    f"needs {human_bytes(needed)}, and max_bytes of {config.name or config.type} leaves "
                    f"{human_bytes(max(0, room))}; write less",
                    field="--total",
                )
        return config.model_copy(update={"max_bytes": None, "ttl": None})

    def _memory(self) -> list[Hop]:
        into = np.empty_like(self._rows)
        into[:] = 0
        copied = self._speed(lambda: np.copyto(into, self._rows))
        seal = Seal(bytes(32), 0)
        sealed = self._speed(
            lambda: [seal.trailer(key, memoryview(row)) for key, row in zip(self._keys, self._rows, strict=True)]
        )
        return [Hop("copy of the region", copied), Hop("checksums", sealed)]

    def _tier(self, tier: StoreTierManager, store: Store, root: str | None) -> list[Hop]:
        threads = ThreadPoolExecutor(2)
        ways = _FileCeiling(Path(root), len(self._rows)) if root is not None else _StoreCeiling(store, tier)
        speeds: dict[str, list[float]] = {}
        time.sleep(SETTLE_S)
        try:
            for _ in range(ROUNDS):
                for op in ("store", "load"):
                    speeds.setdefault(op, []).append(self._once(partial(self._job, tier, op)))
                self._remove(tier, store)
                for op, ceiling in (("store", ways.write), ("load", ways.read)):
                    alone = self._once(partial(self._all_rows, threads, ceiling))
                    speeds.setdefault(f"{op} alone", []).append(alone)
                ways.clear(len(self._rows))
        finally:
            threads.shutdown()
            ways.clear(len(self._rows))
            self._remove(tier, store)
            config_name = tier.mapper.relative_config_name
            store.delete(config_name)
            if root is not None:  # the namespace's folders, which a collector would leave
                for name in (tier.mapper.name_prefix, os.path.dirname(config_name)):
                    shutil.rmtree(Path(root).expanduser() / name, ignore_errors=True)
        median = {name: statistics.median(values) for name, values in speeds.items()}
        return [
            Hop(f"{name} {tier.name}", median[op], median[f"{op} alone"], ways.name)
            for op, name in (("store", "region to"), ("load", "region from"))
        ]

    def _all_rows(self, threads: ThreadPoolExecutor, do: Callable[[tuple[int, Any]], None]) -> None:
        list(threads.map(do, enumerate(self._rows)))

    def _job(self, tier: StoreTierManager, op: str) -> None:
        self._jobs += 1
        job = JobMetadata(self._jobs, self._keys, np.arange(len(self._keys), dtype=np.int32))
        (tier.submit_store if op == "store" else tier.submit_load)(job)
        tier.drain_jobs()
        for result in tier.get_finished():
            if not result.success:
                said = (
                    f"tier {tier.name}: only {len(result.successful_keys)} of {len(self._keys)} blocks could be {op}d"
                )
                if tier.full:
                    said += f": {tier.full}; a smaller --total may fit"
                raise StoreError(said)

    def _remove(self, tier: StoreTierManager, store: Store) -> None:
        for key in self._keys:
            store.delete(tier.mapper.relative_name(key))

    def _speed(self, run: Callable[[], object]) -> float:
        return statistics.median([self._once(run) for _ in range(ROUNDS)])

    def _once(self, run: Callable[[], object]) -> float:
        started_at = time.perf_counter()
        run()
        return float(self._rows.nbytes / (time.perf_counter() - started_at))


class _FileCeiling:
    """Writes and reads the same blocks as plain files in the same root, without seals, checks and publishing.

    The files are named like half-written blocks, so that the next store removes the files of a killed process.
    """

    name = "plain files"

    def __init__(self, root: Path, count: int) -> None:
        folder = root / PRIVATE_FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._paths = [folder / private_name() for _ in range(count)]

    def write(self, row: tuple[int, Any]) -> None:
        fd = os.open(self._paths[row[0]], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            transfer(os.pwritev, fd, [memoryview(row[1])])
        finally:
            os.close(fd)

    def read(self, row: tuple[int, Any]) -> None:
        fd = os.open(self._paths[row[0]], os.O_RDONLY | os.O_CLOEXEC)
        try:
            transfer(os.preadv, fd, [memoryview(row[1])])
        finally:
            os.close(fd)

    def clear(self, count: int) -> None:
        for path in self._paths[:count]:
            path.unlink(missing_ok=True)


class _StoreCeiling:
    """Moves the same blocks with only the store's client, on two threads: no seal, check or region protocol."""

    name = "client alone"

    def __init__(self, store: Store, tier: StoreTierManager) -> None:
        self._store = store
        self._prefix = tier.mapper.relative_config_name.rpartition("/")[0]

    def write(self, row: tuple[int, Any]) -> None:
        self._store.put(f"{self._prefix}/bench/{row[0]}", [memoryview(row[1])])

    def read(self, row: tuple[int, Any]) -> None:
        self._store.get_into(f"{self._prefix}/bench/{row[0]}", [memoryview(row[1])])

    def clear(self, count: int) -> None:
        for index in range(count):
            self._store.delete(f"{self._prefix}/bench/{index}")


def _show(hops: list[Hop]) -> None:
    table = Table("hop", "GB/s", "", "ceiling", "GB/s", "ratio")
    fastest = max(hop.bytes_per_s for hop in hops)
    for hop in hops:
        bar = "█" * max(1, round(BAR_CELLS * hop.bytes_per_s / fastest))
        ceiling = ("", "", "")
        if (most := hop.ceiling_bytes_per_s) is not None:
            ceiling = hop.ceiling_is, f"{most / 1e9:.2f}", f"{hop.bytes_per_s / most:.2f}"
        table.add_row(hop.name, f"{hop.bytes_per_s / 1e9:.2f}", bar, *ceiling)
    show(table)
    say(f"Medians of {ROUNDS} rounds. Loads read blocks that were just stored: files are in the page cache.")
