"""Channel: sends a tier's jobs and lookups to its servers, over ``tiers.connections``.

Jobs and lookups are frames (``tiers.frames``), and a server answers each of them once. A job is cut into parts,
and a part goes to the server that has the least work.

A server is killed if it has work and is silent for a job's deadline, or if it has not ended a part after twice that
time. The parts of a killed server are reported as failed only when it is reaped, because until then it may touch their
slots. Until the server is replaced, which may take seconds on a busy machine, the other servers get its work.

Servers in threads of this process cannot be killed. Their parts are reported when the storage answers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from ..blocks.batches import Batch, Pair, deal, side_by_side
from ..blocks.keys import OffloadKey
from ..connections import Child, Connections, Handle
from ..errors import ConfigError, QueueFullError, StoreError, StoreTimeoutError, StoreUnavailableError
from ..frames import FOUND, Seats, decode_batch, decode_error, pack_pairs
from ..store import Capabilities, Store

PART_BYTES_MIN: Final = 1 << 20  # a smaller part is not worth waking another server
DOUBT_SHARE: Final = 0.25  # share of the deadline; while a server is silent for longer, the other servers get the work
LATE_FACTOR: Final = 2.0  # no part may take longer than this many deadlines, even if its server answers other requests
START_S: Final = 30.0  # least time for a server to send its first frame, even if the deadline is shorter
END_S: Final = 1.5  # time for a server without work to end


class Backend(Protocol):
    """Starts servers.

    Attributes:
        seats: the threads of each of the tier's servers.
    """

    seats: Sequence[Seats]

    @property
    def store(self) -> Store | None:
        """The store that servers in threads of this process use. None: the servers are processes."""

    def start(self, seats: Seats) -> Handle:
        """Start a server. May block. Raises OSError, RuntimeError or KVTiersError."""

    def close(self) -> None:
        """Release the resources given to the servers. Call it when no server runs any more."""


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job that has ended.

    Attributes:
        batches: the results of its parts.
        blocks: number of its blocks.
        duration_s: seconds from its submission to its end.
    """

    job_id: int
    batches: Sequence[Batch]
    blocks: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Opened:
    """Answer to ``Channel.open``.

    Attributes:
        capabilities: of the store; None: it could not be created.
    """

    capabilities: Capabilities | None
    error: StoreError | ConfigError | None


@dataclass(slots=True, eq=False)
class _Job:
    job_id: int
    is_load: bool
    cost: int
    blocks: int
    submitted_at: float
    left: int
    batches: list[Batch] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Request:
    """A request that a server has not answered. ``job``: of a part of a job. ``look``: number of keys of a lookup."""

    sent_at: float
    job: _Job | None = None
    keys: list[OffloadKey] = field(default_factory=list)
    look: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class _Server(Child):
    seats: Seats
    owed: dict[int, _Request] = field(default_factory=dict)  # number of the request -> request, the oldest first
    loads: int = 0  # number of blocks under way
    stores: int = 0
    looks: int = 0
    is_late: bool = False  # the server was killed because it was late


class Channel(Connections[_Server]):
    """Sends a tier's jobs and lookups to its servers. The scheduler's thread calls all methods.

    Args:
        row_bytes: bytes of a block.
        jobs_max, cost_max: a store beyond these limits is refused. The cost of a job is its bytes.
        deadline_s: no block of a job begins to move later than this after the job was submitted.
        tell: called with the log texts that servers send.
        clock: monotonic seconds, by the same clock as the servers.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        tier: str,
        row_bytes: int,
        jobs_max: int,
        cost_max: int,
        deadline_s: float,
        tell: Callable[[str], None] = lambda text: None,  # noqa: ARG005
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        servers = [_Server(start=partial(backend.start, seats), seats=seats) for seats in backend.seats]
        super().__init__(tier, servers, clock)
        self._backend = backend
        self._row_bytes = row_bytes
        self._jobs_max = jobs_max
        self._cost_max = cost_max
        self._deadline_s = deadline_s
        self._tell = tell
        self._next = 0
        self._jobs: dict[int, _Job] = {}
        self._cost = 0
        self._cut = ""
        self._finished: list[FinishedJob] = []
        self._looked: list[tuple[int, Sequence[bool | None]]] = []
        self._opened: Opened | None = None
        self._late_s = 0.0
        self.has_heard = False
        """Whether any server has ever said anything."""
        self.nearest: dict[str, str] | None = None
        """See ``SecondaryTierManager.nearest``."""
        try:
            for server in servers:
                self._adopt(server, server.start())
        except BaseException:
            self.shutdown(0.0)
            raise

    # ---- what the tier asks for --------------------------------------------------------------------------------------

    def submit(
        self, job_id: int, pairs: list[Pair], *, is_load: bool, cost: int = 0, to_replace: Iterable[OffloadKey] = ()
    ) -> None:
        """Start a job. A job without pairs ends at once.

        Loads are not limited: the region's slots bound them, and refusing a load would make a stored block a miss.

        Args:
            to_replace: keys of blocks that a store overwrites even if they look good.

        Raises:
            QueueFullError: a store exceeds a limit, or the channel is closed; nothing was sent.
            ValueError: a job with this id is still under way.
        """
        if self._closing:
            raise QueueFullError("the tier is shut down")
        if is_load:
            cost = 0
        elif len(self._jobs) >= self._jobs_max:
            raise QueueFullError(f"{self._jobs_max} jobs in flight")
        elif self._cost + cost > self._cost_max and self._cost:
            raise QueueFullError(f"{self._cost} of {self._cost_max} bytes in flight, the job has {cost}")
        now = self._clock()
        servers = self._servers_for(job_id, is_load, now)
        size = max(1, PART_BYTES_MIN // self._row_bytes, -(-len(pairs) // len(servers)))
        parts = list(deal(side_by_side(pairs), size, len(servers)))
        job = self._jobs[job_id] = _Job(job_id, is_load, cost, len(pairs), now, len(parts))
        self._cost += cost
        if not parts:
            self._finish(job)
        replaced = set(to_replace)
        for part, server in zip(parts, servers, strict=False):
            arguments: list[object] = ["load" if is_load else "store", None, now + self._deadline_s]
            if replaced:
                arguments.append([place for place, (key, _) in enumerate(part) if key in replaced])
            self._send(server, _Request(now, job, [key for key, _ in part]), arguments, pack_pairs(part))

    def look(self, keys: Sequence[OffloadKey], name_prefix: str = "") -> int:
        """Ask whether keys are stored. Returns the lookup's number; see ``take_looked``.

        Args:
            name_prefix: prefix of another namespace, whose blocks may have any size; "": the tier's own namespace.
        """
        now = self._clock()
        servers = self._trusted(now)
        if not servers:
            self._next += 1
            self._looked.append((self._next, [None] * len(keys)))
            return self._next
        server = min(servers, key=lambda each: each.looks)
        content: list[object] = ["look", None, name_prefix] if name_prefix else ["look", None]
        return self._send(server, _Request(now, look=len(keys)), content, pack_pairs([(key, 0) for key in keys]))

    def open(self) -> None:
        """Ask a server to check the storage and open the namespace; see ``take_opened``."""
        now = self._clock()
        if servers := self._trusted(now):
            self._send(servers[0], _Request(now), ["open", None])
        else:
            self._opened = Opened(None, StoreUnavailableError("none of the tier's processes runs"))

    def cut(self, why: str) -> None:
        """Drop all blocks that have not begun, and all blocks sent later. "" lets blocks begin again."""
        if why != self._cut:
            self._cut = why
            for server in self._children:
                self._write(server, ["cut", why])

    def take_finished(self) -> list[FinishedJob]:
        """Return the jobs that have ended since the last call; ``poll`` finds them."""
        finished, self._finished = self._finished, []
        return finished

    def take_looked(self) -> list[tuple[int, Sequence[bool | None]]]:
        """Return the answered lookups: number, and whether each key is stored (None: the lookup failed)."""
        if any(server.looks for server in self._children):
            self.poll()
        looked, self._looked = self._looked, []
        return looked

    def take_opened(self) -> Opened | None:
        """Return the answer to ``open``, once."""
        opened, self._opened = self._opened, None
        return opened

    @property
    def jobs_in_flight(self) -> int:
        """Number of jobs that have not ended."""
        return len(self._jobs)

    def take_late_s(self) -> float:
        """The longest silence, or time for a part, of the servers that took too long; 0: no server did."""
        late_s, self._late_s = self._late_s, 0.0
        return late_s

    @property
    def silent_s(self) -> float:
        """The longest time for which a server with work has been silent; 0: no server has work."""
        now = self._clock()
        return max(self._silence(server, now) for server in self._children)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every job has ended. False: timed out."""
        until = time.monotonic() + timeout_s
        self.poll()
        while self._jobs:
            if os.getpid() != self._pid:
                return False
            if (left_s := until - time.monotonic()) <= 0:
                return False
            self.wait(left_s)
        return True

    def shutdown(self, timeout_s: float) -> bool:
        """Drop blocks that have not begun, wait for the other blocks, and end the servers.

        Returns:
            True if all servers have ended. False: some may still touch slots, and their jobs are not reported.
        """
        if os.getpid() != self._pid:
            return False  # in a fork: the servers belong to the parent
        if not self._closing:
            self.cut("shutdown")
        self._closing = True
        self.wait_idle(timeout_s)
        idle = [each for each in self._children if not each.owed or (each.handle is not None and each.handle.kill())]
        if not self._hang_up(idle, END_S):
            return False
        self._backend.close()
        return True

    # ---- frames ------------------------------------------------------------------------------------------------------

    def _send(self, server: _Server, request: _Request, content: list[object], raw: bytes = b"") -> int:
        self._next += 1
        content[1] = self._next
        server.owed[self._next] = request
        self._add_work(server, request, 1)
        self._write(server, content, raw)
        return self._next

    @staticmethod
    def _add_work(server: _Server, request: _Request, sign: int) -> None:
        server.looks += sign * bool(request.look)
        if request.job is not None:
            blocks = sign * len(request.keys)
            if request.job.is_load:
                server.loads += blocks
            else:
                server.stores += blocks

    def _hear(self, child: _Server, content: Any, raw: bytes) -> None:
        self.has_heard = True
        kind, *arguments = content
        if kind == "alive":
            return
        if kind == "nearest":
            (self.nearest,) = map(dict, arguments)
            return
        number = arguments[0]
        request = child.owed.get(number)
        expected = "moved" if request and request.job else "looked" if request and request.look else "opened"
        if request is None or kind != expected:
            raise ValueError("it answered a request that it was not sent")
        if request.job is not None:
            _, encoded, said = arguments
            batch = decode_batch(encoded, request.keys)
            self._tell_all(said)
            self._end_part(request.job, batch)
        elif request.look:
            if len(raw) != request.look:
                raise ValueError(f"it sent {len(raw)} answers to {request.look} keys")
            _, said = arguments
            self._tell_all(said)
            self._looked.append((number, [FOUND[answer] for answer in raw]))
        else:
            _, capabilities, error = arguments
            self._opened = Opened(
                Capabilities(**capabilities) if capabilities else None, decode_error(error) if error else None
            )
        del child.owed[number]
        self._add_work(child, request, -1)

    def _tell_all(self, said: Iterable[object]) -> None:
        for text in said:
            self._tell(str(text))

    def _end_part(self, job: _Job, batch: Batch) -> None:
        job.batches.append(batch)
        job.left -= 1
        if not job.left:
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        del self._jobs[job.job_id]
        self._cost -= job.cost
        self._finished.append(FinishedJob(job.job_id, job.batches, job.blocks, self._clock() - job.submitted_at))

    # ---- servers -----------------------------------------------------------------------------------------------------

    def _servers_for(self, job_id: int, is_load: bool, now: float) -> list[_Server]:
        """Return the servers for a new job, the server with the least work first.

        If there is another server, a load does not wait behind stores, nor a store behind loads.

        Raises:
            QueueFullError: no server runs.
            ValueError: a job with this id is still under way.
        """
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is already in flight")
        servers = self._trusted(now)
        if not servers:
            raise QueueFullError("none of the tier's processes runs")
        own = [each for each in servers if (each.seats.loads_first if is_load else each.seats.stores_first)]
        free = [each for each in servers if each not in own and not (each.stores if is_load else each.loads)]
        return sorted([*own, *free], key=lambda each: each.loads + each.stores) or servers

    def _trusted(self, now: float) -> list[_Server]:
        """Return the running servers, if possible without servers that are silent or have not sent a frame yet."""
        limit_s = DOUBT_SHARE * self._deadline_s
        running = [each for each in self._children if each.runs]
        heard = [each for each in running if each.spoke_at is not None and self._silence(each, now) <= limit_s]
        return heard or running

    @staticmethod
    def _silence(server: _Server, now: float) -> float:
        if not server.owed:
            return 0.0
        return now - max(server.heard_at, next(iter(server.owed.values())).sent_at)

    def _begun(self, child: _Server) -> None:
        if self._cut:
            self._write(child, ["cut", self._cut])

    def _end_if_late(self, child: _Server, now: float) -> None:
        oldest_s = now - next(iter(child.owed.values())).sent_at if child.owed else 0.0
        limit_s = self._deadline_s
        if child.spoke_at is None:
            limit_s = max(START_S, limit_s)
            is_late = now - child.started_at > limit_s
        else:
            # Requests sent before the server came up are due from that time on.
            late_s = min(oldest_s, now - child.spoke_at)
            is_late = self._silence(child, now) > limit_s or late_s > LATE_FACTOR * limit_s
        if is_late:
            self._late_s = max(self._late_s, oldest_s)
            child.is_late = True
            self._end(child, f"it took more than {limit_s:g} s")

    def _lost(self, child: _Server, why: str) -> None:
        """Answer the open requests of a server that has ended."""
        owed, child.owed = child.owed, {}
        is_late, child.is_late = child.is_late, False
        is_loss = why != "shutdown"
        kind = StoreTimeoutError if is_late else StoreUnavailableError
        text = f"{why}; its process was killed" if is_late else f"the tier's process failed: {why}"
        for number, request in owed.items():
            self._add_work(child, request, -1)
            if request.job is not None:
                batch = Batch()
                count = len(request.keys)
                batch.outcomes["failed" if is_loss else "dropped"] += count
                batch.errors[kind.__name__ if is_loss else why] += count
                batch.perhaps_stored = count
                batch.fault = text if is_loss else ""
                self._end_part(request.job, batch)
            elif request.look:
                self._looked.append((number, [None] * request.look))
            else:
                self._opened = Opened(None, kind(text))
