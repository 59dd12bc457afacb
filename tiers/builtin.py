"""BuiltInTier: a config model, a store and StoreTierManager put together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..version import version
from .blocks.file_mapper import FileMapper, strict_fields
from .blocks.keyring import KeyRing, load_keys, show_key_id
from .blocks.rows import Rows
from .blocks.seal import TRAILER_BYTES, Seal
from .capacity.link import CollectorLink
from .capacity.policy import CapacityPolicy
from .config.deployment import parse_tier
from .config.open_store import store_recipe, tool_recipe
from .config.tier_options import (
    BoundedTierConfig,
    FsspecTierConfig,
    NetworkTierConfig,
    NfsTierConfig,
    TierConfig,
    shown_place,
)
from .errors import ConfigError, RegionError
from .frames import Seats, Work
from .plain_logs import get_logger
from .recipe import StoreRecipe
from .server.mapped_file import MappedRegion
from .server.process import ProcessBackend
from .server.threads import ThreadBackend
from .store import Store, SupportsTouch
from .stores.files.mounts import missing_mount
from .tier.lookup import TOTAL_S, LookupOptions
from .tier.store_tier import StoreTierManager, TierOptions

logger = get_logger(__name__)

BLOCKS_OF_BOUND_MIN = 4  # max_bytes must hold at least this many blocks
#: Memory that a worker for a network storage may allocate after its start, besides its blocks. A worker that reads an
#: endless response exceeds the limit, and is killed and replaced.
WORKER_BYTES = 512 << 20
FSSPEC_COPIES = 4  # copies of a block that a driver may hold while it moves the block
LOAD_ONLY_THREADS = 1  # additional threads for loads, because all other threads may be busy with stores
AT_ONCE_BYTES_MAX = 128 << 20  # in flight to a network storage: on a slow link, more would not end in time
ENGINE_REQUESTS_MAX = 8  # of each kind in the engine's own process, because they take its GIL


class BuiltInTier(StoreTierManager):
    """A tier of a built-in type. ``options``: see the type's model in ``tiers.config.tier_options``.

    Raises:
        ConfigError: an option is wrong, or the store sees only its own process's blobs and must be shared.
        StoreError: the storage answered with a permanent error. On s3, the message names the problem with credentials,
            bucket, region or clock. An endpoint that does not respond is only logged, because it may come back.
    """

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        config = parse_tier({"type": tier_type, **options})
        assert isinstance(config, TierConfig)
        name = config.name or tier_type
        if isinstance(config, NfsTierConfig) and (problem := missing_mount(config.root_dir)):
            logger.warning("tier %s: root_dir: %s", name, problem)
        policy = config.capacity_policy() if isinstance(config, BoundedTierConfig) else None
        if policy is not None:
            policy = replace(policy, block_bytes=Rows(primary_kv_view).row_bytes + TRAILER_BYTES)
            _check_room(name, policy)
        mapper = FileMapper.from_offloading_spec(
            getattr(config, "root_dir", ""),
            offloading_spec,
            parallel_agnostic=config.parallel_agnostic,
            extra_fields=strict_fields(offloading_spec) | _protection_fields(config),
        )
        start = partial(
            super().__init__, offloading_spec, primary_kv_view, tier_type, mapper=mapper, options=_tier_options(config)
        )
        region, why_here = _map_region(name, config, primary_kv_view)
        if region is not None:
            try:
                start(make_backend=partial(_processes, config, region))
            except (OSError, RuntimeError) as e:  # no process can be started, or every process has ended
                region.close()
                region, why_here = None, _why_threads(name, config, f"no process can be started: {e}", logger.warning)
        if region is None:
            make_store, arguments = store_recipe(config)
            start(make_backend=partial(_threads, config, make_store(**arguments)))
        try:
            if not self.capabilities.shared:
                check_needs_no_sharing(policy, in_processes=not why_here)
            if policy is not None:
                self.collect(_start_collector(name, config, policy, mapper))
        except BaseException:
            self.shutdown()
            raise
        if policy is not None and policy.max_bytes is not None:
            self.metrics.set("kvtiers_storage_max_bytes", self.name, value=policy.max_bytes)
        self.metrics.set("kvtiers_build_info", version(), value=1)
        most = _threads_max(config) if why_here else sys.maxsize
        logger.info(
            "tier %s: %s: %s, namespace %s, rank %d, %d read and %d write threads in %s%s, kvtiers %s. "
            "A stored block has %s tokens: shorter prompts are not stored",
            name,
            "started" if self.missing is None else "waits for its storage",
            shown_place(config),
            mapper.base_path.rpartition("/")[2],
            mapper.rank,
            min(most, config.n_read_threads),
            min(most, config.n_write_threads),
            "this process" if why_here else "processes of its own",
            ", read only" if isinstance(config, BoundedTierConfig) and config.read_only else "",
            version(),
            mapper.block_tokens,
        )


def make_seal(config: TierConfig) -> Callable[..., Seal]:
    """Return a function that creates the seals of a built-in tier; it takes the arguments of ``Seal``.

    Raises:
        ConfigError: the keys cannot be read, or cryptography is not installed.
    """
    keys = _keys(config)
    if keys is None:
        return Seal
    from .blocks.protected_seal import GcmSeal

    return partial(GcmSeal, keys=keys)


def _keys(config: TierConfig) -> KeyRing | None:
    return None if config.encrypt == "none" else load_keys(keys_file=config.keys_file, keys_env=config.keys_env)


def _protection_fields(config: TierConfig) -> dict[str, str]:
    """Name a separate namespace for protected blocks, so that replicas with and without keys do not interfere."""
    return {} if config.encrypt == "none" else {"protection": config.encrypt}


def check_needs_no_sharing(policy: CapacityPolicy | None, *, in_processes: bool) -> None:
    """Reject options that need several processes, for a store whose blobs only the process that puts them sees.

    Raises:
        ConfigError: names the field.
    """
    wanted = {"isolation": in_processes, "max_bytes": policy and policy.max_bytes, "ttl": policy and policy.ttl_s}
    for field, value in wanted.items():
        if value:
            accepted = "write thread" if field == "isolation" else "leave it out"
            raise ConfigError(
                f"needs other processes, but only the process that puts a blob into this store sees it; {accepted}",
                field=field,
            )


def _map_region(name: str, config: TierConfig, view: memoryview) -> tuple[MappedRegion | None, str]:
    """Map the region for the tier's processes. None and a reason: the servers are threads of this process.

    Raises:
        ConfigError: ``isolation: process`` is set, but other processes cannot map the region.
    """
    if config.isolation == "thread":
        return None, "isolation: thread"
    try:
        return MappedRegion(view), ""
    except (OSError, RegionError) as e:
        return None, _why_threads(name, config, f"other processes cannot map the region: {e}", logger.info)


def _why_threads(name: str, config: TierConfig, why: str, log: Callable[..., None]) -> str:
    """Log and return why the tier's servers are threads of this process, although ``isolation`` is not thread.

    Raises:
        ConfigError: ``isolation: process`` is set.
    """
    if config.isolation == "process":
        raise ConfigError(
            f"{why}. The interpreter is {sys.executable!r}. To use threads instead, write thread",
            field="isolation",
        )
    log("tier %s: isolation: auto uses threads of this process: %s", name, why)
    return f"isolation: {config.isolation}, and {why}"


def _processes(config: TierConfig, region: MappedRegion, work: Work, rows: Rows) -> ProcessBackend:
    """Make the backend that starts the tier's processes. Half of them prefer loads, the others stores."""
    make_store, store_options = store_recipe(config)
    readers = max(1, config.children // 2)
    writers = config.children - readers
    most = config.n_read_threads + config.n_write_threads
    if isinstance(config, NetworkTierConfig):
        most = max(1, AT_ONCE_BYTES_MAX // rows.row_bytes)
    reads = min(most, -(-config.n_read_threads // readers))
    writes = min(most, -(-config.n_write_threads // max(1, writers)))
    if not writers:
        seats = [Seats(2, LOAD_ONLY_THREADS, reads, writes)]
    else:
        seats = [Seats(1, LOAD_ONLY_THREADS, reads, 0)] * readers + [Seats(1, 0, 0, writes)] * writers
    return ProcessBackend(
        StoreRecipe.of(make_store, **store_options),
        region,
        rows.row_bytes,
        work,
        seats,
        _worker_bytes_max(config, max(reads, writes) + 1, rows.row_bytes),
    )


def _threads(config: TierConfig, store: Store, work: Work, rows: Rows) -> ThreadBackend:
    """Make the backend that starts the tier's server in threads of this process."""
    most = _threads_max(config)
    seats = Seats(2, LOAD_ONLY_THREADS, min(most, config.n_read_threads), min(most, config.n_write_threads))
    return ThreadBackend(store, rows, work, seats)


def _threads_max(config: TierConfig) -> int:
    """Largest number of threads of each kind for a server in this process."""
    return ENGINE_REQUESTS_MAX if isinstance(config, NetworkTierConfig) else sys.maxsize


def _worker_bytes_max(config: TierConfig, threads: int, row_bytes: int) -> int | None:
    """Memory that a process may allocate after its start; None: no limit, because it does not talk to a server."""
    if not isinstance(config, NetworkTierConfig):
        return None
    copies = FSSPEC_COPIES if isinstance(config, FsspecTierConfig) else 0
    copies += config.encrypt == "aes-gcm"  # a block is encrypted into its thread's buffer
    return WORKER_BYTES + copies * threads * row_bytes


def _check_room(name: str, policy: CapacityPolicy) -> None:
    """Check that ``max_bytes`` has room for blocks. Checked here because only the engine knows the size of a block.

    Raises:
        ConfigError: there is room for so few blocks that hardly any stored block would be found again.
    """
    least = BLOCKS_OF_BOUND_MIN * policy.block_bytes
    if policy.max_bytes is not None and policy.max_bytes < least:
        raise ConfigError(
            f"{policy.max_bytes} bytes do not hold {BLOCKS_OF_BOUND_MIN} blocks of {policy.block_bytes} bytes; write "
            f"at least {least}",
            field=f"tier {name}: max_bytes",
        )


def key_ids(config: TierConfig) -> frozenset[str] | None:
    """The ids of a tier's keys, as commands show them. None if this user cannot read the keys.

    A tier without keys has no ids.
    """
    try:
        keys = _keys(config)
    except ConfigError:
        return None
    return frozenset() if keys is None else frozenset(map(show_key_id, keys.ids))


def _start_collector(name: str, config: TierConfig, policy: CapacityPolicy, mapper: FileMapper) -> CollectorLink:
    make_store, store_options = tool_recipe(config)
    return CollectorLink(
        name,
        StoreRecipe.of(make_store, **store_options),
        policy,
        mapper,
        # A function creates its store in the collector's process, which ignores uses that the store cannot record.
        notes_uses=not isinstance(make_store, type) or issubclass(make_store, SupportsTouch),
    )


def _tier_options(config: TierConfig) -> TierOptions:
    return TierOptions(
        name=config.name,
        make_seal=make_seal(config),
        read_only=isinstance(config, BoundedTierConfig) and config.read_only,
        load=config.load,
        job_deadline_s=config.job_deadline_s,
        lookup=LookupOptions(
            deadline_s=config.lookup_deadline_s,
            total_s=max(TOTAL_S, config.lookup_deadline_s),
            absent_ttl_s=config.absent_ttl_s,
        ),
    )
