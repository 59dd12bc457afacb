"""The trial of ``kvtiers check`` and ``kvtiers doctor`` on a bucket: each client transfers bytes once."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ...errors import BlobNotFoundError, StoreError, StoreUnavailableError
from ...store import Store

TRIAL_FOLDER: Final = "kvtiers-check"
SMALL_BYTES: Final = 4096


def try_each_client(store: Store, *, read_only: bool) -> None:
    """Put, get and delete a small blob, and a blob large enough for ``DirectReader``.

    Args:
        read_only: only get blobs that do not exist.

    Raises:
        StoreError: a step failed. The message names the step.
    """
    from .obstore_client import DIRECT_BYTES_MIN

    key = f"{TRIAL_FOLDER}/{secrets.token_hex(8)}"
    for what, size in (("get", SMALL_BYTES), ("large get", DIRECT_BYTES_MIN)):
        got = bytearray(size)
        if read_only:
            with _named(what), suppress(BlobNotFoundError):
                store.get_into(key, [memoryview(got)])
            continue
        data = secrets.token_bytes(size)
        with _named("put"):
            store.put(key, [memoryview(data)], overwrite=True)
        try:
            with _named(what):
                store.get_into(key, [memoryview(got)])
                if got != data:
                    raise StoreUnavailableError("endpoint: the server returned other bytes than were written")
        except StoreError:
            with suppress(StoreError):
                store.delete(key)
            raise
        with _named("delete"):
            store.delete(key)


@contextmanager
def _named(step: str) -> Iterator[None]:
    try:
        yield
    except BlobNotFoundError:
        raise
    except StoreError as e:
        error = type(e)(f"{e}, in the trial's {step}")
    else:
        return
    raise error
