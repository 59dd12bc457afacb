"""contract: a vLLM that lacks what kvtiers uses is refused and told why; any other one starts."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from connector.vllm import contract, versions
from connector.vllm.contract import CALLED, IMPLEMENTED, READ, check_contract
from tiers.errors import ConfigError

PACKAGE = Path(contract.__file__).parent
ENTRIES = [
    (kind, place, contract._Entry.of(text))
    for kind, table in (
        ("implemented", IMPLEMENTED),
        ("called", CALLED),
        ("read", {place: names.split() for place, names in READ.items()}),
    )
    for place, texts in table.items()
    for text in texts
    if contract._Entry.of(text).is_in(versions.release())
]
NEWEST = versions.release(versions.TESTED[-1])
METHODS = [entry for entry in ENTRIES if entry[0] != "read"]


def called(entry: tuple[str, str, Any]) -> str:
    """An id for a test."""
    kind, place, what = entry
    return f"{kind} {place.partition(':')[2] or place.rpartition('.')[2]}.{what.name}"


def owner_of(place: str) -> Any:
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        check_contract()
    return str(caught.value)


def test_the_installed_release_is_accepted_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    check_contract()
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.28.0rc1", "v0.32.0", "0.31.0+cpu"])
def test_a_release_is_known_by_its_first_two_numbers(version: str) -> None:
    found = versions.release(version)
    assert found is not None
    assert "{}.{}".format(*found) in versions.TESTED


@pytest.mark.parametrize("version", ["0.34.0", "0.27.1", "1.0.0", "dev", "", "unknown"])
def test_a_release_that_nobody_tried_starts_and_says_so(version: str, caplog: pytest.LogCaptureFixture) -> None:
    if versions.release() != NEWEST:
        pytest.skip("the installed release is not the newest, so it lacks what a later one must have")
    with caplog.at_level(logging.WARNING):
        check_contract(version)
    assert f"vLLM {version} was not tested with kvtiers (0.28 to 0.33 were)" in caplog.text


def test_a_release_that_nobody_tried_must_have_what_the_newest_has() -> None:
    if versions.release() == NEWEST:
        pytest.skip("the installed release is the newest")
    with pytest.raises(ConfigError, match=r"version '0\.34\.0' lacks .*OffloadingManager\.on_reset_flushed is gone"):
        check_contract("0.34.0")


def give_signature(
    owner: Any, name: str, change: Callable[[list[inspect.Parameter]], list[inspect.Parameter]], patch: Any
) -> None:
    """Put a function with other parameters, ``self`` among them, in the place of one of vLLM's."""
    static = inspect.getattr_static(owner, name)
    is_wrapped = isinstance(static, classmethod | staticmethod)
    signature = inspect.signature(static.__func__ if is_wrapped else static)

    def changed(*arguments: Any, **named: Any) -> Any:
        raise AssertionError

    changed.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=change(list(signature.parameters.values()))
    )
    patch.setattr(owner, name, type(static)(changed) if is_wrapped else changed)


@pytest.mark.parametrize("entry", METHODS, ids=called)
def test_one_more_argument_is_named(entry: tuple[str, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, place, what = entry
    owner = owner_of(place)

    def add(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
        kept = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
        return [*kept, inspect.Parameter("kv_epoch", inspect.Parameter.KEYWORD_ONLY)]

    give_signature(owner, what.name, add, monkeypatch)
    name = owner.__name__ if what.name == "__init__" else f"{owner.__name__}.{what.name}"
    assert f"{name} takes (" in refusal()
    assert "kv_epoch" in refusal()


@pytest.mark.parametrize(
    "entry",
    [
        entry
        for entry in METHODS
        if entry[0] == "implemented"
        and len([each for each in entry[2].parameters if each.kind is not each.VAR_KEYWORD]) > 1
    ],
    ids=called,
)
def test_arguments_in_another_order_are_named(entry: tuple[str, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, place, what = entry

    def swap(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
        own, first, second, *rest = parameters
        return [
            each if each.kind is each.VAR_KEYWORD else each.replace(default=each.empty)
            for each in (own, second, first, *rest)
        ]

    give_signature(owner_of(place), what.name, swap, monkeypatch)
    assert f" takes ({what.parameters[1].name}" in refusal()


@pytest.mark.parametrize("entry", ENTRIES, ids=called)
def test_what_is_gone_is_named(entry: tuple[str, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a class is one that has all of its attributes but this."""
    _, place, what = entry
    module, _, name = place.partition(":")
    owner = owner_of(place)
    if what.name == "__init__":
        monkeypatch.delattr(importlib.import_module(module), name)
        assert f"{module}.{name} is gone" in refusal()
        return
    if not name:
        if what.name not in vars(owner):
            pytest.skip("the module makes it when it is asked for")
        monkeypatch.delattr(owner, what.name)
    else:
        names = contract._attributes(owner) - {what.name, "__class__", "__dict__", "__weakref__", "__init__", "__new__"}
        attributes = {each: inspect.getattr_static(owner, each, None) for each in names}
        stand_in = type(name, (), {each: value for each, value in attributes.items() if not each.startswith("__")})
        monkeypatch.setattr(importlib.import_module(module), name, stand_in)
    monkeypatch.setattr(contract, "SHOWN_MAX", 100)
    assert f"{owner.__name__}.{what.name} is gone" in refusal()


def test_a_new_abstract_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.base import OffloadingManager

    monkeypatch.setattr(OffloadingManager, "__abstractmethods__", OffloadingManager.__abstractmethods__ | {"fence"})
    assert "OffloadingManager.fence is new and abstract" in refusal()


def test_many_changes_are_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = random.Random(1).sample([place for place in IMPLEMENTED if "tiering" not in place], 3)
    for place in chosen:
        module, _, name = place.partition(":")
        monkeypatch.delattr(importlib.import_module(module), name)
    monkeypatch.setattr(contract, "SHOWN_MAX", 2)
    assert "; and 1 more. Install a release that kvtiers was tested with (0.28 to 0.33)" in refusal()


def test_a_door_is_closed_before_it_misses_a_name() -> None:
    script = """
import vllm.v1.kv_offload.base as base
base.PrepareStoreResult = base.PrepareStoreOutput
del base.PrepareStoreOutput
import connector.vllm.spec
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    error = run.stderr.strip().splitlines()[-1]
    assert error.startswith("tiers.errors.ConfigError: vllm: version ")
    assert "vllm.v1.kv_offload.base.PrepareStoreOutput is gone" in error


# ---- the table and the code ------------------------------------------------------------------------------------


def our_classes() -> Iterator[type]:
    """Classes of connector.vllm that inherit from one of vLLM's."""
    for path in sorted(PACKAGE.glob("*.py")):
        module = importlib.import_module(f"connector.vllm.{path.stem}" if path.stem != "__init__" else "connector.vllm")
        for each in vars(module).values():
            if isinstance(each, type) and each.__module__ == module.__name__ and theirs(each):
                yield each


def theirs(ours: type) -> list[type]:
    return [each for each in ours.__mro__ if each.__module__.startswith("vllm.")]


OURS = sorted(our_classes(), key=lambda each: each.__name__)


@pytest.mark.parametrize("ours", OURS, ids=lambda each: each.__name__)
def test_every_method_that_vllm_calls_is_in_the_table(ours: type) -> None:
    bases = theirs(ours)
    own = [each for each in ours.__mro__ if each.__module__.startswith("connector.vllm")]
    known = {
        contract._Entry.of(text).name
        for base in bases
        for text in IMPLEMENTED.get(f"{base.__module__}:{base.__qualname__}", ())
    }
    for name in {name for each in own for name in vars(each) if not name.startswith("_") or name == "__init__"}:
        if any(inspect.isroutine(vars(base).get(name)) for base in bases):
            assert name in known, f"{ours.__name__}.{name}"


@pytest.mark.parametrize("ours", OURS, ids=lambda each: each.__name__)
def test_ours_take_what_the_table_says(ours: type) -> None:
    for base in theirs(ours):
        for text in IMPLEMENTED.get(f"{base.__module__}:{base.__qualname__}", ()):
            entry = contract._Entry.of(text)
            if not any(entry.name in vars(each) for each in ours.__mro__ if each.__module__.startswith("connector.")):
                continue  # inherited as it is
            found = inspect.signature(ours if entry.name == "__init__" else getattr(ours, entry.name))
            arguments = [None] * len([each for each in entry.parameters if each.kind is each.POSITIONAL_OR_KEYWORD])
            is_bound = entry.name == "__init__" or isinstance(inspect.getattr_static(ours, entry.name), classmethod)
            found.bind(*([] if is_bound else [None]), *arguments)


def imported() -> set[str]:
    """``module:name`` of all that connector.vllm imports from vLLM."""
    found = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return found


def test_every_name_that_is_imported_is_in_the_table() -> None:
    optional = {"vllm.v1.attention.backends.cpu_attn:_get_attn_isa"}  # kv_platform works without this function
    places = {*IMPLEMENTED, *CALLED, *READ}
    inside = {f"{place}:{what.name}" for _, place, what in ENTRIES}
    modules = {place.partition(":")[0] for place in places}
    for name in imported() - optional:
        assert name in places | inside or name.replace(":", ".") in modules, name
