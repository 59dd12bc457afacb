"""The demo's first process converts a GGUF file, and its second process loads the result."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtiers.connector.demo import model as demo_model
from kvtiers.connector.demo.model import ModelSource, load_model
from tests.tiny_model import make_model_dir


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelSource, list[str]]:
    """A model whose GGUF file is played by a tiny model's folder, and what was loaded, in turn."""
    for name in ("torch", "transformers", "tokenizers"):
        pytest.importorskip(name)
    tiny = make_model_dir(tmp_path / "tiny")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    loaded: list[str] = []
    load = demo_model._pretrained

    def pretrained(source: ModelSource, stage: demo_model.Stage) -> tuple[Any, Any]:
        loaded.append("gguf" if source.gguf_file else "converted")
        return load(ModelSource(str(tiny), None, True) if source.gguf_file else source, stage)

    monkeypatch.setattr(demo_model, "_pretrained", pretrained)
    return ModelSource(str(tmp_path), "tiny.gguf", True, str(tmp_path / "run" / "model")), loaded


def test_second_process_loads_converted_weights_and_has_the_same_model(gguf: tuple[ModelSource, list[str]]) -> None:
    import torch

    source, loaded = gguf
    stages: list[str] = []
    first, second = load_model(source, stages.append), load_model(source)
    assert loaded == ["gguf", "converted"]
    assert "converting the weights" in stages
    assert (first.name, first.revision, first.size_bytes) == (second.name, second.revision, second.size_bytes)
    assert first.tokenize("Hello", "What?") == second.tokenize("Hello", "What?")
    weights, again = first.module.state_dict(), second.module.state_dict()
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_model_has_another_revision_if_its_gguf_file_has_other_bytes(gguf: tuple[ModelSource, list[str]]) -> None:
    source = replace(gguf[0], converted=None)
    first = load_model(source)
    (Path(source.path) / "tiny.gguf").write_bytes(b"GGUG")
    assert load_model(source).revision != first.revision


def test_conversion_that_cannot_be_saved_is_logged_and_repeated_by_the_second_process(
    gguf: tuple[ModelSource, list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    safetensors: Any = pytest.importorskip("safetensors")

    def fail(*_: object) -> None:
        raise safetensors.SafetensorError("No space left on device")

    source, loaded = gguf
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", fail)
    with caplog.at_level(logging.WARNING, "connector"):
        load_model(source)
        load_model(source)
    assert loaded == ["gguf", "gguf"]
    assert "the converted weights are not kept" in caplog.text
