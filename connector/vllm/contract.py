"""Checks at an engine's start that the installed vLLM has everything that kvtiers uses.

The check runs before any other module of ``connector.vllm`` is imported. If vLLM renamed or removed something, or
changed a signature, the engine refuses to start, and the error names the change. A release that kvtiers was not tested
with starts if nothing changed.

- ``contract.json`` lists the names that kvtiers reads, sets and calls. ``tests/vllm/contract_reader.py`` makes the file
  from the source of ``connector.vllm``, and describes its entries.
- ``implements`` compares each class that inherits from a vLLM class with its base class, when its module is imported.

Older tested releases may lack names that the code can do without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from ...tiers.errors import ConfigError
from ...tiers.plain_logs import get_logger
from .. import contract
from ..contract import attributes as attributes
from .versions import TESTED, VERSION, release

logger = get_logger(__name__)

SHOWN_MAX = 10  # limit of the changes that an error lists

#: Place in vLLM (a module, or a class as ``module:Class``) -> names that kvtiers uses.
USED: Mapping[str, list[str]] = json.loads(Path(__file__).with_name("contract.json").read_text())

#: Method -> first release of vLLM that calls it.
SINCE: Mapping[str, tuple[int, int]] = {
    "get_load_source": (0, 32),
    "get_transfer_results": (0, 30),
    "on_reset_flushed": (0, 33),
}

#: Public methods that only kvtiers calls, in classes that inherit from vLLM's.
OWN = frozenset(
    {
        "end_loads",
        "note",
        "note_prompt",
        "note_resets",
        "note_uses",
        "options_of",
        "report",
        "step_of",
        "take_failed_blocks",
        "take_failed_requests",
        "take_stats",
    }
)

_C = TypeVar("_C", bound=type)


def check_contract(version: str = VERSION) -> None:
    """Refuse a vLLM that lacks something kvtiers uses. Log a warning for a release not tested with kvtiers.

    Raises:
        ConfigError: lists the missing and changed names.
    """
    installed = _tested(version)
    _refuse(changes(installed), version)
    if installed is None:
        logger.warning(
            "vLLM %s was not tested with kvtiers (%s to %s were). It has everything that kvtiers uses, so the engine "
            "starts. It does not read blocks that other releases stored",
            version,
            TESTED[0],
            TESTED[-1],
        )


def implements(cls: _C) -> _C:
    """Decorator: compare a class with the vLLM classes that it inherits from.

    vLLM calls every public method except ``OWN``. So vLLM's class must have the method, with the same parameter names
    in the same order. Only parameters that have a default in kvtiers may be missing in vLLM.

    Raises:
        ConfigError: lists the changes.
    """
    _refuse(changed_methods(cls, _tested(VERSION)), VERSION)
    return cls


def _tested(version: str) -> tuple[int, int] | None:
    """Return the release; None: an untested release, which must have everything."""
    installed = release(version)
    return installed if installed is not None and "{}.{}".format(*installed) in TESTED else None


def _refuse(changed: Iterator[str], version: str) -> None:
    if found := list(dict.fromkeys(changed)):
        more = f"; and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        raise ConfigError(
            f"version {version!r} lacks what kvtiers uses of vLLM: {'; '.join(found[:SHOWN_MAX])}{more}. Install a "
            f"release that kvtiers was tested with ({TESTED[0]} to {TESTED[-1]}), or a newer kvtiers",
            field="vllm",
        )


def changed_methods(cls: type, installed: tuple[int, int] | None) -> Iterator[str]:
    """List each difference between a class's methods and those of its vLLM base classes, as a sentence."""
    return contract.changed_methods(
        cls, "vllm", OWN, lambda name: installed is not None and installed < SINCE.get(name, installed)
    )


def changes(installed: tuple[int, int] | None) -> Iterator[str]:
    """List each difference between the installed vLLM and ``USED``, as a sentence.

    Args:
        installed: the release. None: an untested release, which must have every entry.
    """
    may_lack = installed is not None and installed != release(TESTED[-1])
    needed = {
        place: [entry.lstrip("?") for entry in entries if not (may_lack and entry.startswith("?"))]
        for place, entries in USED.items()
    }
    return contract.differences({place: entries for place, entries in needed.items() if entries})
