"""Answers many "is it there?" questions to a bucket for less than a request each, one after the other.

Pages of a LIST answer many questions about a folder that has few other names; HEADs from several threads answer the
rest. Which is cheaper differs between servers and folders by more than a factor of ten: where each name is in a folder
of its own, SeaweedFS lists 5 names in the time of 3 HEADs, moto 5 in the time of one. So both are tried and timed:
HEADs first, and a LIST is waited for as long as HEADs would take. Whoever asks has a deadline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from posixpath import commonpath, dirname
from typing import Final

from tiers.errors import StoreError, StoreTimeoutError
from tiers.stores.watchdog import begin, run_in_threads

# AWS charges for a LIST as for 12.5 HEADs.
LIST_KEYS_MIN: Final = 13
# A folder gets no further LIST for so long after one that did not pay.
BELIEVED_S: Final = 600.0
LIST_S_MIN: Final = 0.05
FOLDERS_MAX: Final = 1000
# A thread that asks gets so many keys, as it costs 0.1 ms to start; fewer if they would take it longer than ASKER_S.
KEYS_PER_ASKER: Final = 8
ASKER_S: Final = 0.004
ASKERS_MAX: Final = 128

Answers = dict[str, int | Exception | None]

_ENDLESS: Final = float("inf")


@dataclass(frozen=True, slots=True)
class _Listing:
    """How long the last page of a folder's LIST took, and which share of the questions it answered."""

    seconds: float
    share: float
    believed_until: float


class Lookups:
    """Answers questions and remembers how long that took. Any thread; what is remembered wrongly costs only time.

    Args:
        askers_max: threads at once.
        silence_s_max: if there was no answer for so long, the keys that are left get StoreTimeoutErrors.
        list_s_min: a LIST is waited for so long at least.
        clock: monotonic seconds.
    """

    def __init__(
        self, *, askers_max: int, silence_s_max: float, clock: Callable[[], float], list_s_min: float = LIST_S_MIN
    ) -> None:
        self._list_s_min = list_s_min
        self._askers_max = min(ASKERS_MAX, askers_max)
        self._silence_s_max = silence_s_max
        self._clock = clock
        self._listings: dict[str, _Listing] = {}  # by folder
        self._key_s = _ENDLESS  # of the last batch of HEADs, the time for each key; endless: not known
        self._head_s = _ENDLESS  # the fastest HEAD of that batch

    def answer_by_listing(
        self,
        names: Mapping[str, str],
        answers: Answers,
        list_sizes: Callable[[str, str], tuple[list[tuple[str, int]], bool]],
    ) -> None:
        """Answer by pages of the names' common folder, as long as they are faster than HEADs. The first LIST finds out.

        A page that takes longer is not waited for. An error ends it, and HEADs will tell more. A page proves absence
        only for names that have the same order on S3, by bytes, and on servers with real folders.

        Args:
            names: objects' names -> keys.
            answers: by key; filled.
            list_sizes: of a folder and a name to start after: about 1,000 names and sizes, and whether there are more.
        """
        asked = sorted(names)
        folder = _common_folder(asked)
        if not self._is_worth_a_list(folder, len(asked)):
            return
        by_folder = [_folder_by_folder(name) for name in asked]
        if any(name > after for name, after in pairwise(by_folder)):
            return
        while len(asked) >= LIST_KEYS_MIN:
            started = self._clock()
            heads_s = max(self._list_s_min, len(asked) * self._key_s)
            try:
                # The name without its last character sorts before it, and nothing that is asked does.
                listing = begin("kvtiers-s3-list", partial(list_sizes, _common_folder(asked), asked[0][:-1]))
                page, more = listing.result(heads_s)
            except TimeoutError:
                self._remember(folder, 2 * heads_s, 1.0)  # tried again when twice as many keys are asked
                return
            except StoreError:
                page, more = [], True
            if (more and not page) or any(name >= after for (name, _), (after, _) in pairwise(page)):
                self._remember(folder, _ENDLESS, 1.0)
                return  # no order (S3 Express): absence proves nothing
            known = len(asked)
            if more:
                last = page[-1][0]
                known = min(bisect_right(asked, last), bisect_right(by_folder, _folder_by_folder(last)))
            took_s = self._clock() - started
            self._remember(folder, took_s, known / len(asked))
            sizes = dict(page)
            for name in asked[:known]:
                size = sizes.get(name)
                if size != 0:  # else it may be a folder marker, as a HEAD will tell
                    answers[names[name]] = size
            del asked[:known], by_folder[:known]
            if known < LIST_KEYS_MIN or took_s > known * self._key_s:
                return

    def answer_by_asking(self, keys: Sequence[str], answers: Answers, size: Callable[[str], int | None]) -> None:
        """Ask for each key, by some threads that end with this call. Threads are three times as fast as asyncio here.

        Args:
            keys: each once.
            answers: by key; filled.
            size: asks for one; raises StoreErrors only.
        """
        if not keys:
            return
        started_at = self._clock()
        waiting = iter(keys)  # next() of a list's iterator is atomic
        answered_at = started_at
        fastest_s = _ENDLESS

        def ask(count: int | None = None) -> None:
            nonlocal answered_at, fastest_s
            for key in islice(waiting, count):
                try:
                    started = self._clock()
                    if started - answered_at > self._silence_s_max:
                        raise StoreTimeoutError("not asked: the server stopped answering", key=key)
                    answers[key] = size(key)
                    answered_at = self._clock()
                    fastest_s = min(fastest_s, answered_at - started)
                except StoreError as e:
                    answers[key] = e.with_traceback(None)  # which refers to ``answers``

        if self._head_s == _ENDLESS:
            ask(2)  # in this thread alone, to see how far away the server is
            self._learn(len(keys), fastest_s)
        is_near = self._head_s * KEYS_PER_ASKER <= ASKER_S
        keys_each = KEYS_PER_ASKER if is_near else max(1, int(ASKER_S / self._head_s))
        askers = min(self._askers_max, -(-len(keys) // keys_each))
        run_in_threads("kvtiers-s3-head", askers, ask)
        self._learn(len(keys), fastest_s)
        if len(keys) >= LIST_KEYS_MIN and not any(isinstance(answers[key], Exception) for key in keys):
            self._key_s = (self._clock() - started_at) / len(keys)

    def _learn(self, num_keys: int, fastest_s: float) -> None:
        if num_keys > 1:  # a single one may have waited for its connection
            self._head_s = fastest_s

    def _is_worth_a_list(self, folder: str, num_keys: int) -> bool:
        if self._key_s == _ENDLESS:
            return False  # to find out how long HEADs take
        last = self._listings.get(folder)
        if last is None or self._clock() >= last.believed_until:
            return num_keys >= LIST_KEYS_MIN
        return last.seconds <= last.share * num_keys * self._key_s

    def _remember(self, folder: str, seconds: float, share: float) -> None:
        if len(self._listings) >= FOLDERS_MAX:
            self._listings.clear()
        self._listings[folder] = _Listing(seconds, share, self._clock() + BELIEVED_S)


def _folder_by_folder(name: str) -> str:
    """The order in which SeaweedFS lists: "ab/c" before "ab-c", though "-" sorts before "/"."""
    return name.replace("/", "\0")


def _common_folder(names: Sequence[str]) -> str:
    """Of sorted names."""
    return commonpath((dirname(names[0]), dirname(names[-1]))) if names else ""
