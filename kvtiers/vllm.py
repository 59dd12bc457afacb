"""Names for a vLLM configuration with ``"kv_connector_module_path": "kvtiers.vllm"``, and vLLM's plugin entry point.

Every vLLM process calls ``register`` when it starts (entry point ``vllm.general_plugins``). This module imports vLLM
and ``kvtiers.connector.vllm`` only when one of its names is used, so a vLLM process that does not use kvtiers loads
only this module.
"""

from __future__ import annotations

import importlib
from typing import Any

_CONNECTORS = {
    "KVTiersConnector": "connector",
    "SharedStorageConnector": "shared_storage",
}
_MODULES = {**_CONNECTORS, "KVTiersSpec": "spec", "KVTiersTier": "tier", "RankTiersSpec": "ranks"}

__all__ = ["KVTiersConnector", "KVTiersSpec", "KVTiersTier", "RankTiersSpec", "SharedStorageConnector", "register"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvtiers.vllm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvtiers.connector.vllm.{_MODULES[name]}"), name)


def register() -> None:
    """Register kvtiers' connectors in vLLM. May be called repeatedly."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in _CONNECTORS:
        try:
            KVConnectorFactory.register_connector(name, __name__, name)
        except ValueError:  # already registered
            continue
