"""The collector's process: a fresh interpreter at the lowest priority, so that a listing costs the engine no GIL.

It reads JSON lines from its standard input: first its configuration, then lists of names of blocks that were used. It
writes JSON lines: ``{"removed": [names]}``, ``{"noted": count}`` of uses, in the order in which they came,
``{"report": {…}, "used": bytes}`` after a run, ``{"error": "…"}``. At SIGTERM, at the end of its input, and when its
parent is gone, it ends whatever it is doing: a run that is cut short leaves nothing to repair.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TextIO

from kvtiers.tiers.capacity.collector import Collector
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.records import RecordKeys
from kvtiers.tiers.capacity.usage import read_measured, used_bytes
from kvtiers.tiers.errors import StoreError
from kvtiers.tiers.isolation.worker import die_with_parent, limit_memory, log_to_stderr, make_store, own_output
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import Store, SupportsTouch

logger = get_logger(__name__)

NICENESS = 19
FAILED_USES_MAX = 8  # in a row, before it is the storage that does not answer and not some blocks
RUN_SHARE = 1 / 3  # of the time that runs may take, whatever there is to do
NOTE_S_MAX = 2.0  # at a time; the lease is renewed in between
ERROR_PAUSE_S_MAX = 60.0
EXIT_S = 0.3
MEMORY_BYTES_MAX = 2 << 30  # of this process, whatever a server answers; uses that wait take a tenth of it


def main() -> None:
    """Serve standard input and output until the input ends. The argument is the parent's pid."""
    die_with_parent(int(sys.argv[1]))
    os.nice(NICENESS)
    limit_memory(MEMORY_BYTES_MAX)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # by an exception, so that the lease is released
    tell = partial(_tell, own_output())
    config = json.loads(sys.stdin.readline())
    log_to_stderr("kvtiers-collector", config["log_level"])
    touches: deque[str] = deque()  # bounded by the parent
    threading.Thread(target=_read_touches, args=(touches,), name="kvtiers-collector-input", daemon=True).start()
    policy = CapacityPolicy(**config["policy"])
    keys = RecordKeys.from_json(config["record_keys"]) if config.get("record_keys") else None

    def tell_removed(names: list[str]) -> None:
        own = [name for name in names if name.startswith(config["prefix"])]
        if own:
            tell({"removed": own})

    def tell_noted(count: int) -> None:
        if count:
            tell({"noted": count})

    store: Store | None = None
    pause_s = error_pause_s = 0.0
    while True:
        try:
            if store is None:
                store = make_store(config)
                collector = make_collector(store, policy, touches, tell_removed, keys=keys, on_noted=tell_noted)
            tell_noted(_note_uses(store, touches, NOTE_S_MAX))
            started_at = time.monotonic()
            report = collector.run() if collector.is_due() else None
            pause_s = error_pause_s = 0.0
            if report is not None:
                pause_s = (time.monotonic() - started_at) * (1 / RUN_SHARE - 1)
                tell({"report": asdict(report), "used": _used(store, keys)})
        except StoreError as e:
            tell({"error": f"{type(e).__name__}: {e}"})
            pause_s = error_pause_s = min(ERROR_PAUSE_S_MAX, max(1.0, 2 * error_pause_s))
        time.sleep(max(policy.poll_s, pause_s))


def _used(store: Store, keys: RecordKeys | None) -> int | None:
    used = used_bytes(store, keys=keys)
    measured = read_measured(store, keys=keys) if used is None else None
    return used if measured is None else measured.bytes


def make_collector(
    store: Store,
    policy: CapacityPolicy,
    touches: deque[str],
    on_removed: Callable[[list[str]], None],
    *,
    keys: RecordKeys | None = None,
    on_noted: Callable[[int], None] = lambda _: None,
) -> Collector:
    """One that notes uses while it lists: a run takes long, and what is used meanwhile must not look old by its end."""

    noted_at = 0.0

    def note_uses(listed: int) -> None:
        nonlocal noted_at
        # While it lists no more than half of the time goes to uses, or they would make a long listing endless.
        on_noted(_note_uses(store, touches, min(NOTE_S_MAX, time.monotonic() - noted_at) if listed else NOTE_S_MAX))
        noted_at = time.monotonic()

    return Collector(store, policy, on_removed=on_removed, on_progress=note_uses, keys=keys)


def _note_uses(store: Store, touches: deque[str], limit_s: float) -> int:
    """Note what waits, for so long at most: uses may come faster than a network takes them.

    Where the storage does not answer, what waits goes on waiting. Where single blocks fail, they are given up.

    Returns:
        How many of those that waited longest are done with.
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


def _read_touches(touches: deque[str]) -> None:
    try:
        for line in sys.stdin:
            touches.extend(json.loads(line))
    except ValueError:
        pass  # a part of a line: its parent died while it wrote
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_S)
    os._exit(0)  # the main thread is inside a call that hangs


def _tell(output: TextIO, message: dict[str, Any]) -> None:
    try:
        output.write(json.dumps(message) + "\n")
        output.flush()
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
