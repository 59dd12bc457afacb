"""The table from errno to StoreError."""

from __future__ import annotations

import errno
import os

from kvtiers.tiers.errors import StoreError, StoreUnavailableError
from kvtiers.tiers.stores.os_errors import ERRORS, store_error


def test_every_errno_has_one_error() -> None:
    for code, name in errno.errorcode.items():
        error = store_error(OSError(code, os.strerror(code)), "f/a")
        assert type(error) is ERRORS.get(code, StoreUnavailableError)
        assert error.key == "f/a"
        assert name in str(error) or errno.errorcode[code] in str(error)


def test_what_may_pass_is_retryable_and_the_rest_is_not() -> None:
    for code in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN):
        assert store_error(OSError(code, ""), "").retryable
    assert not any(kind.retryable for kind in ERRORS.values())


def test_an_error_without_errno() -> None:
    assert isinstance(store_error(OSError("odd"), "a"), StoreError)
