"""Runs random sequences of calls on a store and compares the results with a dict.

A complete test of a store::

    @contextmanager
    def place():
        with tempfile.TemporaryDirectory() as folder:
            yield lambda: MyStore(folder)

    def test_sequences():
        run_store_machine(place)

The contract suite tests each rule separately. This machine finds rules that break only after other calls: a cached size
of a blob that was replaced, or a deleted key that is still listed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from ..errors import BlobCorruptError, BlobNotFoundError
from ..store import Store, SupportsTail
from .contract import as_parts, fetch, list_keys, make_data

Place = Callable[[], AbstractContextManager[Callable[[], Store]]]
"""Makes a fresh place for blobs and removes it at the end. Yields a function that opens another store on the place."""

KEYS = ("a", "a.bin", "b/a", "b/c/a", "b/c/aa", "bb/a")
PREFIXES = ("", "a", "b", "b/", "b/c/a", "x")
TAIL_LENGTHS = (1, 64, 4096)

any_key = st.sampled_from(KEYS)
# Mostly a stored key, because few mistakes are possible with an absent key.
some_key = st.runner().flatmap(lambda machine: any_key | st.sampled_from(sorted(machine.blobs) * 3 or KEYS))
some_keys = st.lists(some_key, max_size=3, unique=True)
some_data = st.builds(make_data, st.sampled_from((0, 1, 100, 4096, 12_289)), st.integers(0, 3))


class StoreMachine(RuleBasedStateMachine):
    """State machine of two stores on one place; each call goes to either of them.

    Attributes:
        place: set by a subclass.
    """

    place: Place

    @initialize(stored=st.dictionaries(any_key, some_data, min_size=2))
    def start(self, stored: dict[str, bytes]) -> None:
        self.blobs = stored
        self.stack = ExitStack()
        self.open = self.stack.enter_context(type(self).place())
        first = self.open()
        self.stores = [first, self.open() if first.capabilities.shared else first]
        for key, data in stored.items():
            first.put(key, as_parts(data))

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            for store in self.stores:
                store.close()
            self.stack.close()

    @rule(key=any_key, data=some_data, cut=st.integers(0, 12_289), overwrite=st.booleans(), by=st.integers(0, 1))
    def put(self, key: str, data: bytes, cut: int, overwrite: bool, by: int) -> None:
        is_new = key not in self.blobs
        published = self.stores[by].put(key, as_parts(data, min(cut, len(data))), overwrite=overwrite)
        assert published or not (is_new or overwrite)
        if is_new or overwrite:
            self.blobs[key] = data

    @rule(key=some_key, by=st.integers(0, 1))
    def get(self, key: str, by: int) -> None:
        if key in self.blobs:
            assert fetch(self.stores[by], key, len(self.blobs[key])) == self.blobs[key]
        else:
            with pytest.raises(BlobNotFoundError):
                fetch(self.stores[by], key, 100)

    @rule(key=some_key, more=st.sampled_from((-1, 1, 4096)), by=st.integers(0, 1))
    def get_another_size(self, key: str, more: int, by: int) -> None:
        if key in self.blobs and (size := len(self.blobs[key]) + more) >= 0:
            with pytest.raises(BlobCorruptError):
                fetch(self.stores[by], key, size)

    @rule(key=some_key, by=st.integers(0, 1))
    def size(self, key: str, by: int) -> None:
        assert self.stores[by].size(key) == self._size(key)

    @rule(keys=some_keys, by=st.integers(0, 1))
    def size_many(self, keys: list[str], by: int) -> None:
        assert list(self.stores[by].size_many(keys)) == [self._size(key) for key in keys]

    @rule(key=some_key, length=st.sampled_from(TAIL_LENGTHS), by=st.integers(0, 1))
    def get_tail(self, key: str, length: int, by: int) -> None:
        store, blob = self.stores[by], self.blobs.get(key)
        if isinstance(store, SupportsTail):
            found = store.get_tail(key, length)
            assert (found and (found[0], bytes(found[1]))) == (None if blob is None else (len(blob), blob[-length:]))

    @rule(key=some_key)
    def ask_everything_of_both(self, key: str) -> None:
        """Fill any cache that either store has for a key, so that the next change reveals stale entries."""
        for by in (0, 1):
            self.size(key, by)
            self.size_many([key], by)
            self.get(key, by)
            for length in TAIL_LENGTHS:
                self.get_tail(key, length, by)

    @rule(key=some_key, by=st.integers(0, 1))
    def delete(self, key: str, by: int) -> None:
        self.stores[by].delete(key)
        self.blobs.pop(key, None)

    @rule(keys=some_keys, by=st.integers(0, 1))
    def delete_many(self, keys: list[str], by: int) -> None:
        assert not any(self.stores[by].delete_many(keys))
        for key in keys:
            self.blobs.pop(key, None)

    @rule(prefix=st.sampled_from(PREFIXES), by=st.integers(0, 1))
    def keys(self, prefix: str, by: int) -> None:
        assert list_keys(self.stores[by], prefix) == sorted(key for key in self.blobs if key.startswith(prefix))

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        if self.stores[0].capabilities.shared:
            self.stores[which].close()
            self.stores[which] = self.open()

    def _size(self, key: str) -> int | None:
        return len(self.blobs[key]) if key in self.blobs else None


def run_store_machine(place: Place, *, examples: int = 30, steps: int = 40) -> None:
    """Run ``examples`` random sequences of up to ``steps`` calls. Shows the shortest sequence that breaks a rule."""
    machine = type("Machine", (StoreMachine,), {"place": staticmethod(place)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            phases=set(Phase) - {Phase.explain},  # reruns a failing sequence for a minute and explains little about it
            stateful_step_count=steps,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
