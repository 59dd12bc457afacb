"""Decides which ``VLLM_*`` variables count, by the variables that the installed vLLM registers in ``vllm.envs``.

Other names that begin with ``VLLM_`` are not vLLM's: Kubernetes sets some for every Service whose name begins with
``vllm``, and operators use the prefix for their own. If vLLM's variables cannot be read, every name counts that is
neither in ``uncounted`` nor of Kubernetes' form.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ...tiers.plain_logs import get_logger
from ..identity.options import Shown

logger = get_logger(__name__)

PREFIX = "VLLM_"

#: What Kubernetes sets in a pod for each Service (``enableServiceLinks``).
_SERVICE_LINK = re.compile(r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?")

#: Values that have the same effect as no value, and that vLLM sets by itself on some machines (here on CPUs with BF16).
_AS_UNSET = {f"{PREFIX}SSM_CONV_STATE_LAYOUT": "SD"}

#: Plug-ins in modules that begin with these do not change a model.
_OWN_PLUGINS = ("kvtiers.", "vllm.")

Parser = Callable[[], Any]


def counted(environ: Mapping[str, str], ignored: Collection[str]) -> Iterator[tuple[str, str]]:
    """Name and value of the variables that count: vLLM's own.

    A variable that is set to its default counts as well, because vLLM checks whether some variables are set at all.
    For example, ``VLLM_USE_DEEP_GEMM=1`` forces DeepGEMM, which vLLM otherwise chooses by itself or not.

    Args:
        ignored: names without ``VLLM_``.
    """
    known = _registered()
    names = [
        name
        for name in _unlisted(environ, ignored)
        if (known is None or name in known) and environ[name] != _AS_UNSET.get(name)
    ]
    parsers = _parsers(environ) if names else {}
    for name in names:
        parser = parsers.get(name)
        yield name, _canonical(environ[name], _parse(parser), parser)
    plugins = _left_out_plugins(environ.get(f"{PREFIX}PLUGINS"))
    if plugins:
        yield f"{PREFIX}PLUGINS", f"without {plugins}"


def foreign(environ: Mapping[str, str], ignored: Collection[str]) -> list[str]:
    """Names of the variables that begin with ``VLLM_`` and are not vLLM's."""
    known = _registered()
    return [] if known is None else sorted(name for name in _unlisted(environ, ignored) if name not in known)


def _unlisted(environ: Mapping[str, str], ignored: Collection[str]) -> list[str]:
    names = (name for name in environ if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in ignored)
    return [name for name in names if _SERVICE_LINK.fullmatch(name) is None]


def _registered() -> Mapping[str, Parser] | None:
    """The variables of the installed vLLM; None if they cannot be told from others."""
    try:
        import vllm.envs
        import vllm.platforms

        if vllm.platforms.current_platform.is_out_of_tree():  # a plug-in's platform has variables of its own
            return None
        known = vllm.envs.environment_variables
    except Exception as e:  # noqa: BLE001 - any release may keep its variables elsewhere
        logger.debug("vLLM's variables are not known, so every VLLM_ variable may count: %r", e)
        return None
    return known if isinstance(known, Mapping) and known else None


def _parsers(environ: Mapping[str, str]) -> Mapping[str, Parser]:
    """vLLM's functions that read its variables, from a second copy of ``vllm.envs`` that reads ``environ``.

    The process' own environment must not be changed: other threads read it.
    """
    try:
        import vllm.envs

        spec = importlib.util.spec_from_file_location("kvtiers_copy_of_vllm_envs", vllm.envs.__file__)
        assert spec is not None
        assert spec.loader is not None
        copy: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        copy.os = types.ModuleType("os")
        copy.os.__dict__.update(vars(os), environ=environ, getenv=environ.get)
        parsers: Mapping[str, Parser] = copy.environment_variables
    except Exception as e:  # noqa: BLE001 - as above
        logger.debug("vLLM's variables cannot be read a second time, so spellings of one value differ: %r", e)
        return {}
    return parsers


def _parse(parser: Parser | None) -> tuple[Any] | None:
    """A variable's value in a tuple; None if vLLM does not accept it or its parser is not known."""
    try:
        return None if parser is None else (parser(),)
    except Exception:  # noqa: BLE001 - vLLM itself reports the value
        return None


def _canonical(value: str, found: tuple[Any] | None, parser: Parser | None) -> str:
    """One text for all spellings of a flag; whether it may be shown is part of its type."""
    parsed = None if found is None else found[0]
    if isinstance(parsed, bool):
        return Shown(int(parsed))
    choices = inspect.getclosurevars(parser).nonlocals.get("choices") if isinstance(parser, types.FunctionType) else ()
    is_choice = isinstance(choices, list | tuple) and value.lower() in [str(choice).lower() for choice in choices]
    return Shown(value) if isinstance(parsed, int | float) or is_choice else value


def _left_out_plugins(allowed: str | None) -> str:
    """Names of the installed plug-ins that ``VLLM_PLUGINS`` keeps from being loaded, besides kvtiers' and vLLM's."""
    if allowed is None:
        return ""
    entries = importlib.metadata.entry_points()
    installed = {
        entry.name
        for group in entries.groups
        for entry in entries.select(group=group)
        if group.startswith("vllm.") and not entry.value.startswith(_OWN_PLUGINS)
    }
    return ",".join(sorted(installed - set(allowed.split(","))))
