"""Read a YAML file into plain data. Errors give the line and column, never the file's text: it may hold secrets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError
from yaml.scanner import ScannerError

from ..errors import ConfigError

FILE_BYTES_MAX = 1 << 20
NODES_MAX = 10_000  # an alias counts as all values that it repeats: a few hundred bytes may expand to billions
DEPTH_MAX = 32
MERGE_TAG = "tag:yaml.org,2002:merge"
NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_NOT_VALID = {
    "tag:yaml.org,2002:timestamp": "a text that looks like a date is not a valid date; put it in quotes",
    "tag:yaml.org,2002:int": "a text that looks like a number is not a valid number, or is too long; put it in quotes",
    "tag:yaml.org,2002:float": "a text that looks like a number is not a valid number; put it in quotes",
}
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
    # Raised outside the handlers: those exceptions quote the file, so they must not appear in the traceback.
    raise ConfigError(f"is not valid YAML: {problem}", field=str(path))


class _Loader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys and unpaired surrogates, and reads 12:00 as text.

    It counts values and their depth before it builds any, and raises only YAMLErrors, each with its place.
    """

    def __init__(self, raw: bytes) -> None:
        super().__init__(raw)
        self._nodes = 0
        self._depth = self._deepest = 0
        self._sizes: dict[str, tuple[int, int]] = {}  # anchor -> its value's nodes and depth, once it is complete

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        nodes, deepest = self._nodes, self._deepest
        self._depth += 1
        self._deepest = self._depth
        self._nodes += 1
        if isinstance(event, yaml.AliasEvent) and event.anchor in self.anchors:
            if event.anchor not in self._sizes:
                raise ComposerError(None, None, "an alias repeats the value that contains it", mark)
            size, depth = self._sizes[event.anchor]
            self._nodes += size - 1
            self._deepest += depth - 1
        if self._nodes > NODES_MAX:
            problem = f"it has more than {NODES_MAX:,} values, counting each alias as the values that it repeats"
            raise ComposerError(None, None, problem, mark)
        if self._deepest > DEPTH_MAX:
            raise ComposerError(None, None, "it is nested too deeply", mark)
        node = super().compose_node(parent, index)
        if not isinstance(event, yaml.AliasEvent) and event.anchor is not None:
            self._sizes[event.anchor] = (self._nodes - nodes, self._deepest - self._depth + 1)
        self._depth -= 1
        self._deepest = max(deepest, self._deepest)
        return node

    def scan_flow_scalar_non_spaces(self, double: Any, start_mark: Any) -> Any:
        try:
            return super().scan_flow_scalar_non_spaces(double, start_mark)
        except (ValueError, OverflowError):  # of chr()
            raise ScannerError(None, None, "an escape is not a valid character", self.get_mark()) from None

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError, TypeError):
            # Python's own errors: the text matches a type's pattern or has its tag, but is not a valid value.
            problem = _NOT_VALID.get(node.tag, "a value does not fit its tag")
            raise ConstructorError(None, None, problem, node.start_mark) from None

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
    return f"{_without_quotes(problem)}{where}"


def _without_quotes(text: str) -> str:
    return _QUOTED.sub(r"\1", text).rstrip(":")
