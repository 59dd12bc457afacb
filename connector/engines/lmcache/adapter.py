"""KVTiersL2Adapter: an L2 adapter of LMCache's server, over tiers of kvtiers.

LMCache submits tasks and polls an event descriptor for the end of a task. kvtiers' own threads run the tasks. One
server may serve several models and kinds of layers, so each model and layout has its own tier, opened at its first use.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from ....tiers.blocks.keys import OffloadKey, make_offload_key
from ....tiers.daemon_pool import DaemonPool
from ....tiers.errors import ConfigError, KVTiersError
from ....tiers.metrics import Metrics
from ....tiers.plain_logs import get_logger
from ...base import CacheConfig, ModelConfig, OffloadingConfig
from ..door import Door, check_options, counted_revision, serve_metrics, weights_digest
from ..release import Release

logger = get_logger(__name__)

THREADS = 2  # for each kind of task; a tier does its I/O in processes
DOORS_MAX = 16  # models and layouts; each has a tier
OPEN_AGAIN_S = 60.0  # after a tier could not be opened
CLOSE_S = 5.0

#: The parts of a block: each shape with its type.
Layout = tuple[tuple[tuple[int, ...], str], ...]

_API = "lmcache.v1.distributed"
RELEASE = Release(
    "lmcache",
    tested=("0.5.6",),
    used={
        "lmcache.lmcache_native:Bitmap": ["batched_set"],
        f"{_API}.api:MemoryLayoutDesc": ["shapes", "dtypes"],
        f"{_API}.api:ObjectKey": ["chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"],
        f"{_API}.internal_api": ["L2StoreResult(_, _)"],
        f"{_API}.l2_adapters.base:L2AdapterInterface": ["_notify_keys_stored(_, _)", "_notify_keys_accessed(_)"],
        "lmcache.v1.memory_management:MemoryObj": [
            "byte_array", "get_shapes()", "get_dtypes()", "get_shape()", "get_dtype()", "get_size()",
        ],
        "lmcache.v1.platform": ["create_event_notifier()"],
    },
    own=("__init__",),  # a plug-in's own
)  # fmt: skip


class KVTiersL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not installed where mypy runs
    """Keeps objects in tiers. Any thread may call. Only ``close`` waits.

    Args:
        config: ``adapter_params``: kvtiers' options, and ``revision``.

    Raises:
        ConfigError: names the wrong option, or the name that this LMCache lacks.
    """

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None) -> None:  # noqa: ARG002
        RELEASE.check(KVTiersL2Adapter)
        super().__init__()
        check_options(config, ("revision",))
        self._options = dict(config)
        self._metrics = Metrics()  # shared by all tiers; each tier writes only series with its own name
        self._server = serve_metrics(config, self._metrics)
        self._lock = threading.Lock()  # guards the fields below
        self._doors: dict[tuple[str, Layout], tuple[Door | None, float]] = {}  # -> door, and when to try again
        self._opening = threading.Lock()
        self._next_id = 0
        self._stored: dict[L2TaskId, L2StoreResult] = {}
        self._looked: dict[L2TaskId, Bitmap] = {}
        self._loaded: dict[L2TaskId, Bitmap] = {}
        self._is_closed = False
        self._pools = {kind: DaemonPool(THREADS, f"kvtiers-lmcache-{kind}") for kind in ("store", "look", "load")}
        self._events = {kind: create_event_notifier() for kind in self._pools}

    def get_store_event_fd(self) -> int:
        return int(self._events["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events["look"].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events["load"].fileno())

    # ---- store -----------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        return self._submit("store", lambda: self._store(keys, objects), self._stored, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        with self._lock:
            stored = dict(self._stored)
            self._stored.clear()
        return stored

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        ok, new = True, []
        for door, places in self._by_door(keys, list(map(_layout_of_object, objects))):
            if door is None:
                ok = False
                continue
            # LMCache offers loaded objects again. Objects that the tier has need no copy, and must not count as new.
            is_there = door.exists([_key(keys[place]) for place in places])
            places = [place for place, found in zip(places, is_there, strict=True) if not found]
            done = door.store([_key(keys[place]) for place in places], [_pieces(objects[place]) for place in places])
            ok = ok and all(done)
            new += [place for place, is_stored in zip(places, done, strict=True) if is_stored]
        sizes = [int(objects[place].get_size()) for place in new]
        if new:
            self._notify_keys_stored([keys[place] for place in new], sizes)
        return L2StoreResult(ok, sum(sizes))

    # ---- lookup ----------------------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        """Look up which objects are stored.

        Instead of being locked, the objects that are found count as just used. So a tier with ``max_bytes`` removes
        other objects first.
        """
        return self._submit("look", lambda: self._look(keys, group_layout_descs), self._looked, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        with self._lock:
            return self._looked.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is locked: an object that is removed before it is loaded is a miss."""

    def _look(self, keys: list[ObjectKey], descriptions: Mapping[int, MemoryLayoutDesc]) -> Bitmap:
        layouts = {group: layout_of(each.shapes, each.dtypes) for group, each in descriptions.items()}
        bitmap = Bitmap(len(keys))
        for door, places in self._by_door(keys, [layouts.get(key.object_group_id, ()) for key in keys]):
            if door is not None:
                names = [_key(keys[place]) for place in places]
                found = door.exists(names)
                bitmap.batched_set([place for place, is_there in zip(places, found, strict=True) if is_there])
                door.tier.touch([name for name, is_there in zip(names, found, strict=True) if is_there])
        return bitmap

    # ---- load ------------------------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        return self._submit("load", lambda: self._load(keys, objects), self._loaded, Bitmap(len(keys)))

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        with self._lock:
            return self._loaded.pop(task_id, None)

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        bitmap = Bitmap(len(keys))
        for door, places in self._by_door(keys, list(map(_layout_of_object, objects))):
            if door is not None:
                done = door.load([_key(keys[place]) for place in places], [_pieces(objects[place]) for place in places])
                loaded = [place for place, is_loaded in zip(places, done, strict=True) if is_loaded]
                bitmap.batched_set(loaded)
                self._notify_keys_accessed([keys[place] for place in loaded])
        return bitmap

    # ---- tasks and tiers -------------------------------------------------------------------------------------------

    def _submit(self, kind: str, call: Callable[[], Any], results: dict[L2TaskId, Any], failed: Any) -> L2TaskId:
        with self._lock:
            task_id = self._next_id
            self._next_id += 1

        def run() -> None:
            result = failed
            try:
                result = call()
            except Exception:  # a task's edge: LMCache waits for its result
                logger.exception("a %s task failed", kind)
            with self._lock:
                if not self._is_closed:
                    results[task_id] = result
                    self._events[kind].notify()

        self._pools[kind].submit(run)
        return task_id

    def _by_door(self, keys: Sequence[ObjectKey], layouts: Sequence[Layout]) -> Iterator[tuple[Door | None, list[int]]]:
        """Sort objects by their tiers: a tier, and the objects' indices. None: these objects have no tier."""
        places: dict[tuple[str, Layout], list[int]] = defaultdict(list)
        for place, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            places[key.model_name, layout].append(place)
        for (model, layout), found in places.items():
            yield self._door(model, layout), found

    def _door(self, model: str, layout: Layout) -> Door | None:
        with self._opening:
            door, again_at = self._doors.get((model, layout), (None, 0.0))
            if door is not None or self._is_closed or time.monotonic() < again_at:
                return door
            try:
                door = self._open(model, layout)
            except (KVTiersError, OSError) as e:
                logger.error("objects of %s with the layout %s are neither stored nor loaded: %s", model, layout, e)
            with self._lock:
                self._doors[model, layout] = door, time.monotonic() + OPEN_AGAIN_S
            return door

    def _open(self, model: str, layout: Layout) -> Door:
        if not layout or (len(layout) == 1 and len(layout[0][0]) == 1 and layout[0][1] == "uint8"):
            raise ConfigError("LMCache gives no layout, or serialized bytes; leave serde out", field="serde")
        number = sum(door is not None for door, _ in self._doors.values())
        if number >= DOORS_MAX:
            raise ConfigError(f"{DOORS_MAX} models and layouts are open; start another server", field="model")
        weights = self._options.get("revision") or weights_digest(model, None)
        if weights is None:
            text = f"is missing, and {model} is neither a folder nor in the hub cache here; write a text that"
            raise ConfigError(f"{text} differs for other weights and options, such as the commit", field="revision")
        options = {"lmcache": RELEASE.version, "layout": str(layout)}
        shape = layout[0][0]
        config = OffloadingConfig(
            model=ModelConfig(model, layout[0][1], counted_revision(str(weights), options)),
            cache=CacheConfig(max(1, shape[-2]) if len(shape) > 1 else 1, hash_algorithm="lmcache"),
            inference_engine="lmcache",
            engine=options,
        )
        return Door(config, self._options, sum(map(_part_bytes, layout)), self._metrics, str(number))

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            doors = [door for door, _ in self._doors.values()]
        open_ = [door for door in doors if door is not None]
        return {
            "is_healthy": not self._is_closed and len(open_) == len(doors) and all(door.is_up for door in open_),
            "type": type(self).__name__,
            "tiers": len(open_),
        }

    def close(self) -> None:
        with self._opening, self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            doors = [door for door, _ in self._doors.values() if door is not None]
        if self._server is not None:
            self._server.close()
        # All at once: each may take its tier's shutdown_s.
        closing = [threading.Thread(target=door.close, name="kvtiers-lmcache-close") for door in doors]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        for pool in self._pools.values():
            pool.shutdown(CLOSE_S)
        for event in self._events.values():
            event.close()


def layout_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> Layout:
    """A layout as a plain value."""
    return tuple((tuple(shape), str(dtype).removeprefix("torch.")) for shape, dtype in zip(shapes, dtypes, strict=True))


def _layout_of_object(obj: MemoryObj) -> Layout:
    try:
        return layout_of(obj.get_shapes(), obj.get_dtypes())
    except AssertionError:  # an object of one part need not list its parts
        return layout_of([obj.get_shape()], [obj.get_dtype()])


def _part_bytes(part: tuple[tuple[int, ...], str]) -> int:
    return math.prod(part[0]) * int(getattr(torch, part[1]).itemsize)


def _key(key: ObjectKey) -> OffloadKey:
    """All fields of a key but the model's name, which the namespace has."""
    salt = key.cache_salt.encode()
    head = f"{key.kv_rank} {key.object_group_id} {len(salt)} ".encode()
    return make_offload_key(hashlib.sha256(head + salt + key.chunk_hash).digest(), key.object_group_id)


def _pieces(obj: MemoryObj) -> list[memoryview]:
    return [memoryview(obj.byte_array).cast("B")]
