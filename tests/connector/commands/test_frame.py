"""What all commands share: options, exit codes, errors, JSON, bare folders and URLs, and what a start imports."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from kvtiers import __version__
from kvtiers.connector.commands import storage
from kvtiers.connector.commands.cli import COMMANDS, MOVED, app, load_command
from kvtiers.connector.commands.json_schemas import DOCUMENTS, document_schema
from kvtiers.connector.commands.output import Ticker
from kvtiers.connector.commands.places import is_bare, load_deployment
from kvtiers.connector.commands.session import EXIT_CODES, ExitCode, exit_on_signals, new_session, session
from kvtiers.tiers.config.tier_options import FsspecTierConfig, FsTierConfig, S3TierConfig
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.tools.copying import Copier
from tests.connector.commands.test_storage_commands import (
    NAMES,
    SIZE,
    ok,
    result_of,
    root,
    run,
    write_config,
    write_tiers,
)
from tests.waiting import wait_for

__all__ = ["root"]  # a fixture

CLI = [sys.executable, "-m", "kvtiers.connector.commands.cli"]
WITH_JSON = sorted(DOCUMENTS)


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([*CLI, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def heed_ctrl_c() -> None:
    """In the child: tests that a script runs in the background ignore Ctrl-C, and their children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# ---- options and start-up --------------------------------------------------------------------------------------------


def test_version_option_prints_the_version() -> None:
    assert ok("--version") == ok("version") == f"kvtiers {__version__}\n"


def test_help_as_a_word_prints_the_help_of_a_command() -> None:
    assert ok("help", "du") == ok("du", "--help")
    assert ok("help") == ok("--help")
    code, out = run("help", "verfy")
    assert (code, "Did you mean 'verify'?" in out) == (ExitCode.BAD_INPUT, True)
    assert "The command." in ok("help", "help")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_examples_that_the_command_accepts(command: str) -> None:
    examples = COMMANDS[command].examples
    assert 1 <= len(examples) <= 2
    shown = " ".join(ok(command, "-h").split())
    assert shown.endswith(" ".join(("Example:" if len(examples) == 1 else "Examples:", *examples)))
    for example in examples:
        program, name, *words = shlex.split(example)
        assert (program, name) == ("kvtiers", command)
        assert load_command(command).make_context(command, words).params


def test_every_dry_run_has_a_short_form() -> None:
    with_dry_run = []
    for command in COMMANDS:
        for param in load_command(command).params:
            assert ("-n" in param.opts) == (param.name == "dry_run")
            with_dry_run += [command] if param.name == "dry_run" else []
    assert with_dry_run == ["verify", "gc", "rm", "copy"]


@pytest.mark.parametrize("arguments", ["['--version']", "['--help']", "['-h']"])
def test_start_imports_no_storage_client_and_no_large_package(arguments: str) -> None:
    heavy = ("boto3", "botocore", "fsspec", "numpy", "pydantic", "yaml", "xxhash", "torch", "vllm")
    code = (
        "import sys\n"
        "from kvtiers.connector.commands.cli import main\n"
        f"sys.argv = ['kvtiers', *{arguments}]\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_a_text_for_each_option(command: str) -> None:
    assert ok(command, "-h") == ok(command, "--help")
    params = load_command(command).params
    assert [param.name for param in params if not param.help] == []
    assert {"verbose", "quiet", "log_level", "no_progress"} <= {param.name for param in params}


def test_every_command_but_the_demo_prints_json() -> None:
    with_json = {name for name in COMMANDS if any(param.name == "as_json" for param in load_command(name).params)}
    assert with_json == set(DOCUMENTS) == set(COMMANDS) - {"demo"}


@pytest.mark.parametrize("name", MOVED)
def test_old_command_prints_its_replacement(name: str) -> None:
    for arguments in (("c.yaml", "--from", "far"), ("--help",), ()):
        result = CliRunner().invoke(app, [name, *arguments])
        assert (result.exit_code, result.stdout) == (ExitCode.BAD_INPUT, "")
        assert result.stderr == f"kvtiers {name}: {MOVED[name]}\n"
    command, *typed = re.sub(r"[\[\]]", "", MOVED[name].rpartition("kvtiers ")[2]).split()
    assert load_command(command).make_context(command, typed).params  # parses what the replacement says to type
    result = CliRunner().invoke(app, [name, "c.yaml", "--json"])
    assert json.loads(result.stdout)["errors"] == [MOVED[name]]


def test_error_for_mistyped_command_suggests_a_command() -> None:
    code, out = run("verfy")
    assert (code, "Did you mean 'verify'?" in out) == (2, True)


def test_completion_knows_the_commands_and_their_options() -> None:
    for words, expected in (("kvtiers ve", "verify"), ("kvtiers verify --sub", "--subset")):
        environ = {
            **os.environ, "_KVTIERS_COMPLETE": "complete_bash", "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }  # fmt: skip
        code = "from kvtiers.connector.commands.cli import app; app(prog_name='kvtiers')"
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        assert expected in done.stdout.split()


def test_verbosity_counts_options_before_and_after_the_command(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(*_: object, **__: object) -> list[Any]:
        seen.append((session().verbosity, session().shows_progress))
        storage_logger.debug("a debug line")
        storage_logger.info("an info line")
        storage_logger.warning("a warning")
        return []

    import logging

    storage_logger = logging.getLogger("kvtiers.test")
    monkeypatch.setattr(storage, "find_places", look)
    shown = {}
    for options in ("", "-v", "-q", "-v ls -v", "--log-level error", "-q --log-level debug"):
        before, _, after = options.partition("ls")
        result = CliRunner().invoke(app, [*before.split(), "ls", str(root), *after.split()])
        shown[options] = result.stderr.splitlines()
    assert seen == [(0, True), (1, True), (-1, False), (2, True), (0, True), (-1, False)]
    lines = ["kvtiers: debug: a debug line", "kvtiers: info: an info line", "kvtiers: warning: a warning"]
    assert shown == {
        "": lines[2:], "-v": lines[1:], "-q": [], "-v ls -v": lines, "--log-level error": [],
        "-q --log-level debug": lines,
    }  # fmt: skip


def test_commands_use_config_file_from_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(root)
    monkeypatch.setenv("KVTIERS_CONFIG", config)
    assert "10 blocks" in ok("du")
    for command in ("vllm-config", "gc", "ls"):
        ok(command)
    assert f"{config} is " in run("check")[1]
    assert "state" in run("show", NAMES[0])[1]
    monkeypatch.setenv("KVTIERS_CONFIG", str(root / "absent.yaml"))
    assert "10 blocks" in ok("du", config)
    monkeypatch.delenv("KVTIERS_CONFIG")
    code, out = run("du")
    assert (code, "Give it, or set $KVTIERS_CONFIG" in " ".join(out.split())) == (2, True)


# ---- exit codes and errors -------------------------------------------------------------------------------------------


def test_every_exit_code_has_a_description() -> None:
    assert set(EXIT_CODES) == set(ExitCode)


def test_unexpected_exception_is_one_line_without_its_text(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(storage, "find_places", fail)
    result = CliRunner().invoke(app, ["du", str(root)])
    assert result.exit_code == ExitCode.INTERNAL
    assert re.fullmatch(
        r"kvtiers du: internal error: RuntimeError in test_frame.py:\d+; this is a bug in kvtiers, and -v shows the "
        r"traceback\n",
        result.output,
    )
    result = CliRunner().invoke(app, ["du", str(root), "-v"])
    assert "Traceback (most recent call last)" in result.stderr
    assert "RuntimeError: secret" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("du", "/absent/c.yaml", "--json"), ExitCode.BAD_INPUT, "/absent/c.yaml: cannot be read"),
        (("du", "/absent", "--json", "--tier"), ExitCode.BAD_INPUT, "--tier"),
        (("gc", "/absent", "--no-such-option", "--json"), ExitCode.BAD_INPUT, "--no-such-option"),
        (("copy", "HERE", "--json"), ExitCode.BAD_INPUT, "only one tier"),
        (("bench", "HERE", "--total", "10", "--json"), ExitCode.BAD_INPUT, "--total"),
        (("rm", "HERE", "--json"), ExitCode.BAD_INPUT, "--namespace"),
        (("show", "HERE", "m_0123456789ab", "--json"), ExitCode.FAILED, "no tier has"),
        (("vllm-config", "/absent", "--json"), ExitCode.BAD_INPUT, "cannot be read"),
        (("check", "--model", "/absent", "--json"), ExitCode.BAD_INPUT, "was not found"),
        (("verify", "HERE", "--dry-run", "--json"), ExitCode.BAD_INPUT, "--repair"),
    ],
)
def test_errors_are_in_the_json_document(root: Path, arguments: tuple[str, ...], code: ExitCode, said: str) -> None:
    given = [str(root) if word == "HERE" else word for word in arguments]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == code
    document = json.loads(result.stdout)
    jsonschema.validate(document, document_schema(arguments[0]))
    assert (document["command"], document["version"], document["ok"]) == (arguments[0], __version__, False)
    assert said in " ".join(document["errors"])
    assert said in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("command", WITH_JSON)
def test_json_schema_of_each_command_is_valid_and_printed(command: str) -> None:
    schema = json.loads(ok(command, "--json-schema"))
    assert schema == document_schema(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert not validator.is_valid({"command": command, "version": "1", "ok": True, "result": {}, "errors": []})
    failed = {"command": command, "version": "1", "ok": False, "result": None, "errors": ["x"]}
    assert validator.is_valid(failed)
    assert not validator.is_valid(failed | {"command": "other"})


def json_fields(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each field of a document's schema, with its type; null aside, which any field may be."""
    for part in (schema, *schema.get("$defs", {}).values()):
        for name, field in part.get("properties", {}).items():
            kinds = [one for one in field.get("anyOf", [field]) if one.get("type") != "null"]
            yield name, json.dumps([shape(one) for one in kinds])


def shape(field: dict[str, Any]) -> Any:
    if "const" in field or "enum" in field:
        return "string" if field.get("type", "string") == "string" else field["type"]
    if "items" in field:
        return ["list"]
    return field.get("type", "object")


def test_a_name_in_the_json_has_one_type_in_all_commands() -> None:
    types: dict[str, set[str]] = {}
    for command in WITH_JSON:
        for name, kind in json_fields(document_schema(command)):
            types.setdefault(name, set()).add(kind)
    assert {name: kinds for name, kinds in types.items() if len(kinds) > 1} == {}
    assert len(types) > 80


def test_closed_pipe_ends_the_command_without_error_text(root: Path) -> None:
    for _ in range(3):
        for number in range(2000):  # more lines than a pipe holds
            name = NAMES[0].replace(NAMES[0].rpartition("/")[2], "")
            (root / f"{name}{NAMES[0].rpartition('/')[2][:5]}{number:059x}.bin").touch()
    process = start("ls", write_config(root))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == ExitCode.BROKEN_PIPE
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("typer", -signal.SIGINT),
        ("pydantic", ExitCode.INTERRUPTED),
        pytest.param("kvtiers.connector.commands.session", -signal.SIGINT, marks=pytest.mark.full),
        pytest.param("kvtiers.connector.commands.storage", ExitCode.INTERRUPTED, marks=pytest.mark.full),
        pytest.param("kvtiers.tiers.stores.files.local", ExitCode.INTERRUPTED, marks=pytest.mark.full),
    ],
)
def test_ctrl_c_while_modules_are_imported_shows_no_traceback(root: Path, module: str, code: int) -> None:
    program = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"sys.argv = ['kvtiers', 'ls', {str(root)!r}]\n"
        "from kvtiers.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, preexec_fn=heed_ctrl_c
    )
    assert done.returncode == code, done.stderr
    assert done.stderr in ("", "kvtiers ls: interrupted: nothing was changed\n")


@pytest.mark.parametrize("command", ["verify", "copy"])
def test_ctrl_c_ends_a_command_whose_reads_hang(root: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "hung_store.py").write_text(
        "import pathlib, threading\n"
        "from kvtiers.tiers.stores.files.local import LocalStore\n"
        "class HungStore(LocalStore):\n"
        "    def get_into(self, key, parts):\n"
        "        if not key.endswith('.bin'):\n"
        "            return super().get_into(key, parts)\n"
        "        pathlib.Path(__file__).with_name('reached').touch()\n"
        "        threading.Event().wait()\n"
        "make_store = lambda options: HungStore(options['root'])\n"
    )
    (root / NAMES[0]).write_bytes(bytes(2 * SIZE))  # a block's size, so that it is read
    config = write_tiers(tmp_path / "hung.yaml", f"type: store, module_path: hung_store, options: {{root: {root}}}")
    (tmp_path / "target").mkdir()
    arguments = [command, config, *([str(tmp_path / "target")] if command == "copy" else [])]
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    process = start(*arguments, env=os.environ | {"PYTHONPATH": path}, preexec_fn=heed_ctrl_c)
    try:
        wait_for(lambda: (tmp_path / "reached").exists() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert err.startswith(f"kvtiers {command}: interrupted: ")


def test_ctrl_c_during_copy_prints_one_line_with_progress_and_next_step(root: Path, tmp_path: Path) -> None:
    """With what was done and how to continue."""
    (tmp_path / "target").mkdir()
    process = start(
        "copy", str(root), str(tmp_path / "target"), "--limit-rate", "1KiB", "--json", preexec_fn=heed_ctrl_c
    )
    wait_for(lambda: any((tmp_path / "target").rglob("config.json")))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.INTERRUPTED, err
    (line,) = err.splitlines()
    assert re.fullmatch(
        r"kvtiers copy: interrupted: \d blocks?, .* copied; run the same command again to continue: it skips blocks "
        r"that the target has",
        line,
    )
    assert json.loads(out)["errors"] == [line.removeprefix("kvtiers copy: ")]


def test_ctrl_c_message_says_whether_anything_was_changed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, "keys", interrupt)
    config = write_config(root, "ttl: 1h")
    said = {
        ("ls",): "nothing was changed",
        ("gc", "--dry-run"): "nothing was changed",
        ("gc",): "what was removed stays removed; run the same command again to continue",
        (
            "verify",
        ): "0 blocks checked; run it again to start over (with --subset and --seed, a run checks only a part)",
    }
    for (command, *options), text in said.items():
        assert run(command, config, *options) == (
            ExitCode.INTERRUPTED, f"kvtiers {command}: interrupted: {text}\n",
        )  # fmt: skip


def test_session_ends_with_its_run() -> None:
    with new_session() as current:
        assert session() is current
        current.command = "x"
    assert session().command == ""


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_second_signal_does_not_interrupt_clean_up_after_the_first(
    first: signal.Signals, second: signal.Signals
) -> None:
    """A service manager or a shell that closes sends both."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    cleaned_up: list[bool] = []

    def work() -> None:
        with exit_on_signals():
            try:
                os.kill(os.getpid(), first)
            finally:
                os.kill(os.getpid(), second)
                cleaned_up.append(True)

    try:
        with pytest.raises(SystemExit, match=str(128 + first)):
            work()
        assert not {signal.getsignal(number) for number in numbers} & {signal.SIG_IGN, signal.SIG_DFL}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert cleaned_up == [True]


def test_hangup_signal_ignored_by_nohup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "arguments",
    [
        *(("check", "--json"), ("gc",)),
        *(
            pytest.param(arguments, marks=pytest.mark.full)
            for arguments in (("check",), ("verify", "--json"), ("ls", "-q"), ("--help",))
        ),
    ],
    ids=" ".join,
)
def test_closed_standard_output_is_not_an_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "kv").mkdir()
    config = write_tiers(tmp_path / "c.yaml", f"type: fs, root_dir: {tmp_path / 'kv'}, min_free: 0, ttl: 7d")
    command = shlex.join([*CLI, *arguments, config])
    ended = subprocess.run(["/bin/sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_error_in_a_pipe_is_one_unwrapped_line(tmp_path: Path) -> None:
    config = tmp_path / "a-name-that-is-long-enough-to-be-wrapped-at-eighty-columns" / "c.yaml"
    ended = subprocess.run([*CLI, "vllm-config", str(config)], capture_output=True, text=True, check=False)
    assert ended.stderr == f"kvtiers vllm-config: {config}: cannot be read: No such file or directory\n"


def test_error_of_full_output_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([*CLI, "check", "--schema"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        2,
        "kvtiers: the output could not be written: No space left on device\n",
    )


# ---- folders and URLs instead of a file ------------------------------------------------------------------------------


def test_folder_argument_stands_for_an_fs_tier(root: Path) -> None:
    assert f"fs at {root}: 10 blocks, 40 KiB" in ok("du", str(root))
    assert len(ok("ls", str(root), "-q").splitlines()) == 10
    target = root.parent / "target"
    target.mkdir()
    code, out = run("copy", str(root), str(target))
    assert (code, "not copied" in out) == (1, True)  # the ten blocks are zeros
    (tier,) = load_deployment(str(root)).tiers
    assert isinstance(tier, FsTierConfig)
    assert (tier.root_dir, tier.max_bytes, tier.ttl, tier.min_free) == (str(root), None, None, 1 << 30)


def test_url_argument_stands_for_a_tier(tmp_path: Path) -> None:
    (tier,) = load_deployment("s3://bucket/some/prefix/").tiers
    assert isinstance(tier, S3TierConfig)
    assert (tier.bucket, tier.prefix) == ("bucket", "some/prefix")
    (tier,) = load_deployment("gs://bucket/prefix").tiers
    assert isinstance(tier, FsspecTierConfig)
    assert tier.url == "gs://bucket/prefix"
    (tier,) = load_deployment("simplecache::abfs://x/y").tiers
    assert isinstance(tier, FsspecTierConfig)
    assert is_bare(str(tmp_path))
    assert not is_bare(str(tmp_path / "c.yaml"))


def test_argument_that_is_neither_file_folder_nor_url_is_bad_input(tmp_path: Path) -> None:
    code, out = run("du", str(tmp_path / "kv"))
    assert code == 2
    assert "accepted is a YAML file, an existing folder, or a URL such as s3://bucket/prefix" in out
    with pytest.raises(ConfigError) as told:
        load_deployment("s3://user:secret@/")
    assert "secret" not in str(told.value)


def test_gc_of_a_folder_needs_a_limit(root: Path) -> None:
    code, out = run("gc", str(root))
    assert code == 2
    assert "no limit is known; give --max-bytes, --ttl or both" in out
    assert len(list(root.rglob("*.bin"))) == 10
    assert "would be removed by ttl: 4 blocks" in ok("gc", str(root), "--ttl", "5.5h", "--dry-run")
    assert "removed by ttl: 4 blocks" in ok("gc", str(root), "--ttl", "5.5h")
    assert len(list(root.rglob("*.bin"))) == 6
    for options, said in (
        (("--max-bytes", "much"), "--max-bytes: 'much' is not a size"),
        (("--max-bytes", "10"), "--max-bytes: 10 bytes do not hold a block"),
        (("--ttl", "0"), "--ttl: '0' is not accepted; write a duration from 1s"),
    ):
        code, out = run("gc", str(root), *options)
        assert (code, said in out) == (2, True), out
    code, out = run("gc", write_config(root, "ttl: 1h"), "--ttl", "1h")
    assert (code, "sets its own limits; change ttl there" in out) == (2, True)


# ---- ls, du and progress ---------------------------------------------------------------------------------------------


def test_ls_sorts_by_name_size_or_age(root: Path) -> None:
    (root / NAMES[3]).write_bytes(bytes(2 * SIZE))
    os.utime(root / NAMES[3], (1e9, 1e9))

    def names(*options: str) -> list[str]:
        return [line.split()[3] for line in ok("ls", str(root), "-q", *options).splitlines()]

    assert names("--sort", "name") == sorted(NAMES)
    assert names("--sort", "size") == [NAMES[3], *sorted(set(NAMES) - {NAMES[3]})]
    assert names("--sort", "age") == [name for name in NAMES if name != NAMES[3]] + [NAMES[3]]
    assert names("--sort", "age", "--limit", "2") == NAMES[:2]


def test_ls_prints_blocks_during_the_listing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed blocks are printed before the listing ends, and no more of them are listed than are wanted."""
    printed: list[int] = []
    keys = LocalStore.keys

    def listed(self: LocalStore, prefix: str = "") -> Any:
        for count, info in enumerate(info for info in keys(self, prefix) if info.key in NAMES):
            assert printed == list(range(count))
            yield info

    monkeypatch.setattr(LocalStore, "keys", listed)

    def utc(_: float) -> str:
        printed.append(len(printed))
        return ""

    monkeypatch.setattr(storage, "utc", utc)
    ok("ls", str(root))
    assert len(printed) == 10
    printed.clear()
    ok("ls", str(root), "--limit", "3")
    assert len(printed) == 3


def test_du_shows_differing_fields_of_namespaces_and_total_of_tiers(root: Path) -> None:
    (path,) = root.glob("*/config.json")
    fields = json.loads(path.read_text())
    sibling = "_".join([path.parent.name.rpartition("_")[0], "0123456789ab"])
    (root / sibling).mkdir()
    (root / sibling / "config.json").write_text(json.dumps(fields | {"dtype": "fp8"}))
    block = root / NAMES[0].replace(path.parent.name, sibling)
    block.parent.mkdir(parents=True)
    block.write_bytes(bytes(SIZE))
    out = " ".join(ok("du", str(root)).split())
    assert 'dtype="fp8"' in out
    assert f'dtype="{fields["dtype"]}"' in out
    (tier,) = result_of(ok("du", str(root), "--json"))["tiers"]
    assert tier["differing_fields"] == {
        path.parent.name: {"dtype": f'"{fields["dtype"]}"'}, sibling: {"dtype": '"fp8"'}
    }  # fmt: skip
    LocalStore(root.parent / "far").close()
    tiers = [f"type: fs, name: {path.name}, root_dir: {path}" for path in (root, root.parent / "far")]
    assert "total of 2 tiers: 11 blocks, 44 KiB" in ok("du", write_tiers(root.parent / "two.yaml", *tiers))


def test_progress_shows_the_amount_the_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any output for a terminal
    monkeypatch.setenv("COLUMNS", "200")

    def shown(**options: bool) -> str:
        with new_session() as current:
            current.shows_progress = options.get("shows_progress", True)
            with Ticker("copying", 100 << 20, unit="bytes") as ticker:
                for _ in range(5):
                    now[0] += 1
                    ticker.count(int((now[0] - started) * 10) << 20)
                task = ticker._progress.tasks[0]
                assert task.time_remaining == 5
                return str(task.fields["done"]) if ticker._shown and not ticker._progress.disable else ""

    started = now[0]
    assert shown() == "50 MiB, 10 MiB/s"
    started = now[0]
    assert shown(shows_progress=False) == ""


# ---- small faults ----------------------------------------------------------------------------------------------------


def test_vllm_config_command_prints_all_ways_or_the_chosen_way(tmp_path: Path) -> None:
    config = write_tiers(tmp_path / "c.yaml", f"type: fs, root_dir: {tmp_path}")
    ways = json.loads(ok("vllm-config", config))
    assert {"spec", "tier"} <= ways.keys()
    assert json.loads(ok("vllm-config", config, "--way", "spec")) == ways["spec"]
    assert run("vllm-config", config, "--way", "x")[0] == 2
    assert run("vllm-config", str(tmp_path / "none.yaml"))[0] == ExitCode.BAD_INPUT


def test_demo_refuses_bad_input(tmp_path: Path) -> None:
    assert run("demo", "--config", str(tmp_path / "none.yaml"))[0] == ExitCode.BAD_INPUT


def test_vllm_config_json_has_only_the_chosen_way(tmp_path: Path) -> None:
    config = write_tiers(tmp_path / "c.yaml", f"type: fs, root_dir: {tmp_path}")
    assert set(result_of(ok("vllm-config", config, "--json", "--way", "tier"))["ways"]) == {"tier"}


def test_copy_within_single_tier_file_requires_target(root: Path) -> None:
    config = write_config(root)
    code, out = run("copy", config)
    assert code == 2
    assert f"{config} has only one tier that commands can read, fs; give a TARGET, or add a second tier" in out


@pytest.mark.parametrize("rate", ["0", "fast", "1MiB/h"])
def test_invalid_limit_rate_is_bad_input(root: Path, rate: str) -> None:
    code, out = run("copy", str(root), str(root.parent), "--limit-rate", rate)
    assert (code, "--limit-rate" in out) == (2, True)


def test_limit_rate_reaches_the_copier(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    make = Copier.__init__

    def look(self: Copier, *arguments: Any, **options: Any) -> None:
        given.append(options["rate"])
        make(self, *arguments, **options)

    monkeypatch.setattr(Copier, "__init__", look)
    run("copy", str(root), str(root.parent), "--limit-rate", "50MiB/s")
    run("copy", str(root), str(root.parent))
    assert given[0]._bytes_per_s == 50 << 20
    assert given[1] is None
