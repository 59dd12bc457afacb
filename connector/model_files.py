"""Digests that identify an engine's model and configuration: of a model's files, a hub commit, or config values.

The same files and values give the same digest in every process and on every host.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvtiers.tiers.plain_logs import get_logger

logger = get_logger(__name__)

SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096
CONFIG_BYTES_MAX = 4 << 20
DIGEST_HEX_DIGITS = 24

#: Names of the scales of an FP8 KV cache, as in vLLM's ``maybe_remap_kv_scale_name``. Samples miss them: a few bytes.
_KV_SCALE = re.compile(r"(.*\.)?((kv|[qkv]|prob)(_cache)?[._](scale|zero_point)|[kv]_proj\.output_scale)")
HEADER_BYTES_MAX = 100 << 20  # safetensors' own limit
_SCALE_BYTES_MAX = 1 << 16

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
#: Other files that change what the weights compute. Tokenizers do not count: blocks are named by token ids.
_CONFIGS = re.compile(r"config\.json|params\.json|.*quant.*config\.json|(video_)?(pre)?processor_config\.json|.*\.py")


def files_digest(path: str, also: str = "") -> str | None:
    """Digest of a local model: its configs, and its weights' names, sizes and samples. None: no readable local files.

    Two models of the same shape have weight files with the same header and size. So the digest samples the whole of
    each weights file: 64 samples of 4 KiB, plus the KV scales. File times do not count: a copied folder is the same
    model. Within a process, files are read again only after their inode, size or times have changed.

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
    for file, is_weights, _ in files:
        for part in _contents(file, samples=SAMPLES_PER_FILE if is_weights else 0):
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


def _contents(file: Path, *, samples: int) -> Iterator[bytes]:
    yield file.name.encode(errors="surrogateescape")
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        yield str(size).encode()
        if not samples:
            yield opened.read(CONFIG_BYTES_MAX)
            return
        last = max(0, size - SAMPLE_BYTES)
        for offset in sorted({last * index // (samples - 1) for index in range(samples)}):
            yield os.pread(opened.fileno(), SAMPLE_BYTES, offset)
        if file.suffix == ".safetensors":
            yield from _kv_scales(opened.fileno())


def _kv_scales(fd: int) -> Iterator[bytes]:
    """Names and bytes of a safetensors file's KV scales. Ends early if the header is malformed: vLLM will reject it."""
    header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
    with suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError):
        header = json.loads(os.pread(fd, header_bytes if header_bytes <= HEADER_BYTES_MAX else 0, 8))
        for name, tensor in sorted(header.items()):
            if _KV_SCALE.fullmatch(name):
                first, end = tensor["data_offsets"]
                yield name.encode()
                yield os.pread(fd, min(max(0, end - first), _SCALE_BYTES_MAX), 8 + header_bytes + max(0, first))


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
