"""Reasons why a request got no more blocks: their codes, their texts, and a sentence for each request.

A code has an operation and a cause, such as ``store:backlog``. Causes may be errors of a tier's storage, so not all
codes are listed here. A code that is not listed gets the text of its operation, such as ``store:``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reason:
    """The meaning of a code.

    Attributes:
        text: about the first block that was not found. May name ``{tier}``, ``{why}`` and facts of the request.
        advice: how to fix it; "": no fix, because this is not a fault.
    """

    text: str
    advice: str = ""


_STORES = "docs/troubleshooting.md#stores-are-dropped"
_CUT_OFF = "docs/troubleshooting.md#a-tier-is-cut-off"
_REGION = "make region.size larger"

REASONS: Mapping[str, Reason] = {
    "found": Reason("every block that was asked for was found"),
    "engine": Reason("the engine's own cache has every whole block of the prompt"),
    "unused": Reason("the request ended before its blocks were loaded"),
    "too_short": Reason(
        "the prompt is shorter than a stored block ({block_tokens} tokens)", "lower blocks_per_chunk"
    ),
    "not_stored": Reason("no engine with this namespace has stored the next block, so far as this engine knows"),
    "other_namespace": Reason(
        "the next block is in another namespace, {namespace}, whose fields differ: {differs}",
        "give engines that should share blocks the same values (kvtiers check CONFIG lists all namespaces)",
    ),
    "store:no_room": Reason(
        "the region had no room for the next block when it was computed: all slots were in use", _REGION
    ),
    "store:too_small": Reason("the prompt has more blocks than the region, so its end was not stored", _REGION),
    "store:backlog": Reason(
        "the next block was not stored: too many blocks of the region waited for tier {tier}",
        f"use a faster tier in front, or {_REGION} ({_STORES})",
    ),
    "store:circuit_open": Reason("the next block was not stored, because tier {tier} was cut off", f"see {_CUT_OFF}"),
    "store:deadline": Reason(
        "the next block was not stored: it waited longer than job_deadline_s of tier {tier}",
        f"more threads, larger blocks, or a faster tier in front ({_STORES})",
    ),
    "store:queue_full": Reason(
        "the next block was not stored: too many stores were under way in tier {tier}",
        f"more threads, larger blocks, or a faster tier in front ({_STORES})",
    ),
    "store:StoreFullError": Reason(
        "the next block was not stored, because tier {tier} was full", "raise max_bytes, lower min_free, or set ttl"
    ),
    "store:read_only": Reason("this engine computed the next block, but its tiers are read-only"),
    "store:role": Reason("this engine computed the next block, but its kv_role does not let it store blocks"),
    "store:shutdown": Reason("the next block was not stored: tier {tier} was being shut down"),
    "store:copy_failed": Reason("the next block was not stored: its copy into the region failed", "see the log"),
    "store:": Reason("the next block was not stored: tier {tier} failed ({why})", "run kvtiers check CONFIG --write"),
    "removed:ttl": Reason("tier {tier} removed the next block {ago} ago: it was not used for its ttl", "raise ttl"),
    "removed:capacity": Reason(
        "tier {tier} removed the next block {ago} ago to make room", "raise max_bytes, or lower min_free"
    ),
    "removed:elsewhere": Reason(
        "the next block is no longer in tier {tier}, and this engine's collector did not remove it: another host's "
        "collector did, a lifecycle rule, or somebody by hand",
    ),
    "removed:": Reason("tier {tier} removed the next block {ago} ago ({why})"),
    "load:corrupt": Reason(
        "tier {tier} has the next block, but it is damaged", "see docs/troubleshooting.md#blocks-fail-verification"
    ),
    "load:unknown_key": Reason(
        "the next block was encrypted with a key that this engine does not have", "see docs/security.md#rotation"
    ),
    "load:late": Reason(
        "loading the next block from tier {tier} took longer than {deadline_s:g} s and was given up",
        "use faster storage, or smaller blocks",
    ),
    "load:slower": Reason(
        "loading the next block from tier {tier} would take {expected_s:.3g} s, and computing it {compute_s:.3g} s",
        "faster storage would help (docs/load-or-compute.md)",
    ),
    "load:behind": Reason(
        "loading the next block from tier {tier} was given up after {actual_s:.3g} s ({expected_s:.3g} s expected), "
        "because computing became faster",
        "find out why the storage was slower than usual (docs/load-or-compute.md)",
    ),
    "load:never": Reason("nothing is loaded from tier {tier}, because of its option load: never"),
    "load:": Reason("loading the next block from tier {tier} failed ({why})", "run kvtiers check CONFIG --write"),
    "lookup:deadline": Reason(
        "tier {tier} did not answer in time whether it has the next block (lookup_deadline_s)",
        "see docs/troubleshooting.md#lookups-are-late",
    ),
    "lookup:total": Reason(
        "tier {tier} had not answered all lookups of the prompt when their time limit passed",
        "use larger blocks (docs/troubleshooting.md#lookups-are-late)",
    ),
    "lookup:error": Reason("tier {tier} could not be asked for the next block: the lookup failed", f"see {_CUT_OFF}"),
    "lookup:circuit_open": Reason("tier {tier} is cut off, so it was not asked for the next block", f"see {_CUT_OFF}"),
    "lookup:role": Reason("this engine's kv_role does not let it load blocks from tiers"),
    "lookup:request": Reason("the request itself excludes the tiers"),
    "lookup:storage_off": Reason(
        "the engine's cache was reset, and tiers have not been used since", "set storage_after_reset: keep, or restart"
    ),
    "lookup:": Reason("tier {tier} was not asked for the next block ({why})"),
    "region:too_small": Reason("the request needs {needed} blocks, and the region has {has}", _REGION),
    "region:no_room": Reason("tier {tier} has the next block, but the region had no room for it in time", _REGION),
    "region:tier_share": Reason(
        "tier {tier} has the next block, but its unreported loads fill its share of the region",
        f"see {_CUT_OFF}",
    ),
    "region:evicted": Reason("the region evicted the next block, and no tier has it", f"{_REGION}, or add a tier"),
    "region:reset": Reason("the engine's cache was reset before a tier had the next block"),
}  # fmt: skip
_UNKNOWN = Reason("{why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The result of a request's lookups and loads: a line of ``trace_requests``.

    Attributes:
        time: when the request ended, in Unix seconds.
        request: the engine's id.
        tokens: of the prompt; None: the engine does not tell.
        engine_tokens: tokens that the engine's own cache had.
        loaded_tokens: tokens that were loaded instead of computed.
        block_tokens: tokens of a stored block.
        asked: blocks that were asked for. An engine stops at the first one that is not there.
        found: blocks found, by place: ``region`` or a tier's name.
        loaded: blocks that the engine loaded.
        computed: blocks that the engine computed and offered to be stored, with those of the answer.
        reason: why no more were loaded; a code of ``REASONS``, or one with the name of an error.
        tier: the tier that the reason is about; "": none.
        block: the first digits of the hash of the first block that was not found; "": none.
        facts: figures and names for the reason.
    """

    time: float
    request: str
    tokens: int | None = None
    engine_tokens: int | None = None
    loaded_tokens: int | None = None
    block_tokens: int | None = None
    asked: int = 0
    found: dict[str, int] = field(default_factory=dict)
    loaded: int = 0
    computed: int = 0
    reason: str
    tier: str = ""
    block: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def meaning(reason: str) -> Reason:
    """Return the meaning of a code."""
    what, colon, _ = reason.partition(":")
    return REASONS.get(reason) or REASONS.get(what + colon) or _UNKNOWN


class _Unknown:
    """Stands for a fact that is not known."""

    def __format__(self, spec: str) -> str:
        return "…"


class _Facts(dict[str, Any]):
    def __missing__(self, name: str) -> _Unknown:
        return _Unknown()


def why(reason: str, tier: str = "", facts: Mapping[str, Any] | None = None) -> str:
    """Describe a reason in a clause. Missing facts are shown as dots."""
    values = _Facts(facts or {}, why=reason.partition(":")[2] or reason, tier=tier or _Unknown())
    try:
        return meaning(reason).text.format_map(values)
    except (ValueError, TypeError):  # a fact of a line from outside is not a number
        return reason


def sentence(record: RequestRecord) -> str:
    """One sentence about a request."""
    places = ", ".join(
        f"{count:,} from {'' if place == 'region' else 'tier '}{place}" for place, count in record.found.items()
    )
    loaded = f"{record.loaded:,} of {record.asked:,} blocks were loaded{f' ({places})' if places else ''}"
    if record.tokens is None:
        return f"{loaded}: {why(record.reason, record.tier, record.facts)}"
    own, others = record.engine_tokens or 0, record.loaded_tokens or 0
    had = f"{own:,} were in the engine's cache, " if own else ""
    computed = max(0, record.tokens - own - others)
    return (
        f"of {record.tokens:,} prompt tokens {had}{others:,} were loaded and {computed:,} computed; {loaded}: "
        f"{why(record.reason, record.tier, record.facts)}"
    )
