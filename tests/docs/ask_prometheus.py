"""Writes docs/dashboard.md: every query of the Grafana dashboard and every alert, asked of a real Prometheus.

    python -m tests.docs.ask_prometheus [--seconds N]

What is scraped is a soak (``tests.soak``: engines over tiers whose storage fails) and, beside it, a bounded folder that
a tier fills and its collector empties, watched by ``kvtiers serve-metrics``' monitor. Needs the program ``prometheus``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvtiers.connector.commands.monitor import StorageMonitor, WatchedTier
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.config.tier_options import FsTierConfig
from kvtiers.tiers.exporter import MetricsServer
from kvtiers.tiers.metrics import Metrics
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.testing.servers import free_ports
from tests.connector.commands.test_dashboards import RULES, dashboard_queries, rules
from tests.identity import FakeSpec, block_key
from tests.soak.run import SoakOptions, run_soak

PAGE = Path(__file__).parents[2] / "docs" / "dashboard.md"
RATE_INTERVAL = "30s"
ROWS, ROW_BYTES = 64, 64 << 10
MAX_BYTES = 16 << 20


class Prometheus:
    """A server that scrapes each second.

    Args:
        targets: ports on this machine.
    """

    def __init__(self, folder: Path, targets: list[int]) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise SystemExit("prometheus is not installed (Debian has a package of that name)")
        scrape = {"job_name": "kvtiers", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in targets]}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [scrape],
        }
        (folder / "prometheus.json").write_text(json.dumps(config))  # JSON is YAML
        self.version = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=True
        ).stdout.split()[2]
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}/api/v1/"
        self._process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.json'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ]
        )

    def ask(self, expr: str) -> list[dict[str, Any]]:
        """Series of a query: ``metric`` (labels) and ``value``."""
        answer = self._get("query?" + urllib.parse.urlencode({"query": expr}))
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def alerts(self) -> dict[str, str]:
        """States of the alerts that are not inactive."""
        return {alert["labels"]["alertname"]: alert["state"] for alert in self._get("alerts")["data"]["alerts"]}

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(10)

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=10) as answer:
            content = json.load(answer)
        assert content["status"] == "success", content
        return content


class Folder:
    """A bounded folder with an engine that fills it, and a monitor that watches it."""

    def __init__(self, root: Path) -> None:
        self.spec = FakeSpec()
        options = {"type": "fs", "name": "bounded", "root_dir": str(root), "min_free": 0, "max_bytes": MAX_BYTES}
        self._rows = np.random.default_rng(1).integers(-128, 128, (ROWS, ROW_BYTES), np.int8)
        self._tier = SecondaryTierFactory.create_secondary_tier(options, self._rows.data, self.spec)
        watched = WatchedTier("bounded", FsTierConfig(**options))
        self.monitor = StorageMonitor([watched], probe_every_s=1, scan_every_s=5)
        self._jobs = 0

    def work(self) -> None:
        """Store some new blocks, and load some old ones."""
        self._jobs += 1
        for first, submit in ((self._jobs * 8, self._tier.submit_store), (self._jobs * 4, self._tier.submit_load)):
            keys = [block_key(first + number) for number in range(8)]
            for key in keys:
                self._tier.lookup(key)
            self._tier.on_schedule_end()
            submit(JobMetadata(2 * self._jobs + (submit == self._tier.submit_load), keys, np.arange(8, dtype=np.int32)))
        list(self._tier.get_finished())
        self.monitor.publish()

    def close(self) -> None:
        """End both."""
        self.monitor.close()
        self._tier.shutdown()


@contextmanager
def working(folder: Folder) -> Iterator[None]:
    """The folder's engine at work in a thread."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.2):
            folder.work()

    thread = threading.Thread(target=work)
    folder.monitor.start()
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        folder.close()


def observe(seconds: float) -> str:
    """Run all of it and return the page."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtiers-prometheus-")))
        folder = Folder(scratch / "bounded")
        (port,) = free_ports(1)
        beside = MetricsServer([folder.spec.metrics, folder.monitor.metrics], port=0)
        stack.callback(beside.close)
        stack.enter_context(working(folder))
        prometheus = Prometheus(scratch, [port, beside.port])
        stack.callback(prometheus.close)
        answers: list[str] = []

        def ask() -> None:
            time.sleep(0.9 * seconds)
            answers.append(page(prometheus, seconds))

        @contextmanager
        def watch(metrics: Metrics) -> Iterator[None]:
            server = MetricsServer([metrics], port=port)
            thread = threading.Thread(target=ask)
            thread.start()
            try:
                yield
            finally:
                thread.join()
                server.close()

        report = run_soak(SoakOptions(seconds=seconds, watch=watch))
        assert report.passed, report.violations
        (text,) = answers
        return text


def page(prometheus: Prometheus, seconds: float) -> str:
    """The answers as Markdown."""
    lines = [
        "# The dashboard, asked",
        "",
        "Each query of `configs/grafana/kvtiers.json` (`$tier` as `.*`, `$__rate_interval` as "
        f"{RATE_INTERVAL}) and the state of each alert of `configs/prometheus/kvtiers.rules.yaml`, as Prometheus "
        f"{prometheus.version} answered after {0.9 * seconds:.0f} s of a soak in which 5 % of the storage's calls "
        "failed, hung or changed bits, beside a folder of 16 MiB that its tier keeps filling. Written by "
        "`python -m tests.docs.ask_prometheus`.",
        "",
        "| panel | series | one of them |",
        "|---|---:|---|",
    ]
    for title, expr, _ in dashboard_queries():
        found = prometheus.ask(expr.replace("$tier", ".*").replace("$__rate_interval", RATE_INTERVAL))
        shown = max(found, key=lambda series: _number(series["value"][1]), default=None)
        lines.append(f"| {title} | {len(found)} | {'nothing' if shown is None else _series(shown)} |")
    states = prometheus.alerts()
    lines += ["", "| alert | state |", "|---|---|"]
    lines += [f"| {rule['alert']} | {states.get(rule['alert'], 'inactive')} |" for rule in rules()]
    return "\n".join(lines) + "\n"


def _series(found: dict[str, Any]) -> str:
    labels = {name: value for name, value in found["metric"].items() if name not in ("__name__", "instance", "job")}
    shown = ", ".join(re.sub(r"(.{30}).+", r"\1…", value) for value in labels.values())
    return f"{shown or 'all'}: {_number(found['value'][1]):,.4g}"


def _number(value: str) -> float:
    number = float(value)
    return number if number == number else -1.0  # NaN: nothing to divide by


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    text = observe(parser.parse_args().seconds)
    PAGE.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
