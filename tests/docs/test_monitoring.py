"""docs/monitoring.md and the dashboard, in a real Prometheus."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtiers.tiers.config.deployment import parse_config
from tests.connector.commands.test_dashboards import RULES, dashboard_queries, panels, rules
from tests.docs.make_dashboard import dashboard
from tests.docs.render_dashboard import DOCS, PICTURES, Prometheus, at_work, fill_in, rows_of, static_configs
from tests.waiting import wait_for

MONITORING = DOCS / "monitoring.md"
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed (Debian has a package prometheus)",
)
#: A made-up server of vLLM: its own metrics, and kvtiers' metrics under vLLM's names.
VLLMS = """\
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} %(tokens)d
"""


def snippets(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", MONITORING.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands() -> list[str]:
    return [line for snippet in snippets("sh") for line in snippet.replace("\\\n", " ").splitlines()]


def config_of_prometheus() -> dict[str, Any]:
    (config,) = [text for text in snippets("yaml") if "rule_files" in text]
    loaded: dict[str, Any] = yaml.safe_load(config)
    return loaded


class VllmServer:
    """vLLM's endpoint, made of an engine's own."""

    def __init__(self, url: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with urllib.request.urlopen(url) as answer:
                    text = answer.read().decode()
                ours = re.sub(
                    r"^kvtiers_(\w+)(?:\{(.*)\})? ",
                    lambda found: (
                        f'vllm:kvtiers_{found[1]}{{{found[2] + "," if found[2] else ""}engine="0",model_name="m"}} '
                    ),
                    "\n".join(line for line in text.splitlines() if not line.startswith("#")),
                    flags=re.MULTILINE,
                )
                values = {"tokens": 1000 * time.monotonic()}
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write((ours + "\n" + VLLMS % values).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that scrapes replica-a's own port, replica-b as vLLM's endpoint would show it."""
    folder = tmp_path_factory.mktemp("prometheus")
    jobs = {job["job_name"]: job for job in config_of_prometheus()["scrape_configs"]}
    with ExitStack() as stack:
        targets, _ = stack.enter_context(at_work(folder, share=0.02))
        vllm = VllmServer(f"http://127.0.0.1:{targets['replica-b']}/metrics")
        stack.callback(vllm.close)
        jobs["vllm"]["static_configs"] = static_configs({"vllm-b": vllm.port})
        own = {"job_name": "own", "static_configs": static_configs({"replica-a": targets["replica-a"]})}
        server = Prometheus(folder, [*jobs.values(), own])
        stack.callback(server.close)
        wait_for(server.is_ready)
        for name in ("kvtiers_jobs_total", "vllm:prompt_tokens_by_source_total"):  # rate() needs two samples
            wait_for(lambda name=name: server.ask(f"rate({name}[30s]) > 0"))  # type: ignore[misc]
        yield server


@needs_prometheus
@pytest.mark.parametrize("chosen", [".*", "(replica-a|vllm-b|local|shared|m)"], ids=["all", "several"])
@pytest.mark.parametrize("number", range(len(dashboard_queries())), ids=lambda at: dashboard_queries()[at][0])
def test_prometheus_answers_every_query(prometheus: Prometheus, number: int, chosen: str) -> None:
    """Those of events have no series where nothing happened."""
    title, expr, _ = dashboard_queries()[number]
    answer = prometheus.ask(fill_in(expr, 120, rate_s=120, chosen=chosen))
    may_be_empty = expr.endswith("> 0") or "collector" in expr or "used_bytes" in expr
    assert answer or may_be_empty or chosen != ".*", title


@needs_prometheus
def test_example_relabeling_renames_vllm_metrics_as_dashboard_expects(prometheus: Prometheus) -> None:
    found = prometheus.ask('kvtiers_circuit_closed{model_name="m"}')
    assert {(series["metric"]["instance"], series["metric"]["tier"]) for series in found} == {
        ("vllm-b", "local"),
        ("vllm-b", "shared"),
    }
    assert prometheus.ask('{__name__=~"vllm:kvtiers_.*"}') == []


@needs_prometheus
def test_tokens_saved_panel_counts_tokens_loaded_by_vllm(prometheus: Prometheus) -> None:
    (expr,) = [expr for title, expr, _ in dashboard_queries() if title == "Tokens saved"]
    (tokens,) = prometheus.ask(fill_in(expr, 60))
    assert tokens["metric"] == {"instance": "vllm-b"}
    assert float(tokens["value"][1]) > 0
    assert prometheus.ask(fill_in(expr, 60, chosen="another")) == []


@needs_prometheus
def test_prometheus_evaluates_every_alert_rule(prometheus: Prometheus) -> None:
    wait_for(lambda: "unknown" not in prometheus.rules().values())
    assert prometheus.rules() == {rule["alert"]: "ok" for rule in rules()}


@needs_prometheus
def test_promtool_accepts_example_configuration(tmp_path: Path) -> None:
    (sed,) = [line for line in commands() if line.startswith("sed ")]
    subprocess.run(
        sed.replace("> kvtiers", f"> {shlex.quote(str(tmp_path))}/kvtiers"), shell=True, check=True, cwd=DOCS.parent
    )
    urls = re.findall(r'runbook_url: "(.*)"', (tmp_path / "kvtiers.rules.yaml").read_text())
    assert len(urls) == len(rules())
    assert all(url.startswith("https://git.example.com/kvtiers/docs/") for url in urls)
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config_of_prometheus()))
    checks = [line for line in commands() if line.startswith("promtool ")]
    assert len(checks) == 2
    for check in checks:
        done = subprocess.run(shlex.split(check), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout


def test_example_metrics_port_is_valid_and_drop_rule_matches_vllm_metrics() -> None:
    (own,) = [text for text in snippets("yaml") if text.startswith("metrics:")]
    assert parse_config({"region": {"size": "1GiB"}, **yaml.safe_load(own)}).metrics.port == 9470
    (drop,) = [text for text in snippets("yaml") if text.startswith("metric_relabel_configs:")]
    (rule,) = yaml.safe_load(drop)["metric_relabel_configs"]
    assert rule["action"] == "drop"
    assert re.fullmatch(rule["regex"], "vllm:kvtiers_slots")


def test_example_job_scrapes_vllm_port() -> None:
    config = config_of_prometheus()["scrape_configs"]
    assert [job["static_configs"][0]["targets"][0][-5:] for job in config] == [":8000"]


def test_alert_keeps_instance_and_prints_every_kept_label() -> None:
    """With two engines, an alert without its instance does not say which engine to look at."""
    for rule in rules():
        summary, name = rule["annotations"]["summary"], rule["alert"]
        assert "{{ $labels.instance }}" in summary, name
        for kept in re.findall(r"\bby \(([^)]*)\)", rule["expr"]):
            labels = set(kept.split(", ")) - {"le"}
            assert "instance" in labels, name
            assert all(f"{{{{ $labels.{label} }}}}" in summary for label in labels), name


def test_panels_and_alerts_on_page_exist_and_every_alert_is_named() -> None:
    titles = {panel["title"] for panel in panels()}
    page = MONITORING.read_text()
    named = {title for title in re.findall(r'"([A-Z][^"\n]+)"', page.replace("\n", " ")) if title[1].islower()}
    assert len(named) > 11
    assert named <= titles
    assert set(re.findall(r"`(KVTiers[A-Z]\w+)`", page)) == {rule["alert"] for rule in rules()}


def test_pictures_on_page_have_every_row_of_the_dashboard() -> None:
    drawn = [title for titles in PICTURES.values() for title in titles]
    assert sorted(drawn) == sorted(rows_of(dashboard()["panels"]))
    for name in PICTURES:
        assert f"({name})" in MONITORING.read_text()
        assert (DOCS / name).read_bytes().startswith(b"\x89PNG")


def test_example_uses_the_shipped_rule_file() -> None:
    assert config_of_prometheus()["rule_files"] == [RULES.name]
