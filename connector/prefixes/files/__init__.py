"""Files: the storage of PrefixStore's files, by relative path: a folder, a bucket, or any fsspec URL."""

from __future__ import annotations

import os
from typing import Any

from ....tiers.capacity.records import PREFIXES_FOLDER
from ....tiers.config.open_store import store_recipe
from ....tiers.config.tier_options import (
    BoundedTierConfig,
    FsspecTierConfig,
    FsTierConfig,
    NfsTierConfig,
    S3TierConfig,
)
from .base import FILES_AT_ONCE, Files
from .bucket import BucketFiles
from .folder import FolderFiles
from .fsspec_url import FsspecFiles

__all__ = ["FILES_AT_ONCE", "Files", "files_for"]

THREADS_MAX = 32  # these threads live in the engine's process


def files_for(place: BoundedTierConfig) -> Files:
    """Create the Files of a place (see ``connector.prefixes.place``). Asks no storage, but some
    fsspec drivers connect (as ``sftp`` does).

    Raises:
        ConfigError: fsspec does not know the URL, or a package is missing.
        StoreError: an fsspec driver could not connect.
    """
    if isinstance(place, S3TierConfig):
        make_store, arguments = store_recipe(place)
        store: Any = make_store(**arguments)
        return BucketFiles(store, min(THREADS_MAX, max(place.n_read_threads, place.n_write_threads)))
    if isinstance(place, FsspecTierConfig):
        return FsspecFiles(place.url, place.storage_options)
    assert isinstance(place, FsTierConfig | NfsTierConfig)
    # A folder that a user names may be a link. A tier's folder of prefixes may not: others may write beside it.
    follow = os.path.basename(place.root_dir) != PREFIXES_FOLDER
    return FolderFiles(place.root_dir, place.min_free, follow=follow)
