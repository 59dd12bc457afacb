"""Layer: exactly the inner store's protocols, and those that its class adds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from kvtiers.tiers.store import (
    KeepsFiles,
    Store,
    SupportsSpace,
    SupportsTail,
    SupportsTouch,
)
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.faults import FaultyStore
from kvtiers.tiers.testing.store_layer import Layer

#: Each protocol, and its methods.
PROTOCOLS: dict[type, tuple[str, ...]] = {
    SupportsTail: ("get_tail",),
    SupportsTouch: ("touch",),
    KeepsFiles: ("sweep", "hidden_names"),
    SupportsSpace: ("space",),
}


def store_with(methods: Sequence[str]) -> Any:
    """A store with exactly these optional methods."""
    six = ("put", "get_into", "size", "delete", "keys", "close")
    store = type("Inner", (Store,), dict.fromkeys((*six, *methods), lambda *_: None))()
    store.capabilities = MemoryStore.capabilities
    return store


@pytest.mark.parametrize("layer_class", [Layer, FaultyStore])
def test_layer_has_exactly_the_protocols_of_its_store(layer_class: type[Layer]) -> None:
    for has in (c for n in (0, 1, 2, len(PROTOCOLS)) for c in combinations(PROTOCOLS, n)):
        inner = store_with([method for protocol in has for method in PROTOCOLS[protocol]])
        layer = layer_class(inner)
        assert layer.capabilities is inner.capabilities
        assert tuple(protocol for protocol in PROTOCOLS if isinstance(layer, protocol)) == has


def test_layer_forwards_default_methods_that_its_store_overrides() -> None:
    class Many(MemoryStore):
        prepared = 0

        def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
            return [7 for _ in keys]

        def prepare(self) -> None:
            self.prepared += 1

    store = Many()
    layer = FaultyStore(Layer(store))
    assert layer.size_many(["a", "b"]) == [7, 7]
    assert layer.delete_many(["a", "b"]) == [None, None]
    layer.prepare()
    assert store.prepared == 1
    assert layer.calls == {"size_many": 1, "delete": 2}


class TouchingLayer(Layer):
    def touch(self, key: str) -> str:
        return f"mine {key}"


def test_layer_method_overrides_the_method_of_its_store() -> None:
    for methods in ((), ("touch",)):
        assert TouchingLayer(store_with(methods)).touch("a") == "mine a"


def test_layer_repr_shows_all_layers_and_the_store() -> None:
    assert repr(Layer(FaultyStore(MemoryStore()))).startswith("Layer(FaultyStore(<kvtiers.tiers.stores.memory")
