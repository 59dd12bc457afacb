"""SecondaryTierFactory: create a running tier from its type and options.

A tier's module is imported only when the tier is created, so a process never loads a client library that its config
does not use. Third-party tiers are registered with ``register_tier``, with an entry point of the group
``kvtiers.tiers`` (name = tier type, value = ``module:Class``), or named by ``module_path`` in the config.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from typing import Any

# Reads the package now and not when a process starts, because minutes pass in between while a model is loaded.
from . import loaded_code  # noqa: F401
from .base import SecondaryTierManager
from .config.deployment import ENTRY_POINT_GROUP, as_store_tier, known_types
from .config.tier_options import TIER_MODELS
from .errors import ConfigError, printable

_BUILT_IN = ("kvtiers.tiers.builtin", "BuiltInTier")


class SecondaryTierFactory:
    """Creates tiers by type. The registry of tier types belongs to the process."""

    _registered: dict[str, tuple[str, str]] = {}  # noqa: RUF012 - process-wide on purpose

    @classmethod
    def register_tier(cls, tier_type: str, module_path: str, class_name: str) -> None:
        """Make a tier available as ``tier_type``.

        Raises:
            ConfigError: another class is already registered under this name.
        """
        place = (module_path, class_name)
        taken = _BUILT_IN if tier_type in TIER_MODELS else cls._registered.get(tier_type)
        if taken not in (None, place):
            raise ConfigError(f"{tier_type!r} is registered as {taken}; choose another name", field="tier_type")
        cls._registered[tier_type] = place

    @classmethod
    def tier_types(cls) -> list[str]:
        """All tier types that need no ``module_path``, sorted."""
        return known_types(cls._registered)

    @classmethod
    def create_secondary_tier(
        cls, tier_config: dict[str, Any], primary_kv_view: memoryview, offloading_spec: Any
    ) -> SecondaryTierManager:
        """Create a tier.

        Args:
            tier_config: ``type`` and the tier's options. With ``module_path``, ``type`` is a class in that module.
            primary_kv_view: the region, shape (num_chunks, row_bytes).
            offloading_spec: the engine's identity.

        Raises:
            ConfigError: unknown type, bad option, or missing dependency.
            StoreError: the tier's storage failed with a permanent error.
        """
        tier_type = tier_config.get("type")
        if not isinstance(tier_type, str) or not tier_type:
            accepted = ", ".join(cls.tier_types())
            raise ConfigError(f"{tier_type!r} is not a tier type; accepted: {accepted}", field="type")
        options = as_store_tier(tier_config).copy()
        tier_type = options.pop("type")
        module_path = None if tier_type == "store" else options.pop("module_path", None)
        tier_class = cls.find_class(tier_type, module_path)
        try:
            return tier_class(offloading_spec, primary_kv_view, tier_type, **options)
        except TypeError as e:
            # If the arguments do not fit the constructor, the traceback contains no frame of the constructor.
            is_refused = e.__traceback__ is None or e.__traceback__.tb_next is None
            message = f"options do not fit: {e}" if is_refused else f"cannot be created: TypeError: {e}"
            raise ConfigError(message, field=f"tier {tier_type!r}") from e

    @classmethod
    def find_class(cls, tier_type: str, module_path: str | None = None) -> type[SecondaryTierManager]:
        """Import a tier's module and return its class.

        Raises:
            ConfigError: the type is unknown, the module cannot be imported, or the object is not a tier class.
        """
        if module_path:
            place: tuple[str, str] | None = (module_path, tier_type)
        else:
            place = _BUILT_IN if tier_type in TIER_MODELS else cls._registered.get(tier_type)
        try:
            if place is not None:
                loaded = getattr(importlib.import_module(place[0]), place[1], None)
            else:
                loaded = next(entry.load() for entry in _entry_points() if entry.name == tier_type)
        except StopIteration:
            raise ConfigError(
                f"{tier_type!r} is not a tier type; accepted: {', '.join(cls.tier_types())}, or any class with a "
                "module_path",
                field="type",
            ) from None
        except Exception as e:  # a third-party module may raise anything
            text = f"tier {tier_type!r} cannot be imported: {type(e).__name__}: {printable(str(e))}"
            raise ConfigError(text, field="module_path") from e
        if place is not None and loaded is None:
            raise ConfigError(f"module {place[0]!r} has no class {place[1]!r}", field="type")
        return _as_class(loaded, tier_type)


def _entry_points() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


def _as_class(loaded: object, tier_type: str) -> type[SecondaryTierManager]:
    if not isinstance(loaded, type):
        raise ConfigError(f"tier {tier_type!r} is {loaded!r}, not a class", field="type")
    if not issubclass(loaded, SecondaryTierManager):
        raise ConfigError(f"{loaded} is not a SecondaryTierManager", field="type")
    if inspect.isabstract(loaded):
        hint = " (to do without take_answered, subclass PollingTierManager and rename lookup to poll)"
        lacks = sorted(loaded.__abstractmethods__)
        text = f"{loaded} lacks {', '.join(lacks)}{hint if 'take_answered' in lacks else ''}"
        raise ConfigError(text, field="type")
    return loaded
