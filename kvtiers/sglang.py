"""The name for SGLang's ``--hicache-storage-backend-extra-config``: ``"module_path": "kvtiers.sglang"``."""

from __future__ import annotations

from kvtiers.connector.engines.sglang.storage import KVTiersHiCacheStorage

__all__ = ["KVTiersHiCacheStorage"]
