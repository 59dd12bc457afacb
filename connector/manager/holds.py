"""Blocks of the region that are kept for requests that wait for more: those they found there and those they loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from kvtiers.connector.manager.primary import Block, BlockState, CPUPrimaryTier
from kvtiers.connector.manager.promotion import Request
from kvtiers.tiers.blocks.keys import OffloadKey


class Holds:
    """Pins blocks for requests, and lets go of them. Scheduler thread only.

    What a request has found in the region must stay while it waits for the rest, or it would find that gone in turn.

    Args:
        hold_s: how long blocks are kept for a request that neither waits for a tier nor comes.
    """

    def __init__(self, primary: CPUPrimaryTier, hold_s: float) -> None:
        self._primary = primary
        self._hold_s = hold_s
        self._found: defaultdict[str, dict[OffloadKey, Block]] = defaultdict(dict)  # in this step, by request

    def note(self, req_id: str, block: Block) -> None:
        """A request found a block."""
        self._found[req_id][block.key] = block

    def found(self) -> list[str]:
        """Requests that found blocks in this step which are not held yet."""
        return list(self._found)

    def hold_found(self, request: Request, now: float) -> None:
        """Hold what it found in this step."""
        if request.hits or request.loading:
            request.held_until = now + self._hold_s
        if now <= request.held_until:
            found = self._found.pop(request.context.req_id, {})
            if not found.keys() <= request.held.keys():  # mostly it has found the same before
                self._hold(request, found.values())

    def hold_loaded(self, request: Request, blocks: Iterable[Block], now: float) -> None:
        """Hold what a tier has loaded for it."""
        self._hold(request, blocks)
        request.held_until = now + self._hold_s

    def let_go(self, request: Request) -> None:
        """Hold nothing for it."""
        for block in reversed(request.held.values()):  # a prefix's first blocks are to be the last to leave
            self._primary.unpin(block)
        request.held = {}

    def forget(self, req_id: str) -> None:
        """It is over, or has come: it needs nothing of what it found to be held."""
        self._found.pop(req_id, None)

    def end_step(self) -> None:
        """What was found is old."""
        self._found.clear()

    def _hold(self, request: Request, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.state is BlockState.READY and block.key not in request.held:
                self._primary.pin(block)
                request.held[block.key] = block
