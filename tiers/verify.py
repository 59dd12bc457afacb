"""Verify: check the seals of everything stored, unit by unit, in worker processes.

A unit is what a namespace's rank has under two hexadecimal digits: a 256th of it. Units are independent, so they can be
checked in parallel, and one that is done need not be done again after an interruption.

Who a block should be is told by its name (hash, group, rank) and by its namespace's ``config.json`` (fingerprint).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice

from tiers.errors import BlobCorruptError, BlobNotFoundError, SealError, SealReason, StoreError
from tiers.file_mapper import CONFIG_FILE_NAME, DIGEST_HEX_DIGITS
from tiers.inventory import BlockName, Share, list_blocks
from tiers.keys import make_offload_key
from tiers.seal import TRAILER_BYTES, Seal
from tiers.store import KeyInfo, Store, SupportsQuarantine

UNIT_DIGITS = 2
NO_IDENTITY = "no_identity"  # its namespace's config.json is missing or another one's
BAD_KEYS_MAX = 10_000  # named in a result; all are counted
NETWORK_THREADS = 8  # of a worker, where a read mostly waits
BATCH_BLOCKS = 64  # handed to the threads at once, so that a listing is not held in memory
CONFIG_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class UnitResult:
    """What was found in a unit.

    Attributes:
        bad: name and reason of each block that is not what it should be.
        foreign: blocks that only a newer version can judge; they are left alone.
        errors: blocks that could not be read, or not be moved aside.
    """

    unit: str
    blocks: int = 0
    bytes: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    bad_count: int = 0
    foreign: int = 0
    errors: int = 0
    quarantined: int = 0


def find_units(store: Store, on_progress: Callable[[int], None] = lambda _: None) -> dict[str, Share]:
    """The units that have blocks, as prefixes of names, and how much each has."""
    units: dict[str, Share] = {}
    for count, (info, name) in enumerate(list_blocks(store)):
        prefix = f"{name.namespace}_r{name.rank}/{name.digits[:UNIT_DIGITS]}"
        units.setdefault(prefix, Share()).add(info.size)
        if count % 1000 == 0:
            on_progress(count)
    return units


def read_fingerprint(store: Store, namespace: str) -> bytes | None:
    """SHA-256 of the fields in a namespace's ``config.json``; None where there are none, or those of another one.

    Raises:
        StoreError: they cannot be read.
    """
    key = f"{namespace}/{CONFIG_FILE_NAME}"
    size = store.size(key)
    if size is None or not 0 < size <= CONFIG_BYTES_MAX:
        return None
    data = bytearray(size)
    try:
        store.get_into(key, [memoryview(data)])
        fields = json.loads(data)
    except (BlobNotFoundError, BlobCorruptError, ValueError):
        return None
    fingerprint = hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    return fingerprint.digest() if namespace.endswith(fingerprint.hexdigest()[:DIGEST_HEX_DIGITS]) else None


class Verifier:
    """Checks units. For one thread; it has its own where reads mostly wait.

    Args:
        repair: move bad blocks aside (delete them where the store has no quarantine), so that the next store heals
            them.
    """

    def __init__(self, store: Store, *, repair: bool = False) -> None:
        self._store = store
        self._repair = repair
        self._fingerprints: dict[str, bytes | None] = {}
        self._threads = NETWORK_THREADS if store.capabilities.latency_bound else 1
        self._buffers = [bytearray() for _ in range(self._threads)]

    def check(self, unit: str) -> UnitResult:
        """Check the blocks of a unit.

        Raises:
            StoreError: they cannot be listed.
        """
        result = UnitResult(unit)
        with ThreadPoolExecutor(self._threads) as pool:
            blocks = self._list(unit)
            while batch := list(islice(blocks, BATCH_BLOCKS)):
                for _, name in batch:
                    if name.namespace not in self._fingerprints:
                        self._fingerprints[name.namespace] = read_fingerprint(self._store, name.namespace)
                if self._threads == 1:
                    self._check_some(batch, 0, result)
                    continue
                shares = [UnitResult(unit) for _ in range(self._threads)]
                parts = [batch[seat :: self._threads] for seat in range(self._threads)]
                list(pool.map(self._check_some, parts, range(self._threads), shares))
                for share in shares:
                    _add(result, share)
        return result

    def _list(self, unit: str) -> Iterator[tuple[KeyInfo, BlockName]]:
        """By folders where a listing costs no request: their parent then need not be searched for each unit."""
        prefixes = [unit] if self._store.capabilities.latency_bound else [f"{unit}{digit:x}/" for digit in range(16)]
        return chain.from_iterable(list_blocks(self._store, prefix) for prefix in prefixes)

    def _check_some(self, batch: list[tuple[KeyInfo, BlockName]], seat: int, result: UnitResult) -> None:
        for info, name in batch:
            try:
                self._check_block(info, name, seat, result)
            except BlobNotFoundError:
                pass  # removed since it was listed
            except StoreError:
                result.errors += 1

    def _check_block(self, info: KeyInfo, name: BlockName, seat: int, result: UnitResult) -> None:
        result.blocks += 1
        result.bytes += info.size
        fingerprint = self._fingerprints[name.namespace]
        if fingerprint is None:
            _note_bad(result, info.key, NO_IDENTITY)
            return
        reason, foreign = self._judge(info, name, fingerprint, seat)
        if reason is None:
            return
        if foreign:
            result.foreign += 1
            return
        _note_bad(result, info.key, reason)
        if self._repair:
            if isinstance(self._store, SupportsQuarantine):
                self._store.quarantine(info.key)
            else:
                self._store.delete(info.key)
            result.quarantined += 1

    def _judge(self, info: KeyInfo, name: BlockName, fingerprint: bytes, seat: int) -> tuple[str | None, bool]:
        """Why a block is bad, None where it is good; and whether only a newer reader can judge."""
        if info.size <= TRAILER_BYTES or len(name.digits) % 2:
            return SealReason.SIZE, False
        seal = Seal(fingerprint, name.rank)
        key = make_offload_key(bytes.fromhex(name.digits), name.group)
        if len(self._buffers[seat]) < info.size:
            self._buffers[seat] = bytearray(info.size)
        view = memoryview(self._buffers[seat])[: info.size]
        payload, trailer = view[:-TRAILER_BYTES], view[-TRAILER_BYTES:]
        failure: SealError | BlobCorruptError | None = None
        for _ in range(2):  # twice: a block replaced under the reader happens once
            try:
                self._store.get_into(info.key, [payload, trailer])
                seal.verify(key, payload, trailer)
                return None, False
            except (SealError, BlobCorruptError) as e:
                failure = e
        if isinstance(failure, SealError):
            return failure.reason, failure.foreign
        return SealReason.SIZE, False


def _note_bad(result: UnitResult, key: str, reason: str) -> None:
    result.bad_count += 1
    if len(result.bad) < BAD_KEYS_MAX:
        result.bad.append((key, str(reason)))


def _add(total: UnitResult, part: UnitResult) -> None:
    for name in ("blocks", "bytes", "bad_count", "foreign", "errors", "quarantined"):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    total.bad += part.bad[: BAD_KEYS_MAX - len(total.bad)]


def decode_result(content: Mapping[str, object]) -> UnitResult:
    """A result that came as JSON."""
    result = UnitResult(**content)  # type: ignore[arg-type]
    result.bad = [(key, reason) for key, reason in result.bad]
    return result


def total_of(results: Iterator[UnitResult]) -> UnitResult:
    """Their sums, under no unit's name."""
    total = UnitResult("")
    for result in results:
        _add(total, result)
    return total
