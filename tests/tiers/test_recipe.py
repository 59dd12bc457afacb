"""StoreRecipe: the store of another process has the options that this process gave."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtiers.tiers.errors import StoreConfigError
from kvtiers.tiers.recipe import StoreRecipe, make_store
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.memory import MemoryStore


@dataclass(frozen=True)
class OptionsDataclass:
    """Options as S3's are."""

    name: str
    count: int
    inner: dict[str, list[object]]


class OptionsStore(MemoryStore):
    """Keeps the options that it was made with."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options


def make_options_store(**options: Any) -> Store:
    return OptionsStore(**options)


@pytest.mark.parametrize("make", [OptionsStore, make_options_store])
def test_store_recipe_options_survive_encoding(make: Any, tmp_path: Path) -> None:
    options = OptionsDataclass(name="ключ", count=3, inner={"a": [1, 2.5, None, True]})
    recipe = StoreRecipe.of(make, options=options, root_dir=tmp_path)
    store = make_store(json.loads(json.dumps(recipe.encode())))
    assert isinstance(store, OptionsStore)
    assert store.options == {"options": options, "root_dir": str(tmp_path)}


def test_recipe_option_that_cannot_be_encoded_is_named() -> None:
    with pytest.raises(StoreConfigError, match=r"'clock\.inner'"):
        StoreRecipe.of(OptionsStore, clock={"inner": time.time}).encode()


def test_recipe_options_are_not_shown_in_its_repr() -> None:
    assert "hush" not in repr(StoreRecipe.of(OptionsStore, password="hush"))


def test_recipe_with_a_missing_module_raises_module_not_found_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        make_store(StoreRecipe("no_such_module", "Store").encode())
