"""PrefixUses: that a prefix was used is noted on storage once in a while."""

from __future__ import annotations

from typing import cast

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from connector.prefix_store import Chunk, PrefixStore
from connector.vllm.prefix_uses import PrefixUses


def test_a_use_that_could_not_be_noted_is_noted_with_the_next_one() -> None:
    calls: list[bool] = []

    class Store:
        notes_uses = True
        use_noted_s = 600.0

        def match(self, _: object) -> list[Chunk]:
            return []

        def note_uses(self, _: object) -> bool:
            calls.append(len(calls) > 0)
            return calls[-1]

    uses = PrefixUses([cast(PrefixStore, Store())], clock=lambda: 0.0)
    for noted in ([False], [False, True], [False, True]):
        uses.note([b"block"])
        uses._pool.submit(lambda: None).result(120)  # one thread: what it was given before has ended
        assert calls == noted
    uses.shutdown()
