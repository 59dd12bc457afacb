"""``kvtiers demo`` as a user runs it: two real processes, a small model and a folder between them."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvtiers.connector.demo.embedded_s3 import DEMO_ENDPOINT, start_embedded_s3
from kvtiers.connector.demo.model import find_model, load_model
from kvtiers.connector.demo.report import Answer, DemoReport, Hop, ProcessFigures
from kvtiers.connector.demo.run import DemoOptions, _Bars, _read_document, run_demo
from kvtiers.connector.demo.run_folder import run_folder
from kvtiers.tiers.errors import ConfigError, KVTiersError
from tests.tiny_model import make_model_dir
from tests.waiting import PATIENT

TEXT = "\n".join(f"Line {number} of a text that is about nothing but the number {number}." for number in range(24))


def quiet() -> Console:
    return Console(quiet=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights and a tokenizer of single bytes."""
    for name in ("torch", "transformers", "tokenizers"):
        pytest.importorskip(name)
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def options(model_dir: Path, tmp_path: Path) -> DemoOptions:
    (tmp_path / "text.txt").write_text(TEXT)
    return DemoOptions(
        model=str(model_dir),
        prompt_file=tmp_path / "text.txt",
        question="What is it about?",
        json_file=tmp_path / "figures.json",
        max_new_tokens=8,
        root_dir=tmp_path / "blocks",
    )


def patient(options: DemoOptions, tmp_path: Path, *names: str) -> DemoOptions:
    """With folders as tiers. What a busy machine misses the default deadlines for is not found, or not stored."""
    tiers = [{"type": "fs", "name": name, "root_dir": str(tmp_path / name), "min_free": 0, **PATIENT} for name in names]
    (tmp_path / "patient.json").write_text(json.dumps({"region": {"size": "4MiB"}, "tiers": tiers}))
    return replace(options, root_dir=None, config_file=tmp_path / "patient.json")


def test_second_process_answers_from_blocks_of_first_process(options: DemoOptions, tmp_path: Path) -> None:
    options = patient(options, tmp_path, "blocks")
    assert options.json_file is not None
    console = Console(record=True, width=120)
    assert run_demo(options, console) == 0
    figures = json.loads(options.json_file.read_text())
    prompt_tokens = len(f"{TEXT}\n\n{options.question}")
    block_bytes = 2 * 2 * 2 * 8 * 4 * options.block_size  # layers, K and V, heads, head size, bytes
    assert figures["prompt_tokens"] == prompt_tokens
    assert figures["tokens_equal"] is True
    assert figures["blocks_total"] == figures["blocks_hit"] == prompt_tokens // options.block_size
    assert figures["bytes_loaded"] == figures["blocks_hit"] * block_bytes
    assert figures["bytes_stored"] >= figures["bytes_loaded"]
    assert len(figures["answer_tokens"]) == options.max_new_tokens
    assert figures["speedup"] == pytest.approx(figures["cold_ttft_s"] / figures["warm_ttft_s"])
    assert figures["load_gb_s"] > 0
    assert figures["store_gb_s"] > 0
    assert figures["partial_tokens_equal"] is True
    assert 0 < figures["partial_blocks_hit"] < figures["partial_blocks_total"]
    assert figures["problem"] is None
    assert len(list((tmp_path / "blocks").rglob("*.bin"))) >= figures["blocks_total"]
    ways = {(hop["source"], hop["destination"]) for hop in figures["hops"]}
    assert ways >= {("KV tensors", "region"), ("region", "blocks"), ("blocks", "region"), ("region", "KV tensors")}
    assert "The same 8 tokens" in console.export_text()


@pytest.mark.full
def test_far_tier_fills_near_tier_on_another_replica(options: DemoOptions, tmp_path: Path) -> None:
    options = replace(patient(options, tmp_path, "near", "far"), another_replica=True)
    assert options.json_file is not None
    console = Console(record=True, width=120)
    assert run_demo(options, console) == 0
    table = console.export_text()
    assert "far → region" in table
    assert table.count("region → near") == 2  # stored cold, filled warm
    figures = json.loads(options.json_file.read_text())
    assert figures["tokens_equal"] is True
    assert figures["blocks_hit"] == figures["blocks_total"]
    moved = {(hop["source"], hop["destination"]): hop["bytes"] for hop in figures["hops"] if hop["process"] == "warm"}
    assert moved["far", "region"] >= figures["bytes_loaded"]
    assert moved["region", "near"] >= figures["bytes_loaded"]
    assert not moved.get(("near", "region"))


@pytest.mark.full
def test_demo_that_finds_no_blocks_fails(options: DemoOptions, tmp_path: Path) -> None:
    """Blocks in one process's memory are gone with it."""
    (tmp_path / "memory.yaml").write_text("region: {size: 4MiB}\ntiers: [{type: memory}]\n")
    options = replace(options, root_dir=None, config_file=tmp_path / "memory.yaml")
    assert options.json_file is not None
    assert run_demo(options, quiet()) == 1
    figures = json.loads(options.json_file.read_text())
    assert figures["blocks_hit"] == 0
    assert figures["tokens_equal"] is True
    assert "nothing was found" in figures["problem"]
    assert "a tier of type memory is gone with its process: name a tier on storage" in figures["problem"]


def test_demo_process_that_dies_is_reported(options: DemoOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "none")  # the interpreter itself refuses to start
    with pytest.raises(KVTiersError, match=r"the cold process ended with exit code 1:\n(?s:.*)PYTHONHASHSEED must be"):
        run_demo(options, quiet())


def test_silent_demo_process_is_killed(options: DemoOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtiers.connector.demo.run.SILENCE_S_MAX", 0.001)
    with pytest.raises(KVTiersError, match="the process reported nothing for 0.001 s and was killed"):
        run_demo(options, quiet())


def test_damaged_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (b"not weights", b"", whole[: len(whole) // 2]):
        weights.write_bytes(damaged)
        with pytest.raises(ConfigError, match="--model: '.*broken' cannot be loaded: .*header"):
            load_model(find_model(str(broken)))


def test_model_folder_with_odd_file_name_loads_and_template_refusal_is_reported(
    model_dir: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(model_dir, odd)
    (odd / os.fsdecode(b"caf\xe9.txt")).touch()
    (odd / "chat_template.jinja").write_text("{{ raise_exception('a system message is needed') }}")
    model = load_model(find_model(str(odd)))
    with pytest.raises(ConfigError, match="--model: the chat template of odd refuses .*: a system message is needed"):
        model.tokenize(TEXT, "What?")


def test_clients_of_demo_server_ignore_proxies_and_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto")
    users = {"HTTP_PROXY": "http://127.0.0.1:1", "http_proxy": "http://127.0.0.1:1", "AWS_PROFILE": "not-there"}
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "example.com")
    before = dict(os.environ)
    with contextlib.ExitStack() as cleanup:
        tier = {"type": "s3", "bucket": "blocks", "endpoint_url": DEMO_ENDPOINT}
        deployment = start_embedded_s3({"tiers": [tier]}, cleanup)  # asks the server for its bucket
        assert deployment["tiers"][0]["endpoint_url"].startswith("http://127.0.0.1:")
        assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.com,127.0.0.1"
        assert "AWS_PROFILE" not in os.environ
    assert dict(os.environ) == before


@pytest.mark.full
def test_root_that_is_a_file_is_refused(options: DemoOptions, tmp_path: Path) -> None:
    (tmp_path / "blocks").touch()
    with pytest.raises(ConfigError, match="blocks"):
        run_demo(options, quiet())


@pytest.mark.full
def test_a_short_prompt_is_refused(options: DemoOptions, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Too short.")
    with pytest.raises(ConfigError, match=r"--prompt: \d+ tokens are too few.* the demo needs 2 blocks of 16 tokens"):
        run_demo(options, quiet())


def test_bad_input_is_refused_before_anything_runs(options: DemoOptions, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "no-tiers.yaml").write_text("region: {size: 4MiB}\ntiers: []\n")
    os.mkfifo(tmp_path / "pipe")
    cases = [
        (replace(options, prompt_file=tmp_path / "pipe"), "--prompt: .*pipe is a pipe or a device; write a file"),
        (replace(options, prompt_file=Path("/dev/zero")), "--prompt: /dev/zero is a pipe or a device"),
        (replace(options, question="\udcff?"), r"--question: '\\udcff\?' is not UTF-8 text"),
        (
            replace(options, root_dir=None, config_file=tmp_path / "no-tiers.yaml", another_replica=True),
            "--another-replica: accepted with two tiers",
        ),
        (replace(options, prompt_file=tmp_path / "absent"), "--prompt: .*absent cannot be read: No such file"),
        (replace(options, prompt_file=tmp_path), "--prompt: .* cannot be read: Is a directory"),
        (replace(options, prompt_file=tmp_path / "binary"), "--prompt: .*binary is not UTF-8 text"),
        (replace(options, model="/nowhere/model.gguf"), "--model: '/nowhere/model.gguf' is not a model"),
        (replace(options, model=str(tmp_path)), "--model: .* is not a model; write a .gguf file, a folder"),
        (replace(options, json_file=tmp_path / "absent" / "figures.json"), "--json: .* its folder is missing"),
        (replace(options, json_file=tmp_path), "--json: .* is a folder"),
        (replace(options, config_file=tmp_path / "absent.yaml"), "--root: "),
        (replace(options, root_dir=None, config_file=tmp_path / "absent.yaml"), "absent.yaml: cannot be read"),
        (replace(options, another_replica=True), "--another-replica: accepted with two tiers"),
    ]
    for bad, message in cases:
        with pytest.raises(ConfigError, match=message):
            run_demo(bad, quiet())


def test_read_only_report_file_is_refused_before_the_runs(
    options: DemoOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options.json_file is not None
    options.json_file.touch()
    with monkeypatch.context() as patch:  # root may write everything
        patch.setattr(os, "access", lambda path, mode: path != options.json_file)
        with pytest.raises(ConfigError, match=r"--json: .*figures\.json is not writable"):
            run_demo(options, quiet())


@pytest.mark.full
def test_error_of_full_disk_for_report_names_the_json_option(options: DemoOptions) -> None:
    console = Console(record=True, width=120)
    with pytest.raises(ConfigError, match="--json: /dev/full cannot be written: No space left"):
        run_demo(replace(options, json_file=Path("/dev/full")), console)
    assert "The same 8 tokens" in console.export_text()


class FullDevice(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_failed_output_loses_no_figures_of_the_report_file(
    options: DemoOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_worker(task: dict[str, Any], bars: _Bars, name: str) -> ProcessFigures:
        bars.show(name, "answering", 1, 8)
        bars.show(name, "answering", 8, 8)
        bars.finish()
        finished.append(name)
        return figures(answer()) if task["is_warm"] else figures(answer(hit=0, ttft_s=2.0))

    finished: list[str] = []
    monkeypatch.setattr("kvtiers.connector.demo.run._run_worker", run_worker)
    monkeypatch.setattr("threading.excepthook", lambda _: None)  # the bars' own thread may meet the error as well
    with pytest.raises(OSError, match="No space left"):
        run_demo(options, Console(file=FullDevice(), force_terminal=True, width=120))
    assert finished == ["cold", "warm"]
    assert options.json_file is not None
    assert json.loads(options.json_file.read_text())["tokens_equal"] is True


def test_sigterm_kills_the_worker_and_leaves_no_folder(options: DemoOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []
    workers: list[subprocess.Popen[bytes]] = []
    make_folder = tempfile.mkdtemp

    def watch_folder(*args: Any, **kwargs: Any) -> str:
        folders.append(make_folder(*args, **kwargs))
        return folders[-1]

    def terminate(_: object) -> Iterator[dict[str, Any]]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield {}

    def wait(process: subprocess.Popen[bytes]) -> int:
        workers.append(process)
        return process.wait()

    monkeypatch.setattr(tempfile, "mkdtemp", watch_folder)
    monkeypatch.setattr("kvtiers.connector.demo.run._events", terminate)
    monkeypatch.setattr("kvtiers.connector.demo.run._wait", wait)
    # Where it is not handled it must not end the tests.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(SystemExit, match="143"):
            run_demo(replace(options, root_dir=None), quiet())
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [process.poll() for process in workers] == [-signal.SIGKILL]
    assert folders  # more than one, if another run of this machine takes the first for one that was left
    assert not any(map(os.path.exists, folders))


def test_folders_of_killed_runs_are_removed_by_the_next_run(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from kvtiers.connector.demo.run_folder import run_folder\n"
        "with run_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'block.bin').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    others, named_alike = tmp_path / "kvtiers-demo-others", tmp_path / "kvtiers-demo-run-my_notes"
    for folder in (others, named_alike):
        folder.mkdir()
        (folder / "thesis.txt").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / "kvtiers-demo-run-link"
    link.symlink_to(elsewhere)
    with run_folder(tmp_path) as running:
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -signal.SIGKILL
        (left,) = (
            folder for folder in tmp_path.glob("kvtiers-demo-run-*") if folder not in (running, link, named_alike)
        )
        assert (left / "block.bin").exists()
        with run_folder(tmp_path) as second:
            assert {running, second, link, others, named_alike, elsewhere} == set(tmp_path.iterdir())
    assert {link, others, named_alike, elsewhere} == set(tmp_path.iterdir())
    assert (named_alike / "thesis.txt").exists()


def test_default_document_is_the_license_and_long() -> None:
    text = _read_document(None)
    assert "Apache License" in text
    assert len(text) > 10_000


def test_missing_extra_is_named_in_error(options: DemoOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtiers.connector.demo.model.EXTRA_MODULES", ("json", "no_such_module"))
    with pytest.raises(ConfigError, match=r"the demo needs no_such_module; .* pip install '\.\[demo\]'"):
        run_demo(options, quiet())


def test_model_may_be_gguf_file_folder_or_hub_id(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    gguf, folder = find_model(str(tmp_path / "some.gguf")), find_model(str(tmp_path / "folder"))
    assert (gguf.name, gguf.path, gguf.gguf_file, gguf.is_local) == ("some", str(tmp_path), "some.gguf", True)
    assert (folder.name, folder.gguf_file, folder.is_local) == ("folder", None, True)
    hub = find_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert (hub.name, hub.is_local) == ("HuggingFaceTB/SmolLM2-135M-Instruct", False)


def answer(tokens: tuple[int, ...] = (1, 2), *, hit: int = 4, ttft_s: float = 0.1) -> Answer:
    return Answer(150, ttft_s, 4, hit, 32 * hit, 1000 * hit, 0.01, tokens, "text")


def figures(main: Answer, edited: Answer | None = None, edited_cold: Answer | None = None) -> ProcessFigures:
    hops = (Hop("load", "fs", "region", 4000, 0.001),)
    return ProcessFigures(1, "cpu", main, edited, edited_cold, hops, 1.0, 10, 20, 30, 40)


@pytest.mark.parametrize(
    ("warm", "problem"),
    [
        (figures(answer()), ""),
        (figures(answer(), answer((3,), hit=2), answer((3,), hit=0)), ""),
        (figures(answer((1, 3))), "tokens differ"),
        (figures(answer(hit=0)), "nothing was found"),
        (figures(replace(answer(), tokens_loaded=0)), "blocks were found but not loaded: "),
        (
            figures(answer(), replace(answer((3,), hit=2), tokens_loaded=0), answer((3,), hit=0)),
            "blocks of the edited prompt were found but not loaded",
        ),
        (figures(answer(), answer((3,), hit=0), answer((3,), hit=0)), "no block of the edited prompt was found"),
        (figures(answer(), answer((3,), hit=2), answer((4,), hit=0)), "tokens of the edited prompt differ"),
    ],
)
def test_report_names_each_problem_and_none_for_good_run(warm: ProcessFigures, problem: str) -> None:
    report = DemoReport("model", figures(answer(hit=0, ttft_s=2.0)), warm, {})
    assert report.speedup == pytest.approx(20)
    assert problem in report.problem
    assert bool(report.problem) == bool(problem)
    console = Console(record=True, width=120)
    report.print(console)
    assert (problem or "The same 2 tokens") in console.export_text()


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("a" * 99 + "\n", 50),  # a paragraph: the only line's end is the text's
        ("a" * 100, 50),
        ("a" * 70 + "\n" + "a" * 29, 50),
        ("a" * 54 + "\n" + "a" * 45, 55),
    ],
)
def test_line_is_added_near_the_middle_of_the_text(text: str, at: int) -> None:
    from kvtiers.connector.demo.worker import ADDED_LINE, add_line

    before, _, after = add_line(text).partition(ADDED_LINE)
    assert (before.rstrip("\n"), after.removeprefix("\n")) == (text[:at].rstrip("\n"), text[at:])
    assert before.endswith("\n")
    assert after.startswith("\n")


def test_report_names_blocks_that_were_not_stored() -> None:
    lost = Hop("store", "region", "fs", 0, 0.001, already_stored=1, lost={"StoreFullError": 3, "deadline": 1})
    cold = replace(figures(answer(hit=0, ttft_s=2.0)), hops=(lost,), last_warning="tier fs: [cut] off")
    loss = "4 blocks did not get from region to fs (3 by StoreFullError, 1 by deadline)"
    warning = "last warning of the cold process: tier fs: [cut] off"
    nothing = DemoReport("model", cold, figures(answer(hit=0)), {}).problem
    assert nothing == f"nothing was found: the second process computed the whole prompt again; {loss}; {warning}"
    report = DemoReport("model", cold, figures(answer(hit=2)), {})
    assert report.problem == f"some blocks were not stored; 2 of the prompt's 4 were found; {loss}; {warning}"
    console = Console(record=True, width=400)
    report.print(console)
    assert report.problem in console.export_text(clear=False)
    assert "nothing stored" in console.export_text(clear=False)
    assert "already stored" not in console.export_text()


def test_failed_loads_are_a_problem_unless_another_tier_loaded_the_blocks() -> None:
    cold = figures(answer(hit=0, ttft_s=2.0))
    hops = (Hop("load", "fs", "region", 0, 0.001, lost={"failed": 2}),)
    part = DemoReport("model", cold, replace(figures(answer(hit=2)), hops=hops), {})
    assert part.problem == (
        "some blocks were not loaded; 2 of the prompt's 4 were found; "
        "2 blocks did not get from fs to region (2 by failed)"
    )
    assert not DemoReport("model", cold, replace(figures(answer()), hops=hops), {}).problem


def test_report_says_how_many_blocks_were_found() -> None:
    there = Hop("store", "region", "fs", 0, 0.001, already_stored=4)
    cold = replace(figures(answer(hit=0, ttft_s=2.0)), hops=(there,))
    report = DemoReport("model", cold, figures(answer(hit=2)), {})
    assert not report.problem
    console = Console(record=True, width=120)
    report.print(console)
    text = console.export_text()
    assert "Only 2 of the prompt's 4 blocks were found; the rest was computed again." in text
    assert "already stored" in text


def test_report_calls_slower_answer_slower() -> None:
    report = DemoReport("model", figures(answer(hit=0, ttft_s=0.05)), figures(answer()), {})
    console = Console(record=True, width=120)
    report.print(console)
    text = console.export_text()
    assert "The same 2 tokens, but 2.0x slower" in text
    assert "faster:" not in text


def test_report_explains_that_memory_tier_ends_with_its_process() -> None:
    cold, warm = figures(answer(hit=0, ttft_s=2.0)), figures(answer(hit=0))
    told = "a tier of type memory is gone with its process"
    assert told in DemoReport("model", cold, warm, {"tiers": [{"type": "memory"}]}).problem
    assert told not in DemoReport("model", cold, warm, {"tiers": [{"type": "memory"}, {"type": "fs"}]}).problem
    assert not DemoReport("model", cold, figures(answer()), {"tiers": [{"type": "memory"}]}).problem


def test_report_names_blocks_lost_to_full_storage(options: DemoOptions, tmp_path: Path) -> None:
    from kvtiers.connector.demo.worker import Events, WorkerTask, serve

    tier = {"type": "fs", "name": "full", "root_dir": str(tmp_path / "blocks"), "min_free": 1 << 60}
    assert options.model is not None
    task = WorkerTask(
        False, find_model(options.model), TEXT, "What?", {"tiers": [tier]}, 8, options.block_size, time.monotonic()
    )
    cold = serve(task, Events(io.StringIO()))
    assert 0 < cold.start_s < time.monotonic() - task.started_s
    (hop,) = (hop for hop in cold.hops if hop.destination == "full")
    assert (hop.bytes, hop.already_stored) == (0, 0)
    assert sum(hop.lost.values()) >= cold.answer.blocks_total
    report = DemoReport("model", cold, figures(answer(hit=0)), {})
    assert re.search(
        r"nothing was found: .*; \d+ blocks did not get from region to full \(\d+ by \w+\)", report.problem
    )


@pytest.mark.full
@pytest.mark.timeout(900)
def test_demo_with_default_model_meets_its_figures(tmp_path: Path) -> None:
    try:
        find_model(None)
    except ConfigError as e:
        pytest.skip(str(e))
    json_file = tmp_path / "figures.json"
    assert run_demo(DemoOptions(json_file=json_file), quiet()) == 0
    measured = json.loads(json_file.read_text())
    assert measured["prompt_tokens"] >= 2000
    assert "Apache License, Version 2.0" in measured["answer"]
    assert measured["peak_rss_bytes"] <= measured["model_bytes"] + 2 * measured["kv_bytes"] + 1e9
