"""Checks at an engine's start that its release has the names that kvtiers uses, and calls kvtiers' methods."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...tiers.errors import ConfigError
from ...tiers.plain_logs import get_logger
from ..contract import changed_methods, differences

logger = get_logger(__name__)

SHOWN_MAX = 10


@dataclass(frozen=True)
class Release:
    """An engine's package.

    Attributes:
        package: its name, also of its distribution.
        tested: versions that kvtiers was tested with.
        used: see ``contract.differences``.
        own: see ``contract.changed_methods``.
    """

    package: str
    tested: Sequence[str]
    used: Mapping[str, Sequence[str]]
    own: Collection[str] = ()

    @property
    def version(self) -> str:
        """The installed version."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    def check(self, *classes: type) -> None:
        """Refuse a release that differs from kvtiers' expectations. Log a warning for an untested release.

        Args:
            classes: kvtiers' classes that the engine calls.

        Raises:
            ConfigError: names the differences.
        """
        if found := list(self._changes(classes)):
            more = f"; and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
            raise ConfigError(
                f"version {self.version!r} lacks what kvtiers uses of it: {'; '.join(found[:SHOWN_MAX])}{more}. "
                f"Install a release that kvtiers was tested with ({', '.join(self.tested)}), or a newer kvtiers",
                field=self.package,
            )
        if self.version not in self.tested:
            text = "%s %s was not tested with kvtiers (%s was). It has everything that kvtiers uses, so it starts"
            logger.warning(text, self.package, self.version, ", ".join(self.tested))

    def _changes(self, classes: Sequence[type]) -> Iterator[str]:
        yield from differences(self.used)
        for cls in classes:
            yield from changed_methods(cls, self.package, self.own)
