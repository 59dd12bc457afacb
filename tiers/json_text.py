"""JSON that others may have written."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes | bytearray) -> Any:
    """As ``json.loads``; ValueError also for lists in lists without end, which are a RecursionError there."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
