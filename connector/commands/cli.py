"""The command line, ``kvtiers …``: loads a command when it is used, adds the common options, and ends a run.

A run never ends in a traceback: each exception becomes one line, an exit code and, with ``--json``, a JSON document.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

from ...tiers.errors import ConfigError, KVTiersError
from .session import CONFIG_VARIABLE, EXIT_CODES, ExitCode, Session, new_session, session

_HERE = "kvtiers.connector.commands"


class Entry(NamedTuple):
    """A command in the list of commands.

    Attributes:
        function: ``module:function``; the module is imported when the command is used.
        summary: one line for the list of commands.
        examples: example commands, for the end of the command's help.
    """

    function: str
    summary: str
    examples: tuple[str, ...]


#: Name -> command. So --version, --help and completion start without importing the commands' modules.
COMMANDS: Mapping[str, Entry] = {
    "check": Entry(
        f"{_HERE}.check:check",
        "Check a deployment on this machine, with a fix for each problem.",
        ("kvtiers check kvtiers.yaml --write", "kvtiers check kvtiers.yaml --model org/model --prefill 5000"),
    ),
    "vllm-config": Entry(
        f"{_HERE}.deployment:vllm_config",
        "Print vLLM's --kv-transfer-config for a deployment.",
        ("kvtiers vllm-config kvtiers.yaml --way spec",),
    ),
    "ls": Entry(
        f"{_HERE}.storage:ls",
        "List the stored blocks.",
        ("kvtiers ls kvtiers.yaml --sort size --limit 10", "kvtiers ls s3://bucket/prefix --json"),
    ),
    "du": Entry(
        f"{_HERE}.storage:du",
        "Show the number and size of stored blocks, by namespace and age.",
        ("kvtiers du kvtiers.yaml", "kvtiers du s3://bucket/prefix --json"),
    ),
    "show": Entry(
        f"{_HERE}.show:show",
        "Show a block (seal, size, age) or a namespace (identity, siblings).",
        ("kvtiers show kvtiers.yaml org_model_0123456789ab", "kvtiers show kvtiers.yaml 019fb44f"),
    ),
    "verify": Entry(
        f"{_HERE}.verify:verify",
        "Check that stored blocks are complete and unchanged; repair them.",
        ("kvtiers verify kvtiers.yaml --subset 5%", "kvtiers verify kvtiers.yaml --repair -n"),
    ),
    "gc": Entry(
        f"{_HERE}.collect:gc",
        "Remove blocks past their ttl and above max_bytes.",
        ("kvtiers gc kvtiers.yaml -n", "kvtiers gc s3://bucket/prefix --max-bytes 2TiB --ttl 30d"),
    ),
    "rm": Entry(
        f"{_HERE}.remove:rm",
        "Remove namespaces, or all namespaces of a model.",
        ("kvtiers rm kvtiers.yaml --model org/model -n", "kvtiers rm kvtiers.yaml --namespace org_model_0123456789ab"),
    ),
    "copy": Entry(
        f"{_HERE}.copy:copy",
        "Copy blocks from one tier to another.",
        ("kvtiers copy kvtiers.yaml --from s3 --to fs --until-full", "kvtiers copy old.yaml new.yaml -n"),
    ),
    "explain": Entry(
        f"{_HERE}.explain:explain",
        "Show how much of each request was loaded, and why no more.",
        ("kvtiers explain requests.jsonl --last 5", "kvtiers explain http://localhost:8000/metrics"),
    ),
    "bench": Entry(
        f"{_HERE}.bench:bench",
        "Measure the speed of each hop of a deployment on this machine.",
        ("kvtiers bench kvtiers.yaml --total 1GiB",),
    ),
    "demo": Entry(
        f"{_HERE}.deployment:demo",
        "Answer a long prompt in two processes; the second loads its KV cache.",
        ("kvtiers demo --root /tmp/kv",),
    ),
}
#: Commands of earlier versions -> their replacements.
MOVED = {
    "doctor": "doctor is part of check: kvtiers check CONFIG --write",
    "migrate": "migrate is copy now: kvtiers copy SOURCE TARGET",
    "serve-metrics": "serve-metrics is gone: engines export the metrics (metrics.port, or vLLM's /metrics); to measure "
    "what is stored: kvtiers du CONFIG --json",
    "size": "size is part of check: kvtiers check [CONFIG] --model MODEL",
    "warm": "warm is copy now: kvtiers copy CONFIG --from FAR --to NEAR --until-full",
}
LogLevel = Literal["debug", "info", "warning", "error"]
_PANEL = "Options of every command"
_OUTPUT_LOST = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
)  # of standard output: errors of storage are StoreErrors


Verbose = Annotated[
    int,
    typer.Option(
        "-v", "--verbose", count=True, show_default=False, rich_help_panel=_PANEL,
        help="Show info log lines; -vv: debug log lines.",
    ),
]  # fmt: skip
Quiet = Annotated[
    int,
    typer.Option(
        "-q", "--quiet", count=True, show_default=False, rich_help_panel=_PANEL,
        help="Show only results and errors: no notes, warnings or progress.",
    ),
]  # fmt: skip
MinimumLevel = Annotated[
    LogLevel | None,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        rich_help_panel=_PANEL,
        help="Show log lines from this level on: debug, info, warning or error.",
    ),
]
NoProgress = Annotated[
    bool,
    typer.Option(
        "--no-progress", rich_help_panel=_PANEL, help="Do not show progress, which appears after 2 s on a terminal."
    ),
]


def _common_options(
    verbose: Verbose = 0, quiet: Quiet = 0, log_level: MinimumLevel = None, no_progress: NoProgress = False
) -> None:
    session().apply(verbose=verbose, quiet=quiet, log_level=log_level, no_progress=no_progress)


def _show_schema(context: typer.Context, value: bool) -> None:
    if value:
        from .json_schemas import document_schema

        print(json.dumps(document_schema(str(context.info_name)), indent=2))
        raise typer.Exit


def _schema_option(
    json_schema: Annotated[
        bool,
        typer.Option(
            "--json-schema", is_eager=True, callback=_show_schema, show_default=False,
            help="Print the JSON schema of the output of --json, and exit.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Only its parameter is used."""


def _command_of(function: Any, epilog: str | None = None) -> Any:
    one = typer.Typer(add_completion=False)
    # Without line breaks inside paragraphs, which typer would keep.
    paragraphs = (function.__doc__ or "").split("\n\n")
    one.command(help="\n\n".join(" ".join(text.split()) for text in paragraphs), epilog=epilog)(function)
    return get_command(one)


def load_command(name: str) -> Any:
    """Import a command, with the common options. Its config argument defaults to the environment variable."""
    entry = COMMANDS[name]
    module, _, function = entry.function.partition(":")
    examples = "\n\n".join(("Example:" if len(entry.examples) == 1 else "Examples:", *entry.examples))
    command = _command_of(getattr(importlib.import_module(module), function), examples)
    command.name = name
    for param in command.params:
        if param.name == "config" and param.param_type_name == "argument":
            param.envvar = CONFIG_VARIABLE
    if any(param.name == "as_json" for param in command.params):
        command.params += _command_of(_schema_option).params
    common = _command_of(_common_options).params
    command.params += common
    run = command.callback

    def run_with_common_options(**options: Any) -> Any:
        _common_options(**{str(param.name): options.pop(param.name) for param in common})
        options.pop("json_schema", None)
        return run(**options)

    command.callback = run_with_common_options
    return command


class Group(TyperGroup):
    """The commands of ``kvtiers``. Until a command is used, it has only a name and a summary."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load the command. Note its name and whether it prints JSON before its options are parsed, which may fail."""
        current = session()
        current.command, current.as_json = args[0], "--json" in args
        if args[0] in MOVED:
            from .output import refuse

            raise refuse(MOVED[args[0]])
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in COMMANDS:
            command = load_command(name)
        current.as_json &= command is not None and any(param.name == "as_json" for param in command.params)
        return name, command, rest

    def main(self, *, standalone_mode: bool = True, **options: Any) -> Any:  # type: ignore[override]
        """Run the command line. Ends with SystemExit, or returns the exit code if ``standalone_mode`` is False."""
        with new_session() as current:
            try:
                code = super().main(standalone_mode=False, **options) or ExitCode.OK
                sys.stdout.flush()  # here, because an error of the output is reported here
            except SystemExit as e:  # a signal, the shell's completion, or typer's end on a closed pipe
                code = ExitCode.BROKEN_PIPE if isinstance(e.__context__, BrokenPipeError) else e.code
            except KeyboardInterrupt:
                code = ExitCode.INTERRUPTED
            except BrokenPipeError:
                code = ExitCode.BROKEN_PIPE
            except Exception as e:  # noqa: BLE001 - the program's edge
                code = _explained(e, current)
            with suppress(KeyboardInterrupt):  # a second Ctrl-C
                if code == ExitCode.INTERRUPTED:  # typer itself ends without a word
                    _tell_interrupted(current)
                if code and current.as_json and not current.has_answered and code != ExitCode.BROKEN_PIPE:
                    _answer_errors()
        if standalone_mode:
            sys.exit(code)
        return code


def _tell_interrupted(current: Session) -> None:
    from .output import complain

    complain(f"interrupted: {current.if_interrupted()}")


def _explained(e: Exception, current: Session) -> ExitCode:
    """Print one line about an exception, and return the exit code."""
    from .output import complain

    if hasattr(e, "format_message"):  # a usage error; typer bundles click or imports it
        from typer.rich_utils import rich_format_error

        variable = getattr(getattr(e, "param", None), "envvar", None)
        if variable and type(e).__name__ == "MissingParameter":
            e.message = f"Give it, or set ${variable}."  # type: ignore[attr-defined]
        current.errors.append(e.format_message())
        rich_format_error(e)  # type: ignore[arg-type]
        return ExitCode.BAD_INPUT
    if isinstance(e, typer.Abort):
        complain(f"not confirmed: {current.if_interrupted()}")
        return ExitCode.FAILED
    if isinstance(e, KVTiersError):
        complain(str(e))
        return ExitCode.BAD_INPUT if isinstance(e, ConfigError) else ExitCode.FAILED
    if isinstance(e, OSError) and e.errno in _OUTPUT_LOST:
        print(f"kvtiers: the output could not be written: {e.strerror}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    # Without the exception's text, which may contain secrets.
    at = traceback.extract_tb(e.__traceback__)[-1]
    where = f"{type(e).__name__} in {os.path.basename(at.filename)}:{at.lineno}"
    complain(f"internal error: {where}; this is a bug in kvtiers, and -v shows the traceback")
    if current.verbosity > 0:
        print("".join(traceback.format_exception(e)), end="", file=sys.stderr)
    return ExitCode.INTERNAL


def _answer_errors() -> None:
    from .output import answer

    try:
        answer(None, ok=False)
        sys.stdout.flush()
    except OSError:
        pass  # the exit code still says it


app = typer.Typer(
    cls=Group,
    help="KV-cache tiers for LLM servers.",
    epilog="Exit codes: "
    + "; ".join(f"{code.value} {text.partition(';')[0]}" for code, text in EXIT_CODES.items() if code <= 2)
    + f"; {ExitCode.INTERRUPTED.value} Ctrl-C. The config argument defaults to $KVTIERS_CONFIG.\n\n"
    "Examples:\n\nkvtiers check kvtiers.yaml --write\n\nkvtiers help du",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version() -> None:
    from ...version import version

    print(f"kvtiers {version()}")


def _show_version(value: bool) -> None:
    if value:
        _print_version()
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[  # noqa: ARG001 - its callback prints
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version, and exit.")
    ] = False,
    verbose: Verbose = 0,
    quiet: Quiet = 0,
    log_level: MinimumLevel = None,
    no_progress: NoProgress = False,
) -> None:
    _common_options(verbose, quiet, log_level, no_progress)


def _in_the_list() -> None:
    """Stands for a command until ``Group.resolve_command`` loads it."""


for _name, _entry in COMMANDS.items():
    app.command(_name, help=_entry.summary)(_in_the_list)


@app.command("help")
def _help(
    context: typer.Context,
    command: Annotated[str | None, typer.Argument(help="The command.", show_default=False)] = None,
) -> None:
    """Show the help of a command, or the list of commands."""
    root = context.find_root()
    words = ["--help"] if command is None else [command, "--help"]
    raise typer.Exit(root.command.main(args=words, prog_name=root.info_name, standalone_mode=False))


@app.command("version")
def _version() -> None:
    """Print the version: the release, and the git commit if it is known."""
    _print_version()


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
