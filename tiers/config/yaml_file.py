"""Read a YAML file into plain data. Errors give the line and column, never the file's text: it may hold secrets."""

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
_HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")  # invalid in file names, terminals and JSON
_QUOTED = re.compile(r"( alias| tag| handle|:) ['\"].*", re.DOTALL)  # where PyYAML's messages quote the file


def read_yaml(path: str | os.PathLike[str]) -> object:
    """Read a file.

    Raises:
        ConfigError: the file cannot be read, is larger than ``FILE_BYTES_MAX`` bytes, or is not valid YAML.
    """
    try:
        with Path(path).open("rb") as f:
            raw = f.read(FILE_BYTES_MAX + 1)
    except IsADirectoryError as e:
        raise ConfigError("is a folder; give a deployment's YAML file", field=str(path)) from e
    except OSError as e:
        raise ConfigError(f"cannot be read: {e.strerror}", field=str(path)) from e
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"is larger than {FILE_BYTES_MAX} bytes", field=str(path))
    try:
        return _Loader(raw).get_single_data()
    except yaml.YAMLError as e:
        problem = _problem(e)
    except ValueError as e:  # text that looks like a date or a number, but is not a valid one
        problem = f"{_without_quotes(str(e))}; text that looks like a date needs quotes"
    except RecursionError:
        problem = "it is nested too deeply"
    except (LookupError, AttributeError, ArithmeticError):  # PyYAML raises these for "!!bool maybe" or "\UFFFFFFFF"
        problem = "a value does not fit its tag, or an escape is not a valid character"
    # Raised outside the handlers: those exceptions quote the file, so they must not appear in the traceback.
    raise ConfigError(f"is not valid YAML: {problem}", field=str(path))


class _Loader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys and unpaired surrogates, and reads 12:00 as text."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked here, not when dicts are built: by then "<<" has merged other mappings' keys in.
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE_TAG:
                continue
            if key.value in lines:
                problem = f"the key {key.value!r} occurs twice, first in line {lines[key.value]}"
                raise ComposerError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if _HALF_CHARACTER.search(node.value):
            raise ComposerError(None, None, "an escape is an unpaired surrogate", node.start_mark)
        if node.tag in NUMBER_TAGS and ":" in node.value:
            node.tag = "tag:yaml.org,2002:str"  # base 60 would make 12:00 the number 720; number fields reject the text
        return node


def _problem(error: yaml.YAMLError) -> str:
    """The error in one line. PyYAML's own text is not used because it quotes a line of the file."""
    if not isinstance(error, yaml.MarkedYAMLError):  # the bytes are not valid text
        return str(error).partition("\n")[0]
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "a mistake"
    if "\\t" in problem:
        problem = "a line is indented with a tab, which YAML does not allow; use spaces"
    where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
    return f"{_without_quotes(problem)}{where}"


def _without_quotes(text: str) -> str:
    return _QUOTED.sub(r"\1", text).rstrip(":")
