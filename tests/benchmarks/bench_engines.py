"""Pages of SGLang and objects of LMCache through kvtiers, next to each project's own storage of files.

    python -m tests.benchmarks.bench_engines [--rounds N] [--where FOLDER] [--json FILE]

SGLang's own controller calls its ``file`` backend and ours, over the same host memory. LMCache's ``fs`` adapter and
ours are called as its server does. Ours seals and verifies each block; theirs do not. Each round stores and loads new
blocks, and who goes first changes. The ratio is the median of the rounds' ratios; above 1, ours is faster.

- cold: the blocks' pages were dropped from the page cache before the load, so the disk is read.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

MIB = 1 << 20
#: Block size, number of blocks.
CASES = ((MIB // 8, 256), (MIB, 96), (4 * MIB, 32))

Side = tuple[Callable[[], Any], Callable[[], Any]]
"""Stores, and loads. Both return something true on success, for SGLang how much it moved."""


@contextmanager
def hicache_sides(size: int, count: int, folder: Path) -> Iterator[dict[str, Side]]:
    """SGLang's file backend and ours."""
    import torch

    from kvtiers.connector.engines.sglang.storage import KVTiersHiCacheStorage
    from tests.engines.hicache import PAGE, Controller, config_of, host_pool, set_arguments

    from sglang.srt.mem_cache.hicache_storage import HiCacheFile  # isort: skip

    layers = {MIB // 8: 4, MIB: 32, 4 * MIB: 64}[size]
    pool = host_pool(count, heads=2, dim=size // (64 * layers * 2), layers=layers)
    set_arguments(folder)
    config = config_of(folder / "ours", options={"staging": "256MiB"})
    names = [os.urandom(32).hex() for _ in range(count)]
    indices = torch.arange(count * PAGE)
    ours, theirs = KVTiersHiCacheStorage(config), HiCacheFile(config_of(folder), str(folder / "theirs"))
    ours.register_mem_pool_host(pool)
    theirs.register_mem_pool_host(pool)
    sides: dict[str, Side] = {}
    for name, storage in (("ours", ours), ("theirs", theirs)):
        controller = Controller(storage, pool)
        if storage is theirs:  # as the controller does for this backend
            controller.page_get_func, controller.page_set_func = (
                controller._generic_page_get,
                controller._generic_page_set,
            )
        sides[name] = (partial(controller.back_up, names, indices), partial(controller.fetch, names, indices))
    try:
        yield sides
    finally:
        ours.close()


@contextmanager
def lmcache_sides(size: int, count: int, folder: Path) -> Iterator[dict[str, Side]]:
    """LMCache's fs adapter and ours."""
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

    from tests.engines import test_lmcache as lm

    shape = (2, 4, 16, size // (2 * 4 * 16 * 2))
    objects, filled = lm.memory(count, shape, seed=1), lm.memory(count, shape)
    keys = [lm.key_of(number, chunk_hash=os.urandom(32)) for number in range(count)]
    theirs = FSL2Adapter(FSL2AdapterConfig(str(folder / "theirs")))
    try:
        with lm.opened(folder / "ours", staging="256MiB") as ours:
            lm.look(ours, keys, lm.layouts(shape))  # opens the tier
            yield {
                name: (partial(_store, adapter, keys, objects), partial(_load, adapter, keys, filled))
                for name, adapter in (("ours", ours), ("theirs", theirs))
            }
    finally:
        theirs.close()


def _store(adapter: Any, keys: list[Any], objects: list[Any]) -> bool:
    from tests.engines import test_lmcache as lm

    return bool(lm.store(adapter, keys, objects).is_successful())


def _load(adapter: Any, keys: list[Any], objects: list[Any]) -> bool:
    from tests.engines import test_lmcache as lm

    return all(lm.load(adapter, keys, objects))


ENGINES = {"SGLang": hicache_sides, "LMCache": lmcache_sides}


def drop(folder: Path) -> None:
    """Drop files from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def timed(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    assert call()
    return time.perf_counter() - began


def measure(engine: str, size: int, count: int, rounds: int, where: Path) -> dict[str, Any]:
    """One case: MB/s of ours, and the ratio to theirs."""
    seconds: dict[str, dict[str, list[float]]] = {
        what: {"ours": [], "theirs": []} for what in ("store", "load", "cold")
    }
    for number in range(rounds + 1):
        folder = Path(tempfile.mkdtemp(dir=where))
        try:
            with ENGINES[engine](size, count, folder) as sides:
                order = ("ours", "theirs") if number % 2 else ("theirs", "ours")
                for what in seconds:
                    if what == "cold":
                        drop(folder)
                    for name in order:
                        took = timed(sides[name][0 if what == "store" else 1])
                        if number:  # the first round warms up
                            seconds[what][name].append(took)
        finally:
            shutil.rmtree(folder)
    found: dict[str, Any] = {"engine": engine, "bytes": size, "blocks": count, "rounds": rounds}
    for what, sides_s in seconds.items():
        ratios = [theirs / ours for ours, theirs in zip(sides_s["ours"], sides_s["theirs"], strict=True)]
        found[what] = {
            "mb_per_s": round(size * count / statistics.median(sides_s["ours"]) / 1e6),
            "ratio": round(statistics.median(ratios), 2),
            "range": [round(min(ratios), 2), round(max(ratios), 2)],
        }
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--where", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    results = []
    for engine in options.engines:
        for size, count in CASES:
            found = measure(engine, size, count, options.rounds, options.where)
            results.append(found)
            parts = [
                f"{what} {found[what]['ratio']:.2f}x ({found[what]['range'][0]}-{found[what]['range'][1]}), "
                f"{found[what]['mb_per_s']} MB/s"
                for what in ("store", "load", "cold")
            ]
            print(f"{engine:8} {size // 1024:5} KiB: {'; '.join(parts)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
