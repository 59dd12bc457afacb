"""The demo on an NFS folder whose mount hangs half-way through the loads: same tokens, within the deadlines.

The mount is our FUSE pass-through, read in small pieces, slowly from half-way on, and stopped there.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rich.console import Console  # noqa: E402

from kvtiers.connector.demo.engine import Engine, Request  # noqa: E402
from kvtiers.connector.demo.model import LoadedModel  # noqa: E402
from kvtiers.connector.demo.paged_cache import KVLayout, PagedKVCache  # noqa: E402
from kvtiers.connector.demo.run import DemoOptions, run_demo  # noqa: E402
from kvtiers.connector.demo.worker import make_spec  # noqa: E402
from kvtiers.connector.spec import DeploymentSpec  # noqa: E402
from kvtiers.tiers.config.deployment import parse_config  # noqa: E402
from kvtiers.tiers.testing.fuse import FuseFault, FuseMount, why_no_fuse  # noqa: E402
from tests.tiny_model import make_model_dir, make_tiny_llama  # noqa: E402
from tests.waiting import PATIENT  # noqa: E402

pytestmark = pytest.mark.skipif(bool(why_no_fuse()), reason=str(why_no_fuse()))

CONFIG = Path(__file__).parents[3] / "configs" / "nfs.yaml"
IMPATIENT = {"lookup_deadline_s": 10.0, "job_deadline_s": 5.0}
ANSWER_S_MAX = 120.0  # deadlines of lookups and jobs are seconds; the rest is for a busy machine
READ_BYTES = 256  # of one read on the mount
SLOW_READ_S = 0.02  # so the second half would take longer than any deadline: it cannot end before the mount stops
BLOCK_SIZE = 4
NEW_TOKENS = 8
PROMPT = [(7 * index * index + 3 * index) % 61 for index in range(803)]


class HalfWay:
    """Stops a mount after a number of reads, on a thread of its own; a context manager, which lets it go on."""

    def __init__(self, mount: FuseMount, reads: int) -> None:
        self._mount = mount
        self._reads = reads
        self._stack = ExitStack()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.hung = threading.Event()

    def __enter__(self) -> HalfWay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._given_up.set()
        self._thread.join()
        self._stack.close()

    def _watch(self) -> None:
        while not self._given_up.is_set():
            if self._mount.calls()["read"] >= self._reads:
                self._stack.enter_context(self._mount.stopped())
                self.hung.set()
                return
            time.sleep(0.001)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FuseMount]:
    with FuseMount(tmp_path / "backing", tmp_path / "mount") as mount:
        yield mount


def nfs_config(mount: FuseMount, region_bytes: int | None, deadlines: dict[str, float]) -> dict[str, Any]:
    """The shipped configuration, on the mount, with other deadlines and several tasks a job.

    Without its bound: a new writer on NFS stores nothing within it in its first minute.
    """
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    (tier,) = config["tiers"]
    assert tier["type"] == "nfs"
    assert tier["isolation"] == "process"
    del tier["max_bytes"]
    tier |= {"root_dir": str(mount.path / "kv"), "min_free": 0, **deadlines}
    tier |= {"n_read_threads": 1, "n_write_threads": 1}
    if region_bytes is not None:
        config["region"]["size"] = region_bytes
    return config


def reads_of(mount: FuseMount) -> int:
    """Reads that loading everything takes."""
    reads = sum(-(-path.stat().st_size // READ_BYTES) for path in mount.backing.rglob("*.bin"))
    assert reads > 0, "nothing was stored"
    return reads


def slow_from_half_way(reads: int) -> list[FuseFault]:
    return [FuseFault("read", short_to=READ_BYTES), FuseFault("read", first=reads // 2, delay_s=SLOW_READ_S)]


@pytest.fixture
def start(mount: FuseMount) -> Iterator[Callable[..., tuple[Engine, DeploymentSpec]]]:
    model = make_tiny_llama()
    started: list[tuple[Engine, DeploymentSpec]] = []

    def start(deadlines: dict[str, float] = PATIENT) -> tuple[Engine, DeploymentSpec]:
        loaded = LoadedModel("tiny", "1", model, None, frozenset())
        memory = PagedKVCache(KVLayout.of_model(model), num_blocks=256, block_size=BLOCK_SIZE, device=loaded.device)
        spec = make_spec(loaded, memory, parse_config(nfs_config(mount, 4 << 20, deadlines)))
        started.append((Engine(loaded, memory, spec, store_chunks_max=spec.region.geometry.num_blocks), spec))
        return started[-1]

    yield start
    for engine, spec in started:
        engine.shutdown()
        spec.shutdown()


def ask(engine: Engine, *, store: bool = True) -> Request:
    return engine.run(PROMPT, max_new_tokens=NEW_TOKENS, store=store)


def test_answer_on_hung_mount_has_equal_tokens_in_time(
    mount: FuseMount, start: Callable[..., tuple[Engine, DeploymentSpec]]
) -> None:
    first, _ = start()
    cold = ask(first)
    first.drain()
    assert cold.blocks_hit == 0
    reads = reads_of(mount)
    engine, spec = start(IMPATIENT)
    mount.plan = slow_from_half_way(reads)
    with HalfWay(mount, reads // 2) as half_way:
        started_s = time.monotonic()
        warm = ask(engine)
        took_s = time.monotonic() - started_s
        assert half_way.hung.is_set(), "everything was loaded before the mount hung: nothing was tested"
        assert spec.metrics.value("kvtiers_bytes_total", "nfs", "load") < cold.blocks_total * 8192
        assert warm.answer == cold.answer
        assert took_s < ANSWER_S_MAX
        # And the next one does not wait again: the tier is cut off, or its lookups expire.
        started_s = time.monotonic()
        assert ask(engine, store=False).answer == cold.answer
        assert time.monotonic() - started_s < ANSWER_S_MAX
        started_s = time.monotonic()
        engine.shutdown()
        spec.shutdown()
        assert time.monotonic() - started_s < ANSWER_S_MAX
    mount.plan = []
    healed, _ = start()
    again = ask(healed, store=False)
    assert again.answer == cold.answer
    assert again.blocks_hit == again.blocks_total, "a hang must not cost what is stored"


@pytest.mark.full
def test_demo_command_on_hung_mount_ends_with_equal_tokens(mount: FuseMount, tmp_path: Path) -> None:
    """The same in the two processes of ``kvtiers demo``."""
    (tmp_path / "text.txt").write_text(
        "\n".join(f"Line {number} is about the number {number}." for number in range(40))
    )
    (tmp_path / "nfs.yaml").write_text(yaml.safe_dump(nfs_config(mount, None, PATIENT)))
    figures_file = tmp_path / "figures.json"
    options = DemoOptions(
        model=str(make_model_dir(tmp_path / "model")),
        prompt_file=tmp_path / "text.txt",
        config_file=tmp_path / "nfs.yaml",
        json_file=figures_file,
        max_new_tokens=NEW_TOKENS,
        block_size=BLOCK_SIZE,
    )
    assert run_demo(options, Console(quiet=True)) == 0
    healthy = json.loads(figures_file.read_text())
    # The first process finds everything stored and reads its trailers only; the second one loads.
    stored = reads_of(mount)
    (tmp_path / "nfs.yaml").write_text(yaml.safe_dump(nfs_config(mount, None, IMPATIENT)))
    mount.plan = slow_from_half_way(stored)
    with HalfWay(mount, stored // 2) as half_way:
        started_s = time.monotonic()
        run_demo(options, Console(quiet=True))
        took_s = time.monotonic() - started_s
        assert half_way.hung.is_set()
    hung = json.loads(figures_file.read_text())
    assert hung["tokens_equal"] is True
    assert hung["partial_tokens_equal"] is True
    assert hung["answer_tokens"] == healthy["answer_tokens"]
    assert hung["bytes_loaded"] < healthy["bytes_loaded"]
    assert took_s < 4 * ANSWER_S_MAX
