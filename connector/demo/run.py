"""The demo: two processes, one after the other, that share nothing but storage.

The first process computes a long prompt, answers it, stores its KV and exits. The second process finds the KV, loads it
and answers the same prompt, then the prompt edited in its middle. This module starts both processes, shows their
progress and reports the result. It does not import torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from ...tiers.config.deployment import load_config, parse_tier
from ...tiers.errors import ConfigError, KVTiersError, printable_lines
from ...tiers.registry import SecondaryTierFactory
from ..commands.session import exit_on_signals
from .embedded_s3 import start_embedded_s3
from .model import check_extra, find_model
from .report import DemoReport, ProcessFigures
from .run_folder import run_folder

BLOCK_SIZE_TOKENS = 16  # vLLM's default on a GPU
SILENCE_S_MAX = 1800.0  # a process that reports nothing for this long counts as hung
EXIT_S_MAX = 30.0  # a process that has reported its last event and does not end within this time is killed
STDERR_LINES_SHOWN = 20
PROMPT_BYTES_MAX = 16 << 20
LICENSE_QUESTION = "What is the name of this license?"
DEFAULT_QUESTION = "Summarize the text above in one sentence."


class ProcessDiedError(KVTiersError):
    """A process of the demo died. The message ends with the last lines of its standard error."""

    def __init__(self, message: str, tail: list[str]) -> None:
        super().__init__()
        self.args = (printable_lines("\n".join((f"{message}:", *tail))),)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The user's options. None: the demo's default.

    Attributes:
        model: a .gguf file, a folder or a hub id.
        prompt_file: a text file; by default this distribution's license.
        config_file: deployment YAML; by default one local-fs tier and a region of suitable size.
        json_file: file for the figures, in addition to the printed tables.
        root_dir: folder of the local-fs tier; it is kept. By default a temporary folder, removed at the end.
        another_replica: give the warm process an empty folder for the first tier, as on another machine.
    """

    model: str | None = None
    prompt_file: Path | None = None
    question: str | None = None
    config_file: Path | None = None
    json_file: Path | None = None
    max_new_tokens: int = 24
    root_dir: Path | None = None
    block_size: int = BLOCK_SIZE_TOKENS
    another_replica: bool = False


def run_demo(options: DemoOptions, console: Console | None = None) -> int:
    """Run the demo and print its result.

    Returns:
        0, or 1 if tokens differ, nothing was found, or blocks were lost on the way.

    Raises:
        ConfigError: bad input (nothing was run), or the report could not be written.
        KVTiersError: a process failed.
        SystemExit: SIGTERM came; temporary files were removed.
    """
    console = console or Console()
    check_extra()
    model = find_model(options.model)
    document = _read_document(options.prompt_file)
    _check_question(options.question)
    _check_json_file(options.json_file)
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(exit_on_signals())
        deployment = _deployment(options, cleanup)
        elsewhere = _elsewhere(deployment, cleanup) if options.another_replica else deployment
        if model.gguf_file:
            model = replace(model, converted=str(_folder_of_run(cleanup) / "model"))
        task: dict[str, Any] = {
            "model": asdict(model),
            "document": document,
            "question": options.question or (DEFAULT_QUESTION if options.prompt_file else LICENSE_QUESTION),
            "deployment": deployment,
            "max_new_tokens": options.max_new_tokens,
            "block_size": options.block_size,
        }
        with _Bars(console) as bars:
            cold = _run_worker(task | {"is_warm": False}, bars, "cold")
            warm = _run_worker(task | {"is_warm": True, "deployment": elsewhere}, bars, "warm")
    report = DemoReport(model.name, cold, warm, _public(deployment) | {"block_size": options.block_size})
    try:
        if options.json_file is not None:
            report.write_json(options.json_file)
    except OSError as e:
        raise ConfigError(f"{options.json_file} cannot be written: {e.strerror}", field="--json") from e
    finally:
        report.print(console)  # whichever of the two fails, the run is not lost
    return 1 if report.problem else 0


def _check_json_file(path: Path | None) -> None:
    """Check the path now rather than after a minute of work."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", field="--json")
    if not os.access(path if os.path.exists(path) else path.absolute().parent, os.W_OK):
        raise ConfigError(f"{path} is not writable, or its folder is missing or not writable", field="--json")


def _check_question(question: str | None) -> None:
    try:
        (question or "").encode()
    except UnicodeEncodeError as e:
        raise ConfigError(f"{question!r} is not UTF-8 text", field="--question") from e


class _Bars:
    """Progress bars, one per stage that the workers report. If they cannot be shown, the run continues without them."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✔[/]"),
            TextColumn("[bold]{task.fields[process]}[/]"),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=5,  # the model needs the cores
        )
        self._current: tuple[str, str, TaskID] | None = None

    def __enter__(self) -> _Bars:
        with contextlib.suppress(OSError):
            self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            self._progress.stop()

    def show(self, process: str, stage: str, done: int, total: int) -> None:
        """Show the progress of a process. A new stage ends the stage before it."""
        if self._current is None or self._current[:2] != (process, stage):
            self.finish()
            task_id = TaskID(len(self._progress.task_ids))  # id of the task added below, even if drawing it fails
            with contextlib.suppress(OSError):
                self._progress.add_task(stage, total=None, process=process)
            self._current = process, stage, task_id
        self._progress.update(self._current[2], completed=done, total=total or None)

    def finish(self) -> None:
        """End the current stage."""
        if self._current is not None:
            self._progress.update(self._current[2], completed=1, total=1)
            self._current = None


def _run_worker(task: dict[str, Any], bars: _Bars, name: str) -> ProcessFigures:
    """Run one process to its end.

    Raises:
        ConfigError: the process rejected its input.
        KVTiersError: the process died, or reported nothing for too long.
    """
    output, theirs = socket.socketpair()  # not a pipe: a socket has a timeout
    with tempfile.TemporaryFile() as errors, output:
        started_s = time.monotonic()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvtiers.connector.demo.worker"],
                stdin=subprocess.PIPE,
                stdout=theirs.fileno(),
                stderr=errors,
                env=_environment(task["model"]["is_local"]),
            )
        try:
            bars.show(name, "starting a fresh process", 0, 0)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:  # if it died already, its output says why
                process.stdin.write(json.dumps(task | {"started_s": started_s}).encode())
            for event in _events(output):
                match event["event"]:
                    case "progress":
                        bars.show(name, event["stage"], event["done"], event["total"])
                    case "error":
                        raise ConfigError(event["message"])
                    case "result":
                        bars.finish()
                        return TypeAdapter(ProcessFigures).validate_python(event["figures"])
            code = _wait(process)
            errors.seek(0)
            tail = errors.read().decode(errors="replace").splitlines()[-STDERR_LINES_SHOWN:]
            raise ProcessDiedError(f"the {name} process ended with exit code {code}", tail)
        except BaseException:
            process.kill()
            raise
        finally:
            _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(EXIT_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _events(output: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield a process's events until it closes its output.

    Raises:
        KVTiersError: the process reported nothing for too long.
    """
    output.settimeout(SILENCE_S_MAX)
    try:
        with output.makefile("rb") as lines:
            yield from map(json.loads, lines)
    except TimeoutError:
        raise KVTiersError(f"the process reported nothing for {SILENCE_S_MAX:g} s and was killed") from None


def _environment(offline: bool) -> dict[str, str]:
    defaults = {
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        # By default the model's threads spin while they wait for each other. If other threads need a core, even our own
        # store threads, spinning made a short forward 30 times slower. Not spinning costs 5% on an idle machine.
        "OMP_WAIT_POLICY": "PASSIVE",
        # By default glibc returns a layer's activations to the kernel and faults them in again for the next layer.
        # That took a fifth of a cold prefill and two thirds of a warm prefill.
        "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    }
    return defaults | os.environ | ({"HF_HUB_OFFLINE": "1"} if offline else {})


def _deployment(options: DemoOptions, cleanup: contextlib.ExitStack) -> dict[str, Any]:
    """Return the deployment as plain data, to be sent to the processes as JSON. ``cleanup`` removes temporary folders.

    Raises:
        ConfigError: the config is not accepted, or has a value that JSON cannot represent.
    """
    if options.config_file is not None:
        if options.root_dir is not None:
            raise ConfigError("--config already names the folders; omit --root", field="--root")
        config = load_config(options.config_file, SecondaryTierFactory.tier_types())
        try:
            json.dumps([dict(tier) for tier in config.tiers])
        except TypeError as e:
            raise ConfigError(
                f"{options.config_file}: a tier's option is not a number, text, list or mapping ({e})",
                field="--config",
            ) from e
        return start_embedded_s3(config.model_dump() | {"tiers": [dict(tier) for tier in config.tiers]}, cleanup)
    root = _folder_of_run(cleanup) if options.root_dir is None else options.root_dir.absolute()
    return {"tiers": [{"type": "fs", "root_dir": str(root), "min_free": 0}]}


def _folder_of_run(cleanup: contextlib.ExitStack) -> Path:
    """Make a temporary folder on a disk."""
    # /tmp may be memory; /var/tmp is a disk by convention.
    parent = "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
    return cleanup.enter_context(run_folder(Path(parent)))


def _public(deployment: dict[str, Any]) -> dict[str, Any]:
    """Return the deployment without values that may be secret."""
    known = SecondaryTierFactory.tier_types()
    return deployment | {"tiers": [parse_tier(tier, known).model_dump() for tier in deployment["tiers"]]}


def _elsewhere(deployment: dict[str, Any], cleanup: contextlib.ExitStack) -> dict[str, Any]:
    """Return the deployment as it would be on another machine: the first tier has a new, empty folder."""
    tiers = deployment["tiers"]
    if len(tiers) < 2 or "root_dir" not in tiers[0]:
        raise ConfigError("accepted with two tiers or more, the first with a root_dir", field="--another-replica")
    root = cleanup.enter_context(run_folder(Path(tempfile.gettempdir())))
    return deployment | {"tiers": [tiers[0] | {"root_dir": str(root)}, *tiers[1:]]}


def _read_document(path: Path | None) -> str:
    """Return the text to ask about.

    Raises:
        ConfigError: the file cannot be read, or is not text.
    """
    if path is None:
        return _license()
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not path.is_dir():  # a device may be endless, a pipe without a writer
            raise ConfigError(f"{path} is a pipe or a device; write a file", field="--prompt")
        if status.st_size > PROMPT_BYTES_MAX:
            raise ConfigError(f"{path} is larger than {PROMPT_BYTES_MAX} bytes", field="--prompt")
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}", field="--prompt") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8 text: {e.reason} at byte {e.start}", field="--prompt") from e


def _license() -> str:
    """Return this distribution's license: a real text of about 2,000 tokens that is installed with the demo."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        text = importlib.metadata.distribution("kvtiers").read_text("licenses/LICENSE")
        if text:
            return text
    try:
        return (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError("the license's text is not installed; name a text file", field="--prompt") from e
