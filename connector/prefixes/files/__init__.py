"""Files: the storage of PrefixStore's files, by relative path: a folder, a bucket, or any fsspec URL."""

from __future__ import annotations

from typing import Any

from kvtiers.connector.prefixes.files.base import FILES_AT_ONCE, Files
from kvtiers.connector.prefixes.files.folder import FolderFiles
from kvtiers.connector.prefixes.files.stores import BucketFiles, FsspecFiles
from kvtiers.tiers.config.open_store import for_engine, open_store
from kvtiers.tiers.config.tier_options import (
    BoundedTierConfig,
    FsspecTierConfig,
    FsTierConfig,
    NfsTierConfig,
    S3TierConfig,
)
from kvtiers.tiers.errors import ConfigError, StoreConfigError

__all__ = ["FILES_AT_ONCE", "Files", "files_for"]

THREADS_MAX = 32  # these threads live in the engine's process


def files_for(place: BoundedTierConfig) -> Files:
    """Create the Files of a place (see ``connector.prefixes.place``).

    Asks no storage, except that fsspec drivers may connect, and the temporary files of dead writers are removed where
    a put is not atomic.

    Raises:
        ConfigError: fsspec does not know the URL, or a package is missing.
        StoreError: an fsspec driver connects when it is created (as ``sftp`` does), and the connection failed.
    """
    if isinstance(place, FsTierConfig | NfsTierConfig):
        return FolderFiles(place)
    assert isinstance(place, S3TierConfig | FsspecTierConfig)
    threads_max = min(THREADS_MAX, place.n_threads_max)
    if isinstance(place, FsspecTierConfig):
        try:
            fsspec: Any = open_store(place)
        except StoreConfigError as e:
            raise ConfigError(str(e), field="url") from None
        return FsspecFiles(fsspec, FILES_AT_ONCE, threads_max)
    store: Any = open_store(for_engine(place, "prefixes", "they have no worker processes"))
    return BucketFiles(store, max(place.n_read_threads, place.n_write_threads), threads_max)
