"""Test data and helper functions of the contract tests."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from itertools import pairwise

from ...daemon_pool import DaemonPool
from ...store import Store, SupportsPieces, SupportsTail, SupportsTouch

SIZES_BYTES = (0, 1, 4095, 4096, 4097, (1 << 20) + 4096)
LARGE_BYTES = (9 << 20) + 4096  # more than 8 MiB, from which clients of object stores split blobs
WAIT_S_MAX = 300.0  # a test's thread that runs longer counts as hanging; on a busy machine, threads take a minute
PARTS_COUNT_LARGE = 1500  # more than IOV_MAX (1,024), so vectored calls must be split
KEYS_COUNT_LARGE = 1100  # more than a page or a request of S3 (1,000)

GOOD_KEYS = (
    "a",
    "a.bin",
    "a b+c%2Fd?e#f&g=h:i*j'k\"l~m",
    "folder/sub folder/name.bin",
    "m_0123456789ab_r0/abc/de_g0/" + "f" * 64 + ".bin",
    "ключ/é/鍵/\U0001f600",
    "00012.50",  # must be treated as text, not as a number
    "1e5/0x10",
    "n" * 255,
    "/".join(["d" * 203] * 4) + "/" + "n" * 208,  # 1,024 bytes
    "tail-dot./..x.".replace("..x", "x.."),
)

BAD_KEYS = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    "a/..",
    ".hidden",
    "a/.hidden/b",
    "a\\b",
    "a\x00b",
    "a\nb",
    "a\x7fb",
    "n" * 256,
    "é" * 128,  # 256 bytes
    "d/" * 512 + "n",  # 1,025 bytes
    "\ud800",  # a lone surrogate cannot be encoded as UTF-8
)


def make_data(size: int, seed: int = 0) -> bytes:
    """Return ``size`` reproducible random bytes."""
    return random.Random(seed).randbytes(size)


def as_parts(data: bytes, *cuts: int) -> list[memoryview]:
    """Cut ``data`` at the given offsets, without a copy."""
    edges = [0, *cuts, len(data)]
    return [memoryview(data)[start:end] for start, end in pairwise(edges)]


def fetch(store: Store, key: str, size: int) -> bytes:
    """Read the blob of ``size`` bytes under ``key`` with ``get_into``."""
    buffer = bytearray(size)
    store.get_into(key, [memoryview(buffer)])
    return bytes(buffer)


def list_keys(store: Store, prefix: str = "") -> list[str]:
    """Return the listed keys, sorted. A key that is listed twice appears twice."""
    return sorted(info.key for info in store.keys(prefix))


def calls_by_key(store: Store) -> dict[str, Callable[[str], object]]:
    """Return every call of the store that takes one key: name -> the call."""
    calls: dict[str, Callable[[str], object]] = {
        "put": lambda key: store.put(key, as_parts(b"1")),
        "put with overwrite": lambda key: store.put(key, as_parts(b"1"), overwrite=True),
        "get_into": lambda key: fetch(store, key, 1),
        "size": store.size,
        "delete": store.delete,
    }
    if isinstance(store, SupportsTail):
        calls["get_tail"] = lambda key: store.get_tail(key, 1)
    if isinstance(store, SupportsTouch):
        calls["touch"] = store.touch
    if isinstance(store, SupportsPieces):
        calls["put_pieces"] = lambda key: store.put_pieces(key, as_parts(b"1"), lambda *_: None)
        calls["get_pieces_into"] = lambda key: store.get_pieces_into(key, [memoryview(bytearray(1))], lambda *_: None)
    return calls


class GuardedParts:
    """Writable parts in one larger mapping, like slots in a region, with guard bytes around each part."""

    GUARD = b"\xa5" * 64

    def __init__(self, *sizes: int, fill: bytes = b"") -> None:
        self.mapping = mmap.mmap(-1, sum(sizes) + len(self.GUARD) * (len(sizes) + 1))
        self.mapping.write(self.GUARD)
        whole = memoryview(self.mapping)
        self.parts: list[memoryview] = []
        for size in sizes:
            start = self.mapping.tell()
            self.parts.append(whole[start : start + size])
            self.mapping.seek(size, 1)
            self.mapping.write(self.GUARD)
        whole.release()
        for part in self.parts if fill else ():
            part[:] = fill[: len(part)]
            fill = fill[len(part) :]

    def lend(self) -> list[memoryview]:
        """Return new views of the parts. If a store keeps a view or the list, ``assert_not_held`` fails."""
        return [part[:] for part in self.parts]

    def joined(self) -> bytes:
        """The joined bytes of the parts."""
        return b"".join(self.parts)

    def assert_only_parts_touched(self) -> None:
        """Assert that no guard byte has changed."""
        guard_size = len(self.GUARD)
        self.mapping.seek(0)
        for size in [*map(len, self.parts), 0]:
            assert self.mapping.read(guard_size) == self.GUARD, "bytes outside the parts were written"
            self.mapping.seek(size, 1)

    def assert_not_held(self) -> None:
        """Assert that no view of the memory is left: a mapping with live views raises BufferError on close."""
        for part in self.parts:
            part.release()
        self.mapping.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true; fail after ``WAIT_S_MAX``."""
    deadline = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline, f"the condition is still false after {WAIT_S_MAX:g} s"
        time.sleep(0.001)


def run_in_threads(*calls: Callable[[], object]) -> None:
    """Run the calls concurrently, each in its own thread. Raises the exception of the first call that failed.

    A call that hangs fails the test; its thread is abandoned, because waiting for it would never end.
    """
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        barrier.wait(WAIT_S_MAX)
        call()

    pool = DaemonPool(len(calls), "kvtiers-contract")
    futures = [pool.submit(run, call) for call in calls]
    late = wait(futures, WAIT_S_MAX).not_done
    pool.shutdown(0.0 if late else WAIT_S_MAX)
    for future in futures:
        if future not in late:
            future.result()
    assert not late, f"{len(late)} of {len(calls)} threads hang: not finished after {WAIT_S_MAX:g} s"
