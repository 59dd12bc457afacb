"""Files: interface to the storage of PrefixStore's files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile

FILES_AT_ONCE = 16  # files in memory, and requests to an object store, at the same time


class Files(ABC):
    """Files by relative path. All methods block, and raise only StoreError.

    Attributes:
        has_uses: whether ``touch`` and ``unused_s`` work: the storage keeps the time of a file's last use.
    """

    has_uses = False

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a file atomically: a reader never sees part of it."""

    @abstractmethod
    def read(self, path: str, bytes_max: int) -> bytes:
        """Read a whole file. If it is larger than ``bytes_max``, return any ``bytes_max`` bytes of it."""

    @abstractmethod
    def read_all(self, files: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, memoryview]]:
        """Yield (name, bytes) for each name -> (path, expected size), in order.

        The bytes are valid until the next item is requested: fresh memory for each file costs more than reading it.
        If a file has another size, the bytes may be wrong, or BlobCorruptError is raised.
        """

    def create(self, path: str, data: bytes) -> bool:
        """Write a file atomically, unless it exists. Returns False if it exists, even if our own first try wrote it.

        This default is for storage without an atomic create. If two writers race, the later one replaces the file of
        the earlier one, which mostly learns of it here.
        """
        if self.exists(path):
            return False
        self.write(path, data)
        return self.read(path, len(data) + 1) == data

    def write_all(self, files: Mapping[str, bytes]) -> None:
        """Write each file atomically, in any order."""
        for path, data in files.items():
            self.write(path, data)

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether the file exists."""

    def present(self, runs: Sequence[Sequence[str]]) -> list[int]:
        """For each run of files, count the leading files that exist without a gap."""
        return [sum(1 for _ in takewhile(self.exists, run)) for run in runs]

    def reading(self, paths: Sequence[str], bytes_max: int) -> list[Callable[[], bytes]]:
        """Return, for each path, a function that ends like ``read``. Remote storage starts all reads at once."""
        return [partial(self.read, path, bytes_max) for path in paths]

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names of the files directly in the folder; an empty list if the folder does not exist."""

    def unused_s(self, path: str) -> float:
        """Return the seconds since the file was written or touched."""
        raise NotImplementedError

    def touch(self, path: str) -> None:
        """Set the time of the file's last use to now. Does nothing if the file does not exist."""
        raise NotImplementedError

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file. Does nothing if the file does not exist."""

    @abstractmethod
    def delete_layers(self, folder: str) -> None:
        """Delete the layers' files in a folder (``format.LAYER_FILE``), and the folder if it is empty then."""

    def prepare(self) -> None:  # noqa: B027 - not every storage has a slower first call
        """Create the clients that the first call needs, without asking the storage. Raises nothing."""

    def check(self) -> None:  # noqa: B027 - not every storage supports a check
        """Check that the storage can be used.

        Raises:
            StoreError: one line that says what is wrong and what to do about it.
        """

    def close(self) -> None:  # noqa: B027 - not every storage holds resources
        """Release connections and threads. Does not wait for the storage; calls under way may fail."""
