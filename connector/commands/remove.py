"""``kvtiers rm``: removes namespaces that no engine uses any more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from ...tiers.config.tier_options import FsTierConfig, NfsTierConfig
from ...tiers.tools.block_reader import read_identity
from ...tiers.tools.inventory import Share
from ...tiers.tools.namespaces import (
    NamespaceRemoval,
    blocks_of,
    is_of_model,
    may_be_of_model,
    namespace_names,
    rank_folders,
)
from .options import AsJson, Config, DryRun, TierName
from .output import (
    Results,
    Ticker,
    complain,
    confirm,
    counted,
    human_bytes,
    note,
    refuse,
    say,
)
from .places import Place, find_places
from .session import ExitCode, session

MAY_WRITE = "an engine that runs with this namespace may write to it again"


def rm(
    config: Config,
    namespace: Annotated[
        list[str] | None, typer.Option(help="Remove this namespace (the first column of du). May be repeated.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Remove all namespaces of this model, such as org/name. May be repeated.")
    ] = None,
    tier: TierName = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove all blocks of a namespace or model, and the files that identify it. Asks first, unless --yes.

    Removes nothing else: no other namespace, and no foreign file. A model's namespace without a readable identity
    stays: give its name.

    Engines may run: they miss the removed blocks, and may store them again. Blocks that are written during the removal
    stay, and the command says so.
    """
    names, models = namespace or [], model or []
    if not names and not models:
        raise refuse("nothing to remove: give --namespace or --model")
    places = find_places(config, tier)
    kept = [place.name for place in places if place.read_only]
    if kept and not dry_run:
        raise refuse(f"{', '.join(kept)} is read_only; choose another tier with --tier")
    results = Results()
    plans = []
    for place in places:
        with results.of(place):
            plans.append(_plan(place, names, models))
    found = {name for plan in plans for name in (*plan.blocks, *plan.models)}
    missing = [name for name in dict.fromkeys((*names, *models)) if name not in found]
    for name in missing:
        complain(f"{name} was not found in the tiers that could be listed; du shows the namespaces")
    if not found:
        results.end(as_json=as_json, failed=True)
    plans = [plan for plan in plans if plan.blocks]
    asks = not dry_run and not yes
    for plan in plans if asks or not as_json else ():
        _show_plan(plan, dry_run=dry_run, to_stderr=as_json)
    if asks:
        total = _sum([share for plan in plans for share in plan.blocks.values()])
        count = sum(len(plan.blocks) for plan in plans)
        question = f"Remove {counted(count, 'namespace')} with {_in_words(total)}?"
        if not confirm(question):
            complain("not confirmed: nothing was removed")
            raise typer.Exit(ExitCode.FAILED)
    for plan in plans:
        with results.of(plan.place):
            removals = [] if dry_run else _remove(plan)
            result = results.add({"dry_run": dry_run, "namespaces": _namespaces(plan, removals)})
            if not as_json and not dry_run:
                _show_result(result)
            if not dry_run and getattr(plan.place.config, "max_bytes", None) is not None:
                note(
                    f"max_bytes of {plan.place.name} counts the removed bytes until the next collection (kvtiers gc), "
                    "and what an engine reserved until some minutes after its end"
                )
    failed = any(one["failed"] or one["written"] for result in results.all for one in result.get("namespaces", ()))
    results.end(as_json=as_json, failed=failed or bool(missing))


@dataclass(frozen=True, slots=True)
class _Plan:
    """The namespaces to remove from a tier, with their blocks, and the models that were found there."""

    place: Place
    blocks: dict[str, Share]
    models: set[str]


def _plan(place: Place, names: list[str], models: list[str]) -> _Plan:
    blocks: dict[str, Share] = {}
    found: set[str] = set()
    with place.open() as store, Ticker(f"listing {place.name}", unit="blocks") as ticker:
        for name in namespace_names(store):
            of_models = {model for model in models if is_of_model(store, name, model)}
            if name not in names and not of_models:
                for model in models:
                    if may_be_of_model(name, model) and read_identity(store, name) is None:
                        note(
                            f"{name} may be of {model}, but has no readable identity; remove it with --namespace {name}"
                        )
                continue
            share = Share()
            for info in ticker.each(blocks_of(store, name)):
                share.add(info.size)
            if share.blobs or read_identity(store, name) is not None:  # else only a foreign file or an empty folder
                blocks[name] = share
                found |= of_models
    return _Plan(place, blocks, found)


def _remove(plan: _Plan) -> list[NamespaceRemoval]:
    total = _sum(plan.blocks.values())
    done: list[NamespaceRemoval] = []

    def tell(_: Share) -> None:
        gone = _sum(removal.removed for removal in done)
        ticker.tell(gone.blobs, f"{gone.blobs:,} of {total.blobs:,} blocks, {human_bytes(gone.bytes)}")

    session().if_interrupted = lambda: (
        f"{_in_words(_sum(removal.removed for removal in done))} removed; run the same command again to continue"
    )
    with (
        plan.place.open(writes=True) as store,
        Ticker(f"removing from {plan.place.name}", total.blobs, unit="blocks") as ticker,
    ):
        for name in plan.blocks:
            done.append(NamespaceRemoval(store, name))
            done[-1].run(tell)
        folders = [folder for folder in rank_folders(store) if folder.rpartition("_r")[0] in plan.blocks]
    _remove_empty(plan.place, [*folders, *plan.blocks])
    return done


def _remove_empty(place: Place, folders: list[str]) -> None:
    """Remove the folders that are empty now. A put that needs one of them makes it again."""
    if isinstance(place.config, FsTierConfig | NfsTierConfig):
        for folder in folders:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(os.path.join(place.config.root_dir, folder))


def _namespaces(plan: _Plan, removals: list[NamespaceRemoval]) -> list[dict[str, Any]]:
    by_name = {removal.namespace: removal for removal in removals}
    namespaces = []
    for name, share in plan.blocks.items():
        removal = by_name.get(name)
        namespaces.append(
            {
                "namespace": name,
                "found": asdict(share),
                "removed": asdict(Share() if removal is None else removal.removed),
                "failed": 0 if removal is None else removal.failed,
                "written": 0 if removal is None else removal.written,
                "reason": "" if removal is None else removal.error,
            }
        )
    return namespaces


def _show_plan(plan: _Plan, *, dry_run: bool, to_stderr: bool) -> None:
    would = "would be removed" if dry_run else "to be removed"
    lines = [f"{plan.place.name} at {plan.place.where}: {would}: {counted(len(plan.blocks), 'namespace')}"]
    lines += [f"  {name}: {_in_words(share)}" for name, share in plan.blocks.items()]
    for line in lines:
        say(line, to_stderr=to_stderr)


def _show_result(result: dict[str, Any]) -> None:
    gone = Share(*(sum(one["removed"][name] for one in result["namespaces"]) for name in ("blobs", "bytes")))
    say(f"{result['tier']} at {result['where']}: removed {_in_words(gone)}")
    for one in result["namespaces"]:
        if one["failed"]:
            files = counted(one["failed"], "file")
            say(f"  {one['namespace']}: could not be removed: {files} ({one['reason']})")
        if one["written"]:
            say(
                f"  {one['namespace']}: {counted(one['written'])} written meanwhile stay: an engine uses this "
                "namespace; stop it, and run the same command again"
            )
    if not all(one["written"] for one in result["namespaces"]):
        note(MAY_WRITE)


def _sum(shares: Iterable[Share]) -> Share:
    total = Share()
    for share in shares:
        total.blobs += share.blobs
        total.bytes += share.bytes
    return total


def _in_words(share: Share) -> str:
    return f"{counted(share.blobs)}, {human_bytes(share.bytes)}"
