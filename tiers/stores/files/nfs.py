"""NfsStore: one file per blob, ``<root_dir>/<key>``, in a folder that several hosts mount over NFS.

How NFS (v3 and v4) differs from a local file system, and how this store handles each difference:

- Names are cached, including absent names: if a name is looked up before another host creates it, it stays absent here
  for up to 30 s (``acdirmin``). Mount with ``lookupcache=pos``. Blobs are published and read without a prior lookup;
  only ``size`` and ``get_tail`` look names up.
- Contents are cached: if a file is changed in place, other hosts read stale data. So no file is changed once it has its
  name; ``overwrite`` renames a new file over the old one.
- A failed write may be reported only at close. So the result of close is checked before the file gets its name.
- Reading a file that another host removed while it was open fails with ESTALE. The file is opened once more; if that
  fails too, it is a miss.
- O_TMPFILE, RENAME_NOREPLACE, locks, access times and extended attributes are missing or unreliable, so none is used.
  Publishing uses link and unlink, or rename, from a private name that contains host, boot and process.
- Hosts' clocks differ, so the age of another host's private file is computed with the server's clock.
- Reads and writes go through the page cache: with O_DIRECT the kernel may fill a buffer after its process has ended.

If the server hangs, every call here hangs, and a thread in such a call cannot be stopped. Use this store in a process
that can be killed, as tiers do (``tiers.server.process``).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from ...errors import BlobNotFoundError, StoreUnavailableError
from ...store import Capabilities, Look
from ..os_errors import ABSENT
from .local import LocalStore
from .posix import RootFolder
from .publish import storage_time

T = TypeVar("T")


class NfsStore(LocalStore):
    """Stores blobs as files that other hosts can read; see ``LocalStore``."""

    # Of concurrent link(2) calls exactly one succeeds, even across hosts. A call mostly waits for the server.
    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=True)
    _unnamed_files = False

    def _now(self, root: RootFolder) -> float:
        return storage_time(root)

    def _get_into(self, key: str, parts: Sequence[memoryview], look: Look | None) -> None:
        try:
            super()._get_into(key, parts, look)
        except StoreUnavailableError as e:
            if _is_stale(e):
                raise BlobNotFoundError("removed by another host", key=key) from e
            raise

    def _call(
        self, function: Callable[..., T], key: str, *arguments: Any, absent: Collection[int] = ABSENT
    ) -> T | None:
        try:
            return super()._call(function, key, *arguments, absent=absent)
        except StoreUnavailableError as e:
            if not _is_stale(e):
                raise
        # The second call looks names up again and reopens the root if needed. If it finds a stale handle too, the file
        # is gone; a put fails.
        return super()._call(function, key, *arguments, absent=(*absent, errno.ESTALE) if absent else ())


def _is_stale(error: StoreUnavailableError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ESTALE
