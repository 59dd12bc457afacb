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
        help="YAML file of the deployment. Or only the storage: a folder, s3://bucket/prefix, or another URL (fsspec).",
        show_default=False,
    ),
]
YamlFile = Annotated[Path, typer.Argument(help="The YAML file.", show_default=False)]
TierName = Annotated[str | None, typer.Option("--tier", help="Only the tier of this name.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")]
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
