"""Helpers for fsspec drivers: their capabilities, their exceptions as StoreErrors, and publishing by write and move."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from json import JSONDecodeError
from typing import Any, Final

from ..errors import (
    BlobCorruptError,
    BlobNotFoundError,
    StoreConfigError,
    StoreError,
    StorePermissionError,
    StoreTimeoutError,
    StoreUnavailableError,
    public_url,
)
from ..plain_logs import get_logger
from .chatty_loggers import cap_loggers_of
from .os_errors import store_error

logger = get_logger(__name__)

#: Protocols of files on this machine.
LOCAL: Final = frozenset(["file", "local"])
#: Protocols whose put is atomic.
ATOMIC_PUT: Final = frozenset(
    ["abfs", "abfss", "adl", "az", "gcs", "gs", "hf", "memory", "oci", "oss", "r2", "s3", "s3a"]
)
_CACHES: Final = (
    "its cache returns stale blocks after a block is replaced or removed, and has no size limit; "
    "take it out of the URL, or put an fs tier in front"
)
_ONE_FILE: Final = "its driver has one open file for all threads, which get each other's bytes; use zip:// or a folder"
#: Protocols that break the rules of a store, and why.
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(["blockcache", "cached", "filecache", "simplecache"], _CACHES),
    "dir": "the wrapped file system caches listings, or cannot be called; write its URL, with the folder",
    "ftp": "its driver has one connection for all threads, which get each other's answers; use sftp://",
    **dict.fromkeys(["libarchive", "tar"], _ONE_FILE),
}
#: Folder below the root for files that are not completely written yet.
TEMPORARY_FOLDER: Final = ".tmp"
#: The names of these files: dot names, so that listings never show them.
TEMPORARY_NAME: Final = re.compile(r"\.[0-9a-f]{32}")
#: Keys under which drivers report a file's time.
_MILLISECONDS_FIELD: Final = "modificationTime"  # webhdfs
_TIME_FIELDS: Final = (
    *("mtime", "LastModified", "last_modified", "updated", "modified", "created"),
    *(_MILLISECONDS_FIELD, "last_commit"),  # webhdfs, hf
)

_ABSENT_STATUSES: Final = (404, 410)
#: Options of fsspec itself that are not accepted.
_OURS: Final = ("asynchronous", "loop")
_LINK: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]*", re.ASCII)  # a protocol


class OptionsError(StoreConfigError):
    """The driver failed with a built-in Python error, for example because of an unknown option."""


def protocols_of(fs: Any) -> frozenset[str]:
    """All protocol names of a file system."""
    return frozenset([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)


def lists_trees(fs: Any) -> bool:
    """Whether the driver has its own way to list a whole tree.

    fsspec's default, which other drivers inherit, treats a folder that cannot be listed as empty. It applies its option
    for errors only to the first folder.
    """
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if fs.async_impl:
        return type(fs)._find is not AsyncFileSystem._find
    return type(fs).find is not AbstractFileSystem.find


def put_and_move(fs: Any, target: str, parts: Sequence[memoryview], temporary_folder: str) -> None:
    """Write a temporary file and move it: for drivers whose put shows incomplete files and does not create folders.

    Raises:
        BlobCorruptError: a folder has this name.
        Exception: whatever the driver raises.
    """
    if fs.isdir(target):
        raise BlobCorruptError("there is a folder with this name")  # a move would put the blob into this folder
    folder = target.rpartition("/")[0]
    temporary = f"{temporary_folder}/.{uuid.uuid4().hex}"  # see TEMPORARY_NAME
    try:
        fs.makedirs(temporary_folder, exist_ok=True)
        with fs.open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
        fs.makedirs(folder, exist_ok=True)
        if protocols_of(fs) & LOCAL:
            # Not mv: fsspec uses shutil.move, which copies if the rename fails, and an unfinished copy is visible.
            os.replace(temporary, target)
        else:
            fs.mv(temporary, target)
    except BaseException:
        try:
            fs.rm_file(temporary)
        except Exception as e:  # noqa: BLE001 - drivers may raise anything; a later sweep removes the file
            logger.debug("%s: a temporary file was not removed: %s", type(fs).__name__, type(e).__name__)
        raise


def size_of(info: Any) -> int | None:
    """The size of a blob in bytes; None for a folder, or if the driver does not know the size.

    If ``info`` is an exception, raise it.
    """
    if isinstance(info, BaseException):
        raise info
    return None if info["type"] == "directory" or info["size"] is None else int(info["size"])


def mtime_of(info: Mapping[str, Any]) -> float:
    """Time of the last change in Unix seconds; 0.0 if the driver does not report it."""
    for name in _TIME_FIELDS:
        value = info.get(name)
        if isinstance(value, (int, float)):
            return value / 1000 if name == _MILLISECONDS_FIELD else float(value)
        if isinstance(value, Mapping):  # hf reports a commit
            value = value.get("date")
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime):
            return value.timestamp()
    return 0.0


def translate(error: Exception, key: str, hint: str = "") -> StoreError:
    """Translate any exception of a driver into a StoreError, by its class or errno, never by its text.

    Args:
        hint: from ``explain_options``, for errors that a wrong option may have caused.
    """
    error = _unwrap_not_found(error)
    name = type(error).__name__
    status = getattr(error, "status", None)  # HTTP status, if a web server answered
    if isinstance(error, TimeoutError) or name == "FSTimeoutError":
        return StoreTimeoutError(f"the driver did not finish in time ({name})", key=key)
    if (
        isinstance(error, PermissionError)
        or name.endswith(("CredentialsError", "AuthenticationError", "RefreshError"))
        or status in (401, 403)
    ):
        return StorePermissionError(f"access was denied to the driver ({name}); check its storage_options", key=key)
    if isinstance(error, FileNotFoundError) or status in _ABSENT_STATUSES:
        return BlobNotFoundError("not stored", key=key)
    if isinstance(error, OSError):
        # Without the error's text, which may contain a URL with a signature.
        return store_error(OSError(error.errno or 0, name), key)
    if isinstance(error, NotImplementedError):
        return StoreConfigError(f"the driver does not support this operation ({name})", key=key)
    is_unreadable = isinstance(error, (UnicodeError, JSONDecodeError))  # a server's response
    if isinstance(error, (ValueError, TypeError)) and not is_unreadable:
        text = f"the driver does not support this operation or its options ({name}){hint}"
        return OptionsError(text, key=key)
    if isinstance(error, (AssertionError, AttributeError)) and hint:
        return OptionsError(f"the driver failed ({name}){hint}", key=key)
    return StoreUnavailableError(f"the driver failed ({name})", key=key)


def explain_options(options: Mapping[str, Any]) -> str:
    """Name the driver's options, because an option may be wrong, for the end of an error message. "": no options."""
    return f"; check the names and values of storage_options ({', '.join(map(str, options))})" if options else ""


def _unwrap_not_found(error: Exception) -> Exception:
    """The cause of a FileNotFoundError that does not mean a missing file; otherwise the error itself.

    fsspec's http driver raises FileNotFoundError for any failure of the network or server: dead server, 403, 429, 503.
    """
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    is_web = type(cause).__module__.partition(".")[0] == "aiohttp" or isinstance(cause, (TimeoutError, ConnectionError))
    return cause if is_web and getattr(cause, "status", None) not in _ABSENT_STATUSES else error


def check_drivers(url: str) -> None:
    """Import the drivers that fsspec uses for a URL and for each URL in its chain. Makes no storage call.

    The drivers' loggers are capped: at DEBUG level, drivers log URLs with their passwords.

    Raises:
        StoreConfigError: fsspec or a driver is not installed, a protocol has no driver or is ``REFUSED``, or the text
            is not a URL (each link of a chain but the last one may be a protocol alone): fsspec would use any other
            text as a file path in the working directory.
    """
    try:
        from fsspec.core import get_filesystem_class
    except ImportError:
        raise StoreConfigError("fsspec is not installed: pip install '.[fsspec]' in kvtiers' checkout") from None
    links = url.split("::")
    protocols = []
    for link in links:
        protocol, has_path, path = link.partition("://")
        # The text is not shown, because without "//" a login looks like a path.
        if _LINK.fullmatch(protocol) is None or (not has_path and link is links[-1]):
            raise StoreConfigError("is not a URL; write protocol://bucket/folder, or file:///folder for a local folder")
        if protocol in LOCAL and has_path and not path.startswith("/"):
            raise StoreConfigError(f"{public_url(link)!r} is below the working directory; write {protocol}:///folder")
        try:
            cap_loggers_of(get_filesystem_class(protocol))
        except ImportError as e:
            text = f"{protocol}://: the driver is not installed: pip install {missing_package(e)}"
            raise StoreConfigError(text) from None
        except ValueError:
            raise StoreConfigError(
                f"{protocol}://: fsspec has no such driver; correct the protocol, or install its driver"
            ) from None
        protocols.append(protocol)
    for protocol in protocols:
        if protocol in REFUSED:
            raise StoreConfigError(f"{protocol}:// is not accepted: {REFUSED[protocol]}")


def open_driver(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Create the driver of a URL. Makes no storage call, but some drivers connect.

    Errors do not contain the URL or the driver's text, which may contain a password.

    Returns:
        The driver, and the root's path in it.

    Raises:
        StoreConfigError: see ``check_drivers``, or the URL or an option is not accepted.
        StoreError: the driver could not connect.
    """
    check_drivers(url)
    from fsspec.core import url_to_fs

    for name in filter(options.get, _OURS):
        text = f"storage_options: {name} is not accepted, because kvtiers calls the driver from threads"
        raise OptionsError(f"{text}; leave it out")
    try:
        # A new instance, so that turning off the listings cache, which returns stale listings, affects no one else.
        fs, root = url_to_fs(url, **{"skip_instance_cache": True, **options})
    except ImportError as e:
        raise StoreConfigError(f"the driver is not installed: pip install {missing_package(e)}") from None
    except (ValueError, TypeError, FileNotFoundError, AssertionError, AttributeError, LookupError) as e:
        text = f"fsspec does not accept the URL or an option: {type(e).__name__}{explain_options(options)}"
        raise OptionsError(text) from None
    except Exception as e:  # noqa: BLE001 - drivers may raise anything
        raise translate(e, "") from None
    return fs, str(root).rstrip("/")


def missing_package(error: ImportError) -> str:
    """Name of the missing package. It is in the cause of fsspec's own ImportError."""
    return error.name or getattr(error.__cause__, "name", None) or "the one for this protocol"
