from __future__ import annotations

import re
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from kvtiers.connector.commands import monitor
from kvtiers.connector.commands.monitor import (
    OTHER,
    STORAGE_METRICS,
    StorageMonitor,
    WatchedTier,
    watched_tiers,
)
from kvtiers.tiers.config.deployment import parse_config
from kvtiers.tiers.config.tier_options import FsTierConfig, NfsTierConfig, S3TierConfig, TierConfig
from kvtiers.tiers.errors import StoreUnavailableError
from kvtiers.tiers.metrics import METRICS, MetricKind
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.servers import moto_server
from tests.connector.commands.test_frame import CLI
from tests.connector.commands.test_storage_commands import run, write_tiers
from tests.s3_clients import CLIENTS, use_client, use_credentials
from tests.waiting import wait_for


class Bench:
    """One watched tier on a store that can be made to fail or hang, and a clock."""

    def __init__(self, tmp_path: Path) -> None:
        self.now = 100.0
        self.store = MemoryStore()
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.opened = 0
        self.config = FsTierConfig(root_dir=str(tmp_path), min_free=1 << 20)
        self.tier = WatchedTier(
            "fs", self.config, make_store=self.make_store, clock=lambda: self.now, now=lambda: 1_700_000_000.0
        )
        self.monitor = StorageMonitor([self.tier], probe_every_s=15, scan_every_s=0, clock=lambda: self.now)

    def make_store(self, config: TierConfig) -> Store:
        bench = self

        class Watched(MemoryStore):
            def size(self, key: str) -> int | None:
                assert bench.gate.wait(120)
                if bench.error:
                    raise bench.error
                return bench.store.size(key)

            def keys(self, prefix: str = "") -> Iterator[object]:  # type: ignore[override]
                if bench.error:
                    raise bench.error
                return bench.store.keys(prefix)

        self.opened += 1
        return Watched()

    def value(self, name: str, *labels: str) -> float:
        self.monitor.publish()
        return self.monitor.metrics.value(name, *labels)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_tier_that_answers_is_up(bench: Bench) -> None:
    bench.tier.probe()
    assert bench.value("kvtiers_storage_up", "fs") == 1
    assert bench.value("kvtiers_storage_probes_total", "fs", "ok") == 1
    assert bench.value("kvtiers_storage_reserve_bytes", "fs") == 1 << 20
    assert bench.value("kvtiers_storage_free_bytes", "fs") > 0


@pytest.mark.parametrize("error", [StoreUnavailableError("no"), RuntimeError("can't start new thread")])
def test_an_error_is_down_until_it_answers_again(bench: Bench, error: Exception) -> None:
    bench.tier.probe()
    bench.error = error
    bench.opened = 0
    bench.now += 15
    bench.tier.probe()
    assert bench.value("kvtiers_storage_up", "fs") == 0
    assert bench.value("kvtiers_storage_probes_total", "fs", type(error).__name__) == 1
    bench.error = None
    bench.tier.probe()
    assert bench.value("kvtiers_storage_up", "fs") == 1
    assert bench.opened == 1  # credentials or a root may be what was wrong: the store is made anew


def test_free_space_of_a_root_that_is_gone_is_not_known(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    tier = WatchedTier("fs", FsTierConfig(root_dir=str(root)))
    monitor = StorageMonitor([tier], probe_every_s=15, scan_every_s=0)

    def shown() -> set[str]:
        tier.probe()
        monitor.publish()
        return {sample.name for sample in monitor.metrics.snapshot()}

    assert "kvtiers_storage_free_bytes" in shown()
    root.rmdir()
    assert "kvtiers_storage_free_bytes" not in shown()
    root.mkdir()
    assert "kvtiers_storage_free_bytes" in shown()


def test_a_tier_that_is_only_read_has_no_reserve(tmp_path: Path) -> None:
    tier = WatchedTier("fs", FsTierConfig(root_dir=str(tmp_path), read_only=True, min_free=1 << 60))
    monitor = StorageMonitor([tier], probe_every_s=15, scan_every_s=0)
    tier.probe()
    monitor.publish()
    shown = {sample.name for sample in monitor.metrics.snapshot()}
    assert "kvtiers_storage_free_bytes" in shown
    assert "kvtiers_storage_reserve_bytes" not in shown


def test_a_tier_that_hangs_is_down_while_it_hangs_and_counted_once(bench: Bench) -> None:
    bench.gate.clear()
    thread = threading.Thread(target=bench.tier.probe)
    thread.start()
    wait_for(lambda: bench.tier.asking_since is not None)
    bench.now += 14
    assert bench.value("kvtiers_storage_probes_total", "fs", "timeout") == 0
    bench.now += 2
    assert bench.value("kvtiers_storage_up", "fs") == 0
    assert bench.value("kvtiers_storage_probes_total", "fs", "timeout") == 1
    assert bench.value("kvtiers_storage_probes_total", "fs", "timeout") == 1
    bench.gate.set()
    thread.join()
    assert bench.value("kvtiers_storage_up", "fs") == 0  # it was answered, and not in time
    assert bench.value("kvtiers_storage_probe_seconds", "fs") == 16
    bench.now += 15
    bench.tier.probe()
    assert bench.value("kvtiers_storage_up", "fs") == 1
    assert bench.value("kvtiers_storage_probes_total", "fs", "timeout") == 1
    assert bench.value("kvtiers_storage_probes_total", "fs", "ok") == 1


def test_a_late_answer_that_nobody_saw_coming_is_a_timeout(bench: Bench) -> None:
    bench.gate.clear()
    thread = threading.Thread(target=bench.tier.probe)
    thread.start()
    wait_for(lambda: bench.tier.asking_since is not None)
    bench.now += 16
    bench.gate.set()
    thread.join()
    assert bench.value("kvtiers_storage_up", "fs") == 0
    assert bench.value("kvtiers_storage_probes_total", "fs", "timeout") == 1
    assert bench.value("kvtiers_storage_probes_total", "fs", "ok") == 0


def block(namespace: str, digits: str = "0000000", rank: int = 0) -> str:
    return f"{namespace}_r{rank}/{digits[:3]}/{digits[3:5]}_g0/{digits}.bin"


A, B = "a_aaaaaaaaaaaa", "b_bbbbbbbbbbbb"  # names as du and show print them


def test_blocks_are_counted_by_namespace(bench: Bench) -> None:
    for name, size in ((block(A), 10), (block(A, "0000001", rank=1), 20), (block(B), 5)):
        bench.store.put(name, [memoryview(bytes(size))])
    for other in ("a_aaaaaaaaaaaa/config.json", "models/gpt2/pytorch_model.bin", f"{A}_r0/000/00_g0/x.bin"):
        bench.store.put(other, [memoryview(b"{}")])
    bench.tier.scan()
    assert bench.value("kvtiers_storage_blocks", "fs", A) == 2
    assert bench.value("kvtiers_storage_bytes", "fs", A) == 30
    assert bench.value("kvtiers_storage_bytes", "fs", B) == 5
    assert bench.value("kvtiers_storage_scan_timestamp_seconds", "fs") == 1_700_000_000
    bench.store.delete(block(B))
    bench.tier.scan()
    bench.monitor.publish()
    namespaces = {s.labels["namespace"] for s in bench.monitor.metrics.snapshot() if "namespace" in s.labels}
    assert namespaces == {A}  # one that is gone has no samples


def test_a_failed_scan_keeps_the_last_figures(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.store.put(block(A), [memoryview(bytes(10))])
    bench.tier.scan()
    bench.error = StoreUnavailableError("no")
    bench.tier.scan()
    assert bench.value("kvtiers_storage_blocks", "fs", A) == 1
    assert "could not be scanned" in caplog.text


def test_label_values_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtiers.connector.commands.monitor.NAMESPACES_MAX", 3)
    for number in range(6):
        bench.store.put(block(f"n_{number:012}"), [memoryview(bytes(8))])
    bench.tier.scan()
    assert bench.tier.usage is not None
    assert len(bench.tier.usage.blocks) == 4
    assert bench.tier.usage.blocks[OTHER] == 3


def test_an_absent_root_is_down_and_not_made(tmp_path: Path) -> None:
    root = tmp_path / "none"
    tier = WatchedTier("fs", FsTierConfig(root_dir=str(root)))
    assert tier.probe().error == "StoreConfigError"
    assert not root.exists()


def test_watching_leaves_nothing_in_a_root(tmp_path: Path) -> None:
    tier = WatchedTier("nfs", NfsTierConfig(root_dir=str(tmp_path)))
    assert tier.probe().error == ""
    tier.scan()
    tier.close()
    assert tier.usage is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("client", CLIENTS)
def test_a_bucket_that_is_gone_is_down(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_server() as server:
        use_credentials(monkeypatch, server)
        use_client(monkeypatch, client)
        config = S3TierConfig(bucket="kvbucket", endpoint_url=server.endpoint_url, region="us-east-1")
        server.client().create_bucket(Bucket="kvbucket")
        tier = WatchedTier("s3", config)
        assert tier.probe().error == ""
        server.client().delete_bucket(Bucket="kvbucket")
        assert tier.probe().error == "StoreConfigError"
        tier.close()


@pytest.mark.parametrize("status", [200, 404])
def test_a_server_that_speaks_no_s3_is_down(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Website(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "6")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(b"<html>")

        do_HEAD = do_GET

        def log_message(self, format: str, *_: object) -> None:
            pass

    use_credentials(monkeypatch)
    with ThreadingHTTPServer(("127.0.0.1", 0), Website) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        tier = WatchedTier("s3", S3TierConfig(bucket="kvbucket", endpoint_url=url, region="us-east-1"))
        assert tier.probe().error in ("StoreConfigError", "StoreUnavailableError", "MissingHeaderError")
        tier.close()
        server.shutdown()


def test_memory_and_foreign_tiers_cannot_be_watched(tmp_path: Path) -> None:
    tiers = [
        {"type": "memory"},
        {"type": "Other", "module_path": "elsewhere"},
        {"type": "fs", "root_dir": str(tmp_path), "name": "disk"},
    ]
    config = parse_config({"region": {"size": "1MiB"}, "tiers": tiers})
    assert [tier.name for tier in watched_tiers(config)] == ["disk"]


def test_names_follow_the_conventions_and_are_not_the_engines() -> None:
    assert list(STORAGE_METRICS) == sorted(STORAGE_METRICS)
    assert not STORAGE_METRICS.keys() & METRICS.keys()
    for name, metric in STORAGE_METRICS.items():
        assert (metric.kind is MetricKind.COUNTER) == name.endswith("_total")
        assert metric.help.endswith(".")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("kv..local", "'kv..local' is not a valid host name"),
        ("300.1.1.1", "300.1.1.1 cannot be served: "),
        ("192.0.2.1", "192.0.2.1 cannot be served: Cannot assign requested address"),
    ],
)
def test_an_address_that_cannot_be_had_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
    code, out = run("serve-metrics", str(tmp_path), "--port", "0", "--address", address)
    assert (code, f"--address: {said}" in out) == (2, True), out


def test_no_probe_ends_between_two_looks_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(threading.Event):
        waits: ClassVar[list[float]] = []

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            self.waits.append(timeout)
            return True

    # Also for the thread that probes, which waits for 0.1 s.
    monkeypatch.setattr(monitor, "threading", SimpleNamespace(Event=Stop, Thread=threading.Thread))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    code, out = run("serve-metrics", str(tmp_path), "--port", "0", "--probe-every", "100ms", "--scan-every", "0")
    assert code == 0, out
    assert min(Stop.waits) == 0.05


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    (root / block(A)).parent.mkdir(parents=True)
    (root / block(A)).write_bytes(bytes(100))
    config = write_tiers(tmp_path / "c.yaml", f"type: fs, root_dir: {root}")
    command = [*CLI, "serve-metrics", config, "--port", "0", "--probe-every", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(re.search(r":(\d+)/metrics", process.stdout.readline())[1])  # type: ignore[index]

        def scraped() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
                text: str = answer.read().decode()
            return text

        wait_for(lambda: 'kvtiers_storage_up{tier="fs"} 1.0' in scraped())
        wait_for(lambda: 'kvtiers_storage_bytes{namespace="a_aaaaaaaaaaaa",tier="fs"} 100.0' in scraped())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
