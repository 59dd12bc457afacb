"""Fault injection: a store layer that fails by plan, system calls that fail by number, processes that are killed.

A layer, to test code that uses a store::

    store = FaultyStore(MemoryStore(), [Fault("get_into", first=3, flip_bit=17), Fault("put", count=None, error=...)])
    store.plan = []  # healed

System calls, to test stores on a file system (``tiers.stores.files`` and ``vectored_io`` make all of their system
calls). Run the test once to count the calls, then once for each call::

    with SyscallFaults() as dry:
        store.put("a", parts)
    for n in range(len(dry.calls)):
        with SyscallFaults(at=n, error=errno.EIO):
            ...

Processes: ``run_in_child`` forks, which takes milliseconds instead of the start of a new interpreter.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from unittest import mock

from ..store import KeyInfo, Store
from ..stores import vectored_io
from ..stores.files import (
    cleanup as folder_cleanup,
)
from ..stores.files import (
    listing as folder_listing,
)
from ..stores.files import (
    posix,
    publish,
)
from .store_layer import Layer

T = TypeVar("T")

# ---- a store that fails by plan --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in some calls of one method of a store.

    Attributes:
        method: such as "put", "get_into" or "get_tail".
        first: number of the first affected call, from 1.
        count: number of affected calls. None: all further calls.
        delay_s: passed to the store's ``sleep`` before the call.
        hang: the call waits for this event first, without limit.
        error: creates the exception that is raised instead of the call; any BaseException, as one may end a thread.
        error_after: make the call and raise ``error`` after it, as with a lost acknowledgement.
        flip_bit: number of a bit to flip in the data that ``put`` stores, ``get_into`` fills or ``get_tail`` returns.
        truncate_to: number of bytes that ``put`` stores, or that ``get_into`` fills before the rest is set to zero.
        share: probability from 0 to 1 with which each call between ``first`` and the end of ``count`` is affected.
    """

    method: str
    first: int = 1
    count: int | None = 1
    delay_s: float = 0.0
    hang: threading.Event | None = None
    error: Callable[[], BaseException] | None = None
    error_after: bool = False
    flip_bit: int | None = None
    truncate_to: int | None = None
    share: float = 1.0

    def strikes(self, method: str, number: int) -> bool:
        """Whether the fault may affect this call; if ``share`` is less than 1, chance decides."""
        return (
            method == self.method and number >= self.first and (self.count is None or number < self.first + self.count)
        )

    def damage(self, data: bytearray) -> None:
        """Flip and truncate ``data`` in place as the fault says."""
        if self.flip_bit is not None and data:
            position, bit = divmod(self.flip_bit % (8 * len(data)), 8)
            data[position] ^= 1 << bit
        if self.truncate_to is not None:
            del data[self.truncate_to :]


class FaultyStore(Layer):
    """A store layer that fails by plan. Any thread may call; ``_lock`` owns ``calls`` and ``struck``.

    ``plan`` may be replaced at any time.

    Args:
        store: the inner store; closed with this layer.
        plan: the faults. Several faults may affect one call, in the order of the plan.
        sleep: waits for a fault's ``delay_s``.
        rng: random numbers for faults with a ``share``.

    Attributes:
        calls: method -> number of calls so far.
        struck: fault -> number of calls affected so far.
    """

    def __init__(
        self,
        store: Store,
        plan: Iterable[Fault] = (),
        *,
        sleep: Callable[[float], object] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(store)
        self.plan: Sequence[Fault] = tuple(plan)
        self.calls: Counter[str] = Counter()
        self.struck: Counter[Fault] = Counter()
        self._sleep = sleep
        self._random = random.Random(0) if rng is None else rng
        self._lock = threading.Lock()
        if hasattr(store, "get_tail"):
            self.get_tail = self._get_tail  # a fault can damage its result

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        faults = self._before("put")
        for fault in faults:
            if fault.flip_bit is not None or fault.truncate_to is not None:
                data = bytearray(b"".join(parts))
                fault.damage(data)
                parts = [memoryview(data)]
        published = self.inner.put(key, parts, overwrite=overwrite)
        self._after(faults)
        return published

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        faults = self._before("get_into")
        self.inner.get_into(key, parts)
        for fault in faults:
            if fault.flip_bit is not None or fault.truncate_to is not None:
                data = bytearray(b"".join(parts))
                fault.damage(data)
                for part in parts:
                    part.cast("B")[:] = data[: part.nbytes].ljust(part.nbytes, b"\0")
                    del data[: part.nbytes]
        self._after(faults)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        return self._around("keys", lambda: self.inner.keys(prefix))

    def close(self) -> None:
        self._around("close", self.inner.close)

    def _get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        faults = self._before("get_tail")
        found: tuple[int, bytes] | None = getattr(self.inner, "get_tail")(key, length)  # noqa: B009 - optional
        if found is not None:
            size, tail = found[0], bytearray(found[1])
            for fault in faults:
                fault.damage(tail)
            found = size, bytes(tail)
        self._after(faults)
        return found

    def _around(self, method: str, call: Callable[[], T]) -> T:
        faults = self._before(method)
        answer = call()
        self._after(faults)
        return answer

    def _before(self, method: str) -> list[Fault]:
        with self._lock:
            self.calls[method] += 1
            faults = [
                fault
                for fault in self.plan
                if fault.strikes(method, self.calls[method])
                and (fault.share == 1 or self._random.random() < fault.share)
            ]
            self.struck.update(faults)
        for fault in faults:
            if fault.delay_s:
                self._sleep(fault.delay_s)
            if fault.hang is not None:
                fault.hang.wait()
            if fault.error is not None and not fault.error_after:
                raise fault.error()
        return faults

    @staticmethod
    def _after(faults: list[Fault]) -> None:
        for fault in faults:
            if fault.error is not None and fault.error_after:
                raise fault.error()


# ---- system calls that fail by number --------------------------------------------------------------------------------

SYSTEM_CALLS = frozenset(
    [
        "open",
        "close",
        "read",
        "fstat",
        "stat",
        "preadv",
        "pwritev",
        "link",
        "rename",
        "unlink",
        "mkdir",
        "scandir",
        "fdatasync",
        "fsync",
        "fstatvfs",
    ]
)


class SyscallFaults:
    """Counts the system calls of the stores on a file system (see above) and makes the n-th call fail.

    A context manager that affects the whole process, so use only one at a time. A failing call is not made, except
    ``close``, because on Linux close frees the descriptor even if it fails. The garbage collector is off meanwhile:
    it would close the descriptors of objects that are long out of use, and those calls would be counted.

    Args:
        at: number of the failing call, from 0. -1: no call fails; only count.
        error: errno of the failing call.
        short: do not fail; ``preadv`` and ``pwritev`` move about half of their first part, other calls are unchanged.
        kill: do not fail; kill the process with SIGKILL before the call.
        forever: affect every call from ``at`` on.

    Attributes:
        calls: names of the calls so far, including failed calls.
        failed: names of the failed calls.
    """

    def __init__(
        self, *, at: int = -1, error: int = 0, short: bool = False, kill: bool = False, forever: bool = False
    ) -> None:
        self.calls: list[str] = []
        self.failed: list[str] = []
        self._at = at
        self._error = error
        self._short = short
        self._kill = kill
        self._forever = forever
        self._lock = threading.Lock()
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        if gc.isenabled():
            gc.disable()
            self._patches.callback(gc.enable)
        seam = _Os(self)
        for module in (posix, vectored_io, publish, folder_cleanup, folder_listing):
            self._patches.enter_context(mock.patch.object(module, "os", seam))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _make_call(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._lock:
            number = len(self.calls)
            self.calls.append(name)
        if number == self._at or (self._forever and self._at >= 0 and number > self._at):
            if self._kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._short and name in ("preadv", "pwritev"):
                fd, parts, offset = arguments
                whole = [view for part in parts if (view := part.cast("B")).nbytes]
                return call(fd, [whole[0][: (len(whole[0]) + 1) // 2]], offset) if whole else 0
            if self._error:
                self.failed.append(name)
                if name == "close":
                    call(*arguments, **options)
                raise OSError(self._error, os.strerror(self._error))
        return call(*arguments, **options)


class _Os:
    """Stands in for the os module and routes its system calls through a SyscallFaults."""

    def __init__(self, faults: SyscallFaults) -> None:
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        return functools.partial(self._faults._make_call, name, value) if name in SYSTEM_CALLS else value


# ---- processes -------------------------------------------------------------------------------------------------------


def fork() -> int:
    """``os.fork`` without the warning of Python 3.12 and later about forks beside threads.

    Only for tests: a fork has no other threads, and waits forever for a lock that one of them held. The threads of a
    test wait, or hold locks of objects that the fork does not use. Programs that kvtiers starts are never forks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return os.fork()


def start_child(call: Callable[[], object]) -> int:
    """Run ``call`` in a forked child, which exits with 0, or 1 after an exception. Returns its pid; wait for it."""
    pid = fork()
    if pid:
        return pid
    status = 1
    try:
        call()
        status = 0
    except BaseException:  # noqa: BLE001 - top of a process: the child must not return into the caller's code
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def wait_child(pid: int) -> int:
    """Wait for a child. Returns its exit status, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_in_child(call: Callable[[], object]) -> int:
    """Run ``call`` in a forked child and wait for it: ``start_child`` and ``wait_child``."""
    return wait_child(start_child(call))
