"""``kvtiers check``: validates a configuration, and finds problems that an engine with it would have here."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvtiers.connector.commands.output import answer
from kvtiers.connector.commands.places import EXIT_BAD_INPUT, EXIT_FAILED, cell, human_age, human_bytes, make_console
from kvtiers.connector.region.region_file import free_bytes
from kvtiers.tiers.builtin import make_seal
from kvtiers.tiers.config.deployment import DeploymentConfig, json_schema, load_config
from kvtiers.tiers.config.open_store import open_tool_store, store_recipe
from kvtiers.tiers.config.tier_options import (
    BoundedTierConfig,
    ExternalTierConfig,
    FsspecTierConfig,
    FsTierConfig,
    NfsTierConfig,
    S3TierConfig,
    StoreTierConfig,
    TierConfig,
)
from kvtiers.tiers.daemon_pool import DaemonPool
from kvtiers.tiers.errors import KVTiersError, StoreError, printable
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.stores.files.mounts import file_system_type, missing_mount, mount_findings
from kvtiers.tiers.stores.fsspec_driver import check_drivers
from kvtiers.tiers.tracing import make_job_tracer

TIERS_AT_ONCE = 16
TIERS_S_MAX = 10.0  # how long `kvtiers check` waits for storage; a broken bucket reports its error much earlier

_NO_ANSWER = ": no answer within {:g} s; is the server up, and is the mount not hung?"

#: Options that the description shows elsewhere, not in the column "how".
_SAID_OTHERWISE = {*TierConfig.model_fields, "read_only", "ttl", "gc_high", "gc_low", "gc_every_s"}


def check(
    config: Annotated[Path | None, typer.Argument(help="The YAML file to check.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of the YAML, for editors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Validate a configuration and describe the tiers that would run with it."""
    if schema:
        print(json.dumps(json_schema(), indent=2))
        return
    if config is None:
        raise typer.BadParameter("give a YAML file, or --schema")
    try:
        deployment = load_config(config, SecondaryTierFactory.tier_types())
    except KVTiersError as e:
        if as_json:
            answer(None, ok=False, errors=str(e).split("\n"))
        else:
            make_console().print(f"[red]{cell(str(config))} is not accepted:[/red]")
            for line in str(e).split("\n"):
                make_console().print(f"  {printable(line)}", markup=False, highlight=False)
        raise typer.Exit(EXIT_BAD_INPUT) from e
    findings = find_problems(deployment)
    notes = _find_notes(deployment)
    if as_json:
        answer({"config": deployment.model_dump(), "findings": findings, "notes": notes}, ok=not findings)
    else:
        _describe(config, deployment, findings, notes)
    if findings:
        raise typer.Exit(EXIT_FAILED)


def find_problems(deployment: DeploymentConfig) -> list[str]:
    """Find the problems that a valid configuration would have on this machine, each with its fix."""
    findings = []
    size = deployment.region.size
    try:
        free = free_bytes("/dev/shm")
    except OSError:
        findings.append("region.size: /dev/shm does not exist; a region shared by several processes needs it")
    else:
        if free is not None and size > free:
            findings.append(
                f"region.size: {human_bytes(size)} is more than /dev/shm has free ({human_bytes(free)}); "
                "lower region.size, or make /dev/shm larger (in a container: --shm-size)"
            )
    if deployment.metrics.port is not None:
        findings += [problem[1:] for problem in _refusals(lambda: importlib.import_module("kvtiers.tiers.exporter"))]
    if not deployment.tiers:
        findings.append("tiers: the list is empty, so blocks are kept only in the region and are lost at exit")
    if deployment.tiers:
        # In parallel: a bucket that does not answer takes seconds to fail, and a hanging mount never does.
        pool = DaemonPool(min(TIERS_AT_ONCE, len(deployment.tiers)), "kvtiers-check")
        asked = [pool.submit(_tier_problems, tier) for tier in deployment.tiers]
        wait(asked, TIERS_S_MAX)
        for index, future in enumerate(asked):
            problems = future.result() if future.done() else [_NO_ANSWER.format(TIERS_S_MAX)]
            findings += [f"tiers[{index}]{problem}" for problem in problems]
        pool.shutdown(0.0)
    return findings


def _find_notes(deployment: DeploymentConfig) -> list[str]:
    """Find settings that may be intended, and are not a reason to fail."""
    nfs = [(index, tier.root_dir) for index, tier in enumerate(deployment.tiers) if isinstance(tier, NfsTierConfig)]
    return [f"tiers[{index}].root_dir: {note}" for index, root_dir in nfs if (note := missing_mount(root_dir))]


def _tier_problems(tier: TierConfig | ExternalTierConfig) -> list[str]:
    if isinstance(tier, ExternalTierConfig):
        return _refusals(lambda: SecondaryTierFactory.find_class(tier.type, tier.module_path))
    found = _refusals(lambda: make_seal(tier))
    if tier.trace:
        found += _refusals(lambda: make_job_tracer(tier.type))
    if isinstance(tier, S3TierConfig):
        embedded = _refusals(lambda: store_recipe(tier))
        found += embedded or [f": {problem}" for problem in _bucket_problems(tier)]
    elif isinstance(tier, FsspecTierConfig):
        found += _refusals(lambda: check_drivers(tier.url), "url")
    elif isinstance(tier, StoreTierConfig):
        found += _refusals(lambda: _try_store(tier), "options")
    elif isinstance(tier, NfsTierConfig) and file_system_type(tier.root_dir).startswith("nfs"):
        # Do not touch anything in the mount: it may hang.
        found += [f".root_dir: {problem}" for problem in mount_findings(tier.root_dir)]
    elif isinstance(tier, (FsTierConfig, NfsTierConfig)):
        found += [f".{problem}" for problem in _folder_problems(tier)]
    return found


def _refusals(call: Callable[[], object], field: str = "") -> list[str]:
    """Return the error that would also stop an engine's start, prefixed with its field; an empty list if none."""
    try:
        call()
    except KVTiersError as e:
        return [f".{field}: {e}" if field else f".{e}"]
    return []


def _bucket_problems(tier: S3TierConfig) -> list[str]:
    from kvtiers.tiers.stores.s3.store import S3Store  # here, because it imports the S3 clients

    try:
        with closing(S3Store(tier.store_options())) as store:
            store.try_out(read_only=tier.read_only)
    except StoreError as e:
        return [str(e)]
    return []


def _try_store(tier: StoreTierConfig) -> None:
    with closing(open_tool_store(tier, read_only=True)) as store:
        store.size("kvtiers-check")


def _folder_problems(tier: FsTierConfig | NfsTierConfig) -> list[str]:
    root = Path(tier.root_dir).absolute()
    try:
        if root.is_symlink():
            return [f"root_dir: {root} is a symbolic link; write the folder that it points to"]
        if root.exists() and not root.is_dir():
            return [f"root_dir: {root} is not a folder"]
        if tier.read_only:
            return _unreadable(root)
        parent = root
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            return [f"root_dir: {parent} is not a folder"]
        if not os.access(parent, os.W_OK | os.X_OK):
            return [f"root_dir: {parent} is not writable for uid {os.getuid()}"]
        free = shutil.disk_usage(parent).free
    except OSError as e:  # no permission to search a parent folder, or a name that is too long
        return [f"root_dir: {root} cannot be accessed by uid {os.getuid()}: {e.strerror}"]
    if free < tier.min_free:
        reserve = human_bytes(tier.min_free)
        return [f"min_free: {reserve} must stay free, but only {human_bytes(free)} are free: nothing is stored"]
    return []


def _unreadable(root: Path) -> list[str]:
    if not root.exists():
        return [f"root_dir: {root} does not exist, and the tier is read_only: nothing can be loaded"]
    if not os.access(root, os.R_OK | os.X_OK):
        return [f"root_dir: {root} is not readable for uid {os.getuid()}"]
    return []


def _describe(path: Path, deployment: DeploymentConfig, findings: list[str], notes: list[str]) -> None:
    console = make_console()
    region = deployment.region
    console.print(f"[bold]{cell(str(path))}[/bold] is valid. An engine that uses it works like this:\n")
    console.print(
        f"KV blocks pass through a CPU region of [bold]{human_bytes(region.size)}[/bold]; "
        f"when the region is full, {region.eviction_policy.upper()} chooses the blocks to evict. "
        f"{deployment.blocks_per_chunk} engine block(s) make one stored block."
    )
    console.print(
        f"A block found in a tier waits up to {region.promotion_wait_s} s for room before it counts as a miss.\n"
    )
    if deployment.tiers:
        written = "each of these tiers that is not read_only" if _any_read_only(deployment) else "all of these tiers"
        console.print(f"Every stored block goes to {written}; loads come from the first tier that has the block:")
        table = Table("", "tier", "where", "how")
        for index, tier in enumerate(deployment.tiers):
            table.add_row(*map(cell, (f"tiers[{index}]", tier.type, *_where_and_how(tier))))
        console.print(table)
        for index, tier in enumerate(deployment.tiers):
            if isinstance(tier, BoundedTierConfig):
                console.print(f"tiers[{index}]: {_bound_in_words(tier)}", markup=False, highlight=False)
    for label, texts in (("[cyan]note[/cyan]", notes), ("[yellow]problem[/yellow]", findings)):
        for text in texts:
            console.print(f"{label} ", end="")
            console.print(printable(text), markup=False, highlight=False)


def _any_read_only(deployment: DeploymentConfig) -> bool:
    return any(isinstance(tier, BoundedTierConfig) and tier.read_only for tier in deployment.tiers)


def _bound_in_words(tier: BoundedTierConfig) -> str:
    if tier.read_only:
        return "only loads; the engines that write to its storage enforce the limits"
    rules = []
    if tier.max_bytes is not None:
        rules.append(
            f"all writers together store at most {human_bytes(tier.max_bytes)}; above {tier.gc_high:.0%} of that "
            f"the {_unused(tier)} blocks are removed until {tier.gc_low:.0%} are left"
        )
    if tier.ttl is not None:
        rules.append(f"blocks not {'used' if _notes_uses(tier) else 'written'} for {human_age(tier.ttl)} are removed")
    if not rules:
        return "nothing is ever removed; set max_bytes or ttl to bound it"
    return "; ".join(rules) + f"; the storage is scanned every {human_age(tier.gc_every_s)}"


def _notes_uses(tier: BoundedTierConfig) -> bool:
    return isinstance(tier, FsTierConfig | NfsTierConfig)


def _unused(tier: BoundedTierConfig) -> str:
    return "least recently used" if _notes_uses(tier) else "oldest"


def _where_and_how(tier: TierConfig | ExternalTierConfig) -> tuple[str, str]:
    if isinstance(tier, ExternalTierConfig):
        return f"{tier.module_path or 'entry point'}", "not a kvtiers tier; its options are not checked here"
    own: dict[str, Any] = {name: value for name, value in tier.model_dump().items() if name not in _SAID_OTHERWISE}
    places = ("root_dir", "url", "bucket", "module_path")
    where = next((str(own.pop(name)) for name in places if name in own), "this process's memory")
    sizes = {
        name: human_bytes(value) if isinstance(value, int) and value >= 4096 else value for name, value in own.items()
    }
    options = ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None)
    how = (
        f"{tier.n_read_threads} load + {tier.n_write_threads} store threads, {human_bytes(tier.task_bytes)} a task, "
        f"unanswered lookups miss after {tier.lookup_deadline_s} s, sealed with {tier.seal_checksum}"
    )
    return where, f"{how}; {options}" if options else how
