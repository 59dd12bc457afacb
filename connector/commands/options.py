"""Arguments and options that several commands share. ``group`` adds those of every command."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtiers.tiers.config.values import parse_size
from kvtiers.tiers.errors import ConfigError

Config = Annotated[
    str,
    typer.Argument(
        help="YAML file of the deployment. Or only the storage: a folder, s3://bucket/prefix, or another URL (fsspec).",
        show_default=False,
    ),
]
TierName = Annotated[str | None, typer.Option("--tier", help="Only the tier of this name.")]
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
