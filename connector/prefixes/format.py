"""Formats of a prefix chunk's files: the sealed manifest, and one tensor file for each layer.

Modules ``store`` and ``chunks`` write, find and remove the files.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from kvtiers.tiers.blocks.namespace import parse_json
from kvtiers.tiers.errors import SealError, SealReason

if TYPE_CHECKING:
    import torch

FORMAT = "prefix-1"
MANIFEST_BYTES_MAX = 4 << 20
#: Pattern of a manifest's name: number of blocks, and hash of the last block.
MANIFEST_NAME = r"([0-9]{1,6})-([0-9a-f]{8,128})\.json"
_TENSOR = "kv"
#: Types of KV caches: safetensors' name -> torch's name.
_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
}


def seal(body: Mapping[str, Any]) -> bytes:
    """Return a manifest's bytes. For its content see ``unseal``."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return text + f"\n{xxhash.xxh3_128_hexdigest(text)}\n".encode()


def unseal(data: bytes, path: str) -> dict[str, Any]:
    """Return a manifest's content: ``hashes``, ``attempt``, ``layers`` and ``identity``. Callers compare ``identity``.

    Raises:
        SealError: the bytes are not a valid manifest.
    """
    text, _, rest = data.partition(b"\n")
    if rest != f"{xxhash.xxh3_128_hexdigest(text)}\n".encode():
        raise SealError(SealReason.TRAILER_CHECKSUM, f"{path} does not match its checksum")
    try:
        body = parse_json(text)
        hashes, layers, its_format = body["hashes"], body["layers"], body["format"]
        sound = (
            isinstance(body["identity"], str)
            and re.fullmatch(r"[0-9a-f]{32}", body["attempt"]) is not None
            and all(isinstance(block, str) for block in hashes)
            and all(isinstance(size, int) and isinstance(checksum, str) for size, checksum in layers.values())
        )
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise SealError(SealReason.MAGIC, f"{path} is not a valid manifest") from e
    if its_format != FORMAT:
        raise SealError(SealReason.VERSION, f"{path} has format {its_format!r}", foreign=True)
    if not sound:
        raise SealError(SealReason.MAGIC, f"{path} is not a valid manifest")
    checked: dict[str, Any] = body
    return checked


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a layer's file (safetensors). The tensor must be contiguous and on the CPU."""
    import safetensors.torch

    return safetensors.torch.save({_TENSOR: tensor})


def tensor_in(data: memoryview) -> torch.Tensor:
    """Return the tensor of a layer's file. It shares ``data``'s memory; safetensors itself can only copy from memory.

    Raises:
        SealError: the bytes are not a layer's file.
    """
    import safetensors.torch
    import torch

    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        entry = parse_json(bytes(data[8:begin]))[_TENSOR]
        first, last = entry["data_offsets"]
        if entry["dtype"] not in _DTYPES:
            return safetensors.torch.load(bytes(data))[_TENSOR]
        dtype = getattr(torch, _DTYPES[entry["dtype"]])
        return torch.frombuffer(data[begin + first : begin + last], dtype=dtype).reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, RuntimeError) as e:
        raise SealError(SealReason.MAGIC, f"a layer's file is not valid safetensors: {e}") from e


def file_name(layer: str) -> str:
    """Return the name of a layer's file in its attempt's folder."""
    # A layer's name comes from the model. Quoted, the name cannot lead out of the folder.
    return urllib.parse.quote(layer, safe="").replace("..", "%2E%2E") + ".safetensors"


def chunk_bytes_max(hashes: Sequence[bytes], layers: Mapping[str, torch.Tensor]) -> int:
    """Return an upper bound of the bytes in a chunk's files."""
    manifest = 512 + sum(2 * len(block) + 8 for block in hashes) + sum(6 * len(layer) + 128 for layer in layers)
    return manifest + sum(tensor.nbytes + 512 for tensor in layers.values())
