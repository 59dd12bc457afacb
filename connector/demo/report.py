"""Figures that the demo measured, printed as a table and written as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...tiers.errors import printable_lines

REGION = "region"
KV_TENSORS = "KV tensors"
MEMORY_ONLY = "a tier of type memory is gone with its process: name a tier on storage (fs, nfs, s3, fsspec)"
_DONE = {"load": "loaded", "store": "stored"}


@dataclass(frozen=True, slots=True)
class Answer:
    """One engine's answer to one prompt.

    Attributes:
        ttft_s: time to first token, from submitting the token ids.
        blocks_total: number of offloaded blocks that the prompt has.
        blocks_hit: blocks that were found before anything was computed.
        tokens_loaded: tokens whose KV was loaded.
        bytes_loaded: bytes of KV loaded into the engine's tensors.
        load_s: from submitting the token ids until all loaded KV was in place, lookups included.
    """

    num_prompt_tokens: int
    ttft_s: float
    blocks_total: int
    blocks_hit: int
    tokens_loaded: int
    bytes_loaded: int
    load_s: float
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Hop:
    """Bytes that moved from one place to the next, and the seconds that the jobs took.

    Attributes:
        op: "load" or "store".
        already_stored: blocks that the destination already had, so they were not moved.
        lost: blocks that failed or were dropped, by reason.
    """

    op: str
    source: str
    destination: str
    bytes: int
    seconds: float
    already_stored: int = 0
    lost: dict[str, int] = field(default_factory=dict)

    @property
    def gb_s(self) -> float:
        """Rate in 10^9 bytes a second; 0 if nothing moved."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def loss(self) -> str:
        """Number of lost blocks, with the reasons; "": no block was lost."""
        reasons = ", ".join(f"{count} by {reason}" for reason, count in self.lost.items())
        lost = f"{sum(self.lost.values())} blocks did not get from {self.source} to {self.destination} ({reasons})"
        return lost if self.lost else ""


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """Figures of one process.

    Attributes:
        answer: answer to the prompt.
        edited, edited_cold: answers to the edited prompt, with its prefix's KV loaded and without; warm process only.
        hops: the hops of the prompt's KV, in the order in which bytes pass them.
        start_s: from the process's start until it could answer.
        last_warning: message of the last log record at level WARNING or above; empty if there was none.
    """

    pid: int
    device: str
    answer: Answer
    edited: Answer | None
    edited_cold: Answer | None
    hops: tuple[Hop, ...]
    start_s: float
    peak_rss_bytes: int
    model_bytes: int
    kv_bytes: int
    region_bytes: int
    last_warning: str = ""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The figures of both processes, and conclusions from them."""

    model: str
    cold: ProcessFigures
    warm: ProcessFigures
    config: dict[str, Any]

    @property
    def speedup(self) -> float:
        """How many times faster the warm process answers."""
        return self.cold.answer.ttft_s / self.warm.answer.ttft_s

    @property
    def tokens_equal(self) -> bool:
        """Whether the warm process answered with the same tokens as the cold process."""
        return self.cold.answer.token_ids == self.warm.answer.token_ids

    @property
    def partial_tokens_equal(self) -> bool | None:
        """Whether the edited prompt's tokens, warm and cold, are equal; None if it shares no block with the prompt."""
        edited, cold = self.warm.edited, self.warm.edited_cold
        return edited.token_ids == cold.token_ids if edited and cold else None

    @property
    def problem(self) -> str:
        """Why this demo failed; empty if it succeeded."""
        failure = self._failure()
        if not failure:
            return ""
        losses = [hop.loss for hop in self.cold.hops if hop.op == "store" and hop.loss]
        if self._is_partial:
            losses += [hop.loss for hop in self.warm.hops if hop.op == "load" and hop.loss]
        warnings = [
            f"last warning of the {name} process: {process.last_warning}"
            for name, process in (("cold", self.cold), ("warm", self.warm))
            if process.last_warning
        ]
        types = {tier.get("type") for tier in self.config.get("tiers", ())}
        reasons = [MEMORY_ONLY] if types == {"memory"} and not self.warm.answer.blocks_hit else []
        return "; ".join([failure, *reasons, *losses, *warnings])

    def _failure(self) -> str:
        warm, edited = self.warm.answer, self.warm.edited
        if not warm.blocks_hit:
            return "nothing was found: the second process computed the whole prompt again"
        if not warm.tokens_loaded:
            return "blocks were found but not loaded: the second process computed the whole prompt again"
        if not self.tokens_equal:
            return "the tokens differ: the KV that came back is not the KV that was stored"
        if edited and not edited.blocks_hit:
            return "no block of the edited prompt was found, although its first half is unchanged"
        if edited and not edited.tokens_loaded:
            return "blocks of the edited prompt were found but not loaded: it was computed again"
        if self.partial_tokens_equal is False:
            return "the tokens of the edited prompt differ from a cold computation"
        if any(hop.lost for hop in self.cold.hops if hop.op == "store"):
            return f"some blocks were not stored; {warm.blocks_hit} of the prompt's {warm.blocks_total} were found"
        if self._is_partial and any(hop.lost for hop in self.warm.hops if hop.op == "load"):
            return f"some blocks were not loaded; {warm.blocks_hit} of the prompt's {warm.blocks_total} were found"
        return ""

    @property
    def _is_partial(self) -> bool:
        """Whether part of the prompt had to be computed again."""
        return self.warm.answer.blocks_hit < self.warm.answer.blocks_total

    def as_json(self) -> dict[str, Any]:
        """Figures by name; times in seconds, rates in 10^9 bytes a second."""
        cold, warm, edited, edited_cold = self.cold, self.warm, self.warm.edited, self.warm.edited_cold
        to_tiers = [hop for hop in cold.hops if hop.op == "store" and hop.source == REGION]
        return {
            "model": self.model,
            "device": warm.device,
            "prompt_tokens": warm.answer.num_prompt_tokens,
            "cold_ttft_s": cold.answer.ttft_s,
            "warm_ttft_s": warm.answer.ttft_s,
            "speedup": self.speedup,
            "tokens_equal": self.tokens_equal,
            "answer": warm.answer.text,
            "answer_cold": cold.answer.text,
            "answer_tokens": list(warm.answer.token_ids),
            "blocks_total": warm.answer.blocks_total,
            "blocks_hit": warm.answer.blocks_hit,
            "tokens_loaded": warm.answer.tokens_loaded,
            "bytes_loaded": warm.answer.bytes_loaded,
            "load_s": warm.answer.load_s,
            "load_gb_s": _rate(warm.answer.bytes_loaded, warm.answer.load_s),
            "bytes_stored": sum(hop.bytes for hop in to_tiers),
            "store_s": sum(hop.seconds for hop in to_tiers),
            "store_gb_s": _rate(sum(hop.bytes for hop in to_tiers), sum(hop.seconds for hop in to_tiers)),
            "hops": [
                {"process": name} | asdict(hop) | {"gb_s": hop.gb_s}
                for name, process in (("cold", cold), ("warm", warm))
                for hop in process.hops
            ],
            "partial_tokens_equal": self.partial_tokens_equal,
            "partial_blocks_total": edited.blocks_total if edited else 0,
            "partial_blocks_hit": edited.blocks_hit if edited else 0,
            "partial_ttft_s": edited.ttft_s if edited else None,
            "partial_cold_ttft_s": edited_cold.ttft_s if edited_cold else None,
            "partial_answer": edited.text if edited else None,
            "peak_rss_bytes": max(cold.peak_rss_bytes, warm.peak_rss_bytes),
            "peak_rss_bytes_cold": cold.peak_rss_bytes,
            "peak_rss_bytes_warm": warm.peak_rss_bytes,
            "model_bytes": warm.model_bytes,
            "kv_bytes": warm.kv_bytes,
            "region_bytes": warm.region_bytes,
            "problem": self.problem or None,
            "config": self.config,
        }

    def write_json(self, path: Path) -> None:
        """Write ``as_json`` to a file."""
        with path.open("w", encoding="utf-8") as f:
            json.dump(self.as_json(), f, indent=2)
            f.write("\n")

    def print(self, console: Console) -> None:
        """Print the tables, the answers and a last line with the result."""
        console.print(self._times())
        console.print(self._hops())
        console.print(Group(*self._answers()))
        if self.problem:
            console.print(f"[bold red]✘ {escape(printable_lines(self.problem))}[/]")
            return
        if self._is_partial:
            found = f"{self.warm.answer.blocks_hit} of the prompt's {self.warm.answer.blocks_total} blocks"
            console.print(f"[yellow]Only {found} were found; the rest was computed again.[/]")
        same = f"The same {len(self.warm.answer.token_ids)} tokens"
        if self.speedup < 1:
            verdict = f"[bold yellow]✔ {same}, but {1 / self.speedup:.1f}x slower[/]"
        else:
            verdict = f"[bold green]✔ {same}, {self.speedup:.1f}x faster[/]"
        console.print(
            f"{verdict}: {_megabytes(self.warm.answer.bytes_loaded)} of KV, stored by another process, were loaded in "
            f"{_milliseconds(self.warm.answer.load_s)}."
        )

    def _times(self) -> Table:
        cold, warm, edited, edited_cold = self.cold, self.warm, self.warm.edited, self.warm.edited_cold
        table = Table(
            title=f"{self.model} on {warm.device} · a prompt of {warm.answer.num_prompt_tokens:,} tokens",
            caption="edited: a line was added in the middle of the text, so only the first half is shared",
        )
        table.add_column()
        table.add_column(f"cold\nprocess {cold.pid}", justify="right")
        table.add_column(f"warm\nprocess {warm.pid}", justify="right")
        table.add_column(f"edited\nprocess {warm.pid}", justify="right")
        partial_ratio = f"{edited_cold.ttft_s / edited.ttft_s:.1f}x" if edited and edited_cold else "–"
        rows = [
            ("time to first token", *map(_ttft, (cold.answer, warm.answer, edited))),
            ("  speedup over cold", "", f"[bold]{self.speedup:.1f}x[/]", partial_ratio),
            ("blocks found", "not asked", _found(warm.answer), _found(edited)),
            ("tokens loaded", "0", *(f"{a.tokens_loaded:,}" if a else "–" for a in (warm.answer, edited))),
            ("KV loaded", "0", *(_megabytes(a.bytes_loaded) if a else "–" for a in (warm.answer, edited))),
            ("  GB/s, lookups included", "", _load_rate(warm.answer), _load_rate(edited)),
            ("tokens equal to cold", "", _yes_no(self.tokens_equal), _yes_no(self.partial_tokens_equal)),
            ("peak RSS", _megabytes(cold.peak_rss_bytes), _megabytes(warm.peak_rss_bytes), ""),
            ("  of which weights, KV, region", *(_memory(p) for p in (cold, warm)), ""),
            ("ready after", f"{cold.start_s:.1f} s", f"{warm.start_s:.1f} s", ""),
        ]
        for row in rows:
            table.add_row(*row)
        return table

    def _hops(self) -> Table:
        table = Table("process", "hop", title="where the bytes went")
        for name in ("bytes", "time", "GB/s"):
            table.add_column(name, justify="right")
        for name, op, process in (("cold", "store", self.cold), ("warm", "load", self.warm)):
            for hop in process.hops:
                # Blocks loaded from a far tier are also stored in a nearer tier, with the few new blocks.
                fills = hop.source == REGION and hop.op == "store" and 0 < self.warm.answer.bytes_loaded <= hop.bytes
                if hop.op != op and not fills:
                    continue
                if hop.bytes:
                    figures = _megabytes(hop.bytes), _milliseconds(hop.seconds), f"{hop.gb_s:.1f}"
                else:
                    is_there = hop.already_stored and not hop.lost
                    figures = "already stored" if is_there else f"nothing {_DONE[hop.op]}", "", ""
                table.add_row(name, f"{hop.source} → {hop.destination}", *figures)
            table.add_section()
        return table

    def _answers(self) -> list[RenderableType]:
        """One panel for each text, titled with all processes and prompts that gave it."""
        named = [("cold", self.cold.answer), ("warm", self.warm.answer), ("edited", self.warm.edited)]
        names_of: dict[str, list[str]] = {}
        for name, answer in named:
            if answer:
                names_of.setdefault(answer.text or "(no text)", []).append(name)
        return [
            Panel(Text(printable_lines(text)), title=" = ".join(names), title_align="left")
            for text, names in names_of.items()
        ]


def _rate(num_bytes: int, seconds: float) -> float:
    return num_bytes / seconds / 1e9 if seconds else 0.0


def _load_rate(answer: Answer | None) -> str:
    return f"{_rate(answer.bytes_loaded, answer.load_s):.1f}" if answer and answer.load_s else "–"


def _found(answer: Answer | None) -> str:
    return f"{answer.blocks_hit} of {answer.blocks_total}" if answer else "–"


def _ttft(answer: Answer | None) -> str:
    return _milliseconds(answer.ttft_s) if answer else "–"


def _memory(process: ProcessFigures) -> str:
    return " + ".join(f"{size / 1e6:,.0f}" for size in (process.model_bytes, process.kv_bytes, process.region_bytes))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _yes_no(value: bool | None) -> str:
    return "–" if value is None else "[green]yes[/]" if value else "[red]no[/]"
