"""translate: vLLM's values in ours, and back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from safetensors.torch import save_file
from vllm.config import ModelConfig as VllmModelConfig
from vllm.config import PoolerConfig
from vllm.renderers.base import BaseRenderer
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium
from vllm.v1.kv_offload.config import OffloadingGroupConfig, OffloadingModelConfig

from kvtiers.connector.base import EngineSpec
from kvtiers.connector.identity import model_files
from kvtiers.connector.vllm import translate, weights
from kvtiers.tiers.base import JobResult, OffloadingEvent
from kvtiers.tiers.blocks.file_mapper import FileMapper, strict_fields
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.plain_logs import log_once
from tests.tiny_model import make_model_dir
from tests.vllm.engines import VllmConfig, keys, offloading_config, request


@pytest.mark.parametrize(
    ("module", "version"),
    [
        ("connector", "'dev'"),
        ("spec", "'0.27.0'"),
        ("tier", "None"),
        ("shared_storage", "'0'"),
        ("translate", "'0.27.0'"),
    ],
)
def test_import_with_unusable_vllm_names_the_tested_releases(module: str, version: str) -> None:
    """In place of vLLM is a package that has a version and nothing else."""
    script = f"""
import sys, types
vllm = types.ModuleType("vllm")
vllm.__version__ = {version}
sys.modules["vllm"] = vllm
import kvtiers.connector.vllm.{module}
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    error = run.stderr.strip().splitlines()[-1]
    assert error.startswith("kvtiers.tiers.errors.ConfigError: vllm: ")
    assert f"version {version.strip(chr(39))!r} lacks what kvtiers uses of vLLM: " in error
    assert error.endswith("Install a release that kvtiers was tested with (0.28 to 0.33), or a newer kvtiers")


def test_config_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_config"):
        built_by(VllmConfig(model_config=None))


@pytest.mark.parametrize("lora", [None, SimpleNamespace(max_loras=1)])
def test_adapters_known_by_name_are_warned_of_once(lora: Any, caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    for _ in range(2):
        translate.warn_of_adapters(VllmConfig(lora_config=lora))
    assert caplog.text.count("LoRA adapters are known by name and path") == (lora is not None)


def test_cpu_kernels_of_vllm_apply_adapters_to_plain_rows_in_refused_releases() -> None:
    from vllm.lora.ops.torch_ops import bgmv_shrink

    output, no_adapter = torch.zeros(1, 1), torch.tensor([-1])
    bgmv_shrink(torch.ones(1, 1), torch.ones(1, 1, 1), output, no_adapter)
    assert bool(output.any()) == translate._LEAKS_ADAPTERS_ON_CPU


@pytest.mark.parametrize(
    ("has_adapters", "is_cpu", "leaks"),
    [(True, True, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_adapters_are_refused_if_vllm_applies_them_to_plain_requests(
    has_adapters: bool, is_cpu: bool, leaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "_LEAKS_ADAPTERS_ON_CPU", leaks)
    platform = SimpleNamespace(is_cpu=lambda: is_cpu, is_rocm=lambda: False, device_name="cuda")
    monkeypatch.setattr(translate, "current_platform", platform)
    config = VllmConfig(lora_config=SimpleNamespace(max_loras=1) if has_adapters else None)
    if has_adapters and is_cpu and leaks:
        with pytest.raises(ConfigError, match="enable_lora: .*use vLLM 0.33 or later"):
            translate.engine_spec(offloading_config(), config)
    else:
        translate.engine_spec(offloading_config(), config)


def test_lookup_answers_are_translated() -> None:
    assert translate.lookup_result(True) is LookupResult.HIT
    assert translate.lookup_result(False) is LookupResult.MISS
    assert translate.lookup_result(None) is LookupResult.RETRY
    assert translate.lookup_result(None, is_coming=True) is LookupResult.HIT_PENDING


@pytest.mark.parametrize("ids", ["chunk_ids", "block_ids"])
def test_keys_and_ids_of_a_job_stay_parallel_under_either_attribute_name(ids: str) -> None:
    some = set(keys(5))
    job = SimpleNamespace(job_id=7, keys=some, req_context=request(), **{ids: np.arange(5, dtype=np.int32)})
    ours = translate.job_metadata(job)
    assert ours.job_id == 7
    assert list(ours.keys) == list(some)
    assert ours.block_ids.tolist() == [0, 1, 2, 3, 4]


def test_successful_keys_are_reported_only_for_failed_jobs() -> None:
    one, other = keys(2)
    whole = translate.job_result(JobResult(1, True, (one, other), 0.5, 10))
    assert (whole.success, whole.successful_keys, whole.transfer_time, whole.transfer_bytes) == (True, None, 0.5, 10)
    assert translate.job_result(JobResult(1, False, (one,))).successful_keys == (one,)
    assert translate.job_result(JobResult(1, False)).successful_keys is None


def test_events_carry_medium_and_locality() -> None:
    some = tuple(keys(2))
    ours = [OffloadingEvent(some, "s3", removed=False), OffloadingEvent(some, "CPU", removed=True)]
    stored, removed = translate.events(ours, Locality.REMOTE)
    assert (stored.keys, stored.medium, stored.removed) == (list(some), Medium.STORAGE, False)
    assert stored.locality is Locality.REMOTE
    assert (removed.medium, removed.removed) == (Medium.CPU, True)


def test_locality_follows_the_tier_type() -> None:
    assert translate.locality("fs") is Locality.LOCAL
    assert translate.locality("s3") is Locality.REMOTE
    assert translate.locality("foreign") is None


def built_by(vllm_config: Any, **changes: Any) -> EngineSpec:
    """What a spec is that is made while a connector with this config is under construction."""
    return translate.engine_spec(offloading_config(**changes), vllm_config)


def test_counting_option_starts_a_namespace_naming_the_option_unless_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = built_by(VllmConfig())
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    counted = built_by(VllmConfig())
    assert plain.config.engine == {}
    assert "engine" not in strict_fields(plain)
    assert strict_fields(counted)["engine"] == {"VLLM_MLA_DISABLE": "1"}
    assert str(counted.config.model.revision).startswith("c0ffee+engine:")
    extra = {"tiers": [], "identity": {"ignore": ["VLLM_MLA_DISABLE"]}}
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    vouched = built_by(VllmConfig(kv_transfer_config=transfer))
    assert FileMapper.from_offloading_spec("", vouched, extra_fields=strict_fields(vouched)).base_path == (
        FileMapper.from_offloading_spec("", plain, extra_fields=strict_fields(plain)).base_path
    )


def test_role_follows_kv_role_of_the_connector(
    caplog: pytest.LogCaptureFixture,
) -> None:
    both, consumer = (
        VllmConfig(kv_transfer_config=SimpleNamespace(kv_role=role)) for role in ("kv_both", "kv_consumer")
    )
    assert translate.role_of(consumer) == (True, False)
    assert "kv_role is kv_consumer: KV is only loaded from storage" in caplog.text
    caplog.clear()
    assert translate.role_of(both) == (True, True)
    assert not caplog.records
    producer = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_role="kv_producer"))
    assert translate.role_of(producer) == (False, True)


def some_vllm_config(**changes: Any) -> VllmConfig:
    model = {"revision": "main", "quantization": None, "hf_config": SimpleNamespace(_commit_hash=None)} | changes
    return VllmConfig(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=changes.get("algorithm", "sha256_cbor")),
    )


def test_revision_hash_algorithm_and_layout_come_from_the_vllm_config() -> None:
    config = built_by(some_vllm_config()).config
    assert config.model.revision == "main"
    assert config.cache.hash_algorithm == "sha256_cbor"
    assert config.kv_cache_layout == "LBHNC"


def test_model_revision_prefers_the_commit_and_includes_quantization() -> None:
    commit = SimpleNamespace(_commit_hash="c0ffee")
    assert built_by(some_vllm_config(hf_config=commit)).config.model.revision == "c0ffee"
    assert built_by(some_vllm_config(hf_config=commit, quantization="fp8")).config.model.revision == "c0ffee+fp8"


def folder(spec: EngineSpec) -> str:
    return FileMapper.from_offloading_spec("", spec, parallel_agnostic=True, extra_fields=strict_fields(spec)).base_path


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_size": 2, "world_size": 2},
        {"pp_size": 2, "world_size": 2},
        {"pcp_size": 2},
        {"dcp_size": 2},
        {"kv_cache_layout": "BLHNC"},
        {"canonical_layout": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_each_changed_identity_field_starts_another_namespace(changes: dict[str, Any]) -> None:
    config = some_vllm_config()
    assert folder(built_by(config, **changes)) != folder(built_by(config))


def test_weights_and_hash_algorithm_are_part_of_the_namespace() -> None:
    folders = {
        folder(built_by(some_vllm_config(**changes)))
        for changes in ({}, {"revision": "v2"}, {"quantization": "fp8"}, {"algorithm": "xxhash_cbor"})
    }
    assert len(folders) == 4


def test_tp_sizes_share_blocks_only_in_the_canonical_layout() -> None:
    config = some_vllm_config()
    two = {"tp_size": 2, "world_size": 2, "is_parallelism_agnostic": True}
    assert folder(built_by(config, **two)) != folder(built_by(config, is_parallelism_agnostic=True))
    one = built_by(config, is_parallelism_agnostic=True, canonical_layout=True)
    assert folder(built_by(config, canonical_layout=True, **two)) == folder(one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cpus_with_different_kv_order_share_no_namespace(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    config = some_vllm_config(dtype=dtype, get_head_size=lambda: 64)
    folders = set()
    for supports_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda answer=supports_amx: answer)
        folders.add(folder(built_by(config)))
    assert len(folders) == (2 if dtype is torch.bfloat16 else 1)


def test_cpus_have_separate_platform_names_if_vllm_does_not_tell_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_attn, "_get_attn_isa")
    platforms = set()
    for supports_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda answer=supports_amx: answer)
        platforms.add(built_by(some_vllm_config(dtype=torch.bfloat16, get_head_size=lambda: 64)).config.platform)
    assert len(platforms) == 2
    assert all(str(each).startswith("cpu:") for each in platforms)


def test_platform_other_than_cpu_is_known_by_its_device_name(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False, is_rocm=lambda: False, device_name="cuda")
    monkeypatch.setattr(translate, "current_platform", platform)
    group = OffloadingGroupConfig(tokens_per_block=16, layer_names=("a",), group_id=0)
    assert built_by(some_vllm_config(), groups=(group,)).config.platform == "cuda"


def test_cuda_platform_name_depends_on_gpu_if_kernels_may_split_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of several of a kernel's has its heads in each of them, in the same layout and size."""

    def platform(tokens: int, capability: Any = (9, 0)) -> str | None:
        gpu = {"is_cpu": lambda: False, "is_rocm": lambda: False, "device_name": "cuda"}
        cuda = SimpleNamespace(**gpu, get_device_capability=lambda: capability)
        monkeypatch.setattr(translate, "current_platform", cuda)
        group = OffloadingGroupConfig(tokens_per_block=tokens, layer_names=("a",), group_id=0)
        return built_by(some_vllm_config(), groups=(group,)).config.platform

    assert platform(16) == platform(16, (10, 0)) == "cuda"
    plain = platform(32)
    assert str(plain).startswith("cuda:")
    assert platform(32) == platform(128) == plain
    found = [platform(32, (10, 0)), platform(32, None)]
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    found.append(platform(32))
    assert len({plain, *found}) == 4


def test_rocm_platform_name_depends_on_gpu_and_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which backend packs keys, and how, depends on these; layouts and sizes are the same."""

    def platform(gpu: str = "MI300X") -> str | None:
        rocm = SimpleNamespace(
            is_cpu=lambda: False, is_rocm=lambda: True, get_device_name=lambda: gpu, device_name="rocm"
        )
        monkeypatch.setattr(translate, "current_platform", rocm)
        return built_by(some_vllm_config()).config.platform

    plain = platform()
    assert str(plain).startswith("rocm:")
    assert platform() == plain
    others = [platform(gpu="MI355X")]
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    others.append(platform())
    assert len({plain, *others}) == 3


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"rope_theta": 1e4}')
    (made / "model.safetensors").write_bytes(bytes(1 << 20))
    return made


def of_folder(path: Path, **changes: Any) -> str | None:
    config = some_vllm_config(model=str(path), **{"revision": None, "hf_overrides": {}} | changes)
    return built_by(config).config.model.revision


def rewrite(path: Path, offset: int) -> None:
    """Other weights of the same name, size and time."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[offset : offset + (64 << 10)] = b"x" * (64 << 10)
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: rewrite(folder / "model.safetensors", 500_000),
        lambda folder: (folder / "more.safetensors").write_bytes(b"adapter"),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
        lambda folder: (folder / "config.json").write_text('{"rope_theta": 5e5}'),
        lambda folder: (folder / "modeling.py").write_text("theta = 1"),
        lambda folder: (folder / "processor_config.json").write_text('{"image_mean": 0.5}'),
        lambda folder: (folder / "preprocessor_config.json").write_text('{"image_mean": 0.5}'),
        lambda folder: (folder / "video_preprocessor_config.json").write_text('{"fps": 1}'),
    ],
    ids=["weights", "more weights", "names", "config", "code", "processor", "preprocessor", "video preprocessor"],
)
def test_changed_files_in_local_folder_change_the_model_revision(
    model_folder: Path, change: Callable[[Path], Any]
) -> None:
    before = of_folder(model_folder)
    assert before is not None
    change(model_folder)
    assert of_folder(model_folder) not in (before, None)


def test_changed_kv_scales_change_the_model_revision(model_folder: Path) -> None:
    """A few bytes, which no sample hits; what is stored in FP8 means something else with them."""
    layers = [f"model.layers.{layer}.self_attn" for layer in range(100)]
    weights_of = {f"{name}.qkv_proj.weight": torch.zeros(1 << 16, dtype=torch.bfloat16) for name in layers}

    def with_scale(value: float) -> str | None:
        scales = {f"{name}.{kind}_scale": torch.tensor(value) for name in layers for kind in "kv"}
        save_file(weights_of | scales, model_folder / "model.safetensors")
        return of_folder(model_folder)

    assert with_scale(0.5) != with_scale(0.25)
    assert with_scale(0.25) == with_scale(0.25)


@pytest.mark.parametrize(
    "header",
    [b"", b"\xff" * 9, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"k_scale', b"\x00" * 99],
)
def test_file_with_invalid_safetensors_header_still_gives_a_model_revision(model_folder: Path, header: bytes) -> None:
    (model_folder / "model.safetensors").write_bytes(header)
    assert of_folder(model_folder) is not None


def test_copies_of_a_folder_have_the_same_model_revision(model_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in model_folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
        os.utime(copy / file.name, (1, 1))
    (copy / "README.md").write_text("a tokenizer or a readme changes no KV")
    assert of_folder(copy) == of_folder(model_folder)


def test_config_changed_during_load_keeps_the_model_revision(model_folder: Path) -> None:
    loaded = SimpleNamespace(_commit_hash=None, to_dict=lambda: {"architectures": ["set by the model"]})
    assert of_folder(model_folder, hf_config=loaded) == of_folder(model_folder)


def test_model_revision_of_single_file_changes_with_its_content(model_folder: Path) -> None:
    file = model_folder / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(1 << 20))
    before = of_folder(file)
    rewrite(file, 300_000)
    assert of_folder(file) not in (before, None)


@pytest.mark.parametrize("commit", [None, "c0ffee"])
def test_config_overrides_change_the_model_revision(model_folder: Path, commit: str | None) -> None:
    hub = SimpleNamespace(_commit_hash=commit)
    revisions = {
        of_folder(model_folder, hf_config=hub, hf_overrides=overrides)
        for overrides in ({}, {"rope_theta": 5e5}, {"rope_theta": 6e5}, {"rope": {"factor": 2.0}})
    }
    assert len(revisions) == 4
    assert of_folder(model_folder, hf_overrides={"a": 1, "b": 2}) == of_folder(
        model_folder, hf_overrides={"b": 2, "a": 1}
    )


def test_final_config_counts_without_files_or_with_override_function(model_folder: Path) -> None:
    def final(theta: float, version: str = "5.0") -> Any:
        fields = {"rope_theta": theta, "transformers_version": version, "_private": object()}
        return SimpleNamespace(_commit_hash=None, to_dict=lambda: fields)

    absent = Path("org/model")
    assert of_folder(absent, hf_config=final(1.0)) != of_folder(absent, hf_config=final(2.0))
    assert of_folder(absent, hf_config=final(1.0)) == of_folder(absent, hf_config=final(1.0, "5.1"))
    function = {"hf_overrides": lambda config: config}
    assert of_folder(model_folder, hf_config=final(1.0), **function) != of_folder(
        model_folder, hf_config=final(2.0), **function
    )


def revision(**changes: Any) -> str | None:
    """Of a model from a hub; ``load`` and ``speculative`` are vLLM's other configs."""
    names = ("load", "speculative")
    others = {f"{name}_config": SimpleNamespace(**changes.pop(name, {})) for name in names}
    hub = {"model": "org/model", "revision": None, "hf_config": SimpleNamespace(_commit_hash="c0ffee")}
    model = some_vllm_config(**hub | changes).model_config
    return weights.kv_revision(SimpleNamespace(model_config=model, **others))


def longrope(*, nested: bool = False, **model: Any) -> str | None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    parameters = {"full_attention": rope, "other": {"rope_type": "default"}} if nested else rope
    return revision(hf_text_config=SimpleNamespace(rope_parameters=parameters), **model)


@pytest.mark.parametrize("nested", [False, True])
def test_max_model_len_that_chooses_rope_factors_counts(nested: bool) -> None:
    short, long, longer = (longrope(nested=nested, max_model_len=length) for length in (4096, 4097, 131072))
    assert short != long
    assert long == longer
    fitted = longrope(
        nested=nested, max_model_len=4096, original_max_model_len=-1
    )  # it was longer when that was chosen
    assert fitted not in (short, long)


def test_max_model_len_does_not_count_for_default_rope() -> None:
    plain = SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 1e4}, model_type="llama")
    assert revision(hf_text_config=plain, max_model_len=512) == revision(max_model_len=131072) == "c0ffee"


def test_llama4_revision_depends_on_effective_attention_tuning() -> None:
    def tuned(length: int, file: dict[str, Any], override: dict[str, Any]) -> str | None:
        return revision(
            hf_text_config=SimpleNamespace(model_type="llama4_text"),
            max_model_len=length,
            try_get_generation_config=lambda: file,
            override_generation_config=override,
        )

    assert tuned(32_768, {}, {}) != tuned(32_769, {}, {})
    on = {"attn_temperature_tuning": True}
    off = {"attn_temperature_tuning": False}
    assert tuned(32_768, on, {}) == tuned(32_769, {}, {}) == tuned(1, off, on)
    assert tuned(32_769, off, {}) == tuned(32_768, {}, {})


@pytest.mark.parametrize(
    "settings",
    [
        {"multimodal_config": SimpleNamespace(mm_encoder_fp8_scale_path="/absent/scales.json")},
        {"speculative": {"draft_model_config": SimpleNamespace(model="org/draft", revision="v1")}},
        {"load": {"load_format": "dummy"}},
        {"load": {"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": "s3://a/b"}}},
        {"load": {"load_format": "plugins", "model_loader_extra_config": {"weights_path": "/a"}}},
        {"load": {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": "new-{rank}"}}},
    ],
    ids=str,
)
def test_weights_from_another_source_change_the_model_revision(
    settings: dict[str, Any],
) -> None:
    default = revision(
        multimodal_config=SimpleNamespace(mm_encoder_fp8_scale_path=None),
        speculative={"draft_model_config": SimpleNamespace(model="org/model", revision=None)},
        load={"load_format": "auto", "model_loader_extra_config": {}},
    )
    assert default == "c0ffee"
    assert revision(**settings) not in (default, None)


def test_scales_of_an_encoder_count_by_file_content_and_not_by_path(tmp_path: Path) -> None:
    def of(name: str, text: str) -> str | None:
        path = tmp_path / name / "scales.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return revision(multimodal_config=SimpleNamespace(mm_encoder_fp8_scale_path=str(path)))

    assert of("here", "[1.5]") == of("there", "[1.5]")
    assert of("here", "[2.5]") != of("there", "[1.5]")


def test_tensorizer_source_counts_and_its_reader_options_do_not() -> None:
    def tensorizer(**extra: Any) -> str | None:
        config = {"tensorizer_config": {"tensorizer_dir": "org/model", **extra}}
        return revision(load={"load_format": "tensorizer", "model_loader_extra_config": config})

    assert tensorizer(tensorizer_uri="s3://a/1") != tensorizer(tensorizer_uri="s3://a/2")
    assert tensorizer(num_readers=2, s3_secret_access_key="one") == tensorizer(s3_secret_access_key="two")
    reading = [{"load_format": name} for name in ("hf", "safetensors", "runai_streamer", "fastsafetensors")]
    assert {revision(load=load) for load in reading} == {"c0ffee"}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"bits": 4}'),
        ("VLLM_HUMMING_INPUT_QUANT_CONFIG", '{"bits": 8}'),
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
    ],
)
def test_variables_that_change_computed_kv_change_the_model_revision(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert revision() == "c0ffee"
    monkeypatch.setenv(variable, value)
    assert revision() not in ("c0ffee", None)


def test_equal_values_of_two_variables_give_different_revisions(monkeypatch: pytest.MonkeyPatch) -> None:
    revisions = set()
    for variable in ("VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_MARLIN_INPUT_DTYPE"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "int8")
            revisions.add(revision())
    assert len(revisions) == 2


@pytest.mark.parametrize(("pooling", "refused"), [("MEAN", True), ("CLS", True), ("LAST", False), (None, False)])
def test_model_with_pooling_over_whole_prompts_is_refused(pooling: str | None, refused: bool, tmp_path: Path) -> None:
    """vLLM's pooler would end the engine at the first prompt of which something was loaded."""
    pooler = {"runner": "pooling", "pooler_config": PoolerConfig(pooling_type=pooling)} if pooling else {}
    model = VllmModelConfig(model=str(make_model_dir(tmp_path)), max_model_len=64, **pooler)
    config = SimpleNamespace(model_config=model)
    if refused:
        with pytest.raises(ConfigError, match=rf"^pooler_config: this model's pooling \({pooling} and ALL\)"):
            weights.kv_revision(config)
    else:
        assert str(weights.kv_revision(config)).startswith("files:")


def test_engine_with_weight_transfer_is_refused() -> None:
    config = some_vllm_config(model="org/model")
    config.weight_transfer_config = None
    weights.kv_revision(config)
    config.weight_transfer_config = SimpleNamespace(backend="nccl")
    with pytest.raises(ConfigError, match="weight_transfer_config"):
        weights.kv_revision(config)


@pytest.mark.parametrize(
    ("prefix_caching", "cache_gb", "media", "refused"),
    [
        (False, 0, {}, True),
        (False, 0, {"language_model_only": True}, False),
        (False, 0, {"language_model_only": True, "enable_mm_embeds": True}, True),
        (True, 0, {}, False),
        (False, 4, {}, False),
    ],
)
def test_config_in_which_vllm_names_images_by_a_counter_is_refused(
    prefix_caching: bool, cache_gb: int, media: dict[str, bool], refused: bool
) -> None:
    config = some_vllm_config(
        multimodal_config=SimpleNamespace(
            **{"mm_processor_cache_gb": cache_gb, "language_model_only": False, "enable_mm_embeds": False} | media
        )
    )
    config.cache_config.enable_prefix_caching = prefix_caching
    if refused:
        with pytest.raises(ConfigError, match="mm_processor_cache_gb: .* by a counter"):
            built_by(config)
    else:
        assert built_by(config).config.model.revision == "main"


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_vllm_names_images_by_a_counter_only_without_prefix_caching(prefix_caching: bool) -> None:
    renderer = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0)),
        config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching)),
        _validate_mm_uuids=lambda *_: None,
    )
    items = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    names = BaseRenderer._process_mm_uuids(renderer, {}, items, {}, "renderer0-mm-1")
    assert names == ({} if prefix_caching else {"image": ["renderer0-mm-1-image-0"]})


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def loaded(cache: Path, commit: str, ref: str = "main", repository: str = "org/model") -> None:
    """What a hub's cache has after a download."""
    file = cache / f"models--{repository.replace('/', '--')}" / "refs" / ref
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(commit)


MISTRAL = SimpleNamespace(_commit_hash=None, to_dict=lambda: {"dim": 256})


@pytest.mark.parametrize("name", ["org/model", "org/model:Q4_K_M", "org/model/file.gguf"])
@pytest.mark.parametrize("ref", ["main", "refs/pr/1"])
def test_revision_comes_from_hub_cache_if_config_has_no_commit(hub_cache: Path, name: str, ref: str) -> None:
    asked = {"model": name, "hf_config": MISTRAL, "revision": None if ref == "main" else ref}
    found = []
    for commit in ("c0ffee", "dec0de"):
        loaded(hub_cache, commit, ref)
        found.append(revision(**asked))
    assert found == ["c0ffee", "dec0de"]
    loaded(hub_cache / "own", "beef", ref)
    assert revision(**asked, load={"download_dir": str(hub_cache / "own")}) == "beef"


def test_revision_of_weights_counts_if_config_is_of_another_repository(hub_cache: Path) -> None:
    elsewhere = {"hf_config_path": "org/base"}
    found = {revision(**elsewhere)}
    for commit in ("dec0de", "beef"):
        loaded(hub_cache, commit)
        found.add(revision(**elsewhere))
    found.add(revision(**elsewhere, revision="v1"))
    found.add(revision(**elsewhere, revision="a" * 40))
    found.add(revision(**elsewhere, hf_config=SimpleNamespace(_commit_hash="other")))
    assert len(found) == 6
    assert revision(**elsewhere, revision="a" * 40) == f"{'a' * 40}+config:c0ffee"


def test_unknown_commit_of_weights_is_logged(hub_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not hub_cache.exists()
    assert revision(hf_config=MISTRAL) is not None
    assert "which commit of org/model is loaded is not known" in caplog.text


def test_revision_of_model_in_bucket_does_not_depend_on_pulled_folder(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model_folder / "model.safetensors").unlink()  # configs alone are pulled

    def of(url: str, folder: Path, theta: float = 1.0) -> str | None:
        final = SimpleNamespace(_commit_hash=None, to_dict=lambda: {"theta": theta})
        return revision(model=str(folder), model_weights=url, hf_config=final)

    here = of("s3://bucket/one", model_folder)
    assert here == of("s3://bucket/one", tmp_path / "absent")
    assert len({here, of("s3://bucket/two", model_folder), of("s3://bucket/one", model_folder, 2.0)}) == 3
    assert "is not known" not in caplog.text


def test_namespace_folder_of_model_path_is_absolute_and_short_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(name: str) -> str:
        return folder(built_by(some_vllm_config(model=name), model=OffloadingModelConfig(name=name, dtype="float32")))

    monkeypatch.chdir(tmp_path)
    assert of("./models/llama") == of(f"{tmp_path}/models/llama")
    assert of("../llama") == of(f"{tmp_path.parent}/llama")
    assert of(f"/{'a' * 300}/llama") != of(f"/{'b' + 'a' * 299}/llama")
    assert "_llama_" in of(f"/{'a' * 300}/llama")


def test_namespace_of_model_in_bucket_does_not_depend_on_cache_folder() -> None:
    def of(cache: str, url: str) -> str:
        name = OffloadingModelConfig(name=f"{cache}/model_streamer/ab12cd34", dtype="float32")
        return folder(built_by(some_vllm_config(model=name.name, model_weights=url), model=name))

    assert of("/root/cache", "s3://bucket/one/") == of("/home/me", "s3://bucket/one/")
    assert of("/root/cache", "s3://bucket/one/").startswith("s3_bucket_one_")
    assert of("/root/cache", "s3://bucket/one") != of("/root/cache", "gs://bucket/one")
    assert of("/root/cache", "") != of("/home/me", "")
    assert of("/root/cache", f"s3://{'a' * 300}").startswith("s3_aaa")
    assert of("/root/cache", f"s3://{'a' * 300}") != of("/root/cache", f"s3://{'b' + 'a' * 299}")


def test_model_files_are_read_once_in_a_process_until_they_change(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    contents = model_files._contents

    def counting(file: Path, *arguments: Any) -> Any:
        read.append(file.name)
        return contents(file, *arguments)

    monkeypatch.setattr(model_files, "_contents", counting)
    assert of_folder(model_folder) == of_folder(model_folder)
    assert read == ["config.json", "model.safetensors"]
    rewrite(model_folder / "model.safetensors", 0)
    of_folder(model_folder)
    assert len(read) == 4
