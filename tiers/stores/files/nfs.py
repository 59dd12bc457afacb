"""NfsStore: one file per blob, ``<root_dir>/<key>``, in a folder that several hosts mount over NFS.

How NFS (v3 and v4) differs from a local file system, and how this store handles each difference:

- Names are cached, including absent names: if a name is looked up before another host creates it, it stays absent here
  for up to 30 s (``acdirmin``). Mount with ``lookupcache=pos``.
- Contents are cached: if a file is changed in place, other hosts read stale data. So no file is changed once it has its
  name; ``overwrite`` renames a new file over the old one.
- A failed write may be reported only at close. So the result of close is checked before the file gets its name.
- Reading a file that another host removed while it was open fails with ESTALE. The file is opened once more; if that
  fails too, it is a miss (``LocalStore``).
- O_TMPFILE, RENAME_NOREPLACE, locks, access times and extended attributes are missing or unreliable, so none is used.
  Publishing uses link and unlink, or rename, from a private name that contains host, boot and process.
- Hosts' clocks differ, so the age of another host's private file is computed with the server's clock.
- Reads and writes go through the page cache: with O_DIRECT the kernel may fill a buffer after its process has ended.

If the server hangs, every call here hangs, and a thread in such a call cannot be stopped. Use this store in a process
that can be killed, as tiers do (``tiers.server.process``).
"""

from __future__ import annotations

from ...store import Capabilities
from .local import LocalStore
from .posix import RootFolder
from .publish import storage_time


class NfsStore(LocalStore):
    """Stores blobs as files that other hosts can read; see ``LocalStore``."""

    # Of concurrent link(2) calls exactly one succeeds, even across hosts. A call mostly waits for the server.
    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=True)
    _unnamed_files = False

    def _now(self, root: RootFolder) -> float:
        return storage_time(root)
