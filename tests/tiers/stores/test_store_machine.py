"""Random sequences of calls on stores that need no server, and on a store that breaks a rule only in a sequence."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.files.nfs import NfsStore
from kvtiers.tiers.stores.fsspec import FsspecStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.machine import StoreMachine, run_store_machine


@contextmanager
def in_folder(make: Callable[[str], Store]) -> Iterator[Callable[[], Store]]:
    with tempfile.TemporaryDirectory() as folder:
        yield lambda: make(folder)


@contextmanager
def in_memory() -> Iterator[Callable[[], Store]]:
    yield MemoryStore


@pytest.mark.parametrize(
    "place",
    [
        in_memory,
        partial(in_folder, LocalStore),
        partial(in_folder, NfsStore),
        partial(in_folder, lambda folder: FsspecStore(f"file://{folder}")),
    ],
    ids=["memory", "local", "nfs", "fsspec"],
)
def test_random_call_sequences_match_the_model(place: Callable[[], Iterator[Callable[[], Store]]]) -> None:
    run_store_machine(place)  # type: ignore[arg-type]


class Forgetful(MemoryStore):
    """Returns the first size of a key even after the blob was replaced."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, int] = {}

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        self._seen.setdefault(key, sum(part.nbytes for part in parts))
        return super().put(key, parts, overwrite=overwrite)

    def size(self, key: str) -> int | None:
        return None if super().size(key) is None else self._seen[key]


def test_store_that_fails_only_in_a_sequence_is_found() -> None:
    @contextmanager
    def place() -> Iterator[Callable[[], Store]]:
        yield Forgetful

    machine = type("Machine", (StoreMachine,), {"place": staticmethod(place)})
    without_shortening = settings(max_examples=200, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=without_shortening)
