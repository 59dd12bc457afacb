"""A cache of converted models: dequantizing a GGUF file takes half a minute, loading the result takes a second.

The cache is ``$XDG_CACHE_HOME/kvtiers-models``, by default ``~/.cache/kvtiers-models``. An entry is a folder in the
form of ``save_pretrained`` and ``manifest.json``, which lists the size and the digest of every file. Its name has the
size and the digest of the GGUF file and the versions of the libraries that converted it.

- An entry is built in a private folder and renamed. Two processes may build the same entry; one of them wins.
- Every file is compared with the manifest before it is used. An entry that does not match is removed and built again.
- The cache is only a shortcut: if it cannot be read or written, the model is converted again.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from tiers.plain_logs import get_logger

logger = get_logger(__name__)

MANIFEST = "manifest.json"
LIBRARIES = ("transformers", "gguf", "torch", "safetensors")
READ_BYTES = 1 << 20


def cache_folder() -> Path:
    """The folder with all entries; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvtiers-models"


def find_entry(gguf: Path, digest: str) -> Path | None:
    """The folder with the converted model; None if there is no sound one.

    Args:
        gguf: the file that was converted.
        digest: SHA-256 of its bytes, in hex.
    """
    try:
        entry = cache_folder() / _entry_name(gguf, digest)
        return entry if _is_sound(entry) else None
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None


def add_entry(gguf: Path, digest: str, save: Callable[[Path], None]) -> None:
    """Keep a converted model. Logs a warning if it cannot be kept.

    Args:
        save: writes the model's files into an empty folder.
    """
    private = None
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        entry = folder / _entry_name(gguf, digest)
        private = folder / f".{entry.name[:100]}-{os.getpid()}-{secrets.token_hex(4)}"
        private.mkdir(mode=0o700)
        save(private)
        manifest = {file.name: _size_and_digest(file) for file in sorted(private.iterdir())}
        (private / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _publish(private, entry)
    except (OSError, RuntimeError) as e:
        logger.warning("the converted model is not kept, so the next run converts it again: %s", e)
    finally:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)


def save_model(module: Any, tokenizer: Any, folder: Path) -> None:
    """Write a dequantized model in the form that ``from_pretrained`` reads."""
    safetensors: Any = importlib.import_module("safetensors.torch")
    config = type(module.config).from_dict(
        {name: value for name, value in module.config.to_dict().items() if name != "quantization_config"}
    )
    config.save_pretrained(folder)
    module.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Not module.save_pretrained, which refuses a model that was read from GGUF. save_model writes tied weights once.
    safetensors.save_model(module, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _entry_name(gguf: Path, digest: str) -> str:
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    version = xxhash.xxh3_64_hexdigest(versions.encode())
    return f"{gguf.stem[:80]}-{gguf.stat().st_size}-{digest[:32]}-{version}"


def _is_sound(entry: Path) -> bool:
    try:
        manifest = json.loads((entry / MANIFEST).read_text())
        names = {file.name for file in entry.iterdir()} - {MANIFEST}
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    if not isinstance(manifest, dict) or names != manifest.keys() or not names:
        return False
    return all(_size_and_digest(entry / name) == expected for name, expected in manifest.items())


def _size_and_digest(file: Path) -> list[object]:
    digest = xxhash.xxh3_128()
    with file.open("rb") as f:
        while piece := f.read(READ_BYTES):
            digest.update(piece)
    return [file.stat().st_size, digest.hexdigest()]


def _publish(private: Path, entry: Path) -> None:
    """Rename the private folder to the entry. Another process's sound entry stays; a bad one is replaced."""
    for _ in range(2):
        try:
            private.rename(entry)
            return
        except OSError as e:
            if not entry.exists():
                raise
            if _is_sound(entry):
                return
            logger.info("%s is damaged and is built again: %s", entry, e)
            aside = private.with_name(f"{private.name}-damaged")
            entry.rename(aside)  # in one step: another process may be about to read it
            if aside.is_dir() and not aside.is_symlink():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.unlink()
