"""identity: every field of vLLM's config objects counts, unless the table says why it does not."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import vllm.config
import vllm.envs

from kvtiers.connector.identity.options import Counts, default, identity_digest
from kvtiers.connector.vllm import versions
from kvtiers.connector.vllm.identity import COUNTING_VARIABLES, TABLES, identity, log_identity
from kvtiers.connector.vllm.uncounted import IGNORED, IGNORED_VARIABLES
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.plain_logs import log_once
from tests.vllm.counting_options import config_classes, counting_options
from tests.vllm.engines import VllmConfig

CLASSES = config_classes()
FIELDS = [(cls, field) for cls in CLASSES for field in dataclasses.fields(cls)]


@dataclasses.dataclass
class Holder:
    """Stands for a VllmConfig that has one of these."""

    held: Any = None


def at_defaults(cls: type) -> Any:
    """One without what its constructor derives."""
    made: Any = object.__new__(cls)
    for field in dataclasses.fields(cls):
        try:
            object.__setattr__(made, field.name, default(field))
        except Exception:  # a default that needs the others
            object.__setattr__(made, field.name, None)
    return made


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_changed_field_changes_the_namespace_unless_ignored_by_the_table(cls: type) -> None:
    before = identity(Holder(at_defaults(cls)), {})
    for field in dataclasses.fields(cls):
        changed = at_defaults(cls)
        object.__setattr__(changed, field.name, "another value")
        differs = identity(Holder(changed), {}) != before
        assert differs == (TABLES.counts(cls, field.name) is not Counts.NO), f"{cls.__name__}.{field.name}"


@pytest.mark.parametrize(
    ("name", "fields"),
    {
        "AttentionConfig": "backend backend_per_kind flash_attn_version indexer_kv_dtype use_non_causal "
        "use_trtllm_attention",
        "CacheConfig": "cache_dtype kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype "
        "replayssm_buffer_len use_replayssm",
        "LoRAConfig": "target_modules",
        "MambaConfig": "backend",
        "ModelConfig": "dtype model_class_overrides quantization_config",
        "MultiModalConfig": "mm_encoder_attn_dtype mm_processor_kwargs video_pruning_method video_pruning_rate",
        "ParallelConfig": "cp_kv_cache_interleave_size",
        "SpeculativeConfig": "attention_backend kv_cache_dtype method num_speculative_tokens",
    }.items(),
    ids=str,
)
def test_options_known_to_change_kv_count(name: str, fields: str) -> None:
    """With another one of these a block may have as many bytes and another meaning."""
    cls = next(each for each in CLASSES if each.__name__ == name)
    assert not [field for field in fields.split() if TABLES.counts(cls, field) is not Counts.YES]


@pytest.mark.parametrize(
    "name",
    [
        *("BATCH_INVARIANT", "HUMMING_INPUT_QUANT_CONFIG", "HUMMING_ONLINE_QUANT_CONFIG", "MARLIN_INPUT_DTYPE"),
        *("MLA_DISABLE", "MOE_ROUTING_SIMULATION_STRATEGY", "PP_LAYER_PARTITION", "ROCM_SHUFFLE_KV_CACHE_LAYOUT"),
        "SSM_CONV_STATE_LAYOUT",
    ],
)
def test_variables_known_to_change_kv_count(name: str) -> None:
    assert identity(VllmConfig(), {f"VLLM_{name}": "1"}) == {f"VLLM_{name}": "1"}


def test_state_layout_set_by_vllm_on_some_cpus_does_not_count() -> None:
    assert identity(VllmConfig(), {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}) == {}


def test_state_layout_does_not_count_in_models_without_states() -> None:
    config = VllmConfig(model_config=SimpleNamespace(has_inner_state=False))
    without = identity(config, {})
    assert identity(config, {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}) == without


def test_lines_of_the_table_are_unique_and_few_are_unknown_to_this_release() -> None:
    """Classes and fields of other releases than the installed one are few: most lines are of this one."""
    known = {cls.__name__: {field.name for field in dataclasses.fields(cls)} for cls in CLASSES}
    lines = [(cls, name) for cls, by_why in IGNORED.items() for names in by_why.values() for name in names.split()]
    elsewhere = [(cls, name) for cls, name in lines if cls not in known or (name != "*" and name not in known[cls])]
    assert len(elsewhere) <= ELSEWHERE_MAX, elsewhere
    assert len(lines) == len(set(lines))
    variables = [name for names in IGNORED_VARIABLES.values() for name in names.split()]
    assert len(variables) == len(set(variables))


ELSEWHERE_MAX = 30


@pytest.mark.skipif("{}.{}".format(*(versions.release() or (0, 0))) not in versions.TESTED, reason="not tested")
def test_every_option_of_a_tested_release_is_in_a_table() -> None:
    """If this fails: ``make contract``, and look at what is new."""
    fields, variables = counting_options()
    unknown = {
        f"{cls.__name__}.{field.name}" for cls, field in FIELDS if TABLES.counts(cls, field.name) is Counts.UNKNOWN
    }
    assert not unknown
    assert all(names <= set(TABLES.counting[cls]) for cls, names in fields.items() if names)
    assert variables <= COUNTING_VARIABLES
    both = {
        f"{cls}.{name}"
        for cls, names in TABLES.counting.items()
        for name in TABLES.ignored.get(cls, ())
        if name in names
    }
    assert not both


def logged(config: Any, environ: dict[str, str], caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and text of what a start logs about its identity."""
    caplog.clear()
    caplog.set_level("INFO")
    log_once.cache_clear()
    log_identity(config, identity(config, environ))
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def later_release(**changes: Any) -> Any:
    """A VllmConfig of a later release, whose scheduler has new options."""
    fields = [("max_num_seqs", int, 1), ("new", bool, False), ("token", str, ""), ("nested", Any, None)]
    return Holder(dataclasses.make_dataclass("SchedulerConfig", fields)(**changes))


def test_unknown_field_counts_and_is_logged_as_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = later_release(max_num_seqs=8, new=True)
    assert identity(config, {}) == {"held.new": True}
    [(level, text)] = logged(config, {}, caplog)
    assert level == "WARNING"
    assert "part of the namespace, because this kvtiers does not know whether it changes KV: held.new=True. If" in text
    assert "max_num_seqs" not in text


def test_unknown_field_at_its_default_neither_counts_nor_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert identity(later_release(max_num_seqs=8), {}) == {}
    assert logged(later_release(max_num_seqs=8), {}, caplog) == []


def test_field_of_unknown_object_counts_and_is_logged_as_warning(caplog: pytest.LogCaptureFixture) -> None:
    nested = dataclasses.make_dataclass("NewConfig", [("depth", int, 1)])
    [(level, text)] = logged(later_release(nested=nested(depth=2)), {}, caplog)
    assert level == "WARNING"
    assert ": held.nested.depth=2. If" in text


def test_value_of_unknown_field_that_may_be_secret_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    [(level, text)] = logged(later_release(token="hunter2"), {}, caplog)
    assert level == "WARNING"
    assert "held.token=(" in text
    assert "hunter2" not in text


def test_unknown_variable_counts_and_is_logged_as_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vllm.envs.environment_variables, "VLLM_NEVER_HEARD_OF", lambda: None)
    environ = {"VLLM_NEVER_HEARD_OF": "hunter2", "VLLM_MLA_DISABLE": "1"}
    (unknown, known) = logged(VllmConfig(), environ, caplog)
    assert unknown[0] == "WARNING"
    assert "VLLM_NEVER_HEARD_OF=(" in unknown[1]
    assert "MLA_DISABLE" not in unknown[1] + known[1].replace("VLLM_MLA_DISABLE=1", "")
    assert known == ("INFO", "part of the namespace, because not at its default: VLLM_MLA_DISABLE=1")
    assert "hunter2" not in unknown[1] + known[1]


def test_field_that_counts_is_logged_as_info(caplog: pytest.LogCaptureFixture) -> None:
    config = Holder(vllm.config.KernelConfig(moe_backend="triton"))
    assert logged(config, {}, caplog) == [
        ("INFO", "part of the namespace, because not at its default: held.moe_backend=triton")
    ]


def test_untested_release_has_own_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity(VllmConfig(), {}) == {}
    monkeypatch.setattr(versions, "release", lambda: (0, 99))
    monkeypatch.setattr(versions, "VERSION", "0.99.0")
    assert identity(VllmConfig(), {}) == {"vllm": "0.99.0"}


def test_option_in_identity_ignore_does_not_count() -> None:
    config = Holder(vllm.config.KernelConfig(moe_backend="triton"))
    environ = {"VLLM_MLA_DISABLE": "1"}
    told = {"VLLM_MLA_DISABLE": "1", "held.moe_backend": "triton"}
    assert identity(config, environ) == told
    assert identity(config, environ, ignore=["held.moe_backend"]) == {"VLLM_MLA_DISABLE": "1"}
    assert identity(config, environ, ignore=["VLLM_MLA_DISABLE"]) == {"held.moe_backend": "triton"}
    assert identity(config, environ, ignore=["held.linear_backend", "VLLM_NOT_SET", "vllm"]) == told


def test_ignored_option_of_absent_config_object_is_accepted() -> None:
    assert identity(Holder(None), {}, ignore=["held.moe_backend"]) == {}


@pytest.mark.parametrize("name", ["held.moe_backnd", "hold.moe_backend", "moe_backend", "held.moe_backend.more"])
def test_misspelled_ignored_option_is_refused(name: str) -> None:
    config = Holder(vllm.config.KernelConfig())
    with pytest.raises(ConfigError, match=rf"^identity\.ignore: {re.escape(name)} is not an option of vLLM"):
        identity(config, {}, ignore=[name])


def test_config_that_is_not_a_dataclass_is_refused() -> None:
    with pytest.raises(ConfigError, match="vllm_config: .*not a dataclass"):
        identity(object(), {})


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        ({"b": 1, "a": {2, 1}}, {"a": {1, 2}, "b": 1}, True),
        ((1, 2), [1, 2], True),
        ([1, 2], [2, 1], False),
        ({"a": 1}, {"a": "1"}, False),
        (os.path.join, os.path.split, False),
    ],
)
def test_digest_ignores_order_in_dicts_and_sets_but_not_in_lists(one: Any, other: Any, are_alike: bool) -> None:
    digests = {identity_digest(identity(Holder(value), {})) for value in (one, other)}
    assert (len(digests) == 1) == are_alike


def test_opaque_object_counts_by_its_type_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_once.cache_clear()
    first, second = (identity(Holder({"plugin": object()}), {}) for _ in range(2))
    assert first == second
    assert "held is a builtins.object: only its type is part of the namespace, not its value" in caplog.text


def test_identity_is_equal_in_two_processes() -> None:
    script = """
import json, vllm.config
from kvtiers.connector.vllm.identity import identity
print("ID", json.dumps(identity(vllm.config.VllmConfig(), {}), default=str))
"""
    printed = []
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        printed.append([json.loads(line[3:]) for line in run.stdout.splitlines() if line.startswith("ID ")])
    assert len(printed[0]) == 1, run.stderr
    assert printed[0] == printed[1]
