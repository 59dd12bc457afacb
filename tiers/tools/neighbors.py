"""Compares the namespaces of a model: fields that differ are the reason why engines do not share blocks.

``kvtiers check`` compares all namespaces in a storage. An engine with a new namespace logs at startup which existing
namespace is nearest to its own. It searches on a separate thread, which ends after ``SEARCH_S_MAX`` and one more call.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..blocks.file_mapper import CONFIG_FILE_NAME, DIGEST_HEX_DIGITS, NAMESPACE, FileMapper, namespace_of
from ..blocks.namespace import CONFIG_BYTES_MAX, parse_json
from ..errors import StoreError
from ..plain_logs import get_logger
from ..store import Store, read_blob

logger = get_logger(__name__)

NAMESPACES_MAX = 100  # limit of the namespaces to read
SEARCH_S_MAX = 10.0  # time for the search at an engine's start
SHOWN_FIELDS_MAX = 5  # fields shown in one log line
SHOWN_CHARS_MAX = 40  # longest shown value


@dataclass(frozen=True, slots=True)
class Namespace:
    """The content of a namespace's ``config.json``.

    Attributes:
        name: ``<model>_<digest12>``.
        fields: the fields, with one field for each engine option instead of the digest of all options.
    """

    name: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, name: str, fields: dict[str, Any]) -> Namespace:
        """Create a Namespace from the stored fields."""
        engine = fields.get("engine")
        if isinstance(engine, dict):
            fields = {each: value for each, value in fields.items() if each != "engine"}
            fields["model_revision"] = (
                re.sub(r"\+?engine:[0-9a-f]+", "", str(fields.get("model_revision") or "")) or None
            )
            fields |= {str(option): value for option, value in engine.items()}
        return cls(name, fields)

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.fields.get("model_name"))

    def value(self, field: str) -> str:
        """A field's value as JSON; "not set" if the field is missing, because an older release did not write it.

        A missing field and a field with the value null make different namespaces.
        """
        return json.dumps(self.fields[field], sort_keys=True) if field in self.fields else "not set"


def namespaces_in(
    store: Store, beginning: str = "", goes_on: Callable[[], bool] = lambda: True
) -> tuple[list[Namespace], bool]:
    """The namespaces in a storage, and whether there may be more.

    Args:
        beginning: return only namespaces whose names start with this.
        goes_on: called before each namespace is read. The search ends if it returns False.

    Raises:
        StoreError: the namespaces' names cannot be listed.
    """
    names = (name for name in store.folders() if re.fullmatch(NAMESPACE, name) and name.startswith(beginning))
    wanted = itertools.takewhile(lambda _: goes_on(), names)
    namespaces = list(itertools.islice(_read(store, wanted), NAMESPACES_MAX + 1))
    return namespaces[:NAMESPACES_MAX], len(namespaces) > NAMESPACES_MAX


def differing_fields(namespaces: Sequence[Namespace]) -> list[str]:
    """The fields whose values differ between the namespaces."""
    names = set().union(*(namespace.fields for namespace in namespaces))
    return sorted(name for name in names if len({namespace.value(name) for namespace in namespaces}) > 1)


def shown_values(namespaces: Iterable[Namespace], field: str) -> list[str]:
    """The distinct values of a field, shortened and sorted."""
    return sorted({_shown(namespace, field) for namespace in namespaces})


def tell_nearest(
    store: Store, mapper: FileMapper, tier: str, tell: Callable[[dict[str, str]], None] = lambda _: None
) -> None:
    """Start a thread that logs which namespace of the same model is nearest to an engine's new one. Returns at once.

    Nothing is logged if there is no other namespace, or if the storage hangs or fails.

    Args:
        tell: called on that thread with the namespace, as ``SecondaryTierManager.nearest`` is.
    """
    threading.Thread(
        target=_tell, args=(store, mapper, tier, tell), name=f"kvtiers-{tier}-nearest", daemon=True
    ).start()


def _tell(store: Store, mapper: FileMapper, tier: str, tell: Callable[[dict[str, str]], None]) -> None:
    fields = mapper.get_run_config()
    own = Namespace.of(namespace_of(fields), fields)
    try:
        nearest = _nearest(store, own)
    except Exception as e:  # noqa: BLE001 - a thread has no caller, and this log line is optional
        logger.debug("tier %s: other namespaces could not be read: %r", tier, e)
        return
    if nearest is None:
        logger.debug("tier %s: there is no other namespace of %s", tier, own.model)
        return
    other, begun = nearest
    names = differing_fields((own, other))
    shown = "; ".join(
        f"{name} is {_shown(own, name)} here, {_shown(other, name)} there" for name in names[:SHOWN_FIELDS_MAX]
    )
    shown += "; …" if len(names) > SHOWN_FIELDS_MAX else ""
    tell({"namespace": other.name, "begun": begun, "differs": shown})
    logger.info(
        "tier %s: cold start: %s from %s%s: %s",
        tier,
        f"only {names[0]} differs" if len(names) == 1 else f"{len(names)} fields differ",
        f"the namespace {other.name}" if len(names) == 1 else f"the nearest namespace of this model, {other.name}",
        begun and f", begun {begun}",
        shown,
    )


def _nearest(store: Store, own: Namespace) -> tuple[Namespace, str] | None:
    """The namespace that differs in the fewest fields, and when it was begun, as text."""
    ends_at = time.monotonic() + SEARCH_S_MAX
    found, _ = namespaces_in(store, own.name[:-DIGEST_HEX_DIGITS], lambda: time.monotonic() < ends_at)
    others = [each for each in found if each.model == own.model and each.fields != own.fields]
    if not others:
        return None
    nearest = min(others, key=lambda other: len(differing_fields((own, other))))
    name = f"{nearest.name}/{CONFIG_FILE_NAME}"
    mtime = next((info.mtime for info in store.keys(name) if info.key == name), 0.0)
    return nearest, time.strftime("%Y-%m-%d %H:%M", time.localtime(mtime)) if mtime else ""


def _shown(namespace: Namespace, field: str) -> str:
    value = namespace.value(field)
    return value if len(value) <= SHOWN_CHARS_MAX else f"{value[: SHOWN_CHARS_MAX - 1]}…"


def _read(store: Store, names: Iterable[str]) -> Iterator[Namespace]:
    for name in names:
        try:
            fields = parse_json(read_blob(store, f"{name}/{CONFIG_FILE_NAME}", CONFIG_BYTES_MAX) or b"")
        except (StoreError, ValueError):
            continue
        if isinstance(fields, dict):
            yield Namespace.of(name, fields)
