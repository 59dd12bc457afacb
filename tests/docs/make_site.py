"""Gathers the pages of the documentation site: ``python -m tests.docs.make_site``; ``make site`` then builds it.

The pages in docs/ link to files beside docs/ (configs/, ARCHITECTURE.md, …), as readers of the repository need it. A
site has one folder of pages. So this copies the pages to ``build/site-pages`` and rewrites the links that lead out of
docs/:

- README.md, ARCHITECTURE.md, CONTRIBUTING.md, CHANGELOG.md and SECURITY.md become pages.
- configs/ becomes one page that shows each file.
- connector/vllm/uncounted.py becomes a page with a table of the options of vLLM that do not count.
- Any other file is copied as it is, so that a link downloads it.

The page of the Python API exists only in the site, where its docstrings are filled in.

Runs in the site's own virtual environment, so it imports the standard library and ``kvtiers`` alone.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import kvtiers

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIGS = ROOT / "configs"
PAGES = ROOT / "build" / "site-pages"
SITE = ROOT / "build" / "docs"

#: File in the repository -> page of the site. What is in docs/ keeps its name.
MOVED = {
    "README.md": "index.md",
    "SECURITY.md": "security-policy.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "configs": "configs.md",
    "connector/vllm/uncounted.py": "uncounted.md",
}
FOREIGN = re.compile(r"(https?:)?//")
INERT_RELATIONS = ("canonical", "prev", "next", "alternate")  # of <link>: a browser loads nothing for them
LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)#\s]+)(?P<after>#[^)\s]*)?\)")

#: Heading of the API page -> the names below it.
API: dict[str, Sequence[str]] = {
    "Configuration": ("load_config", "parse_config"),
    "Stores": ("Store", "KeyInfo", "Capabilities", "check_key", "fill_parts", "parts_size", "client_errors"),
    "Tiers": (
        "SecondaryTierManager",
        "PollingTierManager",
        "SecondaryTierFactory",
        "JobMetadata",
        "JobResult",
        "ReqContext",
        "OffloadingEvent",
    ),
    "Keys and names": (
        "OffloadKey",
        "make_offload_key",
        "get_offload_block_hash",
        "get_offload_group_idx",
        "hash_blocks",
        "FileMapper",
    ),
    "Errors": (
        "KVTiersError",
        "ConfigError",
        "StoreError",
        "BlobNotFoundError",
        "BlobCorruptError",
        "InvalidKeyError",
        "StoreClosedError",
        "StoreFullError",
        "StorePermissionError",
        "StoreConfigError",
        "StoreUnavailableError",
        "StoreThrottledError",
        "StoreTimeoutError",
    ),
}
OPTIONAL_PROTOCOLS = (
    "SupportsTail",
    "SupportsPieces",
)
TEST_KIT = ("contract.StoreContract", "machine.run_store_machine")

API_HEAD = """\
# Python API

Everything is imported from `kvtiers`, for example `from kvtiers import Store, load_config`. The optional protocols of a
store are in `kvtiers.tiers.store`, and the contract suite is in `kvtiers.tiers.testing`.
"""


def api() -> str:
    """The page of the Python API, as directives that mkdocstrings fills in."""
    listed = {name for names in API.values() for name in names}
    if listed != set(kvtiers.__all__) - {"__version__"}:
        raise SystemExit(f"API in {__file__} and kvtiers.__all__ differ: {listed ^ set(kvtiers.__all__)}")
    sections = {title: [f"kvtiers.{name}" for name in names] for title, names in API.items()}
    sections["Optional protocols of a store"] = [f"kvtiers.tiers.store.{name}" for name in OPTIONAL_PROTOCOLS]
    sections["Tests for a store"] = [f"kvtiers.tiers.testing.{name}" for name in TEST_KIT]
    parts = [API_HEAD]
    for title, names in sections.items():
        parts += [f"## {title}\n", *(f"::: {name}\n" for name in names)]
    return "\n".join(parts)


def configs() -> str:
    """The page that shows every example configuration."""
    parts = [
        "# Example configurations\n\nOne commented file for each kind of deployment. "
        "[configuration.md](configuration.md) lists every key.\n"
    ]
    for path in sorted(CONFIGS.glob("*.yaml")):
        parts.append(f"## {path.name}\n\n```yaml\n{path.read_text(encoding='utf-8')}```\n")
    return "\n".join(parts)


def uncounted() -> str:
    """The page of vLLM's options that are not part of a namespace."""
    tables = runpy.run_path(str(ROOT / "connector/vllm/uncounted.py"))  # its package needs vLLM
    parts = [
        "# Options of vLLM that do not count\n\nThese options and variables are not part of a namespace: "
        "engines that differ in them [share blocks](sharing.md). Everything else counts.\n"
    ]
    for title, reasons in tables["IGNORED"].items():
        parts.append(_reasons(f"`{title}`", reasons, prefix=""))
    parts.append(_reasons("Environment variables", tables["IGNORED_VARIABLES"], prefix="VLLM_"))
    return "\n".join(parts)


def _reasons(title: str, reasons: Mapping[str, str], prefix: str) -> str:
    rows = [
        f"| {why} | {'all' if names == '*' else ', '.join(f'`{prefix}{name}`' for name in names.split())} |\n"
        for why, names in reasons.items()
    ]
    return "".join([f"## {title}\n\n| why | options |\n|---|---|\n", *rows])


def place(path: PurePosixPath) -> tuple[PurePosixPath, str]:
    """Where a file of the repository is in the site, and the heading on that page ("" for its top).

    Args:
        path: relative to the repository.
    """
    if path.parts[0] == "docs":
        return path.relative_to("docs"), ""
    if path.parent == PurePosixPath("configs") and path.suffix == ".yaml":
        return PurePosixPath("configs.md"), f"#{path.name.replace('.', '')}"
    return PurePosixPath(MOVED.get(str(path), str(path))), ""


def with_links(text: str, page: PurePosixPath) -> str:
    """A page's text with the links as the site needs them.

    Args:
        text: in Markdown.
        page: its path in the repository.
    """
    here = place(page)[0].parent

    def rewritten(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["after"] or ""
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        file = PurePosixPath(os.path.normpath(page.parent / target))
        there, top = place(file)
        return f"{link['before']}{os.path.relpath(there, here)}{anchor or top})"

    return LINK.sub(rewritten, text)


def with_deep_lists(text: str) -> str:
    """A page's text with lists in numbered items as Python-Markdown needs them.

    It wants what belongs to an item indented by four spaces, not by the width of the item's number, and an empty line
    between an inner list and the next number.
    """
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        if re.match(r"\d+\. ", line):
            if inside and lines[-1].startswith("    "):
                lines.append("")
            inside = True
        elif line and not line.startswith("   "):
            inside = False
        lines.append(f" {line}" if inside and line.startswith("   ") else line)
    return "\n".join(lines)


def gather(pages: Path = PAGES) -> None:
    """Write all pages and the files that they link to into one folder, which is emptied first."""
    shutil.rmtree(pages, ignore_errors=True)
    sources = [*DOCS.rglob("*.md"), *(ROOT / name for name in MOVED if name.endswith(".md"))]
    files = {path for path in DOCS.rglob("*") if path.is_file() and path.suffix != ".md"}
    for source in sources:
        text = source.read_text(encoding="utf-8")
        page = PurePosixPath(source.relative_to(ROOT))
        _write(pages / place(page)[0], with_deep_lists(with_links(text, page)))
        linked = (Path(os.path.normpath(source.parent / link["target"])) for link in LINK.finditer(text))
        files |= {path for path in linked if path.is_file() and path.suffix != ".md"}
    for file in files:
        there = pages / place(PurePosixPath(file.relative_to(ROOT)))[0]
        if there.suffix != ".md":
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, there)
    _write(pages / "configs.md", configs())
    _write(pages / "uncounted.md", uncounted())
    _write(pages / "api.md", api())


class Page(HTMLParser):
    """What one page of the built site has: its anchors, what it links to and what a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            (self.loads if tag == "link" and given.get("rel") not in INERT_RELATIONS else self.links).append(
                given["href"]
            )
        if "src" in given:
            self.loads.append(given["src"])


def faults(site: Path = SITE) -> list[str]:
    """Dead links, dead anchors and requests to other servers in a built site, each as ``page: target``."""
    site = site.resolve()
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, page in sorted(pages.items()):
        shown = path.relative_to(site)
        found += [f"{shown}: loads {target}" for target in page.loads if FOREIGN.match(target)]
        for target in [*page.links, *page.loads]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or shown.name == "404.html":  # that page is served under any path
                continue
            there = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            anchors = pages[there].anchors if there in pages else set()
            if not there.is_file():
                found.append(f"{shown}: {target} does not exist")
            elif parts.fragment and there in pages and unquote(parts.fragment) not in anchors:
                found.append(f"{shown}: {target} has no such anchor")
    for style in sorted(site.rglob("*.css")):
        loads = re.findall(r"""(?:url\(|@import\s)["']?((?:https?:)?//[^"')]+)""", style.read_text(encoding="utf-8"))
        found += [f"{style.relative_to(site)}: loads {target}" for target in loads]
    return found


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Gather the pages; with ``--check``, look for faults in the built site instead."""
    if sys.argv[1:] == ["--check"]:
        if found := faults():
            raise SystemExit("\n".join(found))
        return
    gather()


if __name__ == "__main__":
    main()
