"""The name for LMCache's ``--l2-adapter``: ``{"type": "plugin", "module_path": "kvtiers.lmcache", ...}``."""

from __future__ import annotations

from kvtiers.connector.engines.lmcache.adapter import KVTiersL2Adapter

__all__ = ["KVTiersL2Adapter"]
