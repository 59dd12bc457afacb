"""Stores of other people: what ``make_store(options)`` of a module of theirs returns.

In a module of its own, so that a worker process imports this and that module, and no configuration.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from kvtiers.tiers.errors import KVTiersError, StoreConfigError, printable
from kvtiers.tiers.store import Store

HOOK = "make_store"


def make_custom_store(module_path: str, options: Mapping[str, Any]) -> Store:
    """The store that a module makes of its options.

    Args:
        module_path: ``package.module``, whose ``make_store`` is called, or ``package.module:function``.

    Raises:
        StoreConfigError: there is no such function, or what it returned is no store.
        KVTiersError: as the function raises it.
    """
    module_name, _, function = module_path.partition(":")
    name = function or HOOK
    try:
        make = getattr(importlib.import_module(module_name), name, None)
    except Exception as e:  # whatever somebody else's module raises
        raise StoreConfigError(f"{module_name} cannot be imported: {_said(e)}") from e
    if not callable(make):
        raise StoreConfigError(f"{module_name} has no function {name}(options) that returns a kvtiers.Store")
    try:
        store = make(dict(options))
    except KVTiersError:
        raise
    except Exception as e:  # whatever somebody else's function raises
        raise StoreConfigError(f"{module_name}.{name} refused its options: {_said(e)}") from e
    if not isinstance(store, Store):
        raise StoreConfigError(f"{module_name}.{name} returned a {type(store).__name__}, and no kvtiers.Store")
    return store


def _said(e: Exception) -> str:
    return f"{type(e).__name__}: {printable(str(e))}"
