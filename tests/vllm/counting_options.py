"""Adds the options that count of the installed vLLM to ``connector/vllm/counting.json``.

The file is the union over the tested releases (``make contract``). Look at each new line: if the option cannot change
stored KV, it belongs in ``connector/vllm/uncounted.py``.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "connector" / "vllm"
FILE = FOLDER / "counting.json"


def config_classes() -> list[type]:
    """All config objects of the installed vLLM."""
    import vllm.config

    found: dict[str, type] = {}
    for each in pkgutil.iter_modules(vllm.config.__path__, "vllm.config."):
        for value in vars(importlib.import_module(each.name)).values():
            if (
                isinstance(value, type)
                and dataclasses.is_dataclass(value)
                and value.__module__.startswith("vllm.config")
            ):
                found[value.__name__] = value
    return [found[name] for name in sorted(found)]


def counting_options() -> tuple[dict[str, set[str]], set[str]]:
    """Class -> fields, and the variables, that count in the installed vLLM."""
    import vllm.envs

    tables = runpy.run_path(str(FOLDER / "uncounted.py"))  # its package may not be importable without the file
    ignored: Mapping[str, Mapping[str, str]] = tables["IGNORED"]
    fields = {}
    for cls in config_classes():
        not_counting = {
            name for base in cls.__mro__ for names in ignored.get(base.__name__, {}).values() for name in names.split()
        }
        if "*" not in not_counting:
            fields[cls.__name__] = {field.name for field in dataclasses.fields(cls)} - not_counting
    not_counting = {f"VLLM_{name}" for names in tables["IGNORED_VARIABLES"].values() for name in names.split()}
    names: set[str] = {name for name in vllm.envs.environment_variables if name.startswith("VLLM_")}
    return fields, names - not_counting


def main() -> None:
    """Write the file."""
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"fields": {}, "variables": []}
    fields, variables = counting_options()
    for cls, names in fields.items():
        known["fields"][cls] = sorted({*known["fields"].get(cls, ()), *names})
    lines = [f"{json.dumps(cls)}: {json.dumps(names)}" for cls, names in sorted(known["fields"].items()) if names]
    variables |= {*known["variables"], "VLLM_PLUGINS"}
    text = ",\n".join(lines), ",\n".join(map(json.dumps, sorted(variables)))
    FILE.write_text('{{"fields": {{\n{}\n}},\n"variables": [\n{}\n]}}\n'.format(*text))


if __name__ == "__main__":
    main()
