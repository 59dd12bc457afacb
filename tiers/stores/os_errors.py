"""One table from errno to StoreError, for all stores that make system calls."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from ..errors import (
    BlobCorruptError,
    BlobNotFoundError,
    InvalidKeyError,
    StoreConfigError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreUnavailableError,
)

ERRORS: Mapping[int, type[StoreError]] = {
    errno.ENOENT: BlobNotFoundError,
    errno.ENOTDIR: BlobCorruptError,  # a file, or (stepwise) a symbolic link, where a folder should be
    errno.ELOOP: BlobCorruptError,  # a symbolic link
    errno.EISDIR: BlobCorruptError,
    errno.ENXIO: BlobCorruptError,  # a socket
    errno.ENODEV: BlobCorruptError,  # a device without a driver
    errno.ENAMETOOLONG: InvalidKeyError,  # a file system with a limit below check_key's
    errno.ENOSPC: StoreFullError,
    errno.EDQUOT: StoreFullError,
    errno.EFBIG: StoreConfigError,  # RLIMIT_FSIZE, or the file system's limit: removing blocks does not help
    errno.EMLINK: StoreConfigError,  # a folder's limit of subfolders: removing blocks does not help
    errno.EACCES: StorePermissionError,
    errno.EPERM: StorePermissionError,
    errno.EROFS: StorePermissionError,
    errno.EXDEV: StoreConfigError,  # another file system is mounted below the root
    errno.EOPNOTSUPP: StoreConfigError,  # a file system without hard links
    errno.ENOSYS: StoreConfigError,
}
"""errno -> error class. Any other errno (EIO, ESTALE, EMFILE, ENOMEM, …) may be temporary: StoreUnavailableError."""

#: Error numbers of a file that does not exist: its name is absent, or a folder on its path is a file or a link.
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def store_error(e: OSError, key: str) -> StoreError:
    """Translate an OSError of an operation on ``key`` into a StoreError."""
    kind = ERRORS.get(e.errno or 0, StoreUnavailableError)
    return kind(f"{e.strerror or e} ({errno.errorcode.get(e.errno or 0, 'no errno')})", key=key)


def is_absent(e: OSError) -> bool:
    """Whether the error means that the file does not exist (``ABSENT``)."""
    return e.errno in ABSENT
