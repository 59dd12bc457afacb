"""The contract for stores whose blob ``key`` is the file ``root/key``: planted and peeked at without the store."""

from __future__ import annotations

from pathlib import Path

from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.testing.contract import StoreContract


class FolderContract(StoreContract):
    """A second store is made as the first was."""

    @property
    def root(self) -> Path:
        """Where the files are."""
        return self.tmp_path / "root"

    def reopen(self, store: Store) -> Store:
        return self.make_store()

    def plant(self, store: Store, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def peek(self, store: Store, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.is_file() else None


def use_private_names(store: LocalStore, private: bool = True) -> LocalStore:
    """Have the store do what it does once the file system has refused O_TMPFILE."""
    store._publisher._unnamed_files = not private
    return store
