"""What stands below a folder while writers are at work in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: str | Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every file below a folder, with its status. What is removed during the walk is left out."""
    # Not Path.rglob: it raises where a folder is removed.
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            yield path, status
