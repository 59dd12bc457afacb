"""What vLLM hands to KVTiersConnector, for the spec and the tiers that are made inside it.

vLLM makes specs and tiers itself and gives them an OffloadingConfig, which has neither the weights' revision nor the
hash algorithm nor the kinds of KV cache groups. The connector has all of it and hands it on here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from kvtiers.tiers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The arguments of a connector.

    Attributes:
        vllm_config: vLLM's VllmConfig, with this connector's own ``kv_transfer_config``.
        kv_cache_config: vLLM's KVCacheConfig.
    """

    vllm_config: Any
    kv_cache_config: Any


_CURRENT: ContextVar[HandedOver | None] = ContextVar("kvtiers_handed_over", default=None)

#: What to write, for errors.
NEW_FORM = (
    '{"kv_connector": "KVTiersConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
    '{"config_file": "/path/to/kvtiers.yaml"}} (with "way": "tier" beside config_file for tiers behind vLLM\'s own '
    "region; kvtiers vllm-config prints it)"
)


@contextmanager
def handing_over(vllm_config: Any, kv_cache_config: Any) -> Iterator[None]:
    """Hand these to what is made in this context."""
    token = _CURRENT.set(HandedOver(vllm_config, kv_cache_config))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def handed_over() -> HandedOver:
    """What the connector around this call has handed over.

    Raises:
        ConfigError: there is none. Without the whole config KV of different models could be mixed up.
    """
    found = _CURRENT.get()
    if found is None or found.vllm_config is None or found.kv_cache_config is None:
        raise ConfigError(
            "KVTiersSpec and KVTiersTier take vLLM's whole config from KVTiersConnector and do not start without it. "
            f"Write --kv-transfer-config {NEW_FORM}",
            field="kv_connector",
        )
    return found
