"""PrefixWorker: loads prefixes from PrefixStores into an engine's paged buffers, and saves prefixes to PrefixStores.

Loads and publications run on threads. The engine's thread starts them, polls their ends, and copies the KV to save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch

from ...tiers.daemon_pool import DaemonPool
from ...tiers.errors import KVTiersError, StoreTimeoutError
from ...tiers.plain_logs import get_logger
from ..transfer.gpu_copy import submitted_so_far
from .paged_buffer import ShapeError, extract_slots, inject_slots, token_pages
from .requests import Transfer
from .store import PrefixStore

logger = get_logger(__name__)

IDLE_WAIT_S = 0.001
SAVE_BYTES_MAX = 4 << 30  # of copies that wait to be published; on CUDA torch pins such memory, and keeps it
SAY_EVERY_S = 60.0


class Load:
    """A load under way. Its thread writes into the paged buffers, but never after the load was given up.

    Hung storage may block a thread forever, but a request must not wait for the thread. When the thread finally reads
    its bytes, their target blocks may belong to another request, so they must not be written.

    Attributes:
        blocks: ids of the blocks that the load fills.
        late_at: when to give up the load, on ``time.monotonic``.
        future: future of the loading call; set by the code that submits the call.
    """

    future: Future[None]

    def __init__(self, blocks: list[int], late_at: float) -> None:
        self.blocks = blocks
        self.late_at = late_at
        self._given_up = False
        self._writing = threading.Lock()

    def write(self, call: Callable[[], None]) -> None:
        """Run ``call``, which writes the blocks. It must only touch memory: ``give_up`` waits until it has ended.

        Raises:
            KVTiersError: the load was given up.
        """
        with self._writing:
            if self._given_up:
                raise KVTiersError("the load was given up")
            call()

    def give_up(self) -> bool:
        """Give up the load: its thread writes nothing after this call. Returns whether the load had begun."""
        had_begun = not self.future.cancel()
        with self._writing:
            self._given_up = True
        return had_begun


class PrefixWorker:
    """Loads and saves of one worker. Only the engine's thread may call it.

    Args:
        pool: threads for loads; the caller shuts it down.
        num_blocks: blocks in each paged buffer.
        block_size: tokens of one block.
        load_deadline_s: seconds after which a load is given up.

    Attributes:
        dropped_blocks: blocks not saved because ``SAVE_BYTES_MAX`` were already waiting to be published.
        loads_failed: failed loads, with those that were given up or dropped.
    """

    def __init__(self, pool: DaemonPool, num_blocks: int, block_size: int, load_deadline_s: float) -> None:
        self.dropped_blocks = 0
        self.loads_failed = 0
        self._pool = pool
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._load_deadline_s = load_deadline_s
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._token_bytes = 0  # of one token, in all layers
        self._cuda: torch.device | None = None
        self._loading: dict[str, Load] = {}
        self._failed_blocks: set[int] = set()
        self._save_pool = DaemonPool(1, "kvtiers-prefix-save")  # a pool of its own, so that saves never delay loads
        self._saving: dict[Future[Any], int] = {}
        self._not_stored = 0  # since the last warning about it
        self._warn_at = float("-inf")

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Set the paged buffers: layer name -> buffer.

        Raises:
            ConfigError: a buffer has an unknown layout.
        """
        for tensor in kv_caches.values():
            self._pages(tensor)
        self._kv_caches = kv_caches
        self._token_bytes = sum(tensor.nbytes for tensor in kv_caches.values()) // (self._num_blocks * self._block_size)
        self._cuda = next((tensor.device for tensor in kv_caches.values() if tensor.is_cuda), None)

    def load(self, store: PrefixStore, transfer: Transfer) -> None:
        """Begin a load."""
        blocks = (transfer.slot_mapping[:: self._block_size] // self._block_size).tolist()
        load = Load(blocks, time.monotonic() + self._load_deadline_s)
        # The load must come after work already submitted: the model may still read these blocks, or zero them.
        submitted = None if self._cuda is None else submitted_so_far(self._cuda)
        if self._pool.hangs(self._load_deadline_s):  # the load would only wait until its deadline
            load.future = _failed(StoreTimeoutError("all threads hang in loads that were given up"))
        else:
            load.future = self._pool.submit(self._load_on_device, store, transfer, load, submitted)
        self._loading[transfer.req_id] = load

    def ended(self, *, idle: bool) -> set[str]:
        """Return requests whose loads ended or failed since the last call. ``idle``: the engine has no other work."""
        if self._loading and idle:
            # vLLM keeps stepping while requests wait. Without a pause it would keep the GIL from the loading threads.
            wait([load.future for load in self._loading.values()], IDLE_WAIT_S, FIRST_COMPLETED)
        done = {req_id for req_id, load in self._loading.items() if load.future.done()}
        late = {req_id for req_id, load in self._loading.items() if time.monotonic() >= load.late_at} - done
        for req_id in done | late:
            load = self._loading.pop(req_id)
            error: object = load.future.exception() if req_id in done else self._give_up(load)
            if error is not None:
                logger.warning("request %s: its prefix was not loaded and is computed: %s", req_id, error)
                self._failed_blocks.update(load.blocks)
                self.loads_failed += 1
        for saved in [future for future in self._saving if future.done()]:
            del self._saving[saved]
            if saved.exception() is not None:
                self._warn_not_stored(saved.exception())
        return done | late

    def drop_loads(self) -> None:
        """Fail all loads that are under way or not reported yet: after a reset, their KV belongs to another model."""
        for load in self._loading.values():
            self._stop(load)
            load.future = _failed(KVTiersError("the engine's caches were reset"))

    def failed_blocks(self) -> set[int]:
        """Return the ids of blocks whose loads failed since the last call. Their content is not usable."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def publish(self, store: PrefixStore, stores: Sequence[Transfer]) -> None:
        """Copy the KV of a step's ``stores``, now that it is computed, and hand it to the publishing thread.

        On CUDA the copies are submitted to the model's stream, between this step and the next, and not waited for.
        """
        for transfer in stores:
            size_bytes = len(transfer.slot_mapping) * self._token_bytes
            if sum(self._saving.values()) + size_bytes > SAVE_BYTES_MAX:
                self.dropped_blocks += len(transfer.hashes)
                continue
            slots, copied = transfer.slot_mapping, None
            if self._cuda is not None:
                slots = slots.pin_memory().to(self._cuda, non_blocking=True)
            try:
                layers = {layer: extract_slots(self._pages(tensor), slots) for layer, tensor in self._kv_caches.items()}
            except RuntimeError as e:  # on CUDA: no more memory can be pinned
                self.dropped_blocks += len(transfer.hashes)
                self._warn_not_stored(e)
                continue
            if self._cuda is not None:
                copied = submitted_so_far(self._cuda)
            job = self._save_pool.submit(_publish, store, transfer.hashes, layers, copied)
            self._saving[job] = size_bytes

    def shutdown(self, publish_s: float, threads_end_s: float) -> None:
        """Wait ``publish_s`` for loads and saves, then ``threads_end_s`` for the saving thread. Give up the rest."""
        loads = [load.future for load in self._loading.values()]
        _, late = wait([*self._saving, *loads], timeout=publish_s)
        for load in self._loading.values():
            load.give_up()
        self._save_pool.shutdown(threads_end_s)
        lost = len(late & self._saving.keys())
        if lost or self.dropped_blocks:
            logger.warning(
                "%d prefixes were not stored when the engine ended, %d blocks before", lost, self.dropped_blocks
            )

    def _warn_not_stored(self, error: object) -> None:
        """Warn at most once a minute: when there is no room, every save fails."""
        self._not_stored += 1
        if time.monotonic() >= self._warn_at:
            logger.warning("%d prefixes were not stored; the last one: %s", self._not_stored, error)
            self._not_stored = 0
            self._warn_at = time.monotonic() + SAY_EVERY_S

    def _give_up(self, load: Load) -> str:
        had_begun = self._stop(load)
        what = "with its wait in line storage took longer than" if had_begun else "it waited in line behind others for"
        return f"{what} load_deadline_s, {self._load_deadline_s:g} s"

    def _stop(self, load: Load) -> bool:
        """Give up a load. Returns whether it had begun."""
        had_begun = load.give_up()
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)  # earlier writes of the load may still be on their way
        return had_begun

    def _load_on_device(
        self, store: PrefixStore, transfer: Transfer, load: Load, submitted: torch.cuda.Event | None
    ) -> None:
        # A new thread starts on device 0. A worker of another device has no buffers there, and no memory to spare.
        with nullcontext() if self._cuda is None else torch.cuda.device(self._cuda):
            try:
                if submitted is not None:  # the model may run on another stream than this thread
                    torch.cuda.current_stream(self._cuda).wait_event(submitted)
                self._load(store, transfer, load)
            finally:  # after a failed load, too: no write may land in blocks that are computed again
                if self._cuda is not None:
                    torch.cuda.current_stream(self._cuda).synchronize()

    def _load(self, store: PrefixStore, transfer: Transfer, load: Load) -> None:
        size = self._block_size
        block_bytes_max = max((layer.nbytes // self._num_blocks for layer in self._kv_caches.values()), default=0)
        position, last = 0, len(transfer.hashes)
        wanted = []
        for chunk in store.match(transfer.hashes):
            begin, position = position, position + chunk.blocks
            if position > transfer.first_block:
                wanted.append((begin, chunk))
        manifests = store.manifests([chunk for _, chunk in wanted])
        for (begin, chunk), manifest in zip(wanted, manifests, strict=True):
            end = begin + chunk.blocks
            skip = max(0, transfer.first_block - begin)
            start = begin + skip - transfer.first_block
            slots = transfer.slot_mapping[start * size : (end - transfer.first_block) * size]
            missing = set(self._kv_caches)
            manifest = cache(manifest)
            try:
                hashes = transfer.hashes[begin:end]
                for layer, tensor in store.load(chunk, hashes, manifest, block_bytes_max=block_bytes_max):
                    if layer in missing:
                        missing.discard(layer)
                        values = tensor[skip * size : chunk.blocks * size]
                        load.write(partial(inject_slots, self._pages(self._kv_caches[layer]), slots, values))
                if missing:
                    raise ShapeError(f"{chunk.path} lacks the layers {sorted(missing)}")
            except ShapeError as e:
                logger.warning("a prefix chunk of another engine does not fit this engine, and is removed: %s", e)
                store.discard(chunk, manifest)
                raise
        if position < last:
            raise KVTiersError(f"{last - position} blocks that the lookup found are gone")

    def _pages(self, layer: torch.Tensor) -> torch.Tensor:
        return token_pages(layer, self._num_blocks, self._block_size)


def _publish(
    store: PrefixStore, hashes: Sequence[bytes], layers: dict[str, torch.Tensor], copied: torch.cuda.Event | None
) -> None:
    if copied is not None:
        copied.synchronize()
    store.publish(hashes, layers)


def _failed(error: Exception) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(error)
    return future
