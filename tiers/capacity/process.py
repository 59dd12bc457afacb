"""The collector's process: a separate interpreter at lowest priority, so that a listing never holds the engine's GIL.

It reads JSON lines from standard input: first its configuration, then lists of names of used blocks. It writes JSON
lines:

- ``{"removed": [names], "since": monotonic seconds}``: removed since then
- ``{"noted": count}``: so many uses are recorded, in the order in which they came
- ``{"report": {…}, "used": bytes}``: after a run
- ``{"error": "…"}``
- ``{}``: a sign of life, at least every ``ALIVE_EVERY_S`` while its storage answers

It exits on SIGTERM, at the end of its input, and when its parent dies, in the middle of a run if need be: an
interrupted run leaves nothing to repair.
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
from typing import Any, TextIO

from ..errors import StoreError
from ..isolation.worker import (
    die_with_parent,
    end_if_forked,
    limit_memory,
    log_to_stderr,
    make_store,
    own_output,
)
from ..plain_logs import get_logger
from ..store import Store, SupportsTouch
from .collector import Collector
from .policy import CapacityPolicy
from .records import RecordKeys
from .usage import read_measured, used_bytes

logger = get_logger(__name__)

NICENESS = 19
FAILED_USES_MAX = 8  # failures in a row that mean that the storage is down, rather than single blocks
RUN_SHARE = 1 / 3  # largest share of the time that runs may take
NOTE_S_MAX = 2.0  # time limit to record uses in one go; the lease is renewed in between
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # raises SystemExit, so that the lease is released
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
    touches: deque[str] = deque()  # bounded by the parent
    threading.Thread(target=_read_touches, args=(touches,), name="kvtiers-collector-input", daemon=True).start()
    policy = CapacityPolicy(**config["policy"])
    keys = RecordKeys.from_json(config["record_keys"]) if config.get("record_keys") else None

    started_at = time.monotonic()  # of the last run

    def tell_removed(names: list[str]) -> None:
        own = [name for name in names if name.startswith(config["prefix"])]
        if own:
            tell({"removed": own, "since": started_at})
        tell_alive()

    def tell_noted(count: int) -> None:
        if count:
            tell({"noted": count})
        tell_alive()

    store: Store | None = None
    pause_s = error_pause_s = 0.0
    while True:
        end_if_forked(pid)
        try:
            if store is None:
                store = make_store(config)
                lease = {"owner": config.get("owner"), "dead_owners": config.get("dead_owners", ())}
                collector = make_collector(
                    store, policy, touches, tell_removed, keys=keys, on_noted=tell_noted, **lease
                )
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
        until = time.monotonic() + max(policy.poll_s, pause_s)
        while (left_s := until - time.monotonic()) > 0:
            tell_alive()
            time.sleep(min(left_s, ALIVE_EVERY_S))


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
    **lease: Any,
) -> Collector:
    """A collector that also records uses while it lists, so that blocks used during a long run do not look old."""

    noted_at = 0.0

    def note_uses(listed: int) -> None:
        nonlocal noted_at
        # During a listing, at most half of the time goes to recording uses: more could make a long listing endless.
        on_noted(_note_uses(store, touches, min(NOTE_S_MAX, time.monotonic() - noted_at) if listed else NOTE_S_MAX))
        noted_at = time.monotonic()

    return Collector(store, policy, on_removed=on_removed, on_progress=note_uses, keys=keys, **lease)


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


def _read_touches(touches: deque[str]) -> None:
    try:
        for line in sys.stdin:
            touches.extend(json.loads(line))
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
