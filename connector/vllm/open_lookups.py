"""OpenLookups: tracks requests with unanswered lookups, so that vLLM need not repeat these in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..core.pacing import Pacer


class OpenLookups:
    """The requests that wait for lookups. Scheduler thread only.

    Args:
        pacer: notified of each lookup, and of each step in which a request goes on waiting.
        waits_on: returns whether a request waits and has no news.
    """

    def __init__(self, pacer: Pacer, waits_on: Callable[[str], bool] = lambda _: True) -> None:
        self._pacer = pacer
        self._waits_on = waits_on
        self._left_open = False  # a lookup has had no answer since ``continue_wait`` last returned False
        self._computed: dict[str, int] = {}  # waiting request -> tokens that the GPU had when it was looked up

    def __iter__(self) -> Iterator[str]:
        return iter(self._computed)

    def asked(self, answer: bool | None) -> None:
        """Note the answer of a lookup. None: a request waits for the answer."""
        self._pacer.asked(answer)
        self._left_open |= answer is None

    def note_asked(self, req_id: str, num_computed_tokens: int, *, is_open: bool) -> None:
        """Remember the outcome of the lookups that vLLM just made for a request.

        Args:
            num_computed_tokens: tokens of the request that the GPU already had.
            is_open: vLLM does not know the result yet and will ask again.
        """
        if is_open and self._left_open:
            self._computed[req_id] = num_computed_tokens
        else:
            self.forget(req_id)

    def continue_wait(self, req_id: str, num_computed_tokens: int) -> bool:
        """Continue a request's wait for a step without lookups, because they would have no answer again. O(1).

        If it returns False, let vLLM look the keys up and then call ``note_asked``.
        """
        if self._computed.get(req_id) != num_computed_tokens or not self._waits_on(req_id):
            self._left_open = False
            return False
        self._pacer.asked(None)
        return True

    def forget(self, req_id: str) -> None:
        """Let a request's keys be looked up when vLLM asks next: there are answers, or the request has ended."""
        self._computed.pop(req_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._computed.clear()
