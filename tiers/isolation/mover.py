"""IsolatedMover: a BlockMover whose batches are moved whole by the store's worker processes.

A thread that moves blocks takes the GIL back after each system call and each checksum, seven times a block. While the
scheduler's thread runs Python it yields the GIL only every 5 ms (sys.getswitchinterval), which makes 35 ms a block:
128 KiB blocks were stored at 12 MB/s and loaded at 20, against 2,000 and 4,900 beside an idle thread. A worker process
has a GIL of its own, and here one message moves a whole batch.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate, pairwise
from threading import Barrier
from typing import Any, Protocol, runtime_checkable

from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.blocks.seal import TRAILER_BYTES, Seal
from kvtiers.tiers.blocks.seal_kinds import seal_from_json
from kvtiers.tiers.errors import StoreError
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import Store
from kvtiers.tiers.tier.batches import Pair
from kvtiers.tiers.tier.block_mover import Batch, BlockMover, MoveTask, Rows
from kvtiers.tiers.tier.concurrency import Concurrency
from kvtiers.tiers.tier.pool import Unfinished

logger = get_logger(__name__)

_COUNT = struct.Struct("=I")
_FIELDS = tuple(each.name for each in fields(Batch))
_KEY_FIELDS = frozenset({"succeeded", "found", "gone", "unreadable", "stuck"})
_COUNTERS = frozenset({"outcomes", "errors", "verify_failures"})
JOINED_S = 0.02  # of work in a message of several tasks: a job should not wait longer for the others' answers
BEGIN_SHARE = 0.5  # of a worker's deadline; blocks are begun in it, and the last of them end in the rest


WorkerFunction = Callable[[Any, memoryview, Any, memoryview], object]


@runtime_checkable
class RunsInWorkers(Protocol):
    """A store whose processes have the region: ``tiers.isolation.store.ProcessIsolatedStore``."""

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

    One message has the batches of one or more tasks. If its worker does not finish, all of them fail. ``cut`` keeps
    messages from being sent, and ends none that was. ``removes_bad`` is taken as the first message finds it.

    Attributes:
        begin_s: how long a worker begins blocks of a message. The rest goes back into the queue.
        message_blocks_max: tasks join up to so many blocks.
        loading, storing: how many threads a worker uses for a message; None: one, as blocks do not wait.
    """

    store: Any
    begin_s: float
    message_blocks_max: int = 1
    loading: Concurrency | None = None
    storing: Concurrency | None = None
    _load_block_s = _store_block_s = math.inf  # what a block of the last message took; any thread

    def batch_blocks(self, *, is_load: bool) -> tuple[float, float]:
        concurrency = self.loading if is_load else self.storing
        return (0, math.inf) if concurrency is None else (2 * concurrency.threads, concurrency.batch_blocks_max)

    def joins(self, tasks: Sequence[MoveTask], task: MoveTask) -> bool:
        """Whether a message with another task should still take less than ``JOINED_S``."""
        at_least, at_most = self.batch_blocks(is_load=task.is_load)
        block_s = self._load_block_s if task.is_load else self._store_block_s
        limit = min(self.message_blocks_max, at_most, max(at_least, JOINED_S / block_s))
        return len(task.pairs) + sum(len(other.pairs) for other in tasks) <= limit

    def move(self, tasks: Sequence[MoveTask]) -> Sequence[Batch | Unfinished[MoveTask]]:
        begin = [task for task in tasks if self._may_begin(task)]
        if begin:
            self._send(begin)
        return [Unfinished(task) if self._may_begin(task) else task.batch for task in tasks]

    def _may_begin(self, task: MoveTask) -> bool:
        """Drop the pairs of a task that may not begin any more. False: none is left."""
        task.pairs = [pair for pair in task.pairs if not self._is_late(task.deadline, task.batch)]
        return bool(task.pairs)

    def _send(self, tasks: Sequence[MoveTask]) -> None:
        """Have a worker move tasks, each of some blocks. What it did not begin stays in their ``pairs``."""
        is_load = tasks[0].is_load
        concurrency = self.loading if is_load else self.storing
        threads = 1 if concurrency is None else concurrency.threads
        pairs = [pair for task in tasks for pair in task.pairs]
        now = self._clock()
        request = {
            "mover": self._description,
            "is_load": is_load,
            "threads": threads,
            "batches": [(len(task.pairs), min(task.deadline - now, self.begin_s)) for task in tasks],
            "to_replace": [] if is_load else [place for place, (key, _) in enumerate(pairs) if key in self.to_replace],
        }
        puts_bytes = 0 if is_load else len(pairs) * (self._rows.row_bytes + TRAILER_BYTES)
        try:
            answer = self.store.run(move_batches, request, pack_pairs(pairs), puts_bytes=puts_bytes)
        except StoreError as e:
            self._fail(tasks, e)
            return
        for warning in answer["warnings"]:
            self._warn(warning)
        for text in answer["said"]:
            self._say(text)
        failed, left = 0, 0
        for task, of_batch in zip(tasks, answer["batches"], strict=True):
            rest = [task.pairs[place] for place in of_batch.pop("rest", ())]
            batch = _decode(of_batch, [key for key, _ in task.pairs])
            failed += batch.outcomes["failed"]
            left += len(rest)
            task.batch.add(batch)
            task.pairs = rest
        begun = len(pairs) - left
        seconds, cpu_s = answer["took"]
        if concurrency is not None:
            concurrency.learn(threads, begun, seconds, cpu_s, failed=failed > 0)
        block_s = max(seconds, 1e-9) / begun if begun else math.inf
        if is_load:
            self._load_block_s = block_s
        else:
            self._store_block_s = block_s
        if not begun:  # the storage is silent
            for task in tasks:
                self._drop(len(task.pairs), "deadline", task.batch)
                task.pairs = ()

    def _fail(self, tasks: Sequence[MoveTask], error: StoreError) -> None:
        """Note that a message was not answered."""
        if type(error) is StoreError:  # no store raises it: a fault of the worker's
            logger.error("tier %s: a batch failed in its worker: %s", self.name, error)
        for task in tasks:
            task.batch.outcomes["failed"] += len(task.pairs)
            task.batch.errors[type(error).__name__] += len(task.pairs)
            task.pairs = ()
        if error.retryable:  # one fault of the storage, however many jobs had blocks in the message
            tasks[0].batch.fault = str(error)

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
    message_blocks_max: int = 1,
) -> BlockMover:
    """The mover for a store: one that works in its worker processes, if it has any.

    Args:
        worker_threads: how many threads a worker uses for its first batches.
        worker_threads_max: for later ones, at most; more than one only where a block mostly waits.
        begin_s, message_blocks_max: see ``IsolatedMover``.
    """
    if not (isinstance(store, RunsInWorkers) and store.maps_region):
        return BlockMover(name, store, name_prefix, seal, rows, clock)
    mover = IsolatedMover(name, store, name_prefix, seal, rows, clock)
    if max(worker_threads, worker_threads_max) > 1:
        mover.loading, mover.storing = (Concurrency(worker_threads, worker_threads_max) for _ in range(2))
    mover.message_blocks_max = message_blocks_max
    mover.begin_s = BEGIN_SHARE * store.deadline_s if begin_s is None else begin_s
    return mover


def move_batches(store: Store, region: memoryview, request: dict[str, Any], packed: memoryview) -> dict[str, Any]:
    """The worker's part: moves the batches of a message, and returns BlockMover's ``Batch`` of each as JSON values."""
    mine = _worker_mover(request["mover"], store, region)
    mover = mine.mover
    pairs = unpack_pairs(packed)
    mover.to_replace = {pairs[place][0] for place in request["to_replace"]}
    move = mover.load_batch if request["is_load"] else mover.store_batch
    started, cpu_started = time.monotonic(), time.process_time()
    windows, at = [], 0
    for count, begin_within_s in request["batches"]:
        windows.append(_Window(pairs[at : at + count], started + begin_within_s))
        at += count
    batches = _move_by_threads(move, windows, request["threads"])
    took = (time.monotonic() - started, time.process_time() - cpu_started)
    put = 0
    if not request["is_load"]:
        blocks = sum(batch.outcomes["moved"] + batch.perhaps_stored for batch in batches)
        put = blocks * (mover.row_bytes + TRAILER_BYTES)
    # One of what was said is enough: it is said again with the next batch, and the engine's process passes few on.
    answer = {
        "batches": [_encode(batch, window) for batch, window in zip(batches, windows, strict=True)],
        "put_bytes": put,
        "took": took,
        "warnings": mine.warnings[:],
        "said": mine.said[:1],
    }
    mine.warnings.clear()
    mine.said.clear()
    return answer


class _Window:
    """Hands each pair out once, to any thread, until ``end``; ``rest`` has those that are left then.

    It is no generator, which two threads cannot ask at once. A list's iterator does not yield the GIL.
    """

    def __init__(self, pairs: list[Pair], end: float) -> None:
        self.pairs = pairs
        self.rest: list[Pair] = []
        self._left = iter(pairs)
        self._end = end

    def __iter__(self) -> _Window:
        return self

    def __next__(self) -> Pair:
        pair = next(self._left)
        if time.monotonic() < self._end:
            return pair
        self.rest.append(pair)
        self.rest.extend(self._left)
        raise StopIteration


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
    move: Callable[[Iterable[Pair], float], Batch], windows: Sequence[_Window], threads: int
) -> list[Batch]:
    """Move the blocks; each thread takes the next one. Nothing touches a slot any more when this returns or raises."""

    def move_all() -> list[Batch]:
        return [move(window, math.inf) for window in windows]

    if threads == 1:
        return move_all()
    pool = _thread_pool(threads)
    futures = [pool.submit(move_all) for _ in range(threads)]
    wait(futures)
    batches = [Batch() for _ in windows]
    for future in futures:
        for batch, part in zip(batches, future.result(), strict=True):
            batch.add(part)
    return batches


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


def _encode(batch: Batch, window: _Window) -> dict[str, Any]:
    """What is not as in an empty Batch, keys as places in the window; without "succeeded" all blocks did."""
    answer = {name: value for name in _FIELDS if (value := getattr(batch, name))}
    if len(batch.succeeded) == len(window.pairs):
        answer.pop("succeeded", None)
    else:
        answer.setdefault("succeeded", [])
    if answer.keys() & _KEY_FIELDS:
        places = {key: place for place, (key, _) in enumerate(window.pairs)}
        for name in answer.keys() & _KEY_FIELDS:
            answer[name] = [places[key] for key in answer[name]]
    if window.rest:
        places_of_pairs = {pair: place for place, pair in enumerate(window.pairs)}
        answer["rest"] = [places_of_pairs[pair] for pair in window.rest]
    return answer


def _decode(answer: dict[str, Any], keys: list[OffloadKey]) -> Batch:
    batch = Batch()
    for name, value in answer.items():
        if name in _KEY_FIELDS:
            value = [keys[place] for place in value]
        elif name in _COUNTERS:
            value = Counter(value)
        setattr(batch, name, value)
    if "succeeded" not in answer:
        batch.succeeded = keys
    return batch
