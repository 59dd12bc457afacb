"""ProcessIsolatedStore: a store whose I/O is done by processes that can be killed.

A thread in a system call on a hung NFS mount can be neither cancelled nor forgotten: it may still write into the slot
that it reads for. A process can be killed, and once it is reaped it touches nothing any more. So:

- Each call is handed to one worker process, which has made the store from its recipe. The calling thread waits on the
  worker's socket, off the GIL, for ``deadline_s`` at most. Then it kills the worker (SIGKILL), waits until that is
  reaped, and raises StoreTimeoutError. The worker is replaced.
- A call returns only after the reap, because whoever gets its error may use the slot again. A process in
  uninterruptible wait (state D: a FUSE server that has taken the request, a broken disk) is reaped only when that wait
  ends. Its call stays until then and is counted in ``stuck_calls``, so that a caller with a deadline of its own can put
  the slot aside. Inner stores must not use O_DIRECT on a network: the kernel may fill such a buffer after the process
  is gone.
- Parts inside the region are sent as offsets: the worker has mapped the same memory. Small ones elsewhere (a trailer)
  go with the message; large ones through the bounce file, a memfd per worker, at the cost of one more copy.

Workers are fresh interpreters: a fork of a process with threads copies locks that nobody will release, and
multiprocessing's start methods bring pickle and run the main module again. A worker with a file store takes 0.08 s and
19 MB (measured on 2 cores).

A worker dies with its parent, by the end of its socket and by PR_SET_PDEATHSIG. That signal is sent when the *thread*
that started the worker ends, so one thread, which lives as long as the store, starts them all.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import starmap
from typing import Any

from kvtiers.tiers.errors import (
    StoreClosedError,
    StoreConfigError,
    StoreError,
    StoreThrottledError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from kvtiers.tiers.isolation.pool import WorkerPool, WorkersUnavailableError
from kvtiers.tiers.isolation.process import MappedRegion, Message, StoreRecipe, WorkerProcess
from kvtiers.tiers.isolation.worker import OPTIONAL_METHODS, decode_error
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import Capabilities, KeyInfo, Store

__all__ = ["ProcessIsolatedStore", "StoreRecipe"]

logger = get_logger(__name__)

RUN_MODULES = ("kvtiers.tiers.isolation.mover",)  # what tiers have workers ``run``; imported while they are idle
BATCH_COUNT_MAX = 256  # blobs of one message, so that frames stay small
LISTINGS_MAX = 4  # at once; each has a process of its own
ABANDON_S = 0.5
REDELIVERIES_MAX = 8  # of one call, where workers were dead before they took it


class ProcessIsolatedStore(Store):
    """A store layer. Any thread of the process that made it may call; ``_lock`` guards the count of listings.

    It has ``get_tail``, ``quarantine`` and ``folders`` where its store has them, and always ``size_many``,
    ``delete_many`` and ``get_many_into``, which cost one message for up to 256 keys. ``run`` calls a function of the
    caller's in a worker.

    Args:
        recipe: the store.
        region: the memory in which most parts lie, a C-contiguous view of any shape; kept until ``close``. If other
            processes cannot map it, that is logged once and all parts are copied.
        n_workers: processes, each for one call at a time.
        deadline_s: of one call, about one blob or a batch, from when a worker has it. Waiting for a free worker is
            not part of it, so that none is killed because others hang, but takes as long at most.
        close_s: how long ``close`` takes at most; calls under way have half of it to end.
        hidden_variables: environment variables that workers do not get.
        memory_bytes_max: of each worker's own, beyond what it has at its start; None: no limit. A worker that wants
            more dies, as one that is killed does.
        clock: monotonic seconds.

    Raises:
        StoreError: as the store's constructor, unless that may pass (it is retryable) and the recipe names a class with
            ``capabilities``: then calls fail until the storage is back.
        WorkersUnavailableError: no worker process can be started, or none lives.
        StoreConfigError: the recipe cannot be handed over or used.
    """

    def __init__(
        self,
        recipe: StoreRecipe,
        *,
        region: memoryview | None = None,
        n_workers: int = 2,
        deadline_s: float = 10.0,
        close_s: float = 3.0,
        hidden_variables: Collection[str] = (),
        memory_bytes_max: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if n_workers < 1 or deadline_s <= 0 or close_s <= 0:
            raise StoreConfigError("n_workers is 1 or more, deadline_s and close_s are more than 0")
        self.deadline_s = deadline_s
        self._close_s = close_s
        self._clock = clock
        self._lock = threading.RLock()  # reentrant: a listing may be collected, and end, under it
        self._listings = 0
        self._region = MappedRegion(region) if region is not None else None
        imports = RUN_MODULES if region is not None else ()
        config = {**recipe.encode(), "imports": imports, "memory_bytes_max": memory_bytes_max}
        self._pool = WorkerPool(
            config, region=self._region, n_workers=n_workers, clock=clock, hidden_variables=hidden_variables
        )
        try:
            self.capabilities, extras = self._describe(recipe)
        except BaseException:
            self.close()
            raise
        # On the instance: whether a store has an extra is asked with isinstance, which looks for the attribute.
        for name in extras:
            setattr(self, name, getattr(self, f"_{name}"))

    @property
    def stuck_calls(self) -> int:
        """Calls that were given up and whose worker is not reaped yet: their parts may still be touched."""
        return self._pool.stuck_calls

    @property
    def kills(self) -> int:
        """Workers that were killed or found dead, so far."""
        return self._pool.kills

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers for calls."""
        return sorted(worker.process.pid for worker in list(self._pool.workers))

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        message = Message(self._region)
        message.add([key, overwrite], parts)
        published: bool = self._one("put", message, key)
        return published

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        message = Message(self._region)
        message.add([key], parts)
        self._one("get", message, key)

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
        """See ``Store.keys``. A listing of more than a page has a process of its own (0.1 s); its start and each page
        have the deadline.

        Raises:
            StoreThrottledError: LISTINGS_MAX are under way.
        """
        page, _ = self._ask("first_page", [prefix], "")
        if page is not None:
            yield from starmap(KeyInfo, page)
            return
        self._pool.check_usable()
        with self._lock:
            if self._listings >= LISTINGS_MAX:
                raise StoreThrottledError(f"{LISTINGS_MAX} listings are under way")
            self._listings += 1
        worker = None
        try:
            worker = self._pool.start_further(self.deadline_s)
            worker.send("keys", [prefix], self._deadline_at())
            while True:
                (page, (failure,)), _ = worker.receive(self._deadline_at())
                if failure is not None:
                    raise decode_error(failure)
                if not page:
                    return
                yield from starmap(KeyInfo, page)
        except TimeoutError as e:
            what = "the start of a listing's worker" if worker is None else "a page of the listing"
            raise StoreTimeoutError(f"{what} took more than {self.deadline_s:g} s") from e
        except (OSError, EOFError, RuntimeError) as e:
            raise self._lost(worker, e) from e
        finally:
            if worker is not None:
                self._pool.end_further(worker)
            with self._lock:
                self._listings -= 1

    def close(self) -> None:
        """See ``Store.close``. Takes ``close_s`` at most; workers that cannot be reaped by then are left to die."""
        if self._pool.close(self._close_s) and self._region is not None:
            self._region.close()

    def abandon(self) -> None:
        """Close at once: workers are killed, and calls under way end with an error."""
        self._close_s = min(self._close_s, ABANDON_S)
        self.close()

    # ---- many at once ------------------------------------------------------------------------------------------------

    @property
    def maps_region(self) -> bool:
        """Whether the workers have the region, without which ``run`` has nothing to work on."""
        return self._region is not None and self._region.fd >= 0

    def run(
        self,
        function: Callable[[Any, memoryview, Any, memoryview], object],
        argument: object,
        raw: bytes = b"",
        *,
        puts_bytes: int = 0,  # noqa: ARG002 - for layers that keep accounts
    ) -> Any:
        """Call ``function(store, region, argument, raw)`` in a worker and return what it returns.

        The worker finds the function by module and name; argument and result are JSON values. All of it has
        ``deadline_s``.

        Raises:
            StoreError: the function raised, or the worker died or was killed.
        """
        value, _ = self._ask("run", [function.__module__, function.__qualname__, argument], "", raw)
        return value

    def get_many_into(self, requests: Sequence[tuple[str, Sequence[memoryview]]]) -> list[Exception | None]:
        """See ``SupportsGetMany``. Where a message fails, at its deadline say, all of its keys fail."""
        outcomes: list[Exception | None] = []
        for start in range(0, len(requests), BATCH_COUNT_MAX):
            asked = requests[start : start + BATCH_COUNT_MAX]
            message = Message(self._region)
            for key, parts in asked:
                message.add([key], parts)
            try:
                (_, failures), _ = self._exchange("get", message, "")
            except StoreClosedError:
                raise
            except StoreError as e:
                outcomes += [type(e)(str(e), key=key) for key, _ in asked]
            else:
                outcomes += [None if failure is None else decode_error(failure) for failure in failures]
        return outcomes

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        """See ``SupportsSizeMany``."""
        return self._many("size_many", keys)

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        """See ``SupportsDeleteMany``."""
        return self._many("delete_many", keys)

    def _get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        size, raw = self._ask("get_tail", [key, length], key)
        return None if size is None else (size, bytes(raw))

    def _quarantine(self, key: str) -> None:
        self._ask("quarantine", [key], key)

    def _folders(self) -> list[str]:
        names: list[str] = self._ask("folders", [], "")[0]
        return names

    # ---- one request -------------------------------------------------------------------------------------------------

    def _one(self, operation: str, message: Message, key: str) -> Any:
        (value, (failure,)), _ = self._exchange(operation, message, key)
        if failure is not None:
            raise decode_error(failure)
        return value

    def _many(self, operation: str, keys: Sequence[str]) -> list[Any]:
        self._pool.check_usable()
        answers: list[Any] = []
        for start in range(0, len(keys), BATCH_COUNT_MAX):
            asked = list(keys[start : start + BATCH_COUNT_MAX])
            try:
                values, _ = self._ask(operation, [asked], "")
            except StoreClosedError:
                raise
            except StoreError as e:
                answers += [type(e)(str(e), key=key) for key in asked]
            else:
                answers += [decode_error(value) if isinstance(value, list) else value for value in values]
        return answers

    def _ask(self, operation: str, arguments: list[Any], key: str, raw: bytes = b"") -> tuple[Any, memoryview]:
        message = Message(None)
        message.items = arguments
        message.raw = raw
        (value, (failure,)), answer = self._exchange(operation, message, key)
        if failure is not None:
            raise decode_error(failure)
        return value, answer

    def _exchange(self, operation: str, message: Message, key: str) -> tuple[Any, memoryview]:
        """Have one worker do it, and return its answer's content and raw bytes.

        Raises:
            StoreTimeoutError: the deadline passed; the worker is gone.
            StoreUnavailableError: the worker died.
        """
        give = operation == "put"
        for _ in range(REDELIVERIES_MAX):
            worker = self._take_worker(key)
            deadline = self._deadline_at()
            answer = None
            try:
                message.send(worker, operation, deadline, give=give)
                answer = worker.receive(deadline)
                if not give:
                    message.fill_outside(worker, *answer)
                message.release(worker)
                return answer
            except TimeoutError as e:
                raise StoreTimeoutError(
                    f"{operation} took more than {self.deadline_s:g} s; its worker was killed", key=key
                ) from e
            except ConnectionError:
                continue  # reset: it died before it read the request
            except (OSError, EOFError) as e:
                raise self._lost(worker, e, key) from e
            finally:
                if answer is None:
                    self._pool.discard(worker)
                else:
                    self._pool.give_back(worker)
        raise WorkersUnavailableError(f"{REDELIVERIES_MAX} workers died before they took the call", key=key)

    def _describe(self, recipe: StoreRecipe) -> tuple[Capabilities, Sequence[str]]:
        """What the store can do, as a worker's says, else as its class does.

        Raises:
            WorkersUnavailableError: no worker lives to say so.
        """
        try:
            (capabilities, extras), _ = self._ask("describe", [], "")
            return Capabilities(**capabilities), extras
        except WorkersUnavailableError:
            raise
        except StoreError as e:
            found: Any = getattr(sys.modules.get(recipe.module), recipe.name, None)
            capabilities = getattr(found, "capabilities", None)
            if not e.retryable or not isinstance(capabilities, Capabilities):
                raise
            logger.warning("%s starts without its storage: %s", recipe.name, e)
            return capabilities, [name for name in OPTIONAL_METHODS if hasattr(found, name)]

    def _deadline_at(self) -> float:
        return self._clock() + self.deadline_s

    def _lost(self, worker: WorkerProcess | None, error: Exception, key: str = "") -> StoreError:
        if self._pool.closed:
            return StoreClosedError("the store was closed", key=key)
        if worker is None:
            return StoreUnavailableError(f"no worker could be started: {error}", key=key)
        return StoreUnavailableError(f"worker {worker.process.pid} died during the call: {error!r}", key=key)

    def _take_worker(self, key: str) -> WorkerProcess:
        try:
            return self._pool.take(self.deadline_s)
        except TimeoutError as e:
            raise StoreTimeoutError(f"no worker was free within {self.deadline_s:g} s", key=key) from e
        except StoreError as e:
            raise type(e)(str(e), key=key) from e
