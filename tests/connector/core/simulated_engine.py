"""A simulated engine over the real BlockManager, and a tier behind a simulated link. Time is the test's.

The engine works as vLLM does: in each step it looks its waiting requests up in order, loads what they found, and
computes prompts in chunks. The link sends blocks one after the other, or all that wait, up to ``PARALLEL``,
at once: those share its bandwidth and end together, which hides a load's progress.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.options import ManagerOptions
from kvtiers.connector.core.slots import Slots
from kvtiers.tiers.base import JobMetadata, JobResult, ReqContext, SecondaryTierManager
from kvtiers.tiers.blocks.keys import OffloadKey
from tests.clock import Clock
from tests.connector.core.scripted_tier import make_view
from tests.identity import block_key

PARALLEL = 64
BLOCK_TOKENS = 200
STEP_TOKENS = 2048
_IDLE_STEP_S = 0.001


@dataclass
class Link:
    """A link to storage.

    Attributes:
        blocks_per_s: bandwidth.
        latency_s: of a request.
        at_once: number of blocks that it sends at once.
        slow_at: time at which the bandwidth drops to ``slow_share`` of it.
    """

    blocks_per_s: float
    latency_s: float
    at_once: int = 1
    slow_at: float = math.inf
    slow_share: float = 0.1

    def end_of(self, begin: float, blocks: int) -> float:
        """When a transfer of so many blocks ends that begins at ``begin``."""
        end = begin + blocks / self.blocks_per_s
        if end <= self.slow_at:
            return end
        begin_slow = max(begin, self.slow_at)
        left = blocks - max(0.0, begin_slow - begin) * self.blocks_per_s
        return begin_slow + left / (self.blocks_per_s * self.slow_share)


class LinkTier(SecondaryTierManager):
    """Has all keys but ``absent``; lookups take the link's latency, loads its time."""

    job_deadline_s = 15.0

    def __init__(self, clock: Clock, link: Link, num_slots: int, name: str = "link") -> None:
        super().__init__(None, make_view(num_slots), name)
        self.link = link
        self.absent: set[OffloadKey] = set()
        self.loaded = 0
        self._clock = clock
        self.asked: dict[OffloadKey, float] = {}  # key that was looked up -> when it is answered
        self._open: dict[str, set[OffloadKey]] = {}
        self._waiting: deque[tuple[float, int]] = deque()  # submitted at, job
        self._left: dict[int, int] = {}  # blocks of each job that have not arrived
        self._jobs: dict[int, JobMetadata] = {}
        self._began: dict[int, float] = {}
        self._batch: list[int] = []  # job of each block that is on its way
        self._batch_began = self._batch_ends = -math.inf
        self._done: list[JobResult] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        now = self._clock()
        if self.asked.setdefault(key, now + self.link.latency_s) > now:
            assert req_context is not None
            self._open.setdefault(req_context.req_id, set()).add(key)
            return None
        return key not in self.absent

    def take_answered(self) -> dict[str, set[OffloadKey]]:
        now = self._clock()
        answered = {}
        for req_id, keys in list(self._open.items()):
            if known := {key for key in keys if self.asked[key] <= now}:
                answered[req_id] = known
                keys -= known
                if not keys:
                    del self._open[req_id]
        return answered

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._done.append(JobResult(job_metadata.job_id, True, tuple(job_metadata.keys)))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        job_id = job_metadata.job_id
        self._jobs[job_id] = job_metadata
        self._left[job_id] = len(job_metadata.keys)
        self._began[job_id] = self._clock()
        self._waiting.extend([(self._clock(), job_id)] * len(job_metadata.keys))

    def get_finished(self) -> Iterable[JobResult]:
        while self._advance():
            pass
        done, self._done = self._done, []
        return done

    def next_event(self) -> float:
        """When something happens next, at the latest."""
        while self._advance():
            pass
        answers = [self.asked[key] for keys in self._open.values() for key in keys]
        return min([self._batch_ends if self._batch else math.inf, *answers])

    def _advance(self) -> bool:
        now = self._clock()
        if self._batch:
            self._batch_ends = self.link.end_of(self._batch_began, len(self._batch))
            if self._batch_ends > now:
                return False
            for job_id in self._batch:
                self.loaded += 1
                self._left[job_id] -= 1
                if not self._left[job_id]:
                    del self._left[job_id]
                    took_s = self._batch_ends - self._began.pop(job_id)
                    keys = tuple(self._jobs.pop(job_id).keys)
                    self._done.append(JobResult(job_id, True, keys, took_s))
            self._batch = []
        if not self._waiting:
            return False
        begin = max(self._waiting[0][0] + self.link.latency_s, self._batch_ends)
        self._batch = [self._waiting.popleft()[1] for _ in range(min(self.link.at_once, len(self._waiting)))]
        self._batch_began = begin
        self._batch_ends = self.link.end_of(begin, len(self._batch))
        return True


def look_up(manager: BlockManager, keys: Iterable[OffloadKey], context: ReqContext) -> list[bool | None]:
    """The answers for a request's keys, up to the first miss: an engine asks no further."""
    answers = []
    for key in keys:
        answers.append(manager.lookup(key, context))
        if answers[-1] is False:
            break
    return answers


@dataclass
class Request:
    """A request of one token.

    Attributes:
        loaded: number of its tokens that were loaded.
        first_token_at: time of its first token.
    """

    req_id: str
    keys: list[OffloadKey]
    tokens: int
    came_at: float
    computed: int = 0
    loaded: int = 0
    first_token_at: float = math.nan

    @property
    def first_token_s(self) -> float:
        return self.first_token_at - self.came_at


@dataclass
class Engine:
    """An engine with the given speed.

    Attributes:
        step_s: time of a step without prompt tokens.
        token_s: of each prompt token.
        work_s: of each pair of a prompt token and an earlier token.
    """

    links: list[Link]
    step_s: float
    token_s: float
    work_s: float = 0.0
    load: str = "auto"
    num_slots: int = 4096
    block_tokens: int = BLOCK_TOKENS
    clock: Clock = field(default_factory=lambda: Clock(0.0))

    def __post_init__(self) -> None:
        self.tiers = [LinkTier(self.clock, link, self.num_slots, f"tier{at}") for at, link in enumerate(self.links)]
        for tier in self.tiers:
            tier.load = self.load
        options = ManagerOptions(
            blocks_per_token=1 / self.block_tokens,
            step_tokens_max=STEP_TOKENS,
        )
        self.manager = BlockManager(Slots(self.num_slots), self.tiers, options, clock=self.clock)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._numbers = itertools.count(1)

    def compute_s(self, tokens: int) -> float:
        """Seconds to compute a prompt if nothing is loaded and nothing else runs."""
        steps = math.ceil(tokens / STEP_TOKENS)
        return steps * self.step_s + tokens * self.token_s + tokens * tokens / 2 * self.work_s

    def send(self, tokens: int, *, stored: bool = True, prefix: list[OffloadKey] | None = None) -> Request:
        """Send a request whose prompt no other has, but for ``prefix``."""
        number = next(self._numbers)
        count = (tokens - 1) // self.block_tokens - len(prefix or ())
        keys = [block_key(number * 1000 + at) for at in range(count)]
        if not stored:
            for tier in self.tiers:
                tier.absent.update(keys)
        request = Request(f"r{number}", [*(prefix or ()), *keys], tokens, self.clock.now)
        self.waiting.append(request)
        return request

    def run(self) -> None:
        """Run until all requests have their first token."""
        while self.waiting or self.running:
            self.step()

    def rest(self, seconds: float) -> None:
        """Let time pass without requests. An engine makes steps while loads have not ended."""
        until = self.clock.now + seconds
        while self.manager.has_jobs_to_await() and self.clock.now < until:
            self.step()
        self.clock.now = max(self.clock.now, until)

    def first_token_s(self, tokens: int, *, stored: bool = True) -> float:
        """Send a request to the idle engine; returns the seconds to its first token."""
        request = self.send(tokens, stored=stored)
        self.run()
        return request.first_token_s

    def step(self) -> None:
        """One step."""
        steps = self.manager.decisions.steps
        budget = STEP_TOKENS
        scheduled: list[tuple[Request, int]] = []
        for request in self.running:
            scheduled.append((request, min(budget, request.tokens - request.computed)))
            budget -= scheduled[-1][1]
        for request in list(self.waiting):
            if not budget:
                break
            if not self._ask(request):
                continue
            self.waiting.remove(request)
            self.running.append(request)
            scheduled.append((request, min(budget, request.tokens - request.computed)))
            budget -= scheduled[-1][1]
        steps.began([(request.req_id, count, request.computed) for request, count in scheduled], self.clock())
        self.manager.on_schedule_end()
        took_s = self.step_s if scheduled else 0.0
        for request, count in scheduled:
            took_s += count * (self.token_s + self.work_s * (request.computed + count / 2))
            request.computed += count
        if not scheduled:
            quickest_s = min((self.compute_s(each.tokens) for each in self.waiting), default=1.0) / 50
            next_event = min(tier.next_event() for tier in self.tiers)
            took_s = max(_IDLE_STEP_S, min(quickest_s, next_event - self.clock()))
        self.clock.advance(took_s)
        steps.ended(self.clock())
        for request, _ in scheduled:
            if request.computed == request.tokens:
                request.first_token_at = self.clock()
                self.running.remove(request)
                self.manager.on_request_finished(ReqContext(request.req_id))

    def _ask(self, request: Request) -> bool:
        """Look the request up and load what was found. False: not known yet."""
        context = ReqContext(request.req_id)
        if self.manager.continue_wait(request.req_id):
            return False
        self.manager.note_request(request.req_id, request.tokens, 0)
        answers = look_up(self.manager, request.keys, context)
        if None in answers:
            return False
        if found := request.keys[: sum(map(bool, answers))]:
            self.manager.prepare_load(found, context)
            self.manager.touch(found)
            self.manager.complete_load(found)
        request.computed = request.loaded = len(found) * self.block_tokens
        return True
