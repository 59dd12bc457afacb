"""Results of ``kvtiers check``: one Finding for each check, with a fix for each problem."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from ...tiers.config.tier_options import ExternalTierConfig, FsTierConfig, NfsTierConfig, S3TierConfig, TierConfig
from ...tiers.errors import (
    ConfigError,
    KVTiersError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from ...tiers.stores.fsspec_driver import OptionsError

Level = Literal["ok", "note", "warning", "problem"]
_REMOTE = "check that the server is up, and that this machine can reach it"
#: Tier type -> fix if its storage does not answer.
_FIX_OF_SILENCE = {
    "fs": "check that the disk or mount answers (ls, dmesg)",
    "nfs": "check that the server is up and that the mount does not hang",
    "s3": _REMOTE,
    "fsspec": _REMOTE,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        level: a note is worth knowing, a warning is worth fixing, and a problem must be fixed: it stops the engine, or
            its blocks are lost, not stored or not safe.
        check: the option at fault, or the name of the check in a word or two.
        message: the result.
        fix: how to fix it; "": no fix is needed.
        part: ``host``, ``engine``, ``config``, ``--model`` or ``tiers[0] fs``; ``check.examine`` sets it.
    """

    level: Level
    check: str
    message: str
    fix: str = ""
    part: str = ""

    def at(self, part: str) -> Finding:
        """The same finding of a part of the deployment."""
        return replace(self, part=part)

    @property
    def place(self) -> str:
        """The option's path or the tier at fault, in the short form of the verdict."""
        if self.check in ("/dev/shm", "memory"):
            return "region.size"
        if self.part == "--model":
            return self.part
        if not self.part.startswith("tiers"):
            return self.check
        tier = self.part.partition(" ")[0]
        return tier if self.check in ("storage", "mount options") else f"{tier}.{self.check}"


def of_text(level: Level, check: str, text: str, fix: str = "") -> Finding:
    """Make a Finding from an error's message: in kvtiers' errors, the fix follows the last semicolon."""
    message, found, last = text.rpartition("; ")
    return Finding(level, check, message, last) if found else Finding(level, check, text, fix)


def no_answer(config: TierConfig | ExternalTierConfig, seconds: float) -> Finding:
    """Make the Finding for storage that does not answer in time."""
    fix = _FIX_OF_SILENCE.get(config.type, "check that its storage answers")
    return Finding("problem", "storage", f"no answer within {seconds:g} s", fix)


def of_error(error: Exception, config: TierConfig | None = None, field: str = "") -> Finding:
    """Turn an error into a problem with a fix.

    Only the error knows its cause, so the fix comes from its message. ``_fix_of`` adds a fix that holds for any cause.
    """
    if isinstance(error, ConfigError):
        return of_text("problem", error.field or field or "storage", error.message, "correct this option")
    if isinstance(error, OptionsError):
        field = "storage_options"
    text = str(error) if isinstance(error, KVTiersError) else f"cannot be accessed: {getattr(error, 'strerror', error)}"
    if isinstance(error, StoreError):
        text = text.removesuffix(f" (key {error.key!r})")  # of a blob that the check made up
    return of_text("problem", field or "storage", text, _fix_of(config, error))


def _fix_of(config: TierConfig | None, error: Exception) -> str:
    is_folder = isinstance(config, FsTierConfig | NfsTierConfig)
    if isinstance(error, StoreFullError):
        return "make room, or lower min_free" if is_folder else "make room in the storage"
    if isinstance(config, FsTierConfig | NfsTierConfig) and isinstance(error, StorePermissionError | PermissionError):
        rights = "read" if config.read_only else "read and write"
        return f"give uid {os.getuid()} the right to {rights} {config.root_dir}"
    if isinstance(error, StorePermissionError):
        if isinstance(config, S3TierConfig):
            return "docs/security.md has a policy with the required rights"
        return "give these credentials the right to read, write, list and delete"
    if config is not None and isinstance(error, StoreUnavailableError | StoreTimeoutError):
        return _FIX_OF_SILENCE.get(config.type, "")
    return ""
