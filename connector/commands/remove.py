"""``kvtiers rm``: removes namespaces that no engine uses any more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import typer

from ...tiers.config.tier_options import FsTierConfig, NfsTierConfig
from ...tiers.config.values import human_bytes
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
from .options import AsJson, Config, DryRun, TierName, Yes
from .output import Ticker, complain, confirm, counted, note, refuse, say
from .places import Place, find_places
from .results import Results, TierResult
from .session import ExitCode, session
from .storage import sum_of

MAY_WRITE = "an engine that runs with this namespace may write to it again"


@dataclass(slots=True)
class NamespaceResult:
    """The result for one namespace.

    Attributes:
        blocks, bytes: number and size of the blocks found.
        removed, removed_bytes: blocks that are gone.
        failed: blocks that could not be removed.
        reason: why blocks could not be removed; "": all were removed.
        written: blocks that were written during the removal and stay.
    """

    namespace: str
    blocks: int
    bytes: int
    removed: int = 0
    removed_bytes: int = 0
    failed: int = 0
    written: int = 0
    reason: str = ""


@dataclass(kw_only=True)
class Removed(TierResult):
    """The removed namespaces of a tier; with ``dry_run``, the namespaces found there."""

    dry_run: bool
    namespaces: list[NamespaceResult]


def rm(
    config: Config,
    namespace: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Remove this namespace (the first column of du). May be repeated."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Remove all namespaces of this model, such as org/name. May be repeated."),
    ] = None,
    tier: TierName = None,
    dry_run: DryRun = False,
    yes: Yes = False,
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
    results = Results[Removed]()
    plans = []
    for place in places:
        with results.of(place):
            plans.append(_plan(place, names, models))
    found = {name for plan in plans for name in (*plan.names, *plan.models)}
    missing = [name for name in dict.fromkeys((*names, *models)) if name not in found]
    for name in missing:
        complain(f"{name} was not found in the tiers that could be listed; du shows the namespaces")
    if not found:
        results.end(as_json=as_json, failed=True)
    plans = [plan for plan in plans if plan.namespaces]
    asks = not dry_run and not yes
    for plan in plans if asks or not as_json else ():
        _show_plan(plan, dry_run=dry_run, to_stderr=as_json)
    if asks:
        chosen = [one for plan in plans for one in plan.namespaces]
        total = _found(chosen)
        question = f"Remove {counted(len(chosen), 'namespace')} with {_in_words(total)}?"
        if not confirm(question):
            complain("not confirmed: nothing was removed")
            raise typer.Exit(ExitCode.FAILED)
    for plan in plans:
        with results.of(plan.place):
            if not dry_run:
                _remove(plan)
            place = plan.place
            result = Removed(tier=place.name, where=place.where, dry_run=dry_run, namespaces=plan.namespaces)
            results.add(result)
            if not as_json and not dry_run:
                _show_result(result)
            if not dry_run and getattr(plan.place.config, "max_bytes", None) is not None:
                note(f"max_bytes of {plan.place.name} counts the removed bytes until the next collection (kvtiers gc)")
    failed = any(one.failed or one.written for result in results.done for one in result.namespaces)
    results.end(as_json=as_json, failed=failed or bool(missing))


@dataclass(frozen=True, slots=True)
class _Plan:
    """The namespaces to remove from a tier, and the models that were found there."""

    place: Place
    namespaces: list[NamespaceResult]
    models: set[str]

    @property
    def names(self) -> list[str]:
        return [one.namespace for one in self.namespaces]


def _plan(place: Place, names: list[str], models: list[str]) -> _Plan:
    chosen: list[NamespaceResult] = []
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
            if share.blocks or read_identity(store, name) is not None:  # else only a foreign file or an empty folder
                chosen.append(NamespaceResult(name, share.blocks, share.bytes))
                found |= of_models
    return _Plan(place, chosen, found)


def _remove(plan: _Plan) -> None:
    total = _found(plan.namespaces)
    session().if_interrupted = lambda: (
        f"{_in_words(_gone(plan.namespaces))} removed; run the same command again to continue"
    )
    with (
        plan.place.open(writes=True) as store,
        Ticker(f"removing from {plan.place.name}", total.blocks, unit="blocks") as ticker,
    ):
        for one in plan.namespaces:

            def tell(gone: Share, one: NamespaceResult = one) -> None:
                one.removed, one.removed_bytes = gone.blocks, gone.bytes
                all_gone = _gone(plan.namespaces)
                text = f"{all_gone.blocks:,} of {total.blocks:,} blocks, {human_bytes(all_gone.bytes)}"
                ticker.tell(all_gone.blocks, text)

            removal = NamespaceRemoval(store, one.namespace)
            removal.run(tell)
            one.failed, one.written, one.reason = removal.failed, removal.written, removal.error
        folders = [folder for folder in rank_folders(store) if folder.rpartition("_r")[0] in plan.names]
    _remove_empty(plan.place, [*folders, *plan.names])


def _remove_empty(place: Place, folders: list[str]) -> None:
    """Remove the folders that are empty now. A put that needs one of them makes it again."""
    if isinstance(place.config, FsTierConfig | NfsTierConfig):
        for folder in folders:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(os.path.join(place.config.root_dir, folder))


def _show_plan(plan: _Plan, *, dry_run: bool, to_stderr: bool) -> None:
    would = "would be removed" if dry_run else "to be removed"
    lines = [f"{plan.place.name} at {plan.place.where}: {would}: {counted(len(plan.namespaces), 'namespace')}"]
    lines += [f"  {one.namespace}: {_in_words(Share(one.blocks, one.bytes))}" for one in plan.namespaces]
    for line in lines:
        say(line, to_stderr=to_stderr)


def _show_result(result: Removed) -> None:
    say(f"{result.tier} at {result.where}: removed {_in_words(_gone(result.namespaces))}")
    for one in result.namespaces:
        if one.failed:
            say(f"  {one.namespace}: could not be removed: {counted(one.failed, 'file')} ({one.reason})")
        if one.written:
            say(
                f"  {one.namespace}: {counted(one.written)} written during the removal: an engine uses "
                "this namespace; stop the engine, and run the same command again"
            )
    if not all(one.written for one in result.namespaces):
        note(MAY_WRITE)


def _found(namespaces: Iterable[NamespaceResult]) -> Share:
    return sum_of(Share(one.blocks, one.bytes) for one in namespaces)


def _gone(namespaces: Iterable[NamespaceResult]) -> Share:
    return sum_of(Share(one.removed, one.removed_bytes) for one in namespaces)


def _in_words(share: Share) -> str:
    return f"{counted(share.blocks)}, {human_bytes(share.bytes)}"
