"""Deleting one by one, for servers that refuse DeleteObjects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tiers.errors import StoreError

DELETERS_MAX: Final = 8


def delete_each(names: Sequence[str], delete: Callable[[str], None]) -> dict[str, StoreError]:
    """Delete from some threads that live no longer than this call; the errors of those that are still there.

    After an error that outlasted its retries the rest is not tried.

    Args:
        names: each once.
        delete: deletes one; retries, and raises StoreErrors only.
    """
    lasting: list[StoreError] = []

    def try_to(name: str) -> StoreError | None:
        if lasting:
            return lasting[0]
        try:
            delete(name)
        except StoreError as e:
            if e.retryable:
                lasting.append(e)
            return e
        return None

    with ThreadPoolExecutor(DELETERS_MAX, "kvtiers-s3-delete") as pool:
        outcomes = zip(names, pool.map(try_to, names), strict=True)
        return {name: error for name, error in outcomes if error is not None}
