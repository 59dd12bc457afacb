"""get_logger: the loggers of this package. No line of theirs holds a character that a terminal would obey.

File names, fields, keys and messages of servers come from others. They end up in log lines as arguments, in exceptions
and in tracebacks. Each of these passes ``tiers.errors.printable`` here, so no caller has to think of it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping

from kvtiers.tiers.errors import printable, printable_lines


class _Printable(logging.Filter):
    """Changes a record; keeps none back. Any thread; holds nothing."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str):
            record.msg = printable(record.msg)
        if isinstance(record.args, Mapping):
            record.args = {name: _plain(value) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple(map(_plain, record.args))
        if record.exc_info and not record.exc_text:
            # What logging.Formatter would make of it; it takes a text that is there.
            text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
            record.exc_text = printable_lines(text)
        return True


def _plain(value: object) -> object:
    """A value as it is, or its text where that is not printable."""
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    shown = printable(text)
    return value if shown == text else shown


_PRINTABLE = _Printable()


def get_logger(name: str) -> logging.Logger:
    """``logging.getLogger``, for a module of this package."""
    logger = logging.getLogger(name)
    logger.addFilter(_PRINTABLE)  # once: a filter that is there is not added again
    return logger
