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
    errors.KVTiersError: "Catch this class to catch everything that kvtiers raises on purpose.",
    errors.ConfigError: "Correct the named field. `kvtiers check FILE` lists all mistakes of a file at once.",
    errors.NamespaceMismatchError: (
        "Choose another root, or delete the namespace's folder if nothing else uses it "
        "([the engine does not start](troubleshooting.md#the-engine-does-not-start))."
    ),
    errors.SealError: (
        "Nothing: the block is a miss, and the next store replaces it. If the rate is steady, see "
        "[blocks fail verification](troubleshooting.md#blocks-fail-verification)."
    ),
    errors.QueueFullError: (
        "Nothing, if it is rare: the store is dropped and counted. Otherwise see "
        "[stores are dropped](troubleshooting.md#stores-are-dropped)."
    ),
    errors.RegionError: (
        "Usually a smaller `region.size` or a larger `/dev/shm` "
        "([the engine does not start](troubleshooting.md#the-engine-does-not-start))."
    ),
    errors.StoreError: "Catch this class in code that calls a store. `key` is the key of the failed call.",
    errors.BlobNotFoundError: "Nothing: it is a miss.",
    errors.BlobCorruptError: "Nothing: it is a miss. `kvtiers verify` lists such blobs.",
    errors.InvalidKeyError: "Correct the calling code. `kvtiers.check_key` says which keys are valid.",
    errors.StoreClosedError: "Nothing while an engine stops. In your own code, do not call a store after `close`.",
    errors.StoreFullError: (
        "Free space, raise `max_bytes`, or lower `min_free`. Loads go on "
        "([the disk fills up](troubleshooting.md#the-disk-fills-up))."
    ),
    errors.StorePermissionError: (
        "Correct credentials, file modes or mount options. `kvtiers check CONFIG --write` tests each right; "
        "[security](security.md#s3) lists the rights that S3 needs."
    ),
    errors.StoreConfigError: (
        "Correct the place or the option that the message names. `kvtiers check` reports the same."
    ),
    errors.StoreUnavailableError: (
        "Nothing at first: after three failures in a row the tier is cut off, and it comes back by itself "
        "([a tier is cut off](troubleshooting.md#a-tier-is-cut-off))."
    ),
    errors.StoreThrottledError: (
        "As for `StoreUnavailableError`. If it persists, use fewer threads or larger blocks (`blocks_per_chunk`)."
    ),
    errors.StoreTimeoutError: (
        "As for `StoreUnavailableError`. If it persists, the storage is too slow for the tier's deadlines "
        "([lookups are late](troubleshooting.md#lookups-are-late))."
    ),
}

HEAD = """\
# Errors

Errors that kvtiers raises on purpose are subclasses of `KVTiersError`. Inside an engine, an error of a tier never
reaches a request: the blocks concerned are misses, and the error is logged and counted. This page is for what stops an
engine or a command at its start, and for code that uses kvtiers. `make docs` writes it from the classes.

All classes are in `kvtiers.tiers.errors`, and those that stores and their users need can be imported from `kvtiers`.
*Retryable* means that the same call may succeed if it is repeated soon; it is the attribute `retryable` of every
`StoreError`.

"""
TAIL = """
An error of a store says which key the call was for. A message never shows credentials, keys, or the login and query of
a URL. Metrics count errors by class: `kvtiers_store_errors_total{error="StoreTimeoutError"}`
([metrics](metrics.md#what-the-engine-counts)).
"""


def tree(base: ErrorClass = errors.KVTiersError, depth: int = 0) -> Iterator[tuple[int, ErrorClass]]:
    """The public classes below ``base``, each with its depth. Subclasses in other modules are private."""
    yield depth, base
    for child in base.__subclasses__():
        if child.__module__ == errors.KVTiersError.__module__:
            yield from tree(child, depth + 1)


def page() -> str:
    """docs/errors.md."""
    classes = list(tree())
    lines = ["```text", *(f"{'    ' * depth}{error.__name__}" for depth, error in classes), "```", ""]
    lines += ["| error | when | retryable | what to do |", "| --- | --- | --- | --- |"]
    for _, error in classes:
        when = (inspect.getdoc(error) or "").partition("\n")[0].replace("``", "`")
        retryable = ("yes" if error.retryable else "no") if issubclass(error, errors.StoreError) else ""
        lines.append(f"| `{error.__name__}` | {when} | {retryable} | {ADVICE[error]} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


def main() -> None:
    """Write it."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
