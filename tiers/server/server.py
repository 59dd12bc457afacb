"""Server: does a tier's I/O. One loop reads frames, and a few threads move blocks and look keys up.

A server runs in a separate process (``server.process``). If no other process can map the region, it runs in threads of
the engine's process (``server.threads``). Both use the same frames (``tiers.frames``).

A part, which is some blocks of a job, is cut into pieces, and each thread takes the next piece. So the first blocks of
a part are moved first, and no thread idles while a piece waits. A part is reported when no thread can touch its slots
any more.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import Any, Final

from ..blocks.batches import Batch, Pair, deal
from ..blocks.keys import OffloadKey
from ..blocks.rows import Rows
from ..child_process import receive
from ..errors import KVTiersError, StoreError, StoreUnavailableError
from ..frames import FOUND, Seats, Work, encode_batch, encode_error, pack_frame, unpack_pairs
from ..plain_logs import get_logger
from ..processes import end_if_forked
from ..store import Store
from ..tools.neighbors import tell_nearest
from .block_mover import BlockMover
from .namespace import open_namespace

logger = get_logger(__name__)

PIECE_BYTES_MIN: Final = 1 << 20  # a smaller piece is not worth waking another thread
PIECE_BYTES_MAX: Final = 8 << 20  # so that blocks are spread evenly, and the engine hears of progress
ALIVE_EVERY_S: Final = 1.0
LATE_LOOK_S: Final = 0.25  # between checks for late blocks, while blocks wait


@dataclass(slots=True, eq=False)
class _Part:
    number: int
    is_load: bool
    keys: list[OffloadKey]
    deadline: float
    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    batch: Batch | None = None


_Piece = tuple[_Part, Sequence[Pair]]


class Server:
    """Serves one connection.

    Args:
        sock: a blocking stream socket.
        tag: starts each frame of the connection.
        make_store: creates the store; called again after it failed.
        rows: the region.
        clock: monotonic seconds, the same clock as the engine's deadlines use.
        give_up: called when the memory limit is reached, because a library may never free its memory.
    """

    def __init__(
        self,
        sock: socket.socket,
        tag: bytes,
        make_store: Callable[[], Store],
        rows: Rows,
        work: Work,
        seats: Seats,
        *,
        clock: Callable[[], float] = time.monotonic,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._sock = sock
        self._tag = tag
        self._make_store = make_store
        self._rows = rows
        self._work = work
        self._clock = clock
        self._give_up = give_up
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._sent_at = time.monotonic()
        self._making = threading.Lock()
        self._mover: BlockMover | None = None
        self._cut = ""
        self._to_replace: set[OffloadKey] = set()
        self._said: list[str] = []
        self._loads: deque[_Piece] = deque()
        self._stores: deque[_Piece] = deque()
        # One token per piece. A load-only thread takes a piece without its token, so a later token may find no piece.
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._load_tokens: SimpleQueue[bool] = SimpleQueue()
        self._storing: set[int] = set()  # threads that take or move a store
        self._turns: SimpleQueue[tuple[int, list[OffloadKey], str] | None] = SimpleQueue()
        loads, stores = self._loads, self._stores
        seated: list[tuple[Callable[..., None], tuple[Any, ...], int]] = [
            (self._answer_lookups, (), seats.lookups),
            (self._move_pieces, (self._load_tokens, (loads,)), seats.loads_only),
            (self._move_pieces, (self._tokens, (loads, stores)), seats.loads_first),
            (self._move_pieces, (self._tokens, (stores, loads)), seats.stores_first),
        ]
        self._threads = [
            threading.Thread(target=run, args=arguments, name=f"kvtiers-{work.tier}-{number}", daemon=True)
            for number, (run, arguments) in enumerate(
                (run, arguments) for run, arguments, count in seated for _ in range(count)
            )
        ]
        self._num_movers = seats.loads_first + seats.stores_first  # threads that take tokens
        self._num_loads_only = seats.loads_only

    def serve(self, ends: Sequence[int] = ()) -> None:
        """Serve until the other end of the socket is closed, or a descriptor in ``ends`` is readable."""
        for thread in self._threads:
            thread.start()
        try:
            for frames in receive(self._sock, self._tag, ends, self._idle_s):
                for content, raw in frames:
                    self._take(content, raw)
                self._drop_late()
        except (EOFError, OSError) as e:
            logger.debug("tier %s: the connection ended: %s", self._work.tier, e)
        finally:
            self._cut = "shutdown"
            for _ in self._threads:
                self._tokens.put(False)
                self._load_tokens.put(False)
                self._turns.put(None)

    def _idle_s(self) -> float | None:
        return LATE_LOOK_S if self._loads or self._stores else None

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end after ``serve``. False: some are stuck, and may still touch slots."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def close_store(self) -> None:
        """Close the store, if it was created. Call it after ``join``, or as the last action of this process."""
        if self._mover is not None:
            self._mover.store.close()

    def say_alive(self) -> None:
        """Tell the engine that this server runs. Call it before anything that could end this process."""
        self._send("alive")

    def prepare(self) -> None:
        """Create the store before the first request. After a failure, requests try again and report the error."""
        with suppress(Exception):
            self._get_mover().store.prepare()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _take(self, content: Any, raw: bytes) -> None:
        kind, *arguments = content
        if kind == "look":
            number, *name_prefix = arguments
            self._turns.put((number, [key for key, _ in unpack_pairs(raw)], "".join(name_prefix)))
        elif kind == "cut":
            (self._cut,) = arguments
            self._drop_late()
        elif kind == "open":
            threading.Thread(target=self._open, args=arguments, name="kvtiers-open", daemon=True).start()
        else:
            number, deadline, *to_replace = arguments
            self._take_part(kind == "load", number, deadline, unpack_pairs(raw), *to_replace)

    def _take_part(
        self, is_load: bool, number: int, deadline: float, pairs: list[Pair], to_replace: Sequence[int] = ()
    ) -> None:
        self._to_replace.update(pairs[place][0] for place in to_replace)
        # Otherwise the threads of this process would only take its GIL from each other: a third of the loads' speed.
        helped = self._num_loads_only if is_load and len(self._storing) >= self._num_movers else 0
        num_threads = self._num_movers + helped
        pieces = list(deal(pairs, self._piece_blocks(len(pairs), num_threads), num_threads))
        part = _Part(number, is_load, [key for key, _ in pairs], deadline, len(pieces))
        (self._loads if is_load else self._stores).extend((part, piece) for piece in pieces)
        for _ in pieces:
            self._tokens.put(True)
            if helped:
                self._load_tokens.put(True)

    def _piece_blocks(self, count: int, num_threads: int) -> int:
        """Blocks per piece: 1 if a block mostly waits for the network. Else a thread's share of the part, or more."""
        if self._mover is not None and self._mover.store.capabilities.latency_bound:
            return 1
        row_bytes = self._rows.row_bytes
        share = min(-(-count // num_threads), PIECE_BYTES_MAX // row_bytes)
        return max(share, PIECE_BYTES_MIN // row_bytes, 1)

    def _drop_late(self) -> None:
        """Drop pieces that must not begin any more. The threads cannot do this if all of them hang."""
        for queue in (self._loads, self._stores):
            for piece in list(queue):
                part, pairs = piece
                if self._why_not(part):
                    with suppress(ValueError):  # a thread has just taken the piece
                        queue.remove(piece)
                        self._end_piece(part, self._dropped(part, len(pairs), Batch()))

    # ---- threads -----------------------------------------------------------------------------------------------------

    def _move_pieces(self, tokens: SimpleQueue[bool], queues: Sequence[deque[_Piece]]) -> None:
        me = threading.get_ident()
        while tokens.get():
            for queue in queues:
                if queue is self._stores:
                    self._storing.add(me)
                try:
                    part, pairs = queue.popleft()
                except IndexError:
                    self._storing.discard(me)
                    continue
                self._end_piece(part, self._moved(part, pairs))
                self._storing.discard(me)
                break
            else:
                # A piece may arrive in a queue that this thread found empty, while another thread used its token for a
                # piece elsewhere. Without a token, nobody would take it.
                if any(queues):
                    tokens.put(True)

    def _moved(self, part: _Part, pairs: Sequence[Pair]) -> Batch:
        rest: list[Pair] = []
        try:
            mover = self._get_mover()
            batch = (mover.load_batch if part.is_load else mover.store_batch)(self._begun(part, pairs, rest))
        except BaseException as e:  # noqa: BLE001 - a thread's edge: the job must be reported in any case
            if isinstance(e, MemoryError):
                self._give_up()
            batch, rest = Batch(), []
            batch.outcomes["failed"] = len(pairs)
            batch.errors[type(e).__name__] = len(pairs)
            if isinstance(e, StoreError):
                batch.fault = str(e) if e.retryable else ""
            else:
                self._say(f"{'load' if part.is_load else 'store'} of {len(pairs)} blocks failed: {e!r}")
        return self._dropped(part, len(rest), batch) if rest else batch

    def _begun(self, part: _Part, pairs: Sequence[Pair], rest: list[Pair]) -> Iterator[Pair]:
        """Yield pairs until their deadline; ``rest`` gets the remaining pairs."""
        for place, pair in enumerate(pairs):
            if self._why_not(part):
                rest.extend(pairs[place:])
                return
            yield pair

    def _why_not(self, part: _Part) -> str:
        """The reason why blocks of the part must not begin; "": they may begin."""
        return self._cut or ("deadline" if self._clock() >= part.deadline else "")

    def _dropped(self, part: _Part, count: int, batch: Batch) -> Batch:
        why = self._why_not(part) or "deadline"
        batch.outcomes["dropped"] += count
        batch.errors[why] += count
        return batch

    def _end_piece(self, part: _Part, batch: Batch) -> None:
        end_if_forked(self._pid)
        with part.lock:
            if part.batch is not None:
                batch.add(part.batch)
            part.batch = batch
            part.left -= 1
            ends = not part.left
        if ends:
            if self._to_replace:
                self._to_replace.difference_update(part.keys)
            self._send("moved", part.number, encode_batch(batch, part.keys), self._take_said())
        elif time.monotonic() - self._sent_at > ALIVE_EVERY_S:
            self._send("alive")

    def _answer_lookups(self) -> None:
        while (turn := self._turns.get()) is not None:
            number, keys, name_prefix = turn
            try:
                found = self._get_mover().probe(keys, name_prefix)
                if len(found) != len(keys):
                    raise ValueError(f"{len(found)} answers to {len(keys)} keys")
            except BaseException as e:  # noqa: BLE001 - a thread's edge: a failed lookup is a miss
                if isinstance(e, MemoryError):
                    self._give_up()
                if not isinstance(e, StoreError):
                    self._say(f"lookup of {len(keys)} keys failed: {type(e).__name__}: {e}")
                found = [None] * len(keys)
            answers = bytes(map(FOUND.index, found))
            self._send("looked", number, self._take_said(), raw=answers)

    # ---- the store ---------------------------------------------------------------------------------------------------

    def _get_mover(self) -> BlockMover:
        if self._mover is None:
            with self._making:
                if self._mover is None:
                    self._mover = self._make_mover()
        return self._mover

    def _make_mover(self) -> BlockMover:
        try:
            store = self._make_store()
        except Exception:
            raise
        except BaseException as e:  # a library may raise SystemExit, which must not end this process
            raise StoreUnavailableError(f"the store raised {type(e).__name__}: {e}") from e
        work = self._work
        mover = BlockMover(work.tier, store, work.mapper.name_prefix, work.seal, self._rows, self._say)
        mover.must_replace = self._to_replace.__contains__
        return mover

    def _open(self, number: int) -> None:
        """Check that the storage can be used, and open the namespace."""
        capabilities = error = None
        try:
            store: Any = self._get_mover().store
            capabilities = asdict(store.capabilities)
            if hasattr(store, "check"):
                store.prepare()  # ``check`` has a short time limit
                store.check()
            if open_namespace(store, self._work.mapper, read_only=self._work.read_only):
                tell_nearest(store, self._work.mapper, self._work.tier, lambda found: self._send("nearest", found))
        except BaseException as e:
            error = encode_error(e)
            if not isinstance(e, KVTiersError):
                logger.exception("tier %s: its storage cannot be opened", self._work.tier)
        self._send("opened", number, capabilities, error)

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._said.append(text)

    def _take_said(self) -> list[str]:
        # One text is enough: the next answer repeats it, and the engine's half logs few texts.
        said, self._said[:] = self._said[:1], []
        return said

    def _send(self, *content: object, raw: bytes = b"") -> None:
        frame = pack_frame(self._tag, content, raw)
        end_if_forked(self._pid)
        with self._sending, suppress(OSError):  # the engine has ended, which the loop notices
            self._sock.sendall(frame)
            self._sent_at = time.monotonic()
