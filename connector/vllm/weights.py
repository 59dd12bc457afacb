"""Which weights a model has: by commit where it is known, else by what is in its folder.

The answer must be the same in the scheduler, in every worker and on every host with the same files. So it does not come
from vLLM's ``hf_config`` where there are files: models change that while they are loaded, which only workers do.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096
CONFIG_BYTES_MAX = 4 << 20
_DIGEST_HEX_DIGITS = 24

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
#: What else decides what the weights mean. Not a tokenizer: blocks are named by token ids.
_CONFIGS = re.compile(r"config\.json|params\.json|.*quant.*config\.json|.*\.py")


def weights_revision(model: Any) -> str | None:
    """What the weights are beyond the model's name; None where nothing is known.

    Commit or revision, quantization, and digests of: a local folder's weights and configs, ``hf_overrides``, and of the
    final config where neither a commit nor files are known or a function overrides it.

    Args:
        model: vLLM's ModelConfig.
    """
    hf_config = getattr(model, "hf_config", None)
    commit = getattr(hf_config, "_commit_hash", None)
    files = [found for path in _places(model) if (found := files_digest(path))]
    url = getattr(model, "model_weights", None)
    if url and not os.path.exists(url):
        files.append(f"weights:{_digest(url)}")  # in a bucket, beside a folder that has the configs only
    overrides = getattr(model, "hf_overrides", None)
    parts = [commit or getattr(model, "revision", None), getattr(model, "quantization", None), *files]
    if callable(overrides) or not (commit or files):
        parts.append(config_digest(hf_config))
    if overrides and not callable(overrides):
        parts.append(f"overrides:{_digest(overrides)}")
    return "+".join(str(part) for part in parts if part) or None


def files_digest(path: str) -> str | None:
    """Digest of a local model: its configs, and its weights' names, sizes and samples; None for what is not local.

    Weights of one shape have the same header and size whatever they were trained to, so bytes are read from all over
    each file: 64 times 4 KiB. Times are left out: a folder's copies are the same model.
    """
    try:
        folder = Path(path)
        entries = sorted(folder.iterdir()) if folder.is_dir() else [folder] if folder.is_file() else []
        digest = hashlib.sha256()
        seen = False
        for file in entries:
            is_weights = file.suffix in _WEIGHTS or folder.is_file()
            if not (is_weights or _CONFIGS.fullmatch(file.name)) or not file.is_file():
                continue
            seen = True
            for part in _contents(file, samples=SAMPLES_PER_FILE if is_weights else 0):
                digest.update(len(part).to_bytes(8, "little") + part)
    except OSError as e:
        logger.warning("the weights in %s cannot be told from others: %s", path, e)
        return None
    return f"files:{digest.hexdigest()[:_DIGEST_HEX_DIGITS]}" if seen else None


def config_digest(hf_config: Any) -> str | None:
    """Digest of a config; None for what has no ``to_dict``."""
    if not hasattr(hf_config, "to_dict"):
        return None
    fields = {name: value for name, value in hf_config.to_dict().items() if name != "transformers_version"}
    return f"config:{_digest(fields)}"


def _places(model: Any) -> Iterator[str]:
    """Where the weights are, and the config if it is elsewhere."""
    for name in ("model", "model_weights", "hf_config_path"):
        path = getattr(model, name, None)
        if isinstance(path, str) and path:
            yield path


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


def _digest(value: Any) -> str:
    text = json.dumps(_plain(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_HEX_DIGITS]


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
