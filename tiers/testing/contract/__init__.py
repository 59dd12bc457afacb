"""The rules of ``tiers.store`` as tests. Every store must pass them; its author subclasses ``StoreContract``.

The complete contract test of a store::

    class TestMyStore(StoreContract):
        def make_store(self) -> MyStore:
            return MyStore(self.tmp_path / "place")

        def reopen(self, store: MyStore) -> MyStore:
            return MyStore(self.tmp_path / "place")

        def plant(self, store: MyStore, key: str, data: bytes) -> None: ...  # without the store's own put

        def peek(self, store: MyStore, key: str) -> bytes | None: ...  # without the store's own get_into

``plant`` and ``peek`` bypass the store, so that a put and a get with the same bug cannot hide it from each other. The
optional protocols that a store supports are detected with isinstance and tested too.

In another project, put ``pytest.register_assert_rewrite("kvtiers.tiers.testing.contract")`` into ``conftest.py``.
Otherwise a failing rule prints a bare AssertionError.
"""

from __future__ import annotations

from .blobs import BlobRules
from .data import (
    BAD_KEYS,
    GOOD_KEYS,
    KEYS_COUNT_LARGE,
    LARGE_BYTES,
    GuardedParts,
    as_parts,
    fetch,
    list_keys,
    make_data,
    run_in_threads,
)
from .extras import ExtraRules
from .listing import ListingRules
from .sharing import SharingRules

__all__ = [
    "BAD_KEYS",
    "GOOD_KEYS",
    "KEYS_COUNT_LARGE",
    "LARGE_BYTES",
    "GuardedParts",
    "StoreContract",
    "as_parts",
    "fetch",
    "list_keys",
    "make_data",
    "run_in_threads",
]


class StoreContract(ExtraRules, SharingRules, ListingRules, BlobRules):
    """Base class of a store's contract test: name the subclass ``Test…`` and write the four methods of ``StorePlace``.

    Attributes:
        tmp_path: an empty folder for the running test, for places on a file system.
    """
