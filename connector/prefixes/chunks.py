"""ChunkStore: the chunks below a PrefixStore's root as blobs of a Store, so that the collector can remove what is old.

A chunk is one blob under its manifest's name: all of its bytes, and the time of its manifest, which is written last and
touched last. Layers that no manifest names (their writer died, or their manifest was removed) are a blob under the name
of their attempt's folder, and a manifest that its writer never gave its name is one by itself. Everything else is as
the inner store has it: the records below ``_kvtiers/``, and other people's files, which are listed and never removed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from kvtiers.connector.prefixes.format import MANIFEST_BYTES_MAX, MANIFEST_NAME, unseal
from kvtiers.tiers.errors import SealError, StoreClosedError, StoreError, StorePermissionError, StoreUnavailableError
from kvtiers.tiers.isolation.process import StoreRecipe
from kvtiers.tiers.isolation.worker import find_object
from kvtiers.tiers.layers.layer import Layer
from kvtiers.tiers.store import KeyInfo, Store
from kvtiers.tiers.tools.block_reader import read_small
from kvtiers.tiers.tools.inventory import NAMESPACE

READERS_S = 2.0  # who has read a manifest reads its layers now

_FOLDER = rf"{NAMESPACE}_r[0-9]+/[0-9a-f]{{8,128}}/"
_CHUNK_FILE = re.compile(rf"({_FOLDER})(.+)")
_MANIFEST = re.compile(_FOLDER + MANIFEST_NAME)
_ATTEMPT = re.compile(_FOLDER + r"[0-9a-f]{32}")
_HALF_MANIFEST = re.compile(_MANIFEST.pattern + r"\.[0-9a-f]{32}\.part")


class ChunkStore(Layer):
    """For one thread: the collector's.

    Args:
        inner: of the root: LocalStore, NfsStore, S3Store or FsspecStore, which list what is in one folder together.
        sleep: waits so many seconds.
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
        (error,) = self._delete_many([key])
        if error is not None:
            raise error

    def _around_batch(self, method: str, items: Sequence[Any], size: int) -> list[Any]:
        return self._delete_many(items) if method == "delete_many" else super()._around_batch(method, items, size)

    def _chunks(self, infos: Iterable[KeyInfo]) -> Iterator[KeyInfo]:
        """The blobs of one folder's files."""
        attempts: dict[str, list[KeyInfo]] = {}
        manifests = []
        for info in infos:
            attempt = info.key.rpartition("/")[0]
            if attempt in attempts or _ATTEMPT.fullmatch(attempt):
                attempts.setdefault(attempt, []).append(info)
            elif _MANIFEST.fullmatch(info.key):
                manifests.append(info)
            else:
                yield info
        # The usual folder has one of each; only a removal must be sure that they belong together.
        read = (self._attempt_if_readable(info.key) for info in manifests) if len(attempts) > 1 else iter([*attempts])
        for manifest in manifests:
            layers = attempts.pop(next(read, None) or "", [])
            yield KeyInfo(manifest.key, manifest.size + _bytes_of(layers), manifest.mtime)
        for attempt, layers in attempts.items():
            yield KeyInfo(attempt, _bytes_of(layers), max(info.mtime for info in layers))

    def _delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        """Manifests first, so that nobody goes by them any more; then, when readers are done, layers."""
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
        """Remove what is no folder of layers; note in ``attempts`` the one that is to go with it, or that it is."""
        if _ATTEMPT.fullmatch(key):
            attempt = None if self._is_named(key) else key
        else:
            attempt = self._attempt_if_readable(key) if _MANIFEST.fullmatch(key) else None
            self.inner.delete(key)
        if attempt is not None:
            attempts[key] = attempt

    def _delete_folder(self, folder: str) -> None:
        keys = [info.key for info in self.inner.keys(f"{folder}/")]
        inner: Any = self.inner
        for error in inner.delete_many(keys):
            if error is not None:
                raise error

    def _is_named(self, attempt: str) -> bool:
        """Whether a manifest names it: since it was listed, or because a listing came in pieces."""
        folder = attempt.rpartition("/")[0]
        manifests = [info.key for info in self.inner.keys(f"{folder}/") if _MANIFEST.fullmatch(info.key)]
        return any(self._attempt_of(key) == attempt for key in manifests)

    def _attempt_if_readable(self, manifest: str) -> str | None:
        """As ``_attempt_of``; None also where it cannot be read: one that is damaged must not keep all others."""
        try:
            return self._attempt_of(manifest)
        except (StorePermissionError, StoreUnavailableError):
            return None

    def _attempt_of(self, manifest: str) -> str | None:
        """Folder of the layers that it names; None: it is gone, or cannot be understood."""
        data = read_small(self.inner, manifest, MANIFEST_BYTES_MAX)
        try:
            return None if data is None else f"{manifest.rpartition('/')[0]}/{unseal(data, manifest)['attempt']}"
        except SealError:
            return None


def open_chunks(root: StoreRecipe) -> ChunkStore:
    """Over the store of the root; for other processes, too.

    Raises:
        StoreError: it cannot be opened.
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
    """The folder of the chunks that begin alike; "" for what is in none."""
    found = _CHUNK_FILE.fullmatch(key)
    return found[1] if found else ""


def _bytes_of(infos: Iterable[KeyInfo]) -> int:
    return sum(info.size for info in infos)
