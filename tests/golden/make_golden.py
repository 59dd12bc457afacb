"""Writes the golden files. Run once per released format; an existing file is never overwritten.

python -m tests.golden.make_golden
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.keyring import KeyRing
from kvtiers.tiers.blocks.keys import make_offload_key
from kvtiers.tiers.blocks.protected_seal import GcmSeal
from kvtiers.tiers.blocks.seal import Seal

HERE = Path(__file__).parent
SEALED_KEY = make_offload_key(bytes(range(32)), 3)
SEALED_FINGERPRINT = bytes(range(100, 132))
SEALED_RANK = 5
SEALED_KEYS = KeyRing(bytes(range(200, 232)))  # no secret: it stands here


def sealed_payload() -> bytes:
    """8 KiB that are no repetition of a short pattern."""
    return b"".join((i * i * 2654435761 % 2**32).to_bytes(4, "little") for i in range(2048))


def main() -> None:
    """Write what is missing. (sealed-1-gmac.bin is of an earlier version, and stays.)"""
    seal = Seal(SEALED_FINGERPRINT, SEALED_RANK, writer_id=bytes(16), clock_ns=lambda: 1_700_000_000_000_000_000)
    payload = sealed_payload()
    _write("sealed-1.bin", payload + seal.trailer(SEALED_KEY, memoryview(payload)))
    keyed = GcmSeal(SEALED_FINGERPRINT, SEALED_RANK, keys=SEALED_KEYS)
    _write("sealed-1-gcm.bin", b"".join(keyed.seal_parts(SEALED_KEY, memoryview(payload))))
    base: dict[str, Any] = {
        "root_dir": "/mnt/kv",
        "model_name": "meta-llama/Llama-3.1-8B-Instruct",
        "hash_block_size": 16,
        "gpu_blocks_per_file": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "rank": 0,
        "dtype": "bfloat16",
    }
    groups = [{"block_size": 16, "layer_names": ["model.layers.0.self_attn", "model.layers.1.self_attn"]}]
    cases: list[dict[str, Any]] = []
    for change in (
        {},
        {"tp_size": 4, "rank": 3},
        {"parallel_agnostic": True, "tp_size": 4, "rank": 3},
        {"kv_cache_groups": groups, "gpu_blocks_per_file": 8},
        {"extra_fields": {"model_revision": "main", "format": "sealed-1"}, "inference_engine": "kvtiers"},
    ):
        args = base | change
        mapper = FileMapper(**args)
        key = make_offload_key(bytes(range(7, 39)), len(cases))
        cases.append(
            {
                "args": args,
                "hash": bytes(range(7, 39)).hex(),
                "group": len(cases),
                "file": f"{mapper.root_dir}/{mapper.relative_name(key)}",
                "config": mapper.get_config_file_path(),
            }
        )
    _write("file_mapper.json", (json.dumps(cases, indent=1, sort_keys=True) + "\n").encode())


def _write(name: str, data: bytes) -> None:
    path = HERE / name
    if not path.exists():
        path.write_bytes(data)


if __name__ == "__main__":
    main()
