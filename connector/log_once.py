"""Logs a text only once per process."""

from __future__ import annotations

import logging
from functools import cache


@cache
def log_once(logger: logging.Logger, level: int, text: str) -> None:
    """Log a text, but only once in this process."""
    logger.log(level, "%s", text)
