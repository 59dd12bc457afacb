"""Writes docs/commands.md from the command line itself: ``make docs``. A test fails if the page is not current.

The options come from the commands' parameters, and the transcript from running the commands on stored blocks.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from kvtiers.connector.commands.cli import COMMANDS, app, load_command
from kvtiers.connector.commands.session import EXIT_CODES
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.registry import SecondaryTierFactory
from tests.identity import FakeSpec, block_key

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ROWS, ROW_BYTES = 160, 64 << 10
ROOT = "/var/cache/kvtiers"  # in the transcript, in place of the folder that the blocks are in
CONFIG = """\
region: {{size: 64MiB}}
tiers:
  - {{type: fs, root_dir: {root}}}
"""
TRANSCRIPT = ("du kvtiers.yaml", f"rm kvtiers.yaml --model {MODEL} -n")
#: Options that several commands share, which their tables leave out.
SHARED = ("tier", "dry_run", "yes", "as_json", "json_schema", "verbose", "quiet", "log_level", "no_progress")
#: Commands with a table of options: du has none of its own, and the demo's help is enough.
WITH_OPTIONS = [name for name in COMMANDS if name not in ("du", "demo")]

#: Fields of the JSON -> what they are.
FIELDS = {
    "tier, where": "a tier's name, and its folder, bucket or URL",
    "error": "why a tier's storage failed; the tier's other fields are then missing",
    "blocks, bytes": "number of blocks, and their bytes, seals included",
    "blobs, blob_bytes": "number and bytes of all files or objects, blocks included",
    "bad, copied, removed": "numbers of blocks",
    "failed": "number of blocks that could not be read, written or removed",
    "mtime": "time of the last use or write, in Unix seconds",
    "reason": "the cause, as a code or a sentence",
    "verdict": "of `check`: `usable`, `usable_with_warnings` or `not_usable`",
    "state": "of a block in `show`: `good`, `bad`, `not_verified` or `not_readable`",
}

HEAD = """\
# Commands

`kvtiers COMMAND -h` or `kvtiers help COMMAND` shows all options of a command, and examples. `kvtiers version` prints
the version with its git commit. `make docs` writes this page from the commands themselves.

| command | what it does | what it changes |
| --- | --- | --- |
{commands}

Most commands take `CONFIG`, the deployment's YAML file (default: `$KVTIERS_CONFIG`). `ls`, `du`, `show`, `verify`,
`gc`, `rm`, `copy` and `bench` also accept the storage alone: a folder, `s3://bucket/prefix` or another URL. A folder or
URL has no limits and no keys: `gc` then needs `--max-bytes` or `--ttl`, and encrypted blocks need the YAML file.

## Options of several commands

| option | commands | what it does |
| --- | --- | --- |
{shared}

Ctrl-C prints what was done and how to continue. `kvtiers --install-completion` installs completion for your shell.
Commands of earlier versions (`doctor`, `migrate`, `serve-metrics`, `size`, `warm`) print what replaced them.
"""
JSON = """\
## JSON

With `--json`, a command prints one document on one line, also after an error: `command`, `version`, `ok` (the exit code
is 0), `result` (null if there is none) and `errors` (the lines on standard error). Most results have a list `tiers`.
Before its document, `ls` prints a line for each block. A name means the same in every command:

| field | meaning |
| --- | --- |
"""
#: Command -> what it changes.
CHANGES = {
    "check": "nothing; with `--write`, adds small files or objects, and removes them",
    "gc": "removes blocks",
    "rm": "removes blocks",
    "verify": "nothing; with `--repair`, removes bad blocks",
    "copy": "adds blocks to the target",
    "bench": "adds blocks, and removes them",
    "demo": "fills a folder of its own",
}


def page() -> str:
    """docs/commands.md."""
    shared: dict[str, Any] = {}
    taking: dict[str, list[str]] = {}
    for command in COMMANDS:
        for param in load_command(command).params:
            if param.name in SHARED:
                shared.setdefault(param.name, param)
                taking.setdefault(param.name, []).append(command)
    parts = [
        HEAD.format(
            commands="\n".join(
                f"| {_link(name)} | {_code(entry.summary)} | {CHANGES.get(name, 'nothing')} |"
                for name, entry in COMMANDS.items()
            ),
            shared="\n".join(
                f"| {_names(shared[name])} | {_who(taking[name])} | {_help(shared[name])} |" for name in SHARED
            ),
        )
    ]
    parts += map(_section, WITH_OPTIONS)
    parts.append(f"## Example\n\n```text\n{transcript()}```\n")
    codes = (f"| {code.value} | {text} |" for code, text in EXIT_CODES.items())
    parts.append("\n".join(("## Exit codes\n", "| code | meaning |", "| ---: | --- |", *codes, "")))
    fields = (f"| {', '.join(f'`{one}`' for one in names.split(', '))} | {text} |" for names, text in FIELDS.items())
    parts.append(JSON + "\n".join(fields) + "\n")
    return "\n".join(parts)


def _link(name: str) -> str:
    return f"[`{name}`](#{name})" if name in WITH_OPTIONS else f"`{name}`"


def _code(text: str) -> str:
    return re.sub(r"(?<![\w-])(--?[a-z][\w-]*)", r"`\1`", text)


def _who(commands: Sequence[str]) -> str:
    if len(commands) == len(COMMANDS):
        return "all"
    if len(commands) == len(COMMANDS) - 1:
        return f"all but `{next(iter(COMMANDS.keys() - set(commands)))}`"
    return ", ".join(f"`{name}`" for name in commands)


def _section(name: str) -> str:
    command = load_command(name)
    rows = [f"| {_names(param)} | {_help(param)} |" for param in command.params if _is_own(param)]
    return "\n".join((f"## `{name}`\n", "| option | meaning |", "| --- | --- |", *rows, ""))


def _is_own(param: Any) -> bool:
    """Whether an argument or option belongs in the command's own table: the rest is said once for all."""
    return param.name not in (*SHARED, "config")


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar}`"
    # The short form first, as in the help.
    *others, last = sorted(param.opts, key=len)
    value = "" if param.is_flag or param.count else f" {param.metavar}"
    return ", ".join(f"`{option}`" for option in (*others, f"{last}{value}"))


def _help(param: Any) -> str:
    text = _code(param.help)
    has_default = param.param_type_name == "option" and not (
        param.is_flag or param.count or param.default in (None, "")
    )
    return f"{text} Default: {param.default}." if has_default and "Default" not in text else text


def transcript() -> str:
    """The commands and what they print."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "kv")
        _fill(str(root))
        config = Path(folder, "kvtiers.yaml")
        config.write_text(CONFIG.format(root=root))
        return "\n".join(_run(command, config, str(root)) for command in TRANSCRIPT)


def _run(command: str, config: Path, root: str) -> str:
    words = [str(config) if word == config.name else word for word in command.split()]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "110", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    shown = done.output.replace(root, ROOT)
    return f"$ kvtiers {command}\n" + "".join(f"{line.rstrip()}\n" for line in shown.splitlines())


def _fill(root: str) -> None:
    """Have an engine store ROWS blocks, without a limit."""
    rows = np.random.default_rng(1).integers(-128, 128, (ROWS, ROW_BYTES), np.int8)
    options = {"type": "fs", "root_dir": root, "min_free": 0, "isolation": "thread"}
    tier = SecondaryTierFactory.create_secondary_tier(options, rows.data, FakeSpec())
    tier.submit_store(JobMetadata(1, [block_key(number) for number in range(ROWS)], np.arange(ROWS, dtype=np.int32)))
    tier.drain_jobs()
    (result,) = tier.get_finished()
    tier.shutdown()
    assert result.success


def main() -> None:
    """Write it."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
