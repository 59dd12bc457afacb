"""The pages that the documentation site is made of, and the check of the built site."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from tests.docs import make_site


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("docs/quickstart.md", "vllm.md#metrics", "vllm.md#metrics"),
        ("docs/quickstart.md", "#3-give-it-to-vllm", "#3-give-it-to-vllm"),
        ("docs/quickstart.md", "../configs", "configs.md"),
        ("docs/quickstart.md", "../configs/nfs.yaml", "configs.md#nfsyaml"),
        ("docs/metrics.md", "../configs/grafana/kvtiers.json", "configs/grafana/kvtiers.json"),
        ("docs/guides/nfs.md", "../../configs/two-tiers.yaml", "../configs.md#two-tiersyaml"),
        ("docs/guides/nfs.md", "../operations.md#capacity", "../operations.md#capacity"),
        ("docs/commands.md", "../README.md#two-commands", "index.md#two-commands"),
        ("README.md", "docs/guides/s3.md", "guides/s3.md"),
        ("README.md", "docs/demo.svg", "demo.svg"),
        ("CONTRIBUTING.md", "docs/writing-a-store.md", "writing-a-store.md"),
        ("docs/sharing.md", "../connector/vllm/uncounted.py", "uncounted.md"),
        ("README.md", "https://example.com/docs/a.md", "https://example.com/docs/a.md"),
    ],
)
def test_link_is_rewritten_to_its_target_in_site(page: str, link: str, expected: str) -> None:
    assert make_site.with_links(f"a [b]({link}) c", PurePosixPath(page)) == f"a [b]({expected}) c"


def test_lists_in_numbered_items_are_indented_for_python_markdown() -> None:
    text = "8. one\n   more:\n\n   - a\n     b\n9. two\n\nend\n   kept"
    assert make_site.with_deep_lists(text) == "8. one\n    more:\n\n    - a\n      b\n\n9. two\n\nend\n   kept"


def test_gathered_pages_have_no_dead_link(tmp_path: Path) -> None:
    make_site.gather(tmp_path)
    for page in tmp_path.rglob("*.md"):
        for link in make_site.LINK.finditer(page.read_text(encoding="utf-8")):
            if "://" not in link["target"]:
                assert (page.parent / link["target"]).is_file(), f"{page}: {link[0]}"
    assert {"index.md", "api.md", "architecture.md", "configs.md"} <= {page.name for page in tmp_path.iterdir()}
    uncounted = (tmp_path / "uncounted.md").read_text(encoding="utf-8")
    assert "`enforce_eager`" in uncounted
    assert "`VLLM_NO_USAGE_STATS`" in uncounted


def test_check_of_built_site_reports_remote_loads_and_dead_links(tmp_path: Path) -> None:
    (tmp_path / "guides").mkdir()
    (tmp_path / "style.css").write_text("@import 'https://fonts.example/a.css'; a { background: url(local.png) }")
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="style.css"><link rel="canonical" href="https://docs.example/">'
        '<h1 id="top">a</h1><a href="#top">1</a><a href="guides/a.html#there">2</a><a href="https://example.com">3</a>'
    )
    (tmp_path / "guides" / "a.html").write_text('<p id="there"><a href="../index.html">up</a></p>')
    assert make_site.faults(tmp_path) == ["style.css: loads https://fonts.example/a.css"]
    (tmp_path / "guides" / "a.html").write_text(
        '<script src="//cdn.example/x.js"></script><img src="../gone.png"><a href="../index.html#gone">up</a>'
    )
    assert make_site.faults(tmp_path) == [
        "guides/a.html: loads //cdn.example/x.js",
        "guides/a.html: ../index.html#gone has no such anchor",
        "guides/a.html: ../gone.png does not exist",
        "index.html: guides/a.html#there has no such anchor",
        "style.css: loads https://fonts.example/a.css",
    ]
