"""A store that does what a key says, for workers that must import little."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiers import errors
from tiers.store import Capabilities, KeyInfo, Store


@dataclass(frozen=True)
class OptionsDataclass:
    """Options as S3's are."""

    name: str
    count: int
    inner: dict[str, list[object]]


class PlainStore(Store):
    """Only the six methods; a key says what happens. Stores nothing."""

    capabilities = Capabilities(exclusive_create=False, shared=False, latency_bound=True)

    def __init__(self, root_dir: str, options: OptionsDataclass | None = None) -> None:
        self._texts = {"options": repr(options)}
        while os.path.exists(os.path.join(root_dir, "hang-at-start")):
            signal.pause()

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        self._act(key)
        return True

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self._act(key)
        data = self._text(key)
        parts[0][:] = data

    def size(self, key: str) -> int | None:
        self._act(key)
        return len(self._text(key)) if key in ("options", "modules") else 4 if key == "slow" else None

    def delete(self, key: str) -> None:
        self._act(key)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        for i in range(512):  # two pages
            yield KeyInfo("first" if not i else f"k{i}", 0, 0.0)
        self._act(prefix)

    def close(self) -> None:
        pass

    def _text(self, key: str) -> bytes:
        return (" ".join(sorted(sys.modules)) if key == "modules" else self._texts[key]).encode()

    def _act(self, key: str) -> None:
        if key == "hang":
            threading.Event().wait()
        elif key == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif key == "slow":
            threading.Event().wait(0.3)
        elif key == "raise/ZeroDivisionError":
            raise ZeroDivisionError
        elif key.startswith("raise/"):
            raise getattr(errors, key.removeprefix("raise/"))("as told", key=key)
