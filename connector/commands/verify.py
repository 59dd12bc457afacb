"""``kvtiers verify``: checks the seals of all stored blocks."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtiers.connector.commands.places import Place, Ticker, human_bytes, refuse, say
from kvtiers.connector.commands.storage import AsJson, Config, Results, TierName, open_places
from kvtiers.tiers.config.open_store import tool_recipe
from kvtiers.tiers.errors import public_url
from kvtiers.tiers.isolation.process import StoreRecipe
from kvtiers.tiers.store import SupportsQuarantine
from kvtiers.tiers.tools.verify import UnitResult, damaged_count, decode_result, find_units, total_of
from kvtiers.tiers.tools.verify_processes import verify_units

BAD_SHOWN_MAX = 20
STATE_BEGINS = '{"place": '


def verify(
    config: Config,
    tier: TierName = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Move bad blocks aside (on S3 and fsspec: delete them). Engines then store them again when needed.",
        ),
    ] = False,
    state: Annotated[
        Path | None, typer.Option(help="Save progress in this file, and resume from it after an interruption.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=256, help="Processes; default: one per core.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check the seals of all stored blocks: that each block matches its name, and is complete and unchanged."""
    n_workers = workers or len(os.sched_getaffinity(0))
    places = open_places("verify", config, tier)
    kept = [place.name for place in places if place.read_only]
    if repair and kept:
        raise refuse("verify", f"--repair: {', '.join(kept)} is read_only; choose another tier with --tier")
    ours = state is not None and _check_state(state)
    results = Results("verify")
    for place in places:
        with results.of(place):
            results.add(_verify_place(place, repair, state, n_workers))
            if not as_json:
                _show(results.last)
    checked = [result for result in results.all if "error" not in result]
    if state is not None and checked == results.all:  # all is done
        state.unlink(missing_ok=True) if ours else os.truncate(state, 0)
    bad = any(result["bad_count"] > result["quarantined"] or result["errors"] for result in checked)
    results.end(as_json=as_json, failed=bad)


def _check_state(path: Path) -> bool:
    """Check that the state file can be written and belongs to verify.

    This comes first, because otherwise hours of work could not be saved, or a foreign file would be removed at the end.

    Returns:
        Whether the file belongs to verify, which removes it at the end. False: the file existed and was empty, so
        verify only empties it.
    """
    try:
        was_there = path.exists()
        if was_there and not path.is_file():
            raise ValueError("it is not a regular file")
        path.open("a").close()
        text = path.read_text()
    except (OSError, ValueError) as e:
        raise refuse("verify", f"--state {path} cannot be used: {e}") from e
    if not STATE_BEGINS.startswith(text[: len(STATE_BEGINS)]):
        raise refuse("verify", f"--state {path} is not a state file of verify; name another file")
    return not was_there or text.startswith(STATE_BEGINS)


def _verify_place(place: Place, repair: bool, state: Path | None, n_workers: int) -> dict[str, Any]:
    started_at = time.monotonic()
    with place.open() as store, Ticker(f"listing {place.name}", unit="blocks") as ticker:
        units = find_units(store, ticker.count)
        damaged = damaged_count(store)
        moves_aside = isinstance(store, SupportsQuarantine)
    make_store, options = tool_recipe(place.config, read_only=not repair)
    recipe = StoreRecipe.of(make_store, **options)
    # A bucket of the same name at another server is another place.
    server = getattr(place.config, "endpoint_url", None)
    where = place.where if server is None else f"{place.where} at {public_url(server)}"
    with _state_file(state, f"{place.name} {where} {'repair' if repair else 'check'}") as (done, remember):
        results = dict(done)
        left = [unit for unit in units if unit not in done]
        total_bytes = sum(share.bytes for share in units.values())
        checked_at = time.monotonic()
        with Ticker(f"verifying {place.name}", total_bytes, unit="bytes") as ticker:
            for result in verify_units(recipe, left, n_workers=n_workers, repair=repair):
                results[result.unit] = result
                remember(result)
                checked = sum(r.bytes for r in results.values())
                ticker.tell(checked, f"{human_bytes(checked)} of {human_bytes(total_bytes)}")
    total = total_of(iter(results.values()))
    total.errors = max(total.errors, damaged)  # a unit of only damaged folders or files is not found, so has no result
    now_bytes = total.bytes - sum(result.bytes for result in done.values())
    return {
        "tier": place.name,
        "where": place.where,
        **{name: value for name, value in asdict(total).items() if name != "unit"},
        "moves_aside": moves_aside,
        "resumed_units": len(done),
        "seconds": round(time.monotonic() - started_at, 3),
        "bytes_per_s": round(now_bytes / max(1e-9, time.monotonic() - checked_at)),
    }


class _Remember:
    """Appends each result to a state file as one line.

    Args:
        file: must be unbuffered: after a failed write, closing a buffered file would fail again.
    """

    def __init__(self, file: FileIO | None, place: str) -> None:
        self._file = file
        self._place = place

    def __call__(self, result: UnitResult) -> None:
        self.end_line(json.dumps({"place": self._place, "result": asdict(result)}))

    def end_line(self, text: str = "") -> None:
        """Append the rest of a line."""
        if self._file is None:
            return
        try:
            self._file.write(f"{text}\n".encode())
        except OSError as e:
            raise refuse("verify", f"--state {self._file.name} cannot be written: {e.strerror}") from e


@contextmanager
def _state_file(path: Path | None, place: str) -> Iterator[tuple[dict[str, UnitResult], _Remember]]:
    """Yield a place's earlier results, and a function that appends new ones. Incomplete lines are skipped."""
    if path is None:
        yield {}, _Remember(None, place)
        return
    done = {}
    text = path.read_text() if path.exists() else ""
    for line in text.splitlines():
        try:
            content = json.loads(line)
            result = decode_result(content["result"])
            if content["place"] == place:
                done[result.unit] = result
        except (ValueError, KeyError, TypeError):
            continue
    with path.open("ab", buffering=0) as file:
        remember = _Remember(file, place)
        if text and not text.endswith("\n"):
            remember.end_line()
        yield done, remember


def _show(result: dict[str, Any]) -> None:
    resumed = f", {result['resumed_units']} parts in an earlier run" if result["resumed_units"] else ""
    speed = f"{human_bytes(result['bytes_per_s'])}/s"
    size = human_bytes(result["bytes"])
    say(f"{result['tier']} at {result['where']}: {result['blocks']:,} blocks, {size} checked at {speed}{resumed}")
    for reason, count in Counter(reason for _, reason in result["bad"]).items():
        say(f"  bad ({reason}): {count:,} blocks")
    for key, reason in result["bad"][:BAD_SHOWN_MAX]:
        say(f"    {key} ({reason})")
    if result["bad_count"] > BAD_SHOWN_MAX:
        say(f"    … and {result['bad_count'] - BAD_SHOWN_MAX:,} more; --json names them")
    if result["quarantined"]:
        say(f"  {'moved aside' if result['moves_aside'] else 'deleted'}: {result['quarantined']:,} blocks")
    if result["foreign"]:
        say(f"  from a newer version or without a seal, not verified: {result['foreign']:,} blocks")
    if result["errors"]:
        say(f"  could not be read: {result['errors']:,} blocks")
    if not result["bad_count"] and not result["errors"]:
        if not result["foreign"]:
            say("  all blocks are intact")
        elif result["foreign"] < result["blocks"]:
            say("  all other blocks are intact")
