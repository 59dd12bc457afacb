"""LocalStore: one file per blob, ``<root_dir>/<key>``, on a file system of this host. Base of the other file stores.

The docstring of ``posix`` describes how a blob is read, and the docstring of ``publish`` how a blob is published. The
root also holds ``.tmp`` (files being written).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from typing import Any, TypeVar

from ...errors import (
    BlobCorruptError,
    BlobNotFoundError,
    ConfigError,
    InvalidKeyError,
    StoreClosedError,
    StoreConfigError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    printable,
)
from ...plain_logs import get_logger
from ...store import Capabilities, KeyInfo, Look, Store, check_key, parts_size
from ..os_errors import ABSENT, store_error
from ..vectored_io import write_all
from .cleanup import hidden_names, remove_blobs, sweep, touch_blob
from .listing import folder_names, walk
from .posix import RootFolder, blob_size, read_blob, read_tail, remove_blob
from .publish import FreeSpace, Publisher

T = TypeVar("T")

logger = get_logger(__name__)

PUBLISH_ATTEMPTS_MAX = 5  # attempts of a put whose folder is removed while it is being written
#: Errors of a file that does not exist. ESTALE, after a second attempt: another host removed it.
GONE = (*ABSENT, errno.ESTALE)
#: Folders and files that cannot be read: how many are noted, and how many of these are logged, each once.
SKIPPED_MAX = 10_000
LOGGED_MAX = 32


class LocalStore(Store):
    """Stores blobs as files. Any thread may call, also in forked children. ``_lock`` is held to replace ``_root``.
    ``skipped`` only grows; without a lock, two threads may log the same folder twice.

    A process that dies leaves no incomplete blob. Nothing is synced: a power failure may lose or corrupt blobs of the
    last seconds, which their seals reveal.

    Files are created with mode 0600 and folders with 0700. Nothing outside the root is read or written, even if other
    users put links into it: a symbolic link, a FIFO or a device under a key raises BlobCorruptError.

    Args:
        root_dir: the root folder. It is created if it is missing, and again by a put if it was removed. Its parents may
            be symbolic links; the root itself must not be one.
        read_only: the root must exist; opening and ``sweep`` remove nothing. (Callers make no other writing calls.)
        min_free_bytes: a put that would leave less free space than this raises StoreFullError. 0: no limit. See
            ``FreeSpace`` for several processes.

    Attributes:
        skipped: names, relative to the root, of folders and files that listings skipped because this user or the disk
            cannot read them. Up to ``SKIPPED_MAX``.

    Raises:
        ConfigError: an argument is not accepted.
        StoreConfigError, StorePermissionError, StoreUnavailableError: the root is not a folder or cannot be created.
    """

    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=False)
    _unnamed_files = True  # publish with O_TMPFILE where the file system supports it

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        *,
        read_only: bool = False,
        min_free_bytes: int = 0,
    ) -> None:
        if min_free_bytes < 0:
            raise ConfigError(f"{min_free_bytes} is not accepted; write 0 or more bytes", field="min_free_bytes")
        self.root_dir = os.path.abspath(root_dir)
        self._space = FreeSpace(min_free_bytes) if min_free_bytes else None
        self._publisher = Publisher(unnamed_files=self._unnamed_files)
        self._read_only = read_only
        self._lock = threading.Lock()
        self.skipped: set[str] = set()
        self._swept_count = 0  # set when the store is opened, and by the thread that sweeps
        root = self._open_root(make=not read_only)
        self._root: RootFolder | None = root
        if read_only:
            return
        try:
            self._swept_count = self._sweep(root)
        except (OSError, StoreError) as e:
            # Blobs can be read even if leftover files cannot be removed (in a read-only root, say).
            # Log the text: a handler that keeps the record would keep the exception's frames, and so the root open.
            logger.warning("%s: files of dead writers were not removed: %s", self.root_dir, str(e))

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        return self._put(key, parts, None, overwrite=overwrite)

    def put_aged(self, key: str, parts: Sequence[memoryview], *, used_at: float) -> bool:
        """See ``SupportsAges``."""
        return self._put(key, parts, None, overwrite=True, used_at=used_at)

    def put_pieces(self, key: str, parts: Sequence[memoryview], look: Look, *, overwrite: bool = False) -> bool:
        """See ``SupportsPieces``."""
        return self._put(key, parts, look, overwrite=overwrite)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self._get_into(key, parts, None)

    def get_pieces_into(self, key: str, parts: Sequence[memoryview], look: Look) -> None:
        """See ``SupportsPieces``."""
        self._get_into(key, parts, look)

    def size(self, key: str) -> int | None:
        return self._call(blob_size, key)

    def delete(self, key: str) -> None:
        self._call(remove_blob, key)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        """List blobs, except those below more than ``FOLDERS_DEEP_MAX`` folders."""
        root = self._use_existing_root()
        try:
            yield from walk(root, prefix, self._log_skipped)
        except OSError as e:
            raise store_error(e, prefix) from e

    def close(self) -> None:
        with self._lock:
            self._root = None

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """See ``SupportsTail``."""
        return self._call(read_tail, key, length, absent=(errno.ENOENT, errno.ESTALE))

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        """See ``Store``. Folders that become empty are removed too."""
        root = self._use_root(None)
        outcomes: dict[str, Exception | None] = {}
        for key in keys:
            try:
                outcomes[check_key(key)] = None
            except InvalidKeyError as e:
                outcomes[key] = e
        good = [key for key, error in outcomes.items() if error is None]
        failed = remove_blobs(root, good)
        outcomes.update((key, store_error(e, key)) for key, e in failed.items())
        return [outcomes[key] for key in keys]

    def touch(self, key: str) -> None:
        """See ``SupportsTouch``."""
        self._call(touch_blob, key)

    def sweep(self, *, remove: bool = True) -> int:
        """See ``KeepsFiles``."""
        is_dry = self._read_only or not remove
        count = self._ask(lambda root: self._sweep(root, remove=not is_dry))
        if is_dry:
            return self._swept_count + count
        self._swept_count += count
        return self._swept_count

    def hidden_names(self) -> list[str]:
        """See ``KeepsFiles``."""
        return self._ask(hidden_names)

    def folders(self) -> list[str]:
        """See ``Store``."""
        return self._ask(folder_names)

    def space(self) -> tuple[int, int] | None:
        """See ``SupportsSpace``."""
        return self._ask(RootFolder.space)

    def _sweep(self, root: RootFolder, *, remove: bool = True) -> int:
        return sweep(root, cache(partial(self._time, root)), remove=remove)

    def _time(self, root: RootFolder) -> float:
        if self._read_only:
            return time.time()  # reading the server's clock would write a file
        try:
            return self._now(root)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Reading the server's clock needs a free inode. If it fails, keep files whose removal depends on age.
            return float("-inf")

    def _now(self, root: RootFolder) -> float:  # noqa: ARG002 - for subclasses
        """Unix seconds, by the clock that sets the times of files below a root: this host's."""
        return time.time()

    def _put(
        self,
        key: str,
        parts: Sequence[memoryview],
        look: Look | None,
        *,
        overwrite: bool,
        used_at: float | None = None,
    ) -> bool:
        def write(fd: int) -> None:
            write_all(fd, parts, look)
            if used_at is not None:
                os.utime(fd, (used_at, used_at))

        def publish(root: RootFolder, key: str) -> bool:
            if self._space is None:
                return self._publish(root, key, write, overwrite=overwrite)
            with self._space.reserved(root, parts_size(parts), key):
                return self._publish(root, key, write, overwrite=overwrite)

        try:
            return bool(self._call(publish, key, absent=()))
        except StoreFullError as e:
            # The cause must not be in a local variable: its traceback would keep this frame alive, and the root open.
            if getattr(e.__cause__, "errno", 0) == errno.ENOSPC and self._use_root(None).has_only_bytes():
                text = f"{os.strerror(errno.ENOSPC)} (ENOSPC): the file system has no free inodes"
                raise StoreFullError(text, key=key) from e.__cause__
            raise

    def _get_into(self, key: str, parts: Sequence[memoryview], look: Look | None) -> None:
        if self._call(read_blob, key, parts, look, absent=(errno.ESTALE,)) is None:
            raise BlobNotFoundError("removed by another host", key=key)

    def _call(self, function: Callable[..., T], key: str, *arguments: Any, absent: Collection[int] = GONE) -> T | None:
        """Call ``function(root, key, *arguments)``. Returns None if it fails with an errno in ``absent``.

        After ESTALE, which NFS reports for a file that another host removed, it is called once more: the second call
        looks names up again.

        Raises:
            StoreError: it fails with another error.
        """
        for is_last in (False, True):
            root = self._use_root(key)
            try:
                return function(root, key, *arguments)
            except OSError as e:
                self._after_miss(root)
                if e.errno != errno.ESTALE or is_last:
                    if e.errno in absent:
                        return None
                    raise store_error(e, key) from e
        raise AssertionError("the last call returns or raises")

    def _ask(self, function: Callable[[RootFolder], T]) -> T:
        """Call ``function(root)``."""
        root = self._use_existing_root()
        try:
            return function(root)
        except OSError as e:
            raise store_error(e, "") from e

    def _publish(self, root: RootFolder, key: str, write: Callable[[int], None], *, overwrite: bool) -> bool:
        for attempts_left in reversed(range(PUBLISH_ATTEMPTS_MAX)):
            try:
                return self._publisher.publish(root, key, write, overwrite=overwrite)
            except FileNotFoundError:
                if attempts_left and root.is_removed():
                    root = self._replace_root(root, make=True)
        raise StoreUnavailableError(f"its folder was removed during each of {PUBLISH_ATTEMPTS_MAX} attempts", key=key)

    def _log_skipped(self, name: str, e: OSError) -> None:
        if name in self.skipped or len(self.skipped) >= SKIPPED_MAX:
            return
        self.skipped.add(name)
        if len(self.skipped) <= LOGGED_MAX:
            is_denied = isinstance(e, PermissionError)
            reason = f"uid {os.geteuid()} has no permission to read it" if is_denied else "it cannot be read"
            logger.warning("%s: %s is skipped, %s: %s", self.root_dir, printable(name), reason, e.strerror or str(e))

    def _use_root(self, key: str | None) -> RootFolder:
        """Return the current root, which stays usable until the caller drops it. Checks ``key`` unless it is None."""
        root = self._root
        if root is None:
            raise StoreClosedError(f"the store at {self.root_dir} is closed", key=key or "")
        if key is not None:
            check_key(key)
        return root

    def _use_existing_root(self) -> RootFolder:
        """Like ``_use_root``, for calls to which a removed root would look like an empty one."""
        self._after_miss(self._use_root(None))
        return self._use_root(None)

    def _after_miss(self, root: RootFolder) -> None:
        """After a failed call: if the root was removed, open the root that replaced it, if there is one."""
        if root.is_removed():
            try:
                self._replace_root(root, make=False)
            except StoreError:
                pass  # no new root yet; the next put creates it, or reports why it cannot

    def _replace_root(self, removed: RootFolder, *, make: bool) -> RootFolder:
        with self._lock:
            if self._root is removed:
                self._root = self._open_root(make=make)
            if self._root is None:
                raise StoreClosedError(f"the store at {self.root_dir} is closed")
            return self._root

    def _open_root(self, *, make: bool) -> RootFolder:
        try:
            return RootFolder(self.root_dir, make=make)
        except OSError as e:
            error = store_error(e, "")
            if isinstance(error, (BlobNotFoundError, BlobCorruptError, InvalidKeyError)):
                error = StoreConfigError(str(error))
            # Name the folder, because an operator has to look at it.
            raise type(error)(f"root_dir {self.root_dir!r} must be a folder (not a symbolic link): {error}") from e
