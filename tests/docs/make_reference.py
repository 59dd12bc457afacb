"""Writes what of docs/ comes from the code: ``make docs``. A test fails when it is not current."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from kvtiers.tiers.config.deployment import (
    DeploymentConfig,
    HandlerConfig,
    IdentityConfig,
    MetricsConfig,
    RegionConfig,
)
from kvtiers.tiers.config.mistakes import in_words
from kvtiers.tiers.config.tier_options import TIER_MODELS, BoundedTierConfig, ExternalTierConfig, Model, TierConfig
from kvtiers.tiers.config.values import SIZE_MAX, show_duration, show_size
from kvtiers.tiers.errors import SealReason
from kvtiers.tiers.metrics import METRICS, MetricDef
from tests.docs import make_dashboard

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- from the code: {} -->\n", "<!-- end -->\n"
DEFAULT_THREADS = "half the cores, 1 to 4"

HEAD = """\
# Configuration

One YAML file describes a deployment. `make docs` writes this page from the models that read the file.
`kvtiers check FILE` names each mistake with its path and what is accepted, and `kvtiers check --schema` prints a JSON
schema for editors. [configs/](../configs) has examples with comments.

```yaml
blocks_per_chunk: 4
region:
  size: 4GiB
  eviction_policy: arc
tiers:
  - type: fs
    root_dir: /mnt/nvme/kv
    max_bytes: 200GiB
    ttl: 7d
```

- **Sizes** are `10GiB`, `1.5 MiB` or `4096`. KiB, MiB, … are powers of 1024; KB, MB, … are powers of 1000.
- **Durations** are `500ms`, `10s`, `30m`, `12h`, `7d` or `2w`. A number alone is in seconds.
- **Paths** may begin with `~`. A relative path starts at the YAML file's folder; in options that vLLM gets as JSON, at
  the folder in which the engine was started.
- **Variables** are replaced in every value: `$NAME`, `${NAME}`, and `${NAME:-default}` for a variable that is unset or
  empty. Without a default, such a variable is an error. Write `$$` for a dollar. Variables are not replaced in
  `keys_env`, `options`, `storage_options` and the options of a tier of your own. In a URL's login or query, an unset
  variable stays as written.
- **Secrets** do not belong here. S3 credentials come from where AWS tools look for them, keys for `encrypt` from a file
  or a variable.
- **Keys** must be known. Top-level keys that begin with `x-` are ignored, for YAML anchors.

"""


def configuration() -> str:
    """The whole of configuration.md."""
    parts = [HEAD + _section("The top level", DeploymentConfig, intro=False), _section("`region`", RegionConfig)]
    parts.append(_section("`handler`", HandlerConfig))
    parts.append(_section("`metrics`", MetricsConfig))
    parts.append(_section("`identity`", IdentityConfig))
    parts.append(
        f"## `tiers`\n\n`type` is {', '.join(f'`{name}`' for name in sorted(TIER_MODELS))}, a type that a plugin "
        "registered, or any class with a `module_path`.\n"
    )
    parts.append(_section("Every built-in tier", TierConfig, skip=("type",), level=3, intro=False))
    parts.append(
        _section(
            "Every built-in tier but `memory`", BoundedTierConfig, skip=TierConfig.model_fields, level=3, intro=False
        )
    )
    for name, model in sorted(TIER_MODELS.items()):
        shared = BoundedTierConfig if issubclass(model, BoundedTierConfig) else TierConfig
        parts.append(_section(f"`type: {name}`", model, skip=shared.model_fields, level=3))
    parts.append(
        f"### Your own\n\n{_first_line(ExternalTierConfig)} See [writing a store](writing-a-store.md).\n\n"
        f"{_table(ExternalTierConfig, {'module_path': ExternalTierConfig.model_fields['module_path']})}"
    )
    return "\n".join(parts)


def metric_table(table: Mapping[str, MetricDef]) -> str:
    """A table of metrics."""
    rows = (
        (f"`{name}{{{','.join(metric.labels)}}}`" if metric.labels else f"`{name}`", metric.help)
        for name, metric in table.items()
    )
    return _rows(("metric", "meaning"), rows)


#: Page -> what stands between its markers, by the name in them.
TABLES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "metrics.md": {
        "METRICS": lambda: metric_table(METRICS),
        "SEAL_REASONS": lambda: ", ".join(f"`{reason}`" for reason in SealReason) + "\n",
    },
}


def with_tables(name: str) -> str:
    """A page with what stands between its markers made anew."""
    page = (DOCS / name).read_text()
    for marker, table in TABLES[name].items():
        before, begin, rest = page.partition(BEGIN.format(marker))
        _, _, after = rest.partition(END)
        page = before + begin + table() + END + after
    return page


def _section(title: str, model: type[Model], *, skip: Iterable[str] = (), level: int = 2, intro: bool = True) -> str:
    fields = {name: field for name, field in model.model_fields.items() if name not in skip}
    first = f"{_first_line(model)}\n\n" if intro else ""
    return f"{'#' * level} {title}\n\n{first}{_table(model, fields)}"


def _table(model: type[Any], fields: Mapping[str, FieldInfo]) -> str:
    """A table of options. A default that differs in a tier type stands beside the default of the others."""
    properties = _properties(model)
    rows = []
    for name, field in fields.items():
        default = _default(field, properties[name])
        others: dict[str, list[str]] = {}
        for kind, special in TIER_MODELS.items():
            if issubclass(special, model) and (own := _default(special.model_fields[name], _properties(special)[name])):
                others.setdefault(own, []).append(kind)
        others.pop(default, None)
        default += "".join(f"; {', '.join(sorted(kinds))}: {own}" for own, kinds in sorted(others.items()))
        rows.append((f"`{name}`", _accepted(properties[name]), default, field.description or ""))
    return _rows(("key", "accepted", "default", "meaning"), rows)


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _properties(model: type[Any]) -> dict[str, Any]:
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    return properties


def _accepted(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_accepted(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "$ref" in schema:
        return "see below"
    words = in_words(schema).replace(f" from 0 to {show_size(SIZE_MAX)}", "").removeprefix("a whole number from ")
    return words.removeprefix("a ").replace("duration above 0s, up to", "duration up to") or "anything"


def _default(field: FieldInfo, schema: Mapping[str, Any]) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return DEFAULT_THREADS if "threads" in (schema.get("title") or "").lower() else ""
    value = field.default
    if value is None or value == ():
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if schema.get("type") == ["integer", "string"]:
        value = show_size(value)
    if schema.get("type") == ["number", "string"]:
        value = show_duration(value)
    return f"`{value}`" if value != "" else '`""`'


def _first_line(model: type[Any]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def main() -> None:
    """Write them."""
    (DOCS / "configuration.md").write_text(configuration())
    for name in TABLES:
        (DOCS / name).write_text(with_tables(name))
    make_dashboard.DASHBOARD.write_text(make_dashboard.text())


if __name__ == "__main__":
    main()
