"""What an operator of vLLM reads of kvtiers: in a process of its own, as logging belongs to a process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

#: vLLM configures its logger when it is imported (before 0.32) or when an engine starts.
CONFIGURE = """
import logging, os, sys
from vllm import logger
if hasattr(logger, "configure_logging"):
    from vllm.config.logging import LoggingConfig
    logger.configure_logging(LoggingConfig())
"""
#: What doors do first, then what a tier's circuit says. (Importing a whole door takes seconds.)
CIRCUIT = """
from kvtiers.connector.vllm.logs import log_as_vllm
from kvtiers.tiers.tier.circuit import Circuit
for _ in range(2):
    log_as_vllm()
circuit = Circuit("fs", failures_max=1, probe_every_s=0)
circuit.fail("store", "no answer")
circuit.take_probe()
circuit.succeed("store")
"""
TIER = """
from tests.vllm import engines
from types import SimpleNamespace
from kvtiers.connector.vllm import connector, ranks, shared_storage, spec, tier
from kvtiers.connector.vllm.handed import handing_over
from kvtiers.connector.vllm.logs import log_as_vllm

ours = logging.getLogger("kvtiers")
print("tier fs", ours.handlers, ours.level, ours.propagate)

def make():
    spec = SimpleNamespace(config=engines.offloading_config(), blocks_per_chunk=1)
    view = memoryview(bytearray(4096)).cast("B", (1, 4096))
    options = {"type": "fs", "root_dir": sys.argv[1], "min_free": 0, "isolation": "thread"}
    tier.KVTiersTier(spec, view, "x", tier=options).shutdown()

for _ in range(2):
    log_as_vllm()
    with handing_over(engines.VllmConfig(), engines.kv_cache_config(engines.FULL)):
        make()
"""
STARTED = "tier fs: started: "
OPENED = "tier fs: circuit open: 1 failures in a row, the last: no answer"
BACK = "tier fs: circuit closed: the storage answers again"


def lines_of(root: Path, script: str, **environ: str) -> list[str]:
    """What a process prints of kvtiers, on both outputs."""
    run = subprocess.run(
        [sys.executable, "-c", CONFIGURE + script, str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "VLLM_LOGGING_COLOR": "0", **environ},
        text=True,
        check=True,
    )
    return [line for line in run.stdout.splitlines() if "tier fs" in line]


def is_vllms(line: str) -> bool:
    """Whether it has what vLLM's own lines have: process, level, time and place."""
    return re.search(r"pid=\d+\) (INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[.*\.py:\d+\] tier fs", line) is not None


def test_start_of_a_tier_is_logged_once_by_vllm_and_import_configures_no_logging(tmp_path: Path) -> None:
    untouched, started, again = lines_of(tmp_path, "logging.basicConfig(level='INFO')\n" + TIER)
    assert untouched == "tier fs [] 0 True"
    for line in (started, again):
        assert is_vllms(line)
        assert f"{STARTED}{tmp_path}, namespace org_model_" in line


def test_state_changes_of_a_tier_are_logged_once_each_by_vllm(tmp_path: Path) -> None:
    opened, back = lines_of(tmp_path, "logging.basicConfig(level='INFO')\n" + CIRCUIT)
    assert is_vllms(opened)
    assert is_vllms(back)
    assert OPENED in opened
    assert BACK in back


def test_log_level_of_vllm_applies_to_kvtiers(tmp_path: Path) -> None:
    (only,) = lines_of(tmp_path, CIRCUIT, VLLM_LOGGING_LEVEL="WARNING")
    assert OPENED in only


def test_kvtiers_configures_no_logging_if_vllm_configures_none(tmp_path: Path) -> None:
    root = "logging.basicConfig(level='INFO', format='mine: %(message)s', stream=sys.stdout)\n"
    lines = lines_of(tmp_path, root + CIRCUIT, VLLM_CONFIGURE_LOGGING="0")
    assert lines == [f"mine: {OPENED}", f"mine: {BACK}"]


@pytest.mark.parametrize("names_ours", [False, True])
def test_logging_config_file_of_the_operator_is_obeyed(names_ours: bool, tmp_path: Path) -> None:
    handler = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}
    loggers: dict[str, Any] = {"vllm": {"handlers": ["theirs"], "level": "INFO", "propagate": False}}
    if names_ours:
        loggers["kvtiers"] = {"handlers": ["ours"], "level": "WARNING"}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {name: {"format": f"{name}: %(message)s"} for name in ("theirs", "ours")},
        "handlers": {name: {**handler, "formatter": name} for name in ("theirs", "ours")},
        "loggers": loggers,
    }
    file = tmp_path / "logging.json"
    file.write_text(json.dumps(config))
    lines = lines_of(tmp_path, CIRCUIT, VLLM_LOGGING_CONFIG_PATH=str(file))
    assert lines == ([f"ours: {OPENED}"] if names_ours else [f"theirs: {OPENED}", f"theirs: {BACK}"])
