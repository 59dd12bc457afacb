"""VllmRawStore: stores sealed blocks in files that vLLM's own ``fs`` tier can read (``format: vllm-raw``).

A block's file contains only the payload. The fields of the trailer are in the file's extended attribute
``user.kvtiers.seal``, which is set before the file gets its name. A file without this attribute was written by vLLM's
own tier and cannot be verified. So by default it counts as absent, and a put replaces it with the same block, sealed.

To callers, a block looks the same as in every other store: the payload, followed by 4,096 bytes of trailer. Files that
are not blocks (``config.json``, a collector's records) are plain files. Reading a block takes the system calls listed
in ``posix`` and one fgetxattr.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ...blocks.seal import NO_TRAILER, TRAILER_BYTES, TRAILER_FIELDS_BYTES
from ...errors import BlobCorruptError, BlobNotFoundError, StoreConfigError
from ...store import KeyInfo, Look, parts_size
from ...tools.inventory import parse_block_name
from ..vectored_io import read_all
from .local import LocalStore
from .posix import (
    OPEN_LISTING,
    OPEN_READ,
    RootFolder,
    close_reader,
    regular_size,
    store_error,
)

SEAL_ATTRIBUTE = "user.kvtiers.seal"


class VllmRawStore(LocalStore):
    """Stores blocks like vLLM's own ``fs`` tier, with their seals in an extended attribute; see ``LocalStore``.

    Args:
        unverified: "deny": a block without a seal counts as absent. "allow": the block is returned with
            ``tiers.blocks.seal.NO_TRAILER`` as its trailer.

    Raises:
        StoreConfigError: the file system has no extended attributes.
    """

    shares_folders = True

    def __init__(
        self, root_dir: str | os.PathLike[str], *, unverified: Literal["deny", "allow"] = "deny", **options: Any
    ) -> None:
        super().__init__(root_dir, **options)
        self._takes_unverified = unverified == "allow"
        try:
            fd = self._use_root(None).open(".", OPEN_LISTING)
            try:
                _read_seal(fd)
            finally:
                close_reader(fd)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise store_error(e, "") from e
            raise StoreConfigError(
                f"the file system of {self.root_dir!r} has no extended attributes, which vllm-raw needs for its seals; "
                "use another root_dir, or format: sealed-1"
            ) from e

    def _get_into(self, key: str, parts: Sequence[memoryview], look: Look | None) -> None:
        if parse_block_name(key) is None:
            super()._get_into(key, parts, look)
            return
        payload, trailer = _split(key, parts)
        with self._opened(key) as (fd, size, seal):
            if size != parts_size(payload):
                raise BlobCorruptError(f"{size} bytes are stored, {parts_size(payload)} were asked for", key=key)
            read_all(fd, payload, key, look, size)
            trailer[:] = seal
            if look is not None:
                look(size, trailer)

    def size(self, key: str) -> int | None:
        if parse_block_name(key) is None:
            return super().size(key)
        try:
            with self._opened(key) as (_, size, _):
                return size + TRAILER_BYTES
        except (BlobNotFoundError, BlobCorruptError):
            return None

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """See ``SupportsTail``. For a block, returns at most the trailer."""
        if parse_block_name(key) is None:
            return super().get_tail(key, length)
        try:
            with self._opened(key) as (_, size, seal):
                return size + TRAILER_BYTES, seal[max(0, TRAILER_BYTES - length) :]
        except BlobNotFoundError:
            return None

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        """See ``Store``. Lists blocks without a seal too: they use space, and a collector may remove them."""
        for info in super().keys(prefix):
            is_block = parse_block_name(info.key) is not None
            yield KeyInfo(info.key, info.size + TRAILER_BYTES, info.mtime) if is_block else info

    def _put(self, key: str, parts: Sequence[memoryview], *arguments: Any, **options: Any) -> bool:
        if parse_block_name(key) is not None:
            _split(key, parts)
        return super()._put(key, parts, *arguments, **options)

    def _write(self, fd: int, *, key: str, parts: Sequence[memoryview], look: Look | None) -> None:
        if parse_block_name(key) is None:
            super()._write(fd, key=key, parts=parts, look=look)
            return
        payload, trailer = _split(key, parts)
        super()._write(fd, key=key, parts=payload, look=look)
        if look is not None:
            look(parts_size(payload), trailer)
        if trailer != NO_TRAILER:
            os.setxattr(fd, SEAL_ATTRIBUTE, trailer[:TRAILER_FIELDS_BYTES])

    def _publish(self, root: RootFolder, key: str, write: Callable[[int], None], *, overwrite: bool) -> bool:
        if super()._publish(root, key, write, overwrite=overwrite):
            return True
        if parse_block_name(key) is None or self._takes_unverified or not self._is_unsealed(key):
            return False
        return super()._publish(root, key, write, overwrite=True)

    def _is_unsealed(self, key: str) -> bool:
        try:
            with self._opened(key):
                return False
        except BlobNotFoundError:
            return True
        except BlobCorruptError:
            return False

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int, bytes]]:
        """Open a block. Yields its descriptor, the size of its payload, and its trailer.

        Raises:
            BlobNotFoundError: the block does not exist, or it has no seal and ``unverified`` is "deny".
            StoreError: any other failure.
        """
        root = self._use_root(key)
        try:
            fd = root.open(key, OPEN_READ)
            try:
                size, seal = regular_size(fd, key), _read_seal(fd)
                if seal is None and not self._takes_unverified:
                    raise BlobNotFoundError("it has no seal: vLLM's own tier wrote it", key=key)
                if len(seal or b"") > TRAILER_BYTES:
                    raise BlobCorruptError(f"its attribute {SEAL_ATTRIBUTE} is not a seal", key=key)
                yield fd, size, NO_TRAILER if seal is None else seal.ljust(TRAILER_BYTES, b"\0")
            finally:
                close_reader(fd)
        except OSError as e:
            self._after_miss(root)
            raise store_error(e, key) from e


def _read_seal(fd: int) -> bytes | None:
    try:
        return os.getxattr(fd, SEAL_ATTRIBUTE)
    except OSError as e:
        if e.errno == errno.ENODATA:
            return None
        raise


def _split(key: str, parts: Sequence[memoryview]) -> tuple[list[memoryview], memoryview]:
    """Split a block's parts into payload and trailer."""
    *payload, last = parts
    last = last.cast("B")
    if last.nbytes > TRAILER_BYTES:
        payload.append(last[:-TRAILER_BYTES])
    if last.nbytes < TRAILER_BYTES or not payload:
        raise BlobCorruptError(f"a block must consist of a payload and {TRAILER_BYTES} bytes of trailer", key=key)
    return payload, last[-TRAILER_BYTES:]
