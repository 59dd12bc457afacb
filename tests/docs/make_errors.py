"""Writes docs/errors.md from the exceptions in ``kvtiers.tiers.errors``: ``make docs``. A test fails if it is outdated.

A class's docstring says when it is raised. What an operator does about it is below, for each class.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from kvtiers.tiers import errors

ErrorClass = type[errors.KVTiersError]

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"

#: Class -> what to do, in Markdown.
ADVICE: dict[ErrorClass, str] = {
    errors.KVTiersError: "Catch it to catch all of them.",
    errors.ConfigError: "Correct the named field. `kvtiers check FILE` lists all mistakes.",
    errors.NamespaceMismatchError: "[The engine does not start](troubleshooting.md#the-engine-does-not-start).",
    errors.SealError: "Nothing: a miss. If steady: [verification](troubleshooting.md#blocks-fail-verification).",
    errors.QueueFullError: "Nothing if rare. Otherwise: [stores are dropped](troubleshooting.md#stores-are-dropped).",
    errors.RegionError: "Lower `region.size`, or enlarge `/dev/shm`.",
    errors.StoreError: "Catch it in code that calls a store. `key` is the call's key.",
    errors.BlobNotFoundError: "Nothing: a miss.",
    errors.BlobCorruptError: "Nothing: a miss. `kvtiers verify` lists such blobs.",
    errors.InvalidKeyError: "Correct the calling code.",
    errors.StoreClosedError: "Do not call a store after `close`.",
    errors.StoreFullError: "[The disk fills up](troubleshooting.md#the-disk-fills-up).",
    errors.StorePermissionError: "Correct credentials, modes or mount options. See `kvtiers check CONFIG --write`.",
    errors.StoreConfigError: "Correct the option that the message names.",
    errors.StoreUnavailableError: "Nothing at first. Later: [a tier is cut off](troubleshooting.md#a-tier-is-cut-off).",
    errors.StoreThrottledError: "The same. Or use fewer threads, or a larger `blocks_per_chunk`.",
    errors.StoreTimeoutError: "The same. Or: [lookups are late](troubleshooting.md#lookups-are-late).",
}

HEAD = """\
# Errors

This page lists the errors that kvtiers raises on purpose: they stop an engine's start or a command, or reach code that
uses kvtiers. `make docs` writes the page from the classes in `kvtiers.tiers.errors`. While an engine runs, a tier's
error never reaches a request: the blocks are misses, and the error is logged and counted
([`kvtiers_store_errors_total`](metrics.md#what-the-engine-counts)).

A message never shows credentials, keys, or a URL's login and query.

"""
STORE_HEAD = """\
## Errors of a store

All are subclasses of `StoreError`. The same call may succeed soon after {retryable} (`retryable` is true).
"""


def public_errors(base: ErrorClass = errors.KVTiersError) -> Iterator[ErrorClass]:
    """The class and its public subclasses. Subclasses in other modules are private."""
    yield base
    for child in base.__subclasses__():
        if child.__module__ == errors.KVTiersError.__module__:
            yield from public_errors(child)


def page() -> str:
    """docs/errors.md."""
    lines = ["| error | when | what to do |", "| --- | --- | --- |"]
    lines += [_row(error) for error in public_errors() if not issubclass(error, errors.StoreError)]
    of_stores = list(public_errors(errors.StoreError))
    *some, last = (f"`{error.__name__}`" for error in of_stores if getattr(error, "retryable", False))
    lines += ["", STORE_HEAD.format(retryable=f"{', '.join(some)} and {last}"), *lines[:2], *map(_row, of_stores)]
    return HEAD + "\n".join(lines) + "\n"


def _row(error: ErrorClass) -> str:
    return f"| `{error.__name__}` | {_when(error)} | {ADVICE[error]} |"


def _when(error: ErrorClass) -> str:
    return (inspect.getdoc(error) or "").partition("\n")[0].replace("``", "`")


def main() -> None:
    """Write it."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
