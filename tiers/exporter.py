"""Metrics in Prometheus' text format, by prometheus_client (the extra ``metrics``).

A scrape reads a snapshot on a thread of its own; the thread that counts does nothing for it. Inside vLLM the same
metrics are in vLLM's own endpoint, as ``vllm:kvtiers_…`` (``connector.vllm.metrics``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.metrics import MetricDef, MetricKind, Metrics, Sample

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError as e:
    raise ConfigError("needs prometheus_client: pip install 'kvtiers[metrics]'", field="metrics") from e

CLOSE_S = 1.0


class MetricsCollector(Collector):
    """What prometheus_client asks for samples. Any thread.

    Args:
        metrics: one or more; of no metric name twice.
    """

    def __init__(self, metrics: Sequence[Metrics]) -> None:
        self._metrics = tuple(metrics)

    def collect(self) -> Iterator[Metric]:
        """All metrics of the tables, those without samples too, so that a dashboard finds every name."""
        for metrics in self._metrics:
            by_name: dict[str, list[Sample]] = {name: [] for name in metrics.table}
            for sample in metrics.snapshot():
                by_name[sample.name].append(sample)
            for name, samples in by_name.items():
                yield _family(name, metrics.table[name], samples)


def _family(name: str, metric: MetricDef, samples: Sequence[Sample]) -> Metric:
    if metric.kind is MetricKind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, metric.help, labels=metric.labels)
        bounds = (*(f"{bound:g}" for bound in metric.bounds), "+Inf")
        for sample in samples:
            buckets = list(zip(bounds, sample.buckets, strict=True))
            histogram.add_metric(_label_values(metric, sample), buckets, sum_value=sample.total)
        return histogram
    family = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    made = family(name, metric.help, labels=metric.labels)
    for sample in samples:
        made.add_metric(_label_values(metric, sample), sample.value)
    return made


def _label_values(metric: MetricDef, sample: Sample) -> list[str]:
    return [sample.labels[name] for name in metric.labels]


class MetricsServer:
    """An HTTP server of ``/metrics``, on daemon threads.

    Args:
        metrics: see ``MetricsCollector``.
        port: 0 takes a free one.

    Attributes:
        port: where it listens.
        url: of what it serves there.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, metrics: Sequence[Metrics], *, port: int, address: str = "127.0.0.1") -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(MetricsCollector(metrics))
        self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        self.port = int(self._server.server_port)
        host = f"[{address}]" if ":" in address else address  # IPv6
        self.url = f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_S)
