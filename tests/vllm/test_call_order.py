"""The order in which vLLM's scheduler calls an offloading manager, in each release that is at hand.

kvtiers relies on this order. Where a release changes it, these tests name the call, and no signature would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtiers.connector.vllm.contract import SINCE
from kvtiers.connector.vllm.versions import TESTED, VERSION, release
from tests.e2e.make_env import overlay_folder

RUN_S_MAX = 600
INSTALLED = "{}.{}".format(*(release() or ("not", "known")))


class Call(NamedTuple):
    """A call, the request it is for, the keys that it names, and vLLM's or the manager's answer."""

    name: str
    request: str | None
    keys: frozenset[str]
    answer: str | frozenset[str] | None


class Recording:
    """The calls of one engine."""

    def __init__(self, version: str, calls: list[Call]) -> None:
        self.release = release(version) or (0, 0)
        self.calls = calls

    def of(self, *names: str) -> list[Call]:
        return [call for call in self.calls if call.name in names]

    def requests(self) -> set[str]:
        return {call.request for call in self.calls if call.request is not None and call.name != "begin"}

    def scene(self, name: str) -> list[Call]:
        begin = next(index for index, call in enumerate(self.calls) if call[:2] == ("begin", name))
        rest = self.calls[begin + 1 :]
        end = next((index for index, call in enumerate(rest) if call.name == "begin"), len(rest))
        return rest[:end]


def folder_of(version: str) -> Path | None:
    """Where a release is; None for the installed one."""
    return None if version == INSTALLED else overlay_folder(Path(sys.prefix), version)


@pytest.fixture(scope="module", params=TESTED)
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    version: str = request.param
    folder = folder_of(version)
    if version != INSTALLED and (folder is None or not folder.exists()):
        pytest.skip(f"vLLM {version} is not here: python -m tests.e2e.make_env ENV --overlay {version}")
    root = Path(__file__).parents[2]
    paths = [str(each) for each in (folder, root) if each is not None]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_TARGET_DEVICE": "cpu"}
    command = [sys.executable, "-m", "tests.vllm.recorded_engine", str(tmp_path_factory.mktemp("model"))]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=RUN_S_MAX, cwd=root, env=environ
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("CALLS ")]
    assert len(lines) == 1, done.stderr[-4000:]
    calls = json.loads(lines[0].removeprefix("CALLS "))
    return Recording(
        VERSION if version == INSTALLED else version,
        [
            Call(name, of, frozenset(keys), frozenset(answer) if isinstance(answer, list) else answer)
            for name, of, keys, answer in calls
        ],
    )


def test_every_kind_of_call_was_made(recording: Recording) -> None:
    expected = {"lookup", "prepare_load", "complete_load", "prepare_store", "complete_store", "on_new_request"}
    expected |= {"on_request_finished", "on_schedule_end", "take_events", "reset_cache"}
    of_connectors = {"get_transfer_results"}
    expected |= {name for name, since in SINCE.items() if recording.release >= since} - of_connectors
    assert {call.name for call in recording.calls} - {"begin", "step", "touch"} == expected


def test_each_request_begins_once_first_and_finishes_at_most_once(recording: Recording) -> None:
    for request in recording.requests():
        names = [call.name for call in recording.calls if call.request == request]
        assert names[0] == "on_new_request", request
        assert names.count("on_new_request") == 1, request
        assert names.count("on_request_finished") <= 1, request
    finished = {call.request for call in recording.of("on_request_finished")}
    unfinished = {request.partition("-")[0] for request in recording.requests() - finished}
    assert unfinished <= {"last"}  # no step came after it


def test_finished_request_is_not_looked_up_and_gets_no_new_transfer(recording: Recording) -> None:
    finished: set[str | None] = set()
    for call in recording.calls:
        if call.name == "on_request_finished":
            finished.add(call.request)
        elif call.name in ("lookup", "prepare_load", "prepare_store", "get_load_source"):
            assert call.request not in finished, call


def test_load_names_only_keys_that_were_hits_in_its_step(recording: Recording) -> None:
    hits: set[tuple[str | None, str]] = set()
    for call in recording.calls:
        if call.name == "step":
            hits.clear()
        elif call.name == "lookup" and call.answer == "HIT":
            hits |= {(call.request, key) for key in call.keys}
        elif call.name == "prepare_load":
            assert call.keys
            assert {(call.request, key) for key in call.keys} <= hits, call


def test_source_is_asked_only_for_keys_of_the_latest_load_in_its_step(recording: Recording) -> None:
    latest: Call | None = None
    for call in recording.calls:
        if call.name == "step":
            latest = None
        elif call.name == "prepare_load":
            latest = call
        elif call.name == "get_load_source":
            assert latest is not None, call
            assert call.request == latest.request
            assert call.keys <= latest.keys


def test_each_transfer_is_completed_once_unless_the_cache_was_reset(recording: Recording) -> None:
    for prepare, complete in (("prepare_load", "complete_load"), ("prepare_store", "complete_store")):
        running: Counter[tuple[str | None, str]] = Counter()
        for call in recording.calls:
            keys = call.answer if call.name == "prepare_store" else call.keys
            pairs = [(call.request, key) for key in keys or ()]
            if call.name == prepare:
                running.update(pairs)
            elif call.name == complete:
                running.subtract(pairs)
                assert min(running.values()) >= 0, call  # neither unknown, nor twice, nor after a reset
            elif call.name == "reset_cache":
                running.clear()
        last = {pair for pair, count in running.items() if count}
        assert {str(request).partition("-")[0] for request, _ in last} <= {"last"}


def test_step_ends_once_after_its_lookups_and_loads_and_since_033_after_its_stores(
    recording: Recording,
) -> None:
    steps: list[list[str]] = []
    for call in recording.calls:
        if call.name == "step":
            steps.append([])
        elif steps:
            steps[-1].append(call.name)
    assert {names.count("on_schedule_end") for names in steps} == {1}
    after = {name for names in steps for name in names[names.index("on_schedule_end") :]}
    assert not after & {"lookup", "prepare_load", "get_load_source"}
    assert ("prepare_store" in after) == (recording.release < (0, 33))


def test_preempted_request_is_looked_up_again(recording: Recording) -> None:
    mine = [call for call in recording.scene("preemption") if str(call.request).startswith("preempted")]
    names = [call.name for call in mine]
    assert names.count("on_new_request") == 1
    assert "lookup" in names[names.index("prepare_store") :]


def test_load_of_aborted_request_is_completed_after_the_request_finished(recording: Recording) -> None:
    calls = recording.scene("abort while it loads")
    names = [call.name for call in calls if str(call.request).startswith("unloaded")]
    assert names.index("on_request_finished") < names.index("complete_load")


def test_store_of_aborted_request_is_completed(recording: Recording) -> None:
    names = [call.name for call in recording.scene("abort while it stores") if str(call.request).startswith("aborted")]
    assert names.count("prepare_store") == names.count("complete_store") == 1


def test_transfer_running_during_a_reset_is_never_completed(recording: Recording) -> None:
    calls = recording.scene("reset while it stores")
    mine = [call.name for call in calls if str(call.request).startswith("reset-") or call.request == "reset"]
    assert "prepare_store" in mine
    assert "complete_store" not in mine
    names = [call.name for call in calls]
    assert names.count("reset_cache") == 1
    flushed = [index for index, name in enumerate(names) if name == "on_reset_flushed"]
    assert len(flushed) == (recording.release >= SINCE["on_reset_flushed"])
    assert all(index > names.index("reset_cache") for index in flushed)
