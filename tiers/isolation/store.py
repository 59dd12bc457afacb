"""ProcessIsolatedStore: runs a store's I/O in worker processes, which can be killed when the storage hangs.

A thread in a system call on a hung NFS mount can be neither cancelled nor abandoned: it may still write into the slot
that it reads into. A process can be killed, and once it is reaped, it cannot touch memory any more. So:

- Each call goes to one worker process, which has created the store from its recipe. The calling thread waits on the
  worker's socket, without the GIL, for at most ``deadline_s``. Then it kills the worker (SIGKILL), waits until the
  worker is reaped, and raises StoreTimeoutError. The worker is replaced.
- A call returns only after the reap, because the caller may reuse the slot as soon as it gets the error. A process in
  uninterruptible wait (state D: a FUSE server that has taken the request, a broken disk) is reaped only when that wait
  ends. Until then the call does not return. ``stuck_calls`` counts such calls, so that a caller with its own deadline
  can set the slot aside. Inner stores must not use O_DIRECT on a network: the kernel may fill such a buffer after the
  process is gone.
- Parts inside the region are sent as offsets, because the worker has mapped the same memory. Parts outside go through
  the scratch file, a memfd per worker, and are copied once more.
- A store's library may do anything in its worker: fork, end the process, write into any descriptor. A worker is killed
  with its process group. Its forks do not map the region and cannot answer. An answer counts only with its request's
  random tag; after anything else the worker is killed (``worker``).

Workers are fresh interpreters. A fork of a process with threads copies locks that no thread will release, and
multiprocessing's start methods use pickle and run the main module again. A worker with a file store takes 0.08 s to
start and 19 MB of memory (measured on 2 cores).

A worker dies with its parent, by the end of its socket and by PR_SET_PDEATHSIG. The kernel sends that signal when the
*thread* that started the worker ends, so a single thread, which lives as long as the store, starts all workers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from typing import Any

from ..errors import (
    StoreClosedError,
    StoreConfigError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from ..plain_logs import get_logger
from ..store import Capabilities, KeyInfo, Store
from . import calls
from .pool import WorkerPool, WorkersUnavailableError
from .process import MappedRegion, StoreRecipe, WorkerProcess
from .worker import StrayBytesError, decode_error

__all__ = ["ProcessIsolatedStore", "StoreRecipe"]

logger = get_logger(__name__)


BATCH_COUNT_MAX = 256  # blobs in one message, so that frames stay small
ABANDON_S = 0.5
#: Assumed for a store that a factory function makes, until the store exists.
UNKNOWN = Capabilities(exclusive_create=False, shared=True, latency_bound=True)
REDELIVERIES_MAX = 8  # deliveries of one call, if workers die before they take it


class ProcessIsolatedStore(Store):
    """A store layer. Any thread of the process that created it may call.

    It has ``get_tail``, ``quarantine`` and ``folders`` if its store has them. It always has ``size_many``
    and ``delete_many``, which cost one message for up to 256 keys.

    Args:
        recipe: how a worker creates the store.
        region: the memory in which most parts lie, a C-contiguous view of any shape; kept until ``close``. If other
            processes cannot map it, this is logged once, and all parts are copied.
        n_workers: number of worker processes; each does one call at a time.
        deadline_s: time limit of one call (for one blob or a batch), from when a worker has it. Waiting for a free
            worker has a separate limit of the same length, so that no worker is killed because others hang.
        close_s: time limit of ``close``; running calls get half of it to end.
        memory_bytes_max: memory that a worker may allocate beyond what it has at its start; None: no limit. A worker
            that exceeds the limit dies, and its call fails as if the worker had been killed.

    Attributes:
        missing: why the store could not be created at the start; None: it was created.

    Raises:
        StoreError: raised by the store's constructor. If the error is retryable, it is kept in ``missing``, and calls
            fail until the storage is back.
        WorkersUnavailableError: no worker process can be started, or none stays alive.
        StoreConfigError: the recipe cannot be encoded, or it cannot be used.
    """

    def __init__(
        self,
        recipe: StoreRecipe,
        *,
        region: memoryview | None = None,
        n_workers: int = 2,
        deadline_s: float = 10.0,
        close_s: float = 3.0,
        memory_bytes_max: int | None = None,
    ) -> None:
        if n_workers < 1 or deadline_s <= 0 or close_s <= 0:
            raise StoreConfigError("n_workers must be 1 or more; deadline_s and close_s must be more than 0")
        self.deadline_s = deadline_s
        self._close_s = close_s
        self._region = MappedRegion(region) if region is not None else None
        config = {**recipe.encode(), "memory_bytes_max": memory_bytes_max}
        self.missing: StoreError | None = None
        self._pool = WorkerPool(config, region=self._region, n_workers=n_workers)
        try:
            self.capabilities, extras = self._describe(recipe)
        except BaseException:
            self.close()
            raise
        # Set on the instance, because isinstance checks for an optional protocol by looking for its attribute.
        for name in extras:
            setattr(self, name, getattr(self, f"_{name}"))

    @property
    def stuck_calls(self) -> int:
        """Number of failed calls whose worker is killed but not reaped yet: it may still touch their parts."""
        return self._pool.stuck_calls

    @property
    def kills(self) -> int:
        """Number of workers that were killed or found dead so far."""
        return self._pool.kills

    @property
    def worker_pids(self) -> list[int]:
        """Process IDs of the workers."""
        return sorted(worker.process.pid for worker in list(self._pool.workers))

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        segments, outside = self._locate(parts)
        published: bool = self._call(calls.put, (key, overwrite, segments), key, given=outside)
        return published

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        segments, outside = self._locate(parts)
        self._call(calls.get, (key, segments), key, taken=outside)

    def size(self, key: str) -> int | None:
        (size,) = self.size_many([key])
        if isinstance(size, Exception):
            raise size
        return size

    def delete(self, key: str) -> None:
        (failure,) = self.delete_many([key])
        if failure is not None:
            raise failure

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        """See ``Store.keys``. A listing of more than one page keeps a worker until it ends.

        Each page has a time limit of ``deadline_s``. While as many listings are unfinished as there are workers, other
        calls wait, and fail after ``deadline_s``.
        """
        page = self._call(calls.first_page, prefix)
        if page is not None:
            yield from starmap(KeyInfo, page)
            return
        worker = self._take_worker()
        is_usable = False  # until the listing has ended, the worker holds its state
        try:
            while page := worker.call(calls.next_page, prefix, self._deadline_at()):
                yield from starmap(KeyInfo, page)
            is_usable = True
        except TimeoutError as e:
            text = f"a page of the listing took more than {self.deadline_s:g} s; its worker was killed"
            raise StoreTimeoutError(text) from e
        except (OSError, EOFError) as e:
            raise self._lost(worker, e) from e
        finally:
            (self._pool.give_back if is_usable else self._pool.discard)(worker)

    def close(self) -> None:
        """See ``Store.close``. Takes at most ``close_s``; workers that cannot be reaped by then are left to die."""
        if self._pool.close(self._close_s) and self._region is not None:
            self._region.close()

    def abandon(self) -> None:
        """Close without waiting: kill the workers; running calls fail."""
        self._close_s = min(self._close_s, ABANDON_S)
        self.close()

    # ---- many at once ------------------------------------------------------------------------------------------------

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        """See ``Store``."""
        return self._many(keys, lambda part: self._call(calls.size_many, list(keys[part])))

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        """See ``Store``."""
        return self._many(keys, lambda part: self._call(calls.delete_many, list(keys[part])))

    def _get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        found = self._call(calls.get_tail, (key, length), key)
        return None if found is None else (found[0], bytes.fromhex(found[1]))

    def _quarantine(self, key: str) -> None:
        self._call(calls.quarantine, key, key)

    def _check(self) -> None:
        self._call(calls.check, None)

    def _folders(self) -> list[str]:
        names: list[str] = self._call(calls.folders, None)
        return names

    # ---- one message -------------------------------------------------------------------------------------------------

    def _locate(self, parts: Sequence[memoryview]) -> tuple[list[tuple[int, int]], list[memoryview]]:
        if self._region is not None:
            return self._region.locate(parts)
        return [(-1, part.nbytes) for part in parts], [part.cast("B") for part in parts]

    def _many(self, keys: Sequence[str], ask: Callable[[slice], list[Any]]) -> list[Any]:
        """Answers of several messages, with a StoreError where a key failed."""
        self._pool.check_usable()
        answers: list[Any] = []
        for start in range(0, len(keys), BATCH_COUNT_MAX):
            part = slice(start, start + BATCH_COUNT_MAX)
            try:
                answers += [decode_error(value) if isinstance(value, list) else value for value in ask(part)]
            except StoreClosedError:
                raise
            except StoreError as e:
                answers += [type(e)(str(e), key=key) for key in keys[part]]
        return answers

    def _call(
        self,
        function: Callable[..., object],
        argument: object,
        key: str = "",
        *,
        given: Sequence[memoryview] = (),
        taken: Sequence[memoryview] = (),
    ) -> Any:
        """Call a function in a worker; see ``WorkerProcess.call``.

        Raises:
            StoreTimeoutError: the deadline passed; the worker has been killed and reaped.
            StoreUnavailableError: the worker died.
            StoreError: the function raised.
        """
        has_run = False
        for _ in range(REDELIVERIES_MAX):
            worker = self._take_worker(key)
            is_usable = False
            try:
                value = worker.call(function, argument, self._deadline_at(), given=given, taken=taken)
                is_usable = True
                return value
            except StoreError:
                is_usable = True
                raise
            except TimeoutError as e:
                raise StoreTimeoutError(
                    f"{function.__name__} took more than {self.deadline_s:g} s; its worker was killed", key=key
                ) from e
            except ConnectionError:  # connection reset: the worker died before it read the request
                has_run |= worker.has_run
                continue
            except (OSError, EOFError) as e:
                raise self._lost(worker, e, key) from e
            finally:
                (self._pool.give_back if is_usable else self._pool.discard)(worker)
        if has_run:
            raise StoreUnavailableError(f"{REDELIVERIES_MAX} workers died while they created their store", key=key)
        raise WorkersUnavailableError(f"{REDELIVERIES_MAX} workers died before they took the call", key=key)

    def _describe(self, recipe: StoreRecipe) -> tuple[Capabilities, Sequence[str]]:
        """The store's capabilities and optional methods: from a worker or, if none answers, from the recipe's class.

        Raises:
            StoreError: an error that is not retryable.
            WorkersUnavailableError: no worker lives long enough to answer.
        """
        try:
            capabilities, extras = self._call(calls.describe, None)
            return Capabilities(**capabilities), extras
        except WorkersUnavailableError:
            raise
        except StoreError as e:
            if not e.retryable:
                raise
            late = isinstance(e, StoreTimeoutError)
            self.missing = StoreTimeoutError(f"it was not created within {self.deadline_s:g} s") if late else e
            found: Any = getattr(sys.modules.get(recipe.module), recipe.name, None)
            capabilities = getattr(found, "capabilities", None)
            if not isinstance(capabilities, Capabilities):
                return UNKNOWN, []
            return capabilities, [name for name in calls.OPTIONAL_METHODS if hasattr(found, name)]

    def _deadline_at(self) -> float:
        return time.monotonic() + self.deadline_s

    def _lost(self, worker: WorkerProcess, error: Exception, key: str = "") -> StoreError:
        if self._pool.closed:
            return StoreClosedError("the store was closed", key=key)
        if isinstance(error, StrayBytesError):
            return StoreUnavailableError(
                f"worker {worker.process.pid} was killed: {error}. Does the store's library fork, or write into files "
                "that it has not opened?",
                key=key,
            )
        return StoreUnavailableError(f"worker {worker.process.pid} died during the call: {error!r}", key=key)

    def _take_worker(self, key: str = "") -> WorkerProcess:
        try:
            return self._pool.take(self.deadline_s)
        except TimeoutError as e:
            raise StoreTimeoutError(f"no worker was free within {self.deadline_s:g} s", key=key) from e
        except StoreError as e:
            raise type(e)(str(e), key=key) from e
