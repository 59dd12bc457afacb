"""Read a YAML file into plain data. Errors give the line and column, never the file's text: it may hold secrets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.reader import ReaderError

from ..errors import ConfigError

FILE_BYTES_MAX = 1 << 20
_TAG = "tag:yaml.org,2002:"
MERGE_TAG, INT_TAG, FLOAT_TAG, DATE_TAG = (f"{_TAG}{name}" for name in ("merge", "int", "float", "timestamp"))
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
    except RecursionError:
        problem = "it is nested too deeply"
    except (ValueError, LookupError, AttributeError, ArithmeticError, TypeError):
        # Python's own errors: of chr() for an escape, or of text that has a type's tag and is not a value of that type.
        problem = "an escape is not a valid character, or a value does not fit its tag"
    # Raised outside the handlers: those exceptions quote the file, so they must not appear in the traceback.
    raise ConfigError(f"is not valid YAML: {problem}", field=str(path))


class _Loader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys. As in YAML 1.2, dates, 12:00 (720 in YAML 1.1) and 0755 are text."""

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


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (INT_TAG, FLOAT_TAG, DATE_TAG)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in (
    (INT_TAG, r"^[-+]?(?:0|[1-9][0-9]{0,99})$"),
    (FLOAT_TAG, r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list("-+.0123456789"))


def _problem(error: yaml.YAMLError) -> str:
    """The error in one line. PyYAML's own text is not used because it quotes a line of the file."""
    if isinstance(error, ReaderError):
        if error.encoding != "unicode":
            return f"byte {error.position + 1} is not {error.encoding}; save the file as UTF-8"
        return f"character {error.position + 1} is U+{error.character:04X}, which YAML does not allow; save it as UTF-8"
    if not isinstance(error, yaml.MarkedYAMLError):
        return "it cannot be read"
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "a mistake"
    if "\\t" in problem:
        problem = "a line is indented with a tab, which YAML does not allow; use spaces"
    where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
    return _QUOTED.sub(r"\1", problem).rstrip(":") + where
