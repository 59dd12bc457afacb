"""PrefixOrder: which of a store's blocks comes first in its prompt.

vLLM names the blocks of a store in a set. A prefix is of use up to its first gap, so what is stored when a job ends
halfway should be its first blocks. Later versions say at which token of its request each ends. Of earlier ones there is
only this: before a prompt is computed vLLM asks for its blocks, in their order, up to the first that is absent.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

from tiers.keys import OffloadKey

KEYS_MAX = 32_768


class PrefixOrder:
    """Orders keys as they were first asked for. Scheduler thread only.

    Args:
        keys_max: asked for last that are known for sure; at most twice as many are kept.
    """

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._numbers = itertools.count()
        self._asked: dict[OffloadKey, int] = {}
        self._asked_before: dict[OffloadKey, int] = {}

    def ask(self, key: OffloadKey) -> None:
        """A key is asked for."""
        if key in self._asked:
            return
        if len(self._asked) >= self._keys_max:
            self._asked, self._asked_before = {}, self._asked
        before = self._asked_before.get(key)
        self._asked[key] = next(self._numbers) if before is None else before

    def places(self, keys: Collection[OffloadKey], req_context: Any = None) -> list[int]:
        """Where the keys are in ``keys``, in the order of their prompt. What was never asked for is last.

        Args:
            req_context: vLLM's, of the request that stores them.
        """
        position_of = getattr(req_context, "get_offload_key_position", lambda _: None)
        numbers: list[Any] = [position_of(key) for key in keys]
        if None in numbers:
            never = next(self._numbers)
            numbers = [self._asked.get(key, self._asked_before.get(key, never)) for key in keys]
        return sorted(range(len(numbers)), key=numbers.__getitem__)
