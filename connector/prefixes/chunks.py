"""ChunkStore: presents the chunks of a PrefixStore's root as blobs of a Store, so that the collector can remove them.

- A chunk is one blob with its manifest's name. Its size covers all files of the chunk; its time is the manifest's,
  because the manifest is written last and touched last.
- Layers that no manifest names (their writer died, or the manifest was removed) are one blob with the name of their
  attempt's folder.
- A manifest that its writer never renamed to its final name is a blob of its own.
- Other keys are passed through unchanged: the records below ``_kvtiers/``, and foreign files, which are listed and
  never removed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from ...tiers.blocks.file_mapper import NAMESPACE
from ...tiers.errors import (
    BlobCorruptError,
    SealError,
    StoreClosedError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
)
from ...tiers.recipe import StoreRecipe, find_object
from ...tiers.store import KeyInfo, Store, read_blob
from ...tiers.store_layer import Layer
from .format import LAYER_FILE, MANIFEST_BYTES_MAX, MANIFEST_NAME, PART_ENDING, unseal

READERS_S = 2.0  # time for readers of a removed manifest to finish reading its layers

_FOLDER = rf"{NAMESPACE}_r[0-9]+/[0-9a-f]{{8,128}}/"
_CHUNK_FILE = re.compile(rf"({_FOLDER})(.+)")
_MANIFEST = re.compile(_FOLDER + MANIFEST_NAME)
_ATTEMPT = re.compile(_FOLDER + r"[0-9a-f]{32}")
_HALF_MANIFEST = re.compile(_MANIFEST.pattern + PART_ENDING)


class ChunkStore(Layer):
    """The chunks of one root. Only the collector's thread may call it.

    Args:
        inner: store of the root: LocalStore, NfsStore, S3Store or FsspecStore. Each lists a folder's files together.
        sleep: waits for a number of seconds.
    """

    def __init__(self, inner: Store, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner)
        self._sleep = sleep

    def is_block(self, key: str) -> bool:
        """See ``NamesBlocks``."""
        return any(pattern.fullmatch(key) for pattern in (_MANIFEST, _ATTEMPT, _HALF_MANIFEST))

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        for folder, infos in groupby(self.inner.keys(prefix), lambda info: _folder_of(info.key)):
            blobs_of = self._chunks if folder else iter
            yield from blobs_of(infos)

    def delete(self, key: str) -> None:
        (error,) = self.delete_many([key])
        if error is not None:
            raise error

    def _chunks(self, infos: Iterable[KeyInfo]) -> Iterator[KeyInfo]:
        """Yield the blobs that one folder's files form."""
        attempts: dict[str, list[KeyInfo]] = {}
        manifests = []
        for info in infos:
            attempt, _, name = info.key.rpartition("/")
            if (attempt in attempts or _ATTEMPT.fullmatch(attempt)) and LAYER_FILE.fullmatch(name):
                attempts.setdefault(attempt, []).append(info)
            elif _MANIFEST.fullmatch(info.key):
                manifests.append(info)
            else:
                yield info
        # A folder usually has one manifest and one attempt. Listing may assume that they match; only removal checks.
        read = (self._attempt_if_readable(info.key) for info in manifests) if len(attempts) > 1 else iter([*attempts])
        for manifest in manifests:
            layers = attempts.pop(next(read, None) or "", [])
            yield KeyInfo(manifest.key, manifest.size + _bytes_of(layers), manifest.mtime)
        for attempt, layers in attempts.items():
            yield KeyInfo(attempt, _bytes_of(layers), max(info.mtime for info in layers))

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        """Delete manifests first, so that nobody uses them any more; then, after readers have finished, the layers."""
        outcomes: dict[str, Exception | None] = {}
        attempts: dict[str, str] = {}  # key -> folder of its layers
        for key in dict.fromkeys(keys):
            outcomes[key] = _error_of(partial(self._hide, key, attempts))
        if any(key != attempt for key, attempt in attempts.items()):
            self._sleep(READERS_S)
        for key, attempt in attempts.items():
            outcomes[key] = _error_of(partial(self._delete_folder, attempt))
        return [outcomes[key] for key in keys]

    def _hide(self, key: str, attempts: dict[str, str]) -> None:
        """Delete the key, unless it is a folder of layers. Note in ``attempts`` the folder to delete later, if any."""
        if _ATTEMPT.fullmatch(key):
            attempt = None if self._is_named(key) else key
        else:
            attempt = self._attempt_if_readable(key) if _MANIFEST.fullmatch(key) else None
            self.inner.delete(key)
        if attempt is not None:
            attempts[key] = attempt

    def _delete_folder(self, folder: str) -> None:
        found = (info.key for info in self.inner.keys(f"{folder}/"))
        keys = [key for key in found if LAYER_FILE.fullmatch(key.removeprefix(f"{folder}/"))]
        inner: Any = self.inner
        for error in inner.delete_many(keys):
            if error is not None:
                raise error

    def _is_named(self, attempt: str) -> bool:
        """Whether a manifest names this attempt: one written after the listing, or missing from part of a listing."""
        folder = attempt.rpartition("/")[0]
        manifests = [info.key for info in self.inner.keys(f"{folder}/") if _MANIFEST.fullmatch(info.key)]
        return any(self._attempt_of(key) == attempt for key in manifests)

    def _attempt_if_readable(self, manifest: str) -> str | None:
        """As ``_attempt_of``; None also if the manifest cannot be read: it must not prevent the removal of others."""
        try:
            return self._attempt_of(manifest)
        except (StorePermissionError, StoreUnavailableError):
            return None

    def _attempt_of(self, manifest: str) -> str | None:
        """Return the folder of the layers that a manifest names; None: the manifest is gone or not valid."""
        try:
            data = read_blob(self.inner, manifest, MANIFEST_BYTES_MAX)
            return None if data is None else f"{manifest.rpartition('/')[0]}/{unseal(data, manifest)['attempt']}"
        except (SealError, BlobCorruptError):
            return None


def open_chunks(root: StoreRecipe) -> ChunkStore:
    """Open a ChunkStore over the store of a root. Its argument can be sent to other processes.

    Raises:
        StoreError: the root's store cannot be opened.
    """
    return ChunkStore(find_object(root.module, root.name)(**root.options))


def _error_of(call: Callable[[], None]) -> StoreError | None:
    try:
        call()
    except StoreClosedError:
        raise
    except StoreError as e:
        return e
    return None


def _folder_of(key: str) -> str:
    """Return the folder of the chunks with the same first block; "" if the key is in no such folder."""
    found = _CHUNK_FILE.fullmatch(key)
    return found[1] if found else ""


def _bytes_of(infos: Iterable[KeyInfo]) -> int:
    return sum(info.size for info in infos)
