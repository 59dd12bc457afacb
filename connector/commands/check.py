"""``kvtiers check``: validates a configuration, and finds problems that an engine with it would have here.

The last line is the verdict: usable, usable with warnings, or not usable and which options are at fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ...tiers.config.deployment import DeploymentConfig, json_schema, load_config
from ...tiers.config.mistakes import value_in_words
from ...tiers.config.open_store import open_tool_store
from ...tiers.config.tier_options import (
    BoundedTierConfig,
    ExternalTierConfig,
    FsTierConfig,
    MemoryTierConfig,
    NfsTierConfig,
    TierConfig,
    shown_place,
)
from ...tiers.config.values import show_duration, show_size
from ...tiers.daemon_pool import DaemonPool
from ...tiers.errors import KVTiersError, printable
from ...tiers.registry import SecondaryTierFactory
from .findings import (
    Finding,
    config_findings,
    is_mount,
    no_answer,
    shared_memory,
    tier_findings,
)
from .output import answer, cell, counted, human_age, human_bytes, make_console
from .session import ExitCode

TIERS_AT_ONCE = 16
TIERS_S_MAX = 10.0  # how long `kvtiers check` waits for storage; a broken bucket reports its error much earlier
MODELS_MAX = 5  # whose blocks are described

#: Options that other lines show.
_SAID_OTHERWISE = {
    "type", "name", "root_dir", "url", "bucket", "prefix", "module_path", "n_read_threads", "n_write_threads",
    "isolation", "job_deadline_s", "lookup_deadline_s", "encrypt", "keys_file", "keys_env", "read_only", "ttl",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Examined:
    """What ``check`` found out about a deployment on this machine.

    Attributes:
        findings: all findings, in the order of the configuration.
        blocks: per tier, the models with blocks in its storage, and the size of one block in bytes.
    """

    findings: list[Finding]
    blocks: list[dict[str, int]]

    def texts(self, level: str) -> list[str]:
        """The findings of a level, as lines that begin with the option at fault."""
        return [_text_of(finding) for finding in self.findings if finding.level == level]

    def verdict(self) -> str:
        """Whether an engine can use the deployment here, in a few words."""
        if problems := list(dict.fromkeys(_place_of(f) for f in self.findings if f.level == "problem")):
            return f"not usable: {', '.join(problems)}"
        warnings = self.texts("warning")
        return f"usable, with {counted(len(warnings), 'warning')}" if warnings else "usable"


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
        errors = str(e).split("\n")
        verdict = f"not usable: {counted(len(errors), 'mistake')}"
        if as_json:
            answer({"verdict": verdict}, ok=False, errors=errors)
        else:
            for line in errors:
                make_console().print(f"  {printable(line)}", markup=False, highlight=False)
            _tell_verdict(config, verdict)
        raise typer.Exit(ExitCode.BAD_INPUT) from e
    examined = examine(deployment)
    verdict, problems, warnings = examined.verdict(), examined.texts("problem"), examined.texts("warning")
    if as_json:
        result = {
            "verdict": verdict,
            "config": deployment.model_dump(),
            "findings": problems,
            "notes": warnings,
            "blocks": examined.blocks,
        }
        answer(result, ok=not problems)
    else:
        _describe(config, deployment, examined.blocks)
        for label, texts in (("[yellow]warning[/yellow]", warnings), ("[red]problem[/red]", problems)):
            for text in texts:
                make_console().print(f"{label} ", end="")
                make_console().print(printable(text), markup=False, highlight=False)
        _tell_verdict(config, verdict)
    if problems:
        raise typer.Exit(ExitCode.FAILED)


def _tell_verdict(config: Path, verdict: str) -> None:
    color = "red" if verdict.startswith("not") else "yellow" if "warning" in verdict else "green"
    make_console().print(f"{cell(str(config))} is [bold {color}]{cell(verdict)}[/bold {color}]", highlight=False)


def examine(deployment: DeploymentConfig) -> Examined:
    """Examine a valid configuration on this machine.

    Writes nothing to local folders. In buckets, remote URLs and stores of your own it writes and deletes a small blob.
    """
    found = [shared_memory(deployment.region.size), *config_findings(deployment)]
    blocks: list[dict[str, int]] = []
    if deployment.tiers:
        # In parallel: a bucket that does not answer takes seconds to fail, and a hanging mount never does.
        pool = DaemonPool(min(TIERS_AT_ONCE, len(deployment.tiers)), "kvtiers-check")
        wheres = [f"tiers[{index}] {tier.type}" for index, tier in enumerate(deployment.tiers)]
        asked = [pool.submit(_examine_tier, where, tier) for where, tier in zip(wheres, deployment.tiers, strict=True)]
        wait(asked, TIERS_S_MAX)
        for where, tier, future in zip(wheres, deployment.tiers, asked, strict=True):
            of_tier, sizes = future.result() if future.done() else ([no_answer(where, tier, TIERS_S_MAX)], {})
            found += of_tier
            blocks.append(sizes)
        pool.shutdown(0.0)
    return Examined([*found, *_too_small(deployment, blocks)], blocks)


def _examine_tier(where: str, tier: TierConfig | ExternalTierConfig) -> tuple[list[Finding], dict[str, int]]:
    found = list(tier_findings(where, tier, touch_mounts=False))
    if isinstance(tier, ExternalTierConfig | MemoryTierConfig) or any(finding.level == "problem" for finding in found):
        return found, {}
    return found, {} if is_mount(tier) else _block_sizes(tier)


def _block_sizes(tier: TierConfig) -> dict[str, int]:
    """The models with blocks in a storage, and the size of one block of each."""
    from ...tiers.capacity.walker import is_block
    from ...tiers.tools.neighbors import namespaces_in

    sizes: dict[str, int] = {}
    try:
        with closing(open_tool_store(tier, read_only=True)) as store:
            for namespace in namespaces_in(store)[0]:
                block = next((info for info in store.keys(f"{namespace.name}_r0/") if is_block(info.key)), None)
                if block is not None and len(sizes) < MODELS_MAX:
                    sizes[namespace.model] = block.size
    except (KVTiersError, OSError):
        pass  # such as a root that does not exist yet
    return sizes


def _too_small(deployment: DeploymentConfig, blocks: list[dict[str, int]]) -> Iterator[Finding]:
    largest, model = max(((size, model) for sizes in blocks for model, size in sizes.items()), default=(0, ""))
    if largest > deployment.region.size:
        yield Finding(
            "warning", "config", "region.size",
            f"{human_bytes(deployment.region.size)} do not hold one block of {model}, which has {human_bytes(largest)}",
            f"write at least {show_size(-(-largest >> 20 << 24))} for this model",
        )  # fmt: skip


def _place_of(finding: Finding) -> str:
    if finding.check == "/dev/shm":
        return "region.size"
    if finding.where in ("config", "engine"):
        return finding.check
    tier = finding.where.partition(" ")[0]
    return tier if finding.check in ("storage", "mount options") else f"{tier}.{finding.check}"


def _text_of(finding: Finding) -> str:
    fix = f"; {finding.fix}" if finding.fix else ""
    return f"{_place_of(finding)}: {finding.message}{fix}"


def _describe(path: Path, deployment: DeploymentConfig, blocks: list[dict[str, int]]) -> None:
    console = make_console()
    region = deployment.region
    console.print(f"An engine that uses [bold]{cell(str(path))}[/bold] works like this:\n")
    console.print(
        f"KV blocks pass through a CPU region of [bold]{human_bytes(region.size)}[/bold]; "
        f"when the region is full, {region.eviction_policy.upper()} chooses the blocks to evict. "
        f"{deployment.blocks_per_chunk} engine block(s) make one stored block."
    )
    console.print(
        f"A block found in a tier waits up to {show_duration(region.promotion_wait_s)} for room before it counts as a "
        "miss.\n"
    )
    if deployment.tiers:
        written = "each of these tiers that is not read_only" if _any_read_only(deployment) else "all of these tiers"
        console.print(f"Every stored block goes to {written}; loads come from the first tier that has the block:\n")
    for index, tier in enumerate(deployment.tiers):
        sizes = blocks[index] if index < len(blocks) else {}
        for line in _tier_in_words(index, tier, sizes, region.size):
            console.print(printable(line), markup=False, highlight=False)
    if deployment.tiers:
        console.print()


def _any_read_only(deployment: DeploymentConfig) -> bool:
    return any(isinstance(tier, BoundedTierConfig) and tier.read_only for tier in deployment.tiers)


def _bound_in_words(tier: BoundedTierConfig) -> str:
    if tier.read_only:
        return "only loads (read_only); the engines that write to its storage enforce the limits"
    rules = []
    if tier.max_bytes is not None:
        rules.append(
            f"all writers together store about {human_bytes(tier.max_bytes)} at most: shortly before, the "
            f"{_unused(tier)} blocks are removed"
        )
    if tier.ttl is not None:
        rules.append(f"blocks not {'used' if _notes_uses(tier) else 'written'} for {human_age(tier.ttl)} are removed")
    if not rules:
        return "nothing is ever removed; set max_bytes or ttl to bound it"
    return "; ".join(rules)


def _notes_uses(tier: BoundedTierConfig) -> bool:
    return isinstance(tier, FsTierConfig | NfsTierConfig)


def _unused(tier: BoundedTierConfig) -> str:
    return "least recently used" if _notes_uses(tier) else "oldest"


def _tier_in_words(
    index: int, tier: TierConfig | ExternalTierConfig, sizes: dict[str, int], region_bytes: int
) -> Iterator[str]:
    if isinstance(tier, ExternalTierConfig):
        yield f"tiers[{index}] {tier.type}, from {tier.module_path or 'an entry point'}"
        yield "  not a kvtiers tier; its options are not checked here"
        return
    name = f" {tier.name}" if tier.name not in (None, tier.type) else ""
    yield f"tiers[{index}]{name}: {tier.type}, {shown_place(tier)}"
    yield (
        f"  moves blocks with {tier.n_read_threads} load + {tier.n_write_threads} store threads in {tier.children} "
        f"processes, isolation {tier.isolation}"
    )
    yield (
        f"  gives up on a job after {show_duration(tier.job_deadline_s)}, and on unanswered lookups after "
        f"{show_duration(tier.lookup_deadline_s)}"
    )
    keys = f", keys from {tier.keys_file or f'the variable {tier.keys_env}'}" if tier.encrypt != "none" else ""
    yield f"  protects blocks with a checksum, encrypt {tier.encrypt}{keys}"
    is_bounded = isinstance(tier, BoundedTierConfig)
    if isinstance(tier, BoundedTierConfig):
        yield f"  {_bound_in_words(tier)}"
    dumped: dict[str, Any] = tier.model_dump()
    schema = type(tier).model_json_schema()["properties"]
    others = [
        f"{name} {value_in_words(schema[name], value)}"
        for name, value in dumped.items()
        if name not in _SAID_OTHERWISE
        and value is not None
        and not (name == "max_bytes" and is_bounded)
        and (name in tier.model_fields_set or name not in TierConfig.model_fields)  # of all tiers' options: if set
    ]
    if others:
        yield f"  other options: {', '.join(others)}"
    for model, size in sizes.items():
        room = f"the region has room for about {region_bytes // size:,}"
        yield f"  holds blocks of {model}, {human_bytes(size)} each: {room}"
