"""IsolatedMover: a BlockMover that has the store's worker processes move whole batches.

A thread that moves blocks must get the GIL back after each system call and each checksum, seven times a block. While
the scheduler's thread runs Python code, it yields the GIL only every 5 ms (sys.getswitchinterval), so a block takes
35 ms. 128 KiB blocks were stored at 12 MB/s and loaded at 20 MB/s, against 2,000 and 4,900 MB/s beside an idle thread.
A worker process has its own GIL, and one message moves a whole batch.
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

from ..blocks.keys import OffloadKey
from ..blocks.seal import TRAILER_BYTES, Checksum, Seal
from ..errors import StoreError, StoreFullError
from ..plain_logs import get_logger
from ..store import Store
from ..tier.batches import Pair
from ..tier.block_mover import Batch, BlockMover, MoveTask, Rows, Window
from ..tier.concurrency import Concurrency
from ..tier.pool import Unfinished

logger = get_logger(__name__)

_COUNT = struct.Struct("=I")
_FIELDS = tuple(each.name for each in fields(Batch))
_KEY_FIELDS = frozenset({"succeeded", "found", "gone", "unreadable", "bad", "suspects"})
_COUNTERS = frozenset({"outcomes", "errors", "verify_failures"})
JOINED_S = 0.02  # of work in a message of several tasks, so that a job does not wait longer for other jobs' blocks


WorkerFunction = Callable[[Any, memoryview, Any, memoryview], object]


@runtime_checkable
class RunsInWorkers(Protocol):
    """A store whose worker processes map the region: ``tiers.isolation.store.ProcessIsolatedStore``."""

    maps_region: bool
    deadline_s: float

    def run(self, function: WorkerFunction, argument: object, raw: bytes = b"", *, puts_bytes: int = 0) -> Any:
        """Call ``function(store, region, argument, raw)`` in a worker.

        Args:
            puts_bytes: the most bytes that it puts. Its result is a dict; "put_bytes" is how many it may have put.
        """
        ...

    def abandon(self) -> None:
        """Close at once, without waiting for running calls."""
        ...


class IsolatedMover(BlockMover):
    """A BlockMover for a store that ``RunsInWorkers``.

    One message carries the batches of one or more tasks. If its worker does not finish, all of them fail. ``cut`` keeps
    new messages from being sent, but does not end a message under way. Probes read through the store's own calls.

    Attributes:
        begin_s: for how long a worker may start blocks of a message. The others go back into the queue.
        message_blocks_max: tasks are joined into messages of at most so many blocks.
        loading, storing: how many threads a worker uses for a message; None: one thread, because blocks do not wait.
    """

    store: Any
    begin_s: float
    message_blocks_max: int = 1
    loading: Concurrency | None = None
    storing: Concurrency | None = None
    _load_block_s = _store_block_s = math.inf  # seconds per block in the last message; any thread

    def batch_blocks(self, *, is_load: bool) -> tuple[float, float]:
        concurrency = self.loading if is_load else self.storing
        return (0, math.inf) if concurrency is None else (2 * concurrency.threads, concurrency.batch_blocks_max)

    def joins(self, first: MoveTask) -> Callable[[MoveTask], bool]:
        """See ``BlockMover.joins``. A message should take less than ``JOINED_S``."""
        at_least, at_most = self.batch_blocks(is_load=first.is_load)
        block_s = self._load_block_s if first.is_load else self._store_block_s
        room = min(self.message_blocks_max, at_most, max(at_least, JOINED_S / block_s)) - len(first.pairs)

        def has_room_for(task: MoveTask) -> bool:
            nonlocal room
            room -= len(task.pairs)
            return room >= 0

        return has_room_for

    def move(self, tasks: Sequence[MoveTask]) -> Sequence[Batch | Unfinished[MoveTask]]:
        moves = [task for task in tasks if not task.is_probe]
        begin = [task for task in moves if self._may_begin(task)]
        if begin:
            self._send(begin)
        return [
            self.probe_reads(task) if task.is_probe else Unfinished(task) if self._may_begin(task) else task.batch
            for task in tasks
        ]

    def _may_begin(self, task: MoveTask) -> bool:
        """Drop the pairs of a task that is too late. False: no pairs are left."""
        if self.cut or self._clock() >= task.deadline:
            self._drop(len(task.pairs), self.cut or "deadline", task.batch)
            task.pairs = ()
        return bool(task.pairs)

    def _send(self, tasks: Sequence[MoveTask]) -> None:
        """Have a worker move tasks that have blocks left. Blocks that it did not start stay in ``pairs``."""
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
            "to_replace": [] if is_load else [place for place, (key, _) in enumerate(pairs) if self.must_replace(key)],
        }
        puts_bytes = 0 if is_load else len(pairs) * (self._rows.row_bytes + TRAILER_BYTES)
        try:
            answer = self.store.run(move_batches, request, pack_pairs(pairs), puts_bytes=puts_bytes)
        except StoreError as e:
            self._fail(tasks, e)
            return
        for warning in answer["warnings"]:
            self._warn_once(warning)
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
        if not begun:  # the storage does not answer
            for task in tasks:
                self._drop(len(task.pairs), "deadline", task.batch)
                task.pairs = ()

    def _fail(self, tasks: Sequence[MoveTask], error: StoreError) -> None:
        """Record that a message failed as a whole."""
        if type(error) is StoreError:  # no store raises the base class, so the worker's code is at fault
            logger.error("tier %s: a batch failed in its worker: %s", self.name, error)
        for task in tasks:
            task.batch.outcomes["failed"] += len(task.pairs)
            task.batch.errors[type(error).__name__] += len(task.pairs)
            task.pairs = ()
        if error.retryable:  # counts as one fault of the storage, however many jobs had blocks in the message
            tasks[0].batch.fault = str(error)
        elif isinstance(error, StoreFullError):
            tasks[0].batch.full = str(error)

    @cached_property
    def _description(self) -> str:
        """The settings of a worker's mover, as text, so that the worker can compare them with its current mover's."""
        return json.dumps(
            {
                "tier": self.name,
                "row_bytes": self._rows.row_bytes,
                "name_prefix": self._name_prefix,
                "seal": self._seal.to_json(),
            }
        )


def move_batches(store: Store, region: memoryview, request: dict[str, Any], packed: memoryview) -> dict[str, Any]:
    """In the worker: move the batches of a message, and return the ``Batch`` of each as JSON values."""
    mine = _worker_mover(request["mover"], store, region)
    mover = mine.mover
    pairs = unpack_pairs(packed)
    mover.must_replace = {pairs[place][0] for place in request["to_replace"]}.__contains__
    move = mover.load_batch if request["is_load"] else mover.store_batch
    started, cpu_started = time.monotonic(), time.process_time()
    windows, at = [], 0
    for count, begin_within_s in request["batches"]:
        windows.append(Window(mover, pairs[at : at + count], started + begin_within_s, time.monotonic))
        at += count
    batches = _move_by_threads(move, windows, request["threads"])
    took = (time.monotonic() - started, time.process_time() - cpu_started)
    put = 0
    if not request["is_load"]:
        blocks = sum(batch.outcomes["moved"] + batch.perhaps_stored for batch in batches)
        put = blocks * (mover.row_bytes + TRAILER_BYTES)
    # One text of ``said`` is enough: the next batch says it again, and the engine's process logs only few of them.
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


@dataclass(slots=True)
class _WorkerMover:
    """A worker's mover, and the texts it passed to ``warn`` and ``say`` since the last batch."""

    mover: BlockMover
    warnings: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


_movers: dict[str, _WorkerMover] = {}  # only the last mover: creating one costs as much as moving four 128 KiB blocks


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
        _movers.clear()
        mine = _movers[description] = _WorkerMover(mover, warnings, said)
    return mine


def seal_from_json(fields: dict[str, Any]) -> Seal:
    """The inverse of ``Seal.to_json``. Imports cryptography only if the seal has keys."""
    identity = bytes.fromhex(fields["fingerprint"]), fields["rank"]
    options: dict[str, Any] = {
        "checksum": Checksum(fields["checksum"]),
        "writer_id": bytes.fromhex(fields["writer_id"]),
    }
    if "keys" not in fields:
        return Seal(*identity, **options)
    from ..blocks.protected_seal import GcmSeal

    return GcmSeal(*identity, keys={number: bytes.fromhex(key) for number, key in fields["keys"]}, **options)


def _move_by_threads(move: Callable[[Iterable[Pair]], Batch], windows: Sequence[Window], threads: int) -> list[Batch]:
    """Move the blocks; each thread takes the next block. No thread touches a slot after this returns or raises."""

    def move_all() -> list[Batch]:
        return [move(window) for window in windows]

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


_pools: dict[int, ThreadPoolExecutor] = {}  # number of threads -> the largest pool so far; one batch at a time uses it


def _thread_pool(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads all run, so that no block stays queued because its thread cannot be started."""
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


def pack_pairs(pairs: Sequence[Pair]) -> bytes:
    """Encode keys and blocks as bytes. Encoding 64 pairs as JSON took a tenth as long as moving them."""
    blocks, lengths = [block for _, block in pairs], [len(key) for key, _ in pairs]
    head = struct.pack(f"=I{len(pairs)}I{len(pairs)}H", len(pairs), *blocks, *lengths)
    return b"".join((head, *(key for key, _ in pairs)))


def unpack_pairs(packed: memoryview) -> list[Pair]:
    """Decode the bytes of ``pack_pairs``."""
    data = bytes(packed)
    (count,) = _COUNT.unpack_from(data)
    head = struct.Struct(f"={count}I{count}H")
    numbers = head.unpack_from(data, _COUNT.size)
    blocks, lengths = numbers[:count], numbers[count:]
    ends = accumulate(lengths, initial=_COUNT.size + head.size)
    keys = [OffloadKey(data[start:end]) for start, end in pairwise(ends)]
    return list(zip(keys, blocks, strict=True))


def _encode(batch: Batch, window: Window) -> dict[str, Any]:
    """Encode the fields that are not empty, keys as positions in the window. No "succeeded": all blocks succeeded."""
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
