"""StoreRecipe: tells another process how to create a store."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from .errors import StoreConfigError
from .store import Store


@dataclass(frozen=True, slots=True)
class StoreRecipe:
    """Describes how a process creates its store: ``module.name(**options)``.

    Attributes:
        module: a module in this process's ``sys.path``.
        name: a subclass of Store, or a function that returns a store.
        options: keyword arguments: None, bool, numbers, text, paths, and lists, dicts and dataclasses of these.
    """

    module: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets

    @classmethod
    def of(cls, make_store: Callable[..., Store], **options: Any) -> StoreRecipe:
        """Return the recipe for ``make_store(**options)``. It is a store class or a module-level function."""
        return cls(make_store.__module__, make_store.__qualname__, options)

    def encode(self) -> dict[str, Any]:
        """The recipe as JSON values, for ``make_store``.

        Raises:
            StoreConfigError: an option cannot be sent to another process; the message names it.
        """
        options = {name: _encode_option(name, value) for name, value in self.options.items()}
        return {"module": self.module, "name": self.name, "options": options}


def make_store(recipe: Mapping[str, Any]) -> Any:
    """Create the store of a recipe that was encoded by ``StoreRecipe.encode``."""
    options = {name: _decode_option(value) for name, value in recipe["options"].items()}
    return find_object(recipe["module"], recipe["name"])(**options)


def find_object(module: str, name: str) -> Any:
    """The class or function that a recipe names."""
    return getattr(importlib.import_module(module), name)


def _encode_option(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [_encode_option(name, item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _encode_option(f"{name}.{key}", item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        encoded = {f.name: _encode_option(f"{name}.{f.name}", getattr(value, f.name)) for f in fields(value) if f.init}
        return {**encoded, "$dataclass": (cls.__module__, cls.__qualname__)}
    raise StoreConfigError(
        f"option {name!r} of a store cannot be sent to another process: {type(value).__name__} is not accepted, only "
        "None, bool, numbers, text, paths, and lists, dicts and dataclasses of these"
    )


def _decode_option(value: Any) -> Any:
    """Decode an option of a recipe: create dataclasses again, keep other JSON values."""
    if isinstance(value, list):
        return [_decode_option(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {name: _decode_option(item) for name, item in value.items()}
    place = fields.pop("$dataclass", None)
    return find_object(*place)(**fields) if place else fields
