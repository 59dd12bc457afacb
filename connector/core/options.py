"""Limits of a BlockManager."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...tiers.errors import ConfigError

LOOKUP_TOTAL_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerOptions:
    """Limits of a BlockManager.

    Attributes:
        promotion_wait_s: how long a hit waits for room in the region before it counts as a miss. The time for prompts
            that the engine has begun is added, because after a miss the request would wait for these prompts anyway.
            If nothing is being loaded, later requests give up their held blocks after a tenth of
            ``promotion_wait_s``.
        lookup_total_s: longest wait of a request for the tiers' answers. Then the request uses the prefix known so far.
            The tiers' own limits are usually shorter.
        load_deadline_s: an unreported load counts as a miss after this time, or at the tier's deadline if that is
            sooner (``GuardedTier.deadline_s``). I/O that cannot be ended keeps its slots, but its request goes on.
        store_backlog_share: part of the region that blocks on their way to tiers may pin, divided equally among the
            tiers. A tier with a full part gets no more blocks. If a job exceeds the part, the rest waits unpinned and
            may be evicted meanwhile. So a hung tier takes neither the whole region nor the other tiers' parts.
        load_share: part of the region that unreported loads may hold, divided equally among the tiers. The rest of a
            larger load follows as loads are reported. A hit that waits for its tier's part is a miss after the tier's
            load deadline, or at once if all of the tier's unreported loads were given up. The default is less than
            ``store_backlog_share`` leaves, so the region has room even if every tier hangs.
        promotion_hold_s: how long blocks that a waiting request found, or that were loaded for it, are kept after its
            latest lookup or load.
        shutdown_s: time limit of ``shutdown``. vLLM kills its engine after 5 s.
        blocks_per_token: number of stored blocks per token of a long prompt. 0: hits always count as the whole prompt.
        step_tokens_max: tokens that the engine computes in one step.
    """

    promotion_wait_s: float = 0.5
    lookup_total_s: float = LOOKUP_TOTAL_S
    load_deadline_s: float = math.inf
    store_backlog_share: float = 0.5
    load_share: float = 0.4
    promotion_hold_s: float = 2.0
    shutdown_s: float = 4.8
    blocks_per_token: float = 0.0
    step_tokens_max: int = 8192

    def __post_init__(self) -> None:
        for name in (
            *("promotion_wait_s", "lookup_total_s", "load_deadline_s"),
            *("promotion_hold_s", "shutdown_s"),
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{getattr(self, name)!r} is not accepted; write 0 or more seconds", field=name)
        for name in ("store_backlog_share", "load_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{getattr(self, name)!r} is not accepted; write above 0, up to 1", field=name)
        if not self.step_tokens_max >= 1:
            raise ConfigError(f"{self.step_tokens_max!r} is not accepted; write 1 or more", field="step_tokens_max")
