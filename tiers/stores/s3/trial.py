"""The trial of ``kvtiers check`` on a bucket: each client transfers bytes once."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ...errors import BlobNotFoundError, StoreError, StoreUnavailableError
from ...store import Store

TRIAL_FOLDER: Final = "kvtiers-check"
TRIAL_BYTES: Final = 4096


def try_each_client(store: Store, *, read_only: bool) -> None:
    """Put, get and delete a small blob.

    Args:
        read_only: only get a blob that does not exist.

    Raises:
        StoreError: a step failed. The message names the step.
    """
    key = f"{TRIAL_FOLDER}/{secrets.token_hex(8)}"
    got = bytearray(TRIAL_BYTES)
    if read_only:
        with _named("get"), suppress(BlobNotFoundError):
            store.get_into(key, [memoryview(got)])
        return
    data = secrets.token_bytes(TRIAL_BYTES)
    with _named("put"):
        store.put(key, [memoryview(data)], overwrite=True)
    try:
        with _named("get"):
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
