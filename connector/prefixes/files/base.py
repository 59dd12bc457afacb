"""Files: where PrefixStore keeps its files, by relative path; and what their errors become."""

from __future__ import annotations

import contextlib
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile

from kvtiers.tiers.errors import (
    BlobNotFoundError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreUnavailableError,
)

FILES_AT_ONCE = 16  # in memory, and requests under way on an object store


class Files(ABC):
    """Files by relative path. Blocking; raises StoreError only.

    Attributes:
        has_uses: ``touch`` works: a time that says when a file was used last.
    """

    has_uses = False

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """In one piece: nobody ever reads a part of it."""

    @abstractmethod
    def read(self, path: str, bytes_max: int) -> bytes:
        """All of it; at most ``bytes_max`` bytes, and nobody says of which."""

    @abstractmethod
    def read_all(self, files: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, memoryview]]:
        """(name, bytes) for each name -> (path, its size), in order.

        The bytes are lent until the next ones are asked for: fresh memory for each file costs more than its reading.
        Of a file that has another size, other bytes may come, or BlobCorruptError.
        """

    def write_all(self, files: Mapping[str, bytes]) -> None:
        """Each in one piece, in any order."""
        for path, data in files.items():
            self.write(path, data)

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether it is there."""

    def present(self, runs: Sequence[Sequence[str]]) -> list[int]:
        """Of each run of files, how many are there without a gap, from the first on."""
        return [sum(1 for _ in takewhile(self.exists, run)) for run in runs]

    def reading(self, paths: Sequence[str], bytes_max: int) -> list[Callable[[], bytes]]:
        """What returns, or raises, what ``read`` does, for each path; begun at once where the storage is far."""
        return [partial(self.read, path, bytes_max) for path in paths]

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Names of the files right in the folder; none where it is not there."""

    def unused_s(self, path: str) -> float:
        """Seconds since it was written or touched."""
        raise NotImplementedError

    def touch(self, path: str) -> None:
        """It is used. Absent is success."""
        raise NotImplementedError

    @abstractmethod
    def delete(self, path: str) -> None:
        """Absent is success."""

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """With its files; absent is success."""

    def prepare(self) -> None:  # noqa: B027 - not every storage has a first call that costs more
        """Make what the first call would make, without asking the storage. Raises nothing."""

    def check(self) -> None:  # noqa: B027 - not every storage can say
        """Ask the storage whether it can be used.

        Raises:
            StoreError: one line that says what is wrong and what to do about it.
        """

    def close(self) -> None:  # noqa: B027 - not every storage holds something
        """Release connections and threads. Asks no storage and waits for none; what is under way may fail."""


@contextlib.contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """What a file system raises, as StoreError."""
    try:
        yield
    except StoreError:
        raise
    except FileNotFoundError as e:
        raise BlobNotFoundError("is not there", key=path) from e
    except PermissionError as e:
        raise StorePermissionError(str(e), key=path) from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFullError(str(e), key=path) from e
        raise StoreUnavailableError(str(e), key=path) from e
    except Exception as e:  # fsspec's file systems raise what their clients raise
        raise StoreUnavailableError(f"{type(e).__name__}: {e}", key=path) from e
