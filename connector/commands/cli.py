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
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ... import __version__
from ...tiers.errors import ConfigError, KVTiersError
from .session import CONFIG_VARIABLE, EXIT_CODES, ExitCode, Session, new_session, session

_HERE = "kvtiers.connector.commands"
#: Name -> (``module:function``, one line for the list of commands). The modules are imported when a command is used,
#: so that --version, --help and completion start quickly.
COMMANDS = {
    "check": (f"{_HERE}.check:check", "Check a deployment on this machine, with a fix for each problem."),
    "vllm-config": (f"{_HERE}.deployment:vllm_config", "Print vLLM's --kv-transfer-config for a deployment."),
    "ls": (f"{_HERE}.storage:ls", "List the stored blocks."),
    "du": (f"{_HERE}.storage:du", "Show the number and size of stored blocks, by namespace and age."),
    "show": (f"{_HERE}.show:show", "Show a block (seal, size, age) or a namespace (identity, siblings)."),
    "verify": (f"{_HERE}.verify:verify", "Check that stored blocks are complete and unchanged; repair."),
    "gc": (f"{_HERE}.collect:gc", "Remove blocks past their ttl and above max_bytes."),
    "rm": (f"{_HERE}.remove:rm", "Remove namespaces, or all namespaces of a model."),
    "copy": (f"{_HERE}.copy:copy", "Copy blocks from one tier to another."),
    "explain": (f"{_HERE}.explain:explain", "Say why requests were not loaded, or not further."),
    "bench": (f"{_HERE}.bench:bench", "Measure the speed of each hop of a deployment on this machine."),
    "demo": (f"{_HERE}.deployment:demo", "Answer a long prompt in two processes; the second loads its KV cache."),
}  # fmt: skip
#: Commands of earlier versions -> what to type instead.
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
_OUTPUT_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # of standard output: storage errors arrive as StoreError


def _common_options(
    verbose: Annotated[
        int,
        typer.Option(
            "-v", "--verbose", count=True, show_default=False, rich_help_panel=_PANEL,
            help="Show info log lines, and the traceback of a bug; -vv: debug log lines.",
        ),
    ] = 0,
    quiet: Annotated[
        int,
        typer.Option(
            "-q", "--quiet", count=True, show_default=False, rich_help_panel=_PANEL,
            help="Show only results and errors: no notes, warnings or progress.",
        ),
    ] = 0,
    log_level: Annotated[
        LogLevel | None, typer.Option(help="Show log lines from this level on.", rich_help_panel=_PANEL)
    ] = None,
    no_progress: Annotated[
        bool,
        typer.Option(
            "--no-progress", rich_help_panel=_PANEL,
            help="Show no progress. It is shown after 2 s, if stderr is a terminal.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Only its parameters are used."""


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


def _command_of(function: Any) -> Any:
    one = typer.Typer(add_completion=False)
    one.command()(function)
    return get_command(one)


def load_command(name: str) -> Any:
    """Import a command, with the common options. Its config argument defaults to the environment variable."""
    module, _, function = COMMANDS[name][0].partition(":")
    command = _command_of(getattr(importlib.import_module(module), function))
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
        session().apply({str(param.name): options.pop(param.name) for param in common})
        options.pop("json_schema", None)
        return run(**options)

    command.callback = run_with_common_options
    return command


class Group(TyperGroup):
    """The commands of ``kvtiers``. Until a command is used, it has only a name and a summary."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._common = _command_of(_common_options).params
        self.params += self._common
        for name, (_, summary) in COMMANDS.items():
            self.add_command(TyperCommand(name, short_help=summary, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load the command. Note its name and whether it prints JSON before its options are parsed, which may fail."""
        current = session()
        current.command, current.as_json = args[0], "--json" in args
        if args[0] in MOVED:
            from .output import refuse

            raise refuse(MOVED[args[0]])
        name, _, rest = super().resolve_command(ctx, args)
        command = load_command(str(name))
        current.as_json &= any(param.name == "as_json" for param in command.params)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Typer itself would end silently on Ctrl-C, and with code 1 on a closed pipe."""
        session().apply({str(param.name): ctx.params.pop(param.name) for param in self._common})
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(_interrupted(session())) from None
        except BrokenPipeError:
            raise typer.Exit(ExitCode.BROKEN_PIPE) from None

    def main(self, *, standalone_mode: bool = True, **options: Any) -> Any:  # type: ignore[override]
        """Run the command line. Ends with SystemExit, or returns the exit code if ``standalone_mode`` is False."""
        with new_session() as current:
            try:
                code = super().main(standalone_mode=False, **options) or ExitCode.OK
                sys.stdout.flush()  # here, because an error of the output is reported here
            except SystemExit as e:  # a signal, or the shell's completion
                code = e.code
            except KeyboardInterrupt:
                code = _interrupted(current)
            except BrokenPipeError:
                code = ExitCode.BROKEN_PIPE
            except Exception as e:  # noqa: BLE001 - the program's edge
                code = _explained(e, current)
            if code and current.as_json and not current.has_answered and code != ExitCode.BROKEN_PIPE:
                _answer_errors()
        if standalone_mode:
            sys.exit(code)
        return code


def _interrupted(current: Session) -> ExitCode:
    from .output import complain

    complain(f"interrupted: {current.if_interrupted()}")
    return ExitCode.INTERRUPTED


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
