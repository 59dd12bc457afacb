"""PrefixStore: KV of prompt prefixes as one safetensors file per layer, in a folder, a bucket or at an fsspec URL.

PrefixStore does not depend on any engine.

A prefix is a chain of chunks; a chunk is a run of engine blocks. Block hashes are chained: each covers the hash of the
block before it. So the hash of a chunk's first block identifies everything before the chunk, too::

    <model>_<digest12>_r<rank>/<first block's hash>/<blocks>-<last block's hash>.json     the manifest
    <model>_<digest12>_r<rank>/<first block's hash>/<attempt>/<layer>.safetensors         its layers

A writer publishes a chunk's layers first, in a folder with a unique name (the attempt), then the manifest, in one
piece. Readers start from the manifest. So a chunk is visible only when all its layers are, and two writers of one chunk
never mix their files.

The manifest seals the chunk. It holds the namespace's identity, every block's hash, size and checksum of every layer's
file, and a checksum of itself. If a check fails, the chunk counts as a miss and is read once more. If the check fails
again, the manifest and the layers are removed, so that the next store replaces the chunk.

Only the first bad chunk after a good one is removed. If more are bad in a row, this host's memory or network may be the
cause, and removing them could empty a storage that other hosts share. The next store overwrites such chunks, unless
``BAD_READS_MAX`` of them were bad in a row.
"""

from __future__ import annotations

import contextlib
import re
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import xxhash

from ...tiers.blocks.batches import BAD_READS_MAX
from ...tiers.config.tier_options import BoundedTierConfig
from ...tiers.errors import (
    BlobCorruptError,
    BlobNotFoundError,
    SealError,
    SealReason,
    StoreError,
    StoreFullError,
)
from ...tiers.plain_logs import get_logger
from .files import FILES_AT_ONCE, files_for
from .format import (
    CHUNK_BLOCKS_MAX,
    FORMAT,
    LAYER_HEADER_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    chunk_bytes_max,
    file_name,
    seal,
    tensor_bytes,
    tensor_in,
    unseal,
)
from .limits import PrefixLimits, use_noted_s

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

BAD_CHUNKS_MAX = 4096
CANDIDATES_MAX = 16  # chunks with the same first block that are read to find where they diverge from a prompt
AHEAD_FIRST, AHEAD_MAX = 4, 32  # after a chunk: how many next chunks of the same size are asked for at once
_MANIFEST = re.compile(MANIFEST_NAME)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored run of blocks, or the first blocks of a run.

    Attributes:
        path: path of the manifest.
        blocks: number of blocks to use, from the first one.
    """

    path: str
    blocks: int


@dataclass(slots=True)
class PrefixCounts:
    """Counters of a PrefixStore since its creation."""

    chunks_stored: int = 0
    chunks_refused: int = 0
    chunks_loaded: int = 0
    bytes_stored: int = 0
    bytes_loaded: int = 0
    verify_failures: int = 0
    errors: int = 0


class PrefixStore:
    """Prefixes of one namespace and rank. Any thread; concurrent calls are fine.

    Args:
        place: storage of the files; see module ``place``. With ``read_only``, bad chunks are not removed.
        namespace: folder of the namespace, without the rank (``FileMapper.base_path`` with an empty root).
        fingerprint: SHA-256 of the namespace's identity.
        rank: rank of the worker whose KV is stored.
        limits: the place's limits; None: no limits.

    Attributes:
        files: the place's files, manifests and layers alike.
        use_noted_s: seconds for which a use need not be noted again.

    Raises:
        ConfigError: the URL's scheme is unknown or its package is missing.
    """

    def __init__(
        self,
        place: BoundedTierConfig,
        namespace: str,
        fingerprint: bytes,
        *,
        rank: int = 0,
        limits: PrefixLimits | None = None,
    ) -> None:
        self.files = files_for(place)
        self._base = f"{namespace}_r{rank}"
        self._identity = f"{fingerprint.hex()}:{rank}"
        self._read_only = place.read_only
        self._limits = limits
        # Bad chunks that the next store overwrites: path of the manifest -> attempt, None if unknown. Any thread.
        self._bad: dict[str, str | None] = {}
        # Paths of bad chunks since the last good one: those of ``load``, and those of ``match``, which reads only
        # manifests. A good manifest says nothing about layers. Any thread.
        self._bad_in_a_row: set[str] = set()
        self._bad_manifests_in_a_row: set[str] = set()
        self.use_noted_s = use_noted_s(place.capacity_policy())
        self.counts = PrefixCounts()
        self.on_full: Callable[[], None] = lambda: None  # called by any thread when a chunk finds no room

    def prepare(self) -> None:
        """Create the clients of the first load, so that no request waits for them. Asks no storage, raises nothing."""
        self.files.prepare()

    def check(self) -> None:
        """Check that the storage can be used, if it supports such a check.

        Raises:
            StoreError: one line that says what is wrong and what to do about it.
        """
        self.files.check()

    def close(self) -> None:
        """Release connections. Calls under way may fail."""
        self.files.close()

    def match(self, hashes: Sequence[bytes]) -> list[Chunk]:
        """Return the chunks of the longest stored prefix of these blocks. A storage error ends the prefix there."""
        chunks: list[Chunk] = []
        position = 0
        while position < len(hashes):
            chunk = self._longest(hashes[position : position + CHUNK_BLOCKS_MAX])
            if chunk is None:
                break
            chunks += [chunk, *self._like(chunk, hashes[position:])]
            position = sum(chunk.blocks for chunk in chunks)
        return chunks

    def publish(self, hashes: Sequence[bytes], layers: Mapping[str, torch.Tensor]) -> bool:
        """Store a chunk, unless it is already stored.

        Args:
            hashes: hashes of its blocks, 1 to ``CHUNK_BLOCKS_MAX``.
            layers: layer name -> (tokens, …), contiguous, on the CPU, with the tokens of all blocks.

        Returns:
            Whether this call stored the chunk.

        Raises:
            StoreFullError: there is no room for the chunk.
            StoreError: the storage refused.
        """
        if not 1 <= len(hashes) <= CHUNK_BLOCKS_MAX:
            raise ValueError(f"a chunk of {len(hashes)} blocks; accepted are 1..{CHUNK_BLOCKS_MAX}")
        path = self._path(hashes)
        try:
            if not self._overwrites(path) and self.files.exists(path):
                return False
        except StoreError:
            self.counts.errors += 1
            raise
        try:
            return self._publish(path, hashes, layers)
        except StoreFullError:
            self.on_full()
            raise

    def _publish(self, path: str, hashes: Sequence[bytes], layers: Mapping[str, torch.Tensor]) -> bool:
        """Write a chunk, unless its place is full."""
        limits = self._limits
        if limits is None:
            return self._write(path, hashes, layers)
        try:
            full = limits.full()
        except StoreError:
            self.counts.errors += 1
            raise
        if full:
            self.counts.chunks_refused += 1
            raise StoreFullError(full, key=path)
        may_be_stored = True
        try:
            may_be_stored = self._write(path, hashes, layers)
            return may_be_stored
        except StoreError as e:
            may_be_stored = e.retryable  # perhaps only the acknowledgement was lost
            raise
        finally:
            if may_be_stored:
                limits.note_put(chunk_bytes_max(hashes, layers))

    def _write(self, path: str, hashes: Sequence[bytes], layers: Mapping[str, torch.Tensor]) -> bool:
        folder = path.rpartition("/")[0]
        attempt = uuid.uuid4().hex
        entries, total = {}, 0
        try:
            files = {}
            for layer, tensor in layers.items():
                data = tensor_bytes(tensor)
                files[f"{folder}/{attempt}/{file_name(layer)}"] = data
                entries[layer] = [len(data), xxhash.xxh3_128_hexdigest(data)]
                total += len(data)
                if len(files) == FILES_AT_ONCE:
                    self.files.write_all(files)
                    files = {}
            self.files.write_all(files)
            body = {
                "format": FORMAT,
                "identity": self._identity,
                "hashes": [block.hex() for block in hashes],
                "attempt": attempt,
                "layers": entries,
            }
            if not self._put_manifest(path, seal(body), attempt):
                self.files.delete_layers(f"{folder}/{attempt}")
                return False
        except BaseException:
            with contextlib.suppress(StoreError):
                self.files.delete_layers(f"{folder}/{attempt}")
            self.counts.errors += 1
            raise
        self.counts.chunks_stored += 1
        self.counts.bytes_stored += total
        return True

    def _put_manifest(self, path: str, data: bytes, attempt: str) -> bool:
        """Returns False if another writer was faster. Replacing its manifest would leave its layers unreferenced."""
        if not self._overwrites(path):
            if self.files.create(path, data):
                return True
            try:
                return bool(self._manifest(path)["attempt"] == attempt)  # a request of ours may have been repeated
            except BlobNotFoundError:
                pass
            except SealError as e:  # a bad manifest is replaced, unless the reading is in doubt
                if e.foreign or self._reads_are_in_doubt():
                    return False
        self.files.write(path, data)
        if (replaced := self._bad.pop(path, None)) is not None:
            with contextlib.suppress(StoreError):
                self.files.delete_layers(f"{path.rsplit('/', 1)[0]}/{replaced}")
        return True

    def manifests(self, chunks: Sequence[Chunk]) -> list[Callable[[], bytes]]:
        """Begin to read the manifests of several chunks, for ``load``. Remote storage reads them in parallel."""
        return self.files.reading([chunk.path for chunk in chunks], MANIFEST_BYTES_MAX)

    def load(
        self,
        chunk: Chunk,
        hashes: Sequence[bytes],
        manifest: Callable[[], bytes] | None = None,
        *,
        block_bytes_max: int | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (layer name, tensor (tokens of the whole chunk, …)) for every layer. Each is verified before its yield.

        A tensor's memory is valid only until the caller asks for the next tensor.

        Args:
            hashes: hashes of the blocks that the caller expects, ``chunk.blocks`` of them.
            manifest: from ``manifests``; by default the manifest is read now.
            block_bytes_max: bytes of a block in the largest layer, if known: memory is not allocated for larger layers.

        Raises:
            SealError: a check failed; the next store replaces the chunk, unless this host's reads are in doubt.
            StoreError: the storage failed, or the chunk is gone (BlobNotFoundError).
        """
        body = None
        try:
            body = self._manifest(chunk.path, manifest)
            for layer, data, tensor in self._read_layers(chunk, hashes, body, block_bytes_max):
                self.counts.bytes_loaded += len(data)
                yield layer, tensor
        except (SealError, BlobNotFoundError, BlobCorruptError) as e:
            if isinstance(e, BlobNotFoundError) and (body is None or self._is_gone(chunk.path)):
                raise  # the chunk was removed since ``match``: a collector removes the manifest first
            self.counts.verify_failures += 1
            logger.warning("prefix chunk failed verification and counts as absent: %s", e)
            if isinstance(e, SealError) and e.foreign:
                raise
            attempt = None if body is None else body["attempt"]
            again = partial(self._read_again, chunk, hashes, block_bytes_max)
            self._note_bad(chunk.path, attempt, self._bad_in_a_row, again)
            if isinstance(e, SealError):
                raise
            what = "gone" if isinstance(e, BlobNotFoundError) else "not what was stored"
            raise SealError(SealReason.SIZE, f"a layer of {chunk.path} is {what}") from e
        except StoreError:
            self.counts.errors += 1
            raise
        self.counts.chunks_loaded += 1
        self._note_good(chunk.path)

    def discard(self, chunk: Chunk, manifest: Callable[[], bytes]) -> None:
        """Remove an intact chunk that its reader cannot use. Until it is removed, no other chunk can replace it.

        Args:
            manifest: the manifest that was used to load it. If another chunk has replaced it since, that chunk stays.
        """
        self._discard(chunk.path, self._manifest(chunk.path, manifest)["attempt"])

    @property
    def notes_uses(self) -> bool:
        """Whether ``note_uses`` does anything."""
        return self.files.has_uses and not self._read_only

    def note_uses(self, chunks: Sequence[Chunk]) -> bool:
        """Touch the files of chunks that were not touched for ``use_noted_s``, so that only unused chunks look old.

        Returns:
            Whether all uses are noted.
        """
        all_noted = True
        # The first chunk is touched last, so that it is removed last: without it the others are useless.
        for chunk in reversed(chunks) if self.notes_uses else ():
            try:
                if self.files.unused_s(chunk.path) < self.use_noted_s:
                    continue
                body = self._manifest(chunk.path)
                folder = f"{chunk.path.rsplit('/', 1)[0]}/{body['attempt']}"
                for path in (*(f"{folder}/{file_name(layer)}" for layer in body["layers"]), chunk.path):
                    self.files.touch(path)
            except (SealError, StoreError) as e:  # the next load of this chunk will report it
                logger.debug("a use of %s is not noted: %s", chunk.path, e)
                all_noted = False
        return all_noted

    # -- privates ----------------------------------------------------------------------------------------------------

    def _longest(self, hashes: Sequence[bytes]) -> Chunk | None:
        folder = f"{self._base}/{hashes[0].hex()}"
        wanted = [block.hex() for block in hashes]
        others = []
        best: Chunk | None = None
        for name in self._list(folder):
            found = _MANIFEST.fullmatch(name)
            if found is None:
                continue
            blocks = int(found[1])
            if 1 <= blocks <= len(wanted) and wanted[blocks - 1] == found[2]:
                if best is None or blocks > best.blocks:
                    best = Chunk(f"{folder}/{name}", blocks)
            else:
                others.append(name)
        if best is not None and best.blocks == len(wanted):
            return best
        # Chunks that diverge from the prompt partway may still share more of it than the best whole chunk does.
        candidates = [f"{folder}/{name}" for name in others[:CANDIDATES_MAX]]
        for path, read in zip(candidates, self.files.reading(candidates, MANIFEST_BYTES_MAX), strict=True):
            try:
                stored = self._manifest(path, read)["hashes"]
            except SealError as e:  # may be the chunk of this very prompt, of which a caller may omit the last block
                self.counts.verify_failures += 1
                logger.warning("prefix chunk failed verification and counts as absent: %s", e)
                if not e.foreign:
                    self._note_bad(path, None, self._bad_manifests_in_a_row, partial(self._manifest, path))
                continue
            except StoreError as e:
                self.counts.errors += not isinstance(e, BlobNotFoundError)  # not found: removed since the listing
                logger.debug("manifest %s: %s", path, e)
                continue
            self._bad_manifests_in_a_row.clear()
            alike = 0
            for one, other in zip(stored, wanted, strict=False):
                if one != other:
                    break
                alike += 1
            if alike > (best.blocks if best else 0):
                best = Chunk(path, alike)
        return best

    def _like(self, chunk: Chunk, hashes: Sequence[bytes]) -> list[Chunk]:
        """Return the chunks after ``chunk`` as long as they have its size, as an engine's steps often do.

        ``hashes`` begin with the chunk's blocks. A chunk missed here costs a listing; listings cannot run in parallel.
        """
        size = chunk.blocks
        found: list[Chunk] = []
        ahead = AHEAD_FIRST if chunk.path == self._path(hashes[:size]) else 0
        while ahead:
            first = (1 + len(found)) * size
            starts = range(first, len(hashes) - size + 1, size)[:ahead]
            paths = [self._path(hashes[start : start + size]) for start in starts]
            (count,) = self._present([paths])
            found += [Chunk(path, size) for path in paths[:count]]
            ahead = min(2 * ahead, AHEAD_MAX) if paths and count == len(paths) else 0
        return found

    def _present(self, runs: Sequence[Sequence[str]]) -> list[int]:
        try:
            return self.files.present(runs)
        except StoreError as e:
            self.counts.errors += 1
            logger.debug("asking for manifests: %s", e)
            return [0] * len(runs)

    def _path(self, hashes: Sequence[bytes]) -> str:
        """Return the path of the manifest of a chunk of these blocks."""
        return f"{self._base}/{hashes[0].hex()}/{len(hashes)}-{hashes[-1].hex()}.json"

    def _overwrites(self, path: str) -> bool:
        """Whether a store replaces a chunk because it is bad. Not while this host's reads may be damaged."""
        if path not in self._bad or self._reads_are_in_doubt():
            return False
        try:
            return self._is_bad(path, self._bad.get(path))
        except BlobNotFoundError:
            return True

    def _reads_are_in_doubt(self) -> bool:
        return max(len(self._bad_in_a_row), len(self._bad_manifests_in_a_row)) >= BAD_READS_MAX

    def _note_bad(self, path: str, attempt: str | None, row: set[str], again: Callable[[], object]) -> None:
        """Remove a bad chunk, or have the next store overwrite it; see the module's docstring.

        Args:
            again: repeats the read that failed.
        """
        if not row - {path} and not self._read_only and _is_still_bad(again):
            self._discard(path, attempt)
        elif len(self._bad) < BAD_CHUNKS_MAX:
            self._bad[path] = attempt
        if len(row) < BAD_READS_MAX and path not in row:
            row.add(path)
            if len(row) == BAD_READS_MAX:
                logger.error(
                    "%d prefix chunks in a row were bad, which suggests that reads on host %s are damaged; further bad "
                    "chunks are left alone. Check this host's memory and network (dmesg, ECC and NIC errors, proxies), "
                    "and whether other hosts load the same prefixes",
                    BAD_READS_MAX,
                    socket.gethostname(),
                )

    def _note_good(self, path: str) -> None:
        self._bad.pop(path, None)
        self._bad_in_a_row.clear()
        self._bad_manifests_in_a_row.clear()

    def _read_again(self, chunk: Chunk, hashes: Sequence[bytes], block_bytes_max: int | None) -> None:
        for _ in self._read_layers(chunk, hashes, self._manifest(chunk.path), block_bytes_max):
            pass

    def _read_layers(
        self, chunk: Chunk, hashes: Sequence[bytes], body: Mapping[str, Any], block_bytes_max: int | None
    ) -> Iterator[tuple[str, memoryview, torch.Tensor]]:
        """Read the files of a chunk's layers; each is verified before its yield."""
        path = chunk.path
        if body["hashes"][: chunk.blocks] != [block.hex() for block in hashes]:
            raise SealError(SealReason.KEY, f"{path} holds other blocks")
        if block_bytes_max is not None:
            size_max = len(body["hashes"]) * block_bytes_max + LAYER_HEADER_BYTES_MAX
            if any(size > size_max for size, _ in body["layers"].values()):
                raise SealError(SealReason.SIZE, f"{path} names a layer of more than {size_max} bytes")
        folder = path.rsplit("/", 1)[0]
        files = {
            layer: (f"{folder}/{body['attempt']}/{file_name(layer)}", size)
            for layer, (size, _) in body["layers"].items()
        }
        for layer, data in self.files.read_all(files):
            size, checksum = body["layers"][layer]
            if len(data) != size:
                raise SealError(SealReason.SIZE, f"{layer} of {path} has {len(data)} bytes, not {size}")
            if xxhash.xxh3_128_hexdigest(data) != checksum:
                raise SealError(SealReason.PAYLOAD_CHECKSUM, f"{layer} of {path}")
            yield layer, data, tensor_in(data)

    def _discard(self, path: str, attempt: str | None) -> None:
        """Remove a bad chunk: first its manifest, so that nobody uses it any more, then its layers' files."""
        if self._read_only:
            return
        try:
            if self._is_bad(path, attempt):
                self.files.delete(path)
        except StoreError as e:
            logger.warning("prefix chunk %s could not be removed; the next store overwrites it: %s", path, str(e))
            if len(self._bad) < BAD_CHUNKS_MAX:
                self._bad[path] = attempt
        if attempt is not None:
            with contextlib.suppress(StoreError):
                self.files.delete_layers(f"{path.rsplit('/', 1)[0]}/{attempt}")

    def _is_gone(self, path: str) -> bool:
        try:
            return not self.files.exists(path)
        except StoreError:
            return False

    def _is_bad(self, path: str, attempt: str | None) -> bool:
        """Read the manifest again. False: another writer has replaced the chunk meanwhile."""
        try:
            manifest = self._manifest(path)
        except SealError as e:
            return not e.foreign
        return attempt is not None and bool(manifest["attempt"] == attempt)

    def _list(self, folder: str) -> list[str]:
        try:
            return self.files.names(folder)
        except StoreError as e:
            self.counts.errors += 1
            logger.debug("listing %s: %s", folder, e)
            return []

    def _manifest(self, path: str, read: Callable[[], bytes] | None = None) -> dict[str, Any]:
        try:
            data = self.files.read(path, MANIFEST_BYTES_MAX) if read is None else read()
        except BlobCorruptError as e:
            raise SealError(SealReason.MAGIC, f"{path} is not a manifest: {e}") from e
        body = unseal(data, path)
        if body["identity"] != self._identity:
            raise SealError(SealReason.FINGERPRINT, f"{path} belongs to another namespace or rank")
        return body


def _is_still_bad(again: Callable[[], object]) -> bool:
    """Whether a read of a chunk that failed fails once more, not because of the storage."""
    try:
        again()
    except SealError as e:
        return not e.foreign
    except (BlobCorruptError, BlobNotFoundError):  # of a layer; or the chunk was removed, and its layers may be left
        return True
    except StoreError:
        return False
    return False


def blocks_in_all(stores: Sequence[PrefixStore], hashes: Sequence[bytes]) -> int:
    """Return how many leading blocks all stores have. There is one store for each rank, all in the same place.

    Ranks store the same chunks, in the same steps. So the other ranks are asked for the first rank's chunks, all at
    once. Only a rank that lacks some of these chunks is searched by itself.
    """
    first, *others = stores
    chunks = first.match(hashes)
    found = sum(chunk.blocks for chunk in chunks)
    runs = [[f"{other._base}{chunk.path.removeprefix(first._base)}" for chunk in chunks] for other in others]
    for other, count in zip(others, first._present(runs), strict=True):
        if count < len(chunks):
            found = min(found, sum(chunk.blocks for chunk in other.match(hashes[:found])))
    return found
