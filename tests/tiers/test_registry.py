from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtiers.tiers import registry
from kvtiers.tiers.base import JobMetadata, JobResult, ReqContext, SecondaryTierManager
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.builtin import BuiltInTier
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.registry import SecondaryTierFactory
from tests.identity import FakeSpec


class NullTier(SecondaryTierManager):
    """A tier that keeps nothing."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, color: str = "red") -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.color = color

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        return False

    def take_answered(self) -> dict[str, list[OffloadKey]]:
        return {}

    def submit_store(self, job_metadata: JobMetadata) -> None:
        raise NotImplementedError

    def submit_load(self, job_metadata: JobMetadata) -> None:
        raise NotImplementedError

    def get_finished(self) -> list[JobResult]:
        return []


class Half(SecondaryTierManager):
    """A tier that lacks most methods."""

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        return False


class Careless(NullTier):
    """A tier whose own code fails with a TypeError."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.width = "1" + len(tier_type)  # type: ignore[operator]


@pytest.fixture
def view() -> memoryview:
    return memoryview(bytearray(8192)).cast("b", (2, 4096))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    module = ModuleType("my_tiers")
    module.NullTier = NullTier  # type: ignore[attr-defined]
    module.Half, module.Careless = Half, Careless  # type: ignore[attr-defined]
    module.not_a_class = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_tiers", module)
    (tmp_path / "broken_tiers.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(SecondaryTierFactory, "_registered", {})
    return "my_tiers"


def create(view: memoryview, **config: Any) -> SecondaryTierManager:
    return SecondaryTierFactory.create_secondary_tier(config, view, FakeSpec())


def test_built_in_tier_is_created_by_its_type(view: memoryview, tmp_path: Path) -> None:
    tier = create(view, type="fs", root_dir=str(tmp_path))
    assert isinstance(tier, BuiltInTier)
    assert tier.tier_type == "fs"
    tier.shutdown()


def test_registered_tier_is_created_by_its_type(view: memoryview, plugin: str) -> None:
    SecondaryTierFactory.register_tier("null", plugin, "NullTier")
    SecondaryTierFactory.register_tier("null", plugin, "NullTier")  # the same again is fine
    assert "null" in SecondaryTierFactory.tier_types()
    tier = create(view, type="null", color="blue")
    assert isinstance(tier, NullTier)
    assert (tier.tier_type, tier.color) == ("null", "blue")
    with pytest.raises(ConfigError, match="is registered as"):
        SecondaryTierFactory.register_tier("null", plugin, "Other")
    with pytest.raises(ConfigError, match="is registered as"):
        SecondaryTierFactory.register_tier("fs", plugin, "NullTier")


def test_tier_is_created_by_its_module_path(view: memoryview, plugin: str) -> None:
    assert isinstance(create(view, type="NullTier", module_path=plugin), NullTier)


def test_tier_is_created_by_its_entry_point(view: memoryview, plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    entries = EntryPoints([EntryPoint("void", "my_tiers:NullTier", "kvtiers.tiers")])
    monkeypatch.setattr(registry, "_entry_points", lambda: entries)
    assert isinstance(create(view, type="void"), NullTier)


def test_store_of_an_entry_point_is_among_the_tier_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtiers.tiers.config.deployment._store_entry_points", lambda: {"own": "my_store:make_store"})
    assert "own" in SecondaryTierFactory.tier_types()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "None is not a tier type; accepted: fs"),
        ({"type": 3}, "3 is not a tier type"),
        ({"type": "nope"}, "'nope' is not a tier type; accepted: fs"),
        ({"type": "X", "module_path": "no.such.module"}, "cannot be imported"),
        ({"type": "Missing", "module_path": "my_tiers"}, "has no class 'Missing'"),
        ({"type": "not_a_class", "module_path": "my_tiers"}, "not a class"),
        ({"type": "NullTier", "module_path": "my_tiers", "flavour": 1}, "options do not fit: .*flavour"),
        (
            {"type": "Half", "module_path": "my_tiers"},
            r"lacks get_finished, submit_load, submit_store, take_answered .*subclass PollingTierManager",
        ),
        (
            {"type": "Careless", "module_path": "my_tiers"},
            r"tier 'Careless': cannot be created: TypeError: can only concat",
        ),
        ({"type": "fs"}, "root_dir"),
        ({"type": "fs", "root_dir": "/x", "bogus": 1}, "bogus: is not a known key"),
        ({"type": "ModuleType", "module_path": "types"}, "is not a SecondaryTierManager"),
        ({"type": "X", "module_path": ".x"}, "module_path: tier 'X' cannot be imported: TypeError"),
        ({"type": "X", "module_path": "broken_tiers"}, "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_invalid_tier_error_names_the_cause(view: memoryview, plugin: str, config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        create(view, **config)


def test_tier_base_class_refuses_unknown_options(view: memoryview) -> None:
    with pytest.raises(ConfigError, match="colour: unknown option"):
        SecondaryTierManager.__init__(NullTier.__new__(NullTier), None, view, "x", colour=1)
