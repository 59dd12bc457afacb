"""JSON schemas of the commands' ``--json`` output. ``kvtiers COMMAND --json-schema`` prints them."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from .bench import Speeds
from .check import Checked
from .collect import Collected, Skipped
from .copy import Copied
from .deployment import Ways
from .explain import Explained
from .output import Document
from .remove import Removed
from .results import Tiers
from .show import Found
from .storage import BlockLine, Listed, Used
from .verify import Verified

#: Command -> the type of its document. ``demo --json FILE`` is another option.
DOCUMENTS: dict[str, Any] = {
    "check": Document[Checked],
    "vllm-config": Document[Ways],
    "ls": Document[Tiers[Listed]],
    "du": Document[Tiers[Used]],
    "show": Document[Tiers[Found]],
    "verify": Document[Tiers[Verified]],
    "gc": Document[Tiers[Collected | Skipped]],
    "rm": Document[Tiers[Removed]],
    "copy": Document[Copied],
    "explain": Document[Explained],
    "bench": Document[Speeds],
}


def document_schema(command: str) -> dict[str, Any]:
    """The schema of a command's document; of ``ls``: of each of its lines."""
    printed: Any = DOCUMENTS[command] | BlockLine if command == "ls" else DOCUMENTS[command]
    schema = TypeAdapter(printed).json_schema(schema_generator=_Generator)
    for part in (schema, *schema["$defs"].values()):
        if "command" in part.get("properties", ()):
            part["properties"]["command"] = {"const": command}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


class _Generator(GenerateJsonSchema):
    def field_is_required(self, *_: Any, **__: Any) -> bool:
        return True  # a field with a default is printed as well

    def field_title_should_be_set(self, _: Any) -> bool:
        return False
