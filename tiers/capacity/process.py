"""The collector's process: a separate interpreter at lowest priority, so that a listing never holds the engine's GIL.

It reads JSON lines from standard input: first its configuration, then

- ``[names]``: blocks that were used
- ``{"put": bytes}``: what the engine has put since the last such line
- ``{"refused": true}``: the storage refused a block because it is full

It writes JSON lines:

- ``{"removed": [names], "since": monotonic seconds}``: removed since then
- ``{"noted": count}``: so many uses are recorded, in the order in which they came
- ``{"report": {…}, "used": bytes, "full": "why"}``: after a poll in which it worked; "used" is null until it is known
- ``{"full": "why"}``: whether the engine must stop to put, after a poll that only asked
- ``{"error": "…"}``
- ``{}``: a sign of life, at least every ``ALIVE_EVERY_S`` while its storage answers

It exits on SIGTERM, at the end of its input, and when its parent dies, even in the middle of a walk: that leaves
nothing to repair.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TextIO

from ..errors import StoreError
from ..plain_logs import get_logger
from ..processes import die_with_parent, end_if_forked, limit_memory, log_to_stderr, own_output
from ..recipe import make_store
from ..store import Store, SupportsTouch
from .collector import Collector
from .policy import CapacityPolicy
from .records import RecordKeys

logger = get_logger(__name__)

NICENESS = 19
FAILED_USES_MAX = 8  # failures in a row that mean that the storage is down, rather than single blocks
NOTE_S_MAX = 2.0  # time limit to record uses in one go; the collector publishes its record in between
ERROR_PAUSE_S_MAX = 60.0
ALIVE_EVERY_S = 5.0
EXIT_S = 0.3
MEMORY_BYTES_MAX = 2 << 30  # of this process, whatever a server answers; queued uses take a tenth of it


def main() -> None:
    """Serve standard input and output until the input ends. The command-line argument is the parent's PID."""
    die_with_parent(int(sys.argv[1]))
    os.nice(NICENESS)
    limit_memory(MEMORY_BYTES_MAX)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # raises SystemExit, so that the collector gives up its work
    pid = os.getpid()
    output = own_output()
    told_at = time.monotonic()

    def tell(message: dict[str, Any]) -> None:
        nonlocal told_at
        told_at = time.monotonic()
        _tell(output, pid, message)

    def tell_alive() -> None:
        if time.monotonic() - told_at >= ALIVE_EVERY_S:
            tell({})

    config = json.loads(sys.stdin.readline())
    log_to_stderr("kvtiers-collector", config["log_level"])
    inbox = Inbox()
    threading.Thread(target=_read_input, args=(inbox,), name="kvtiers-collector-input", daemon=True).start()
    policy = CapacityPolicy(**config["policy"])
    keys = RecordKeys.from_json(config["record_keys"]) if config.get("record_keys") else None

    started_at = time.monotonic()  # of the last poll

    def tell_removed(names: list[str]) -> None:
        own = [name for name in names if name.startswith(config["prefix"])]
        if own:
            tell({"removed": own, "since": started_at})
        tell_alive()

    store: Store | None = None
    collector: Collector | None = None
    told_full: str | None = None
    error_pause_s = 0.0
    try:
        while True:
            end_if_forked(pid)
            pause_s = policy.poll_s
            try:
                if store is None or collector is None:
                    store = make_store(config)
                    owner = config.get("owner")
                    collector = Collector(store, policy, on_removed=tell_removed, keys=keys, owner=owner)
                if (put_bytes := inbox.take_put()) is not None:
                    collector.note_put(put_bytes)
                if inbox.take_refused():
                    collector.note_refused()
                if noted := _note_uses(store, inbox.uses, NOTE_S_MAX):
                    tell({"noted": noted})
                started_at = time.monotonic()
                report = collector.poll()
                if report is not None:
                    used = report.bytes if collector.knows_bytes else None
                    tell({"report": asdict(report), "used": used, "full": collector.full})
                elif collector.full != told_full:
                    tell({"full": collector.full})
                told_full = collector.full
                error_pause_s = 0.0
                if collector.is_urgent:
                    pause_s = 0.0
            except StoreError as e:
                tell({"error": f"{type(e).__name__}: {e}"})
                told_full = None
                pause_s = error_pause_s = min(ERROR_PAUSE_S_MAX, max(1.0, 2 * error_pause_s))
            tell_alive()
            until = time.monotonic() + pause_s
            while (left_s := until - time.monotonic()) > 0:
                tell_alive()
                time.sleep(min(left_s, ALIVE_EVERY_S))
    finally:  # SIGTERM
        if collector is not None:
            with suppress(StoreError):
                collector.release()


class Inbox:
    """What the engine has sent and the collector has not taken yet. The reading thread adds, the main thread takes.

    Attributes:
        uses: names of used blocks; bounded by the engine.
    """

    def __init__(self) -> None:
        self.uses: deque[str] = deque()
        self._puts: deque[int] = deque()
        self._was_refused = False

    def add(self, message: list[str] | dict[str, int]) -> None:
        """Add a line of the engine."""
        if isinstance(message, list):
            self.uses.extend(message)
        else:
            self._was_refused |= "refused" in message
            if "put" in message:
                self._puts.append(message["put"])

    def take_put(self) -> int | None:
        """Bytes that the engine has put since the last call; None: it said nothing. 0: others of it put."""
        return sum(self._puts.popleft() for _ in range(len(self._puts))) if self._puts else None

    def take_refused(self) -> bool:
        """Whether the storage has refused a block since the last call."""
        was_refused, self._was_refused = self._was_refused, False
        return was_refused


def _note_uses(store: Store, touches: deque[str], limit_s: float) -> int:
    """Record queued uses for at most ``limit_s``, because uses may come faster than a network takes them.

    If the storage does not answer, the uses stay in the queue. If single blocks fail, their uses are dropped.

    Returns:
        How many uses were taken from the front of the queue for good.
    """
    if not isinstance(store, SupportsTouch):
        done = len(touches)
        touches.clear()
        return done
    until = time.monotonic() + limit_s
    done = 0
    failed: list[str] = []
    for _ in range(len(touches)):
        if time.monotonic() > until:
            break
        name = touches.popleft()
        try:
            store.touch(name)
            done += 1
        except StoreError as e:
            logger.debug("a use is not noted: %s", e)
            if e.retryable:
                failed.append(name)
            else:
                done += 1
            if not done and len(failed) == FAILED_USES_MAX:
                break
    if done:
        return done + len(failed)
    touches.extendleft(reversed(failed))
    return 0


def _read_input(inbox: Inbox) -> None:
    try:
        for line in sys.stdin:
            inbox.add(json.loads(line))
    except ValueError:
        pass  # an incomplete line: the parent died while it wrote
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_S)
    os._exit(0)  # the main thread hangs in a call


def _tell(output: TextIO, pid: int, message: dict[str, Any]) -> None:
    end_if_forked(pid)
    try:
        output.write(json.dumps(message) + "\n")
        output.flush()
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
