"""A YAML file as plain data. Mistakes are told by their place, never by the file's text, which may hold secrets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from kvtiers.tiers.errors import ConfigError

FILE_BYTES_MAX = 1 << 20
MERGE_TAG = "tag:yaml.org,2002:merge"
NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")  # a surrogate, which no file name, terminal or JSON takes
_QUOTED = re.compile(r"( alias| tag| handle|:) ['\"].*", re.DOTALL)  # what a message repeats of the file


def read_yaml(path: str | os.PathLike[str]) -> object:
    """What a file says.

    Raises:
        ConfigError: it cannot be read, is larger than ``FILE_BYTES_MAX`` bytes, or is no YAML.
    """
    try:
        with Path(path).open("rb") as f:
            raw = f.read(FILE_BYTES_MAX + 1)
    except OSError as e:
        raise ConfigError(f"cannot be read: {e.strerror}", field=str(path)) from e
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"is larger than {FILE_BYTES_MAX} bytes", field=str(path))
    try:
        return _Loader(raw).get_single_data()
    except yaml.YAMLError as e:
        problem = _problem(e)
    except ValueError as e:  # of what looks like a date or a number, and is none
        problem = f"{_without_quotes(str(e))}; text that looks like a date needs quotes"
    except RecursionError:
        problem = "it is nested too deeply"
    except (LookupError, AttributeError, ArithmeticError):  # PyYAML's for "!!bool maybe" and "\UFFFFFFFF", say
        problem = "a value does not fit its tag, or an escape is no character"
    # Not in the handlers: no traceback shall have those exceptions, which quote the file.
    raise ConfigError(f"is no YAML: {problem}", field=str(path))


class _Loader(yaml.SafeLoader):
    """Refuses what PyYAML passes over."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here and not where dicts are made: by then "<<" has put other mappings' keys before a mapping's own.
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE_TAG:
                continue
            if key.value in lines:
                problem = f"the key {key.value!r} is there twice, first in line {lines[key.value]}"
                raise ComposerError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if _HALF_CHARACTER.search(node.value):
            raise ComposerError(None, None, "an escape is half a character", node.start_mark)
        if node.tag in NUMBER_TAGS and ":" in node.value:
            node.tag = "tag:yaml.org,2002:str"  # to the base 60, 12:00 would be 720: what takes a number refuses it
        return node


def _problem(error: yaml.YAMLError) -> str:
    """One line; PyYAML's own text has the line of the file in it."""
    if not isinstance(error, yaml.MarkedYAMLError):  # of bytes that are no text
        return str(error).partition("\n")[0]
    mark = error.problem_mark or error.context_mark
    where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
    return f"{_without_quotes(error.problem or error.context or 'a mistake')}{where}"


def _without_quotes(text: str) -> str:
    return _QUOTED.sub(r"\1", text).rstrip(":")
