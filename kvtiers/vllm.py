"""What a configuration of vLLM names: ``"kv_connector_module_path": "kvtiers.vllm"``.

Also what vLLM calls at the start of each of its processes (entry point ``vllm.general_plugins``). Imports nothing of
vLLM, nor of ``kvtiers.connector.vllm``, before one of the names is asked for: where kvtiers is installed and not used,
vLLM's processes pay for this module alone.
"""

from __future__ import annotations

import importlib
from typing import Any

_CONNECTORS = {
    "KVTiersConnector": "connector",
    "SharedStorageConnector": "prefixes.connector",
}
_MODULES = {**_CONNECTORS, "KVTiersSpec": "spec", "KVTiersTier": "tier"}

__all__ = ["KVTiersConnector", "KVTiersSpec", "KVTiersTier", "SharedStorageConnector", "register"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvtiers.vllm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvtiers.connector.vllm.{_MODULES[name]}"), name)


def register() -> None:
    """Tell vLLM the names of kvtiers' connectors. May be called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in _CONNECTORS:
        try:
            KVConnectorFactory.register_connector(name, __name__, name)
        except ValueError:  # it is registered
            continue
