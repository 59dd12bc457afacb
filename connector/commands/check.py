"""``kvtiers check``: validates a configuration, and finds problems that an engine with it would have here.

It only reads, unless ``--write`` is given. The last line is the verdict: usable, usable with warnings, or not usable,
followed by the failing options.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...tiers.config.deployment import DeploymentConfig, json_schema, load_config
from ...tiers.config.open_store import open_tool_store
from ...tiers.config.tier_options import (
    ExternalTierConfig,
    MemoryTierConfig,
    StoreTierConfig,
    TierConfig,
)
from ...tiers.config.values import human_bytes, show_size
from ...tiers.errors import ConfigError, KVTiersError, printable
from ...tiers.registry import SecondaryTierFactory
from .break_even import compare_speeds
from .description import describe_deployment
from .findings import Finding, no_answer, of_error
from .host_checks import host_findings
from .model_size import Sizing, describe, size_of
from .options import AsJson
from .output import answer, cell, complain, counted, make_console
from .session import ExitCode, session
from .storage_checks import examine_storage
from .tier_checks import TRIAL_FOLDER, root_of, tier_findings

TIERS_S_MAX = 30.0  # storage that hangs longer is reported as a problem
_COLORS = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}
_PANEL = "With --model"

Verdict = Literal["usable", "usable_with_warnings", "not_usable"]


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of ``check``.

    Attributes:
        verdict: whether an engine can use the deployment here; None without a file.
        problems: options and tiers at fault, such as ``region.size`` or ``tiers[0]``, each once.
        config: the deployment with all defaults; None: no file was given, or it has mistakes, which are in ``errors``.
        findings: in the order of the configuration.
        stored_block_bytes: per tier, model -> bytes of one of its stored blocks.
        sizing: sizes of the KV cache of ``--model``.
    """

    verdict: Verdict | None = None
    problems: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)
    stored_block_bytes: list[dict[str, int]] = field(default_factory=list)
    sizing: Sizing | None = None


def check(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The deployment's YAML file.")] = None,
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Also create root folders, and put, replace and delete small blobs in each tier that is not "
            "read_only. Run it as the engine's user.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_PANEL,
            metavar="MODEL",
            help="Compute the size of this model's KV cache, and how much of it fits. MODEL is a folder, a "
            "config.json, or a hub id that is in the local cache.",
        ),
    ] = None,
    tp: Annotated[
        int,
        typer.Option(
            "--tp", metavar="N", min=1, max=1024, rich_help_panel=_PANEL, help="vLLM's --tensor-parallel-size."
        ),
    ] = 1,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            rich_help_panel=_PANEL,
            metavar="TYPE",
            help="vLLM's --kv-cache-dtype: auto (16 bits), float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2 or float32.",
        ),
    ] = "auto",
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_536,
            metavar="TOKENS",
            rich_help_panel=_PANEL,
            help="vLLM's --block-size, in tokens. Default: 16; MLA models have no default: vLLM decides by the GPU.",
        ),
    ] = None,
    prefill: Annotated[
        list[float] | None,
        typer.Option(
            min=1e-3,
            max=1e12,
            metavar="TOKENS_PER_S",
            rich_help_panel=_PANEL,
            help="The model's prefill speed in tokens/s, which --write compares with each storage. May be repeated. "
            "Default: 1000, 5000 and 20000.",
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the YAML file, for editors, and exit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine and its storage can run a deployment, and describe the tiers that would run.

    Validates the file, then examines the machine, each tier's options, its storage and the blocks there, with a fix for
    each problem. Exits with 1 if there is a problem.
    """
    if schema:
        print(json.dumps(json_schema(), indent=2))
        return
    if config is None and (model is None or write):
        raise typer.BadParameter("give a YAML file" + ("" if write else ", --model or --schema"))
    if model is None and (tp, kv_cache_dtype, block_size, prefill or None) != (1, "auto", None, None):
        raise typer.BadParameter(
            "--tp, --kv-cache-dtype, --block-size and --prefill apply to --model; give a model, too"
        )
    deployment = None if config is None else _load(config, as_json=as_json)
    sizing, refused = None, []
    if model is not None:
        try:
            sizing = size_of(
                model, deployment, tp_size=tp, kv_cache_dtype=kv_cache_dtype, block_tokens=block_size, speeds=prefill
            )
        except ConfigError as e:
            if deployment is None or e.field.startswith("--"):
                raise
            refused = [of_error(e).at("--model")]
    if write:
        session().if_interrupted = lambda: f"a few blobs may be left below {TRIAL_FOLDER} in a tier; run it again"
    if deployment is None:
        checked = Checked(sizing=sizing)
    else:
        checked = examine(deployment, writes=write, sizing=sizing, speeds=prefill or (), refused=refused)
    failed = any(finding.level == "problem" for finding in checked.findings)
    if as_json:
        answer(checked, ok=not failed)
    else:
        for line in [] if sizing is None else [*describe(sizing), ""]:
            _print(line)
        if config is not None and deployment is not None:
            for line in describe_deployment(config, deployment, checked.stored_block_bytes):
                _print(line)
            show_findings(checked.findings)
            _tell_verdict(config, checked.verdict, _in_words(checked))
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _load(config: Path, *, as_json: bool) -> DeploymentConfig:
    try:
        return load_config(config, SecondaryTierFactory.tier_types())
    except KVTiersError as e:
        errors = str(e).split("\n")
        if as_json:
            for error in errors:
                complain(error)
            answer(Checked("not_usable"), ok=False)
        else:
            for error in errors:
                _print(f"  {error}")
            _tell_verdict(config, "not_usable", f"not usable: {counted(len(errors), 'mistake')}")
        raise typer.Exit(ExitCode.BAD_INPUT) from e


def show_findings(findings: list[Finding]) -> None:
    """Print one line per finding, and one per fix."""
    for finding in findings:
        color = _COLORS[finding.level]
        make_console().print(f"[{color}]{finding.level:7}[/{color}] ", end="")
        _print(f"{finding.part}, {finding.check}: {finding.message}")
        if finding.fix:
            _print(f"        fix: {finding.fix}")


def _print(text: str) -> None:
    make_console().print(printable(text), markup=False, highlight=False)


def _tell_verdict(config: Path, verdict: Verdict | None, words: str) -> None:
    color = "red" if verdict == "not_usable" else "green" if verdict == "usable" else "yellow"
    make_console().print(f"{cell(str(config))} is [bold {color}]{cell(words)}[/bold {color}]", highlight=False)


def examine(
    deployment: DeploymentConfig,
    *,
    writes: bool = False,
    sizing: Sizing | None = None,
    speeds: Sequence[float] = (),
    refused: Sequence[Finding] = (),
) -> Checked:
    """Examine a valid configuration on this machine.

    Args:
        writes: also create root folders, and write and delete blobs.
        sizing: sizes of the KV cache of ``--model``; with ``writes``, each storage's speed is compared with prefill.
        speeds: prefill speeds of the model in tokens per second, if known.
        refused: why the model of ``--model`` has no sizing.
    """
    found = [*refused, *host_findings(deployment)]
    # In parallel: a bucket that does not answer takes seconds to fail, and a hanging mount never does.
    tiers = [
        _Examination(
            f"tiers[{index}] {tier.type}",
            partial(examine_tier, tier, writes=writes, sizing=sizing, speeds=speeds),
            tier,
        )
        for index, tier in enumerate(deployment.tiers)
    ]
    deadline = time.monotonic() + TIERS_S_MAX
    for tier in tiers:
        found += tier.findings(deadline)
    blocks = [dict(tier.sizes) for tier in tiers]
    found += _too_small(deployment, blocks, sizing)
    problems = list(dict.fromkeys(finding.place for finding in found if finding.level == "problem"))
    verdict: Verdict = "not_usable" if problems else "usable_with_warnings" if _warnings(found) else "usable"
    return Checked(verdict, problems, deployment.model_dump(), found, blocks, sizing)


def _warnings(findings: list[Finding]) -> int:
    return sum(finding.level == "warning" for finding in findings)


def _in_words(checked: Checked) -> str:
    if checked.problems:
        return f"not usable: {', '.join(checked.problems)}"
    warnings = _warnings(checked.findings)
    return f"usable, with {counted(warnings, 'warning')}" if warnings else "usable"


class _Examination:
    """Examines a tier on its own thread. If the storage hangs, the thread stays, and earlier findings are kept.

    Attributes:
        sizes: the models with blocks in the storage, and the size of one block of each.
    """

    def __init__(
        self, where: str, examine: Callable[[dict[str, int]], Iterator[Finding]], tier: TierConfig | ExternalTierConfig
    ) -> None:
        self._where = where
        self._examine = examine
        self._tier = tier
        self._found: list[Finding] = []
        self.sizes: dict[str, int] = {}
        self._thread = threading.Thread(target=self._work, name=f"kvtiers-check-{where}", daemon=True)
        self._thread.start()

    def findings(self, deadline: float) -> list[Finding]:
        """Wait until the deadline. Returns the findings."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        is_late = self._thread.is_alive()  # before the findings are copied, or the last ones could be lost
        late = [no_answer(self._tier, TIERS_S_MAX)] if is_late else []
        return [finding.at(self._where) for finding in (*self._found, *late)]

    def _work(self) -> None:
        tier = self._tier
        try:
            for finding in self._examine(self.sizes):
                self._found.append(finding)
        except (KVTiersError, OSError) as e:
            self._found.append(of_error(e, tier if isinstance(tier, TierConfig) else None))
        except Exception as e:  # noqa: BLE001 - the thread's edge: a lost exception would look like success
            # Without the exception's text, which may contain secrets.
            at = traceback.extract_tb(e.__traceback__)[-1]
            text = f"could not be checked: {type(e).__name__} in {os.path.basename(at.filename)}:{at.lineno}"
            fix = "please report this: it is a bug in kvtiers check"
            if isinstance(tier, StoreTierConfig):
                fix = f"change the store of {tier.module_path} to raise a StoreError (docs/writing-a-store.md)"
            self._found.append(Finding("problem", "storage", text, fix))


def examine_tier(
    tier: TierConfig | ExternalTierConfig,
    sizes: dict[str, int],
    *,
    writes: bool,
    sizing: Sizing | None = None,
    speeds: Sequence[float] = (),
) -> Iterator[Finding]:
    """Examine a tier's options, its storage, and the blocks there.

    Args:
        sizes: filled with the models with blocks in the storage, and the size of one block of each.
        writes, sizing, speeds: see ``examine``.
    """
    is_usable = True
    for finding in tier_findings(tier):
        yield finding
        # A store that is short of space can be opened and examined. Others would only repeat the problem.
        is_usable &= finding.level != "problem" or finding.check in ("min_free", "mount options")
    if isinstance(tier, ExternalTierConfig):
        yield Finding("note", "options", "not a kvtiers tier, so its options are not checked")
        return
    if isinstance(tier, MemoryTierConfig):
        yield Finding(
            "note", "storage", "in the engine's memory: not shared with other engines, and lost when the engine ends"
        )
        return
    root = root_of(tier)
    if not is_usable:
        return
    if root is not None and not writes and not os.path.isdir(root):
        yield Finding("note", "storage", "the folder does not exist yet; an engine creates it when it starts")
        return
    with closing(open_tool_store(tier, read_only=not writes)) as store:  # without min_free, which was judged above
        yield from examine_storage(tier, store, sizes, writes=writes)
        if writes and sizing is not None:
            yield from compare_speeds(tier, store, sizing, speeds)
    if root is not None and writes:
        with suppress(OSError):
            os.rmdir(os.path.join(root, TRIAL_FOLDER))


def _too_small(deployment: DeploymentConfig, blocks: list[dict[str, int]], sizing: Sizing | None) -> Iterator[Finding]:
    known = [(size, model) for sizes in blocks for model, size in sizes.items()]
    if sizing is not None and sizing.block_bytes is not None:
        known.append((sizing.block_bytes, sizing.model))
    largest, model = max(known, default=(0, ""))
    if largest > deployment.region.size:
        yield Finding(
            "warning", "region.size",
            f"{human_bytes(deployment.region.size)} is too small for one block of {model}, {human_bytes(largest)}",
            f"write at least {show_size(-(-largest >> 20 << 24))} for this model",
            part="config",
        )  # fmt: skip
