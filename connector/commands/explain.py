"""``kvtiers explain``: shows how much of each request's prompt was loaded, and why no more."""

from __future__ import annotations

import math
import os
import re
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from typing import Annotated

import typer
from pydantic import TypeAdapter

from ...tiers.config.values import human_bytes
from ...tiers.errors import ConfigError, StoreError, public_url
from ..core.reasons import RequestRecord, meaning, sentence, why
from .options import AsJson
from .output import answer, complain, counted, note, say
from .session import ExitCode
from .time_limit import within

ANSWER_S_MAX = 10.0
ANSWER_BYTES_MAX = 64 << 20
LINE_BYTES_MAX = 1 << 20  # a longer line is of another program
_SAMPLE = re.compile(r"(?:vllm:)?(kvtiers_\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ExplainedRequest:
    """A request.

    Attributes:
        record: its line in the file.
        message: the same in words.
    """

    record: RequestRecord
    message: str


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """A reason, and the number of requests that got no more blocks because of it.

    Attributes:
        reason: its code.
        count: of requests.
        message: the reason in words; from a file, for the latest of these requests.
        fix: how to fix it; "": no fix is needed.
    """

    reason: str
    count: int
    message: str
    fix: str


@dataclass(slots=True)
class Explained:
    """The result of ``explain``.

    Attributes:
        requests: the latest ones; none from an address.
        reasons: of all requests, the most frequent first.
        stored_since_load_bytes: tier -> bytes stored since it was last loaded from. From an address only.
    """

    requests: list[ExplainedRequest] = field(default_factory=list)
    reasons: list[ReasonCount] = field(default_factory=list)
    stored_since_load_bytes: dict[str, float] = field(default_factory=dict)


def explain(
    source: Annotated[
        str,
        typer.Argument(
            show_default=False,
            metavar="SOURCE",
            help="The file of trace_requests. Or the address of an engine's metrics, such as "
            "http://localhost:8000/metrics, which has only counts.",
        ),
    ],
    request: Annotated[
        str | None,
        typer.Option("--request", metavar="ID", help="Only the request of this id. Needs a file.", show_default=False),
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Show the latest N requests.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show how much of each request's prompt was loaded, and why no more. Count the reasons.

    Exits with 1 if no request has ended yet, or if the address does not answer with metrics of kvtiers.
    """
    is_address = source.startswith(("http://", "https://"))
    if is_address and request is not None:
        raise typer.BadParameter("--request needs a file of trace_requests: the metrics have only counts")
    explained = _explain_metrics(source) if is_address else _explain_file(source, request, last)
    if not explained.reasons:
        what = public_url(source) if is_address else source
        complain(f"{what} has no {'request' if request is None else f'request {request!r}'} that has ended")
    if as_json:
        answer(explained, ok=bool(explained.reasons))
    else:
        _show(explained)
        if is_address:
            note(
                "These are counts since the engine's start. To see each request, which block it lacked and since when, "
                "set trace_requests in the deployment's file."
            )
    if not explained.reasons:
        raise typer.Exit(ExitCode.FAILED)


def _explain_file(path: str, request: str | None, last: int) -> Explained:
    shown: deque[RequestRecord] = deque(maxlen=last)
    counts: Counter[str] = Counter()
    latest: dict[str, RequestRecord] = {}
    adapter, bad = TypeAdapter(RequestRecord), 0
    for line in _lines(path):
        try:
            record = adapter.validate_json(line)
            time.localtime(record.time)
        except (ValueError, OverflowError, OSError):  # a line that was cut by a full disk, or another program's
            bad += 1
            continue
        if request in (None, record.request):
            shown.append(record)
            counts[record.reason] += 1
            latest[record.reason] = record
    if bad:
        note(f"{counted(bad, 'line')} of {path} could not be read and {'was' if bad == 1 else 'were'} skipped")
    return Explained(
        [ExplainedRequest(record, sentence(record)) for record in shown],
        [
            ReasonCount(reason, count, why(reason, latest[reason].tier, latest[reason].facts), meaning(reason).advice)
            for reason, count in counts.most_common()
        ],
    )


def _lines(path: str) -> Iterator[bytes]:
    """Yield the lines of the file that was renamed when it was full, then the lines of the current file."""
    for each in (f"{path}.1", path):
        if each == path or os.path.exists(each):
            try:
                with open(each, "rb") as file:
                    yield from iter(partial(file.readline, LINE_BYTES_MAX), b"")
            except OSError as e:
                raise ConfigError(
                    f"cannot be read: {e.strerror}; give the file that trace_requests names", field=each
                ) from e


def _explain_metrics(address: str) -> Explained:
    counts: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    is_ours = False
    for name, labels, value in _samples(_get(address)):
        is_ours = True
        if name == "kvtiers_requests_total":
            counts[labels.get("reason", "")] += int(value)
        elif name == "kvtiers_stored_since_load_bytes":
            stored[labels.get("tier", "")] += int(value)
    if not is_ours:
        raise StoreError(f"{public_url(address)} has no metrics of kvtiers; give the address of an engine that uses it")
    reasons = [
        ReasonCount(reason, count, why(reason), meaning(reason).advice)
        for reason, count in counts.most_common()
        if count
    ]
    return Explained([], reasons, dict(stored))


def _get(address: str) -> str:
    def read() -> bytes:
        with urllib.request.urlopen(address, timeout=2 * ANSWER_S_MAX) as response:  # ends a thread left behind
            return bytes(response.read(ANSWER_BYTES_MAX))

    try:
        return within(ANSWER_S_MAX, read).decode(errors="replace")
    except urllib.error.HTTPError as e:
        raise StoreError(f"{public_url(address)} answers {e.code} {e.reason}; give the address of metrics") from e
    except (OSError, ValueError, HTTPException) as e:
        why_not = e.reason if isinstance(e, urllib.error.URLError) else e
        raise StoreError(f"{public_url(address)} does not answer: {why_not}") from e


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """kvtiers' samples in Prometheus' text format: name, labels and value."""
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) is not None:
            try:
                value = float(found[3])
            except ValueError:
                continue
            if math.isfinite(value):  # vLLM's endpoint shows NaN for a gauge that is gone
                yield found[1], dict(_LABEL.findall(found[2] or "")), value


def _show(explained: Explained) -> None:
    for one in explained.requests:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.record.time))
        say(f"{at} {one.record.request}: {one.message}")
    total = sum(reason.count for reason in explained.reasons)
    if total:
        if explained.requests:
            say("")
        say(f"Of {counted(total, 'request')}:")
    for reason in explained.reasons:
        say(f"{reason.count:>9,} {reason.count / total:>4.0%}  {reason.reason}: {reason.message}")
        if reason.fix:
            say(f"                fix: {reason.fix}")
    for tier, size in explained.stored_since_load_bytes.items():
        say(f"tier {tier}: {human_bytes(size)} stored since it was last loaded from")
