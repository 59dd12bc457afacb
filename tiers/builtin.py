"""The built-in tiers: a config model, a store and the one StoreTierManager, joined.

A tier that needs a client library imports its store in its constructor, so that a process pays only for what it uses.
"""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

from tiers.capacity.policy import CapacityPolicy
from tiers.config import parse_tier
from tiers.errors import StoreError
from tiers.file_mapper import FileMapper, strict_fields
from tiers.lookup import LookupOptions
from tiers.namespace import open_namespace
from tiers.open_store import store_recipe, tool_recipe
from tiers.seal import Checksum
from tiers.store import Store, SupportsTouch
from tiers.store_tier import CollectorEnd, StoreTierManager, TierOptions
from tiers.tier_config import (
    BoundedTierConfig,
    FsspecTierConfig,
    FsTierConfig,
    MemoryTierConfig,
    NfsTierConfig,
    S3TierConfig,
    TierConfig,
)

logger = logging.getLogger(__name__)

NFS_NEWCOMER_S = 60.0  # acdirmax's default: so long other hosts may not see a new name


class FileSystemTierManager(StoreTierManager):
    """Blocks as files under ``root_dir`` on a local file system.

    Made by ``SecondaryTierFactory`` with thread counts that fit the machine; the defaults here are upper bounds for
    callers that construct it by hand. ``options`` are those of ``tiers.tier_config.FsTierConfig``.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        n_read_threads: int = 16,
        n_write_threads: int = 16,
        **options: Any,
    ) -> None:
        options = {"n_read_threads": n_read_threads, "n_write_threads": n_write_threads, **options}
        config = parse_tier({"type": "fs", "root_dir": root_dir, **options})
        assert isinstance(config, FsTierConfig)
        _start(self, offloading_spec, primary_kv_view, tier_type, config)


class NfsTierManager(StoreTierManager):
    """Blocks as files on an NFS mount. ``options`` are those of ``tiers.tier_config.NfsTierConfig``.

    The I/O is in processes of its own by default, because a thread in a dead mount can be neither cancelled nor
    forgotten.
    """

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        config = parse_tier({"type": "nfs", **options})
        assert isinstance(config, NfsTierConfig)
        _start(self, offloading_spec, primary_kv_view, tier_type, config)


class MemoryTierManager(StoreTierManager):
    """Blocks in this process's memory. ``options`` are those of ``tiers.tier_config.MemoryTierConfig``."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        config = parse_tier({"type": "memory", **options})
        assert isinstance(config, MemoryTierConfig)
        _start(self, offloading_spec, primary_kv_view, tier_type, config)


class S3TierManager(StoreTierManager):
    """Blocks as objects in a bucket. ``options`` are those of ``tiers.tier_config.S3TierConfig``.

    Raises:
        StorePermissionError, StoreConfigError: credentials, bucket, region or clock are wrong; says which and what to
            do. An endpoint that does not answer is logged only: it may come back.
    """

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        from tiers.stores.s3 import S3Store

        config = parse_tier({"type": "s3", **options})
        assert isinstance(config, S3TierConfig)
        _, options = store_recipe(config)
        try:
            with closing(S3Store(**options)) as store:
                store.check()
        except StoreError as e:
            if not e.retryable:
                raise
            logger.warning("tier %s starts without its storage: %s", config.name or tier_type, e)
        _start(self, offloading_spec, primary_kv_view, tier_type, config)


class FsspecTierManager(StoreTierManager):
    """Blocks under any fsspec URL. ``options`` are those of ``tiers.tier_config.FsspecTierConfig``."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        config = parse_tier({"type": "fsspec", **options})
        assert isinstance(config, FsspecTierConfig)
        _start(self, offloading_spec, primary_kv_view, tier_type, config)


def _start(
    tier: StoreTierManager,
    spec: Any,
    view: memoryview,
    tier_type: str,
    config: TierConfig,
) -> None:
    """The rest of every built-in tier's constructor: makes the store, and closes what it made if anything fails."""
    store_class, store_options = store_recipe(config)
    policy = config.capacity_policy() if isinstance(config, BoundedTierConfig) else None
    if config.isolation == "process":
        from tiers.layers.isolate import ProcessIsolatedStore, StoreRecipe

        store: Store = ProcessIsolatedStore(
            StoreRecipe.of(store_class, **store_options),
            region=view,
            n_workers=config.n_read_threads + config.n_write_threads,
            deadline_s=config.job_deadline_s,
        )
    else:
        store = store_class(**store_options)
    collector = None
    try:
        mapper = FileMapper.from_offloading_spec(
            getattr(config, "root_dir", ""),
            spec,
            parallel_agnostic=config.parallel_agnostic,
            extra_fields=strict_fields(spec),
        )
        if policy is not None:
            open_namespace(store, mapper)  # before there is a bound: a few bytes that must not be refused
            collector = _start_collector(tier_type, config, policy, mapper)
            if policy.max_bytes is not None:
                store = _bounded(store, config, policy.max_bytes)
        StoreTierManager.__init__(
            tier,
            spec,
            view,
            tier_type,
            store=store,
            mapper=mapper,
            options=_tier_options(config),
            collector=collector,
        )
    except BaseException:
        if collector is not None:
            collector.close()
        store.close()
        raise
    if policy is not None and policy.max_bytes is not None:
        tier.metrics.set("kvtiers_storage_max_bytes", tier.name, value=policy.max_bytes)


def _bounded(store: Store, config: TierConfig, max_bytes: int) -> Store:
    from tiers.capacity.account import Account
    from tiers.layers.bound import BoundedStore

    newcomer_s = NFS_NEWCOMER_S if isinstance(config, NfsTierConfig) else 0.0
    return BoundedStore(store, Account(store, max_bytes, newcomer_s=newcomer_s))


def _start_collector(
    tier_type: str,
    config: TierConfig,
    policy: CapacityPolicy,
    mapper: FileMapper,
) -> CollectorEnd:
    from tiers.capacity.link import CollectorLink
    from tiers.layers.worker_process import StoreRecipe

    store_class, store_options = tool_recipe(config)
    return CollectorLink(
        config.name or tier_type,
        StoreRecipe.of(store_class, **store_options),
        policy,
        mapper,
        notes_uses=issubclass(store_class, SupportsTouch),
    )


def _tier_options(config: TierConfig) -> TierOptions:
    return TierOptions(
        name=config.name,
        n_read_threads=config.n_read_threads,
        n_write_threads=config.n_write_threads,
        task_bytes=config.task_bytes,
        jobs_max=config.jobs_max,
        max_bytes_in_flight=config.max_bytes_in_flight,
        checksum=Checksum[config.seal_checksum.upper()],
        job_deadline_s=config.job_deadline_s,
        circuit_failures=config.circuit_failures,
        circuit_probe_s=config.circuit_probe_s,
        shutdown_s=config.shutdown_s,
        lookup=LookupOptions(
            threads=config.lookup_threads,
            deadline_s=config.lookup_deadline_s,
            present_ttl_s=config.present_ttl_s,
            absent_ttl_s=config.absent_ttl_s,
            keys_max=config.lookup_cache_keys,
        ),
    )
