"""Results of commands that work on each tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import typer

from ...tiers.errors import ConfigError, StoreError
from .output import answer, complain
from .places import Place
from .session import ExitCode

T = TypeVar("T")


@dataclass(kw_only=True)
class TierResult:
    """A command's result for one tier.

    Attributes:
        where: folder, bucket or URL.
    """

    tier: str
    where: str


@dataclass(kw_only=True)
class Failed(TierResult):
    """The storage of a tier failed."""

    error: str


@dataclass
class Tiers(Generic[T]):
    """The result of a command that works on each tier."""

    tiers: list[T | Failed]


class Results(Generic[T]):
    """A command's results, tier by tier. A storage error is printed at once, and the command goes on to other tiers.

    Attributes:
        done: the results of tiers without an error.
    """

    def __init__(self) -> None:
        self._failure = ExitCode.FAILED
        self._all: list[T | Failed] = []
        self.done: list[T] = []

    def add(self, result: T) -> T:
        """Add a result, and return it."""
        self._all.append(result)
        self.done.append(result)
        return result

    @property
    def has_errors(self) -> bool:
        """Whether a tier has failed."""
        return len(self.done) < len(self._all)

    @contextmanager
    def of(self, place: Place) -> Iterator[None]:
        """Context for work on a tier: a storage error becomes the tier's result."""
        try:
            yield
        except (StoreError, ConfigError) as e:
            complain(f"tier {place.name} at {place.where}: {e}")
            if isinstance(e, ConfigError):
                self._failure = ExitCode.BAD_INPUT
            self._all.append(Failed(tier=place.name, where=place.where, error=str(e)))

    def end(self, *, as_json: bool = False, failed: bool = False) -> None:
        """Print all results as JSON if asked, and exit with an error if the command or a tier failed."""
        failed = failed or self.has_errors
        if as_json:
            answer(Tiers(self._all), ok=not failed)
        if failed:
            raise typer.Exit(self._failure)
