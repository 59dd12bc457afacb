"""The code blocks of the documentation's pages, and the shell commands in them."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: Written by programs that run what they show.
GENERATED = {"benchmarks.md"}
PAGES = sorted(
    path for path in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")] if path.name not in {*GENERATED, "CHANGELOG.md"}
)
GUIDES = sorted((DOCS / "guides").glob("*.md"))

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^\$ ")
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")


@dataclass(frozen=True, slots=True)
class Snippet:
    """One code block.

    Attributes:
        page: the file that it is in.
        line: where it begins.
        language: "" for a block without one.
        body: its text, without the page's indentation.
    """

    page: Path
    line: int
    language: str
    body: str

    @property
    def title(self) -> str:
        """The comment in its first line: what file it is, or where it belongs."""
        first = self.body.partition("\n")[0]
        return first.removeprefix("#").strip() if first.startswith("#") else ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def snippets(page: Path) -> Iterator[Snippet]:
    """All code blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Snippet(page, line, found["language"], textwrap.dedent(found["body"]))


def of(*languages: str, pages: list[Path] = PAGES) -> list[Snippet]:
    """All code blocks in these languages."""
    return [each for page in pages for each in snippets(page) if each.language in languages]


def commands(script: str) -> Iterator[list[str]]:
    """The words of each command in a shell block. In a block with prompts, lines without a prompt are output."""
    lines = script.replace("\\\n", " ").splitlines()
    if any(map(_PROMPT.match, lines)):
        lines = [line[2:] for line in lines if _PROMPT.match(line)]
    for line in lines:
        for part in (*_SUBSTITUTION.findall(line), _SUBSTITUTION.sub("X", line)):
            yield from _split(part)


def _split(line: str) -> Iterator[list[str]]:
    """Split a line at its operators."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    command: list[str] = []
    for word in [*lexer, ";"]:
        assignment = not command and re.fullmatch(r"\w+=.*", word)
        if set(word) <= set("|&;") and command:
            yield command
            command = []
        elif not assignment:
            command.append(word)
