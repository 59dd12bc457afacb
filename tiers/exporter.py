"""Serve metrics in Prometheus' text format, with prometheus_client (the extra ``metrics``).

Each scrape reads a snapshot on its own thread, and costs the thread that counts nothing. Inside vLLM, vLLM's own
endpoint serves the same metrics as ``vllm:kvtiers_…`` (``connector.vllm.metrics``).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from .errors import ConfigError
from .metrics import MetricDef, MetricKind, Metrics, Sample
from .plain_logs import get_logger

try:
    from prometheus_client import CollectorRegistry, MetricsHandler
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError as e:
    raise ConfigError("needs prometheus_client: pip install '.[metrics]' in kvtiers' checkout", field="metrics") from e

logger = get_logger(__name__)

CLOSE_S = 1.0
#: Time limit from accepting a connection until its answer is sent.
REQUEST_S_MAX = 5.0
#: One more connection ends the oldest, so that idle connections cannot keep a scrape from being answered.
CONNECTIONS_MAX = 16
_ACCEPT_RETRY_S = 0.5


class MetricsCollector(Collector):
    """Provides the samples to prometheus_client. Any thread may call it.

    Args:
        metrics: one or more ``Metrics``, without a metric name in common.
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


class _Server(ThreadingMixIn, TCPServer):
    """Limits the number and the time of connections, because each takes a descriptor and a thread of the engine.

    ``_open`` is written by the accepting thread, and each entry is removed by its connection's thread.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[Any, ...], family: int, registry: CollectorRegistry) -> None:
        self.address_family = family
        self._open: dict[socket.socket, float] = {}  # with the time at which it is ended, in the order of these times
        self._one_ended = threading.Condition()
        handler = type("Handler", (MetricsHandler,), {"registry": registry, "timeout": REQUEST_S_MAX})
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._one_ended:
            while len(self._open) >= CONNECTIONS_MAX:
                _end(next(iter(self._open)))
                self._one_ended.wait(_ACCEPT_RETRY_S)
            self._open[request] = time.monotonic() + REQUEST_S_MAX
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._one_ended:
            self._open.pop(request, None)
            self._one_ended.notify()

    def service_actions(self) -> None:
        """End connections that took too long. Called between connections and every half second."""
        now = time.monotonic()
        with self._one_ended:
            for request, until in self._open.items():
                if until > now:
                    break
                _end(request)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_ACCEPT_RETRY_S)  # no descriptor is free: without a pause this thread would never rest
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        logger.debug("a request for metrics was not answered", exc_info=True)


def _end(request: socket.socket) -> None:
    """Wake the thread that reads from a connection or writes to it. It then closes the connection."""
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class MetricsServer:
    """HTTP server for ``/metrics``, on at most 17 daemon threads. A request has five seconds.

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
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._server = _Server(place, family, registry)
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvtiers-metrics", daemon=True)
        self._thread.start()
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

    For example, another engine on this host has the port. That must not keep the model from being served.
    """
    try:
        server = MetricsServer([metrics], port=port, address=address)
    except (OSError, ValueError, OverflowError) as e:  # the last two: of a host name or port that cannot be one
        logger.warning("metrics are not served on %s:%d: %s", address, port, e)
        return None
    logger.info("metrics are served on %s", server.url)
    return server
