"""``kvtiers size`` counts layers, heads and head sizes as the installed vLLM does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtiers.connector import kv_shape as module
from kvtiers.connector.kv_shape import kv_shape
from kvtiers.tiers.errors import ConfigError
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


MODEL_TYPES = sorted(module._DERIVED_HEAD_SIZE | module._OWN_HEAD_SIZE | module._MLA)
FIELDS = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 12}
MLA_FIELDS = {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64}
MORE_FIELDS = {
    **{model_type: {"head_dim": 96} for model_type in module._OWN_HEAD_SIZE},
    **dict.fromkeys(module._MLA, MLA_FIELDS),
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
}


@pytest.mark.parametrize("is_full", [False, True], ids=["few-fields", "all-fields"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_file_with_few_fields_is_understood_as_vllm_does_or_refused(model_type: str, is_full: bool) -> None:
    """Transformers fills in what a file leaves out, with defaults that differ between model types."""
    from transformers import AutoConfig

    fields = {**FIELDS, **MORE_FIELDS.get(model_type, {})}
    try:
        hf_config = AutoConfig.for_model(model_type, **fields)
    except ValueError:
        pytest.skip(f"Transformers does not know {model_type}")
    text = hf_config.get_text_config()
    try:
        shape = kv_shape({**(text.to_dict() if is_full else fields), "model_type": model_type})
    except ConfigError:
        assert not is_full
        return
    table = convertors.MODEL_ARCH_CONFIG_CONVERTORS
    convertor = table.get(model_type, convertors.ModelArchConfigConvertorBase)(hf_config, text)
    assert convertor.get_head_size() == shape.head_size
    assert shape.is_mla or convertor.get_total_num_kv_heads() == shape.kv_heads
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        assert shape.state_layers == 0
        assert bool(getattr(text, "sliding_window", None)) == bool(shape.window_layers)
    else:
        assert [sum(module._LAYER_KINDS[kind] == each for kind in kinds) for each in ("full", "window", "state")] == [
            shape.full_layers,
            shape.window_layers,
            shape.state_layers,
        ]
