"""Serve metrics in Prometheus' text format, with prometheus_client (the extra ``metrics``).

Each scrape reads a snapshot on its own thread, at no cost to the thread that counts. Inside vLLM, vLLM's own
endpoint serves the same metrics as ``vllm:kvtiers_…`` (``connector.vllm.metrics``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .errors import ConfigError
from .metrics import MetricDef, MetricKind, Metrics, Sample
from .plain_logs import get_logger

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError as e:
    raise ConfigError("needs prometheus_client: pip install '.[metrics]' in kvtiers' checkout", field="metrics") from e

logger = get_logger(__name__)

CLOSE_S = 1.0


class MetricsCollector(Collector):
    """Provides the samples to prometheus_client. Any thread may call it.

    Args:
        metrics: one or more ``Metrics`` with different metric names.
    """

    def __init__(self, metrics: Sequence[Metrics]) -> None:
        self._metrics = tuple(metrics)

    def collect(self) -> Iterator[Metric]:
        """All metrics of the tables, including metrics without samples, so that a dashboard finds every name."""
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
    """Runs prometheus_client's HTTP server for ``/metrics`` on daemon threads.

    Args:
        metrics: see ``MetricsCollector``.
        port: port to listen on; 0 picks a free port.

    Attributes:
        port: the port that the server listens on.
        url: the address of the metrics.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, metrics: Sequence[Metrics], *, port: int, address: str = "127.0.0.1") -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(MetricsCollector(metrics))
        self._server, self._thread = start_http_server(port, address, registry)
        self.port = int(self._server.server_address[1])
        host = f"[{address}]" if ":" in address else address  # IPv6
        self.url = f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_S)


def serve_or_warn(metrics: Metrics, port: int, address: str = "127.0.0.1") -> MetricsServer | None:
    """Serve an engine's metrics. None: they cannot be served here, and the log says why.

    For example, another engine on this host uses the port. This must not prevent the model from being served.
    """
    try:
        server = MetricsServer([metrics], port=port, address=address)
    except (OSError, ValueError, OverflowError) as e:  # the last two: of a host name or port that cannot be one
        logger.warning("metrics are not served on %s:%d: %s", address, port, e)
        return None
    logger.info("metrics are served on %s", server.url)
    return server
