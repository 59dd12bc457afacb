"""CollectorLink: the engine's end of the collector's process. The scheduler's thread never waits in it."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from queue import Full, Queue
from typing import Any

from ..blocks.file_mapper import FileMapper
from ..blocks.keyring import KEY_VARIABLES
from ..blocks.keys import OffloadKey
from ..loaded_code import OWN_CODE
from ..plain_logs import get_logger
from ..processes import environment_without, kill_group, own_log_level, python_command, reap_group
from ..recipe import StoreRecipe
from .policy import CapacityPolicy
from .records import RecordKeys

logger = get_logger(__name__)

TOUCH_EVERY_S = 600.0
TOUCHED_KEYS_MAX = 262_144  # remembered, so that their uses are not recorded again too soon
UNNOTED_KEYS_MAX = 262_144  # sent and not recorded yet; further uses are dropped, to be recorded at the next use
WAITING_KEYS_MAX = 65_536  # the same limit while the process has not been needed yet; the oldest uses are dropped
NAMES_A_LINE = 4096
TOUCH_BATCHES_MAX = 64  # waiting to be sent; more are dropped
REMOVED_KEYS_MAX = 65_536  # removals waiting for ``take_removed``; older ones are dropped
STORED_KEYS_MAX = 65_536  # latest stores, which show that a reported removal may be older than the block
RESTART_S = (1.0, 60.0)  # first and longest pause before a dead collector is restarted
LISTEN_S = 1.0
# A process that is silent for this long is killed. On far storage the limit is SILENT_POLLS polls, if that is longer.
# It doubles after each kill, because the process may only be slow.
SILENT_S, SILENT_S_MAX = 20.0, 600.0
SILENT_POLLS = 8
CLOSE_S = 0.5
FAILING_S_MAX = 60.0  # a collector that has failed for so long no longer bounds the root, so its engine stops to put


class CollectorLink:
    """Starts the process, restarts it when it dies or hangs, sends uses to it and passes removals to the tier.

    If only the disk is a limit (``CapacityPolicy.waits``), the process starts when the storage first refuses a block.

    Threads: the scheduler's thread calls all public methods. ``_feeder`` owns the table of recently touched keys, and
    writes to the process, which may block while the process hangs. ``_reader`` owns the process and its output.
    Threads share only queues, and containers whose operations are atomic.

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
        config["owner"] = secrets.token_hex(8)  # the same for the next process, which then need not wait
        config["record_keys"] = None if keys is None else keys.to_json()
        self._config = recipe.encode() | config
        json.dumps(self._config)  # fails here, not in a thread
        self._mapper = mapper
        # A use must be recorded well before the block's ttl ends.
        self._touch_every_s = min(TOUCH_EVERY_S, policy.ttl_s / 4) if policy.ttl_s else TOUCH_EVERY_S
        self._notes_uses = notes_uses
        self._touched: OrderedDict[OffloadKey, float] = OrderedDict()
        self._uses: Queue[tuple[OffloadKey, ...] | None] = Queue(TOUCH_BATCHES_MAX)
        self._unnoted: deque[OffloadKey] = deque()  # in the order in which the process got them
        self._removed: OrderedDict[OffloadKey, float] = OrderedDict()  # key -> since when it may have been removed
        self._stored: OrderedDict[OffloadKey, float] = OrderedDict()  # key -> when this engine noted its last store
        self._stored_all_since = float("-inf")  # ``_stored`` has all stores noted after this
        self._puts: deque[int] = deque()  # bytes that the process was not told yet
        self._was_refused = False
        self._full = ""
        self._is_bounded = policy.max_bytes is not None
        self._failing: tuple[str, float] | None = None  # the last error, and since when there was no success
        self._reports: deque[dict[str, Any]] = deque()  # one of each kind at most: the reader merges them
        self._closed = threading.Event()
        self._needed = threading.Event()
        if not policy.waits:
            self._needed.set()
        self._silent_s = self._silent_s_min = max(SILENT_S, SILENT_POLLS * policy.poll_s)
        self._process: subprocess.Popen[bytes] | None = None
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

    @property
    def works(self) -> bool:
        """Whether the process runs and answers, or is not needed yet."""
        return self._process is not None or not self._needed.is_set()

    @property
    def is_full(self) -> str:
        """Why nothing may be put now; "": puts are allowed. It is known one poll late, so the bound is soft."""
        failing = self._failing
        if self._is_bounded and failing is not None and time.monotonic() - failing[1] > FAILING_S_MAX:
            return f"max_bytes is set, and the collector has not worked for {FAILING_S_MAX:.0f} s: {failing[0]}"
        return self._full

    def note_put(self, size: int) -> None:
        """Record that so many bytes were put, or may have been. 0: other processes put, and publish it themselves."""
        if self._needed.is_set():
            self._puts.append(size)
            self._wake_feeder()

    def note_full(self) -> None:
        """Record that the storage refused a block because it is full."""
        self._was_refused = True
        self._needed.set()
        self._wake_feeder()

    def take_removed(self, count_max: int) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Take up to ``count_max`` blocks that this engine's collector removed, the oldest removals first.

        Returns:
            The blocks that are gone, and the blocks in doubt. This engine stored the latter at about the time of their
            removal, so only the storage can tell whether they exist.
        """
        removed: list[OffloadKey] = []
        doubtful: list[OffloadKey] = []
        for _ in range(min(count_max, len(self._removed))):
            key, since = self._removed.popitem(last=False)
            (doubtful if self._stored.get(key, self._stored_all_since) > since else removed).append(key)
        return removed, doubtful

    def note_stored(self, keys: Iterable[OffloadKey]) -> None:
        """Record that the blocks are stored now, so that an earlier removal that is reported later is not believed."""
        now = time.monotonic()
        for key in keys:
            self._stored[key] = now
            self._stored.move_to_end(key)
        while len(self._stored) > STORED_KEYS_MAX:
            self._stored_all_since = self._stored.popitem(last=False)[1]

    def take_reports(self) -> list[dict[str, Any]]:
        """Take the process's reports since the last call: ``report`` and ``used``, or ``error``; each with ``runs``.

        ``runs`` is the number of polls merged into it. If the process ended by itself, that is an ``error``, too.
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
        self._needed.set()
        self._wake_feeder(None)
        process = self._process
        if process is not None:
            process.terminate()
            self._reader.join(CLOSE_S / 2)
            kill_group(process)
        self._reader.join(CLOSE_S / 2)
        self._feeder.join(CLOSE_S / 2)

    def _read(self) -> None:
        pause_s = RESTART_S[0]
        self._needed.wait()
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
            env=environment_without(KEY_VARIABLES),
            process_group=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(self._config).encode() + b"\n")
            process.stdin.flush()
            self._process = process
            self._wake_feeder()  # it sends this process the uses that are not noted yet
            if self._closed.is_set():  # close() may have looked before there was a process
                kill_group(process)
            for line in self._lines(process):
                self._hear(json.loads(line))
        except BrokenPipeError:
            pass  # the process died before it read
        finally:
            self._process = None
            if not self._closed.is_set():
                kill_group(process)
            reap_group(process)
            process.stdout.close()
            try:
                process.stdin.close()
            except OSError:
                pass  # unwritten input is lost with the process

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
        """Yield the process's lines until it ends or is silent for too long. Drops an incomplete last line."""
        assert process.stdout is not None
        fd = process.stdout.fileno()
        poll = select.poll()  # not select.select, which takes no descriptor above 1023
        poll.register(fd, select.POLLIN)
        begun = b""
        # Counted in rounds, not by a clock: time in which this process was stopped is not the other one's silence.
        silent_s = 0.0
        while silent_s < self._silent_s:
            if not poll.poll(1000 * LISTEN_S):
                if not _is_runnable(process.pid):  # a runnable process works or waits for a core
                    silent_s += LISTEN_S
                continue
            silent_s = 0.0
            heard = os.read(fd, 1 << 16)
            if not heard:
                return
            *lines, begun = (begun + heard).split(b"\n")
            yield from lines
        logger.warning(
            "tier %s: its collector (process %d) has not answered for %.0f s: the process or its storage hangs. "
            "Killing it and starting another one", self._name, process.pid, silent_s,
        )  # fmt: skip
        self._silent_s = min(SILENT_S_MAX, 2 * self._silent_s)

    def _hear(self, message: dict[str, Any]) -> None:
        since = message.pop("since", float("-inf"))
        for _ in range(min(message.pop("noted", 0), len(self._unnoted))):
            self._unnoted.popleft()
        for name in message.pop("removed", ()):
            key = self._mapper.key_of(name)
            if key is not None:
                self._removed[key] = since
                if len(self._removed) > REMOVED_KEYS_MAX:
                    self._removed.popitem(last=False)
        if "full" in message:
            self._full = message.pop("full")
            self._failing = None
        if "report" in message:
            self._silent_s = self._silent_s_min
        if "error" in message:
            logger.warning("tier %s: its collector: %s", self._name, message["error"])
        if message:
            self._report(message)

    def _report(self, message: dict[str, Any]) -> None:
        if "error" in message:
            since = time.monotonic() if self._failing is None else self._failing[1]
            self._failing = message["error"], since
        message["runs"] = 1
        reports = {"error" in report: report for report in self.take_reports()}
        before = reports.get("error" in message)
        reports["error" in message] = message if before is None else _merged(before, message)
        self._reports.extend(reports.values())

    def _feed(self) -> None:
        knows: subprocess.Popen[bytes] | None = None  # the process that was sent all of ``_unnoted``
        while (keys := self._uses.get()) is not None and not self._closed.is_set():
            now = time.monotonic()
            due = [key for key in keys if self._is_due(key, now)]
            self._unnoted.extend(due)
            process = self._process
            if process is not None:
                # A process that was sent nothing has noted nothing, so nobody else changes ``_unnoted`` meanwhile.
                self._tell(process, due if process is knows else list(self._unnoted))
                knows = process
            elif self._puts:
                self._puts.append(self._take_puts())

    def _take_puts(self) -> int:
        return sum(self._puts.popleft() for _ in range(len(self._puts)))

    def _wake_feeder(self, end: tuple[()] | None = ()) -> None:
        """Wake the feeder: there may be something to send, or it must end."""
        try:
            self._uses.put_nowait(end)
        except Full:
            pass

    def _tell(self, process: subprocess.Popen[bytes], keys: list[OffloadKey]) -> None:
        """Send uses and puts. If the process has died, the next one gets the uses, and a listing finds the puts."""
        assert process.stdin is not None
        message: dict[str, Any] = {}
        if self._puts:
            message["put"] = self._take_puts()
        if self._was_refused:
            self._was_refused = False
            message["refused"] = True
        try:
            for start in range(0, len(keys), NAMES_A_LINE):
                names = [self._mapper.relative_name(key) for key in keys[start : start + NAMES_A_LINE]]
                process.stdin.write(json.dumps(names).encode() + b"\n")
                process.stdin.flush()
            if message:  # last: a process that hears of a full disk removes what it does not know to be used
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()
        except (OSError, ValueError):
            pass

    def _is_due(self, key: OffloadKey, now: float) -> bool:
        at = self._touched.get(key)
        waits = not self._needed.is_set()  # uses are then noted at the start, each once
        if at is not None and (waits or now - at < self._touch_every_s):
            return False
        if waits and len(self._unnoted) >= WAITING_KEYS_MAX:
            self._touched.pop(self._unnoted.popleft(), None)  # its next use counts again
        elif len(self._unnoted) >= UNNOTED_KEYS_MAX:
            return False
        self._touched[key] = now
        self._touched.move_to_end(key)
        if len(self._touched) > TOUCHED_KEYS_MAX:
            self._touched.popitem(last=False)
        return True


def _is_runnable(pid: int) -> bool:
    """Whether a process runs or waits for a core. False: it waits for something else, is stopped, or is unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b")")[2].split()[0] == b"R"
    except (OSError, IndexError):
        return False


def _merged(before: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """Merge two messages of one kind: the later, with the counts of both. An idle engine may take none for a week."""
    if "report" in message:
        for name in ("removed_blobs", "removed_bytes"):
            sums, earlier = message["report"][name], before["report"][name]
            message["report"][name] = {reason: count + earlier[reason] for reason, count in sums.items()}
    message["runs"] += before["runs"]
    return message
