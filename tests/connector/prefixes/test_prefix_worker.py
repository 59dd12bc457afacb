"""Paged buffers in every layout, loads that are given up, and what is known to be stored."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from kvtiers.connector.prefixes import requests as prefix_requests
from kvtiers.connector.prefixes.paged_buffer import extract_slots, inject_slots, token_pages
from kvtiers.connector.prefixes.worker import Load
from kvtiers.tiers.errors import ConfigError, KVTiersError

BLOCKS, SIZE = 12, 4
LAYOUTS = {
    "MLA": (BLOCKS, SIZE, 6),
    "split first": (2, BLOCKS, SIZE, 3, 5),
    "pages first": (BLOCKS, 2, SIZE, 3, 5),
    "heads before tokens": (BLOCKS, 3, SIZE, 10),
    "MLA with one head": (BLOCKS, 1, SIZE, 6),
    "kernel pages of half a block": (BLOCKS * 2, 3, SIZE // 2, 10),
}


@pytest.mark.parametrize("shape", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_tokens_go_in_and_out_by_slot_in_every_layout(shape: tuple[int, ...]) -> None:
    source = torch.rand(shape)
    slots = torch.tensor([5, 6, 7, 40, 41, 0])
    taken = extract_slots(token_pages(source, BLOCKS, SIZE), slots)
    assert taken.shape[0] == 6
    assert taken.numel() == 6 * source.numel() // (BLOCKS * SIZE)
    target = torch.zeros(shape)
    other = torch.tensor([1, 2, 3, 30, 31, 47])
    inject_slots(token_pages(target, BLOCKS, SIZE), other, taken)
    assert torch.equal(extract_slots(token_pages(target, BLOCKS, SIZE), other), taken)
    assert torch.count_nonzero(target) == torch.count_nonzero(taken)  # nothing beside them was written


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="not the shape of a known layout"):
        token_pages(torch.zeros(7, 3, 5), BLOCKS, SIZE)


def test_kv_of_another_shape_or_type_is_not_injected() -> None:
    pages = torch.zeros(BLOCKS, SIZE, 6)
    for values in (torch.zeros(2, 5), torch.zeros(2, 6, dtype=torch.float64), torch.zeros(3, 6)):
        with pytest.raises(KVTiersError):
            inject_slots(pages, torch.tensor([0, 1]), values)


def test_a_load_that_was_given_up_writes_nothing_more() -> None:
    one = Load([1], late_at=0.0)
    one.future = Future()
    written = []
    one.write(lambda: written.append(1))
    one.give_up()
    with pytest.raises(KVTiersError, match="given up"):
        one.write(lambda: written.append(2))
    assert written == [1]


def test_of_what_was_stored_the_ends_of_prefixes_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_requests, "STORED_MAX", 5)
    stored = prefix_requests.Stored()
    first, second = [b"a", b"b", b"c"], [b"x", b"y", b"z"]
    stored.add(first)
    stored.add(second)
    assert stored.end_of(first, 0, 3) == 2
    assert stored.end_of(second, 0, 3) == 3
    stored.add([b"new"])
    assert stored.end_of(second, 0, 3) == 3  # used last
    assert stored.end_of(first, 0, 3) == 1
    stored.discard(second[1:])
    assert stored.end_of(second, 0, 3) == 1
