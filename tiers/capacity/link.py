"""CollectorLink: talks to the collector's process for the engine. It has no thread, and only ``close`` waits."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Final

from ..blocks.file_mapper import FileMapper
from ..blocks.keys import OffloadKey
from ..child_process import ChildProcess
from ..connections import Child, Connections
from ..frames import pack_pairs, unpack_pairs
from ..plain_logs import get_logger
from ..recipe import StoreRecipe
from .policy import REMOVAL_REASONS, CapacityPolicy, Lag

logger = get_logger(__name__)

TOUCH_EVERY_S: Final = 600.0
TOUCHED_KEYS_MAX: Final = 262_144  # uses to remember, so that they are not recorded again too soon
UNSENT_KEYS_MAX: Final = 262_144  # unsent uses; further uses are dropped, and recorded at the next use
WAITING_KEYS_MAX: Final = 65_536  # unsent uses while the process has not been needed yet; the oldest are dropped
USES_A_POLL: Final = 512  # uses sent in one frame, which takes 0.2 ms
REMOVED_KEYS_MAX: Final = 65_536  # removals waiting for ``take_removed``; older ones are dropped
STORED_KEYS_MAX: Final = 65_536  # remembered stores, which show that a reported removal may be older than the block
REASONS_MAX: Final = 256  # frames with removals waiting for ``take_reasons``; older ones are dropped
REPORTS_MAX: Final = 64  # waiting for ``take_reports``; older ones are dropped
LISTEN_S: Final = 1.0
# A process that is silent for this long is killed. On far storage the limit is SILENT_POLLS polls, if that is longer.
# The limit doubles with each kill, because the process may only be slow: a page of a far listing takes long.
SILENT_S, SILENT_S_MAX = 20.0, 600.0
SILENT_POLLS: Final = 8
CLOSE_S: Final = 0.5


class CollectorLink(Connections[Child]):
    """Starts the process, restarts it when it dies or hangs, sends uses to it and passes removals to the tier.

    If only the disk is a limit (``CapacityPolicy.waits``), the process starts when the storage first refuses a block.

    The scheduler's thread calls ``poll`` in each step, and all other methods.

    Args:
        name: the tier's name, for logs and thread names.
        recipe: makes the store, which must accept puts even if the reserve of free space is reached.
        policy: the limits.
        mapper: names the tier's own blocks; only their removals are reported.
        notes_uses: whether the store can record uses.
    """

    def __init__(
        self,
        name: str,
        recipe: StoreRecipe,
        policy: CapacityPolicy,
        mapper: FileMapper,
        *,
        notes_uses: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._child = Child(start=self._start, start_at=None if policy.waits else -math.inf)
        super().__init__(name, [self._child], clock)
        self._config = recipe.encode() | {
            "policy": asdict(policy),
            "mapper": mapper.to_json(),
            "owner": secrets.token_hex(8),  # the next process gets the same name, so it need not wait
        }
        json.dumps(self._config)  # an error is raised here, not in a thread
        # A use must be recorded well before the block's ttl ends. It is recorded after at most two of these periods.
        self._touch_every_s = min(TOUCH_EVERY_S, policy.ttl_s / 8) if policy.ttl_s else TOUCH_EVERY_S
        self._notes_uses = notes_uses
        self._touched: set[OffloadKey] = set()  # blocks used since ``_touched_since``
        self._touched_before: set[OffloadKey] = set()  # blocks used in the period before
        self._touched_since = -math.inf
        self._waiting: OrderedDict[OffloadKey, None] = OrderedDict()  # uses noted before the process is needed
        self._unsent: deque[OffloadKey] = deque()  # uses to send, in their order
        self._puts: deque[int] = deque()  # put bytes that were not sent to the process yet
        self._was_refused = False
        self._removed: OrderedDict[OffloadKey, float] = OrderedDict()  # key -> earliest time of its removal
        self._reasons: deque[tuple[str, list[OffloadKey]]] = deque(maxlen=REASONS_MAX)
        self._stored: OrderedDict[OffloadKey, float] = OrderedDict()  # key -> when its last store was noted
        self._stored_all_since = -math.inf  # ``_stored`` holds all stores noted after this time
        self._full = ""
        self._put_bytes = self._counted_bytes = 0  # total, and the part that a process has counted
        self._lag = Lag(policy, clock)
        self._error = ""  # the last error; "" after a success
        self._reports: deque[dict[str, Any]] = deque(maxlen=REPORTS_MAX)
        self._silent_s = 0.0
        self._silent_s_max = max(SILENT_S, SILENT_POLLS * policy.poll_s)
        self._listen_at = -math.inf
        self._is_needed = not policy.waits
        self.poll()

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """Record that the blocks were used."""
        if not self._notes_uses:
            return
        if not self._is_needed:  # perhaps never, or after weeks
            for key in keys:
                self._waiting[key] = None
                self._waiting.move_to_end(key)
            while len(self._waiting) > WAITING_KEYS_MAX:
                self._waiting.popitem(last=False)
            return
        now = self._clock()
        if now - self._touched_since >= self._touch_every_s or len(self._touched) >= TOUCHED_KEYS_MAX // 2:
            self._touched_before, self._touched, self._touched_since = self._touched, set(), now
        late, early = self._touched, self._touched_before
        due = [key for key in keys if key not in late and key not in early]
        del due[max(0, UNSENT_KEYS_MAX - len(self._unsent)) :]
        late.update(due)
        self._unsent.extend(due)

    @property
    def works(self) -> bool:
        """Whether the process runs and answers, or is not needed yet."""
        return self._child.runs or not self._is_needed

    @property
    def is_full(self) -> str:
        """Why nothing may be put now; "": puts are allowed. Known one poll late, so the bound is soft."""
        if late_s := self._lag.late_s:
            why = self._error or "its process hangs or gets no CPU"
            return f"the collector of max_bytes has not counted new blocks for {late_s:.0f} s: {why}"
        return self._full

    def note_put(self, size: int) -> None:
        """Record that so many bytes were put, or may have been put."""
        if self._is_needed:
            self._puts.append(size)
            self._put_bytes += size

    def note_full(self) -> None:
        """Record that the storage refused a block because it is full."""
        self._was_refused = True

    def take_removed(self, count_max: int) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Take up to ``count_max`` blocks that this engine's collector removed, the oldest removals first.

        Returns:
            The blocks that are gone, and the blocks in doubt, which probably exist: this engine stored them at about
            the time of their removal.
        """
        removed: list[OffloadKey] = []
        doubtful: list[OffloadKey] = []
        for _ in range(min(count_max, len(self._removed))):
            key, since = self._removed.popitem(last=False)
            (doubtful if self._stored.get(key, self._stored_all_since) > since else removed).append(key)
        return removed, doubtful

    def take_reasons(self) -> list[tuple[str, list[OffloadKey]]]:
        """Return why blocks were removed since the last call: pairs of a reason of ``REMOVAL_REASONS`` and keys."""
        reasons = list(self._reasons)
        self._reasons.clear()
        return reasons

    def note_stored(self, keys: Iterable[OffloadKey]) -> None:
        """Record that the blocks are stored now, so that a late report of an earlier removal is ignored."""
        now = self._clock()
        for key in keys:
            self._stored[key] = now
            self._stored.move_to_end(key)
        while len(self._stored) > STORED_KEYS_MAX:
            self._stored_all_since = self._stored.popitem(last=False)[1]

    def take_reports(self) -> list[dict[str, Any]]:
        """Poll, and take the process's reports since the last call: ``report`` and ``used``, or ``error``.

        Each report has ``runs``, the number of polls merged into it. A process that ended by itself is an ``error``.
        """
        self.poll()
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def poll(self) -> None:
        """Send and receive frames, and replace a process that hangs or has ended. Does not wait."""
        if self._was_refused and not self._is_needed:
            self._is_needed = True
            self._child.start_at = -math.inf
            self._unsent.extend(self._waiting)
            self._waiting.clear()
        super().poll()
        if len(self._puts) > 1:
            self._puts.append(sum(self._puts.popleft() for _ in range(len(self._puts))))
        if self._child.runs and not self._child.out:
            self._tell()
        self._lag.note(self._put_bytes, self._counted_bytes)

    def close(self) -> None:
        """End the process. Takes at most about ``CLOSE_S``."""
        if os.getpid() != self._pid:
            return  # in a fork: the process belongs to the parent
        self._hang_up([self._child], CLOSE_S)

    def _tell(self) -> None:
        """Send uses and puts. Report a full disk after all uses, because the process then removes unused blocks."""
        keys = [self._unsent.popleft() for _ in range(min(USES_A_POLL, len(self._unsent)))]
        put = self._puts.popleft() if self._puts else None
        was_refused = self._was_refused and not self._unsent
        if was_refused:
            self._was_refused = False
        if keys or put is not None or was_refused:
            self._write(self._child, [put, was_refused], pack_pairs([(key, 0) for key in keys]))

    def _start(self) -> ChildProcess:
        return ChildProcess.start("kvtiers.tiers.capacity.process", self._config)

    def _begun(self, child: Child) -> None:  # noqa: ARG002
        self._silent_s = 0.0
        if (uncounted := self._put_bytes - self._counted_bytes) > 0:
            self._puts = deque([uncounted])

    def _hear(self, child: Child, content: Any, raw: bytes) -> None:  # noqa: ARG002
        counted, since, full, report, error = content
        self._silent_s = 0.0
        self._counted_bytes += counted
        removed = unpack_pairs(raw)
        for key, _ in removed:
            self._removed[key] = since
            if len(self._removed) > REMOVED_KEYS_MAX:
                self._removed.popitem(last=False)
        for place, reason in enumerate(REMOVAL_REASONS if removed else ()):
            if keys := [key for key, its_place in removed if its_place == place]:
                self._reasons.append((reason, keys))
        if error is not None:
            logger.warning("tier %s: the collector failed: %s", self._name, error["error"])
            self._report_error(error)
        if full is not None:
            self._full, self._error = full, ""
        if report is not None:
            self._reports.append(report)

    def _report_error(self, error: dict[str, Any]) -> None:
        self._error = error["error"]
        self._reports.append(error)

    def _end_if_late(self, child: Child, now: float) -> None:
        """Kill a silent process.

        Silence is counted in calls of this method, one a second. So time in which the engine was stopped or idle does
        not count. A second in which the collector runs or waits for a core does not count either.
        """
        assert child.handle is not None
        if now < self._listen_at:
            return
        self._listen_at = now + LISTEN_S
        if not _is_runnable(child.handle.pid):
            self._silent_s += LISTEN_S
        if self._silent_s > self._silent_s_max:
            logger.warning(
                "tier %s: the collector (process %s) has not answered for %.0f s, because it or the storage hangs; "
                "killing and replacing it", self._name, child.handle.pid, self._silent_s,
            )  # fmt: skip
            self._silent_s_max = min(SILENT_S_MAX, 2 * self._silent_s_max)
            self._end(child, "it hung")

    def _lost(self, child: Child, why: str) -> None:
        if not self._closing:
            text = "tier %s: the collector's process ended: %s; starting another one in %.1f s"
            logger.warning(text, self._name, why, child.pause_s)
            self._report_error({"error": f"it ended: {why}", "runs": 1})  # so that metrics show it


def _is_runnable(pid: int | None) -> bool:
    """Whether a process runs or waits for a core. False: it sleeps, is stopped, or does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b")")[2].split()[0] == b"R"
    except (OSError, IndexError):
        return False
