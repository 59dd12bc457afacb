"""``kvtiers doctor``: tests whether this machine and its storage meet a deployment's needs; each problem has a fix.

It examines all that ``kvtiers check`` does, and goes on: it creates the root folders as an engine would, and writes and
removes small blobs in each tier.
"""

from __future__ import annotations

import errno
import http.client
import os
import resource
import socket
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict

import typer
from rich.console import Console

from ...tiers.config.deployment import DeploymentConfig, load_named
from ...tiers.config.open_store import open_tool_store
from ...tiers.config.tier_options import (
    ExternalTierConfig,
    FsTierConfig,
    MemoryTierConfig,
    NfsTierConfig,
    S3TierConfig,
    TierConfig,
)
from ...tiers.config.values import show_size
from ...tiers.errors import KVTiersError, StoreError, printable
from ...tiers.registry import SecondaryTierFactory
from ...tiers.store import Store
from ...tiers.tools.inventory import block_beginnings
from .doctor_storage import (
    PROBE_FOLDER,
    examine_folder,
    examine_namespaces,
    examine_seals,
    examine_store,
)
from .findings import (
    Finding,
    config_findings,
    no_answer,
    of_error,
    shared_memory,
    tier_findings,
)
from .options import AsJson, YamlFile
from .output import answer, counted, make_console
from .session import ExitCode, session

TIER_S_MAX = 30.0  # storage that hangs longer is reported as a problem
CGROUP_MEMORY = "/sys/fs/cgroup/memory.max"
METRICS_S_MAX = 2.0
METRICS_BYTES_MAX = 1 << 20
METRIC_PREFIX = b"kvtiers_"
FILES_PER_THREAD = 8
FILES_BASE = 256
_MARKS = {
    "ok": "[green]ok     [/green]",
    "note": "[cyan]note   [/cyan]",
    "warning": "[yellow]warning[/yellow]",
    "problem": "[red]problem[/red]",
}


def doctor(config: YamlFile, as_json: AsJson = False) -> None:
    """Test whether this machine and its storage meet a deployment's needs, and print a fix for each problem.

    Creates the root folders as an engine would, and writes and removes small blobs in each tier.
    """
    session().if_interrupted = lambda: f"a test blob of 4 KiB may be left below {PROBE_FOLDER} in a tier; run it again"
    findings = examine(load_named(config, SecondaryTierFactory.tier_types()))
    failed = any(finding.level == "problem" for finding in findings)
    if as_json:
        answer({"findings": [asdict(finding) for finding in findings]}, ok=not failed)
    else:
        show(findings, make_console())
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def examine(deployment: DeploymentConfig, *, tier_s_max: float = TIER_S_MAX) -> list[Finding]:
    """Run all checks, in the order of the configuration."""
    findings = [*_host(deployment), *_engine(deployment), *config_findings(deployment)]
    for index, tier in enumerate(deployment.tiers):
        findings += _in_time(f"tiers[{index}] {tier.type}", tier, tier_s_max)
    return findings


def show(findings: list[Finding], console: Console) -> None:
    """Print one line per finding, and one per fix."""
    for finding in findings:
        console.print(f"{_MARKS[finding.level]} ", end="")
        text = f"{finding.where}, {finding.check}: {finding.message}"
        console.print(printable(text), markup=False, highlight=False)
        if finding.fix:
            console.print(f"        fix: {printable(finding.fix)}", markup=False, highlight=False)
    levels = Counter(finding.level for finding in findings)
    counts = [counted(levels[level], level) for level in ("problem", "warning") if level == "problem" or levels[level]]
    console.print(f"{', '.join(counts)} in {len(findings)} findings")


def _in_time(where: str, tier: TierConfig | ExternalTierConfig, seconds: float) -> list[Finding]:
    """Examine a tier until the time is up. Hanging storage keeps its thread."""
    found: list[Finding] = []

    def work() -> None:
        try:
            for finding in _tier(where, tier):
                found.append(finding)
        except (KVTiersError, OSError) as e:
            found.append(of_error(where, e, tier if isinstance(tier, TierConfig) else None))
        except Exception as e:  # noqa: BLE001 - the thread's edge: a lost exception would look like success
            # Without the exception's text, which may contain secrets.
            at = traceback.extract_tb(e.__traceback__)[-1]
            text = f"could not be checked: {type(e).__name__} in {os.path.basename(at.filename)}:{at.lineno}"
            found.append(
                Finding("problem", where, "storage", text, "please report this: it is a bug in kvtiers doctor")
            )

    thread = threading.Thread(target=work, name=f"kvtiers-doctor-{where}", daemon=True)
    thread.start()
    thread.join(seconds)
    done = list(found)
    if thread.is_alive():
        done.append(no_answer(where, tier, seconds))
    return done


# ---- this machine ----------------------------------------------------------------------------------------------------


def _host(deployment: DeploymentConfig) -> Iterator[Finding]:
    region_bytes = deployment.region.size
    yield shared_memory(region_bytes)
    yield _memory(region_bytes)
    yield _locked_memory(region_bytes)
    yield _open_files(deployment)


def _memory(region_bytes: int) -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open(CGROUP_MEMORY, encoding="ascii") as f:
            total = min(total, int(f.read()))
    except (OSError, ValueError):
        pass  # no cgroup, or "max"
    text = f"the region takes {region_bytes / total:.0%} of {total / 2**30:.1f} GiB"
    if region_bytes > 0.8 * total:
        return Finding("problem", "host", "memory", text, "lower region.size: the engine itself needs memory")
    return Finding("ok", "host", "memory", text)


def _locked_memory(region_bytes: int) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("ok", "host", "locked memory", "unlimited")
    text = f"limited to {show_size(soft)}, the region takes {show_size(region_bytes)}"
    if soft >= region_bytes:
        return Finding("ok", "host", "locked memory", text)
    return Finding(
        "note", "host", "locked memory", f"{text}: some drivers then cannot pin it, and copies to a GPU are slower",
        "ulimit -l unlimited; --ulimit memlock=-1 (Docker); LimitMEMLOCK=infinity (systemd). Not needed on CPUs",
    )  # fmt: skip


def _open_files(deployment: DeploymentConfig) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    threads = sum(
        tier.n_read_threads + tier.n_write_threads + tier.children
        for tier in deployment.tiers
        if isinstance(tier, TierConfig)
    )
    wanted = FILES_BASE + FILES_PER_THREAD * threads
    text = f"the limit is {soft}, and {threads} threads need {wanted}"
    if soft < wanted:
        return Finding(
            "problem", "host", "open files", text, f"ulimit -n {min(max(wanted, 65_536), max(hard, wanted))}"
        )
    return Finding("ok", "host", "open files", text)


# ---- the engine's process --------------------------------------------------------------------------------------------


def _engine(deployment: DeploymentConfig) -> Iterator[Finding]:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None or seed == "random":
        yield Finding(
            "note", "engine", "hash seed",
            "PYTHONHASHSEED is not set: with a seeded block hash, processes cannot share blocks",
            "keep vLLM's default sha256 (from 0.29 on), or set the same PYTHONHASHSEED for every replica",
        )  # fmt: skip
    else:
        yield Finding("ok", "engine", "hash seed", f"PYTHONHASHSEED is {seed}: it must be the same on every replica")
    metrics = deployment.metrics
    if metrics.port is not None:
        yield from _metrics(metrics.address, metrics.port)


def _metrics(address: str, port: int) -> Iterator[Finding]:
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as e:
        if e.errno == errno.EADDRINUSE and _serves_metrics(address, port):
            yield Finding("ok", "engine", "metrics", f"{address}:{port} is in use by a running engine of kvtiers")
            return
        yield Finding(
            "problem", "engine", "metrics", f"{address}:{port} cannot be used ({e.strerror}): no metrics are served",
            "choose another metrics.port",
        )  # fmt: skip
    else:
        yield Finding("ok", "engine", "metrics", f"{address}:{port} is free")


def _serves_metrics(address: str, port: int) -> bool:
    """Whether an engine of kvtiers serves its metrics there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    connection = http.client.HTTPConnection(host, port, timeout=METRICS_S_MAX)
    try:
        connection.request("GET", "/metrics")
        return METRIC_PREFIX in connection.getresponse().read(METRICS_BYTES_MAX)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


# ---- a tier ----------------------------------------------------------------------------------------------------------


def _tier(where: str, tier: TierConfig | ExternalTierConfig) -> Iterator[Finding]:
    stopped = False
    for finding in tier_findings(where, tier):
        yield finding
        # A store that is short of space can be opened and examined. Others would only repeat the problem.
        stopped |= finding.level == "problem" and finding.check not in ("min_free", "mount options")
    if isinstance(tier, ExternalTierConfig):
        yield Finding("note", where, "options", "not a kvtiers tier, so its options are not checked")
        return
    if isinstance(tier, MemoryTierConfig):
        yield Finding("note", where, "storage", "in the engine's memory: lost at its exit, not shared with others")
        return
    if stopped:
        return
    with closing(open_tool_store(tier)) as store:  # without min_free, which tier_findings has judged
        if isinstance(tier, (FsTierConfig, NfsTierConfig)):
            yield from examine_folder(where, tier)
        if isinstance(tier, S3TierConfig):
            yield from _bucket(where, tier, store)
        yield from examine_store(where, tier, store)
        if isinstance(tier, S3TierConfig) and not tier.read_only:
            refused = getattr(store, "checksum_refused", False)
            yield _checksum(where, refused=refused)
        yield from examine_namespaces(where, store)
        yield from examine_seals(where, tier, store)
    if isinstance(tier, (FsTierConfig, NfsTierConfig)):
        with suppress(OSError):
            os.rmdir(os.path.join(tier.root_dir, PROBE_FOLDER))


def _bucket(where: str, tier: S3TierConfig, store: Store) -> Iterator[Finding]:
    from ...tiers.stores.s3.store import S3Store  # here, because it imports the S3 clients

    assert isinstance(store, S3Store)
    try:
        keeps_versions = store.keeps_versions(block_beginnings(store.folders()))
    except StoreError:  # the right to list versions is missing, which a tier does not need, or no versioning
        keeps_versions = False
    yield Finding("ok", where, "bucket", f"{tier.bucket} exists, and the credentials are valid")
    if keeps_versions and not tier.read_only:
        yield Finding(
            "problem", where, "versioning", "the bucket keeps deleted blocks, so max_bytes and ttl free no space",
            "use a bucket without versioning, or expire noncurrent versions: kvtiers gc --lifecycle",
        )  # fmt: skip
    if tier.allow_insecure:
        yield Finding(
            "problem", where, "TLS", "http is allowed, which sends blocks and signatures in clear text", "use https"
        )


def _checksum(where: str, *, refused: bool) -> Finding:
    from ...tiers.stores.s3.put_form import CHECKSUM  # here, because it imports the S3 clients

    if refused:
        return Finding(
            "note", where, "checksums",
            f"the server rejects {CHECKSUM} or unsigned payloads; payloads are signed instead",
            "update the server, to save one rejected request at each start",
        )  # fmt: skip
    return Finding("ok", where, "checksums", f"the server accepts {CHECKSUM}")
