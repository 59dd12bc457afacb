"""Makes configs/grafana/kvtiers.json, the Grafana dashboard, which ``make docs`` writes.

A test fails if the file is not current. Other tests check three rules: each legend names the replica (``instance``),
a panel has one unit, and reasons are shown only if they occur.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana" / "kvtiers.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
PANEL_WIDTH, PANEL_HEIGHT, STAT_WIDTH, STAT_HEIGHT = 8, 8, 4, 5

#: What the variables select. An endpoint without a label matches ".*", the value of All.
ENGINE = 'instance=~"$instance",model_name=~"$model"'
TIER = f'{ENGINE},tier=~"$tier"'
RATE, RANGE, NOW = "[$__rate_interval]", "[$__range]", "[5m]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        unit: Grafana's name of the unit. cpm: events per minute.
        targets: pairs of a query and a legend.
        kind: stat, or timeseries.
        bars: draw bars, for events.
        maximum: of the axis; None: what the values need.
        mappings: value -> text, for a stat.
    """

    title: str
    description: str
    unit: str
    targets: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    bars: bool = False
    maximum: float | None = None
    mappings: Sequence[tuple[float, str, str]] = ()


def _sum(by: str, expr: str) -> str:
    return f"sum by ({by}) ({expr})"


def _rate(metric: str, by: str, selector: str = TIER) -> str:
    return _sum(by, f"rate({metric}{{{selector}}}{RATE})")


def _events(title: str, description: str, *targets: tuple[str, str, str], selector: str = TIER) -> Panel:
    """A panel of events per minute, without those that do not occur. Targets: metric, labels, legend after instance."""
    return Panel(
        title,
        description,
        "cpm",
        [
            (f"60 * {_rate(metric, f'instance, {labels}' if labels else 'instance', selector)} > 0", legend)
            for metric, labels, legend in targets
        ],
        bars=True,
    )


def _quantile(share: str, metric: str, by: str, selector: str = TIER) -> str:
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', f'le, {by}', selector)})"


def _hit_rate(by: str, window: str) -> str:
    hits = _sum(by, f'rate(kvtiers_lookups_total{{{TIER},result="hit"}}{window})')
    return f"{hits} / {_sum(by, f'rate(kvtiers_lookups_total{{{TIER}}}{window})')}"


_LOADED = f'increase(vllm:prompt_tokens_by_source_total{{{ENGINE},source="external_kv_transfer"}}{RANGE})'

HEADLINE = [
    Panel(
        "Hit rate now",
        "Share of the blocks that requests asked a tier for and the tier had, in the last five minutes. A tier is not "
        "asked for what the region or an earlier tier has.",
        "percentunit",
        [(_hit_rate("tier", NOW), "{{tier}}")],
        "stat",
    ),
    Panel(
        "Bytes loaded",
        "KV bytes loaded from each tier, in the dashboard's time range.",
        "bytes",
        [(_sum("tier", f'increase(kvtiers_bytes_total{{{TIER},op="load"}}{RANGE})'), "{{tier}}")],
        "stat",
    ),
    Panel(
        "Tokens saved",
        "Prompt tokens that vLLM loaded instead of computing, from the region or a tier, in the dashboard's time "
        "range. Known only from vLLM's own endpoint (vllm:prompt_tokens_by_source_total).",
        "short",
        [(_sum("instance", _LOADED), "{{instance}}")],
        "stat",
    ),
    Panel(
        "Used of max_bytes",
        "What the tier's root held at most after the collector's last run, as a part of max_bytes. Tiers without "
        "max_bytes are not shown.",
        "percentunit",
        [
            (
                f"max by (tier) (kvtiers_storage_used_bytes{{{TIER}}}) / max by (tier) "
                f"(kvtiers_storage_max_bytes{{{TIER}}})",
                "{{tier}}",
            )
        ],
        "stat",
    ),
    Panel(
        "Circuits",
        "While a tier is cut off, its lookups miss and its stores are dropped. It is tried again every few seconds.",
        "short",
        [(f"min by (instance, tier) (kvtiers_circuit_closed{{{TIER}}})", "{{instance}} {{tier}}")],
        "stat",
        mappings=((0, "cut off", "red"), (1, "in use", "green")),
    ),
]

ROWS: dict[str, list[Panel]] = {
    "Use": [
        Panel(
            "Hit rate",
            "Blocks that requests asked the tier for and the tier had. A fall after a deployment usually means another "
            "identity: model revision, dtype, block size, hash seed.",
            "percentunit",
            [(_hit_rate("instance, tier", RATE), "{{instance}} {{tier}}")],
            maximum=1,
        ),
        Panel(
            "Lookups sent to storage",
            "By answer. Most lookups are answered from memory and are not counted here. For the engine, error and "
            "deadline are misses.",
            "ops",
            [
                (
                    _rate("kvtiers_lookup_probes_total", "instance, tier, result") + " > 0",
                    "{{instance}} {{tier}} {{result}}",
                )
            ],
        ),
        Panel(
            "Load or compute",
            "Requests by decision. slower, behind: computing was expected to take less time than loading.",
            "ops",
            [
                (
                    _rate("kvtiers_load_decisions_total", "instance, tier, reason") + " > 0",
                    "{{instance}} {{tier}} {{reason}}",
                )
            ],
        ),
        Panel(
            "Bytes moved",
            "Payload: from the region to a tier (store), and from a tier to the region (load).",
            "Bps",
            [(_rate("kvtiers_bytes_total", "instance, tier, op"), "{{instance}} {{tier}} {{op}}")],
        ),
        _events(
            "Requests, by why no more was loaded",
            "found: every block that was asked for was found. kvtiers explain says what the other reasons mean.",
            ("kvtiers_requests_total", "reason", "{{instance}} {{reason}}"),
            selector=ENGINE,
        ),
        Panel(
            "Stored since the last load",
            "Bytes stored to the tier since it was last loaded from. If this only rises, nothing is found there.",
            "bytes",
            [(f"max by (instance, tier) (kvtiers_stored_since_load_bytes{{{TIER}}})", "{{instance}} {{tier}}")],
        ),
        *(
            Panel(
                title,
                description,
                "ops",
                [
                    (
                        _rate("kvtiers_blocks_total", "instance, tier, outcome", f'{TIER},op="{op}"') + " > 0",
                        "{{instance}} {{tier}} {{outcome}}",
                    )
                ],
            )
            for op, title, description in (
                ("load", "Blocks loaded, by outcome", "failed: the block could not be read, or failed its check."),
                ("store", "Blocks stored, by outcome", "already_stored: the tier had the block."),
            )
        ),
        *(
            Panel(
                f"Time of a job, {name}",
                "From submission to report. A job moves the blocks of one request or of one step.",
                "s",
                [(_quantile(share, "kvtiers_job_seconds", "instance, tier, op"), "{{instance}} {{tier}} {{op}}")],
            )
            for share, name in (("0.5", "median"), ("0.99", "99th percentile"))
        ),
        Panel(
            "Jobs in flight",
            "Jobs submitted and not yet reported.",
            "short",
            [(f"sum by (instance, tier) (kvtiers_jobs_in_flight{{{TIER}}})", "{{instance}} {{tier}}")],
        ),
        _events(
            "Jobs that did not move all blocks",
            "partial: some blocks failed. failed: all of them.",
            ("kvtiers_jobs_total", "tier, op, outcome", "{{instance}} {{tier}} {{op}} {{outcome}}"),
            selector=f'{TIER},outcome!="ok"',
        ),
    ],
    "Truth: what failed a check": [
        _events(
            "Verify failures",
            "Blobs that were not the requested block, by reason. Each was a miss. authentication: tampered with, or a "
            "key is missing.",
            ("kvtiers_verify_failures_total", "tier, reason", "{{instance}} {{tier}} {{reason}}"),
        ),
        _events(
            "Bad blobs healed",
            "The next store of a bad block replaces it.",
            ("kvtiers_healed_blobs_total", "tier", "{{instance}} {{tier}} healed"),
        ),
        _events(
            "Errors of stores",
            "By class. StoreFullError: max_bytes or the reserve (min_free) is reached.",
            ("kvtiers_store_errors_total", "tier, op, error", "{{instance}} {{tier}} {{op}} {{error}}"),
        ),
    ],
    "Liveness": [
        Panel(
            "Circuit closed",
            "1: the tier is used. 0: it is cut off, and tried every few seconds.",
            "short",
            [(f"min by (instance, tier) (kvtiers_circuit_closed{{{TIER}}})", "{{instance}} {{tier}}")],
            maximum=1,
        ),
        _events(
            "Circuits opened",
            "How often a tier was cut off.",
            ("kvtiers_circuit_opened_total", "tier", "{{instance}} {{tier}}"),
        ),
        _events(
            "Deadlines that passed",
            "lookup: a miss. job: its tier was cut off. load: given up, and its slots are quarantined.",
            ("kvtiers_deadline_expired_total", "tier, what", "{{instance}} {{tier}} {{what}}"),
        ),
        _events(
            "Stores dropped",
            "Blocks that were not stored, by reason.",
            ("kvtiers_stores_dropped_total", "tier, reason", "{{instance}} {{tier}} {{reason}}"),
        ),
        Panel(
            "End of an engine step",
            "Time on the scheduler's thread, 99th percentile. A slow tier must not show here.",
            "s",
            [(_quantile("0.99", "kvtiers_schedule_end_seconds", "instance", ENGINE), "{{instance}} p99")],
        ),
        Panel(
            "Region slots",
            "quarantined: late I/O may still write into them.",
            "short",
            [(f"sum by (instance, state) (kvtiers_slots{{{ENGINE}}})", "{{instance}} {{state}}")],
        ),
        _events(
            "Contained errors",
            "Errors in a tier that did not reach the engine.",
            ("kvtiers_contained_errors_total", "tier, where", "{{instance}} {{tier}} {{where}}"),
        ),
        _events(
            "Hits without room",
            "A hit became a miss because no slot became free in time.",
            ("kvtiers_promotion_room_expired_total", "", "{{instance}}"),
            selector=ENGINE,
        ),
    ],
    "Capacity: the engines' collectors": [
        Panel(
            "Used and allowed",
            "What the tier's root held at most after the collector's last run, and max_bytes.",
            "bytes",
            [
                (f"max by (instance, tier) (kvtiers_storage_used_bytes{{{TIER}}})", "{{instance}} {{tier}} used"),
                (f"max by (instance, tier) (kvtiers_storage_max_bytes{{{TIER}}})", "{{instance}} {{tier}} max_bytes"),
            ],
        ),
        _events(
            "Blocks removed",
            "By reason: capacity (max_bytes or min_free), ttl, …",
            ("kvtiers_collector_removed_blobs_total", "tier, reason", "{{instance}} {{tier}} {{reason}}"),
        ),
        Panel(
            "Bytes removed",
            "Of the same blocks.",
            "Bps",
            [
                (
                    _rate("kvtiers_collector_removed_bytes_total", "instance, tier, reason") + " > 0",
                    "{{instance}} {{tier}} {{reason}}",
                )
            ],
            bars=True,
        ),
        _events(
            "Runs of the collector",
            "By outcome: ok, error. Of several engines on one root, one collects at a time.",
            ("kvtiers_collector_runs_total", "tier, outcome", "{{instance}} {{tier}} {{outcome}}"),
        ),
        Panel(
            "Collectors up",
            "1: this engine's collector runs and answers, or is not needed yet. 0: it is down, and nothing is removed.",
            "short",
            [(f"min by (instance, tier) (kvtiers_collector_up{{{TIER}}})", "{{instance}} {{tier}}")],
            maximum=1,
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels = [_panel(panel, index + 1, index * STAT_WIDTH, 0) for index, panel in enumerate(HEADLINE)]
    top = STAT_HEIGHT
    for title, row in ROWS.items():
        at = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": at, "panels": []}
        )
        per_line = COLUMNS // PANEL_WIDTH
        for index, panel in enumerate(row):
            x, y = index % per_line * PANEL_WIDTH, top + 1 + index // per_line * PANEL_HEIGHT
            panels.append(_panel(panel, len(panels) + 1, x, y))
        top += 1 + -(-len(row) // per_line) * PANEL_HEIGHT
    engines = "kvtiers_circuit_closed"
    return {
        "title": "kvtiers",
        "uid": "kvtiers",
        "schemaVersion": 39,
        "version": 1,
        "tags": ["kv-cache", "llm"],
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "editable": True,
        "graphTooltip": 1,
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Data source",
                    "hide": 0,
                },
                _variable("instance", "Instance", f"label_values({engines}, instance)"),
                _variable("model", "Model (vLLM's endpoint)", f"label_values({engines}, model_name)"),
                _variable("tier", "Tier", f"label_values({engines}, tier)"),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "refresh": 2,
        "sort": 1,
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    is_stat = panel.kind == "stat"
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.bars:
        defaults["custom"] = {"drawStyle": "bars", "fillOpacity": 60, "lineWidth": 0, "stacking": {"mode": "normal"}}
    if panel.mappings:
        options = {str(value): {"text": text, "color": color} for value, text, color in panel.mappings}
        defaults["mappings"] = [{"type": "value", "options": options}]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {
            "h": STAT_HEIGHT if is_stat else PANEL_HEIGHT,
            "w": STAT_WIDTH if is_stat else PANEL_WIDTH,
            "x": x,
            "y": y,
        },
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "textMode": "value_and_name",
            "colorMode": "background" if panel.mappings else "none",
            "graphMode": "none",
        }
        if is_stat
        else {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            | ({"instant": True} if is_stat else {})
            for index, (expr, legend) in enumerate(panel.targets)
        ],
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"
