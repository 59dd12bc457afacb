"""The content of the file that identifies a namespace (``config.json``)."""

from __future__ import annotations

import json
from typing import Any

from ..errors import ConfigError, NamespaceMismatchError, printable

CONFIG_BYTES_MAX = 1 << 20
SHOWN_MAX = 200  # characters of a stored value in an error message


def compare_fields(found: bytes, fields: dict[str, Any], path: str) -> None:
    """Compare the content of a namespace's file with the fields that this process would write.

    Raises:
        NamespaceMismatchError: names the first field that differs.
        ConfigError: the content is not a namespace's fields.
    """
    try:
        there = parse_json(found)
    except ValueError as e:
        raise ConfigError(
            f"is torn or foreign ({e}); if nothing else uses this folder, delete it and start again",
            field=path,
        ) from e
    if not isinstance(there, dict):
        raise ConfigError("is foreign: accepted is a JSON object of the namespace's fields", field=path)
    for field in sorted(there.keys() | fields.keys()):
        if there.get(field) != fields.get(field):
            raise NamespaceMismatchError(
                f"{path} says {_shortened(repr(there.get(field)))}, this process would write {fields.get(field)!r}; "
                "use another root, or delete the folder if nothing else uses it",
                field=_shortened(printable(field)),
            )


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 1]}…"


def parse_json(text: str | bytes | bytearray) -> Any:
    """Like ``json.loads``, for text from outside.

    Raises:
        ValueError: also for text that is nested too deeply, for which ``json.loads`` raises RecursionError.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
