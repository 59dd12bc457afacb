"""Draws the pictures of docs/monitoring.md: the Grafana dashboard's panels, from a real Prometheus' answers.

    python -m tests.docs.render_dashboard [--seconds N]

Two replicas serve made-up requests over two folders each: one of their own, bounded and emptied by its collector, and
one that they share. For a while, the shared one fails for one replica. Needs the program ``prometheus``. Grafana is not
used; the pictures follow the dashboard's queries, legends and units. The page describes the run in words: if another
run or another dashboard looks different, correct them by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.slots import Slots
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.config.values import human_bytes
from kvtiers.tiers.exporter import MetricsServer
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.testing.servers import free_ports
from kvtiers.tiers.tier.lookup import LookupOptions
from kvtiers.tiers.tier.store_tier import StoreTierManager, TierOptions
from tests.connector.commands.test_dashboards import RULES
from tests.docs.make_dashboard import COLUMNS, dashboard
from tests.identity import FakeSpec
from tests.soak.chaos import LayerPlace
from tests.soak.engine import SoakEngine
from tests.soak.ledger import Ledger
from tests.tiers.server.in_threads import in_threads

DOCS = Path(__file__).parents[2] / "docs"
#: Picture -> the dashboard's rows in it. The first row has no title.
PICTURES: Mapping[str, tuple[str, ...]] = {
    "dashboard.png": ("", "Use", "Truth: what failed a check"),
    "dashboard-liveness.png": ("Liveness",),
    "dashboard-storage.png": ("Capacity: the engines' collectors",),
}
UNIT_INCHES = 0.4  # of Grafana's grid
RATE_INTERVAL_S = 10
NUM_SLOTS, NUM_BLOCKS, ROW_BYTES = 64, 1024, 64 << 10
MAX_BYTES = 48 << 20
SHARE = 0.02  # of the shared folder's calls that fail for one replica
BREAK = (0.4, 0.5, 0.6)  # parts of the run: from the first on most of them fail, from the second to the third all hang


class Prometheus:
    """A server that scrapes each second.

    Args:
        folder: for its configuration and its data.
        scrape_configs: as in Prometheus' configuration.
    """

    def __init__(self, folder: Path, scrape_configs: Sequence[Mapping[str, Any]]) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise SystemExit("prometheus is not installed (Debian has a package of that name)")
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": scrape_configs,
        }
        (folder / "prometheus.json").write_text(json.dumps(config))  # JSON is YAML
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

    def ask(self, expr: str, at_s: float | None = None) -> list[dict[str, Any]]:
        """Series of a query: ``metric`` (labels) and ``value``."""
        return self._series("query", {"query": expr} | ({} if at_s is None else {"time": f"{at_s:.3f}"}))

    def ask_range(self, expr: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
        """Series of a query, each second: ``metric`` (labels) and ``values``."""
        return self._series(
            "query_range", {"query": expr, "start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": "1"}
        )

    def rules(self) -> dict[str, str]:
        """Alert -> health of its rule: ok, err or unknown."""
        groups = self._get("rules")["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(self._url.replace("/api/v1/", "/-/ready"), timeout=30):
                return True
        except OSError:  # 503 while it starts
            return False

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)

    def _series(self, call: str, options: Mapping[str, str]) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self._get(f"{call}?{urllib.parse.urlencode(options)}")["data"]["result"]
        return result

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self._url + path, timeout=30) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{urllib.parse.unquote_plus(path)}: {e.read().decode()}") from e
        assert content["status"] == "success", content
        return content


def static_configs(targets: Mapping[str, int]) -> list[dict[str, Any]]:
    """Targets on this machine, from instance -> port."""
    return [{"targets": [f"127.0.0.1:{port}"], "labels": {"instance": instance}} for instance, port in targets.items()]


class Replica:
    """An engine over a bounded folder of its own and a shared folder. Works in a thread of its own.

    Args:
        own: the replica's own folder.
        shared: the folder of all replicas; its faults are this replica's alone.
    """

    def __init__(self, seed: int, own: Path, shared: LayerPlace) -> None:
        self.spec = FakeSpec()
        self.shared = shared
        self._region = SharedOffloadRegion.anonymous(NUM_SLOTS, ROW_BYTES)
        view = self._region.create_kv_memoryview()
        tiers = [
            SecondaryTierFactory.create_secondary_tier(bounded(own), view, self.spec),
            StoreTierManager(
                self.spec,
                view,
                "shared",
                make_backend=in_threads(shared.open_store()),
                mapper=FileMapper.from_offloading_spec("", self.spec),
                options=TierOptions(
                    job_deadline_s=2, circuit_probe_s=1, lookup=LookupOptions(present_ttl_s=2, absent_ttl_s=0.5)
                ),
            ),
        ]
        self._manager = BlockManager(Slots(NUM_SLOTS, metrics=self.spec.metrics), tiers)
        self._engine = SoakEngine(
            self._manager,
            np.frombuffer(view, np.int8).reshape(NUM_SLOTS, ROW_BYTES),
            np.random.default_rng(1).integers(0, 127, (NUM_BLOCKS, ROW_BYTES), np.int8),
            Ledger(time.monotonic),
            seed=seed,
            sleep=lambda _: time.sleep(0.02),  # two replicas, Prometheus and more share this machine
        )

    def work(self, is_over: Callable[[], bool]) -> None:
        """Serve requests until told to stop."""
        self._engine.run(is_over)

    def close(self) -> None:
        """End it."""
        self._manager.shutdown()
        self._region.cleanup()


def bounded(folder: Path) -> dict[str, Any]:
    """Options of a replica's own tier."""
    return {"type": "fs", "name": "local", "root_dir": str(folder), "min_free": 0, "max_bytes": MAX_BYTES}


@contextmanager
def at_work(folder: Path, *, share: float) -> Iterator[tuple[dict[str, int], list[Replica]]]:
    """Two replicas.

    Yields:
        Instance -> port of its metrics; and the replicas, the last one with faults.
    """
    over = threading.Event()
    with ExitStack() as stack:
        places = [LayerPlace("shared", folder / "shared") for _ in range(2)]
        replicas = [Replica(seed, folder / f"replica-{seed}", place) for seed, place in enumerate(places)]
        servers = [MetricsServer([replica.spec.metrics], port=0) for replica in replicas]
        closing: list[Any] = [*servers, *replicas, *places]
        for each in closing:
            stack.callback(each.close)
        places[-1].set_share(share)
        threads = [threading.Thread(target=replica.work, args=(over.is_set,)) for replica in replicas]
        for thread in threads:
            thread.start()
        try:
            names = ("replica-a", "replica-b")
            yield {name: server.port for name, server in zip(names, servers, strict=True)}, replicas
        finally:
            over.set()
            for place in places:
                place.set_share(0)
            for thread in threads:
                thread.join()


def fill_in(expr: str, range_s: float, *, rate_s: float = RATE_INTERVAL_S, chosen: str = ".*") -> str:
    """A query of the dashboard, with its variables replaced as Grafana does.

    Args:
        range_s: the dashboard's time range.
        chosen: what the variables for instance, model and tier are set to; by default everything ("All").
    """
    for variable in ("instance", "model", "tier"):
        expr = expr.replace(f"${variable}", chosen)
    return expr.replace("$__rate_interval", f"{rate_s:.0f}s").replace("$__range", f"{range_s:.0f}s")


def legend(template: str, labels: Mapping[str, str]) -> str:
    """A legend as Grafana makes it."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), template).strip()


def observe(seconds: float) -> None:
    """Run all of it and write the pictures."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtiers-prometheus-")))
        targets, replicas = stack.enter_context(at_work(folder, share=SHARE))
        prometheus = Prometheus(folder, [{"job_name": "kvtiers", "static_configs": static_configs(targets)}])
        stack.callback(prometheus.close)
        start_s = time.time()
        time.sleep(BREAK[0] * seconds)
        shared = replicas[-1].shared
        shared.set_share(1)
        time.sleep((BREAK[1] - BREAK[0]) * seconds)
        with shared.hung():
            time.sleep((BREAK[2] - BREAK[1]) * seconds)
        shared.set_share(SHARE)
        time.sleep((1 - BREAK[2]) * seconds)
        end_s = time.time()
        for name, rows in PICTURES.items():
            draw(prometheus, DOCS / name, rows, start_s, end_s)


def rows_of(panels: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The dashboard's rows by title; the panels above the first row have none."""
    rows: dict[str, list[dict[str, Any]]] = {"": []}
    for panel in panels:
        if panel["type"] == "row":
            rows[panel["title"]] = []
        else:
            rows[list(rows)[-1]].append(panel)
    return rows


def draw(prometheus: Prometheus, file: Path, titles: tuple[str, ...], start_s: float, end_s: float) -> None:
    """Draw some rows of the dashboard, at the places that the panels have in Grafana."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    rows = {title: rows_of(dashboard()["panels"])[title] for title in titles}
    heights = {
        title: max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in row) - _top(row)
        for title, row in rows.items()
    }
    total = sum(heights.values()) + len(rows)  # a line for each title
    figure = plt.figure(figsize=(18, total * UNIT_INCHES), dpi=80)
    done = 0.0
    for title, row in rows.items():
        figure.text(0.005, 1 - (done + 0.5) / total, title, fontsize=14, weight="bold", va="center")
        done += 1
        for panel in row:
            at = panel["gridPos"]
            y = done + at["y"] - _top(row)
            left, width = at["x"] / COLUMNS, at["w"] / COLUMNS
            if panel["type"] == "stat":
                box = (left + 0.005, 1 - (y + at["h"] - 0.4) / total, width - 0.01, (at["h"] - 1) / total)
                _draw_stat(figure.add_axes(box), prometheus, panel, start_s, end_s)
            else:  # above the axes is the title, below are the scale and the legend
                box = (left + 0.05, 1 - (y + at["h"] * 0.62) / total, width - 0.06, at["h"] * 0.52 / total)
                _draw_series(figure.add_axes(box), prometheus, panel, start_s, end_s)
        done += heights[title]
    figure.savefig(file, pil_kwargs={"optimize": True})
    plt.close(figure)


def _top(row: list[dict[str, Any]]) -> int:
    return min(int(panel["gridPos"]["y"]) for panel in row)


def _draw_stat(axes: Any, prometheus: Prometheus, panel: dict[str, Any], start_s: float, end_s: float) -> None:
    axes.set(xticks=[], yticks=[])
    axes.set_title(panel["title"], fontsize=11, loc="left")
    defaults = panel["fieldConfig"]["defaults"]
    texts = {
        float(value): shown for mapping in defaults.get("mappings", ()) for value, shown in mapping["options"].items()
    }
    found = [
        (legend(target["legendFormat"], series["metric"]), float(series["value"][1]))
        for target in panel["targets"]
        for series in prometheus.ask(fill_in(target["expr"], end_s - start_s), end_s)
    ]
    if not found:
        axes.text(0.5, 0.5, "no data\n(only from vLLM's endpoint)", ha="center", va="center", fontsize=11, color="gray")
    for index, (name, value) in enumerate(sorted(found)):
        y = 1 - (index + 0.5) / len(found)
        mapped = texts.get(value)
        shown = mapped["text"] if mapped else show(value, defaults["unit"])
        axes.text(0.04, y, name, va="center", fontsize=10, transform=axes.transAxes)
        color = mapped["color"] if mapped else "black"
        axes.text(
            0.96, y, shown, va="center", ha="right", fontsize=13, weight="bold", color=color, transform=axes.transAxes
        )


def _draw_series(axes: Any, prometheus: Prometheus, panel: dict[str, Any], start_s: float, end_s: float) -> None:
    from matplotlib.ticker import FuncFormatter

    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    is_bars = defaults.get("custom", {}).get("drawStyle") == "bars"
    seconds = np.arange(round(end_s - start_s) + 1)
    floor = np.zeros(len(seconds))  # what the bars stand on
    drawn = 0
    for target in panel["targets"]:
        for series in prometheus.ask_range(fill_in(target["expr"], end_s - start_s), start_s, end_s):
            at = {round(float(when) - start_s): float(value) for when, value in series["values"]}
            values = np.array([at.get(int(second), math.nan) for second in seconds])
            name = _short(legend(target["legendFormat"], series["metric"]))
            if is_bars:
                axes.bar(seconds, values, width=1.0, bottom=floor, color=f"C{drawn % 10}", alpha=0.7, label=name)
                floor += np.nan_to_num(values)
            else:
                axes.plot(
                    seconds, values, "-" if drawn < 10 else "--", color=f"C{drawn % 10}", linewidth=1.3, label=name
                )
            drawn += 1
    axes.set_title(panel["title"], fontsize=11, loc="left")
    axes.set_xlim(0, end_s - start_s)
    axes.set_xlabel("seconds of the run", fontsize=8, labelpad=1)
    axes.set_ylabel(AXES[unit], fontsize=8)
    axes.set_ylim(bottom=0, top=1.05 * defaults["max"] if "max" in defaults else None)
    if unit in ("bytes", "Bps"):
        axes.set_yticks(_binary_ticks(axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value, unit)))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if drawn:
        columns = 1 if drawn < 4 else 2 if drawn < 9 else 3
        axes.legend(
            loc="upper left", bbox_to_anchor=(-0.12, -0.2), ncols=columns, fontsize=7, frameon=False,
            columnspacing=1, handlelength=1.5,
        )  # fmt: skip
    else:
        axes.text(0.5, 0.5, "nothing happened", ha="center", va="center", color="gray", transform=axes.transAxes)


def _binary_ticks(top: float) -> list[float]:
    """Multiples of a power of 1024 that fill an axis."""
    unit = 1024 ** max(0, math.floor(math.log(max(top, 1), 1024)))
    step = next(step for step in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if top / (step * unit) <= 6) * unit
    return [index * step for index in range(math.floor(top / step) + 1)]


AXES = {
    "bytes": "bytes",
    "Bps": "bytes per second",
    "cpm": "events per minute",
    "ops": "per second",
    "percentunit": "share",
    "s": "time",
    "short": "count",
}


def _short(name: str) -> str:
    return re.sub(r"(\S{30})\S+", r"\1…", name)


def show(value: float, unit: str) -> str:
    """A value with its unit, as short as Grafana shows it."""
    if math.isnan(value):
        return "–"
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit in ("bytes", "Bps"):
        return human_bytes(value) + ("/s" if unit == "Bps" else "")
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or not value else f"{1e3 * value:.3g} ms"
    return f"{value:,.4g}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    observe(parser.parse_args().seconds)


if __name__ == "__main__":
    main()
