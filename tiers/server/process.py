"""Runs a tier's server in a separate process: starts the process, and holds its ``main``.

The process is a child of the engine (``tiers.child_process``). A library in it may fork. The forked process cannot
answer the engine, and it cannot write into the region, because the region is not mapped in forks.
"""

from __future__ import annotations

import importlib
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from typing import Any, Final

from ..blocks.file_mapper import FileMapper
from ..blocks.rows import Rows
from ..blocks.seal import Seal
from ..child_process import ChildProcess, connect_to_engine
from ..frames import Seats, Work
from ..processes import limit_memory
from ..recipe import StoreRecipe, make_store
from .mapped_file import MappedRegion
from .server import Server

NICENESS: Final = 10  # lower priority than the engine, whose threads otherwise woke up 2.7 ms late instead of 1.75
CLOSE_S: Final = 1.0  # time limit for closing the store
_OUT_OF_MEMORY_STATUS: Final = 3
_MADV_POPULATE_WRITE: Final = 23  # not in the mmap module
_TOUCH_BYTES: Final = 64 << 20  # one piece takes 1 or 2 ms, during which requests may wait


class ProcessBackend:
    """Starts a tier's servers in processes.

    Args:
        recipe: tells a process how to create the store.
        region: the memory that holds the slots.
        memory_bytes_max: memory that a process may allocate after its start; None: no limit. A process that exceeds the
            limit dies.
    """

    store: Final = None  # each process creates its own store

    def __init__(
        self,
        recipe: StoreRecipe,
        region: MappedRegion,
        row_bytes: int,
        work: Work,
        seats: Sequence[Seats],
        memory_bytes_max: int | None,
    ) -> None:
        self.seats = seats
        self._recipe = recipe
        self._region = region
        self._config = {
            "tier": work.tier,
            "mapper": work.mapper.to_json(),
            "seal": work.seal.to_json(),
            "read_only": work.read_only,
            "region": [region.fd, region.offset, region.length],
            "row_bytes": row_bytes,
            "memory_bytes_max": memory_bytes_max,
        }

    def start(self, seats: Seats) -> ChildProcess:
        """See ``ChildProcess.start``. Also raises StoreConfigError if the recipe cannot be encoded."""
        config = {**self._recipe.encode(), **self._config, "seats": astuple(seats)}
        return ChildProcess.start("kvtiers.tiers.server.process", config, [self._region.fd])

    def close(self) -> None:
        """Close the region's descriptor."""
        self._region.close()


def main() -> None:
    """Serve a connection until it ends."""
    sock, tag, parent, config = connect_to_engine("kvtiers-tier", NICENESS)
    mapping, rows = _map(config)
    mapper, seal = FileMapper.from_json(config["mapper"]), seal_from_json(config["seal"])
    work = Work(config["tier"], mapper, seal, config["read_only"])
    if config["memory_bytes_max"] is not None:
        importlib.import_module(config["module"])  # before the limit: some libraries need memory for each core
        limit_memory(config["memory_bytes_max"])
    give_up = partial(os._exit, _OUT_OF_MEMORY_STATUS)
    server = Server(sock, tag, partial(make_store, config), rows, work, Seats(*config["seats"]), give_up=give_up)
    # Call this before the store is created, because creating it may end this process. If the process ends without a
    # sign of life, the engine assumes that processes cannot be started, and creates the store in its own process.
    server.say_alive()
    threading.Thread(target=_prepare, args=(server, mapping), name="kvtiers-prepare", daemon=True).start()
    server.serve([parent])
    threading.Thread(target=server.close_store, daemon=True).start()
    server.join(CLOSE_S)
    os._exit(0)  # not sys.exit, because threads may hang in calls


def _map(config: Mapping[str, Any]) -> tuple[mmap.mmap, Rows]:
    fd, offset, length = config["region"]
    before = offset % mmap.ALLOCATIONGRANULARITY
    mapping = mmap.mmap(fd, before + length, offset=offset - before)
    mapping.madvise(mmap.MADV_DONTFORK)  # a fork may outlive this process, and the engine then reuses the slots
    _drop_descriptors(os.fstat(fd))
    row_bytes = config["row_bytes"]
    return mapping, Rows(memoryview(mapping)[before:].cast("B", (length // row_bytes, row_bytes)))


def _drop_descriptors(file: os.stat_result) -> None:
    """Redirect a file's descriptors to /dev/null. A mmap object keeps a descriptor that a library could write to."""
    with open(os.devnull, "r+b", buffering=0) as null:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of the listing itself is closed by now
                if os.path.samestat(os.fstat(int(name)), file):
                    os.dup2(null.fileno(), int(name), inheritable=False)


def _prepare(server: Server, mapping: mmap.mmap) -> None:
    """Create the store's clients and fill the page tables, so that the first blocks do not wait for them.

    Creating an S3 client takes 0.3 s. Page tables take 0.2 % of the region's size in memory. Without filling them in
    advance, page faults would halve the speed of the first pass over the region.
    """
    server.prepare()
    for start in range(0, len(mapping), _TOUCH_BYTES):
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, min(_TOUCH_BYTES, len(mapping) - start))
        except (OSError, ValueError):  # a kernel before Linux 5.14
            return
        time.sleep(0)


def seal_from_json(fields: dict[str, Any]) -> Seal:
    """The inverse of ``Seal.to_json``. Imports cryptography only if the seal has keys."""
    identity = bytes.fromhex(fields["fingerprint"]), fields["rank"]
    writer_id = bytes.fromhex(fields["writer_id"])
    if "keys" not in fields:
        return Seal(*identity, writer_id=writer_id)
    from ..blocks.protected_seal import GcmSeal

    keys = {number: bytes.fromhex(key) for number, key in fields["keys"]}
    return GcmSeal(*identity, keys=keys, writer_id=writer_id)
