"""contract: a vLLM that lacks what kvtiers uses is refused and told why; any other one starts."""

from __future__ import annotations

import abc
import ast
import importlib
import inspect
import logging
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from kvtiers.connector.vllm import contract, versions
from kvtiers.connector.vllm.contract import CALLED, READ, check_contract, entries_of, implements
from kvtiers.tiers.errors import ConfigError

PACKAGE = Path(contract.__file__).parent
NEWEST = versions.release(versions.TESTED[-1])


def entries(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Place and name of each entry that the installed release has."""
    found = []
    for place, names in table.items():
        for text, _, since in (each.partition(">=") for each in entries_of(names)):
            if not since or (versions.release() or (99, 0)) >= (versions.release(since) or (0, 0)):
                found.append((place, text.strip().partition("(")[0]))
    return found


def our_classes() -> Iterator[type]:
    """Classes of kvtiers.connector.vllm with methods that vLLM calls."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        module = importlib.import_module(".".join(("kvtiers.connector.vllm", *parts)).removesuffix(".__init__"))
        for each in vars(module).values():
            if isinstance(each, type) and each.__module__ == module.__name__ and called_by_vllm(each):
                yield each


def theirs(ours: type) -> list[type]:
    return [each for each in ours.__mro__ if each.__module__.startswith("vllm.")]


def called_by_vllm(ours: type) -> list[tuple[type, str]]:
    """Name of each method of a class that overrides one of vLLM's, and vLLM's class."""
    return [
        (base, name)
        for name in vars(ours)
        if (name == "__init__" or not name.startswith("_")) and inspect.isroutine(getattr(ours, name))
        for base in [base for base in theirs(ours) if name in vars(base)][:1]
    ]


OURS = sorted(our_classes(), key=lambda each: each.__name__)
METHODS = [(ours, base, name) for ours in OURS for base, name in called_by_vllm(ours)]


def called(value: Any) -> str:
    """An id for a test."""
    return value.__name__ if isinstance(value, type) else str(value).rpartition(":")[2]


def owner_of(place: str) -> Any:
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def refusal(check: Callable[[], object] = check_contract) -> str:
    with pytest.raises(ConfigError) as caught:
        check()
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
    missing = [*contract.changes(None), *(each for ours in OURS for each in contract.changed_methods(ours, None))]
    assert "OffloadingManager.on_reset_flushed is gone" in missing


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


def one_more(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    kept = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
    return [*kept, inspect.Parameter("kv_epoch", inspect.Parameter.KEYWORD_ONLY)]


@pytest.mark.parametrize(("place", "name"), entries(CALLED), ids=called)
def test_one_more_argument_of_a_function_is_named(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = owner_of(place)
    give_signature(owner, name, one_more, monkeypatch)
    full_name = owner.__name__ if name == "__init__" else f"{owner.__name__}.{name}"
    assert f"{full_name} takes (" in refusal()
    assert "kv_epoch" in refusal()


@pytest.mark.parametrize(("ours", "base", "name"), METHODS, ids=called)
def test_one_more_argument_of_a_method_is_named(
    ours: type, base: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    implements(ours)
    give_signature(base, name, one_more, monkeypatch)
    full_name = base.__name__ if name == "__init__" else f"{base.__name__}.{name}"
    found = refusal(lambda: implements(ours))
    assert f"{full_name} takes (" in found
    assert "kv_epoch" in found


@pytest.mark.parametrize(
    ("ours", "base", "name"),
    [
        (ours, base, name)
        for ours, base, name in METHODS
        if len([each for each in inspect.signature(getattr(ours, name)).parameters if each != "self"]) > 1
        and not any(each.endswith("kwargs") for each in inspect.signature(getattr(ours, name)).parameters)
    ],
    ids=called,
)
def test_arguments_in_another_order_are_named(
    ours: type, base: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swap(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
        own, first, second, *rest = parameters
        return [each.replace(default=each.empty) for each in (own, second, first, *rest)]

    before = inspect.signature(
        inspect.unwrap(getattr(inspect.getattr_static(base, name), "__func__", getattr(base, name)))
    )
    if len(before.parameters) < 3:
        pytest.skip("this release passes one argument")
    give_signature(base, name, swap, monkeypatch)
    assert f" takes ({list(before.parameters)[2]}" in refusal(lambda: implements(ours))


@pytest.mark.parametrize(("place", "name"), entries(CALLED) + entries(READ), ids=called)
def test_what_is_gone_is_named(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a class is one that has all of its attributes but this."""
    module, _, cls = place.partition(":")
    owner = owner_of(place)
    if name == "__init__":
        monkeypatch.delattr(importlib.import_module(module), cls)
        assert f"{module}.{cls} is gone" in refusal()
        return
    if not cls:
        if name not in vars(owner):
            pytest.skip("the module makes it when it is asked for")
        monkeypatch.delattr(owner, name)
    else:
        names = contract._attributes(owner) - {name, "__class__", "__dict__", "__weakref__", "__init__", "__new__"}
        attributes = {each: inspect.getattr_static(owner, each, None) for each in names}
        stand_in = type(cls, (), {each: value for each, value in attributes.items() if not each.startswith("__")})
        monkeypatch.setattr(importlib.import_module(module), cls, stand_in)
    monkeypatch.setattr(contract, "SHOWN_MAX", 100)
    assert f"{owner.__name__}.{name} is gone" in refusal()


def test_attributes_of_class_are_those_that_its_constructor_stores() -> None:
    class Scheduler:
        def __init__(self, spec: Any) -> None:
            self._manager, self.first = spec.manager, spec
            self.second = self.third = spec
            spec.region = self
            self.close_later = lambda: self.second

    assert {"_manager", "first", "second", "third", "close_later"} <= contract._attributes(Scheduler)
    assert not {"manager", "region"} & contract._attributes(Scheduler)


@pytest.mark.parametrize(("ours", "base", "name"), METHODS, ids=called)
def test_a_method_that_is_gone_is_named(ours: type, base: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [each for each in theirs(ours) if each is not base and name in vars(each)]
    if name == "__init__" or others:
        pytest.skip("another class has it")
    monkeypatch.setattr(contract, "SHOWN_MAX", 100)
    monkeypatch.delattr(base, name)
    assert f"{theirs(ours)[0].__name__}.{name} is gone" in refusal(lambda: implements(ours))


def test_a_new_abstract_method_is_named() -> None:
    from vllm.v1.kv_offload.base import OffloadingManager

    class Fenced(OffloadingManager):  # type: ignore[misc]  # vLLM is not installed where mypy runs
        @abc.abstractmethod
        def fence(self) -> None: ...

    base = type("OffloadingManager", (Fenced,), {"__module__": "vllm.v1.kv_offload.base"})
    with pytest.raises(ConfigError, match=r"OffloadingManager\.fence is new and abstract"):
        implements(type("Ours", (base,), {}))


def test_many_changes_are_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = random.Random(1).sample([place for place in READ if ":" in place], 3)
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
import kvtiers.connector.vllm.spec
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    error = run.stderr.strip().splitlines()[-1]
    assert error.startswith("kvtiers.tiers.errors.ConfigError: vllm: version ")
    assert "vllm.v1.kv_offload.base.PrepareStoreOutput is gone" in error


# ---- the table and the code ------------------------------------------------------------------------------------


def trees() -> Iterator[ast.AST]:
    for path in PACKAGE.rglob("*.py"):
        if path.name != "contract.py":
            yield ast.parse(path.read_text())


def test_each_class_that_vllm_calls_is_compared_when_it_is_imported() -> None:
    decorated = {
        node.name
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "implements" in [ast.unparse(each) for each in node.decorator_list]
    }
    assert decorated == {ours.__name__ for ours in OURS}


def reads(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Name of a variable or attribute, and of an attribute that is read of it, as ``a.b`` or ``getattr(a, "b")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value).rpartition(".")[2], node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield ast.unparse(owner).rpartition(".")[2], name.value


CONFIG = "vllm.config:"
#: Names that kvtiers.connector.vllm gives to vLLM's objects, and what they are.
VARIABLES = {
    "cache": (f"{CONFIG}CacheConfig", f"{contract._OFFLOAD_CONFIG}OffloadingCacheConfig"),
    "cached": (f"{contract._STEP}CachedRequestData",),
    "connector_output": ("vllm.v1.outputs:KVConnectorOutput",),
    "draft": (f"{CONFIG}ModelConfig",),
    "kv_cache_config": (f"{contract._CACHES}KVCacheConfig",),
    "lora": ("vllm.lora.request:LoRARequest",),
    "model": (f"{CONFIG}ModelConfig", f"{contract._OFFLOAD_CONFIG}OffloadingModelConfig"),
    "multimodal": (f"{CONFIG}MultiModalConfig",),
    "parallel": (f"{CONFIG}ParallelConfig", f"{contract._OFFLOAD_CONFIG}OffloadingParallelConfig"),
    "pooler": (f"{CONFIG}PoolerConfig",),
    "scheduler_output": (f"{contract._STEP}SchedulerOutput",),
    "speculative": (f"{CONFIG}SpeculativeConfig",),
    "vllm_config": (f"{CONFIG}VllmConfig",),
}


def test_the_table_has_what_is_read_and_nothing_else() -> None:
    read = {pair for tree in trees() for pair in reads(tree)}
    texts = {node.value for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    names = {name for _, name in read} | {name for each in imported() for name in each.split(":")} | texts
    known = {(place, name) for table in (READ, CALLED) for place, name in everything(table)}
    stale = {(place, name) for place, name in everything(READ) if name not in names}
    assert not stale
    unknown = {
        f"{variable}.{name}"
        for variable, name in read
        if variable in VARIABLES and not any((place, name) in known for place in VARIABLES[variable])
    }
    assert not unknown


def everything(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Place and name of each entry, of whatever release."""
    for place, names in table.items():
        for text in entries_of(names):
            yield place, text.partition(">=")[0].strip().partition("(")[0]


def imported() -> set[str]:
    """``module:name`` of all that kvtiers.connector.vllm imports from vLLM."""
    return {
        f"{node.module}:{alias.name}"
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "vllm"
        for alias in node.names
    }


def test_every_name_that_is_imported_is_in_the_table() -> None:
    optional = {"vllm.v1.attention.backends.cpu_attn:_get_attn_isa"}  # kv_platform works without this function
    places = {*CALLED, *READ}
    inside = {f"{place}:{name}" for table in (CALLED, READ) for place, name in everything(table)}
    modules = {place.partition(":")[0] for place in places}
    for name in imported() - optional:
        assert name in places | inside or name.replace(":", ".") in modules, name
