"""Runs the rows and writes the report: ``python -m tests.e2e.runner --work FOLDER [--reduced]``.

Run it with the interpreter that ``tests.e2e.make_env`` made. Exit code 1 if a row is not as it must be.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtiers.tiers.testing.servers import seaweed_server
from tests.e2e.lab import CPU_ENVIRONMENT, REPOSITORY, Lab, Row
from tests.e2e.layer_kinds import LAYER_KINDS
from tests.e2e.make_env import overlay_folder
from tests.e2e.make_model import make_model, make_tiny_model
from tests.e2e.report import write_report
from tests.e2e.rows import BLOCK_TOKENS, HARM, SLOW, Prompts, Setting, attempt, reference, reuse, upgraded, yardstick
from tests.e2e.ways import REUSE_WAYS, VLLM_WAYS

DOCUMENT_TOKENS = 2029
LONG_TOKENS = 32_100
HALF_BLOCKS = 31
UPGRADE_WAYS = ("tier on fs", "spec on fs", "SharedStorageConnector on a folder")
REDUCED_WAYS = ("tier on fs", "tier on S3", "spec on fs", "SharedStorageConnector on a folder")


def make_prompts(model: Path) -> Prompts:
    """Real text: the licence, and for the second half of ``half`` and the warm-up other files of the repository."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    document = tokenizer((REPOSITORY / "LICENSE").read_text())["input_ids"][:DOCUMENT_TOKENS]
    other = tokenizer((REPOSITORY / "ARCHITECTURE.md").read_text())["input_ids"]
    shared = HALF_BLOCKS * BLOCK_TOKENS
    return Prompts(
        document=document,
        half=document[:shared] + other[:200],
        warm_up=other[400:500],
        long=_long_prompt(tokenizer),
        half_shared_blocks=HALF_BLOCKS,
    )


def _long_prompt(tokenizer: Any) -> list[int]:
    text = "".join(path.read_text() for path in sorted((REPOSITORY / "connector").rglob("*.py")))
    tokens: list[int] = tokenizer(text)["input_ids"][:LONG_TOKENS]
    assert len(tokens) == LONG_TOKENS
    return tokens


def rows(work: Path, versions: Sequence[str], only: str, reduced: bool) -> Iterator[Row]:
    """Run the rows one by one."""
    model = make_model(work / "SmolLM2-135M-Instruct")
    tiny_model = make_tiny_model(work / "tiny-llama-64k", model)
    prompts = make_prompts(model)
    with seaweed_server() as server, tempfile.TemporaryDirectory(prefix="kvtiers-e2e-") as scratch:
        setting: Setting | None = None
        for version in versions:
            lab = Lab(
                version, overlay_folder(Path(sys.prefix), version), model, {**CPU_ENVIRONMENT, **server.s3.environment}
            )
            before = setting
            setting = Setting(lab, prompts, reference(lab, prompts), Path(scratch), server, tiny_model, before=before)
            print(f"vLLM {version}: cold without a connector {setting.reference.cold_ttft_s:.3f} s", flush=True)
            for name in REDUCED_WAYS if reduced else REUSE_WAYS:
                if _is_asked(only, f"{name}: reuse"):
                    yield attempt(yardstick if name in VLLM_WAYS else reuse, setting, name)
            for name in UPGRADE_WAYS:
                if before is not None and name in before.written and _is_asked(only, f"{name}: upgraded"):
                    yield attempt(upgraded, setting, name)
            for run, ways in (*HARM, *LAYER_KINDS):
                if run in SLOW or (run, ways) in LAYER_KINDS:
                    count = 0 if reduced else len(ways) if version == versions[0] else 1
                else:
                    count = 1 if reduced else len(ways)
                for name in ways[:count]:
                    if _is_asked(only, f"{name}: {run.__name__}"):
                        yield attempt(run, setting, name)


def _is_asked(only: str, name: str) -> bool:
    return not only or any(part.strip() in name for part in only.split(","))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model")
    parser.add_argument("--out", type=Path, default=Path("build/e2e"), help="folder for the report")
    parser.add_argument("--only", default="", help="run rows whose name contains one of these, comma-separated")
    parser.add_argument("--reduced", action="store_true", help="fewer rows: for CI")
    parser.add_argument("--versions", default="0.32", help="comma-separated; all but 0.32 are overlays of make_env")
    arguments = parser.parse_args()
    versions = arguments.versions.split(",")
    for version in versions:  # another version's rows must not come from the installed one
        overlay = overlay_folder(Path(sys.prefix), version)
        if version != "0.32" and (overlay is None or not overlay.exists()):
            parser.error(f"--versions: {version} is not here; python -m tests.e2e.make_env FOLDER --overlay {version}")
    began = time.monotonic()
    found: list[Row] = []
    for row in rows(arguments.work, versions, arguments.only, arguments.reduced):
        found.append(row)
        shown = ", ".join(itertools.islice((f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}"
                                            for k, v in row.figures.items()), 6))  # fmt: skip
        print(f"{'ok  ' if row.ok else 'FAIL'} {row.version} {row.name} ({row.took_s:.0f} s): {shown}", flush=True)
        for failure in row.failures:
            print(f"     {failure}", flush=True)
        # After each row, so that an interrupted run leaves a report too.
        path = write_report(arguments.out, found, {"minutes": round((time.monotonic() - began) / 60, 1)})
    print(path.read_text() if found else "no row was asked for")
    return 0 if found and all(row.ok for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
