"""``kvtiers size`` counts layers, heads and head sizes as the installed vLLM does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtiers.connector.kv_shape import kv_shape
from tests.connector.commands.model_configs import ALL

pytest.importorskip("vllm.config")  # first: the next module alone imports itself in a circle
convertors = pytest.importorskip("vllm.transformers_utils.model_arch_config_convertor")
config_reader = pytest.importorskip("vllm.transformers_utils.config")
FULL = ("full_attention", "attention")


@pytest.mark.parametrize("name", ALL)
def test_the_shape_is_vllms(name: str, tmp_path: Path) -> None:
    contents = ALL[name][0]
    (tmp_path / "config.json").write_text(json.dumps(contents))
    hf_config = config_reader.get_config(str(tmp_path), trust_remote_code=False)
    text = config_reader.get_hf_text_config(hf_config)
    table = convertors.MODEL_ARCH_CONFIG_CONVERTORS
    convertor = table.get(hf_config.model_type, convertors.ModelArchConfigConvertorBase)(hf_config, text)
    shape = kv_shape(contents)
    if shape.is_mla:
        assert convertor.is_deepseek_mla()
    else:
        assert convertor.get_total_num_kv_heads() == shape.kv_heads
    assert convertor.get_head_size() == shape.head_size
    layers = shape.full_layers + shape.window_layers + shape.state_layers
    assert convertor.get_num_hidden_layers() == layers
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds:
        assert sum(kind in FULL for kind in kinds) == shape.full_layers
    if shape.window_layers:
        assert shape.window_tokens in (
            getattr(text, "sliding_window", None),
            getattr(text, "attention_chunk_size", None),
        )
