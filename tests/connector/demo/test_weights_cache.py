"""The demo converts a GGUF file once; an incomplete or damaged conversion is never used."""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtiers.connector.demo import model as demo_model
from kvtiers.connector.demo import weights_cache
from kvtiers.connector.demo.model import ModelSource, load_model
from kvtiers.connector.demo.weights_cache import MANIFEST, Source, WeightsCache, cache_root
from kvtiers.tiers.errors import ConfigError
from tests.tiny_model import make_model_dir

SOURCE = Source("a" * 64, 1000, "converter 1")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[WeightsCache]:
    with WeightsCache.locked(tmp_path / "cache") as cache:
        yield cache


def save(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")


def test_a_converted_model_is_found_by_its_source(cache: WeightsCache) -> None:
    assert cache.find(SOURCE) is None
    cache.store(SOURCE, 7, save)
    folder = cache.find(SOURCE)
    assert folder is not None
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert cache.find(Source("b" * 64, 1000, "converter 1")) is None
    assert cache.find(Source("a" * 64, 1001, "converter 1")) is None
    assert cache.find(Source("a" * 64, 1000, "converter 2")) is None


def _drop_manifest_key(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"]["config.json"]
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _replace_by_link(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "elsewhere")
    (folder / "config.json").symlink_to(folder.parent / "elsewhere")


def _replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped byte": lambda folder: (folder / "model.safetensors").write_bytes(b"weighta"),
    "truncated": lambda folder: os.truncate(folder / "model.safetensors", 3),
    "empty": lambda folder: os.truncate(folder / "model.safetensors", 0),
    "missing file": lambda folder: (folder / "config.json").unlink(),
    "extra file": lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"),
    "extra folder": lambda folder: (folder / "more").mkdir(),
    "link": _replace_by_link,
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "torn manifest": lambda folder: os.truncate(folder / MANIFEST, 40),
    "manifest of another form": lambda folder: (folder / MANIFEST).write_text("[]"),
    "deep manifest": lambda folder: (folder / MANIFEST).write_text("[" * 100_000),
    "manifest is no text": lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe\xfd"),
    "file not in the manifest": _drop_manifest_key,
    "a file in the folder's place": _replace_by_file,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_not_found_and_can_be_stored_again(cache: WeightsCache, damage: str) -> None:
    cache.store(SOURCE, 7, save)
    folder = cache.find(SOURCE)
    assert folder is not None
    DAMAGES[damage](folder)
    assert cache.find(SOURCE) is None
    cache.store(SOURCE, 7, save)
    assert cache.find(SOURCE) == folder
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", MANIFEST, "model.safetensors"]


def test_a_failed_conversion_leaves_nothing(cache: WeightsCache, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"wei")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cache.store(SOURCE, 7, fail)
    assert cache.find(SOURCE) is None
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_the_cache_holds_one_model_and_sweeps_what_killed_processes_left(cache: WeightsCache, tmp_path: Path) -> None:
    (tmp_path / "cache" / "new-left_0ab").mkdir()
    save(tmp_path / "cache" / "new-left_0ab")
    (tmp_path / "cache" / "notes").write_text("a user's file")
    cache.store(Source("b" * 64, 1, "converter 1"), 7, save)
    cache.store(SOURCE, 7, save)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [SOURCE.sha256, "lock", "notes"]


def test_a_disk_with_little_room_is_left_alone(cache: WeightsCache, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    free = weights_cache.FREE_BYTES_MIN + 6
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free, 0, free))
    with pytest.raises(OSError, match="No space left on device"):
        cache.store(SOURCE, 7, save)


def test_the_place_follows_the_xdg_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert cache_root() == Path("/var/caches/kvtiers-models")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_root() == tmp_path / ".cache" / "kvtiers-models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == tmp_path / ".cache" / "kvtiers-models"


HOLDER = """
import os, sys
from pathlib import Path
from kvtiers.connector.demo.weights_cache import WeightsCache
with WeightsCache.locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_waits_and_a_killed_one_frees_the_lock(tmp_path: Path) -> None:
    """The second comes in by the kill alone, and not before it."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "cache")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:
        assert first.stdout is not None
        assert second.stdout is not None
        readers = {first.stdout: (first, second), second.stdout: (second, first)}
        came, _, _ = select.select(list(readers), [], [], 120)
        assert len(came) == 1
        holder, waiter = readers[came[0]]
        assert came[0].readline() == b"locked\n"
        holder.kill()
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == b"locked\n"
        assert waiter.stdin is not None
        waiter.stdin.close()


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelSource, list[str]]:
    """A model whose GGUF file is played by a tiny model's folder, and what was loaded, in turn."""
    for name in ("torch", "transformers", "tokenizers"):
        pytest.importorskip(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    tiny = make_model_dir(tmp_path / "tiny")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    loaded: list[str] = []
    load = demo_model._pretrained

    def pretrained(source: ModelSource, stage: demo_model.Stage) -> tuple[Any, Any]:
        loaded.append("gguf" if source.gguf_file else "cache")
        return load(ModelSource(str(tiny), None, True) if source.gguf_file else source, stage)

    monkeypatch.setattr(demo_model, "_pretrained", pretrained)
    return ModelSource(str(tmp_path), "tiny.gguf", True), loaded


def test_the_second_load_is_of_the_cache_and_gives_the_same_model(gguf: tuple[ModelSource, list[str]]) -> None:
    import torch

    source, loaded = gguf
    stages: list[str] = []
    first, second = load_model(source, stages.append), load_model(source)
    assert loaded == ["gguf", "cache"]
    assert "converting the weights, once" in stages
    assert (first.name, first.revision, first.size_bytes) == (second.name, second.revision, second.size_bytes)
    assert first.tokenize("Hello", "What?") == second.tokenize("Hello", "What?")
    weights, again = first.module.state_dict(), second.module.state_dict()
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_another_file_under_the_same_name_is_converted_again(gguf: tuple[ModelSource, list[str]]) -> None:
    source, loaded = gguf
    first = load_model(source)
    (Path(source.path) / "tiny.gguf").write_bytes(b"GGUG")
    assert load_model(source).revision != first.revision
    assert loaded == ["gguf", "gguf"]


def test_two_at_once_convert_once(gguf: tuple[ModelSource, list[str]]) -> None:
    source, loaded = gguf
    threads = [threading.Thread(target=load_model, args=(source,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == ["gguf", "cache"]


def test_cached_weights_that_cannot_be_loaded_are_converted_again(
    gguf: tuple[ModelSource, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, loaded = gguf
    load_model(source)
    load = demo_model._pretrained

    def pretrained(source: ModelSource, stage: demo_model.Stage) -> tuple[Any, Any]:
        if source.gguf_file is None:
            raise ConfigError("no such architecture")
        return load(source, stage)

    monkeypatch.setattr(demo_model, "_pretrained", pretrained)
    load_model(source)
    assert loaded == ["gguf", "gguf"]


def test_without_a_usable_cache_the_demo_runs_and_says_why(
    gguf: tuple[ModelSource, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, loaded = gguf
    (tmp_path / "caches").write_text("a file")
    with caplog.at_level(logging.WARNING, "connector"):
        load_model(source)
        load_model(source)
    assert loaded == ["gguf", "gguf"]
    assert "the cache of converted weights cannot be used" in caplog.text


def test_a_save_that_fails_in_safetensors_is_a_warning(
    gguf: tuple[ModelSource, list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its errors are no OSError: with a full disk, say."""
    safetensors = pytest.importorskip("safetensors")

    def fail(*_: object) -> None:
        raise safetensors.SafetensorError("No space left on device")

    source, loaded = gguf
    monkeypatch.setattr(WeightsCache, "store", fail)
    with caplog.at_level(logging.WARNING, "connector"):
        load_model(source)
    assert loaded == ["gguf"]
    assert "the converted weights are not kept" in caplog.text
