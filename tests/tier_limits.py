"""Other limits for the tiers that are made from a configuration, which has no options for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from kvtiers.tiers import builtin
from kvtiers.tiers.config.tier_options import TierConfig
from kvtiers.tiers.tier.store_tier import TierOptions


@contextmanager
def tier_limits(*, lookup: Mapping[str, Any] | None = None, **limits: Any) -> Iterator[None]:
    """Change fields of ``TierOptions``, and of its ``LookupOptions``, for tiers that are created meanwhile."""
    make = builtin._tier_options

    def changed(config: TierConfig) -> TierOptions:
        options = make(config)
        return replace(options, lookup=replace(options.lookup, **(lookup or {})), **limits)

    with mock.patch.object(builtin, "_tier_options", changed):
        yield
