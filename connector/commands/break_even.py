"""Compares loading KV from a tier with computing it, for ``kvtiers check --write --model MODEL``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

from ...tiers.config.tier_options import BoundedTierConfig, TierConfig
from ...tiers.daemon_pool import DaemonPool
from ...tiers.store import Store
from .findings import Finding
from .model_size import Sizing
from .tier_checks import trial_key

BLOB_BYTES_MAX = 16 << 20
BYTES_MAX = 64 << 20
PUT_S_MAX = 0.5  # if putting a blob takes longer, no further blob is put, because a check must not take minutes
CHUNK_TOKENS = 256  # block size for models whose stored blocks are unknown


def compare_speeds(
    tier: TierConfig,
    store: Store,
    sizing: Sizing,
    speeds: Sequence[float],
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Finding]:
    """Put a few blobs of a block's size, read them at once as an engine would, and delete them.

    Args:
        speeds: the model's prefill speeds, in tokens per second. Without speeds, only the break-even is reported.
    """
    if not sizing.token_bytes or (isinstance(tier, BoundedTierConfig) and tier.read_only):
        return
    rate = _read_rate(store, min(BLOB_BYTES_MAX, _block_bytes(sizing)), tier.n_read_threads, clock)
    load_s = 1000 * sizing.token_bytes / rate
    text = (
        f"blobs that were just written are read at {rate / 1e6:,.0f} MB/s, which loads 1,000 tokens in {load_s:.3g} s"
    )
    even = f"break-even is a prefill of {rate / sizing.token_bytes:,.0f} tokens/s"
    if not speeds:
        yield Finding("note", "break-even", f"{text}; {even}", "give your prefill speed: --prefill TOKENS_PER_S")
        return
    computed = ", ".join(f"{1000 / speed:.3g} s at {speed:,.6g} tokens/s" for speed in speeds)
    text += f"; computing them takes {computed}; {even}"
    if sizing.token_bytes * min(speeds) > rate:
        fix = "use faster storage, more n_read_threads or larger blocks; or leave this tier out"
        yield Finding("warning", "break-even", f"{text}: loading is slower than computing", fix)
    elif sizing.token_bytes * max(speeds) > rate:
        yield Finding("note", "break-even", f"{text}: loading is slower than computing at some of these speeds")
    else:
        yield Finding("ok", "break-even", text)


def _block_bytes(sizing: Sizing) -> int:
    return sizing.block_bytes or CHUNK_TOKENS * sizing.token_bytes


def _read_rate(store: Store, blob_bytes: int, threads: int, clock: Callable[[], float]) -> float:
    """Bytes per second of reading blobs of this size, as many at once as there are threads.

    A local disk answers from its page cache, so its rate is an upper limit.
    """
    blob = memoryview(os.urandom(blob_bytes))  # incompressible
    keys: list[str] = []
    try:
        for _ in range(max(1, min(threads, BYTES_MAX // blob_bytes))):
            keys.append(trial_key())
            began = clock()
            store.put(keys[-1], [blob])
            if clock() - began > PUT_S_MAX:
                break
        rows = [memoryview(bytearray(blob_bytes)) for _ in keys]
        pool = DaemonPool(len(keys), "kvtiers-check-read")  # the store's threads may hang for ever
        try:
            began = clock()
            for read in [pool.submit(store.get_into, key, [row]) for key, row in zip(keys, rows, strict=True)]:
                read.result()
            took_s = clock() - began
        finally:
            pool.shutdown(0)
        return len(keys) * blob_bytes / max(took_s, 1e-9)
    finally:
        store.delete_many(keys)
