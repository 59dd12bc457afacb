"""Rows of ``tests.gpu`` that no CPU can rehearse: at least, their engines' options exist in vLLM."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.engine.arg_utils import EngineArgs

from tests.gpu.models import KINDS, Kind

pytestmark = pytest.mark.outside


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_engine_options_of_each_kind_exist(kind: Kind) -> None:
    assert set(kind.engine) <= {field.name for field in dataclasses.fields(EngineArgs)}
