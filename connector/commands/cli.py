"""The command line, ``kvtiers …``: the list of commands, and the options that come before a command."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from kvtiers import __version__
from kvtiers.connector.commands.group import Group
from kvtiers.connector.commands.session import EXIT_CODES, ExitCode

_HERE = "kvtiers.connector.commands"
#: The modules are imported when a command is used, so that --version, --help and completion start quickly.
COMMANDS = {
    "ls": (f"{_HERE}.storage:ls", "List the stored blocks."),
    "du": (f"{_HERE}.storage:du", "Show the number and size of stored blocks, by namespace and age."),
    "show": (f"{_HERE}.show:show", "Show a block (seal, size, age) or a namespace (identity, siblings)."),
    "verify": (f"{_HERE}.verify:verify", "Check that stored blocks are complete and unchanged; repair."),
    "gc": (f"{_HERE}.storage:gc", "Remove blocks past their ttl and above max_bytes."),
    "rm": (f"{_HERE}.remove:rm", "Remove namespaces, or all namespaces of a model."),
    "warm": (f"{_HERE}.copy:warm", "Copy blocks from a far tier to a near tier until that tier is full."),
    "migrate": (f"{_HERE}.copy:migrate", "Copy all blocks from one tier to another."),
    "check": (f"{_HERE}.check:check", "Validate a configuration and describe the tiers that would run with it."),
    "doctor": (f"{_HERE}.deployment:doctor", "Test this machine and the storage, with a fix for each problem."),
    "size": (f"{_HERE}.size:size", "Compute how much storage a model's KV cache takes."),
    "bench": (f"{_HERE}.bench:bench", "Measure the speed of each hop of a deployment on this machine."),
    "demo": (f"{_HERE}.deployment:demo", "Answer a long prompt in two processes; the second loads its KV cache."),
    "vllm-config": (f"{_HERE}.deployment:vllm_config", "Print vLLM's --kv-transfer-config for a deployment."),
    "serve-metrics": (f"{_HERE}.deployment:serve_metrics", "Serve Prometheus metrics of the storage."),
}  # fmt: skip


class _Commands(Group):
    table = COMMANDS


app = typer.Typer(
    cls=_Commands,
    help="KV-cache tiers for LLM servers.",
    epilog="Exit codes: "
    + "; ".join(f"{code.value} {text.partition(';')[0]}" for code, text in EXIT_CODES.items() if code <= 2)
    + f"; {ExitCode.INTERRUPTED.value} Ctrl-C. The config argument defaults to $KVTIERS_CONFIG.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        print(f"kvtiers {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Declares the options before the command's name, besides the common options."""


def main() -> None:
    """Entry point of the ``kvtiers`` command."""
    if sys.stdout is None:  # started with >&-; otherwise the next opened file would get descriptor 1
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - stays open until the process ends
    try:
        app()
    finally:
        # From here on a second Ctrl-C ends the process at once, instead of with a traceback of the interpreter's end.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            sys.stdout.flush()
        except OSError:  # reported already; the interpreter would flush again at exit, and report it once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
