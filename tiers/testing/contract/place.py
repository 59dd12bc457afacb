"""Where a store's tests happen: what its author fills in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from kvtiers.tiers.store import Store


class StorePlace(ABC):
    """The four methods that a store's author writes, and the fixtures made from them.

    Attributes:
        tmp_path: an empty folder of the running test's own, for places on a file system.
        no_fork: why a forked child cannot ``reopen`` the place; "": it can, and rules about other processes are tested.
    """

    tmp_path: Path
    no_fork: ClassVar[str] = ""

    @abstractmethod
    def make_store(self) -> Store:
        """A store on a fresh, empty place. Called once in a test."""

    def reopen(self, store: Store) -> Store:
        """A second store on the place of ``store``. Called only where ``capabilities.shared``."""
        raise NotImplementedError("a store with capabilities.shared needs reopen() in its contract test")

    @abstractmethod
    def plant(self, store: Store, key: str, data: bytes) -> None:
        """Put a blob behind the store's back."""

    @abstractmethod
    def peek(self, store: Store, key: str) -> bytes | None:
        """Read a blob behind the store's back; None where there is none."""

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
        """The store and a second one on its place; twice the same where nobody else sees what it stores."""
        if not store.capabilities.shared:
            yield store, store
            return
        second = self.reopen(store)
        try:
            yield store, second
        finally:
            second.close()
