"""A cache of the demo's converted weights: a GGUF file becomes a folder of safetensors once.

Reading a GGUF file costs the demo most of its start, because its tokenizer and its quantized weights are converted
each time. The first process converts and calls ``WeightsCache.store``; later processes load the result within seconds.

The cache is one folder, ``cache_root()``, that holds one model, the last that was converted:

    lock                    every process holds this file's lock while it reads or changes the cache
    <sha256 of the GGUF>/   config.json, model.safetensors, the tokenizer's files, and manifest.json
    new-<random>/           a conversion under way, or left by a killed process; the next conversion removes it

A model is published by one rename of its finished folder. Nothing in the cache is trusted: the manifest names the
source by size and digest and each file by size and checksum. All are checked before each use; a model that fails the
check is converted again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"
NEW_PREFIX = "new-"
_NEW = re.compile(rf"{NEW_PREFIX}[a-z0-9_]{{8}}")  # as mkdtemp names a folder
CACHE_NAME = "kvtiers-models"
MANIFEST_BYTES_MAX = 1 << 20
FREE_BYTES_MIN = 1 << 30  # left free on the cache's disk, or the conversion is not kept


@dataclass(frozen=True, slots=True)
class Source:
    """What a cached model was made from.

    Attributes:
        sha256, size_bytes: of the GGUF file.
        converter: names and versions of the libraries that convert it.
    """

    sha256: str
    size_bytes: int
    converter: str


class WeightsCache:
    """Converted models in one folder. Use it inside ``locked``.

    Args:
        root: the cache's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    @contextlib.contextmanager
    def locked(cls, root: Path) -> Iterator[WeightsCache]:
        """Make the cache's folder on its first use, and hold its lock.

        Another process waits here before its own conversion or load. The kernel frees the lock of a killed process.

        Raises:
            OSError: the folder cannot be made, opened or locked.
        """
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield cls(root)
        finally:
            os.close(descriptor)

    def find(self, source: Source) -> Path | None:
        """Return the folder of a converted model, or None if there is no intact one."""
        folder = self._root / source.sha256
        return folder if _is_intact(folder, source) else None

    def store(self, source: Source, size_bytes: int, save: Callable[[Path], None]) -> None:
        """Keep a converted model in place of whatever the cache holds.

        Args:
            size_bytes: size of the converted weights.
            save: writes the model's files into a folder.

        Raises:
            OSError: the model cannot be written, or the disk would have less than ``FREE_BYTES_MIN`` free.
        """
        for entry in self._root.iterdir():
            if _NEW.fullmatch(entry.name) or _is_digest(entry.name):
                _remove(entry)
        if shutil.disk_usage(self._root).free < size_bytes + FREE_BYTES_MIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        new = Path(tempfile.mkdtemp(prefix=NEW_PREFIX, dir=self._root))
        try:
            save(new)
            manifest = {"source": asdict(source), "files": _files(new)}
            (new / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
            new.rename(self._root / source.sha256)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def cache_root() -> Path:
    """Return ``kvtiers-models`` in $XDG_CACHE_HOME, or in ~/.cache if the variable is unset or not absolute.

    Raises:
        OSError: this user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / CACHE_NAME
    try:
        return Path.home() / ".cache" / CACHE_NAME
    except RuntimeError as e:
        raise OSError(errno.ENOENT, "this user has no home folder") from e


def _is_intact(folder: Path, source: Source) -> bool:
    """Whether the folder holds exactly what its manifest says, made from this source."""
    try:
        with (folder / MANIFEST).open("rb") as f:
            text = f.read(MANIFEST_BYTES_MAX)
        manifest: Any = json.loads(text)
        return bool(manifest == {"source": asdict(source), "files": _files(folder)})
    except (OSError, ValueError, RecursionError):
        return False


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the size and checksum of each file except the manifest.

    Raises:
        OSError: a file cannot be read, or an entry is not a plain file.
    """
    files = {}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not entry.is_file(follow_symlinks=False):
            raise OSError(errno.EINVAL, "not a plain file", entry.path)
        if entry.name != MANIFEST:
            with open(entry.path, "rb") as f:
                checksum = hashlib.file_digest(f, xxhash.xxh3_128).hexdigest()
                files[entry.name] = {"size_bytes": f.tell(), "xxh3_128": checksum}
    return files


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def _is_digest(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")
