"""Every exception this package raises on purpose.

::

    KVTiersError
    ├── ConfigError                 bad input; names the field, the value and what is accepted
    │   └── NamespaceMismatchError  a root already holds another model's or layout's blocks
    ├── SealError                   a blob is not the expected block (see `reason`)
    ├── QueueFullError              a bounded queue is full: the work was not accepted
    ├── RegionError                 the CPU region cannot be created, joined or used
    └── StoreError                  base of all exceptions that a Store raises
        ├── BlobNotFoundError       no blob under the key
        ├── BlobCorruptError        the key holds something other than a blob of the requested size
        ├── InvalidKeyError         not a valid store key
        ├── StoreClosedError        the store was closed
        ├── StoreFullError          no space, no inodes, quota, or the configured reserve was reached
        ├── StorePermissionError    credentials, file modes, read-only: an operator has to act
        ├── StoreConfigError        the store's location is wrong: no such bucket, root or region
        ├── StoreUnavailableError   (retryable) I/O error, stale handle, connection refused or reset, 5xx
        ├── StoreThrottledError     (retryable) the storage asked us to slow down
        └── StoreTimeoutError       (retryable) the store's own deadline passed

`retryable` is an attribute of the class, so callers never match on message text. True: the same call may succeed if it
is repeated soon.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import ClassVar

HIDDEN = "***"
_KEY = re.compile(r"(?<![0-9A-Za-z])(0x)?[0-9A-Fa-f]{64}(?![0-9A-Za-z])")


class KVTiersError(Exception):
    """Base of everything this package raises on purpose.

    A message may quote foreign names or a server's response, so every message goes through ``printable``.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class ConfigError(KVTiersError, ValueError):
    """Bad input. The message names the field, shows the value and says what is accepted.

    Args:
        message: what is wrong and what is accepted. May have several lines.
        field: dotted path of the field, such as ``tiers[1].max_bytes``; empty if no single field is at fault.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        self.field = printable(field)
        self.message = printable_lines(message)
        super().__init__()
        self.args = (f"{self.field}: {self.message}" if field else self.message,)


def quoted(text: str) -> str:
    """Quote a configuration value for a message, with anything that may be a login, signature or key hidden."""
    return repr(re.sub(r"(?s).*@", f"{HIDDEN}@", _without_query(without_keys(text))))


def without_keys(text: str) -> str:
    """Hide keys of ``tiers.blocks.keyring`` in a text, in case someone pasted a key into the wrong place."""
    return _KEY.sub(HIDDEN, text)


def printable(text: str) -> str:
    """Make foreign text safe for a log or a terminal: escape line breaks and all characters that a terminal acts on.

    These are control characters (ESC starts a terminal command) and characters that reverse or hide the rest of a line.
    All text for a terminal or a log goes through this function: ``KVTiersError``, ``tiers.plain_logs`` and
    ``connector.commands.output`` call it.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """Like ``printable``, but keep line breaks: for text whose line breaks kvtiers itself wrote."""
    return "\n".join(map(printable, text.split("\n")))


def public_url(url: str) -> str:
    """Hide the parts of a URL that may be secret: the login and the query.

    Hides too much rather than too little: drivers accept any character in a login, even one that normally ends it.
    """
    url = _without_query(url)
    before = r"(?s)(?<=//).*@" if "//" in url else r"(?s).*@"  # without "//", nothing tells a login from a path
    return re.sub(before, f"{HIDDEN}@", url)


def _without_query(text: str) -> str:
    """Hide a URL's query. An "@" in the query stays, because it may end a login that contains a question mark."""
    place, mark, query = text.partition("?")
    return f"{place}{'@' if '@' in query else ''}?{HIDDEN}" if mark else text


class NamespaceMismatchError(ConfigError):
    """A namespace's ``config.json`` differs from the one that this process would write."""


class SealReason(StrEnum):
    """Why a blob was rejected; also the ``reason`` label of the ``verify_failures`` counter."""

    SIZE = "size"
    MAGIC = "magic"
    VERSION = "version"
    LENGTHS = "lengths"
    TRAILER_CHECKSUM = "trailer_checksum"
    FINGERPRINT = "fingerprint"
    KEY = "key"
    GROUP = "group"
    RANK = "rank"
    UNSUPPORTED = "unsupported"
    UNKNOWN_KEY = "unknown_key"
    PAYLOAD_CHECKSUM = "payload_checksum"
    AUTHENTICATION = "authentication"


#: Another reader may be able to use such a blob.
FOREIGN_REASONS = (SealReason.VERSION, SealReason.UNSUPPORTED, SealReason.UNKNOWN_KEY)


class SealError(KVTiersError):
    """A blob is not the requested block.

    Attributes:
        reason: which check failed.
        foreign: True if another reader may be able to use the blob: it is intact, but of another version, or with an
            unknown checksum, authentication scheme or key. A foreign blob counts as a miss and is never moved, replaced
            or deleted.
    """

    def __init__(self, reason: SealReason, message: str) -> None:
        self.reason = reason
        self.foreign = reason in FOREIGN_REASONS
        super().__init__(f"{reason}: {message}")


class QueueFullError(KVTiersError):
    """A bounded queue is full; nothing was queued."""


class RegionError(KVTiersError):
    """The shared CPU region cannot be created, joined or used."""


class StoreError(KVTiersError):
    """Base of all exceptions that a Store raises.

    Attributes:
        key: the store key that the call was for; "" if the call was for the store itself.
    """

    retryable: ClassVar[bool] = False
    key: str = ""  # also set for third-party subclasses that do not call this constructor

    def __init__(self, message: str, *, key: str = "") -> None:
        self.key = key
        super().__init__(f"{message} (key {key!r})" if key else message)


class BlobNotFoundError(StoreError):
    """No blob is stored under the key."""


class BlobCorruptError(StoreError):
    """The key holds something other than a blob of the requested size."""


class InvalidKeyError(StoreError, ValueError):
    """Not a valid store key (see ``tiers.store.check_key``)."""


class StoreClosedError(StoreError):
    """The store was closed."""


class StoreFullError(StoreError):
    """No space, no inodes, over quota, or the configured reserve was reached."""


class StorePermissionError(StoreError):
    """Refused by credentials, file modes or a read-only medium. Retrying does not help; an operator must act."""


class StoreConfigError(StoreError):
    """The store's location is wrong: the bucket, root folder or region does not exist."""


class StoreUnavailableError(StoreError):
    """I/O error, stale handle, refused or reset connection, 5xx."""

    retryable = True


class StoreThrottledError(StoreError):
    """The storage asked us to slow down."""

    retryable = True


class StoreTimeoutError(StoreError):
    """The store's own deadline for one operation passed."""

    retryable = True
