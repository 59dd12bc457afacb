"""The version of this copy of kvtiers: its release and, where that is known, the git commit that it was made from.

Uses only the standard library and no other module of kvtiers, because hatchling runs this file to name a wheel.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

RELEASE = "0.1.0"
COMMIT_DIGITS = 10
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_ROOT = Path(__file__).resolve().parents[1]


def built_version(root: Path = _ROOT) -> str:
    """The version of a checkout, such as ``0.1.0+g1a2b3c4d5e``; without git's files only ``0.1.0``."""
    commit = _head_commit(root / ".git")
    return f"{RELEASE}+g{commit[:COMMIT_DIGITS]}" if commit else RELEASE


@cache
def version() -> str:
    """The version of the running code: of the checkout that it is in, or else as recorded in its wheel."""
    found = built_version()
    return _installed_version() or found if found == RELEASE else found


def _head_commit(git: Path) -> str:
    """The commit that is checked out; "" if git's files do not say.

    Read without the program ``git``: a container may lack it, and an engine should start no process for this.
    """
    try:
        if git.is_file():  # a worktree or submodule: it names its folder
            git = git.parent / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if _COMMIT.fullmatch(head):
            return head
        name = head.removeprefix("ref:").strip()
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
        if (shared / name).is_file():
            return (shared / name).read_text().strip()
        lines = (shared / "packed-refs").read_text().splitlines()
        return next((line.partition(" ")[0] for line in lines if line.endswith(f" {name}")), "")
    except (OSError, ValueError):
        return ""


def _installed_version() -> str:
    """The version in the metadata of the package that this file was installed with; "" if there is none."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import

    try:
        installed = distribution("kvtiers")
    except PackageNotFoundError:
        return ""
    is_this = Path(str(installed.locate_file("kvtiers/version.py"))).resolve() == Path(__file__).resolve()
    return installed.version if is_this else ""
