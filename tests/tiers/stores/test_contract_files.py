"""The contract suite finds stores in files that are unsafe among processes, or whose handles disturb each other."""

from __future__ import annotations

import errno
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtiers.tiers.errors import BlobCorruptError, BlobNotFoundError, StoreError
from kvtiers.tiers.store import Capabilities, KeyInfo, Store, parts_size
from kvtiers.tiers.testing.contract import StoreContract

Parts = Sequence[memoryview]
_ANY_PROCESS_LOCK = threading.Lock()


class PlainFiles(Store):
    """A file a blob, written beside them and then moved. As much of a store as the rules here need."""

    capabilities = Capabilities(exclusive_create=False, shared=True, latency_bound=False)

    def __init__(self, root: Path) -> None:
        self.root = root
        self.begun = root / ".begun"
        self.begun.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        path = self.path(key)
        if path.exists() and not overwrite:
            return False
        written = self.begun / uuid.uuid4().hex
        write(written, parts)
        written.replace(path)
        return True

    def get_into(self, key: str, parts: Parts) -> None:
        try:
            data = self.path(key).read_bytes()
        except FileNotFoundError:
            raise BlobNotFoundError("none", key=key) from None
        if len(data) != parts_size(parts):
            raise BlobCorruptError("another size", key=key)
        for part in parts:
            part[:], data = data[: part.nbytes], data[part.nbytes :]

    def size(self, key: str) -> int | None:
        path = self.path(key)
        return path.stat().st_size if path.exists() else None

    def delete(self, key: str) -> None:
        self.path(key).unlink(missing_ok=True)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        for path in self.root.glob("[!.]*"):
            key = path.name.replace("|", "/")
            if key.startswith(prefix):
                found = path.stat()
                yield KeyInfo(key, found.st_size, found.st_mtime)

    def close(self) -> None:
        pass

    def path(self, key: str) -> Path:
        return self.root / key.replace("/", "|")


def write(path: Path, parts: Parts) -> None:
    with path.open("wb", buffering=0) as file:
        for part in parts:
            file.write(part)


class InPlace(PlainFiles):
    """Readers and writers take turns; a writer that dies leaves what it has written."""

    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        with _ANY_PROCESS_LOCK:
            if self.path(key).exists() and not overwrite:
                return False
            write(self.path(key), parts)
            return True

    def get_into(self, key: str, parts: Parts) -> None:
        with _ANY_PROCESS_LOCK:
            super().get_into(key, parts)


class SweepsAtItsStart(PlainFiles):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        for path in self.begun.iterdir():
            path.unlink(missing_ok=True)


class KeptUntilItIsClosed(PlainFiles):
    """Of this process, all see the same."""

    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        return BUFFER.setdefault((self.root, key), b"".join(parts)) is not None

    def get_into(self, key: str, parts: Parts) -> None:
        if (self.root, key) in BUFFER:
            parts[0][:] = BUFFER[self.root, key]
        else:
            super().get_into(key, parts)


BUFFER: dict[tuple[Path, str], bytes] = {}


class OneWins(PlainFiles):
    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=False)

    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        written = self.begun / uuid.uuid4().hex
        write(written, parts)
        try:
            self.path(key).hardlink_to(written)
        except FileExistsError:
            return False
        return True


class OneWinsInEachProcess(OneWins):
    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        with _ANY_PROCESS_LOCK:
            return PlainFiles.put(self, key, parts, overwrite=overwrite)


class Rules(StoreContract):
    def __init__(self, store_class: type[PlainFiles], folder: Path) -> None:
        self.store_class = store_class
        self.tmp_path = folder

    def make_store(self) -> PlainFiles:
        return self.store_class(self.tmp_path / "place")

    def reopen(self, store: Store) -> PlainFiles:
        return self.make_store()

    def plant(self, store: Store, key: str, data: bytes) -> None:
        raise NotImplementedError(errno.ENOSYS)

    def peek(self, store: Store, key: str) -> bytes | None:
        assert isinstance(store, PlainFiles)
        return store.path(key).read_bytes()


KILLED = "test_writer_process_killed_during_a_put_leaves_no_partial_blob"
SEEN = "test_another_process_sees_a_blob_as_soon_as_put_returns"
ONE_WINS = "test_exactly_one_of_several_processes_publishes_a_key"
HANDLES = "test_opening_and_closing_handles_does_not_disturb_another_writer"


@pytest.mark.parametrize("rule", [KILLED, HANDLES, SEEN, ONE_WINS])
def test_correct_store_passes(rule: str, tmp_path: Path) -> None:
    rules = Rules(OneWins if rule == ONE_WINS else PlainFiles, tmp_path)
    getattr(rules, rule)(rules.make_store())


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (InPlace, KILLED),
        (SweepsAtItsStart, HANDLES),
        (KeptUntilItIsClosed, SEEN),
        (OneWinsInEachProcess, ONE_WINS),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_store_that_breaks_a_rule_fails(bad: type[PlainFiles], rule: str, tmp_path: Path) -> None:
    def check() -> None:
        for number in range(10):  # processes on few cores may not meet in their races
            rules = Rules(bad, tmp_path / str(number))
            getattr(rules, rule)(rules.make_store())

    with pytest.raises((AssertionError, FileNotFoundError, StoreError)):
        check()
