"""What vLLM calls at the start of each of its processes (entry point ``vllm.general_plugins``).

Imports vLLM when it is called and not before, and nothing of ``connector.vllm``: where kvtiers is installed and not
used, vLLM's processes pay for this module alone.
"""

from __future__ import annotations

_CONNECTORS = {
    "KVTiersConnector": "connector.vllm.connector",
    "SharedStorageConnector": "connector.vllm.shared_storage",
}


def register() -> None:
    """Tell vLLM the names of kvtiers' connectors. May be called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in _CONNECTORS.items():
        try:
            KVConnectorFactory.register_connector(name, module, name)
        except ValueError:  # it is registered
            continue
