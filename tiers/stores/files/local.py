"""LocalStore: one file per blob, ``<root_dir>/<key>``, on a file system of this host.

The implementation is in ``folder_store``, ``posix`` and ``publish``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal

from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.store import Capabilities
from kvtiers.tiers.stores.files.folder_store import FolderStore
from kvtiers.tiers.stores.files.publish import Publisher


class LocalStore(FolderStore):
    """Stores blobs as files of this host; see ``FolderStore``.

    Args:
        root_dir, read_only, min_free_bytes, quarantine_count_max, monotonic: see ``FolderStore``.
        durability: "data": a stored blob survives a power failure; a put of 2 MiB then takes 8 ms instead of 0.6 ms.
            "none": a power failure may lose or corrupt a blob; its seal reveals the corruption. With either setting, a
            process that dies leaves no incomplete blob.
        clock: Unix seconds, to compute the age of other hosts' files in ``.tmp``.

    Raises:
        ConfigError: an argument is not accepted.
        StoreConfigError, StorePermissionError, StoreUnavailableError: the root is not a folder or cannot be created.
    """

    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=False)

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        *,
        read_only: bool = False,
        min_free_bytes: int = 0,
        durability: Literal["none", "data"] = "none",
        quarantine_count_max: int = 1024,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if durability not in ("none", "data"):
            raise ConfigError(f"{durability!r} is not accepted; write none or data", field="durability")
        super().__init__(
            root_dir,
            publisher=Publisher(durable=durability == "data"),
            read_only=read_only,
            min_free_bytes=min_free_bytes,
            quarantine_count_max=quarantine_count_max,
            now=lambda root: clock(),  # noqa: ARG005 - a local file system has this host's clock
            monotonic=monotonic,
        )
