"""These tests run against the installed vLLM: without one the folder is not collected, and says why."""

from __future__ import annotations

import importlib.util
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
