"""Engines whose KV is equal share a namespace, and engines whose KV differs do not. With vLLM's own config objects."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
import vllm.envs
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from kvtiers.connector.identity.model_files import value_digest
from kvtiers.connector.identity.options import identity_digest, readable
from kvtiers.connector.vllm import translate, versions
from kvtiers.connector.vllm.identity import identity, log_identity
from kvtiers.connector.vllm.weights import kv_revision
from kvtiers.tiers.plain_logs import log_once
from tests.tiny_model import make_model_dir
from tests.vllm.engines import VllmConfig, offloading_config
from tests.vllm.test_identity import CLASSES, Holder

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Makes the config of an engine that is started with these options, as ``vllm serve MODEL`` does."""
    folder = str(make_model_dir(tmp_path_factory.mktemp("models") / "model"))

    def config(**options: Any) -> Any:
        at_end = options.pop("model_end", "")
        return EngineArgs(**{"model": folder + at_end, **options}).create_engine_config()

    return config


@pytest.fixture(scope="module")
def plain(start: Start) -> Any:
    return start()


def namespace(config: Any, environ: Mapping[str, str] | None = None) -> tuple[Any, ...]:
    """Everything that decides a namespace, except the layout of the blocks."""
    name = translate._model_name(config, config.model_config.model)
    return name, config.model_config.dtype, kv_revision(config), identity(config, environ or {})


def image(commit: str, tag: str, build: int) -> dict[str, str]:
    """Variables that an official image of vLLM sets."""
    return {
        "VLLM_BUILD_COMMIT": commit,
        "VLLM_BUILD_PIPELINE": "release",
        "VLLM_BUILD_URL": f"https://buildkite.com/vllm/release/builds/{build}",
        "VLLM_IMAGE_TAG": tag,
        "VLLM_USAGE_SOURCE": "production-docker-image",
    }


def service_links(service: str, ip: str) -> dict[str, str]:
    """Variables that Kubernetes sets in a pod for a Service."""
    name = service.upper().replace("-", "_")
    return {
        f"{name}_SERVICE_HOST": ip,
        f"{name}_SERVICE_PORT": "8000",
        f"{name}_SERVICE_PORT_HTTP": "8000",
        f"{name}_PORT": f"tcp://{ip}:8000",
        f"{name}_PORT_8000_TCP": f"tcp://{ip}:8000",
        f"{name}_PORT_8000_TCP_ADDR": ip,
        f"{name}_PORT_8000_TCP_PORT": "8000",
        f"{name}_PORT_8000_TCP_PROTO": "tcp",
    }


ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "image": image("4ba787ec9", "v0.33.0", 2),
    "another build of the image": image("c0ffee", "v0.33.0-cu129", 3),
    "pod": {"HOSTNAME": "llm-0", "VLLM_HOST_IP": "10.0.0.7", **service_links("vllm", "10.96.0.17")},
    "another pod": {
        "HOSTNAME": "llm-1",
        "VLLM_HOST_IP": "10.0.0.8",
        "VLLM_PROCESS_NAME_PREFIX": "llm-1",
        **service_links("vllm-router", "10.96.3.3"),
        **service_links("vllm-p2p-side-channel", "10.96.3.4"),
    },
    "shell": {
        "VLLM_HOME": "/opt/vllm",
        "VLLM_MODEL": "org/model",
        "VLLM_GATEWAY_PASSWORD": "hunter2",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_DISABLE_LOG_LOGO": "1",
        "VLLM_GC_DEBUG": "1",
        "VLLM_API_KEY": "hunter2",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5",
        "VLLM_EC_SIDE_CHANNEL_HOST": "a",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": "6",
        "VLLM_ENGINE_READY_TIMEOUT_S": "9",
        "VLLM_P2P_HANDSHAKE_TIMEOUT_S": "9",
        "VLLM_CACHE_ROOT": "/var/cache",
        "VLLM_PLUGINS": "kvtiers",
    },
}


@pytest.mark.parametrize("environ", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_namespace_does_not_depend_on_the_place_of_start(plain: Any, environ: Mapping[str, str]) -> None:
    assert namespace(plain, environ) == namespace(plain)


EXAMPLES = 15  # each makes two of vLLM's configs
NGRAM = {"method": "ngram", "prompt_lookup_max": 4}
DAILY: Mapping[str, Mapping[str, Any]] = {
    "again": {},
    "served names": {"served_model_name": ["a", "b"]},
    "slash after the path": {"model_end": "/"},
    "max_num_seqs": {"max_num_seqs": 3},
    "max_num_batched_tokens": {"max_num_batched_tokens": 512},
    "max_model_len": {"max_model_len": 256},
    "gpu_memory_utilization": {"gpu_memory_utilization": 0.3},
    "prefix caching": {"enable_prefix_caching": False},
    "chunked prefill": {"enable_chunked_prefill": False},
    "scheduling policy": {"scheduling_policy": "priority"},
    "async scheduling": {"async_scheduling": False},
    "log options": {"disable_log_stats": True, "otlp_traces_endpoint": "http://collector"},
    "tokenizer mode": {"tokenizer_mode": "slow"},
    "reasoning parser": {"reasoning_parser": "qwen3"},
    "eager": {"enforce_eager": True},
    "O0": {"optimization_level": 0},
    "O1": {"optimization_level": 1},
    "O3": {"optimization_level": 3},
    "compilation mode": {"compilation_config": {"mode": 0}},
    "throughput": {"performance_mode": "throughput"},
    "seed": {"seed": 5},
    "hub token": {"hf_token": "hf_hunter2"},
    "remote code": {"trust_remote_code": True, "code_revision": "c0ffee"},
    "ngram": {"speculative_config": {**NGRAM, "num_speculative_tokens": 3}},
    "longer ngram": {"speculative_config": {**NGRAM, "num_speculative_tokens": 5}},
    "dtype of states that the model has not": {"mamba_ssm_cache_dtype": "float32"},
}


@pytest.mark.parametrize("options", DAILY.values(), ids=DAILY)
def test_option_without_effect_on_kv_keeps_namespace(plain: Any, start: Start, options: Mapping[str, Any]) -> None:
    assert namespace(start(**options)) == namespace(plain)


def test_engine_with_adapters_shares_namespace_unless_its_base_kv_changes(plain: Any, start: Start) -> None:
    config = start(enable_lora=True)
    assert namespace(config) == namespace(plain)
    config.lora_config.target_modules = ["q_proj"]
    assert namespace(config) != namespace(plain)
    config.lora_config.target_modules = None
    config.lora_config.lora_dtype = torch.float16
    assert namespace(config) != namespace(plain)


CHANGES: Mapping[str, Mapping[str, Any]] = {
    "dtype": {"dtype": "float16"},
    "cache dtype": {"kv_cache_dtype": "fp8"},
    "quantization": {"quantization": "fp8"},
    "revision": {"hf_overrides": {"rope_theta": 1.0}},
    "rope scaling": {"hf_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
    "random weights": {"load_format": "dummy"},
    "model implementation": {"model_impl": "transformers"},
    "another attention backend": {"attention_backend": "TRITON_ATTN"},
}


@pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES)
def test_option_that_changes_kv_starts_namespace(plain: Any, start: Start, options: Mapping[str, Any]) -> None:
    assert namespace(start(**options)) != namespace(plain)


def test_seed_counts_in_namespace_of_random_weights(start: Start) -> None:
    one, other = (namespace(start(load_format="dummy", seed=seed)) for seed in (1, 2))
    assert one != other


def test_number_of_speculative_tokens_of_draft_model_counts_in_namespace(start: Start) -> None:
    def config(number: int) -> Any:
        made = start(speculative_config={**NGRAM, "num_speculative_tokens": number})
        made.speculative_config.method = "eagle3"
        return made

    assert namespace(config(3)) != namespace(config(4))


def test_plugin_compiler_counts_in_namespace(plain: Any, start: Start) -> None:
    config = start()
    config.compilation_config.backend = "somewhere.my_compiler"
    assert namespace(config) != namespace(plain)


@pytest.mark.parametrize(
    ("auto_map", "is_transformers", "counts"),
    [
        (None, True, set()),
        ({"AutoConfig": "c.Config"}, False, {"code_revision"}),
        ({"AutoModelForCausalLM": "m.Model"}, True, {"code_revision", "trust_remote_code"}),
    ],
)
def test_remote_code_options_count_only_if_the_model_uses_remote_code(
    auto_map: Any, is_transformers: bool, counts: set[str]
) -> None:
    fields = {"trust_remote_code": True, "code_revision": "c0ffee", "hf_config": SimpleNamespace(auto_map=auto_map)}
    model = SimpleNamespace(**fields, using_transformers_backend=lambda: is_transformers)
    assert set(identity(VllmConfig(model_config=model), {})) == {f"model_config.{name}" for name in counts}


def test_config_objects_of_two_starts_are_equal() -> None:
    """Through their constructors, which fill in times, ids, names of hosts and ports."""
    made = 0
    for cls in CLASSES:
        fields = (
            {"ec_connector": "ECExampleConnector", "ec_role": "ec_consumer"} if "ECTransfer" in cls.__name__ else {}
        )
        try:
            first, second = cls(**fields), cls(**fields)
        except (TypeError, ValueError):  # a field is required
            continue
        assert identity(Holder(first), {}) == identity(Holder(second), {}), cls.__name__
        made += 1
    assert made > len(CLASSES) // 2


# ---- the property: two equal starts are one namespace, and one difference that changes KV is another ---------------


class Machine(NamedTuple):
    """What vLLM asks a host for."""

    has_bf16: bool = False
    has_amx: bool = False
    cores: int = 2
    memory_gib: int = 16
    nodes: int = 1
    host: str = "one"


MACHINES = (
    Machine(),
    Machine(has_bf16=True, cores=64, memory_gib=512, nodes=2, host="two"),
    Machine(has_bf16=True, has_amx=True, cores=192, memory_gib=2048, nodes=8, host="three"),
    Machine(has_amx=True, cores=1, memory_gib=8, host="four"),
)


def put_on(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """Let vLLM find this machine. What it writes into the environment is undone with ``patch``."""
    patch.setattr(os, "environ", os.environ)  # vLLM assigns to it; each name is put back below
    for name in ("VLLM_SSM_CONV_STATE_LAYOUT", "NUMEXPR_MAX_THREADS", "OMP_NUM_THREADS", "LD_PRELOAD"):
        patch.setenv(name, "")
        patch.delenv(name)
    patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: machine.has_bf16, raising=False)
    patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: machine.has_amx, raising=False)
    patch.setattr(os, "cpu_count", lambda: machine.cores)
    patch.setattr(os, "sched_getaffinity", lambda _: set(range(machine.cores)))
    patch.setattr(socket, "gethostname", lambda: machine.host)
    total = machine.memory_gib << 30
    memory = SimpleNamespace(total=total, available=total // 2, percent=50.0, used=total // 2, free=total // 2)
    patch.setattr(psutil, "virtual_memory", lambda: memory)
    platform = type(current_platform)
    patch.setattr(platform, "get_device_total_memory", classmethod(lambda cls, device_id=0: total))
    if hasattr(platform, "discover_numa_topology"):
        nodes = [
            [core for core in range(machine.cores) if core % machine.nodes == node] for node in range(machine.nodes)
        ]
        patch.setattr(platform, "discover_numa_topology", classmethod(lambda cls: nodes))


#: Options of DAILY that go together with those of CHANGES.
SURROUNDINGS = sorted(DAILY.keys() - {"compilation mode", "longer ngram"})


@given(
    first=st.sampled_from(MACHINES),
    second=st.sampled_from(MACHINES),
    daily=st.sets(st.sampled_from(SURROUNDINGS), max_size=4),
    environ=st.sampled_from(sorted(ENVIRONMENTS)),
    change=st.sampled_from(["", *CHANGES]),
)
@settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
def test_equal_starts_share_namespace_and_one_change_of_kv_starts_another(
    start: Start, plain: Any, first: Machine, second: Machine, daily: set[str], environ: str, change: str
) -> None:
    def started(machine: Machine, options: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Any, ...]:
        with pytest.MonkeyPatch.context() as patch:
            put_on(machine, patch)
            before = dict(os.environ)
            config = start(**options)
            set_by_vllm = {name: value for name, value in os.environ.items() if before.get(name) != value}
            return namespace(config, {**environ, **set_by_vllm})

    changes = CHANGES.get(change, {})
    around = {name: value for each in sorted(daily) for name, value in DAILY[each].items()}
    one = started(first, changes, {})
    assert started(second, {**around, **changes}, ENVIRONMENTS[environ]) == one
    assert (one == namespace(plain)) == (not change)


#: Variables that vLLM sets by itself and that count, and why equal engines agree all the same.
SET_BY_VLLM = {
    "VLLM_MLA_DISABLE": "where a model's code has no MLA: always in engines with the same executor",
    "VLLM_MOE_SKIP_PADDING": "a pooling model, which is refused",
    "VLLM_ROCM_USE_SKINNY_GEMM": "with batch invariance: always in engines with the same executor",
    "VLLM_SSM_CONV_STATE_LAYOUT": "is as if unset",
    "VLLM_USE_TRITON_AWQ": "on ROCm for every quantized model, in every process",
    "VLLM_USE_DEEP_GEMM_E8M0": "by the model's config, in every process",
}
_WRITE = re.compile(
    r"""environ(?:\[|\.setdefault\(\s*)(?:"(VLLM_\w+)"|(\w+))\]?\s*[=,](?!=)|(\w+)(?:: \w+)? = "(VLLM_\w+)"$""",
    re.MULTILINE,
)


def test_variables_set_by_vllm_itself_are_known() -> None:
    """If this fails: equal engines may differ by what vLLM finds on a machine. See ``variables._AS_UNSET``."""
    written = set()
    for path in Path(vllm.__file__).parent.rglob("*.py"):
        if (
            "benchmarks" in path.parts
            or "VLLM_" not in (text := path.read_text(errors="replace"))
            or "environ" not in text
        ):
            continue
        found = _WRITE.findall(text)
        constants = {constant: name for _, _, constant, name in found if constant}
        written |= {direct or constants.get(by_name, "") for direct, by_name, constant, _ in found if not constant}
    assert {"VLLM_WORKER_MULTIPROC_METHOD", "VLLM_DIST_IDENT"} <= written  # the pattern finds something
    counting = {name for name in written if identity(VllmConfig(), {name: "1"})}
    assert counting <= SET_BY_VLLM.keys()


PLAIN_ON_CPU = "engine:f5f28e7393fd2730ff56c394"
PLAIN_ON_CPU_SHOWN = "415e89cae35212f2745681ee"


def test_namespace_of_engine_at_defaults_matches_the_recorded_value(plain: Any) -> None:
    """If either value changes, every engine on CPUs starts with a cold cache."""
    if not current_platform.is_cpu() or versions.release() not in ((0, 32), (0, 33)):
        pytest.skip("the values were recorded on CPUs, with 0.32 and 0.33")
    found = identity(plain, {})
    assert identity_digest(found) == PLAIN_ON_CPU
    assert value_digest(readable(found)) == PLAIN_ON_CPU_SHOWN


# ---- variables ---------------------------------------------------------------------------------------------------


def test_new_variable_of_later_release_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"VLLM_NEVER_HEARD_OF": "1", "VLLM_NOT_ITS_OWN": "1"}
    assert identity(VllmConfig(), environ) == {}
    monkeypatch.setitem(vllm.envs.environment_variables, "VLLM_NEVER_HEARD_OF", lambda: None)
    assert identity(VllmConfig(), environ) == {"VLLM_NEVER_HEARD_OF": "1"}


def test_all_vllm_variables_count_if_the_list_of_vllm_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"VLLM_MLA_DISABLE": "0", "VLLM_WHATEVER": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    environ |= service_links("vllm-router", "10.96.3.3")
    monkeypatch.setattr(vllm.envs, "environment_variables", None)
    assert set(identity(VllmConfig(), environ)) == {"VLLM_MLA_DISABLE", "VLLM_WHATEVER"}


def test_address_build_and_timeout_variables_of_vllm_do_not_count() -> None:
    ends = ("_HOST", "_PORT", "_IP", "_IPS", "_TIMEOUT", "_TIMEOUT_S", "_TIMEOUT_SECONDS", "_PREFIX")
    noise = [
        name
        for name in vllm.envs.environment_variables
        if name.startswith("VLLM_") and (name.endswith(ends) or name.startswith(("VLLM_BUILD_", "VLLM_LOG")))
    ]
    assert len(noise) > 20
    assert identity(VllmConfig(), dict.fromkeys(noise, "7")) == {}


@pytest.mark.parametrize(
    ("allowed", "left_out"),
    [
        (None, set()),
        ("theirs,kvtiers", set()),
        ("kvtiers,theirs", set()),
        ("kvtiers", {"VLLM_PLUGINS"}),
        ("", {"VLLM_PLUGINS"}),
    ],
)
def test_plugin_list_that_leaves_out_a_plugin_counts(
    monkeypatch: pytest.MonkeyPatch, allowed: str | None, left_out: set[str]
) -> None:
    entries = [
        importlib.metadata.EntryPoint("kvtiers", "kvtiers.vllm:register", "vllm.general_plugins"),
        importlib.metadata.EntryPoint("lora_hf", "vllm.plugins.lora_resolvers:register", "vllm.general_plugins"),
        importlib.metadata.EntryPoint("theirs", "theirs:register", "vllm.general_plugins"),
        importlib.metadata.EntryPoint("other", "other:main", "console_scripts"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: importlib.metadata.EntryPoints(entries))
    environ = {} if allowed is None else {"VLLM_PLUGINS": allowed}
    assert set(identity(VllmConfig(), environ)) == left_out


# ---- what is shown -----------------------------------------------------------------------------------------------


def test_only_values_known_to_vllm_are_shown(plain: Any, start: Start) -> None:
    environ = {
        "VLLM_MLA_DISABLE": "1",
        "VLLM_MARLIN_INPUT_DTYPE": "int8",
        "VLLM_PP_LAYER_PARTITION": "7,9",
        "VLLM_MODEL_REDIRECT_PATH": "hunter2",
    }
    config = start(kv_cache_dtype="fp8", attention_backend="TRITON_ATTN")
    config.additional_config = {"api_key": "hunter2"}
    config.model_config.model_class_overrides = "hunter2"
    shown = readable(identity(config, environ))
    expected = {
        "VLLM_MLA_DISABLE": "1",
        "cache_config.cache_dtype": "fp8",
        "attention_config.backend": "AttentionBackendEnum.TRITON_ATTN",
        "model_config.dtype": "torch.bfloat16",
    }
    assert expected.items() <= shown.items()
    hidden = {"VLLM_MARLIN_INPUT_DTYPE", "VLLM_PP_LAYER_PARTITION", "VLLM_MODEL_REDIRECT_PATH", "additional_config"}
    assert all(shown[name].startswith("(") for name in hidden | {"model_config.model_class_overrides"})
    assert "hunter2" not in str(shown)


def test_secret_in_foreign_variable_is_neither_logged_nor_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log_once.cache_clear()
    environ = {"VLLM_GATEWAY_PASSWORD": "hunter2", "VLLM_MLA_DISABLE": "1"}
    found = identity(VllmConfig(), environ)
    log_identity(VllmConfig(), found)
    assert readable(found) == {"VLLM_MLA_DISABLE": "1"}
    assert "part of the namespace, because not at its default: VLLM_MLA_DISABLE=1" in caplog.text
    assert "hunter2" not in caplog.text


def test_engine_at_defaults_logs_nothing(plain: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log_once.cache_clear()
    log_identity(plain, identity(plain, {}))
    assert not caplog.records


def test_workers_do_not_log_the_identity(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log_once.cache_clear()
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    translate.engine_spec(offloading_config(), VllmConfig(), in_worker=True)
    assert "part of the namespace" not in caplog.text
    translate.engine_spec(offloading_config(), VllmConfig())
    assert "part of the namespace, because not at its default: VLLM_MLA_DISABLE=1" in caplog.text


@dataclasses.dataclass
class _Held:
    held: Any = None


def test_object_in_config_is_shown_by_its_type() -> None:
    assert readable(identity(_Held({"at": print}), {}))["held"].startswith("(")
    assert readable(identity(_Held(print), {})) == {"held": "builtins.print"}
