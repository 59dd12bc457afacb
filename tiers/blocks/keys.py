"""OffloadKey: the name of one offloaded block, and the chained hashes that it is built from. Does no I/O.

An OffloadKey is plain ``bytes``: the block hash, then the KV cache group index as 4 bytes, big-endian, unsigned.
vLLM uses the same format (``vllm/v1/kv_offload/base.py``), so keys need no conversion.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NewType

OffloadKey = NewType("OffloadKey", bytes)

GROUP_INDEX_BYTES = 4
GROUP_INDEX_MAX = 2**32 - 1

_GROUP = struct.Struct(">I")


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Join a block hash and a KV cache group index into a key.

    Raises:
        ValueError: ``block_hash`` is empty, or ``group_idx`` is not in 0..2**32-1.
    """
    if not block_hash:
        raise ValueError("block_hash is empty; a block hash has at least 1 byte")
    if not 0 <= group_idx <= GROUP_INDEX_MAX:
        raise ValueError(f"group_idx is {group_idx}; accepted is 0..{GROUP_INDEX_MAX}")
    return OffloadKey(block_hash + _GROUP.pack(group_idx))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """The block hash of a key."""
    return key[:-GROUP_INDEX_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """The KV cache group index of a key."""
    index: int = _GROUP.unpack(key[-GROUP_INDEX_BYTES:])[0]
    return index


def hash_blocks(
    token_ids: Sequence[int], block_size: int, parent: bytes = b"", salt: bytes | None = None
) -> Iterator[bytes]:
    """Yield one chained SHA-256 per full block of ``block_size`` tokens; a partial last block yields nothing.

    Each hash covers its parent's hash, so equal hashes mean equal prefixes. A block's hash depends only on the tokens
    up to its end, ``parent`` and ``salt``. It has no seed, so replicas compute the same hashes (vLLM's builtin hash
    depends on PYTHONHASHSEED, vllm#51875).

    Args:
        token_ids: token ids, each in 0..2**32-1.
        block_size: tokens per block, at least 1.
        parent: hash of the block before the first one; empty at the start of a prompt.
        salt: separates tenants or adapters: different salts give different hashes.

    Raises:
        ValueError: ``block_size`` is below 1 or a token id is out of range.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; accepted is 1 or more tokens")
    import numpy as np  # imported here because worker processes receive finished keys and do not need numpy

    wide = np.asarray(token_ids, dtype=np.int64)
    if wide.size and (wide.min() < 0 or wide.max() > 0xFFFF_FFFF):
        raise ValueError("token_ids has an id outside 0..2**32-1")
    tokens = wide.astype("<u4")
    # With length prefixes, two different (parent, salt) pairs never give the same bytes.
    salted = b"" if salt is None else struct.pack("<I", len(salt) + 1) + salt
    for start in range(0, len(tokens) - block_size + 1, block_size):
        digest = hashlib.sha256(struct.pack("<I", len(parent)))
        digest.update(parent)
        digest.update(salted)
        digest.update(tokens[start : start + block_size].tobytes())
        parent = digest.digest()
        yield parent
