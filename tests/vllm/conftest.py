"""These tests run against the installed vLLM: without one the folder is not collected, and says why."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REASON = "vLLM is not installed: make e2e builds an environment that has it"


class _Skipped(pytest.File):
    """Stands for a test file that cannot be imported here."""

    def collect(self) -> list[pytest.Item]:
        return [_SkippedItem.from_parent(self, name="needs_vllm")]


class _SkippedItem(pytest.Item):
    def runtest(self) -> None:
        pytest.skip(REASON)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Put a skipped test in the place of a module that would fail to import."""
    if importlib.util.find_spec("vllm") is None and module_path.name.startswith("test_"):
        return _Skipped.from_parent(parent, path=module_path)
    return None


@pytest.fixture(autouse=True)
def surrounded_by_a_connector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests make a spec or a tier without the frames of vLLM around it: what they leave out has a stand-in.

    A test marked ``bare_stack`` sees what is found without it.
    """
    if importlib.util.find_spec("vllm") is None or request.node.get_closest_marker("bare_stack"):
        return
    from connector.vllm import translate
    from tests.vllm import engines
    from tiers.errors import ConfigError

    find = translate.find_arguments

    def find_or_stand_in(name: str, type_name: str) -> list[Any]:
        try:
            return find(name, type_name)
        except ConfigError:
            return [engines.STAND_INS[name]()]

    monkeypatch.setattr(translate, "find_arguments", find_or_stand_in)


@pytest.fixture(autouse=True)
def own_loggers() -> Iterator[None]:
    """Give the loggers that a door configures back as they were: ``caplog`` hears what reaches the root."""
    loggers = [logging.getLogger(name) for name in ("vllm", "tiers", "connector")]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]
    loggers[0].propagate = True
    yield
    for each, (each.handlers[:], level, each.propagate) in zip(loggers, before, strict=True):
        each.setLevel(level)
