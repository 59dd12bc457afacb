from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtiers.connector.commands.kv_shape import kv_shape
from kvtiers.connector.commands.model_size import size_of
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.config.deployment import parse_config
from kvtiers.tiers.registry import SecondaryTierFactory
from tests.connector.commands import model_configs
from tests.connector.commands.model_configs import ALL, DEEPSEEK_V3, GPT_OSS_20B, LLAMA_8B, QWEN3_8B
from tests.connector.commands.test_storage_commands import ok, result_of, run
from tests.identity import FakeSpec, block_key

README = Path(__file__).parents[3] / "README.md"
KIB, GIB = 1 << 10, 1 << 30
README_MODELS = {
    "Llama 3.1 8B": LLAMA_8B,
    "Qwen3 8B": QWEN3_8B,
    "Llama 3.1 70B": model_configs.LLAMA_70B,
}


def write(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def asked(folder: Path, config: dict[str, Any], *options: str) -> dict[str, Any]:
    result: dict[str, Any] = result_of(size(write(folder, config), "--json", *options))["sizing"]
    return result


def size(model: str, *options: str) -> str:
    return ok("check", "--model", model, *options)


def test_readme_table_matches_model_sizes(tmp_path: Path) -> None:
    """Each row: name (layers x heads x head size) | per token | 32,000 tokens | tokens in 100 GiB | break-even."""
    speed = re.search(r"break-even at a prefill of ([\d,]+) tokens/s", README.read_text())
    assert speed is not None
    rows = re.findall(
        r"^\| (.+?) \((\d+) × (\d+) × (\d+)\) \| (\d+) KiB \| ([\d.]+) GiB \| ([\d,]+) \| ([\d,]+) MB/s \|$",
        README.read_text(),
        re.MULTILINE,
    )
    assert {row[0] for row in rows} == README_MODELS.keys()
    for name, layers, heads, head_size, kib, gib, tokens, megabytes in rows:
        found = asked(tmp_path, README_MODELS[name], "--prefill", speed[1].replace(",", ""))
        shape = found["shape"]
        assert (shape["full_layers"], shape["kv_heads"], shape["head_size"]) == (
            int(layers),
            int(heads),
            int(head_size),
        )
        assert found["token_bytes"] == int(kib) * KIB
        assert gib == f"{32_000 * found['token_bytes'] / GIB:.1f}"
        assert tokens == f"{100 * GIB // found['token_bytes']:,}"
        assert megabytes == f"{found['break_even'][0]['bytes_per_s'] / 1e6:,.0f}"


@pytest.mark.parametrize("name", ALL)
def test_kv_shape_has_layers_heads_and_head_size_of_the_model(name: str) -> None:
    config, layers, heads, head_size = ALL[name]
    shape = kv_shape(config)
    assert (shape.full_layers, shape.window_layers, shape.state_layers) == layers
    assert (shape.kv_heads, shape.head_size) == (heads, head_size)


def test_model_size_is_printed_for_tokens_blocks_and_break_even(tmp_path: Path) -> None:
    out = size(write(tmp_path, LLAMA_8B), "--tp", "2", "--prefill", "5000")
    assert "bytes per token = 2 x layers x KV heads x head size x bytes per number" in out
    for line in (
        "per token         128 KiB, 64 KiB on each of 2 ranks",
        "per 1,000 tokens  125 MiB",
        "tokens per GiB    8,192",
        "stored block      32 MiB of 256 tokens, 16 MiB from each of 2 ranks; 4 KiB more on disk for its seal",
        "5,000 tokens/s    655 MB/s",
    ):
        assert line in out.splitlines()


def test_tensor_parallel_ranks_share_heads_or_have_copies(tmp_path: Path) -> None:
    assert asked(tmp_path, LLAMA_8B, "--tp", "8")["token_bytes"] == 128 * KIB
    with_copies = asked(tmp_path, LLAMA_8B, "--tp", "16")
    assert (with_copies["token_rank_bytes"], with_copies["token_bytes"]) == (16 * KIB, 256 * KIB)
    code, out = run("check", "--model", str(tmp_path), "--tp", "3")
    assert code == 2
    assert "--tp: is 3, and this model has 8 KV heads" in out


def test_kv_cache_dtype_scales_bytes_per_token(tmp_path: Path) -> None:
    assert asked(tmp_path, LLAMA_8B, "--kv-cache-dtype", "fp8")["token_bytes"] == 64 * KIB
    assert asked(tmp_path, LLAMA_8B, "--kv-cache-dtype", "float32")["token_bytes"] == 256 * KIB
    code, out = run("check", "--model", str(tmp_path), "--kv-cache-dtype", "int3")
    assert (code, "--kv-cache-dtype: 'int3' is not accepted; write auto or float16" in out) == (2, True)


def test_checkpoint_with_quantized_cache_needs_kv_cache_dtype_option(tmp_path: Path) -> None:
    model = write(tmp_path, {**LLAMA_8B, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}})
    code, out = run("check", "--model", model)
    assert code == 2
    assert "quantization_config.kv_cache_scheme" in out
    assert result_of(size(model, "--json", "--kv-cache-dtype", "fp8"))["sizing"]["token_bytes"] == 64 * KIB


def test_every_rank_stores_all_of_mla(tmp_path: Path) -> None:
    one, eight = asked(tmp_path, DEEPSEEK_V3), asked(tmp_path, DEEPSEEK_V3, "--tp", "8")
    assert one["token_bytes"] == 61 * 576 * 2 == eight["token_rank_bytes"]
    assert eight["token_bytes"] == 8 * one["token_bytes"]
    assert one["block_bytes"] is None
    assert "pass --block-size" in size(str(tmp_path))
    chosen = asked(tmp_path, DEEPSEEK_V3, "--block-size", "64")
    assert (chosen["chunk_tokens"], chosen["block_rank_bytes"]) == (1024, 1024 * 61 * 576 * 2)


def test_model_with_windows_or_states_gets_bounds_only(tmp_path: Path) -> None:
    windows = asked(tmp_path, GPT_OSS_20B)
    token_bytes = 2 * 12 * 8 * 64 * 2
    assert windows["token_bytes"] == token_bytes
    assert windows["token_bytes_max"] == 2 * token_bytes
    assert windows["window_bytes"] == 128 * token_bytes
    assert windows["block_bytes"] is None
    out = size(str(tmp_path))
    assert "at least 24 KiB" in out
    assert "at most 43,690" in out
    assert "stored block      not computed" in out
    states = asked(tmp_path, model_configs.QWEN3_NEXT_80B)
    assert states["token_bytes"] == 2 * 12 * 2 * 256 * 2
    assert "recurrent states" in size(str(tmp_path))
    only_windows = asked(tmp_path, {**LLAMA_8B, "layer_types": ["sliding_attention"] * 32, "sliding_window": 4096})
    assert only_windows["token_bytes"] == 0
    assert "per token         not computed: no layer keeps every token" in size(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({**GPT_OSS_20B, "layer_types": None}, "sliding_window: unknown layer kind (there is no layer_types"),
        ({**GPT_OSS_20B, "layer_types": ["\x1b[2J"] * 24}, r"layer_types: unknown layer kind ('\x1b[2J')"),
        ({**QWEN3_8B, "use_sliding_window": True, "sliding_window": 4096}, "sliding_window: unknown layer kind"),
        ({**model_configs.QWEN3_NEXT_80B, "layer_types": None}, "full_attention_interval: unknown layer kind"),
        (model_configs.JAMBA_MINI, "attn_layer_offset: unknown layer kind"),
        (model_configs.MISTRAL_7B_V01, "sliding_window: unknown layer kind"),
        (model_configs.LLAMA4_SCOUT, "attention_chunk_size: unknown layer kind"),
        (model_configs.MINIMAX_TEXT_01, "attn_type_list: unknown layer kind (its entries, one for each layer, differ)"),
        (model_configs.NEMOTRON_NAS, "block_configs: unknown layer kind"),
        (model_configs.RECURRENT_GEMMA_2B, "attention_window_size: unknown layer kind (layers differ"),
        ({**LLAMA_8B, "block_types": ["recurrent", "attention"]}, "block_types: unknown layer kind (layers differ"),
        ({**LLAMA_8B, "layer_group_size": 5}, "layer_group_size: unknown layer kind"),
        ({**LLAMA_8B, "of_a_new_type": [{"a": 1}] * 31 + [{}]}, "of_a_new_type: unknown layer kind"),
        ({**GPT_OSS_20B, "of_a_new_type": [1, 2] * 12}, "of_a_new_type: unknown layer kind"),
        ({**GPT_OSS_20B, "per_layer_config": {"05": {"head_dim": 512}}}, "per_layer_config: unknown layer kind"),
        ({**GPT_OSS_20B, "swa_num_key_value_heads": 4}, "swa_num_key_value_heads: unknown layer kind"),
        ({**DEEPSEEK_V3, "index_topk": 2048}, "index_topk: unknown layer kind (layers keep more or less"),
        ({**LLAMA_8B, "num_kv_shared_layers": 10}, "num_kv_shared_layers: unknown layer kind"),
        ({**LLAMA_8B, "use_cla": True, "cla_share_factor": 2}, "use_cla: unknown layer kind"),
        ({**LLAMA_8B, "v_head_dim": 64}, "v_head_dim: unknown layer kind (keys and values differ in size)"),
    ],
)
def test_unknown_layer_kind_is_refused(config: dict[str, Any], names: str, tmp_path: Path) -> None:
    code, out = run("check", "--model", write(tmp_path, config))
    assert code == 2
    assert names in out
    assert "run the model: vLLM's log shows the size of a block" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, "num_hidden_layers: is missing"),
        ({**LLAMA_8B, "num_hidden_layers": None}, "num_hidden_layers: is missing"),
        ({**LLAMA_8B, "num_hidden_layers": 10**9}, "num_hidden_layers: is 1000000000"),
        ({**LLAMA_8B, "num_key_value_heads": "8"}, "num_key_value_heads: is '8'"),
        ({**LLAMA_8B, "num_key_value_heads": True}, "num_key_value_heads: is True"),
        ({**LLAMA_8B, "num_key_value_heads": None}, "num_key_value_heads: is missing"),
        ({**LLAMA_8B, "hidden_size": 0}, "hidden_size: is 0"),
        ({**LLAMA_8B, "hidden_size": 4100}, "head_dim: is missing"),
        ({**GPT_OSS_20B, "sliding_window": None}, "sliding_window: is missing"),
        ({**GPT_OSS_20B, "layer_types": ["full_attention"]}, "layer_types: must be a list of 24"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": None}, "qk_rope_head_dim: is missing"),
    ],
)
def test_missing_or_invalid_config_field_is_refused_by_name(config: dict[str, Any], names: str, tmp_path: Path) -> None:
    code, out = run("check", "--model", write(tmp_path, config))
    assert code == 2
    assert names in out


@pytest.mark.parametrize("content", ["[1]", "{", "[" * 100_000, "\udcff"])
def test_invalid_config_json_is_bad_input(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    code, out = run("check", "--model", str(tmp_path / "config.json"))
    assert code == 2
    assert "--model: " in out


def test_missing_model_is_bad_input(tmp_path: Path) -> None:
    for model in (str(tmp_path), "nobody/nothing", "", "a\x00b", "x" * 5000, "~nobody-at-all/x"):
        code, out = run("check", "--model", model)
        assert code == 2, out
        assert "--model: " in out


def test_hub_id_is_looked_up_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--model"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    write(snapshot, LLAMA_8B)
    assert "org/model: 32 layers" in size("org/model")


def test_number_of_tokens_that_fit_includes_seals_and_whole_blocks(tmp_path: Path) -> None:
    tiny = {**LLAMA_8B, "num_hidden_layers": 1, "num_key_value_heads": 1, "hidden_size": 96, "num_attention_heads": 1}
    model = write(tmp_path, tiny)
    in_chunks = parse_config({"region": {"size": "1GiB"}, "blocks_per_chunk": 2})
    block_bytes = size_of(model, in_chunks).block_bytes
    assert block_bytes == 12 * KIB  # 2 x 96 x 2 bytes x 32 tokens, in whole pages
    options = {"type": "fs", "root_dir": str(tmp_path / "kv"), "min_free": 0}
    rows = np.zeros((1, block_bytes), np.int8)
    tier = SecondaryTierFactory.create_secondary_tier(options, rows.data, FakeSpec())
    tier.submit_store(JobMetadata(1, [block_key(1)], np.arange(1, dtype=np.int32)))
    tier.drain_jobs()
    assert [result.success for result in tier.get_finished()] == [True]
    tier.shutdown()
    (stored,) = [path.stat().st_size for path in (tmp_path / "kv").rglob("*.bin")]
    deployment = parse_config(
        {
            "blocks_per_chunk": 2,
            "region": {"size": 3 * block_bytes + 1},
            "tiers": [
                {**options, "max_bytes": 101 * stored - 1},
                {"type": "s3", "bucket": "bucket"},
            ],
        }
    )
    region, files, bucket = size_of(model, deployment).fits
    assert region.tokens == 3 * 32
    assert files.tokens == 100 * 32
    assert bucket.tokens is bucket.max_bytes is None


def test_config_sets_blocks_per_chunk_and_lists_what_fits(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        f"blocks_per_chunk: 4\nregion: {{size: 1GiB}}\ntiers: [{{type: fs, root_dir: {tmp_path}/kv, max_bytes: 10GiB}}]"
    )
    model = write(tmp_path, LLAMA_8B)
    out = run("check", str(config), "--model", model)[1]
    assert "8 MiB of 64 tokens" in out
    assert re.search(r"region\.size +1 GiB: 8,192 tokens", out)
    # 1,279 blocks of 8 MiB and 4 KiB
    assert re.search(r"tiers\[0\]\.max_bytes \(fs\) +10 GiB: at most 81,856 tokens", out)
    assert f"{config} is " in out
    write(tmp_path, GPT_OSS_20B)
    out = run("check", str(config), "--model", model)[1]
    assert re.search(r"region\.size +1 GiB: at most 43,690 tokens", out)
    code, out = run("check", str(tmp_path / "absent.yaml"), "--model", model)
    assert (code, "absent.yaml" in out) == (2, True)


def test_region_too_small_for_one_block_gets_a_warning(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("blocks_per_chunk: 16\nregion: {size: 16MiB}\ntiers: [{type: memory}]")
    model = write(tmp_path, LLAMA_8B)
    (warning,) = [f for f in result_of(size(model, str(config), "--json"))["findings"] if f["level"] == "warning"]
    assert (warning["check"], warning["fix"]) == ("region.size", "write at least 512MiB for this model")


def test_check_reports_refused_model_as_a_problem_beside_other_findings(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("region: {size: 16MiB}\ntiers: [{type: memory}]")
    model = write(tmp_path, model_configs.MINIMAX_TEXT_01)
    code, out = run("check", str(config), "--model", model)
    assert code == 1
    assert "problem --model, attn_type_list: unknown layer kind" in out
    assert "fix: run the model: vLLM's log shows" in out
    assert "tiers[0] memory, storage: in the engine's memory" in out
    assert out.splitlines()[-1] == f"{config} is not usable: --model"
    code, out = run("check", str(config), "--model", model, "--json")
    assert (code, result_of(out)["sizing"], json.loads(out)["ok"]) == (1, None, False)
    assert run("check", str(config), "--model", write(tmp_path, LLAMA_8B), "--kv-cache-dtype", "int3")[0] == 2


def test_max_bytes_of_foreign_or_read_only_tier_is_not_listed_as_room(tmp_path: Path) -> None:
    tiers = [
        {"type": "Theirs", "module_path": "my.module", "max_bytes": "10GiB"},
        {"type": "fs", "root_dir": str(tmp_path / "kv"), "read_only": True},
    ]
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps({"region": {"size": "1GiB"}, "tiers": tiers}))
    fits = result_of(run("check", str(config), "--model", write(tmp_path, LLAMA_8B), "--json")[1])["sizing"]["fits"]
    assert [room["name"] for room in fits] == ["region.size"]
