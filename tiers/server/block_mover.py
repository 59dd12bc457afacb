"""BlockMover: stores, loads and looks up a batch of blocks on a tier's threads, and verifies them.

The store reads and writes the region's slots directly. Nothing here copies, joins or keeps a block, except that a block
is encrypted into its thread's buffer.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from ..blocks.batches import Batch, Pair
from ..blocks.file_mapper import block_name
from ..blocks.keys import OffloadKey
from ..blocks.rows import Rows
from ..blocks.seal import TRAILER_BYTES, Seal
from ..errors import (
    BlobCorruptError,
    BlobNotFoundError,
    SealError,
    SealReason,
    StoreConfigError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreUnavailableError,
)
from ..plain_logs import get_logger
from ..store import Store, SupportsPieces, SupportsTail

logger = get_logger(__name__)

#: Blocks of this size or more are checksummed piece by piece while they move. Speed relative to plain preadv on one
#: core and ext4, whole and in pieces: 0.65 and 0.65 at 2 MiB, 0.68 and 0.74 at 4 MiB, 0.63 and 0.75 at 16 MiB.
PIECEWISE_BYTES_MIN = 4 << 20
LENT_LOOK_S = 0.01  # between checks of slots that a store still uses
_SINGLE_BLOCK_ERRORS = (StoreUnavailableError, StorePermissionError)  # errors that may concern only one block


class BlockMover:
    """Moves batches of blocks. Any thread may call.

    A load never removes a bad block: this host's memory or network may have damaged the read, and other hosts may read
    the block well. The next store overwrites the block with the same content (``must_replace``), which does no harm if
    the block was good. A store that cannot overwrite a bad block reads it once more and deletes it first, unless the
    last such deletion made no room.

    Args:
        name: the tier's name, for logs.
        name_prefix: prefix of the blocks' names in the store; see ``tiers.blocks.file_mapper.block_name``.
        rows: the region.
        say: called each time with an error that only an operator can fix. The caller limits how often it is logged.

    Attributes:
        must_replace: tells whether a store must overwrite a block that looks good, because its last load failed.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        name_prefix: str,
        seal: Seal,
        rows: Rows,
        say: Callable[[str], None],
    ) -> None:
        self.name = name
        self.store = store
        self.must_replace: Callable[[OffloadKey], bool] = lambda _: False
        self._deletes_in_vain = False  # the last block that was deleted to make room could not be stored
        # Checked once: isinstance with a protocol looks up every method, 4 µs a block.
        self._tails = store if isinstance(store, SupportsTail) else None
        is_large = rows.row_bytes >= PIECEWISE_BYTES_MIN
        self._pieces = store if is_large and isinstance(store, SupportsPieces) else None
        self._name_prefix = name_prefix
        self._say = say
        self._seal = seal
        self._rows = rows

    def store_batch(self, pairs: Iterable[Pair]) -> Batch:
        """Store blocks, except those that are already stored intact."""
        batch = Batch()
        for key, block in pairs:
            try:
                outcome = self._store_one(key, self._rows[block], batch)
            except StoreError as e:
                self._note("store", e)
                batch.errors[type(e).__name__] += 1
                if e.retryable:  # full or read-only storage is not a fault, because blocks can still be loaded
                    batch.fault = str(e)
                    batch.perhaps_stored += 1
                elif isinstance(e, StoreFullError):
                    batch.full = str(e)
                outcome = "failed"
            except SealError as e:  # the slot was changed while it was encrypted
                batch.verify_failures[e.reason] += 1
                outcome = "failed"
            batch.outcomes[outcome] += 1
            if outcome != "failed":
                batch.succeeded.append(key)
            if outcome == "already_stored":
                batch.found.append(key)
        batch.bytes_moved = (len(batch.succeeded) - len(batch.found)) * self._rows.row_bytes
        return batch

    def _store_one(self, key: OffloadKey, row: memoryview, batch: Batch) -> str:
        """Store one block unless it is already stored intact; returns the outcome."""
        name = block_name(self._name_prefix, key)
        # Put first, and check only if a blob exists: most blocks are new, and a check costs as much as a small put.
        published = self._put(name, key, row, overwrite=False)
        if published:
            self._deletes_in_vain = False
            return "moved"
        overwrite = self.must_replace(key)
        try:
            self._check_stored(key, name)
            if not overwrite:
                return "already_stored" if published is False else "moved"  # None: the store cannot tell
        except BlobNotFoundError:
            overwrite = False  # deleted between the put and the check
        except _SINGLE_BLOCK_ERRORS:
            if not overwrite:
                raise
        except BlobCorruptError:
            batch.verify_failures[SealReason.SIZE] += 1
            overwrite = True
        except SealError as e:
            batch.verify_failures[e.reason] += 1
            if e.foreign:  # perhaps an intact block of a newer version, which must not be replaced
                batch.errors["ForeignBlock"] += 1
                if e.reason is SealReason.UNKNOWN_KEY:
                    self._warn_of_key(e)
                return "failed"
            overwrite = True
        try:
            self._put(name, key, row, overwrite=overwrite)
        except StoreError as e:
            if not overwrite or e.retryable:
                raise
            # There may be no room for the new block beside the bad block.
            if self._is_good(key, name):
                return "already_stored"
            if self._deletes_in_vain:
                raise
            self.store.delete(name)
            self._deletes_in_vain = True
            published = self._put(name, key, row, overwrite=False)
            self._deletes_in_vain = False
            if published is False:
                raise  # a folder has this name, or another writer was faster
        batch.healed += overwrite
        return "moved"

    def _is_good(self, key: OffloadKey, name: str) -> bool:
        """Read a stored block once more, outside the region.

        Raises:
            SealError: only another reader can judge it.
            StoreError: it cannot be read, so nobody here knows what it is.
        """
        row, trailer = memoryview(bytearray(self._rows.row_bytes)), bytearray(TRAILER_BYTES)
        try:
            self.store.get_into(name, (row, memoryview(trailer)))
            self._seal.open_in_place(key, row, trailer)
        except (BlobCorruptError, BlobNotFoundError):
            return False
        except SealError as e:
            if e.foreign:
                raise
            return False
        return True

    def _put(self, name: str, key: OffloadKey, row: memoryview, *, overwrite: bool) -> bool:
        if self._pieces is None or not self._seal.stores_as_is:
            parts = [part.toreadonly() for part in self._seal.seal_parts(key, row)]
            return self.store.put(name, parts, overwrite=overwrite)
        checksum = self._seal.running_checksum(row)
        trailer = bytearray(TRAILER_BYTES)

        def look(offset: int, piece: memoryview) -> None:
            checksum.look(offset, piece)
            if offset == row.nbytes:
                trailer[:] = self._seal.trailer(key, row, checksum)

        parts = [row.toreadonly(), memoryview(trailer).toreadonly()]
        return self._pieces.put_pieces(name, parts, look, overwrite=overwrite)

    def _check_stored(self, key: OffloadKey, name: str) -> None:
        """Check the size and trailer of a stored blob. Only the size if the store cannot read the end of a blob."""
        if self._tails is not None:
            size, tail = self._tails.get_tail(name, TRAILER_BYTES) or (None, b"")
        else:
            size, tail = self.store.size(name), None
        if size is None:
            raise BlobNotFoundError("not stored", key=name)
        if size != self._rows.row_bytes + TRAILER_BYTES:
            raise BlobCorruptError(f"{size} bytes, a block here has {self._rows.row_bytes + TRAILER_BYTES}", key=name)
        if tail is not None:
            self._seal.check_trailer(key, tail, self._rows.row_bytes)

    def load_batch(self, pairs: Iterable[Pair]) -> Batch:
        """Fill slots with verified blocks. After the call, even if it raises, the store cannot reach the slots."""
        rows = LentRows(self._rows)
        try:
            return self._load_rows(pairs, rows)
        except BaseException as e:
            _drop_frames(e)
            raise
        finally:
            if not rows.take_back():
                logger.error(
                    "tier %s: a load has ended, but the store still uses its memory; the load is reported when the "
                    "store has released it",
                    self.name,
                )
                rows.wait()

    def _load_rows(self, pairs: Iterable[Pair], rows: LentRows) -> Batch:
        batch = Batch()
        trailer = bytearray(TRAILER_BYTES)
        for key, block in pairs:
            if self._load_one(key, rows[block], trailer, batch):
                batch.succeeded.append(key)
            else:
                batch.outcomes["failed"] += 1
        if moved := len(batch.succeeded):
            batch.outcomes["moved"] = moved
            batch.bytes_moved = moved * self._rows.row_bytes
        return batch

    def _load_one(self, key: OffloadKey, row: memoryview, trailer: bytearray, batch: Batch) -> bool:
        name = block_name(self._name_prefix, key)
        failure: SealError | BlobCorruptError | None = None
        for _ in range(2):  # a torn page, or a blob replaced during the read, can be read correctly the second time
            try:
                seen = None
                if self._pieces is None:
                    self.store.get_into(name, (row, memoryview(trailer)))
                else:
                    seen = self._seal.running_checksum(row)
                    self._pieces.get_pieces_into(name, (row, memoryview(trailer)), seen.look)
                self._seal.open_in_place(key, row, trailer, seen)
                return True
            except (SealError, StoreError) as e:
                # A log's handler or the store may keep the error, and ``failure`` would refer to this frame.
                _drop_frames(e)
                if isinstance(e, SealError | BlobCorruptError):
                    failure = e
                    continue
                if isinstance(e, BlobNotFoundError):
                    batch.gone.append(key)
                else:
                    self._note_load(key, e, batch)
                return False
        assert failure is not None
        reason = failure.reason if isinstance(failure, SealError) else SealReason.SIZE
        batch.verify_failures[reason] += 1
        batch.gone.append(key)
        if not (isinstance(failure, SealError) and failure.foreign):
            batch.bad.append(key)
            if reason is not SealReason.AUTHENTICATION:  # the tag is checked last, so the block was read correctly
                batch.fault = f"{name} is not a valid copy of its block ({failure})"
        if reason is SealReason.UNKNOWN_KEY:
            self._warn_of_key(failure)
        else:
            self._say(f"tier {self.name}: {name} is not a valid copy of its block ({failure})")
        return False

    def _warn_of_key(self, failure: Exception) -> None:
        self._say(
            f"tier {self.name}: stored blocks cannot be authenticated, so they are misses and stay as they are "
            f"({failure}). If keys were rotated, add the old key after the new one. If other engines have a newer key "
            "file, use that file here, too"
        )

    def _note_load(self, key: OffloadKey, error: StoreError, batch: Batch) -> None:
        self._note("load", error)
        batch.errors[type(error).__name__] += 1
        batch.fault = str(error)
        if isinstance(error, _SINGLE_BLOCK_ERRORS):
            batch.unreadable.append(key)

    def _note(self, what: str, error: StoreError) -> None:
        # Debug level, because a line per block would flood the log when a disk is full. Metrics count these errors.
        logger.debug("tier %s: %s failed: %s", self.name, what, error)
        if isinstance(error, StorePermissionError | StoreConfigError):
            self._say(f"tier {self.name}: {what} failed: {error}")

    def probe(self, keys: Sequence[OffloadKey], name_prefix: str = "") -> list[bool | None]:
        """Return whether each key has a blob of a block's size; None: the lookup failed.

        Args:
            name_prefix: prefix of another namespace, whose blocks may have another size.
        """
        expected = self._rows.row_bytes + TRAILER_BYTES
        names = [block_name(name_prefix or self._name_prefix, key) for key in keys]
        found: list[bool | None] = []
        for size in self.store.size_many(names):
            if isinstance(size, StoreError):
                self._note("lookup", size)
            found.append(None if isinstance(size, Exception) else size == expected or bool(name_prefix and size))
        return found


class LentRows:
    """Rows that a store fills in one call. Afterwards the store must not reach them, because slots are reused.

    One thread uses an object.
    """

    def __init__(self, rows: Rows) -> None:
        owner = rows.lend()
        self._owner = weakref.ref(owner)
        self._whole = memoryview(owner).cast("B")
        self._row_bytes = rows.row_bytes
        self._views: list[memoryview] = []

    def __getitem__(self, block: int) -> memoryview:
        start = block * self._row_bytes
        view = self._whole[start : start + self._row_bytes]
        self._views.append(view)
        return view

    def take_back(self) -> bool:
        """Release the views. False: the store still has views or arrays made of them, for example in a thread.

        No living exception may refer to the frames of the call; see ``_drop_frames``.
        """
        for view in (self._whole, *self._views):
            with suppress(BufferError):  # a view is still in use, which ``_owner`` shows as well
                view.release()
        self._views.clear()
        if self._owner() is not None:
            # The view may only be in a reference cycle, such as an exception and its frame. Collect only young objects:
            # a full collection would hold up an engine's scheduler.
            gc.collect(1)
        return self._owner() is None

    def wait(self) -> None:
        """Wait until nothing refers to the rows, however long that takes. The job's deadline cuts the tier off."""
        pause_s = LENT_LOOK_S
        while self._owner() is not None:
            time.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)
            gc.collect(1 if pause_s < 1.0 else 2)  # a thread that ended late may also leave a reference cycle


def _drop_frames(error: BaseException) -> None:
    """Remove the tracebacks of an exception and of its causes, whose frames keep a call's parts in use."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            left += each.__cause__, each.__context__
