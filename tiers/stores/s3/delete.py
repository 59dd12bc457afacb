"""Deleting one by one, for servers that refuse DeleteObjects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvtiers.tiers.errors import StoreError
from kvtiers.tiers.stores.watchdog import run_in_threads

DELETERS_MAX: Final = 8


def delete_each(names: Sequence[str], delete: Callable[[str], None]) -> dict[str, StoreError]:
    """Delete by some threads that end with this call; returns the errors of those that are still there.

    After a retryable error, which has outlasted its retries, the rest is not tried.

    Args:
        names: each once.
        delete: deletes one; retries, and raises StoreErrors only.
    """
    lasting: list[StoreError] = []
    outcomes: dict[str, StoreError | None] = {}
    waiting = iter(names)  # next() of a list's iterator is atomic

    def delete_waiting() -> None:
        for name in waiting:
            outcomes[name] = try_to(name)

    def try_to(name: str) -> StoreError | None:
        if lasting:
            return lasting[0]
        try:
            delete(name)
        except StoreError as e:
            e = e.with_traceback(None)  # which refers to ``lasting``
            if e.retryable:
                lasting.append(e)
            return e
        return None

    run_in_threads("kvtiers-s3-delete", min(DELETERS_MAX, len(names)), delete_waiting)
    return {name: error for name in names if (error := outcomes[name]) is not None}
