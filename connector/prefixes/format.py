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

from ...tiers.blocks.namespace import parse_json
from ...tiers.errors import SealError, SealReason
from ...tiers.store import KEY_PART_LENGTH_MAX

if TYPE_CHECKING:
    import torch

FORMAT = "prefix-1"
_LATER_FORMAT = re.compile(r"prefix-[0-9]{1,6}")  # its chunks are left alone; any other text is damage
MANIFEST_BYTES_MAX = 4 << 20
#: Pattern of a manifest's name: number of blocks, and hash of the last block.
MANIFEST_NAME = r"([0-9]{1,6})-([0-9a-f]{8,128})\.json"
#: Ending of a file that is not completely written yet.
PART_ENDING = r"\.[0-9a-f]{32}\.part"
#: Pattern of a layer's file: complete, or left incomplete by a writer that died.
LAYER_FILE = re.compile(rf"[\w.~%-]+\.safetensors({PART_ENDING})?", re.ASCII)
CHUNK_BLOCKS_MAX = 128
#: Largest sum of a chunk's layers. A manifest may be forged, so its sizes must not decide how much memory is allocated.
CHUNK_BYTES_MAX = 4 << 30
#: A layer's file is at most this much larger than its tensor.
LAYER_HEADER_BYTES_MAX = 512
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

    Anybody who may write to the storage can write a manifest with a valid checksum, so each field is checked.

    Raises:
        SealError: the bytes are not a valid manifest.
    """
    text, _, rest = data.partition(b"\n")
    if rest != f"{xxhash.xxh3_128_hexdigest(text)}\n".encode():
        raise SealError(SealReason.TRAILER_CHECKSUM, f"{path} does not match its checksum")
    try:
        body = parse_json(text)
    except ValueError as e:
        raise SealError(SealReason.MAGIC, f"{path} is not a valid manifest") from e
    its_format = body.get("format") if isinstance(body, dict) else None
    if isinstance(its_format, str) and its_format != FORMAT and _LATER_FORMAT.fullmatch(its_format):
        raise SealError(SealReason.VERSION, f"{path} has format {its_format!r}")
    if its_format != FORMAT or not _is_sound(body):
        raise SealError(SealReason.MAGIC, f"{path} is not a valid manifest")
    checked: dict[str, Any] = body
    return checked


def _is_sound(body: dict[str, Any]) -> bool:
    match body:
        case {"identity": str(), "hashes": list(hashes), "attempt": str(attempt), "layers": dict(layers)}:
            return (
                re.fullmatch(r"[0-9a-f]{32}", attempt) is not None
                and len(hashes) <= CHUNK_BLOCKS_MAX
                and all(isinstance(block, str) for block in hashes)
                and all(_is_layer(name, entry) for name, entry in layers.items())
                and sum(size for size, _ in layers.values()) <= CHUNK_BYTES_MAX
            )
    return False


def _is_layer(name: str, entry: object) -> bool:
    """Whether an entry of a manifest's ``layers`` is a name that a file can have, with a size and a checksum."""
    try:
        fits = len(name) > 0 and len(file_name(name)) <= KEY_PART_LENGTH_MAX
    except UnicodeEncodeError:  # JSON can name characters that no file name can contain
        return False
    match entry:
        case [int(size), str()] if not isinstance(size, bool):
            return fits and size >= 0
    return False


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
        if not entry["shape"]:
            raise ValueError("it has no dimension of tokens")
        if entry["dtype"] not in _DTYPES:
            return safetensors.torch.load(bytes(data))[_TENSOR]
        first, last = entry["data_offsets"]
        if not 0 <= first <= last <= len(data) - begin:
            raise ValueError("its offsets lie outside of the file")
        dtype = getattr(torch, _DTYPES[entry["dtype"]])
        return torch.frombuffer(data[begin + first : begin + last], dtype=dtype).reshape(entry["shape"])
    except (ValueError, LookupError, TypeError, RuntimeError, ArithmeticError, safetensors.SafetensorError) as e:
        raise SealError(SealReason.MAGIC, f"a layer's file is not valid safetensors ({type(e).__name__})") from e


def file_name(layer: str) -> str:
    """Return the name of a layer's file in its attempt's folder."""
    # A layer's name comes from the model. Quoted, the name cannot lead out of the folder.
    return urllib.parse.quote(layer, safe="").replace("..", "%2E%2E") + ".safetensors"


def chunk_bytes_max(hashes: Sequence[bytes], layers: Mapping[str, torch.Tensor]) -> int:
    """Return an upper bound of the bytes in a chunk's files."""
    manifest = 512 + sum(2 * len(block) + 8 for block in hashes) + sum(6 * len(layer) + 128 for layer in layers)
    return manifest + sum(tensor.nbytes + LAYER_HEADER_BYTES_MAX for tensor in layers.values())
