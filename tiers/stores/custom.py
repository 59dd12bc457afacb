"""Third-party stores: calls ``make_store(options)`` of a user's module.

This is a separate module so that a worker process imports only this module and the user's, and no configuration code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import KVTiersError, StoreConfigError, StoreUnavailableError, printable
from ..store import Store

HOOK = "make_store"


def make_custom_store(module_path: str, options: Mapping[str, Any]) -> Store:
    """Create a store with the factory function of a module.

    Args:
        module_path: ``package.module``, whose ``make_store`` is called, or ``package.module:function``.

    Raises:
        StoreConfigError: the module cannot be imported, the function does not exist, raised an exception other than
            KVTiersError, or did not return a Store.
        StoreUnavailableError: the module or the function raised SystemExit.
        KVTiersError: raised by the function; passed on unchanged.
    """
    make = find_factory(module_path)
    try:
        store = make(dict(options))
    except KVTiersError:
        raise
    except SystemExit as e:  # SystemExit must not end the engine
        raise StoreUnavailableError(f"{module_path} raised {_describe(e)}") from e
    except Exception as e:  # a user's function may raise anything
        raise StoreConfigError(f"{module_path} failed with its options: {_describe(e)}") from e
    if not isinstance(store, Store):
        raise StoreConfigError(f"{module_path} returned a {type(store).__name__}, not a kvtiers.Store")
    return store


def find_factory(module_path: str) -> Callable[..., object]:
    """Import the module and return its factory function.

    Raises:
        StoreConfigError: the module cannot be imported, or the function does not exist.
    """
    module_name, _, function = module_path.partition(":")
    name = function or HOOK
    try:
        make: Callable[..., object] | None = getattr(importlib.import_module(module_name), name, None)
    except SystemExit as e:
        raise StoreUnavailableError(f"{module_name} cannot be imported: {_describe(e)}") from e
    except Exception as e:  # a user's module may raise anything
        fix = "correct module_path, or install the module where the engine runs"
        if not (isinstance(e, ModuleNotFoundError) and e.name and f"{module_name}.".startswith(f"{e.name}.")):
            fix = f"correct {module_name}, or install what it imports"
        raise StoreConfigError(f"{module_name} cannot be imported: {_describe(e)}; {fix}") from e
    if not callable(make):
        raise StoreConfigError(
            f"{module_name} has no function {name}(options) that returns a kvtiers.Store; write "
            "module_path: module:function"
        )
    return make


def _describe(e: BaseException) -> str:
    return f"{type(e).__name__}: {printable(str(e))}"
