"""Door: a tier for an engine that calls and waits, with the memory through which its blocks pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...tiers.blocking import BlockingTier, Pieces, open_tier
from ...tiers.blocks.keys import OffloadKey
from ...tiers.errors import ConfigError
from ...tiers.metrics import Metrics
from ...tiers.plain_logs import get_logger
from ...tiers.tier.circuit import CircuitState
from ..base import EngineSpec, OffloadingConfig
from ..identity.model_files import files_digest, hub_commit, value_digest
from ..ranks.place import SETTINGS, rank_tier, staging_bytes
from ..region.region_header import row_stride
from ..region.shared_region import SharedOffloadRegion

if TYPE_CHECKING:
    from ...tiers.exporter import MetricsServer

logger = get_logger(__name__)

STAGING = "256MiB"
_TIER = ("shared_storage_path", "storage_options", "tier", "config_file", "index", *SETTINGS)
#: Options of every door.
OPTIONS = (*_TIER, "staging", "metrics_port")
SAY_EVERY_S = 60.0


def weights_digest(model: str, revision: str | None, download_dir: str | None = None) -> str | None:
    """Identify a model's weights: by its files, or by the commit in the local hub cache. None: neither is here.

    Args:
        model: a folder or a hub id.
        revision: as given to the engine.
    """
    return files_digest(model) or hub_commit(model, revision, download_dir) or revision


def counted_revision(weights: str, options: Mapping[str, Any]) -> str:
    """Weights and options in the form that goes into the namespace."""
    return f"{weights}+engine:{value_digest(dict(options))}" if options else weights


def check_options(options: Mapping[str, Any], own: Collection[str], engines: Collection[str] = ()) -> None:
    """Refuse unknown options and invalid values.

    Args:
        own: options of kvtiers for one engine only.
        engines: options that the engine reads.

    Raises:
        ConfigError: names the option.
    """
    for name in sorted(options.keys() - {*OPTIONS, *own, *engines}):
        raise ConfigError(f"is not an option of kvtiers; accepted are {', '.join((*OPTIONS, *own))}", field=name)
    if rank_tier(tier_options(options)).load == "never":
        raise ConfigError("'never' is not accepted: the engine decides what it loads; leave it out", field="load")
    staging_of(options)
    port = options.get("metrics_port")
    if port is not None and not (type(port) is int and 0 < port < 65536):
        raise ConfigError(f"{port!r} is not accepted; write 1 to 65535", field="metrics_port")


def serve_metrics(options: Mapping[str, Any], metrics: Metrics, place: int = 0) -> MetricsServer | None:
    """Serve metrics at ``metrics_port`` plus ``place``, on this host only. None: the option is absent, or see the log.

    Args:
        place: number of this process among the processes with the same options.

    Raises:
        ConfigError: prometheus_client is missing.
    """
    if options.get("metrics_port") is None:
        return None
    from ...tiers.exporter import serve_or_warn  # needs prometheus_client

    return serve_or_warn(metrics, options["metrics_port"] + place)


class Door:
    """A tier, and the memory through which its blocks pass. Any thread may call it.

    Calls for blocks never raise: a failed call counts as a miss, and is logged at most once a minute.

    Args:
        options: the operator's, with names from ``OPTIONS``.
        block_bytes: size of every block.
        metrics: where the tier counts.
        label: end of the tier's name in logs and metrics, different for each tier with the same options.

    Raises:
        ConfigError: names the option that is wrong.
        StoreError: the storage failed with a permanent error.
    """

    def __init__(
        self, config: OffloadingConfig, options: Mapping[str, Any], block_bytes: int, metrics: Metrics, label: str
    ) -> None:
        tier = rank_tier(tier_options(options))
        row_bytes = row_stride(block_bytes, 1)
        rows = staging_of(options) // row_bytes
        if rows < 2:
            text = f"{options.get('staging', STAGING)} does not hold two blocks of {row_bytes} bytes"
            raise ConfigError(text, field="staging")
        self._say_at = float("-inf")
        self._region = SharedOffloadRegion.anonymous(rows, row_bytes)
        try:
            named = {**dict(tier), "name": f"{tier.name or tier.type}_{label}"}
            view = self._region.create_kv_memoryview()
            self.tier: BlockingTier = open_tier(named, EngineSpec(config, metrics), view, block_bytes=block_bytes)
        except BaseException:
            self._region.cleanup()
            raise

    @property
    def is_up(self) -> bool:
        """Whether the tier is in use, not cut off."""
        return getattr(self.tier.tier, "circuit_state", CircuitState.CLOSED) is CircuitState.CLOSED

    def exists(self, keys: Sequence[OffloadKey], *, prefix_only: bool = False) -> list[bool]:
        """See ``BlockingTier.exists_many``."""
        return self._try(lambda: self.tier.exists_many(keys, prefix_only=prefix_only), len(keys))

    def load(self, keys: Sequence[OffloadKey], blocks: Sequence[Pieces]) -> list[bool]:
        """See ``BlockingTier.load_many``."""
        return self._try(lambda: self.tier.load_many(keys, blocks), len(keys))

    def store(self, keys: Sequence[OffloadKey], blocks: Sequence[Pieces]) -> list[bool]:
        """See ``BlockingTier.store_many``."""
        return self._try(lambda: self.tier.store_many(keys, blocks), len(keys))

    def close(self) -> None:
        """Close the tier. Idempotent."""
        self.tier.close()
        self._region.cleanup()

    def _try(self, call: Callable[[], list[bool]], count: int) -> list[bool]:
        try:
            return call()
        except Exception:  # the engine's edge: after any error the engine computes the blocks
            if time.monotonic() >= self._say_at:
                self._say_at = time.monotonic() + SAY_EVERY_S
                logger.exception("tier %s: a call failed; it counts as a miss", self.tier.tier.name)
            return [False] * count


def tier_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that name the tier."""
    return {name: options[name] for name in _TIER if name in options}


def staging_of(options: Mapping[str, Any]) -> int:
    """Return ``staging`` in bytes.

    Raises:
        ConfigError: it is not a size.
    """
    return staging_bytes(options, "staging", STAGING)
