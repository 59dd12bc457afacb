"""The file that identifies a namespace (``config.json``): the first engine writes it, later engines compare it."""

from __future__ import annotations

import json
from typing import Any

from ..errors import (
    BlobCorruptError,
    ConfigError,
    NamespaceMismatchError,
    StoreFullError,
    printable,
)
from ..plain_logs import get_logger
from ..store import Store, read_blob
from .file_mapper import FileMapper

logger = get_logger(__name__)

CONFIG_BYTES_MAX = 1 << 20
SHOWN_MAX = 200  # characters of a stored value in an error message


def open_namespace(store: Store, mapper: FileMapper, *, read_only: bool = False) -> bool:
    """Write the namespace's fields, or compare them with the stored fields. With ``read_only`` nothing is written.

    A file that is empty or all zeros is written again. A power cut leaves such a file if it happens after the name and
    before the bytes have reached the disk (seen on ext4, 8 s after a first start).

    A full storage does not keep an engine from starting. The error is logged, and the fingerprint in each block's seal
    still keeps foreign blocks out.

    Returns:
        Whether the namespace is new, which means that no fields were stored before.

    Raises:
        NamespaceMismatchError: the stored fields differ; names the first field that differs.
        ConfigError: the stored file does not contain a namespace's fields.
        StoreError: raised by the store, except StoreFullError.
    """
    name, path = mapper.relative_config_name, mapper.get_config_file_path()
    fields = mapper.get_run_config()
    wanted = json.dumps(fields, indent=2, sort_keys=True).encode()
    is_new = False
    try:
        found = _read(store, name, path)
        is_new = found is None
        if is_new:
            logger.info(
                "%s is new: nothing is stored for this engine yet. If you expected hits, kvtiers doctor shows in "
                "which options this namespace differs from others of the same model",
                path,
            )
        torn = found is not None and not found.strip(b"\0")
        if torn:
            logger.warning("%s is empty, as after a power cut%s", path, "" if read_only else ": it is written again")
        if (found is None or torn) and not read_only:
            # Without overwrite, one of several first writers wins.
            store.put(name, [memoryview(wanted)], overwrite=torn)
            found, torn = _read(store, name, path), False
        if not (found is None or torn or found == wanted):
            _compare(found, fields, path)
    except StoreFullError as e:
        logger.warning("namespace %s: config.json could not be written or verified: %s", mapper.base_path, e)
    return is_new


def _read(store: Store, name: str, path: str) -> bytes | None:
    try:
        return read_blob(store, name, CONFIG_BYTES_MAX)
    except BlobCorruptError as e:
        raise ConfigError(f"cannot be read: {e}", field=path) from e


def _compare(found: bytes, fields: dict[str, Any], path: str) -> None:
    try:
        there = parse_json(found)
    except ValueError as e:
        raise ConfigError(
            f"is torn or foreign ({e}); if nothing else uses this folder, delete it and start again",
            field=path,
        ) from e
    if not isinstance(there, dict):
        raise ConfigError("is foreign: accepted is a JSON object of the namespace's fields", field=path)
    for field in sorted(there.keys() | fields.keys()):
        if there.get(field) != fields.get(field):
            raise NamespaceMismatchError(
                f"{path} says {_shortened(repr(there.get(field)))}, this process would write {fields.get(field)!r}; "
                "use another root, or delete the folder if nothing else uses it",
                field=_shortened(printable(field)),
            )


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 1]}…"


def parse_json(text: str | bytes | bytearray) -> Any:
    """Like ``json.loads``, for text from outside.

    Raises:
        ValueError: also for text that is nested too deeply, for which ``json.loads`` raises RecursionError.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
