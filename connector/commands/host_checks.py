"""Checks of ``kvtiers check`` that concern no single tier: this machine, the engine's process, the whole file."""

from __future__ import annotations

import errno
import http.client
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing, suppress

from ...tiers.config.deployment import DeploymentConfig
from ...tiers.config.tier_options import TierConfig
from ...tiers.config.values import human_bytes, show_size
from ...tiers.errors import KVTiersError
from ..region.region_file import free_bytes, running_regions
from .findings import Finding, of_error
from .time_limit import within

CGROUP_MEMORY = "/sys/fs/cgroup/memory.max"
METRICS_S_MAX = 2.0
METRICS_BYTES_MAX = 1 << 20
METRIC_PREFIX = b"kvtiers_"
FILES_PER_THREAD = 8
FILES_BASE = 256


def host_findings(deployment: DeploymentConfig) -> Iterator[Finding]:
    """Check this machine, the engine's process, and options outside of tiers. Writes nothing."""
    region_bytes = deployment.region.size
    yield shared_memory(region_bytes).at("host")
    yield _memory(region_bytes).at("host")
    yield _locked_memory(region_bytes).at("host")
    yield _open_files(deployment).at("host")
    yield _hash_seed().at("engine")
    if deployment.metrics.port is not None:
        yield _metrics(deployment.metrics.address, deployment.metrics.port).at("engine")
    if not deployment.tiers:
        text = "the list is empty, so blocks are kept only in the region and are lost at exit"
        yield Finding("warning", "tiers", text, "add a tier, such as type: fs with a root_dir", part="config")


def shared_memory(region_bytes: int) -> Finding:
    """Check that /dev/shm has room for the region."""
    takes = f"the region takes {human_bytes(region_bytes)}"
    try:
        free = free_bytes("/dev/shm")
        if free is None:
            return Finding("ok", "/dev/shm", f"has no size limit, {takes}")
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        text = "does not exist: engine processes cannot share a region"
        return Finding("problem", "/dev/shm", text, "mount it")
    text = f"{human_bytes(free)} of {human_bytes(total)} free, {takes}"
    if free >= region_bytes:
        return Finding("ok", "/dev/shm", text)
    with suppress(OSError):  # /proc may be hidden
        for header in running_regions():
            geometry = header.geometry
            if geometry.size_bytes <= region_bytes < geometry.size_bytes + geometry.row_stride:
                text += f"; a running engine (pid {header.creator}) uses a region of this size"
                return Finding("ok", "/dev/shm", text)
    fix = "lower region.size, or enlarge /dev/shm: --shm-size (Docker), an emptyDir with medium: Memory (Kubernetes)"
    if total >= region_bytes:
        fix += "; if an engine with this file is running, its region uses it: run this command as the engine's user"
    return Finding("problem", "/dev/shm", text, fix)


def _memory(region_bytes: int) -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open(CGROUP_MEMORY, encoding="ascii") as f:
            total = min(total, int(f.read()))
    except (OSError, ValueError):
        pass  # no cgroup, or "max"
    text = f"the region takes {region_bytes / total:.0%} of {human_bytes(total)}"
    if region_bytes > 0.8 * total:
        return Finding("problem", "memory", text, "lower region.size: the engine itself needs memory")
    return Finding("ok", "memory", text)


def _locked_memory(region_bytes: int) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("ok", "locked memory", "unlimited")
    text = f"limited to {show_size(soft)}, the region takes {show_size(region_bytes)}"
    if soft >= region_bytes:
        return Finding("ok", "locked memory", text)
    fix = "ulimit -l unlimited; --ulimit memlock=-1 (Docker); LimitMEMLOCK=infinity (systemd). Not needed on CPUs"
    text += ": some drivers then cannot pin it, and copies to a GPU are slower"
    return Finding("note", "locked memory", text, fix)


def _open_files(deployment: DeploymentConfig) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tiers = [tier for tier in deployment.tiers if isinstance(tier, TierConfig)]
    threads = sum(tier.n_read_threads + tier.n_write_threads + tier.children for tier in tiers)
    wanted = FILES_BASE + FILES_PER_THREAD * threads
    text = f"the limit is {soft}; the {threads} threads of the tiers need {wanted}"
    if soft >= wanted:
        return Finding("ok", "open files", text)
    return Finding("problem", "open files", text, f"ulimit -n {min(max(wanted, 65_536), max(hard, wanted))}")


def _hash_seed() -> Finding:
    seed = os.environ.get("PYTHONHASHSEED", "random")
    if seed != "random":
        return Finding("ok", "hash seed", f"PYTHONHASHSEED is {seed}: it must be the same on every replica")
    text = "PYTHONHASHSEED is not set: with a seeded block hash, processes cannot share blocks"
    fix = "keep vLLM's default sha256 (from 0.29 on), or set the same PYTHONHASHSEED for every replica"
    return Finding("note", "hash seed", text, fix)


def _metrics(address: str, port: int) -> Finding:
    try:
        from ...tiers.exporter import MetricsServer  # noqa: F401 - prometheus_client may be missing

        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except KVTiersError as e:
        return of_error(e)
    except OSError as e:
        if e.errno == errno.EADDRINUSE and _serves_metrics(address, port):
            return Finding("ok", "metrics", f"{address}:{port} is in use by a running engine of kvtiers")
        text = f"{address}:{port} cannot be used ({e.strerror}): no metrics are served"
        return Finding("problem", "metrics", text, "choose another metrics.port")
    return Finding("ok", "metrics", f"{address}:{port} is free")


def _serves_metrics(address: str, port: int) -> bool:
    """Whether an engine of kvtiers serves its metrics there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)

    def read() -> bytes:
        with closing(http.client.HTTPConnection(host, port, timeout=2 * METRICS_S_MAX)) as connection:
            connection.request("GET", "/metrics")
            return connection.getresponse().read(METRICS_BYTES_MAX)

    try:
        return METRIC_PREFIX in within(METRICS_S_MAX, read)
    except (OSError, http.client.HTTPException):
        return False
