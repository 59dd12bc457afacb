"""Every query of the Grafana dashboard and of the alert rules, against what the exporters really put out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kvtiers
from kvtiers.tiers.exporter import MetricsCollector
from kvtiers.tiers.metrics import METRICS, MetricDef, MetricKind, Metrics
from kvtiers.tiers.registry import SecondaryTierFactory
from tests.docs.make_dashboard import DASHBOARD, text
from tests.identity import FakeSpec

ROOT = Path(__file__).parents[3]
RULES = ROOT / "configs" / "prometheus" / "kvtiers.rules.yaml"
RULES_TEST = ROOT / "configs" / "prometheus" / "kvtiers.rules_test.yaml"

_METRIC = re.compile(r"\b(?:kvtiers_|vllm:)\w+")
_SELECTOR = re.compile(r"\b((?:kvtiers_|vllm:)\w+)\{([^}]*)\}")
_MATCHER = re.compile(r"\s*(\w+)\s*(=~|!=|!~|=)\s*\"([^\"]*)\"\s*,?")
_BY = re.compile(r"\bby\s*\(([^)]*)\)")
_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")

#: vLLM's own metrics on the dashboard, with one of their series each. tests/vllm compares them with vLLM.
OF_VLLM: dict[str, list[dict[str, str]]] = {
    "vllm:prompt_tokens_by_source_total": [{"source": "external_kv_transfer"}],
}
#: Labels that Prometheus and vLLM's endpoint add. Without the latter, ".*" matches series that lack the label.
ADDED = {"instance", "model_name"}
#: Labels that say why something happened.
_REASONS = {"reason", "error", "what", "where", "outcome", "result"}

Series = dict[str, list[dict[str, str]]]


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def dashboard_queries() -> list[tuple[str, str, str]]:
    return [(p["title"], target["expr"], target["legendFormat"]) for p in panels() for target in p["targets"]]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries() -> list[tuple[str, str]]:
    return [(title, expr) for title, expr, _ in dashboard_queries()] + [(r["alert"], r["expr"]) for r in rules()]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """Series of a tier that has just started, and one of each other metric of the table."""
    root = tmp_path_factory.mktemp("kv")
    spec = FakeSpec()
    view = memoryview(bytearray(4 * 4096)).cast("B", (4, 4096))
    options = {"type": "fs", "root_dir": str(root), "min_free": 0}
    tier = SecondaryTierFactory.create_secondary_tier(options, view, spec)
    tier.shutdown()
    present = {sample.name for sample in spec.metrics.snapshot()}
    for name, metric in METRICS.items():
        if name not in present:
            _touch(spec.metrics, name, metric)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector([spec.metrics]))
    series: Series = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            series.setdefault(sample.name, []).append(sample.labels)
    return series | OF_VLLM


@lru_cache(maxsize=1)
def _source() -> str:
    return "".join(path.read_text() for p in ("tiers", "connector") for path in (ROOT / p).rglob("*.py"))


def _touch(metrics: Metrics, name: str, metric: MetricDef) -> None:
    labels = ["x"] * len(metric.labels)
    if metric.kind is MetricKind.HISTOGRAM:
        metrics.observe(name, *labels, value=0.01)
    elif metric.kind is MetricKind.GAUGE:
        metrics.set(name, *labels, value=1)
    else:
        metrics.inc(name, *labels)


def metric_names(expr: str) -> set[str]:
    return set(_METRIC.findall(expr))


@pytest.mark.parametrize(("title", "expr"), queries(), ids=[title for title, _ in queries()])
def test_every_queried_metric_and_label_is_exported(title: str, expr: str, exported: Series) -> None:
    names = metric_names(expr)
    assert names
    for name in names:
        assert name in exported, f"{title}: nothing exports {name}"
    for name, matchers in _SELECTOR.findall(expr):
        label_names = set(exported[name][0]) | ADDED
        for label, _, _ in _MATCHER.findall(matchers):
            assert label in label_names, f"{title}: {name} has the labels {sorted(label_names)}, not {label}"
        assert not _MATCHER.sub("", matchers).strip(), f"{title}: {matchers} was not understood"
    known = set().union(*(set(labels) for name in names for labels in exported[name])) | ADDED
    for by in _BY.findall(expr):
        assert {label.strip() for label in by.split(",")} <= known, f"{title}: grouped by a label that is not there"


@pytest.mark.parametrize(("title", "expr"), queries(), ids=[title for title, _ in queries()])
def test_every_queried_label_value_occurs(title: str, expr: str, exported: Series) -> None:
    """result="hit": what a started tier shows, or what the code sets."""
    source = _source()
    for name, matchers in _SELECTOR.findall(expr):
        for label, operator, value in _MATCHER.findall(matchers):
            if value.startswith("$") or operator in ("=~", "!~"):
                continue
            shown = {labels[label] for labels in exported[name]}
            assert value in shown or f'"{value}"' in source or f"{value}:" in source, f"{title}: {label}={value!r}"


@pytest.mark.parametrize(
    ("title", "expr", "legend"), dashboard_queries(), ids=[title for title, *_ in dashboard_queries()]
)
def test_legends_use_only_labels_kept_by_the_query(title: str, expr: str, legend: str, exported: Series) -> None:
    by = _BY.findall(expr)
    if by:
        left = {label.strip() for label in by[0].split(",")}
    else:
        left = set().union(*(set(labels) for name in metric_names(expr) for labels in exported[name]))
    assert set(_LEGEND.findall(legend)) <= left, title


def test_dashboard_is_current() -> None:
    assert DASHBOARD.read_text() == text(), "run make docs"


def test_every_legend_names_the_instance() -> None:
    legends = [(p["title"], t["legendFormat"]) for p in panels() if p["type"] == "timeseries" for t in p["targets"]]
    assert len(legends) > 20
    assert [title for title, legend in legends if "{{instance}}" not in legend] == []


def test_panel_does_not_mix_bytes_with_other_units() -> None:
    for panel in panels():
        are_bytes = panel["fieldConfig"]["defaults"]["unit"] in ("bytes", "Bps")
        if panel["title"] == "Used of max_bytes":
            continue  # a share of bytes
        for target in panel["targets"]:
            names = metric_names(target["expr"])
            assert all(("_bytes" in name) == are_bytes for name in names), panel["title"]


def test_panels_by_reason_hide_reasons_with_zero() -> None:
    """A series of each starts at 0, so that the first one shows."""
    grouped = [
        (title, expr)
        for title, expr, _ in dashboard_queries()
        if any(_REASONS & {label.strip() for label in by.split(",")} for by in _BY.findall(expr))
    ]
    assert len(grouped) > 8
    assert [title for title, expr in grouped if not expr.endswith("> 0")] == []


def test_every_dashboard_variable_filters_every_query_with_its_label() -> None:
    """And each query obeys those whose label its metrics have."""
    variables = {one["name"]: one for one in json.loads(DASHBOARD.read_text())["templating"]["list"]}
    variables.pop("datasource")
    assert all(one["allValue"] == ".*" and one["query"]["query"].endswith(")") for one in variables.values())
    used = {name for _, expr, _ in dashboard_queries() for name in re.findall(r"\$([a-z]+)\"", expr)}
    assert used == variables.keys()
    label_of = {"instance": "instance", "model": "model_name", "tier": "tier"}
    for title, expr, _ in dashboard_queries():
        selectors = _SELECTOR.findall(expr)
        assert {name for name, _ in selectors} == metric_names(expr), title
        for name, matchers in selectors:
            is_engines = name.removesuffix("_bucket") in METRICS or name in OF_VLLM
            metric = METRICS.get(name.removesuffix("_bucket"))
            wanted = {"instance", *(metric.labels if metric else ()), *(["model_name"] if is_engines else ())}
            obeyed = {variable for _, _, variable in _MATCHER.findall(matchers) if variable.startswith("$")}
            assert obeyed == {f"${name}" for name, label in label_of.items() if label in wanted}, title


def test_every_metric_is_on_the_dashboard() -> None:
    shown = set().union(*(metric_names(expr) for _, expr, _ in dashboard_queries()))
    shown |= {name.removesuffix("_bucket") for name in shown}
    assert METRICS.keys() - shown == {"kvtiers_build_info"}  # its label says something, its value nothing


def test_version_is_in_the_metrics_of_a_started_tier(exported: Series) -> None:
    assert exported["kvtiers_build_info"] == [{"version": kvtiers.__version__}]


def test_panels_do_not_overlap_and_have_unique_ids() -> None:
    everything = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alert_keeps_and_prints_the_instance(rule: dict[str, Any]) -> None:
    """With many replicas, an alert without its instance does not say which replica to look at."""
    grouped = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
    assert all("instance" in labels.split(", ") for labels in grouped)
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_every_alert_links_an_existing_section_of_the_docs(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_alert_on_failing_stores_exists_and_its_series_begin_at_zero(exported: Series) -> None:
    assert "KVTiersStoresFail" in {rule["alert"] for rule in rules()}
    shown = {labels["outcome"] for labels in exported["kvtiers_blocks_total"] if labels["op"] == "store"}
    assert shown == {"moved", "already_stored", "failed", "dropped"}


def test_page_names_every_panel_that_needs_histogram_buckets() -> None:
    """Of a histogram it has the sum only."""
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert [title for title, expr in queries() if "_bucket" in expr and title not in page] == []


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (of Prometheus) is not installed")
    for command in (("check", "rules", str(RULES)), ("test", "rules", str(RULES_TEST))):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
