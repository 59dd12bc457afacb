from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtiers.connector.spec import DeploymentSpec
from kvtiers.tiers.config.deployment import parse_config
from kvtiers.tiers.errors import SealReason
from kvtiers.tiers.exporter import MetricsCollector, MetricsServer
from kvtiers.tiers.metrics import METRICS, MetricKind, Metrics
from tests.identity import CONFIG


def exported(*metrics: Metrics) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(metrics))
    return generate_latest(registry).decode()


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        text: str = answer.read().decode()
    return text


def deployment(tmp_path: Path, **metrics: object) -> DeploymentSpec:
    config = parse_config(
        {
            "region": {"size": "1MiB"},
            "tiers": [{"type": "fs", "root_dir": str(tmp_path), "min_free": 0}],
            "metrics": metrics,
        }
    )
    return DeploymentSpec(CONFIG, config, 64 << 10)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_metrics_url_is_reachable(address: str) -> None:
    try:
        server = MetricsServer([Metrics()], port=0, address=address)
    except OSError as e:
        pytest.skip(f"{address} cannot be had here: {e}")
    try:
        with urllib.request.urlopen(server.url, timeout=120) as answer:
            assert answer.status == 200
    finally:
        server.close()


def test_exported_values_labels_and_buckets_match_the_counts() -> None:
    metrics = Metrics()
    metrics.inc("kvtiers_bytes_total", "fs", "load", by=15)
    metrics.set("kvtiers_slots", "free", value=6)
    for value in (0.0005, 0.003, 99.0):
        metrics.observe("kvtiers_job_seconds", "fs", "load", value=value)
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exported(metrics))
        for sample in family.samples
    }
    fs_load = (("op", "load"), ("tier", "fs"))
    assert samples["kvtiers_bytes_total", fs_load] == 15
    assert samples["kvtiers_slots", (("state", "free"),)] == 6
    assert samples["kvtiers_job_seconds_bucket", (("le", "0.001"), *fs_load)] == 1
    assert samples["kvtiers_job_seconds_bucket", (("le", "0.005"), *fs_load)] == 2
    assert samples["kvtiers_job_seconds_bucket", (("le", "+Inf"), *fs_load)] == 3
    assert samples["kvtiers_job_seconds_count", fs_load] == 3
    assert samples["kvtiers_job_seconds_sum", fs_load] == pytest.approx(99.0035)


def test_every_metric_of_the_table_is_exported_with_its_kind_and_help() -> None:
    families = {family.name: family for family in text_string_to_metric_families(exported(Metrics()))}
    assert set(families) == {name.removesuffix("_total") for name in METRICS}
    for name, metric in METRICS.items():
        family = families[name.removesuffix("_total")]
        assert family.documentation == metric.help
        assert family.type == {MetricKind.COUNTER: "counter", MetricKind.GAUGE: "gauge"}.get(metric.kind, "histogram")


def test_label_values_cannot_break_the_format() -> None:
    metrics = Metrics()
    metrics.inc("kvtiers_contained_errors_total", 'a"b\\c\nd', "x")
    (family,) = [f for f in text_string_to_metric_families(exported(metrics)) if f.samples]
    assert family.samples[0].labels["tier"] == 'a"b\\c\nd'


def test_engine_serves_its_metrics_until_shutdown(tmp_path: Path) -> None:
    spec = deployment(tmp_path, port=0)
    try:
        spec.get_manager().on_schedule_end()
        assert spec._metrics_server is not None
        port = spec._metrics_server.port
        text = scrape(port)
    finally:
        spec.shutdown()
    assert 'kvtiers_circuit_closed{tier="fs"} 1.0' in text
    assert "kvtiers_schedule_end_seconds_count 1.0" in text
    for reason in SealReason:  # alerts see the first failure only in a series that began at 0
        assert f'kvtiers_verify_failures_total{{reason="{reason}",tier="fs"}} 0.0' in text
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_metrics_are_not_served_by_default(tmp_path: Path) -> None:
    spec = deployment(tmp_path)
    spec.get_manager()
    assert spec._metrics_server is None
    spec.shutdown()


def test_taken_metrics_port_does_not_stop_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = MetricsServer([Metrics()], port=0)
    spec = deployment(tmp_path, port=taken.port)
    try:
        spec.get_manager().on_schedule_end()
        assert f"metrics are not served on 127.0.0.1:{taken.port}" in caplog.text
    finally:
        spec.shutdown()
        taken.close()


def test_missing_prometheus_client_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from kvtiers.tiers.errors import ConfigError\n"
        "try:\n    import kvtiers.tiers.exporter\nexcept ConfigError as e:\n    print(e)"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "pip install '.[metrics]'" in out.stdout
