"""What breaks during the soak: each place where a tier keeps its blocks, and the thread that breaks them all.

``share`` is the part of the calls that fail all the time. On top of it the thread takes turns with what lasts: a place
that hangs for longer than a job's deadline, a worker process that is killed or stopped, blocks that somebody removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from kvtiers.tiers.errors import StoreUnavailableError
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.testing import faults, http_faults
from kvtiers.tiers.testing.fuse import FuseFault, FuseMount
from tests.soak.s3_server import S3Process

REMOVED_SHARE = 0.3  # of the blocks that are there, in one turn
FAILING = ("open", "read", "write", "flush", "create", "link", "rename", "unlink")  # operations of the file system
QUIET_S = 0.5  # between two turns: circuits close, and the tiers are used again


class Place(ABC):
    """Where a tier keeps its blocks. ``chaos`` calls it, from one thread at a time."""

    name: str

    @abstractmethod
    def set_share(self, share: float) -> None:
        """Make this part of the calls fail; 0 heals the place."""

    @contextlib.contextmanager
    @abstractmethod
    def hung(self) -> Iterator[None]:
        """Nothing ends inside of it."""

    @abstractmethod
    def remove_some(self) -> int:
        """Remove a part of the blocks, as another host's collector does; returns how many."""

    @abstractmethod
    def struck(self) -> Counter[str]:
        """What was injected so far, by kind."""

    @abstractmethod
    def close(self) -> None:
        """Clean up."""


def _remove_files(folder: Path) -> int:
    files = [path for path in folder.rglob("*.bin") if ".tmp" not in path.parts]
    chosen = random.Random(len(files)).sample(files, int(len(files) * REMOVED_SHARE))
    for path in chosen:
        path.unlink(missing_ok=True)
    return len(chosen)


class FusePlace(Place):
    """A folder on a FUSE mount."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._mount = FuseMount(folder / "backing", folder / "mount")
        self.root = self._mount.path / "blocks"
        self._struck: Counter[str] = Counter()

    @property
    def pid(self) -> int:
        """Of the file system's server."""
        return self._mount.server_pid

    def set_share(self, share: float) -> None:
        self._collect()
        # Some ten requests make a store or a load: each fails the less often.
        part = share / 10
        self._mount.plan = [] if not share else [
            *(FuseFault(operation, errno=errno.EIO, share=part) for operation in FAILING),
            FuseFault("write", errno=errno.ENOSPC, share=part),
            FuseFault("flush", errno=errno.EDQUOT, share=part),
            FuseFault("read", errno=errno.ESTALE, share=part),
            *(FuseFault(operation, short_to=5000, share=10 * part) for operation in ("read", "write")),
            *(FuseFault(operation, flip_bit=4321, share=part) for operation in ("read", "write")),
            FuseFault("write", drop=True, share=part),
        ]  # fmt: skip

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        with self._mount.stopped():
            self._struck["hang"] += 1
            yield

    def remove_some(self) -> int:
        return _remove_files(self._mount.backing)

    def struck(self) -> Counter[str]:
        self._collect()
        return self._struck

    def close(self) -> None:
        self._mount.close()

    def _collect(self) -> None:
        for fault, count in zip(self._mount.plan, self._mount.struck(), strict=True):
            self._struck[_kind(fault)] += count
        self._mount.plan = self._mount.plan  # counts begin anew


def _kind(fault: FuseFault) -> str:
    if fault.errno:
        return f"{errno.errorcode[fault.errno]} at {fault.operation}"
    return f"{'lost' if fault.drop else 'short' if fault.short_to else 'flipped'} {fault.operation}"


class LayerPlace(Place):
    """A local folder behind the fault layer, where there is no FUSE."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.root = folder
        self._hang = threading.Event()
        self.store = self.open_store()

    def open_store(self) -> faults.FaultyStore:
        """The store of the next tier, which will close it; faults are its from now on."""
        self.store = faults.FaultyStore(LocalStore(self.root))
        return self.store

    def set_share(self, share: float) -> None:
        def unavailable() -> Exception:
            return StoreUnavailableError("injected")

        part = share / 4
        self.store.plan = [] if not share else [
            *(faults.Fault(m, count=None, error=unavailable, share=part) for m in ("put", "get_into", "get_tail")),
            faults.Fault("put", count=None, error=unavailable, error_after=True, share=part),
            *(faults.Fault(m, count=None, flip_bit=4321, share=part) for m in ("put", "get_into")),
            faults.Fault("get_into", count=None, truncate_to=5000, share=part),
        ]  # fmt: skip

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        self._hang = threading.Event()
        before = self.store.plan
        methods = ("put", "get_into", "get_tail", "size")
        self.store.plan = [faults.Fault(method, count=None, hang=self._hang) for method in methods]
        try:
            yield
        finally:
            self.store.plan = before
            self._hang.set()

    def remove_some(self) -> int:
        return _remove_files(self.root)

    def struck(self) -> Counter[str]:
        struck: Counter[str] = Counter()
        for fault, count in self.store.struck.items():
            what = "hang" if fault.hang else "error" if fault.error else "short" if fault.truncate_to else "flipped"
            struck[f"{what} at {fault.method}"] += count
        return struck

    def close(self) -> None:
        self._hang.set()


class FolderPlace(Place):
    """A plain folder, where there is no FUSE: only blocks that are removed. The tier's workers are broken instead."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.root = folder

    def set_share(self, share: float) -> None:
        """A plain folder does as it is told."""

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        yield

    def remove_some(self) -> int:
        return _remove_files(self.root)

    def struck(self) -> Counter[str]:
        return Counter()

    def close(self) -> None:
        """The folder goes with the soak's."""


class S3Place(Place):
    """A bucket on the HTTP fault server."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.server = S3Process()
        self._share = 0.0

    def set_share(self, share: float) -> None:
        self._share = share
        fault, part, get = http_faults.Fault, share / 10, ["GET"]
        self.server.set_faults(
            []
            if not share
            else [
                *((kind, None, part) for kind in (fault.SLOW_DOWN, fault.INTERNAL_ERROR, fault.TOO_MANY_REQUESTS)),
                *((kind, None, part) for kind in (fault.RESET_BEFORE, fault.LOST_ACK)),
                *((kind, get, part) for kind in (fault.RESET_INSIDE, fault.TRUNCATED, fault.LONGER)),
                *((kind, get, part) for kind in (fault.FLIPPED, fault.HTML_WITH_200)),
            ]
        )

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        self.server.set_faults([(http_faults.Fault.STALL, None, 1.0)])
        try:
            yield
        finally:
            self.set_share(self._share)

    def remove_some(self) -> int:
        return self.server.forget(REMOVED_SHARE)

    def struck(self) -> Counter[str]:
        return Counter(self.server.struck())

    def close(self) -> None:
        self.server.close()


class Chaos:
    """Breaks the places in turns, on a thread of its own, between ``start`` and ``stop``.

    Args:
        share: part of the calls that fail all the time.
        hang_s: how long a place hangs at least: longer than a job's deadline.
        spared: processes that are no workers.
    """

    def __init__(
        self, places: Sequence[Place], *, share: float, hang_s: float, spared: Sequence[int], seed: int
    ) -> None:
        self._places = places
        self._share = share
        self._hang_s = hang_s
        self._spared = frozenset(spared)
        self._random = random.Random(seed)
        self._struck: Counter[str] = Counter()
        self._stopped_pids: list[int] = []
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="soak-chaos", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and heal everything.

        Raises:
            RuntimeError: the chaos itself broke, so the soak shows nothing.
        """
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise RuntimeError("the soak's own chaos failed") from self._failure

    def struck(self) -> dict[str, int]:
        """What was injected, by place and kind. After ``stop``."""
        all_struck = Counter(self._struck)
        for place in self._places:
            all_struck.update({f"{place.name}: {kind}": count for kind, count in place.struck().items()})
        return dict(sorted((kind, count) for kind, count in all_struck.items() if count))

    def _work(self) -> None:
        turns = [self._hang, self._kill_worker, self._stop_worker, self._remove]
        try:
            for place in self._places:
                place.set_share(self._share)
            while not self._stop.wait(QUIET_S):
                self._random.choice(turns)()
            for place in self._places:
                place.set_share(0)
        except BaseException as e:
            self._failure = e
        finally:
            for pid in self._stopped_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _hang(self) -> None:
        place = self._random.choice(self._places)
        with place.hung():
            self._stop.wait(self._hang_s + self._random.uniform(0, 1))

    def _remove(self) -> None:
        for place in self._places:
            self._struck[f"{place.name}: block removed"] += place.remove_some()

    def _kill_worker(self) -> None:
        self._signal_worker(signal.SIGKILL, "worker killed")

    def _stop_worker(self) -> None:
        pid = self._signal_worker(signal.SIGSTOP, "worker stopped")
        if pid is not None:
            self._stopped_pids = [*self._stopped_pids[-16:], pid]

    def _signal_worker(self, number: signal.Signals, kind: str) -> int | None:
        workers = [child.pid for child in psutil.Process().children() if child.pid not in self._spared]
        if not workers:
            return None
        pid = self._random.choice(workers)
        with contextlib.suppress(ProcessLookupError):  # it was replaced meanwhile; pids are not reused that fast
            os.kill(pid, number)
            self._struck[f"nfs: {kind}"] += 1
        return pid
