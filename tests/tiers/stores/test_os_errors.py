"""The table from errno to StoreError."""

from __future__ import annotations

import errno

from kvtiers.tiers.errors import StoreError
from kvtiers.tiers.stores.os_errors import ERRORS, store_error


def test_only_transient_os_errors_are_retryable() -> None:
    for code in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN):
        assert store_error(OSError(code, ""), "").retryable
    assert not any(kind.retryable for kind in ERRORS.values())


def test_os_error_without_errno_is_a_store_error() -> None:
    assert isinstance(store_error(OSError("odd"), "a"), StoreError)
