"""These tests run against the installed vLLM: without one the folder is not collected, and says why."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

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
def inside_a_connector(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let tests make a spec or a tier by themselves: what a connector would hand over has a stand-in.

    A test marked ``outside`` makes them outside any connector.
    """
    if importlib.util.find_spec("vllm") is None or request.node.get_closest_marker("outside"):
        yield
        return
    from kvtiers.connector.vllm.handed import handing_over
    from tests.vllm import engines

    with handing_over(engines.VllmConfig(), engines.kv_cache_config(*[engines.FULL] * 3)):
        yield


@pytest.fixture(autouse=True)
def own_loggers() -> Iterator[None]:
    """Give the loggers that a door configures back as they were: ``caplog`` hears what reaches the root."""
    loggers = [logging.getLogger(name) for name in ("vllm", "kvtiers")]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]
    loggers[0].propagate = True
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
