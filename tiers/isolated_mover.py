"""IsolatedMover: a BlockMover whose batches are moved whole by the store's worker processes.

A thread that moves blocks takes the GIL back after each system call and each checksum, seven times a block. While the
scheduler's thread runs Python it yields the GIL only every 5 ms (sys.getswitchinterval), which makes 35 ms a block:
128 KiB blocks were stored at 12 MB/s and loaded at 20, against 2,000 and 4,900 beside an idle thread. A worker process
has a GIL of its own, and here one message moves a whole batch.
"""

from __future__ import annotations

import json
import logging
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import accumulate, pairwise
from threading import Barrier
from typing import Any, Protocol, runtime_checkable

from tiers.block_mover import Batch, BlockMover, Rows
from tiers.concurrency import Concurrency
from tiers.errors import StoreError
from tiers.keys import OffloadKey
from tiers.seal import TRAILER_BYTES, Seal
from tiers.seal_kinds import seal_from_json
from tiers.store import Store

logger = logging.getLogger(__name__)

_COUNT = struct.Struct("=I")
BEGIN_SHARE = 0.5  # of a worker's deadline; blocks are begun in it, and the last of them end in the rest


WorkerFunction = Callable[[Any, memoryview, Any, memoryview], object]


@runtime_checkable
class RunsInWorkers(Protocol):
    """A store whose processes have the region: ``tiers.layers.isolate.ProcessIsolatedStore``."""

    maps_region: bool
    deadline_s: float

    def run(self, function: WorkerFunction, argument: object, raw: bytes = b"", *, puts_bytes: int = 0) -> Any:
        """``function(store, region, argument, raw)``, in a worker.

        Args:
            puts_bytes: how many it puts at most; its answer, a dict, has under "put_bytes" how many it may have put.
        """
        ...

    def abandon(self) -> None:
        """Close at once, whatever is under way."""
        ...


class IsolatedMover(BlockMover):
    """As BlockMover, for a store that ``RunsInWorkers``.

    A batch that its worker does not finish fails as a whole. ``cut`` keeps batches from being sent, and ends none that
    was. ``removes_bad`` is taken as the first batch finds it.

    Attributes:
        begin_s: how long a worker begins blocks of a batch.
        loading, storing: how many threads a worker uses for a batch; None: one, as blocks do not wait.
    """

    store: Any
    begin_s: float
    loading: Concurrency | None = None
    storing: Concurrency | None = None

    def store_batch(self, pairs: Iterable[tuple[OffloadKey, int]], deadline: float) -> Batch:
        return self._send("store_batch", pairs, deadline, self.storing)

    def load_batch(self, pairs: Iterable[tuple[OffloadKey, int]], deadline: float) -> Batch:
        return self._send("load_batch", pairs, deadline, self.loading)

    def batch_blocks(self, *, is_load: bool) -> tuple[float, float]:
        concurrency = self.loading if is_load else self.storing
        return (0, math.inf) if concurrency is None else (2 * concurrency.threads, concurrency.batch_blocks_max)

    def _send(
        self,
        operation: str,
        pairs: Iterable[tuple[OffloadKey, int]],
        deadline: float,
        concurrency: Concurrency | None,
    ) -> Batch:
        batch = Batch()
        pairs = [pair for pair in pairs if not self._is_late(deadline, batch)]
        if not pairs:
            return batch
        threads = 1 if concurrency is None else concurrency.threads
        stores = operation == "store_batch"
        request = {
            "mover": self._description,
            "operation": operation,
            "threads": threads,
            "begin_within_s": min(deadline - self._clock(), self.begin_s),
            "unreadable": [place for place, (key, _) in enumerate(pairs) if key in self.unreadable] if stores else [],
        }
        puts_bytes = len(pairs) * (self._rows.row_bytes + TRAILER_BYTES) if stores else 0
        try:
            answer = self.store.run(move_batch, request, pack_pairs(pairs), puts_bytes=puts_bytes)
        except StoreError as e:
            batch.outcomes["failed"] += len(pairs)
            batch.errors[type(e).__name__] += len(pairs)
            if type(e) is StoreError:  # no store raises it: a fault of the worker's
                logger.error("tier %s: a batch failed in its worker: %s", self.name, e)
            if e.retryable:
                batch.fault = str(e)
            return batch
        answer.pop("put_bytes")
        seconds, cpu_s = answer.pop("took")
        if concurrency is not None:
            moved = len(pairs) - answer["outcomes"].get("dropped", 0)  # dropped blocks took no time
            concurrency.learn(threads, moved, seconds, cpu_s, failed=bool(answer["outcomes"].get("failed")))
        for warning in answer.pop("warnings"):
            self._warn(warning)
        for text in answer.pop("said"):
            self._say(text)
        batch.add(_decode(answer, [key for key, _ in pairs]))
        return batch

    @cached_property
    def _description(self) -> str:
        """What a worker makes its mover of. It is text, so that the worker can tell whether it has that mover."""
        return json.dumps(
            {
                "tier": self.name,
                "row_bytes": self._rows.row_bytes,
                "name_prefix": self._name_prefix,
                "seal": self._seal.to_json(),
                "removes_bad": self.removes_bad,
            }
        )


def make_mover(
    name: str,
    store: Store,
    name_prefix: str,
    seal: Seal,
    rows: Rows,
    clock: Callable[[], float],
    *,
    worker_threads: int = 1,
    worker_threads_max: int = 1,
    begin_s: float | None = None,
) -> BlockMover:
    """The mover for a store: one that works in its worker processes, if it has any.

    Args:
        worker_threads: how many threads a worker uses for its first batches.
        worker_threads_max: for later ones, at most; more than one only where a block mostly waits.
        begin_s: see ``IsolatedMover``.
    """
    if not (isinstance(store, RunsInWorkers) and store.maps_region):
        return BlockMover(name, store, name_prefix, seal, rows, clock)
    mover = IsolatedMover(name, store, name_prefix, seal, rows, clock)
    if max(worker_threads, worker_threads_max) > 1:
        mover.loading, mover.storing = (Concurrency(worker_threads, worker_threads_max) for _ in range(2))
    mover.begin_s = BEGIN_SHARE * store.deadline_s if begin_s is None else begin_s
    return mover


def move_batch(store: Store, region: memoryview, request: dict[str, Any], packed: memoryview) -> dict[str, Any]:
    """The worker's part: moves the batch, and returns BlockMover's ``Batch`` as JSON values."""
    mine = _worker_mover(request["mover"], store, region)
    mover = mine.mover
    pairs = unpack_pairs(packed)
    mover.unreadable = {pairs[place][0] for place in request["unreadable"]}
    move = partial(getattr(mover, request["operation"]), deadline=time.monotonic() + request["begin_within_s"])
    started, cpu_started = time.monotonic(), time.process_time()
    batch = move(pairs) if request["threads"] == 1 else _move_by_threads(move, pairs, request["threads"])
    took = (time.monotonic() - started, time.process_time() - cpu_started)
    answer = {field.name: getattr(batch, field.name) for field in fields(batch)}  # asdict cannot copy a Counter
    answer["succeeded"] = None  # all
    answer["found"] = answer["gone"] = answer["unreadable"] = []
    if batch.found or len(batch.succeeded) != len(pairs):
        places = {key: place for place, (key, _) in enumerate(pairs)}
        for name in ("succeeded", "found", "gone", "unreadable"):
            answer[name] = [places[key] for key in getattr(batch, name)]
    put = 0
    if request["operation"] == "store_batch":
        put = (batch.outcomes["moved"] + batch.perhaps_stored) * (mover.row_bytes + TRAILER_BYTES)
    # One of what was said is enough: it is said again with the next batch, and the engine's process passes few on.
    answer |= {"put_bytes": put, "took": took, "warnings": mine.warnings[:], "said": mine.said[:1]}
    mine.warnings.clear()
    mine.said.clear()
    return answer


@dataclass(slots=True)
class _WorkerMover:
    """A worker's mover, and its warnings and what it said since the last batch."""

    mover: BlockMover
    warnings: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


_movers: dict[str, _WorkerMover] = {}  # the last one: making it takes as long as moving four blocks of 128 KiB


def _worker_mover(description: str, store: Store, region: memoryview) -> _WorkerMover:
    mine = _movers.get(description)
    if mine is None or mine.mover.store is not store:
        parts = json.loads(description)
        row_bytes = parts["row_bytes"]
        warnings: list[str] = []
        said: list[str] = []
        mover = BlockMover(
            parts["tier"],
            store,
            parts["name_prefix"],
            seal_from_json(parts["seal"]),
            Rows(region.cast("B", (len(region) // row_bytes, row_bytes))),
            time.monotonic,
            warnings.append,
            said.append,
        )
        mover.removes_bad = parts["removes_bad"]
        _movers.clear()
        mine = _movers[description] = _WorkerMover(mover, warnings, said)
    return mine


def _move_by_threads(
    move: Callable[[Iterable[tuple[OffloadKey, int]]], Batch], pairs: Sequence[tuple[OffloadKey, int]], threads: int
) -> Batch:
    """Move the blocks; each thread takes the next one. Nothing touches a slot any more when this returns or raises."""
    shared = iter(pairs)  # hands each pair out once: a list's iterator does not yield the GIL
    pool = _thread_pool(threads)
    futures = [pool.submit(move, shared) for _ in range(threads)]
    wait(futures)
    batch = Batch()
    for future in futures:
        batch.add(future.result())
    return batch


_pools: dict[int, ThreadPoolExecutor] = {}  # the largest so far, by its threads; one batch at a time uses it


def _thread_pool(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads all run: a block must not be left queued because its thread cannot be started."""
    largest = max(_pools, default=0)
    if threads <= largest:
        return _pools[largest]
    pool = ThreadPoolExecutor(threads)
    all_run = Barrier(threads)
    try:
        started = [pool.submit(all_run.wait) for _ in range(threads)]
    except RuntimeError:
        all_run.abort()
        pool.shutdown(wait=False)
        if largest:
            return _pools[largest]
        raise
    wait(started)
    for smaller in _pools.values():
        smaller.shutdown(wait=False)
    _pools.clear()
    _pools[threads] = pool
    return pool


def pack_pairs(pairs: Sequence[tuple[OffloadKey, int]]) -> bytes:
    """Keys and blocks as bytes. As JSON, 64 of them took a tenth of the time that moving them took."""
    blocks, lengths = [block for _, block in pairs], [len(key) for key, _ in pairs]
    head = struct.pack(f"=I{len(pairs)}I{len(pairs)}H", len(pairs), *blocks, *lengths)
    return b"".join((head, *(key for key, _ in pairs)))


def unpack_pairs(packed: memoryview) -> list[tuple[OffloadKey, int]]:
    """The other end of ``pack_pairs``."""
    data = bytes(packed)
    (count,) = _COUNT.unpack_from(data)
    head = struct.Struct(f"={count}I{count}H")
    numbers = head.unpack_from(data, _COUNT.size)
    blocks, lengths = numbers[:count], numbers[count:]
    ends = accumulate(lengths, initial=_COUNT.size + head.size)
    keys = [OffloadKey(data[start:end]) for start, end in pairwise(ends)]
    return list(zip(keys, blocks, strict=True))


def _decode(answer: dict[str, Any], keys: list[OffloadKey]) -> Batch:
    places = answer["succeeded"]
    answer["succeeded"] = keys if places is None else [keys[place] for place in places]
    for name in ("found", "gone", "unreadable"):
        answer[name] = [keys[place] for place in answer[name]]
    for name in ("outcomes", "errors", "verify_failures"):
        answer[name] = Counter(answer[name])
    return Batch(**answer)
