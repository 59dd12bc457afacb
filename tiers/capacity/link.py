"""CollectorLink: the engine's end of the collector's process. The scheduler's thread never waits in it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import asdict
from queue import Full, Queue
from typing import Any

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.keyring import KEY_VARIABLES
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.records import RecordKeys
from kvtiers.tiers.isolation.loaded_code import OWN_CODE
from kvtiers.tiers.isolation.process import StoreRecipe, environment_without, kill_group, python_command
from kvtiers.tiers.isolation.worker import own_log_level
from kvtiers.tiers.plain_logs import get_logger

logger = get_logger(__name__)

TOUCH_EVERY_S = 600.0
TOUCHED_KEYS_MAX = 262_144  # remembered, so that their uses are not recorded again too soon
UNNOTED_KEYS_MAX = 262_144  # sent and not recorded yet; further uses are dropped, to be recorded at the next use
NAMES_A_LINE = 4096
TOUCH_BATCHES_MAX = 64  # waiting to be sent; more are dropped
REMOVED_KEYS_MAX = 65_536  # removals waiting for ``take_removed``; older ones are dropped
RESTART_S = (1.0, 60.0)  # first and longest pause before a dead collector is restarted
CLOSE_S = 0.5


class CollectorLink:
    """Starts the process, restarts it when it dies, sends uses to it and passes removals to the tier.

    Threads: the scheduler's thread calls ``touch``, ``take_removed``, ``note_stored``, ``take_reports`` and ``close``.
    ``_feeder`` owns the table of recently touched keys, ``_reader`` the process and its output. The thread that holds
    ``_input`` writes to the process. Threads share only queues, and containers whose operations are atomic.

    A use stays in ``_unnoted`` until the process says that it is recorded. After a restart, the new process gets all
    these uses again.

    Args:
        name: the tier's name, for logs and thread names.
        recipe: makes the store, which must accept puts even if the reserve of free space is reached.
        policy: the limits.
        mapper: names the tier's own blocks; only their removals are reported.
        notes_uses: whether the store can record uses.
        keys: keys to authenticate records with; passed to the process through its standard input.
    """

    def __init__(
        self,
        name: str,
        recipe: StoreRecipe,
        policy: CapacityPolicy,
        mapper: FileMapper,
        *,
        notes_uses: bool = True,
        keys: RecordKeys | None = None,
    ) -> None:
        self._name = name
        config = {"policy": asdict(policy), "prefix": mapper.block_prefix, "log_level": own_log_level()}
        config["record_keys"] = None if keys is None else keys.to_json()
        self._config = json.dumps(recipe.encode() | config)
        self._mapper = mapper
        # A use must be recorded well before the block's ttl ends.
        self._touch_every_s = min(TOUCH_EVERY_S, policy.ttl_s / 4) if policy.ttl_s else TOUCH_EVERY_S
        self._notes_uses = notes_uses
        self._touched: OrderedDict[OffloadKey, float] = OrderedDict()
        self._uses: Queue[tuple[OffloadKey, ...] | None] = Queue(TOUCH_BATCHES_MAX)
        self._unnoted: deque[OffloadKey] = deque()  # in the order in which the process got them
        self._input = threading.Lock()
        self._removed: OrderedDict[OffloadKey, None] = OrderedDict()  # an ordered set
        self._reports: deque[dict[str, Any]] = deque()  # one of each kind at most: the reader merges them
        self._closed = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, name=f"kvtiers-{name}-collector", daemon=True)
        self._feeder = threading.Thread(target=self._feed, name=f"kvtiers-{name}-uses", daemon=True)
        self._reader.start()
        self._feeder.start()

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """Record that the blocks were used."""
        if self._notes_uses:
            try:
                self._uses.put_nowait(tuple(keys))
            except Full:
                pass

    def take_removed(self, count_max: int) -> list[OffloadKey]:
        """Take the blocks that this engine's collector removed, the oldest removals first."""
        removed: list[OffloadKey] = []
        while self._removed and len(removed) < count_max:
            removed.append(self._removed.popitem(last=False)[0])
        return removed

    def note_stored(self, keys: Iterable[OffloadKey]) -> None:
        """Forget untaken removals of blocks that were just stored: the removals happened before."""
        if self._removed:
            for key in keys:
                self._removed.pop(key, None)

    def take_reports(self) -> list[dict[str, Any]]:
        """Take the process's reports since the last call: ``report`` and ``used``, or ``error``; each with ``runs``.

        ``runs`` is the number of runs merged into it. If the process ended by itself, that is an ``error``, too.
        """
        reports: list[dict[str, Any]] = []
        while True:
            try:
                reports.append(self._reports.popleft())
            except IndexError:
                return reports

    def close(self) -> None:
        """End the process. Takes at most about ``CLOSE_S``."""
        self._closed.set()
        try:
            self._uses.put_nowait(None)
        except Full:
            pass
        process = self._process
        if process is not None:
            process.terminate()
            self._reader.join(CLOSE_S / 2)
            kill_group(process)
        self._reader.join(CLOSE_S / 2)
        self._feeder.join(CLOSE_S / 2)

    def _read(self) -> None:
        pause_s = RESTART_S[0]
        while not self._closed.is_set():
            started_at = time.monotonic()
            try:
                self._serve()
            except Exception as e:  # noqa: BLE001 - a thread's edge: whatever it was, another collector is started
                logger.warning("tier %s: its collector cannot be used: %s: %s", self._name, type(e).__name__, e)
            if self._closed.is_set():
                return
            pause_s = RESTART_S[0] if time.monotonic() - started_at > RESTART_S[1] else min(RESTART_S[1], 2 * pause_s)
            logger.warning("tier %s: its collector ended; another is started in %.0f s", self._name, pause_s)
            self._report({"error": "it ended"})  # else nobody would notice a process that is killed in each run
            self._closed.wait(pause_s)

    def _serve(self) -> None:
        """One process, from its start to its end."""
        OWN_CODE.check()
        process = subprocess.Popen(
            python_command("kvtiers.tiers.capacity.process", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment_without(KEY_VARIABLES),
            process_group=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(self._config + "\n")
            process.stdin.flush()
            with self._input:
                self._process = process
                self._tell_uses(process, list(self._unnoted))
            if self._closed.is_set():  # close() may have looked before there was a process
                kill_group(process)
            for line in process.stdout:
                if not line.endswith("\n"):
                    break  # the process died while it wrote
                self._hear(json.loads(line))
        except BrokenPipeError:
            pass  # the process died before it read
        finally:
            self._process = None
            if not self._closed.is_set():
                kill_group(process)
            process.wait()
            process.stdout.close()
            try:
                process.stdin.close()
            except OSError:
                pass  # unwritten input is lost with the process

    def _hear(self, message: dict[str, Any]) -> None:
        for _ in range(min(message.pop("noted", 0), len(self._unnoted))):
            self._unnoted.popleft()
        for name in message.pop("removed", ()):
            key = self._mapper.key_of(name)
            if key is not None:
                self._removed[key] = None
                if len(self._removed) > REMOVED_KEYS_MAX:
                    self._removed.popitem(last=False)
        if "error" in message:
            logger.warning("tier %s: its collector: %s", self._name, message["error"])
        if message:
            self._report(message)

    def _report(self, message: dict[str, Any]) -> None:
        message["runs"] = 1
        reports = {"error" in report: report for report in self.take_reports()}
        before = reports.get("error" in message)
        reports["error" in message] = message if before is None else _merged(before, message)
        self._reports.extend(reports.values())

    def _feed(self) -> None:
        while (keys := self._uses.get()) is not None and not self._closed.is_set():
            now = time.monotonic()
            due = [key for key in keys if self._is_due(key, now)]
            with self._input:
                self._unnoted.extend(due)
                if self._process is not None:
                    self._tell_uses(self._process, due)

    def _tell_uses(self, process: subprocess.Popen[str], keys: list[OffloadKey]) -> None:
        """Under ``_input``: send uses to the process. If it has died, the next process gets them."""
        assert process.stdin is not None
        try:
            for start in range(0, len(keys), NAMES_A_LINE):
                names = [self._mapper.relative_name(key) for key in keys[start : start + NAMES_A_LINE]]
                process.stdin.write(json.dumps(names) + "\n")
                process.stdin.flush()
        except (OSError, ValueError):
            pass

    def _is_due(self, key: OffloadKey, now: float) -> bool:
        at = self._touched.get(key)
        if at is not None and now - at < self._touch_every_s:
            return False
        if len(self._unnoted) >= UNNOTED_KEYS_MAX:
            return False
        self._touched[key] = now
        self._touched.move_to_end(key)
        if len(self._touched) > TOUCHED_KEYS_MAX:
            self._touched.popitem(last=False)
        return True


def _merged(before: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """The later of two messages of one kind, with the counts of both, because an idle engine takes none for a week."""
    if "report" in message:
        for name in ("removed_blobs", "removed_bytes"):
            sums, earlier = message["report"][name], before["report"][name]
            message["report"][name] = {reason: count + earlier[reason] for reason, count in sums.items()}
    message["runs"] += before["runs"]
    return message
