"""The part of an engine's configuration that belongs to its namespace: everything except the fields in ``uncounted``.

``connector.identity`` finds the options in vLLM's config objects. Every variable of vLLM's that is set counts as well.
``counting.json`` lists the fields and variables of the tested releases that count (``make contract``). Unknown options
also count, and are logged. ``conditions`` handles options that count only in some engines, and ``variables`` handles
the environment.

The scheduler's process computes the identity when vLLM creates its connector. The workers of SharedStorageConnector
use the scheduler's identity, because their configs differ: they have ranks, and loading the model changes them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ...tiers.errors import ConfigError
from ...tiers.plain_logs import get_logger, log_once
from ..identity.options import Shown, Tables, counted, readable, unknown
from . import conditions, variables, versions
from .uncounted import IGNORED, IGNORED_VARIABLES, USUAL
from .variables import PREFIX

logger = get_logger(__name__)

#: Releases that share blocks if nothing else differs (tested by ``make e2e``). Options with the same name have the same
#: default in all of them. Every other release has namespaces of its own.
ERA = frozenset((0, minor) for minor in range(28, 34))

_COUNTING: Mapping[str, Any] = json.loads(Path(__file__).with_name("counting.json").read_text())
TABLES = Tables(
    ignored={
        cls: frozenset(name for names in by_why.values() for name in names.split()) for cls, by_why in IGNORED.items()
    },
    counting=_COUNTING["fields"],
)
#: Names of variables, without ``VLLM_``, that do not count.
_IGNORED_VARIABLES = frozenset(name for names in IGNORED_VARIABLES.values() for name in names.split())

COUNTING_VARIABLES = frozenset(_COUNTING["variables"])

_DEVICE = "device_config.device_type"


def identity(
    vllm_config: Any, environ: Mapping[str, str] = os.environ, *, ignore: Collection[str] = ()
) -> dict[str, Any]:
    """Return the options of an engine that count and are not at their defaults: name -> JSON value.

    Args:
        vllm_config: vLLM's VllmConfig.
        ignore: names of options that the operator excludes, because they do not change the KV.

    Raises:
        ConfigError: the config is not a dataclass, so its fields are unknown; or a name in ``ignore`` is not an option.
    """
    if not dataclasses.is_dataclass(vllm_config):
        raise ConfigError(
            f"is {type(vllm_config).__name__}, which is not a dataclass, so its fields are unknown",
            field="vllm_config",
        )
    found = dict(counted(vllm_config, TABLES)) | dict(variables.counted(environ, _IGNORED_VARIABLES))
    without_effect = tuple(conditions.without_effect(vllm_config))
    found = {name: value for name, value in found.items() if not name.startswith(without_effect)}
    if _DEVICE in found:
        found[_DEVICE] = Shown(found[_DEVICE])
    found |= conditions.with_effect(vllm_config)
    if versions.release() not in ERA:
        found["vllm"] = Shown(versions.VERSION)
    for name in ignore:
        if name not in found:
            _check_option(vllm_config, name)
    return {name: value for name, value in sorted(found.items()) if name not in ignore}


def log_identity(vllm_config: Any, found: Mapping[str, Any]) -> None:
    """Log the options that count and that vLLM did not derive itself.

    Call this in the scheduler's process. It logs once per process.

    Args:
        found: the ``identity``.
    """
    named = [name for name in found if name.startswith(PREFIX)]
    surprises = [*unknown(vllm_config, TABLES, found), *(each for each in named if each not in COUNTING_VARIABLES)]
    if surprises:
        shown = ", ".join(f"{name}={value}" for name, value in readable(found).items() if name in surprises)
        text = f"part of the namespace, because this kvtiers does not know whether it changes KV: {shown}"
        fix = "If it does not, write its name in identity.ignore, for all engines that share blocks"
        log_once(logger, logging.WARNING, f"{text}. {fix}")
    found = {name: value for name, value in found.items() if name not in surprises}
    chosen = {name: value for name, value in found.items() if value not in USUAL.get(name, ())}
    if chosen:
        shown = ", ".join(f"{name}={value}" for name, value in readable(chosen).items())
        log_once(logger, logging.INFO, f"part of the namespace, because not at its default: {shown}")


def _check_option(vllm_config: Any, name: str) -> None:
    """Refuse a misspelled option, which would silently have no effect."""
    if name.startswith(PREFIX) or name == "vllm":
        return
    at = vllm_config
    for part in name.split("."):
        names = [field.name for field in dataclasses.fields(at)] if dataclasses.is_dataclass(at) else []
        if part not in names:
            if at is None:  # this engine does not have such an object
                return
            accepted = difflib.get_close_matches(part, names, n=3) or names
            raise ConfigError(
                f"{name} is not an option of vLLM {versions.VERSION}: {part} is not accepted, "
                f"{type(at).__name__} has {', '.join(accepted)}",
                field="identity.ignore",
            )
        at = getattr(at, part, None)
