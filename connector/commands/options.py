"""Arguments and options that several commands share. ``cli`` adds those of every command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...tiers.config.values import parse_size
from ...tiers.errors import ConfigError

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="The deployment's YAML file. Or its storage alone: a folder, s3://bucket/prefix or another URL (fsspec).",
        show_default=False,
    ),
]
YamlFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The deployment's YAML file.", show_default=False)]
TierName = Annotated[str | None, typer.Option("--tier", metavar="NAME", help="Work on this tier only. Default: all.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be done, and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def size_option(option: str, text: str) -> int:
    """Parse the size that an option was given, in bytes.

    Raises:
        ConfigError: it is not a size.
    """
    try:
        return parse_size(text)
    except ValueError as e:
        raise ConfigError(f"{text!r} {e}", field=option) from e
