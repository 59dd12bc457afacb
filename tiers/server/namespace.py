"""Opens a namespace: the first engine writes the file that identifies it, later engines compare the file."""

from __future__ import annotations

import json

from ..blocks.file_mapper import FileMapper
from ..blocks.namespace import CONFIG_BYTES_MAX, compare_fields
from ..errors import BlobCorruptError, ConfigError, StoreFullError
from ..plain_logs import get_logger
from ..store import Store, read_blob

logger = get_logger(__name__)


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
                "%s is new: nothing is stored for this engine yet. If you expected hits, kvtiers check shows in "
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
            compare_fields(found, fields, path)
    except StoreFullError as e:
        logger.warning("namespace %s: config.json could not be written or verified: %s", mapper.base_path, e)
    return is_new


def _read(store: Store, name: str, path: str) -> bytes | None:
    try:
        return read_blob(store, name, CONFIG_BYTES_MAX)
    except BlobCorruptError as e:
        raise ConfigError(f"cannot be read: {e}", field=path) from e
