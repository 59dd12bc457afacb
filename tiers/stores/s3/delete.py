"""Deletes objects one by one, for servers that refuse DeleteObjects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvtiers.tiers.errors import StoreError
from kvtiers.tiers.stores.watchdog import run_in_threads

DELETERS_MAX: Final = 8


def delete_each(names: Sequence[str], delete: Callable[[str], None]) -> dict[str, StoreError]:
    """Delete objects in several threads, which end with this call. Returns the errors of objects not deleted.

    A retryable error here has outlasted its retries. After such an error, the remaining objects are not tried.

    Args:
        names: each name once.
        delete: deletes one object; retries, and raises only StoreErrors.
    """
    lasting: list[StoreError] = []
    outcomes: dict[str, StoreError | None] = {}
    waiting = iter(names)  # next() on a list iterator is atomic

    def delete_waiting() -> None:
        for name in waiting:
            outcomes[name] = try_to(name)

    def try_to(name: str) -> StoreError | None:
        if lasting:
            return lasting[0]
        try:
            delete(name)
        except StoreError as e:
            e = e.with_traceback(None)  # the traceback refers to ``lasting``
            if e.retryable:
                lasting.append(e)
            return e
        return None

    run_in_threads("kvtiers-s3-delete", min(DELETERS_MAX, len(names)), delete_waiting)
    return {name: error for name in names if (error := outcomes[name]) is not None}
