"""``kvtiers serve-metrics``: watches a deployment's storage from outside its engines: availability, latency and usage.

Only the engine's own process knows hits, circuits and verify failures (``metrics.port`` in the configuration). Each
tier has its own threads, because hanging storage blocks its caller. A tier that does not answer in time is reported as
down while its thread still waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from ...tiers.blocks.file_mapper import parse_block_name
from ...tiers.config.deployment import DeploymentConfig
from ...tiers.config.open_store import open_tool_store
from ...tiers.config.tier_options import FsTierConfig, MemoryTierConfig, NfsTierConfig, S3TierConfig, TierConfig
from ...tiers.errors import ConfigError, KVTiersError
from ...tiers.metrics import MetricDef, MetricKind, Metrics
from ...tiers.plain_logs import get_logger
from ...tiers.store import Store
from .options import duration_option
from .output import answer
from .places import load_deployment

logger = get_logger(__name__)

NAMESPACES_MAX = 1000  # label values; blocks of further namespaces count as "other"
OTHER = "other"
PUBLISH_EVERY_S = 0.5
#: A name that no block has: a probe needs only an answer.
PROBE_KEY = "kvtiers-probe/absent"


def _gauge(text: str, *labels: str) -> MetricDef:
    return MetricDef(MetricKind.GAUGE, text, labels)


STORAGE_METRICS: Mapping[str, MetricDef] = {
    "kvtiers_storage_blocks": _gauge("Blocks stored, at the last scan.", "tier", "namespace"),
    "kvtiers_storage_bytes": _gauge("Bytes of stored blocks, at the last scan.", "tier", "namespace"),
    "kvtiers_storage_free_bytes": _gauge("Free bytes of the file system a tier is on.", "tier"),
    "kvtiers_storage_probe_seconds": _gauge("How long the storage took to say that a block is absent.", "tier"),
    "kvtiers_storage_probes_total": MetricDef(
        MetricKind.COUNTER, "Probes by result: ok, timeout, or the error's class.", ("tier", "result")
    ),
    "kvtiers_storage_reserve_bytes": _gauge("Free bytes below which nothing is stored (min_free).", "tier"),
    "kvtiers_storage_scan_seconds": _gauge("How long the last scan took.", "tier"),
    "kvtiers_storage_scan_timestamp_seconds": _gauge("When the last scan ended, Unix seconds.", "tier"),
    "kvtiers_storage_up": _gauge("1 when the last probe was answered in time.", "tier"),
}


@dataclass(frozen=True, slots=True)
class Usage:
    """The result of a scan: blocks and bytes by namespace."""

    blocks: Mapping[str, int]
    size_bytes: Mapping[str, int]
    took_s: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe.

    Attributes:
        began: start by the tier's clock; distinguishes this probe from the running one.
        error: class of the error; "" if the storage answered.
        free_bytes: free bytes of the file system; None for other storage, and if it does not report its size.
    """

    began: float
    took_s: float
    error: str
    free_bytes: int | None = None


class WatchedTier:
    """Probes and scans one tier's storage. The tier's own threads call ``probe`` and ``scan``; any may read the fields.

    Attributes:
        asking_since: start of the running probe; None between probes.
        last: result of the last finished probe.
        usage: result of the last finished scan.
    """

    def __init__(
        self,
        name: str,
        config: TierConfig,
        *,
        make_store: Callable[[TierConfig], Store] | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.config = config
        self.asking_since: float | None = None
        self.last: ProbeResult | None = None
        self.usage: Usage | None = None
        self._make_store = make_store or partial(open_tool_store, read_only=True)
        self._store: Store | None = None
        self._clock = clock
        self._now = now

    def probe(self) -> ProbeResult:
        """Ask the storage for a block that is not there."""
        began = self._clock()
        self.asking_since = began
        error = ""
        free_bytes = None
        try:
            self._ask(self._open())
            free_bytes = _free_bytes(self.config)
        except Exception as e:  # whatever the error is, the storage did not answer
            error = type(e).__name__
            if not isinstance(e, (KVTiersError, OSError)):
                logger.exception("tier %s could not be probed", self.name)
            self.close()
        self.last = ProbeResult(began, self._clock() - began, error, free_bytes)
        self.asking_since = None
        return self.last

    def scan(self) -> None:
        """Count the blocks of each namespace. A failed scan keeps the previous result."""
        began = self._clock()
        blocks: dict[str, int] = {}
        size_bytes: dict[str, int] = {}
        try:
            # Not the probe's store, which the probe closes after an error.
            with contextlib.closing(self._make_store(self.config)) as store:
                for info in store.keys():  # noqa: SIM118 - not a dict
                    name = parse_block_name(info.key)
                    if name is None:
                        continue
                    namespace = name.namespace
                    if namespace not in blocks and len(blocks) >= NAMESPACES_MAX:
                        namespace = OTHER
                    blocks[namespace] = blocks.get(namespace, 0) + 1
                    size_bytes[namespace] = size_bytes.get(namespace, 0) + info.size
        except KVTiersError as e:
            logger.warning("tier %s could not be scanned: %s", self.name, e)
            return
        self.usage = Usage(blocks, size_bytes, self._clock() - began, self._now())

    def close(self) -> None:
        """Release the store."""
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(Exception):  # after an error, closing may fail, too
                store.close()

    def _ask(self, store: Store) -> None:
        store.size(PROBE_KEY)
        if isinstance(self.config, S3TierConfig):
            # A 404 to HEAD has no body, so a missing bucket and a server without S3 look the same as a missing block.
            # Only LIST tells them apart.
            next(iter(store.keys(PROBE_KEY)), None)

    def _open(self) -> Store:
        if self._store is None:
            self._store = self._make_store(self.config)
        return self._store


def _free_bytes(config: TierConfig) -> int | None:
    if not isinstance(config, (FsTierConfig, NfsTierConfig)):
        return None
    status = os.statvfs(config.root_dir)  # by its name: an open root that was removed would still be answered for
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def watched_tiers(deployment: DeploymentConfig) -> list[WatchedTier]:
    """Return the deployment's tiers whose storage another process can see."""
    watched = []
    for tier in deployment.tiers:
        if not isinstance(tier, TierConfig) or isinstance(tier, MemoryTierConfig):
            continue
        watched.append(WatchedTier(tier.name or tier.type, tier))
    return watched


class StorageMonitor:
    """Watches tiers on their own threads and keeps ``metrics`` up to date. Call ``publish`` from one thread.

    Args:
        tiers: see ``watched_tiers``.
        probe_every_s: seconds between probes; if a probe takes longer, the tier counts as down.
        scan_every_s: seconds between scans, which list every block; 0: never.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        tiers: Sequence[WatchedTier],
        *,
        probe_every_s: float,
        scan_every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = Metrics(STORAGE_METRICS)
        self._tiers = tuple(tiers)
        self._probe_every_s = probe_every_s
        self._scan_every_s = scan_every_s
        self._clock = clock
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._published: dict[str, ProbeResult] = {}
        self._overdue: dict[str, float] = {}

    def start(self) -> None:
        """Start the tiers' threads."""
        for tier in self._tiers:
            for name, work, every_s in (
                ("probe", tier.probe, self._probe_every_s),
                ("scan", tier.scan, self._scan_every_s),
            ):
                if every_s > 0:
                    thread = threading.Thread(
                        target=self._repeat, args=(work, every_s), name=f"kvtiers-{name}-{tier.name}", daemon=True
                    )
                    thread.start()
                    self._threads.append(thread)

    def publish(self) -> None:
        """Update the metrics with the latest results of the tiers' threads."""
        for tier in self._tiers:
            self._publish_probe(tier)
            self._publish_usage(tier)

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop the threads. A thread that hangs in its storage is left running."""
        self._stop.set()
        deadline = self._clock() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        if not any(thread.is_alive() for thread in self._threads):
            for tier in self._tiers:
                tier.close()

    def _repeat(self, work: Callable[[], object], every_s: float) -> None:
        while True:
            try:
                work()
            except Exception:
                logger.exception("a tier could not be watched")  # the thread's edge: the next round tries again
            if self._stop.wait(every_s):
                return

    def _publish_probe(self, tier: WatchedTier) -> None:
        metrics, name = self.metrics, tier.name
        since, last = tier.asking_since, tier.last
        if last is not None and last is not self._published.get(name):
            self._published[name] = last
            is_late = last.took_s > self._probe_every_s
            if self._overdue.get(name) != last.began:  # otherwise it was already counted as a timeout
                metrics.inc("kvtiers_storage_probes_total", name, last.error or ("timeout" if is_late else "ok"))
            metrics.set("kvtiers_storage_probe_seconds", name, value=last.took_s)
            metrics.set("kvtiers_storage_up", name, value=float(not last.error and not is_late))
            if last.free_bytes is None:
                metrics.forget("kvtiers_storage_free_bytes", name)  # the value before the error is out of date
            else:
                metrics.set("kvtiers_storage_free_bytes", name, value=last.free_bytes)
        has_ended = last is not None and last.began == since  # it ended between the two reads above
        if since is not None and not has_ended and self._clock() - since > self._probe_every_s:
            metrics.set("kvtiers_storage_up", name, value=0.0)
            if self._overdue.get(name) != since:
                self._overdue[name] = since
                metrics.inc("kvtiers_storage_probes_total", name, "timeout")
        reserve = getattr(tier.config, "min_free", None)
        if reserve is not None and not getattr(tier.config, "read_only", False):  # a read_only tier stores nothing
            metrics.set("kvtiers_storage_reserve_bytes", name, value=reserve)

    def _publish_usage(self, tier: WatchedTier) -> None:
        usage, metrics, name = tier.usage, self.metrics, tier.name
        if usage is None:
            return
        metrics.set("kvtiers_storage_scan_seconds", name, value=usage.took_s)
        metrics.set("kvtiers_storage_scan_timestamp_seconds", name, value=usage.ended_at)
        for metric, found in (("kvtiers_storage_blocks", usage.blocks), ("kvtiers_storage_bytes", usage.size_bytes)):
            metrics.forget(metric, name)  # drops namespaces that no longer exist
            for namespace, value in found.items():
                metrics.set(metric, name, namespace, value=value)


def serve_metrics(
    config: Annotated[
        str,
        typer.Argument(help="YAML file of the deployment, or only a folder or URL with blocks.", show_default=False),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on; 0 picks a free port.")] = 9471,
    address: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    probe_every: Annotated[str, typer.Option(help="Time between probes of each tier, 100ms or more.")] = "15s",
    scan_every: Annotated[str, typer.Option(help="Time between scans, which list every block; 0: never.")] = "1h",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the URL as JSON when the server is ready.")
    ] = False,
) -> None:  # fmt: skip
    """Serve Prometheus metrics of the tiers' storage, without an engine: availability, latency, usage.

    For hits, circuits and verify failures, which only the engines count, set metrics.port in the configuration.
    Ends with exit code 0 on Ctrl-C and SIGTERM.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    deployment = load_deployment(config)
    probe_every_s = duration_option("--probe-every", probe_every, least_s=0.1)
    scan_every_s = duration_option("--scan-every", scan_every)
    from ...tiers.exporter import MetricsServer  # here, because prometheus_client may be missing

    tiers = watched_tiers(deployment)
    if not tiers:
        raise ConfigError("no tier has storage that another process can see", field="tiers")
    monitor = StorageMonitor(tiers, probe_every_s=probe_every_s, scan_every_s=scan_every_s)
    try:
        server = MetricsServer([monitor.metrics], port=port, address=address)
    except OSError as e:
        if isinstance(e, socket.gaierror) or e.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"{address} cannot be served: {e.strerror}", field="--address") from e
        raise ConfigError(f"{address}:{port} cannot be served: {e.strerror}", field="--port") from e
    except ValueError as e:  # raised for an invalid host name
        raise ConfigError(f"{address!r} is not a valid host name", field="--address") from e
    try:
        monitor.start()
        answer({"url": server.url}) if as_json else print(f"metrics are served on {server.url}")
        print(end="", flush=True)
        while not stop.wait(min(PUBLISH_EVERY_S, probe_every_s / 2)):  # often enough not to miss a probe
            monitor.publish()
    finally:
        server.close()
        monitor.close()
