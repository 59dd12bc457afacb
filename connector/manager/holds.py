"""Holds: keeps blocks in the region for waiting requests, both blocks found there and blocks loaded for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from kvtiers.connector.manager.primary import Block, BlockState, CPUPrimaryTier
from kvtiers.connector.manager.promotion import Request
from kvtiers.tiers.blocks.keys import OffloadKey


class Holds:
    """Pins blocks for requests, and unpins them. Scheduler thread only.

    The blocks that a request found must stay while it waits for others, or it would have to wait for them in turn.

    Args:
        hold_s: how long blocks are kept for a request that no longer waits for a tier and has not come to load them.
    """

    def __init__(self, primary: CPUPrimaryTier, hold_s: float) -> None:
        self._primary = primary
        self._hold_s = hold_s
        self._found: defaultdict[str, dict[OffloadKey, Block]] = defaultdict(dict)  # in this step, by request id

    def note(self, req_id: str, block: Block) -> None:
        """Note that a request found a block."""
        self._found[req_id][block.key] = block

    def found(self) -> list[str]:
        """Ids of the requests that found blocks in this step and do not hold them yet."""
        return list(self._found)

    def hold_found(self, request: Request, now: float) -> None:
        """Hold the blocks that a request found in this step, if it waits for others or its hold time still runs."""
        if request.hits or request.loading:
            request.held_until = now + self._hold_s
        if now <= request.held_until:
            found = self._found.pop(request.context.req_id, {})
            if not found.keys() <= request.held.keys():  # usually it found the same blocks in an earlier step
                self._hold(request, found.values())

    def hold_loaded(self, request: Request, blocks: Iterable[Block], now: float) -> None:
        """Hold the blocks that a tier has loaded for a request."""
        self._hold(request, blocks)
        request.held_until = now + self._hold_s

    def let_go(self, request: Request) -> None:
        """Unpin all blocks held for a request."""
        for block in reversed(request.held.values()):  # so that a prefix's first blocks are evicted last
            self._primary.unpin(block)
        request.held = {}

    def forget(self, req_id: str) -> None:
        """Forget the blocks that a request found: it has finished or is loading them, so they need no hold."""
        self._found.pop(req_id, None)

    def end_step(self) -> None:
        """Forget all blocks found in this step."""
        self._found.clear()

    def _hold(self, request: Request, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.state is BlockState.READY and block.key not in request.held:
                self._primary.pin(block)
                request.held[block.key] = block
