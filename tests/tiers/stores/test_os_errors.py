"""The table from errno to StoreError."""

from __future__ import annotations

import errno

from kvtiers.tiers.errors import StoreError
from kvtiers.tiers.stores.os_errors import ERRORS, store_error


def test_what_may_pass_is_retryable_and_the_rest_is_not() -> None:
    for code in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN):
        assert store_error(OSError(code, ""), "").retryable
    assert not any(kind.retryable for kind in ERRORS.values())


def test_an_error_without_errno() -> None:
    assert isinstance(store_error(OSError("odd"), "a"), StoreError)
