"""The rules of ``tiers.store`` as tests. Every store passes them; a store's author gets them by subclassing.

A backend's whole conformance test::

    class TestMyStore(StoreContract):
        def make_store(self) -> MyStore:
            return MyStore(self.tmp_path / "place")

        def reopen(self, store: MyStore) -> MyStore:
            return MyStore(self.tmp_path / "place")

        def plant(self, store: MyStore, key: str, data: bytes) -> None: ...  # without the store's own put

        def peek(self, store: MyStore, key: str) -> bytes | None: ...  # without the store's own get_into

``plant`` and ``peek`` go behind the store's back, so that a put and a get wrong in the same way cannot agree. What
a store can do beyond the six methods is asked for with isinstance, and tested where it is there.

In a project of its own, put ``pytest.register_assert_rewrite("kvtiers.tiers.testing.contract")`` into ``conftest.py``,
or a failing rule prints a bare AssertionError.
"""

from __future__ import annotations

from kvtiers.tiers.testing.contract.blobs import BlobRules
from kvtiers.tiers.testing.contract.data import (
    BAD_KEYS,
    GOOD_KEYS,
    KEYS_COUNT_LARGE,
    LARGE_BYTES,
    PARTS_COUNT_LARGE,
    SIZES_BYTES,
    WAIT_S_MAX,
    GuardedParts,
    as_parts,
    fetch,
    list_keys,
    make_data,
    run_in_threads,
)
from kvtiers.tiers.testing.contract.extras import ExtraRules
from kvtiers.tiers.testing.contract.listing import ListingRules
from kvtiers.tiers.testing.contract.sharing import SharingRules

__all__ = [
    "BAD_KEYS",
    "GOOD_KEYS",
    "KEYS_COUNT_LARGE",
    "LARGE_BYTES",
    "PARTS_COUNT_LARGE",
    "SIZES_BYTES",
    "WAIT_S_MAX",
    "GuardedParts",
    "StoreContract",
    "as_parts",
    "fetch",
    "list_keys",
    "make_data",
    "run_in_threads",
]


class StoreContract(ExtraRules, SharingRules, ListingRules, BlobRules):
    """Subclass it, name the subclass ``Test…``, fill in the four methods. Each test has a fresh place.

    Attributes:
        tmp_path: an empty folder of the running test's own, for places on a file system.
    """
