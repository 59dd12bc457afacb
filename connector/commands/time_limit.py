"""A time limit for a whole call. A socket's timeout is for a single read: a server may send a byte now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...tiers.daemon_pool import DaemonPool

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Run ``call`` on a thread, which is left behind after ``seconds``.

    Raises:
        TimeoutError: the call had not ended after ``seconds``.
    """
    pool = DaemonPool(1, "kvtiers-call")
    try:
        return pool.submit(call).result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no complete answer within {seconds:g} s") from None
    finally:
        pool.shutdown(0)
