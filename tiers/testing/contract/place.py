"""The methods that the author of a store writes for its contract test. A place is the storage that one test uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from ...store import Store


class StorePlace(ABC):
    """The four methods that the author of a store writes, and the fixtures based on them.

    Attributes:
        tmp_path: an empty folder for the running test, for places on a file system.
        no_fork: why a forked child cannot ``reopen`` the place. "": it can, and rules for other processes are tested.
    """

    tmp_path: Path
    no_fork: ClassVar[str] = ""

    @abstractmethod
    def make_store(self) -> Store:
        """Open a store on a fresh, empty place. Called once per test."""

    def reopen(self, store: Store) -> Store:
        """Open a second store on the place of ``store``. Called only if ``capabilities.shared``."""
        raise NotImplementedError("a store with capabilities.shared needs reopen() in its contract test")

    @abstractmethod
    def plant(self, store: Store, key: str, data: bytes) -> None:
        """Write a blob without using the store."""

    @abstractmethod
    def peek(self, store: Store, key: str) -> bytes | None:
        """Read a blob without using the store; None if it does not exist."""

    @pytest.fixture(autouse=True)
    def _use_tmp_path(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    @pytest.fixture
    def store(self, _use_tmp_path: None) -> Iterator[Store]:
        store = self.make_store()
        yield store
        store.close()

    @contextmanager
    def _handles(self, store: Store) -> Iterator[tuple[Store, Store]]:
        """Yield the store and a second store on its place; the same store twice if it is not shared."""
        if not store.capabilities.shared:
            yield store, store
            return
        with closing(self.reopen(store)) as second:
            yield store, second
