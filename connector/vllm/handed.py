"""Passes vLLM's whole config from KVTiersConnector to the spec and the tiers that vLLM creates inside it.

vLLM creates specs and tiers itself and gives them only an OffloadingConfig. That lacks the weights' revision, the hash
algorithm and the kinds of KV cache groups. The connector has all of these and passes them on through this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ...tiers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The constructor arguments of a connector.

    Attributes:
        vllm_config: vLLM's VllmConfig, with this connector's own ``kv_transfer_config``.
        kv_cache_config: vLLM's KVCacheConfig.
    """

    vllm_config: Any
    kv_cache_config: Any


_CURRENT: ContextVar[HandedOver | None] = ContextVar("kvtiers_handed_over", default=None)

#: The accepted ``--kv-transfer-config``, for error messages.
NEW_FORM = (
    '{"kv_connector": "KVTiersConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
    '{"config_file": "/path/to/kvtiers.yaml"}} (with "way": "tier" beside config_file for tiers behind vLLM\'s own '
    "region; kvtiers vllm-config prints it)"
)


@contextmanager
def handing_over(vllm_config: Any, kv_cache_config: Any) -> Iterator[None]:
    """Make these configs available to ``handed_over`` within this context."""
    token = _CURRENT.set(HandedOver(vllm_config, kv_cache_config))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def handed_over() -> HandedOver:
    """Return the configs from the connector that is being constructed.

    Raises:
        ConfigError: no connector is being constructed. Without the whole config, KV of different models could be mixed
            up.
    """
    found = _CURRENT.get()
    if found is None or found.vllm_config is None or found.kv_cache_config is None:
        raise ConfigError(
            "KVTiersSpec and KVTiersTier take vLLM's whole config from KVTiersConnector and do not start without it. "
            f"Write --kv-transfer-config {NEW_FORM}",
            field="kv_connector",
        )
    return found
