"""Digests of what an engine was given: a model's files, a hub's commit, and values of a configuration.

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

#: What KV in FP8 is multiplied by, as vLLM's ``maybe_remap_kv_scale_name`` knows it: a few bytes, which no sample hits.
_KV_SCALE = re.compile(r"(.*\.)?((kv|[qkv]|prob)(_cache)?[._](scale|zero_point)|[kv]_proj\.output_scale)")
HEADER_BYTES_MAX = 100 << 20  # of safetensors' own
_SCALE_BYTES_MAX = 1 << 16

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
#: What else decides what the weights mean. Not a tokenizer: blocks are named by token ids.
_CONFIGS = re.compile(r"config\.json|params\.json|.*quant.*config\.json|(video_)?(pre)?processor_config\.json|.*\.py")


def files_digest(path: str, also: str = "") -> str | None:
    """Digest of a local model: its configs, and its weights' names, sizes and samples; None for what is not local.

    Weights of one shape have the same header and size whatever they were trained to, so bytes are read from all over
    each file: 64 times 4 KiB, and the scales of KV. Times are left out: a folder's copies are the same model. In one
    process files are read again when something about them has changed.

    Args:
        also: name of one more file that counts.
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
                    (file, is_weights, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
                )
        return _digest_of_files(tuple(files)) if files else None
    except OSError as e:
        logger.warning("the weights in %s cannot be told from others: %s", path, e)
        return None


@lru_cache(maxsize=256)
def _digest_of_files(files: tuple[tuple[Path, bool, tuple[int, ...]], ...]) -> str:
    digest = hashlib.sha256()
    for file, is_weights, _ in files:
        for part in _contents(file, samples=SAMPLES_PER_FILE if is_weights else 0):
            digest.update(len(part).to_bytes(8, "little") + part)
    return f"files:{digest.hexdigest()[:DIGEST_HEX_DIGITS]}"


def hub_commit(name: str, revision: str | None, download_dir: str | None = None) -> str | None:
    """The commit of a hub's model that the local cache has for a revision; None where it has none.

    Args:
        name: ``org/model``, or a file in it as ``org/model:file`` or ``org/model/file``.
        download_dir: a cache that is looked at before the default one.
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
    """Where the local cache (by default the user's) has a hub's model."""
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
    """Names and bytes of a safetensors file's; nothing of what is no such file, which vLLM will refuse."""
    header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
    with suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError):
        header = json.loads(os.pread(fd, header_bytes if header_bytes <= HEADER_BYTES_MAX else 0, 8))
        for name, tensor in sorted(header.items()):
            if _KV_SCALE.fullmatch(name):
                first, end = tensor["data_offsets"]
                yield name.encode()
                yield os.pread(fd, min(max(0, end - first), _SCALE_BYTES_MAX), 8 + header_bytes + max(0, first))


def value_digest(value: Any) -> str:
    """Digest of what a configuration may hold."""
    text = json.dumps(_plain(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_HEX_DIGITS]


def _plain(value: Any) -> Any:
    """A value as JSON has it, without private fields and without the addresses that some objects' repr shows."""
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
