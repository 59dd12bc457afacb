"""What of docs/ is written from the code or from results says what they say."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from kvtiers.connector.commands.json_schemas import DOCUMENTS, document_schema
from kvtiers.tiers.metrics import METRICS
from tests.docs import make_benchmarks, make_commands, make_errors, make_reference, plot_demo
from tests.docs.make_reference import DOCS

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
PAGES = sorted([*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")])


def local_links(page: Path) -> list[tuple[Path, str]]:
    """The files that a page links to, and the anchors in them ("" for none)."""
    links = LINK.findall(page.read_text(encoding="utf-8"))
    return [(page.parent / file if file else page, anchor) for file, anchor in links if "://" not in file]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and GitLab name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return frozenset(heading.replace(" ", "-") for heading in headings)


def test_configuration_reference_is_current() -> None:
    assert (DOCS / "configuration.md").read_text() == make_reference.configuration(), "run make docs"


@pytest.mark.parametrize("page", make_reference.TABLES)
def test_generated_tables_in_pages_are_current(page: str) -> None:
    shown = (DOCS / page).read_text()
    assert shown == make_reference.with_tables(page), "run make docs"
    assert all(make_reference.BEGIN.format(name) in shown for name in make_reference.TABLES[page])


def test_pages_name_only_existing_metrics_of_vllm_endpoint() -> None:
    named = {name for page in DOCS.glob("*.md") for name in re.findall(r"`vllm:(kvtiers_\w+)", page.read_text())}
    assert named <= METRICS.keys()


def test_benchmarks_page_is_current() -> None:
    shown = (DOCS / "benchmarks.md").read_text()
    assert shown == make_benchmarks.page(), "run python -m tests.docs.make_benchmarks"


def test_demo_plot_is_current() -> None:
    report = json.loads((DOCS / "demo.json").read_text())
    assert (DOCS / "demo.svg").read_text() == plot_demo.draw(report), "run make plot"


def test_commands_page_is_current() -> None:
    assert make_commands.PAGE.read_text() == make_commands.page(), "run make docs"


def test_commands_page_explains_fields_that_the_json_has() -> None:
    schemas = [document_schema(command) for command in DOCUMENTS]
    parts = [part for schema in schemas for part in (schema, *schema["$defs"].values())]
    have = {name for part in parts for name in part.get("properties", ())}
    assert {name for names in make_commands.FIELDS for name in names.split(", ")} <= have


def test_source_distribution_has_every_file_linked_from_pages() -> None:
    root = DOCS.parent.resolve()
    project = tomllib.loads((root / "pyproject.toml").read_text())
    target = project["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert all(pattern.startswith("/") and list(root.glob(pattern[1:])) for pattern in target["include"])
    have = {path for pattern in target["include"] for path in root.glob(pattern[1:])}
    have |= {root / folder for folder in target["force-include"]}
    linked = {file.resolve() for page in PAGES for file, _ in local_links(page)}
    assert [path for path in sorted(linked) if have.isdisjoint({path, *path.parents})] == []


def test_pages_never_install_kvtiers_from_an_index() -> None:
    """kvtiers is not released, so a package of this name on an index would be somebody else's."""
    root = DOCS.parent
    places = [*DOCS.rglob("*"), *root.glob("*.md"), *(root / "configs").rglob("*")]
    places += [*(root / "tiers").rglob("*.py"), *(root / "connector").rglob("*.py")]
    texts = [path for path in places if path.suffix in (".md", ".yaml", ".py")]
    named = re.compile(r"pip install (--\S+ )*['\"]?kvtiers\b")
    assert [path.name for path in texts if named.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_and_anchors_exist(page: Path) -> None:
    links = [(file.resolve(), anchor) for file, anchor in local_links(page)]
    assert [file for file, _ in links if not file.exists()] == []
    dead = [f"{file.name}#{anchor}" for file, anchor in links if anchor and anchor not in anchors(file)]
    assert dead == []


def test_errors_page_is_current() -> None:
    assert make_errors.PAGE.read_text() == make_errors.page(), "run make docs"
