"""How many "is it there?" questions to a bucket are answered for less than one request after the other.

Questions that lie close together are answered by pages of a LIST, the rest by HEADs from several threads.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from posixpath import commonpath, dirname
from typing import Final

from tiers.errors import StoreError, StoreTimeoutError

# A LIST costs about as much time as this many HEADs asked together, and more money. One page is worth trying for this
# many open questions, and another one if the last answered at least half as many.
LIST_WORTH_KEYS: Final = 200
# Threads that ask: one per so many keys, so that a small batch does not pay for threads it cannot use.
KEYS_PER_ASKER: Final = 8
ASKERS_MAX: Final = 32

Answers = dict[str, int | Exception | None]


def answer_by_listing(
    names: Mapping[str, str], answers: Answers, list_sizes: Callable[[str, str], tuple[list[tuple[str, int]], bool]]
) -> None:
    """Answer what pages of the names' common folder answer. An error ends it: the HEADs will tell.

    Args:
        names: objects' names -> keys.
        answers: by key; filled.
        list_sizes: of a folder and a name to start after: about 1,000 names and sizes, and whether there are more.
    """
    asked = sorted(names)
    while len(asked) >= LIST_WORTH_KEYS:
        folder = commonpath((dirname(asked[0]), dirname(asked[-1])))
        try:
            # The name without its last character sorts before it, and nothing that is asked does.
            page, more = list_sizes(folder, asked[0][:-1])
        except StoreError:
            return
        if (more and not page) or any(name >= after for (name, _), (after, _) in pairwise(page)):
            return  # no order (S3 Express): absence proves nothing
        known = bisect_right(asked, page[-1][0]) if more else len(asked)
        sizes = dict(page)
        for name in asked[:known]:
            size = sizes.get(name)
            if size != 0:  # may be a folder marker: a HEAD knows
                answers[names[name]] = size
        del asked[:known]
        if known < LIST_WORTH_KEYS // 2:
            return


def answer_by_asking(
    keys: Sequence[str],
    answers: Answers,
    size: Callable[[str], int | None],
    *,
    askers_max: int,
    silence_s_max: float,
    clock: Callable[[], float],
) -> None:
    """Ask for each key, from some threads that live no longer than this call. Threads beat asyncio here 3 : 1.

    Args:
        keys: each once.
        answers: by key; filled.
        size: asks for one; raises StoreErrors only.
        askers_max: threads at once.
        silence_s_max: when nobody was answered for so long, the keys left are StoreTimeoutErrors.
        clock: monotonic seconds.
    """
    waiting = iter(keys)  # next() of a list's iterator is one step for all threads
    answered_at = clock()

    def ask() -> None:
        nonlocal answered_at
        for key in waiting:
            try:
                if clock() - answered_at > silence_s_max:
                    raise StoreTimeoutError("not asked: the server stopped answering", key=key)
                answers[key] = size(key)
                answered_at = clock()
            except StoreError as e:
                answers[key] = e

    count = min(ASKERS_MAX, askers_max, -(-len(keys) // KEYS_PER_ASKER))
    threads = [threading.Thread(target=ask, name=f"kvtiers-s3-head-{i}", daemon=True) for i in range(1, count)]
    for thread in threads:
        thread.start()
    ask()
    for thread in threads:
        thread.join()
