"""The collector's process: a separate interpreter at low priority, so that a listing never holds the engine's GIL.

The process is a child of the engine (``tiers.child_process``). Both exchange frames (``tiers.frames``). The engine
sends ``[put, was_refused]``, with the keys of blocks that were used:

- ``put``: bytes that the engine has put since the last frame; null: no bytes
- ``was_refused``: the storage refused a block because it is full

The process sends ``[counted, since, full, report, error]``, with the keys of removed blocks. Each key has the index of
its reason in ``REMOVAL_REASONS``. Null: no news.

- ``counted``: how many of the engine's put bytes were counted since the last frame
- ``since``: monotonic seconds; the blocks were removed since then
- ``full``: after a successful poll, why the engine must stop putting blocks; "": it may go on
- ``report``: ``{"report": {…}, "used": bytes, "runs": polls}``, after polls in which this collector worked; "used" is
  null until it is known
- ``error``: ``{"error": "…", "runs": polls}``. If the frame also has ``full``, a later poll succeeded

A frame without news is a sign of life. While the storage answers, a frame is sent at least every ``ALIVE_EVERY_S``.

The process ends when the connection or the engine ends, or on SIGTERM. It may end in the middle of a walk, because an
unfinished walk leaves nothing to repair.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, Final

from ..blocks.file_mapper import FileMapper
from ..blocks.keys import OffloadKey
from ..child_process import connect_to_engine, receive
from ..errors import StoreError
from ..frames import pack_frame, pack_pairs, unpack_pairs
from ..plain_logs import get_logger
from ..processes import end_if_forked, limit_memory
from ..recipe import make_store
from ..store import Store, SupportsTouch
from .collector import Collector
from .policy import LAG_S, REMOVAL_REASONS, CapacityPolicy
from .walker import CollectReport

logger = get_logger(__name__)

NICENESS: Final = 10  # like the tier's processes, so that the collector keeps up with their puts
USES_MAX: Final = 262_144  # uses that are not recorded yet; older uses are dropped
#: Time limit to record uses in one go. A poll of about STEP_S follows. Both together must take less than LAG_S, because
#: an engine whose puts are not counted for LAG_S stops putting blocks.
NOTE_S_MAX: Final = LAG_S / 4
ERROR_PAUSE_S_MAX: Final = 60.0
ALIVE_EVERY_S: Final = 5.0
EXIT_S: Final = 0.3
MEMORY_BYTES_MAX: Final = 2 << 30  # whatever a server answers; queued uses take a tenth of it
REMOVED_KEYS_MAX: Final = 65_536  # removals not reported to the engine yet; older removals are dropped
REMOVED_KEYS_A_FRAME: Final = 1024


def main() -> None:
    """Collect until the connection ends."""
    sock, tag, parent, config = connect_to_engine("kvtiers-collector", NICENESS)
    limit_memory(MEMORY_BYTES_MAX)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # SystemExit lets the collector give up
    mapper = FileMapper.from_json(config["mapper"])
    news = News(sock, tag, mapper)
    inbox: SimpleQueue[tuple[int | None, bool]] = SimpleQueue()
    uses: deque[OffloadKey] = deque(maxlen=USES_MAX)
    listening = (sock, tag, parent, inbox, uses)
    threading.Thread(target=_listen, args=listening, name="kvtiers-listen", daemon=True).start()
    policy = CapacityPolicy(**config["policy"])
    store: Store | None = None
    collector: Collector | None = None
    error_pause_s = 0.0
    put_bytes = 0  # bytes that the engine put and no poll has counted
    try:
        while True:
            pause_s = policy.poll_s
            try:
                if store is None or collector is None:
                    store = make_store(config)
                    collector = Collector(store, policy, on_removed=news.add_removed, owner=config["owner"])
                while not inbox.empty():
                    put, was_refused = inbox.get()
                    if put is not None:
                        collector.note_put(put)
                        put_bytes += put
                    if was_refused:
                        collector.note_refused()
                _note_uses(store, mapper, uses, NOTE_S_MAX)
                news.poll_began_at = time.monotonic()
                report = collector.poll()
                used = report.bytes if report and collector.knows_bytes else None
                news.add_poll(report, used, collector.full, put_bytes)
                put_bytes = 0
                error_pause_s = 0.0
                if collector.is_urgent:
                    pause_s = 0.0
            except StoreError as e:
                news.add_error(f"{type(e).__name__}: {e}")
                pause_s = error_pause_s = min(ERROR_PAUSE_S_MAX, max(1.0, 2 * error_pause_s))
            until = time.monotonic() + pause_s
            news.send()
            while (left_s := until - time.monotonic()) > 0:
                time.sleep(min(left_s, ALIVE_EVERY_S))
                news.send()
    finally:  # SIGTERM
        if collector is not None:
            with suppress(StoreError):
                collector.release()


class News:
    """Collects the news for the engine. Its size is bounded: an engine without requests may read nothing for a week.

    Attributes:
        poll_began_at: monotonic seconds.
    """

    def __init__(self, sock: socket.socket, tag: bytes, mapper: FileMapper) -> None:
        self._sock = sock
        self._tag = tag
        self._mapper = mapper
        self._pid = os.getpid()
        self._out = b""  # the unsent rest of a frame
        self._told_at = -math.inf
        self._told_full: str | None = None
        self._counted = 0
        self._removed: deque[tuple[OffloadKey, int]] = deque(maxlen=REMOVED_KEYS_MAX)
        self._since = 0.0
        self._full: str | None = None
        self._report: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None
        self.poll_began_at = 0.0

    def add_removed(self, names: Iterable[str], reason: str) -> None:
        """Add the removed blobs that are the engine's own blocks, and send at once, because a poll may take long."""
        if not self._removed:
            self._since = self.poll_began_at
        place = REMOVAL_REASONS.index(reason)
        self._removed.extend((key, place) for key in map(self._mapper.key_of, names) if key is not None)
        self.send()

    def add_poll(self, report: CollectReport | None, used: int | None, full: str, counted: int) -> None:
        """Add a poll that succeeded.

        Args:
            report: None: this collector did not work in the poll.
            counted: bytes that the engine put and that the poll counted.
        """
        self._full = full
        self._counted += counted
        if report is None:
            return
        told, before = asdict(report), self._report
        self._report = {"report": told, "used": used, "runs": 1}
        if before is not None:
            self._report["runs"] += before["runs"]
            for name in ("removed_blobs", "removed_bytes"):
                for reason, count in before["report"][name].items():
                    told[name][reason] += count

    def add_error(self, text: str) -> None:
        """Add a poll that failed."""
        self._full = self._told_full = None
        self._error = {"error": text, "runs": 1 + (self._error["runs"] if self._error else 0)}

    def send(self) -> None:
        """Send the news, or a sign of life. Does not wait: if the socket is full, the news is sent later, merged."""
        end_if_forked(self._pid)
        try:
            while self._out or self._is_due():
                self._out = self._out or self._frame()
                self._out = self._out[self._sock.send(self._out, socket.MSG_DONTWAIT) :]
        except OSError:
            pass  # the socket is full, or the engine has ended, which the listening thread notices

    def _is_due(self) -> bool:
        is_new = self._counted or self._removed or self._report or self._error or self._full != self._told_full
        return bool(is_new) or time.monotonic() - self._told_at >= ALIVE_EVERY_S

    def _frame(self) -> bytes:
        content = self._counted, self._since, self._full, self._report, self._error
        self._told_at, self._told_full = time.monotonic(), self._full
        self._counted, self._report, self._error = 0, None, None
        count = min(REMOVED_KEYS_A_FRAME, len(self._removed))
        return pack_frame(self._tag, content, pack_pairs([self._removed.popleft() for _ in range(count)]))


def _note_uses(store: Store, mapper: FileMapper, uses: deque[OffloadKey], limit_s: float) -> None:
    """Record queued uses for at most ``limit_s``, because uses may come faster than a network takes them."""
    until = time.monotonic() + limit_s
    while uses and time.monotonic() < until:
        name = mapper.relative_name(uses.popleft())
        try:
            if isinstance(store, SupportsTouch):
                store.touch(name)
        except StoreError as e:
            logger.debug("the use of a block was not recorded: %s", e)


def _listen(
    sock: socket.socket, tag: bytes, parent: int, inbox: SimpleQueue[tuple[int | None, bool]], uses: deque[OffloadKey]
) -> None:
    """Receive the engine's frames until it hangs up or ends. Then end this process, even in the middle of a call."""
    with suppress(EOFError, OSError):
        for frames in receive(sock, tag, [parent]):
            for content, raw in frames:
                uses.extend(key for key, _ in unpack_pairs(raw))
                if content != [None, False]:
                    inbox.put(content)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_S)
    os._exit(0)  # the main thread hangs in a call and cannot be ended otherwise
