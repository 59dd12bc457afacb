"""Computes digests of model files and configuration values, and finds hub commits, to identify a model.

The same files and values give the same digest in every process and on every host.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...tiers.plain_logs import get_logger
from .weight_files import Layout, layout_of

logger = get_logger(__name__)

#: Weights of up to this size are read whole. Of larger weights, samples of about this size in total are read.
READ_BYTES = 64 << 20
SAMPLE_BYTES = 4096
SMALL_BYTES_MAX = 64 << 10
CONFIG_BYTES_MAX = 64 << 20  # the index of a model with 90,000 tensors has 9 MB
DIGEST_HEX_DIGITS = 24

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
#: Other files that change the model's computation. Tokenizers do not count, because blocks are named by token ids.
_CONFIGS = re.compile(
    r"config\.json|params\.json|.*quant.*config\.json|(video_)?(pre)?processor_config\.json|.*\.py"
    r"|.*\.index\.json"  # vLLM loads only the files that an index names
)


def files_digest(path: str, also: str = "") -> str | None:
    """Digest of a local model: its configs, and its weights' names, sizes and samples. None: no readable local files.

    Weights of up to 64 MiB are read whole. Larger weights are sampled: their headers, all small tensors, and parts of
    every other tensor, in proportion to its size. So the digest changes if any one tensor is replaced, but not always
    if only some elements of a large tensor change. File times do not count: a copied folder is the same model. Within a
    process, files are read again only after their inode, size or times have changed.

    Args:
        also: name of one more file to include.
    """
    try:
        folder = Path(path)
        is_folder = folder.is_dir()
        entries = sorted(folder.iterdir()) if is_folder else [folder]
        files = []
        for file in entries:
            is_weights = file.suffix in _WEIGHTS or not is_folder
            if (is_weights or file.name == also or _CONFIGS.fullmatch(file.name)) and file.is_file():
                status = file.stat()
                files.append(
                    (
                        file,
                        is_weights,
                        (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns),
                    )
                )
        return _digest_of_files(tuple(files)) if files else None
    except OSError as e:
        logger.warning("cannot read the model files in %s to identify the weights: %s", path, e)
        return None


@lru_cache(maxsize=256)
def _digest_of_files(files: tuple[tuple[Path, bool, tuple[int, ...]], ...]) -> str:
    digest = hashlib.sha256()
    weights = {file: layout_of(file) for file, is_weights, _ in files if is_weights}
    sampler = _Sampler(list(weights.values()))
    for file, _, _ in files:
        for part in _contents(file, weights.get(file), sampler):
            digest.update(len(part).to_bytes(8, "little") + part)
    return f"files:{digest.hexdigest()[:DIGEST_HEX_DIGITS]}"


def hub_commit(name: str, revision: str | None, download_dir: str | None = None) -> str | None:
    """The commit that the local hub cache has for a model's revision. None: the revision is not in the cache.

    Args:
        name: ``org/model``, or a file in it as ``org/model:file`` or ``org/model/file``.
        download_dir: a cache to search before the default cache.
    """
    if re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        return revision
    for folder in ([hub_folder(name, download_dir)] if download_dir else []) + [hub_folder(name)]:
        try:
            return Path(folder, "refs", revision or "main").read_text().strip() or None
        except (OSError, ValueError):
            continue
    return None


def hub_folder(name: str, cache: str | None = None) -> Path:
    """Folder of a hub model in a local cache (default: the user's)."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(cache or HF_HUB_CACHE, "--".join(["models", *name.partition(":")[0].split("/")[:2]]))


class _Sampler:
    """Chooses the parts of a model's weights to read, so that the cost does not grow with their size.

    Chooses one sample of each tensor, and ``READ_BYTES / SAMPLE_BYTES`` (16,384) more, shared out by size. A local disk
    reads these samples in about a second.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._total_bytes = sum(layout.size_bytes for layout in layouts)
        tensors = sum(len(layout.tensors) for layout in layouts)
        self._small_bytes = min(SMALL_BYTES_MAX, max(SAMPLE_BYTES, READ_BYTES // max(1, tensors)))

    def spans(self, layout: Layout) -> Iterator[tuple[int, int]]:
        """Yield offset and size of each part of a file to read."""
        if self._total_bytes <= READ_BYTES:
            yield 0, layout.size_bytes
            return
        yield from layout.headers
        for first, size in layout.tensors:
            if size <= self._small_bytes:
                yield first, size
                continue
            count = 1 + size * (READ_BYTES // SAMPLE_BYTES) // self._total_bytes
            last = size - SAMPLE_BYTES
            for index in range(count):  # one sample: the middle; several: evenly from end to end
                yield first + (last // 2 if count == 1 else last * index // (count - 1)), SAMPLE_BYTES


def _contents(file: Path, layout: Layout | None, sampler: _Sampler) -> Iterator[bytes]:
    yield file.name.encode(errors="surrogateescape")
    with file.open("rb") as opened:
        fd = opened.fileno()
        yield str(os.fstat(fd).st_size).encode()
        if layout is None:
            yield opened.read(CONFIG_BYTES_MAX)
            return
        spans = list(sampler.spans(layout))
        with suppress(OSError):  # only a hint to the kernel, which then reads all parts in parallel
            for offset, size in spans:
                os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)
        for offset, size in spans:
            yield os.pread(fd, size, offset)


def value_digest(value: Any) -> str:
    """Digest of a configuration value."""
    text = json.dumps(_plain(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_HEX_DIGITS]


def _plain(value: Any) -> Any:
    """Convert a value for JSON, without private fields and without the memory addresses in some objects' repr."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items() if not str(name).startswith("_")}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(each) for each in value)
    if value is None or isinstance(value, str | int | float):
        return value
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
