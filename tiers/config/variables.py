"""Environment variables in a configuration: ``$NAME``, ``${NAME}`` and ``${NAME:-default}``; ``$$`` is a dollar.

Every text is expanded once, when it is parsed. ``dict(model)`` and ``model_dump`` of a parsed model double each dollar,
so that the texts can be parsed again with the same meaning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ..errors import public_url

#: Fields whose texts are not expanded, because they may hold a password with a dollar or name a variable.
AS_WRITTEN = frozenset({"keys_env", "options", "storage_options"})

_VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)(?::-([^{}]*))?\}|(\{|))", re.ASCII)


class VariableError(ValueError):
    """A variable is not set, is empty or has the wrong syntax."""


def expand(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """Replace the variables in a text, or in the texts of a list; anything else is returned unchanged.

    In a URL's login or query, the text of a variable that is unset or empty stays unchanged, because a password may
    contain a dollar.

    Raises:
        VariableError: a variable is not set or empty and has no default, or a dollar does not begin a variable.
    """
    if isinstance(value, list | tuple):
        return type(value)(expand(each, environ) for each in value)
    if not isinstance(value, str) or "$" not in value:
        return value
    shown = public_url(value)

    def replace(found: re.Match[str]) -> str:
        dollar, plain, braced, default, other = found.groups()
        if dollar:
            return "$"
        if other is not None:
            if found[0] not in shown:
                return found[0]
            raise VariableError(
                f"has a '{found[0]}' that does not begin a variable; "
                "write ${NAME} or ${NAME:-default}, and $$ for a dollar"
            )
        name = plain or braced
        if default is not None:
            return environ.get(name) or default
        if environ.get(name):
            return environ[name]
        if found[0] not in shown:
            return found[0]
        state = "is empty" if name in environ else "is not set"
        raise VariableError(f"names the variable {found[0]}, which {state}; set it, or write ${{{name}:-DEFAULT}}")

    return _VARIABLE.sub(replace, value)


def escape(value: Any) -> Any:
    """Double the dollars of a text, or of the texts of a list, so that ``expand`` returns the value."""
    if isinstance(value, list | tuple):
        return type(value)(escape(each) for each in value)
    return value.replace("$", "$$") if isinstance(value, str) else value
