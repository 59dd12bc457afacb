"""Draw the time to first token of a demo run: ``python -m tests.docs.plot_demo REPORT.json PLOT.svg``.

REPORT.json is what ``kvtiers demo --json`` wrote. The SVG is plain text with a white background, so that it is readable
on a dark page and its changes are readable in a diff.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, BAR_HEIGHT, ROW_HEIGHT = 820, 30, 58
LEFT, RIGHT, TOP = 20, 130, 74
GRAY, GREEN, BLUE = "#9aa5b1", "#2f9e63", "#3f7fbf"


def draw(report: dict[str, Any]) -> str:
    """The SVG's text.

    Args:
        report: as ``kvtiers.connector.demo.report.DemoReport.as_json`` gives it.
    """
    cold, warm, partial = report["cold_ttft_s"], report["warm_ttft_s"], report["partial_ttft_s"]
    tokens = report["prompt_tokens"]
    rows = [
        ("Cold: the whole prompt is computed", cold, GRAY, ""),
        ("Warm: a new process loads the KV cache from disk", warm, GREEN, f", {cold / warm:.0f}x faster"),
    ]
    if partial is not None:
        shared = report["partial_blocks_hit"] / report["partial_blocks_total"]
        label = f"Edited prompt: the first {shared:.0%} is loaded, the rest is computed"
        rows.insert(1, (label, partial, BLUE, f", {cold / partial:.1f}x faster"))
    height = TOP + ROW_HEIGHT * len(rows) + 20
    scale = (WIDTH - LEFT - RIGHT) / max(seconds for _, seconds, _, _ in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="15" fill="#1f2933">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="30" font-size="18" font-weight="600">'
        f"Time to first token, {tokens:,} prompt tokens</text>",
        f'<text x="{LEFT}" y="52" fill="#52606d" font-size="13">'
        f"{escape(str(report['model']))} on {escape(str(report['device']).upper())}, one run of make demo. "
        "Shorter is better.</text>",
    ]
    for number, (label, seconds, color, gain) in enumerate(rows):
        y = TOP + number * ROW_HEIGHT
        width = max(3.0, seconds * scale)
        parts += [
            f'<text x="{LEFT}" y="{y + 14}">{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y + 21}" width="{width:.1f}" height="{BAR_HEIGHT - 8}" rx="3" fill="{color}"/>',
            f'<text x="{LEFT + width + 8:.1f}" y="{y + 37}" font-weight="600">{seconds:.2f} s{gain}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Read the report, write the plot."""
    report, plot = map(Path, sys.argv[1:])
    plot.write_text(draw(json.loads(report.read_text())))


if __name__ == "__main__":
    main()
