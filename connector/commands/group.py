"""The group of commands: loads a command when it is used, adds the options that all commands have, and ends a run.

A run never ends in a traceback: each exception becomes one line, an exit code and, with ``--json``, a JSON document.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from kvtiers.connector.commands.session import CONFIG_VARIABLE, ExitCode, Session, new_session, session
from kvtiers.tiers.errors import ConfigError, KVTiersError

LogLevel = Literal["debug", "info", "warning", "error"]
_PANEL = "Options of every command"
_OUTPUT_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # of standard output: storage errors arrive as StoreError


def common_options(
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
        from kvtiers.connector.commands.json_schemas import document_schema

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


def _params_of(function: Any) -> list[Any]:
    one = typer.Typer(add_completion=False)
    one.command()(function)
    return get_command(one).params


class Command(TyperCommand):
    """A command with the common options. Its config argument defaults to the environment variable."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for param in self.params:
            if param.name == "config" and param.param_type_name == "argument":
                param.envvar = CONFIG_VARIABLE
        self._has_json = any(param.name == "as_json" for param in self.params)
        self._common = _params_of(common_options)
        self.params += [*(_params_of(_schema_option) if self._has_json else []), *self._common]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Note the command's name and whether it prints JSON before parsing, which may fail."""
        current = session()
        current.command = info_name or ""
        current.as_json = self._has_json and "--json" in args
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Take the common options out of the parameters, and run the command."""
        session().apply({str(param.name): ctx.params.pop(param.name) for param in self._common})
        ctx.params.pop("json_schema", None)
        return super().invoke(ctx)


class LazyCommand(TyperCommand):
    """Stands for a command until it is used. Its module is imported then.

    Args:
        target: ``module:function``.
    """

    def __init__(self, name: str, target: str, summary: str) -> None:
        self._target = target
        self._loaded: Any = None
        super().__init__(name, short_help=summary, help=summary)

    @property
    def params(self) -> list[Any]:
        """The command's parameters. Loads the command."""
        return list(self.load().params)

    @params.setter
    def params(self, value: list[Any]) -> None:
        assert not value  # the base class sets an empty list

    def load(self) -> Any:
        """Import the command."""
        if self._loaded is None:
            module, _, function = self._target.partition(":")
            one = typer.Typer(add_completion=False)
            one.command(self.name, cls=Command)(getattr(importlib.import_module(module), function))
            self._loaded = get_command(one)
        return self._loaded

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Make the loaded command's context."""
        session().command = info_name or ""
        return self.load().make_context(info_name, args, parent, **extra)


class Group(TyperGroup):
    """The commands of ``kvtiers``."""

    #: name -> (``module:function``, one line for the list of commands), in the order of the list
    table: Mapping[str, tuple[str, str]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._common = _params_of(common_options)
        self.params += self._common
        for name, (target, summary) in self.table.items():
            self.add_command(LazyCommand(name, target, summary))

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Typer itself would end silently on Ctrl-C, and with code 1 on a closed pipe."""
        session().apply({str(param.name): ctx.params.pop(param.name) for param in self._common})
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(_interrupted(session())) from None
        except BrokenPipeError:
            raise typer.Exit(ExitCode.BROKEN_PIPE) from None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line. Ends with SystemExit, or returns the exit code if ``standalone_mode`` is False."""
        with new_session() as current:
            try:
                code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra) or ExitCode.OK
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
    from kvtiers.connector.commands.output import complain

    complain(current.command, f"interrupted: {current.if_interrupted()}")
    return ExitCode.INTERRUPTED


def _explained(e: Exception, current: Session) -> ExitCode:
    """Print one line about an exception, and return the exit code."""
    from kvtiers.connector.commands.output import complain

    if hasattr(e, "format_message"):  # a usage error; typer bundles click or imports it
        from typer.rich_utils import rich_format_error

        variable = getattr(getattr(e, "param", None), "envvar", None)
        if variable and type(e).__name__ == "MissingParameter":
            e.message = f"Give it, or set ${variable}."  # type: ignore[attr-defined]
        current.errors.append(e.format_message())
        rich_format_error(e)  # type: ignore[arg-type]
        return ExitCode.BAD_INPUT
    if isinstance(e, typer.Abort):
        complain(current.command, f"not confirmed: {current.if_interrupted()}")
        return ExitCode.FAILED
    if isinstance(e, KVTiersError):
        complain(current.command, str(e))
        return ExitCode.BAD_INPUT if isinstance(e, ConfigError) else ExitCode.FAILED
    if isinstance(e, OSError) and e.errno in _OUTPUT_LOST:
        complain("", f"the output could not be written: {e.strerror}")
        return ExitCode.BAD_INPUT
    # Without the exception's text, which may contain secrets.
    at = traceback.extract_tb(e.__traceback__)[-1]
    where = f"{type(e).__name__} in {os.path.basename(at.filename)}:{at.lineno}"
    complain(current.command, f"internal error: {where}; this is a bug in kvtiers, and -v shows the traceback")
    if current.verbosity > 0:
        print("".join(traceback.format_exception(e)), end="", file=sys.stderr)
    return ExitCode.INTERNAL


def _answer_errors() -> None:
    from kvtiers.connector.commands.output import answer

    try:
        answer(None, ok=False)
        sys.stdout.flush()
    except OSError:
        pass  # the exit code still says it
