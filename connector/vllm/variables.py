"""Decides which ``VLLM_*`` variables count, by the variables that the installed vLLM registers in ``vllm.envs``.

Other names that begin with ``VLLM_`` do not belong to vLLM: Kubernetes sets such variables for every Service whose name
begins with ``vllm``, and operators also use the prefix. If vLLM's list of variables cannot be read, all names count,
except the names in ``uncounted`` and names of Kubernetes' form.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ...tiers.plain_logs import get_logger
from ..identity.options import Shown

logger = get_logger(__name__)

PREFIX = "VLLM_"

#: Variables that Kubernetes sets in a pod for each Service (``enableServiceLinks``).
_SERVICE_LINK = re.compile(r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?")

#: Values that have the same effect as no value, and that vLLM sets by itself on some machines (here on CPUs with BF16).
_AS_UNSET = {f"{PREFIX}SSM_CONV_STATE_LAYOUT": "SD"}

#: Plug-ins in modules whose names begin so do not change a model.
_OWN_PLUGINS = ("kvtiers.", "vllm.")

#: Values that are safe to show.
_FLAG_OR_NUMBER = re.compile(r"true|false|\d{1,9}", re.IGNORECASE)


def counted(environ: Mapping[str, str], ignored: Collection[str]) -> Iterator[tuple[str, str]]:
    """Return name and value of vLLM's variables that count.

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
    for name in names:
        value = environ[name]
        yield name, Shown(value) if _FLAG_OR_NUMBER.fullmatch(value) else value
    plugins = _left_out_plugins(environ.get(f"{PREFIX}PLUGINS"))
    if plugins:
        yield f"{PREFIX}PLUGINS", f"without {plugins}"


def _unlisted(environ: Mapping[str, str], ignored: Collection[str]) -> list[str]:
    names = (name for name in environ if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in ignored)
    return [name for name in names if _SERVICE_LINK.fullmatch(name) is None]


def _registered() -> Mapping[str, Any] | None:
    """Return the variables of the installed vLLM; None: its list cannot be read."""
    try:
        import vllm.envs
        import vllm.platforms

        if vllm.platforms.current_platform.is_out_of_tree():  # a plug-in's platform has its own variables
            return None
        known = vllm.envs.environment_variables
    except Exception as e:  # noqa: BLE001 - any release may keep its variables elsewhere
        logger.debug("vLLM's variables are not known, so every VLLM_ variable may count: %r", e)
        return None
    return known if isinstance(known, Mapping) and known else None


def _left_out_plugins(allowed: str | None) -> str:
    """Return the installed plug-ins that ``VLLM_PLUGINS`` excludes, without kvtiers' and vLLM's own plug-ins."""
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
