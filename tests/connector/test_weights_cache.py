"""The cache of converted models is a shortcut that is checked before it is believed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector.demo import weights_cache
from connector.demo.weights_cache import MANIFEST, add_entry, cache_folder, find_entry

DIGEST = "ab" * 32


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "some-model.gguf"
    file.write_bytes(b"weights")
    return file


def save(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"converted" * 1000)
    (folder / "config.json").write_text("{}")


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_an_entry_is_found_again(gguf: Path, cache: Path) -> None:
    assert find_entry(gguf, DIGEST) is None
    add_entry(gguf, DIGEST, save)
    entry = find_entry(gguf, DIGEST)
    assert entry is not None
    assert (entry / "model.safetensors").read_bytes() == b"converted" * 1000
    assert entries(cache) == [entry.name]
    assert cache.stat().st_mode & 0o777 == 0o700


def test_another_file_or_library_has_another_entry(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_entry(gguf, DIGEST, save)
    assert find_entry(gguf, "cd" * 32) is None
    gguf.write_bytes(b"more weights")
    assert find_entry(gguf, DIGEST) is None
    gguf.write_bytes(b"weights")
    assert find_entry(gguf, DIGEST) is not None
    monkeypatch.setattr(weights_cache.importlib.metadata, "version", lambda name: "99")  # type: ignore[attr-defined]
    assert find_entry(gguf, DIGEST) is None


def flip_a_bit(entry: Path) -> None:
    file = entry / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip_a_bit,
    "truncated": lambda entry: os.truncate(entry / "model.safetensors", 10),
    "missing file": lambda entry: (entry / "config.json").unlink(),
    "further file": lambda entry: (entry / "adapter.bin").touch(),
    "no manifest": lambda entry: (entry / MANIFEST).unlink(),
    "torn manifest": lambda entry: (entry / MANIFEST).write_text('{"model.safet'),
    "empty manifest": lambda entry: (entry / MANIFEST).write_text("{}"),
    "a list for a manifest": lambda entry: (entry / MANIFEST).write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_not_used_and_is_replaced(gguf: Path, cache: Path, damage: Callable[[Path], object]) -> None:
    add_entry(gguf, DIGEST, save)
    entry = find_entry(gguf, DIGEST)
    assert entry is not None
    damage(entry)
    assert find_entry(gguf, DIGEST) is None
    add_entry(gguf, DIGEST, save)
    assert find_entry(gguf, DIGEST) == entry
    assert entries(cache) == [entry.name]


def test_a_file_in_place_of_an_entry_is_replaced(gguf: Path, cache: Path) -> None:
    add_entry(gguf, DIGEST, save)
    (name,) = entries(cache)
    for file in (cache / name).iterdir():
        file.unlink()
    (cache / name).rmdir()
    (cache / name).write_bytes(b"")
    assert find_entry(gguf, DIGEST) is None
    add_entry(gguf, DIGEST, save)
    assert find_entry(gguf, DIGEST) == cache / name


def test_a_sound_entry_of_another_process_stays(gguf: Path, cache: Path) -> None:
    add_entry(gguf, DIGEST, save)
    entry = find_entry(gguf, DIGEST)
    assert entry is not None
    inode = entry.stat().st_ino
    add_entry(gguf, DIGEST, save)
    assert entry.stat().st_ino == inode
    assert entries(cache) == [entry.name]


def test_a_conversion_that_fails_leaves_nothing(gguf: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(folder: Path) -> None:
        save(folder)
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING):
        add_entry(gguf, DIGEST, fail)
    assert "the next run converts it again: [Errno 28] No space left on device" in caplog.text
    assert entries(cache) == []


def test_a_cache_that_cannot_be_used_is_no_error(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert find_entry(gguf, DIGEST) is None
    add_entry(gguf, DIGEST, save)
    assert "converts it again" in caplog.text


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / ".cache" / "kvtiers-models"


def test_processes_that_build_the_same_entry_leave_one(gguf: Path, cache: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.connector.test_weights_cache import *;"
        "[add_entry(Path(sys.argv[1]), DIGEST, save) or (find_entry(Path(sys.argv[1]), DIGEST) or sys.exit('lost'))"
        " for _ in range(20)]"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, str(gguf)]) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    entry = find_entry(gguf, DIGEST)
    assert entry is not None
    assert entries(cache) == [entry.name]


def test_a_saved_model_is_the_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.tiny_model import make_model_dir

    source = make_model_dir(tmp_path / "model")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source)
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    module.config.quantization_config = {"quant_method": "gguf"}  # as transformers leaves it
    folder = tmp_path / "saved"
    folder.mkdir()
    weights_cache.save_model(module, tokenizer, folder)
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights, same = module.state_dict(), again.state_dict()
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert transformers.AutoTokenizer.from_pretrained(folder)("text")["input_ids"] == tokenizer("text")["input_ids"]
