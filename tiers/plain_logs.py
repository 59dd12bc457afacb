"""get_logger: the package's loggers, whose log lines contain no characters that a terminal acts on.

File names, fields, keys and server messages come from outside, and reach log lines as arguments, in exceptions and in
tracebacks. This module passes all of these through ``tiers.errors.printable``, so callers need not do it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from functools import cache

from .errors import printable, printable_lines


class _Printable(logging.Filter):
    """Makes records printable and rejects none of them. Has no state; any thread may use it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str):
            record.msg = printable(record.msg)
        if isinstance(record.args, Mapping):
            record.args = {name: _plain(value) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple(map(_plain, record.args))
        if record.exc_info and not record.exc_text:
            # The same text as logging.Formatter's, which uses exc_text if it is already set.
            text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
            record.exc_text = printable_lines(text)
        return True


def _plain(value: object) -> object:
    """A value unchanged, or its printable text if its own text is not printable."""
    if value is None or isinstance(value, int | float):
        return value
    try:
        text = str(value)
    except Exception as e:  # noqa: BLE001 - a library's exception may have no text; a log line must not raise
        return f"<{type(value).__name__}, whose text cannot be read: {type(e).__name__}>"
    shown = printable(text)
    return value if shown == text else shown


_PRINTABLE = _Printable()


def get_logger(name: str) -> logging.Logger:
    """Like ``logging.getLogger``, for a module of this package."""
    logger = logging.getLogger(name)
    logger.addFilter(_PRINTABLE)  # a repeated call does not add the filter again
    return logger


@cache
def log_once(logger: logging.Logger, level: int, text: str) -> None:
    """Log a text, but only once in this process."""
    logger.log(level, "%s", text)
