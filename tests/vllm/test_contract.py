"""contract: a vLLM that lacks what kvtiers uses is refused and told why; any other one starts."""

from __future__ import annotations

import abc
import ast
import importlib
import importlib.util
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

from kvtiers.connector.vllm import contract, versions
from kvtiers.connector.vllm.contract import USED, check_contract, implements
from kvtiers.tiers.errors import ConfigError
from tests.vllm import contract_reader

PACKAGE = Path(contract.__file__).parent
NEWEST = versions.release(versions.TESTED[-1])


def is_newest() -> bool:
    return versions.release() == NEWEST


#: Place and name of each entry that the installed release has; one for each name that is called.
ENTRIES = sorted(
    {
        (place, entry.lstrip("?").partition("(")[0], entry.endswith(")"))
        for place, entries in USED.items()
        for entry in entries
        if is_newest() or not entry.startswith("?")
    }
)
CALLED = [(place, name) for place, name, is_called in ENTRIES if is_called]
USED_NAMES = sorted({(place, name) for place, name, _ in ENTRIES})


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


def test_installed_release_is_accepted_without_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    check_contract()
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.28.0rc1", "v0.32.0", "0.31.0+cpu"])
def test_tested_release_is_recognized_by_its_first_two_numbers(version: str) -> None:
    found = versions.release(version)
    assert found is not None
    assert "{}.{}".format(*found) in versions.TESTED


@pytest.mark.parametrize("version", ["0.34.0", "0.27.1", "1.0.0", "dev", "", "unknown"])
def test_untested_release_starts_with_warning(version: str, caplog: pytest.LogCaptureFixture) -> None:
    if not is_newest():
        pytest.skip("the installed release is not the newest, so it lacks what a later one must have")
    with caplog.at_level(logging.WARNING):
        check_contract(version)
    assert f"vLLM {version} was not tested with kvtiers (0.28 to 0.33 were)" in caplog.text


def test_untested_release_must_have_every_name_of_the_newest_release() -> None:
    if is_newest():
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


@pytest.mark.parametrize(("place", "name"), CALLED, ids=called)
def test_additional_argument_of_a_function_is_named_in_error(
    place: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = owner_of(place)
    give_signature(owner, name, one_more, monkeypatch)
    full_name = owner.__name__ if name == "__init__" else f"{owner.__name__}.{name}"
    assert f"{full_name} takes (" in refusal()
    assert "kv_epoch" in refusal()


@pytest.mark.parametrize(("ours", "base", "name"), METHODS, ids=called)
def test_additional_argument_of_a_method_is_named_in_error(
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
def test_arguments_in_another_order_are_named_in_error(
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


@pytest.mark.parametrize(("place", "name"), USED_NAMES, ids=called)
def test_missing_attribute_is_named_in_error(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        names = contract.attributes(owner) - {name, "__class__", "__dict__", "__weakref__", "__init__", "__new__"}
        attributes = {each: inspect.getattr_static(owner, each, None) for each in names}
        stand_in = type(cls, (), {each: value for each, value in attributes.items() if not each.startswith("__")})
        monkeypatch.setattr(importlib.import_module(module), cls, stand_in)
    monkeypatch.setattr(contract, "SHOWN_MAX", 100)
    assert f"{owner.__name__}.{name} is gone" in refusal()


def test_attributes_of_class_include_fields_stored_by_its_constructor() -> None:
    class Scheduler:
        def __init__(self, spec: Any) -> None:
            self._manager, self.first = spec.manager, spec
            self.second = self.third = spec
            spec.region = self
            self.close_later = lambda: self.second

    assert {"_manager", "first", "second", "third", "close_later"} <= contract.attributes(Scheduler)
    assert not {"manager", "region"} & contract.attributes(Scheduler)


@pytest.mark.parametrize(("ours", "base", "name"), METHODS, ids=called)
def test_missing_method_is_named_in_error(ours: type, base: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [each for each in theirs(ours) if each is not base and name in vars(each)]
    if name == "__init__" or others:
        pytest.skip("another class has it")
    monkeypatch.setattr(contract, "SHOWN_MAX", 100)
    monkeypatch.delattr(base, name)
    assert f"{theirs(ours)[0].__name__}.{name} is gone" in refusal(lambda: implements(ours))


def test_new_abstract_method_is_named_in_error() -> None:
    from vllm.v1.kv_offload.base import OffloadingManager

    class Fenced(OffloadingManager):  # type: ignore[misc]  # vLLM is not installed where mypy runs
        @abc.abstractmethod
        def fence(self) -> None: ...

    base = type("OffloadingManager", (Fenced,), {"__module__": "vllm.v1.kv_offload.base"})
    with pytest.raises(ConfigError, match=r"OffloadingManager\.fence is new and abstract"):
        implements(type("Ours", (base,), {}))


def test_error_with_many_changes_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = random.Random(1).sample(sorted({place for place, _ in USED_NAMES if ":" in place}), 3)
    for place in chosen:
        module, _, name = place.partition(":")
        monkeypatch.delattr(importlib.import_module(module), name)
    monkeypatch.setattr(contract, "SHOWN_MAX", 2)
    assert "; and 1 more. Install a release that kvtiers was tested with (0.28 to 0.33)" in refusal()


def test_import_of_spec_is_refused_if_vllm_lacks_an_imported_name() -> None:
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


# ---- the list and the code -------------------------------------------------------------------------------------


def trees() -> Iterator[ast.AST]:
    for path in PACKAGE.rglob("*.py"):
        yield ast.parse(path.read_text())


def test_each_class_called_by_vllm_is_checked_at_import() -> None:
    decorated = {
        node.name
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "implements" in [ast.unparse(each) for each in node.decorator_list]
    }
    assert decorated == {ours.__name__ for ours in OURS}


def test_contract_json_matches_source() -> None:
    """If this fails: ``make contract``. Releases before the newest do not have every optional entry."""
    read = {(place, entry) for place, entries in contract_reader.read().items() for entry in entries}
    shipped = {(place, entry) for place, entries in USED.items() for entry in entries}
    assert not read - shipped
    assert all(entry.startswith("?") and not is_newest() for _, entry in shipped - read), shipped - read


#: How to write it for vLLM's objects, and what the reader must find.
SOURCE = """
from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadingManager, ReqContext, TransferResult
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Ours(OffloadingManager):
    def lookup(self, key: Any, req_context: Any) -> Any:
        return first_of([req_context])

    def on_schedule_end(self, context: Any) -> None:
        self.seen: list[ReqContext] = []
        for each in self.seen:
            each.req_id.upper()


def first_of(contexts: Any) -> Any:
    for each in contexts:
        return each.load_tier_filter.allows(medium=1, locality=2)


def images(request: Request) -> Any:
    request.kv_transfer_params = {}
    return [feature.identifier for feature in request.mm_features or ()]


def cautious(request: Request, config: VllmConfig) -> Any:
    try:
        return config.model_config.tokenizer
    except Exception:
        pass
    with suppress(Exception):
        config.cache_config.block_size
    if hasattr(request, "resumable"):
        return request.resumable
    else:
        return request.num_tokens


def finished(more: Any) -> Any:
    return TransferResult(1, success=True, **more), getattr(dataclasses.replace(more), "whatever", None)
"""
EXPECTED = {
    "vllm.v1.kv_offload.base": ["OffloadingManager", "ReqContext", "TransferResult"],
    "vllm.v1.kv_offload.base:ReqContext": ["load_tier_filter", "req_id"],
    "vllm.v1.kv_offload.base:TierFilter": ["allows(medium=, locality=)"],
    "vllm.v1.kv_offload.base:TransferResult": ["__init__(_, success=, **_)"],
    "vllm.v1.request": ["Request"],
    "vllm.v1.request:Request": ["?resumable", "kv_transfer_params", "mm_features"],
    "vllm.multimodal.inputs:MultiModalFeatureSpec": ["identifier"],
    "vllm.config:VllmConfig": ["cache_config"],
    "vllm.config:CacheConfig": ["block_size"],
}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], contract_reader.Reader]:
    """Make a reader of one module that has this text."""

    def read(text: str) -> contract_reader.Reader:
        name = "kvtiers.connector.vllm.made_up"
        path = tmp_path / "made_up.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return contract_reader.Reader([name])

    return read


def test_reader_finds_names_used_through_calls_containers_and_overridden_methods(
    source: Callable[[str], contract_reader.Reader],
) -> None:
    reader = source(SOURCE)
    assert reader.read() == dict(sorted(EXPECTED.items()))
    assert not reader.problems


def test_reader_reports_attribute_that_no_release_has(source: Callable[[str], contract_reader.Reader]) -> None:
    reader = source(SOURCE + "\n\ndef typo(request: Request) -> Any:\n    return request.mm_feature\n")
    reader.read()
    assert [problem.rpartition(" reads ")[2] for problem in reader.problems] == [
        "mm_feature of Request, which has no such attribute"
    ]
