"""The built-in tiers: a config model, a store and the one StoreTierManager, joined.

A tier that needs a client library imports its store in its constructor, so that a process pays only for what it uses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from kvtiers.tiers.blocks.file_mapper import FORMAT_VLLM_RAW, FileMapper, VllmFileMapper, strict_fields
from kvtiers.tiers.blocks.keyring import KEY_VARIABLES, load_keys
from kvtiers.tiers.blocks.namespace import open_namespace
from kvtiers.tiers.blocks.neighbors import tell_nearest
from kvtiers.tiers.blocks.seal import TRAILER_BYTES, Checksum, Seal
from kvtiers.tiers.blocks.seal_kinds import seal_factory
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.records import RecordKeys
from kvtiers.tiers.config.deployment import parse_tier
from kvtiers.tiers.config.open_store import for_engine, open_store, store_recipe, tool_recipe
from kvtiers.tiers.config.tier_options import (
    BoundedTierConfig,
    ExternalTierConfig,
    FsspecTierConfig,
    FsTierConfig,
    NetworkTierConfig,
    NfsTierConfig,
    S3TierConfig,
    StoreTierConfig,
    TierConfig,
    default_threads,
)
from kvtiers.tiers.errors import ConfigError, RegionError, StoreError, printable, public_url
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import Store, SupportsTouch
from kvtiers.tiers.stores.files.mounts import missing_mount
from kvtiers.tiers.tier.block_mover import Rows
from kvtiers.tiers.tier.lookup import LookupOptions
from kvtiers.tiers.tier.store_tier import LOAD_ONLY_THREADS, CollectorEnd, StoreTierManager, TierOptions
from kvtiers.tiers.tracing import make_job_tracer

logger = get_logger(__name__)

BEGIN_SHARE_MIN = 0.2  # of job_deadline_s, however long one call may take
TASKS_OF_BOUND = 64  # at least so many batches fill a bounded tier
CORE_BYTES = 4 << 20  # of a worker's memory, for obstore's thread on each core
FSSPEC_COPIES = 4  # of a block, by a driver that moves it
AT_ONCE_BYTES_MAX = 256 << 20  # under way, in one direction of a worker that waits
NFS_NEWCOMER_S = 60.0  # acdirmax's default: so long other hosts may not see a new name


class _AtMost(int):
    """A default that is an upper bound: fewer where that many do not fit the machine."""


THREADS_MAX = _AtMost(16)


class FileSystemTierManager(StoreTierManager):
    """Blocks as files under ``root_dir`` on a local file system.

    Made by ``SecondaryTierFactory`` with thread counts that fit the machine; the defaults here are upper bounds for
    callers that construct it by hand: each thread may have a worker process. A count that is given is taken as it is.
    ``options`` are those of ``tiers.config.tier_options.FsTierConfig``.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        n_read_threads: int = THREADS_MAX,
        n_write_threads: int = THREADS_MAX,
        **options: Any,
    ) -> None:
        for name, count in (("n_read_threads", n_read_threads), ("n_write_threads", n_write_threads)):
            options[name] = min(count, default_threads()) if isinstance(count, _AtMost) else count
        config = parse_tier({"type": "fs", "root_dir": root_dir, **options})
        _start(self, offloading_spec, primary_kv_view, tier_type, config)


class NfsTierManager(StoreTierManager):
    """Blocks as files on an NFS mount. ``options`` are those of ``tiers.config.tier_options.NfsTierConfig``.

    The I/O is in processes of its own by default, because a thread in a dead mount can be neither cancelled nor
    forgotten.
    """

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        config = parse_tier({"type": "nfs", **options})
        assert isinstance(config, NfsTierConfig)
        if problem := missing_mount(config.root_dir):
            logger.warning("tier %s: root_dir: %s", config.name or tier_type, problem)
        _start(self, offloading_spec, primary_kv_view, tier_type, config)


class MemoryTierManager(StoreTierManager):
    """Blocks in this process's memory. ``options`` are those of ``tiers.config.tier_options.MemoryTierConfig``."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        config = parse_tier({"type": "memory", **options})
        _start(self, offloading_spec, primary_kv_view, tier_type, config)


class S3TierManager(StoreTierManager):
    """Blocks as objects in a bucket. ``options`` are those of ``tiers.config.tier_options.S3TierConfig``.

    Raises:
        StorePermissionError, StoreConfigError: credentials, bucket, region or clock are wrong; says which and what to
            do. An endpoint that does not answer is logged only: it may come back.
    """

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        from kvtiers.tiers.stores.s3.store import S3Store

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
    """Blocks under any fsspec URL. ``options`` are those of ``tiers.config.tier_options.FsspecTierConfig``."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        config = parse_tier({"type": "fsspec", **options})
        _start(self, offloading_spec, primary_kv_view, tier_type, config)


class CustomTierManager(StoreTierManager):
    """Blocks in a store of somebody else's. ``options`` are those of ``tiers.config.tier_options.StoreTierConfig``."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        config = parse_tier({"type": "store", **options})
        _start(self, offloading_spec, primary_kv_view, tier_type, config)


def make_seal(config: TierConfig) -> Callable[..., Seal]:
    """Makes the seal of a namespace in a built-in tier; called as ``Seal``.

    Raises:
        ConfigError: the keys cannot be read, or cryptography is missing.
    """
    options: dict[str, Any] = {"takes_unverified": config.takes_unverified, "shares_folder": _is_raw(config)}
    if config.protection == "none":
        return partial(Seal, **options)
    keys = load_keys(keys_file=config.keys_file, keys_env=config.keys_env)
    return partial(seal_factory(config.protection, keys), **options)


def _is_raw(config: TierConfig) -> bool:
    return isinstance(config, FsTierConfig) and config.format == FORMAT_VLLM_RAW


def _protection_fields(config: TierConfig) -> dict[str, str]:
    """Protected blocks have a namespace of their own: replicas with and without keys stay out of each other's way."""
    return {} if config.protection == "none" else {"protection": config.protection}


def _start(
    tier: StoreTierManager, spec: Any, view: memoryview, tier_type: str, config: TierConfig | ExternalTierConfig
) -> None:
    """The rest of every built-in tier's constructor: makes the store, and closes what it made if anything fails."""
    assert isinstance(config, TierConfig)
    name = config.name or tier_type
    unmappable = _why_unmappable(view) if config.isolation != "thread" else None
    mapped = config.isolation != "thread" and unmappable is None
    if config.isolation == "auto" and unmappable is not None:
        logger.info("tier %s: isolation: auto is threads of this process here: %s", name, unmappable)
    row_bytes = Rows(view).row_bytes
    policy = config.capacity_policy() if isinstance(config, BoundedTierConfig) else None
    if policy is not None:
        policy = replace(policy, block_bytes=row_bytes + TRAILER_BYTES)
        _check_room(name, policy)
    options = _tier_options(config, row_bytes, in_workers=mapped)
    store = _open_in_workers(name, config, options, view) if mapped or config.isolation == "process" else None
    store_runs_here = store is None
    if store is None:
        if mapped:
            options = _tier_options(config, row_bytes, in_workers=False)
        why = f"isolation: {config.isolation}"
        store = open_store(for_engine(config, f"tier {name}", f"{why}, and {unmappable}" if unmappable else why))
    collector = None
    try:
        if not store.capabilities.shared:
            _check_needs_no_sharing(policy, in_workers=not store_runs_here)
        mapper_class = VllmFileMapper if _is_raw(config) else FileMapper
        mapper = mapper_class.from_offloading_spec(
            getattr(config, "root_dir", ""),
            spec,
            parallel_agnostic=config.parallel_agnostic,
            extra_fields=strict_fields(spec) | _protection_fields(config),
        )
        if policy is not None:
            if open_namespace(store, mapper):  # before there is a bound: a few bytes that must not be refused
                tell_nearest(store, mapper, name)
            collector = _start_collector(tier_type, config, policy, mapper)
            if policy.max_bytes is not None:
                store = bound_store(store, config, policy.max_bytes)
        StoreTierManager.__init__(
            tier,
            spec,
            view,
            tier_type,
            store=store,
            mapper=mapper,
            options=options,
            collector=collector,
        )
    except BaseException:
        if collector is not None:
            collector.close()
        store.close()
        raise
    if policy is not None and policy.max_bytes is not None:
        tier.metrics.set("kvtiers_storage_max_bytes", tier.name, value=policy.max_bytes)
    logger.info(
        "tier %s: started: %s, namespace %s, %d read and %d write threads in %s%s",
        name,
        _shown_place(config),
        f"{mapper.base_path}_r{mapper.rank}".rpartition("/")[2],
        options.n_read_threads,
        options.n_write_threads,
        "this process" if store_runs_here else "worker processes",
        ", read only" if options.read_only else "",
    )


def _check_needs_no_sharing(policy: CapacityPolicy | None, *, in_workers: bool) -> None:
    """Refuse what takes several processes, for a store whose blobs only the process that put them sees.

    Raises:
        ConfigError: names the field.
    """
    wanted = {"isolation": in_workers, "max_bytes": policy and policy.max_bytes, "ttl": policy and policy.ttl_s}
    for field, value in wanted.items():
        if value:
            accepted = "write thread" if field == "isolation" else "leave it out"
            raise ConfigError(
                f"takes other processes, and the store says that none sees what another one puts; {accepted}",
                field=field,
            )


def _shown_place(config: TierConfig) -> str:
    """What a tier's storage is, for the log: without a URL's password."""
    if isinstance(config, S3TierConfig):
        at = f" at {public_url(config.endpoint_url)}" if config.endpoint_url else ""
        return f"s3://{config.bucket}/{config.prefix or ''}{at}"
    if isinstance(config, FsspecTierConfig):
        return public_url(config.url)
    if isinstance(config, StoreTierConfig):
        return f"a store of {config.module_path}"
    return f"{config.type} in {printable(getattr(config, 'root_dir', 'memory'))}"


def _open_in_workers(name: str, config: TierConfig, options: TierOptions, view: memoryview) -> Store | None:
    """The store in worker processes; None where those cannot be had and ``auto`` does without.

    Raises:
        ConfigError: they cannot be had, and are asked for.
        StoreError: as the store's constructor.
    """
    from kvtiers.tiers.isolation.pool import WorkersUnavailableError
    from kvtiers.tiers.isolation.store import ProcessIsolatedStore, StoreRecipe

    make_store, store_options = store_recipe(config)
    try:
        return ProcessIsolatedStore(
            StoreRecipe.of(make_store, **store_options),
            region=view,
            # Lookups must not wait for batches: readers and writers help each other, so that all may be storing.
            n_workers=options.n_read_threads + options.n_write_threads + LOAD_ONLY_THREADS + config.lookup_threads,
            deadline_s=config.job_deadline_s,
            hidden_variables=frozenset(KEY_VARIABLES),
            memory_bytes_max=_worker_bytes_max(config, options, Rows(view).row_bytes),
        )
    except WorkersUnavailableError as e:
        if config.isolation == "process":
            raise ConfigError(
                f"worker processes cannot be had: {e}. Their interpreter is {sys.executable!r}; write thread to do "
                "without them",
                field="isolation",
            ) from e
        logger.warning("tier %s: isolation: auto is threads of this process here: %s", name, e)
        return None


def _worker_bytes_max(config: TierConfig, options: TierOptions, row_bytes: int) -> int | None:
    """How much memory of its own a worker may have beyond what it starts with; None: it asks no server."""
    if not isinstance(config, NetworkTierConfig):
        return None
    copies = FSSPEC_COPIES if isinstance(config, FsspecTierConfig) else 0
    copies += config.protection == "aes-gcm"  # a block is encrypted into its thread's buffer
    cores = os.cpu_count() or 1
    return config.worker_memory + cores * CORE_BYTES + copies * options.worker_threads_max * row_bytes


def _check_room(name: str, policy: CapacityPolicy) -> None:
    """Only an engine knows how large its blocks are.

    Raises:
        ConfigError: not one block has room.
    """
    from kvtiers.tiers.capacity.collector import HELD_SHARE_MAX

    if policy.max_bytes is None:
        return
    if policy.max_bytes < policy.block_bytes:
        raise ConfigError(
            f"{policy.max_bytes} bytes do not hold a block, which has {policy.block_bytes}; write at least twice that",
            field=f"tier {name}: max_bytes",
        )
    if policy.block_bytes > HELD_SHARE_MAX * policy.max_bytes:
        logger.warning(
            "tier %s: max_bytes = %d: a block has %d bytes here, more than the collector makes room for at once, so "
            "blocks may be refused for ever; give twice as much",
            name,
            policy.max_bytes,
            policy.block_bytes,
        )


def bound_store(store: Store, config: TierConfig, max_bytes: int) -> Store:
    """The store with a bound that it shares with all writers of the same root."""
    from kvtiers.tiers.capacity.account import Account
    from kvtiers.tiers.capacity.bound import BoundedStore

    newcomer_s = NFS_NEWCOMER_S if isinstance(config, NfsTierConfig) else 0.0
    return BoundedStore(store, Account(store, max_bytes, newcomer_s=newcomer_s, keys=record_keys(config)))


def record_keys(config: TierConfig) -> RecordKeys | None:
    """What the capacity records of a root are authenticated with; None where the tier has no keys.

    Raises:
        ConfigError: the keys cannot be read.
    """
    if config.protection == "none":
        return None
    return RecordKeys.of(load_keys(keys_file=config.keys_file, keys_env=config.keys_env))


def _start_collector(
    tier_type: str,
    config: TierConfig,
    policy: CapacityPolicy,
    mapper: FileMapper,
) -> CollectorEnd:
    from kvtiers.tiers.capacity.link import CollectorLink
    from kvtiers.tiers.isolation.process import StoreRecipe

    make_store, store_options = tool_recipe(config)
    return CollectorLink(
        config.name or tier_type,
        StoreRecipe.of(make_store, **store_options),
        policy,
        mapper,
        # A function's store is made by the collector's process, which passes uses over where it cannot note them.
        notes_uses=not isinstance(make_store, type) or issubclass(make_store, SupportsTouch),
        hidden_variables=frozenset(KEY_VARIABLES),
        keys=record_keys(config),
    )


def _why_unmappable(view: memoryview) -> str | None:
    """Why other processes cannot map the region; None: they can."""
    from kvtiers.tiers.isolation.mapped_file import address_of, open_mapped_file

    address = address_of(view)
    if address is None:
        return "the region is no contiguous, writable memory"
    try:
        fd, _ = open_mapped_file(address, view.nbytes)
    except (OSError, RegionError) as e:
        return str(e)
    os.close(fd)
    return None


def _begin_s(config: TierConfig) -> float | None:
    """So long a worker may begin blocks, that the last one's call ends before the worker is killed."""
    if not isinstance(config, S3TierConfig):
        return None
    return max(BEGIN_SHARE_MIN * config.job_deadline_s, config.job_deadline_s - config.request_timeout)


def _tier_options(config: TierConfig, row_bytes: int, *, in_workers: bool) -> TierOptions:
    # Where blocks mostly wait, two workers with all the threads do what as many workers would.
    few = in_workers and isinstance(config, NetworkTierConfig)
    worker_threads = max(config.n_read_threads, config.n_write_threads) if few else 1
    worker_threads_max = 1
    if isinstance(config, NetworkTierConfig) and few:
        worker_threads_max = max(worker_threads, min(config.n_threads_max, AT_ONCE_BYTES_MAX // row_bytes))
    # A worker has one task at a time: with fewer blocks than threads, some would idle.
    task_bytes = max(config.task_bytes, worker_threads * row_bytes if few else 0)
    task_bytes_max = max(task_bytes, 2 * worker_threads_max * row_bytes)
    if isinstance(config, BoundedTierConfig) and config.max_bytes is not None:
        # Workers take the room for a batch at once: a large one would find none where there is some.
        task_bytes_max = config.max_bytes // TASKS_OF_BOUND
    return TierOptions(
        name=config.name,
        trace_job=make_job_tracer(config.name or config.type) if config.trace else None,
        n_read_threads=1 if few else config.n_read_threads,
        n_write_threads=1 if few else config.n_write_threads,
        worker_threads=worker_threads,
        worker_threads_max=worker_threads_max,
        worker_begin_s=_begin_s(config),
        task_bytes=min(task_bytes, task_bytes_max),
        task_bytes_max=task_bytes_max,
        jobs_max=config.jobs_max,
        max_bytes_in_flight=config.max_bytes_in_flight,
        checksum=Checksum[config.seal_checksum.upper()],
        make_seal=make_seal(config),
        read_only=isinstance(config, BoundedTierConfig) and config.read_only,
        job_deadline_s=config.job_deadline_s,
        circuit_failures=config.circuit_failures,
        circuit_probe_s=config.circuit_probe_s,
        shutdown_s=config.shutdown_s,
        lookup=LookupOptions(
            threads=config.lookup_threads,
            deadline_s=config.lookup_deadline_s,
            total_s=config.lookup_total_s,
            present_ttl_s=config.present_ttl_s,
            absent_ttl_s=config.absent_ttl_s,
            keys_max=config.lookup_cache_keys,
        ),
    )
