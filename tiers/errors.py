"""Every exception this package raises on purpose.

::

    KVTiersError
    ├── ConfigError                 bad input; names the field, the value and what is accepted
    │   └── NamespaceMismatchError  a root already holds another model's or layout's blocks
    ├── SealError                   a blob is not the block it should be (`reason`)
    ├── QueueFullError              a bounded queue is full: the work was not accepted
    ├── RegionError                 the CPU region cannot be made, joined or used
    └── StoreError                  what a Store raises, and nothing else
        ├── BlobNotFoundError       no blob under the key
        ├── BlobCorruptError        there is something under the key, but not a blob of the asked size
        ├── InvalidKeyError         the key is not one a store may be asked for
        ├── StoreClosedError        the store was closed
        ├── StoreFullError          no space, no inodes, quota, or the configured reserve was reached
        ├── StorePermissionError    credentials, modes, read-only: an operator has to act
        ├── StoreConfigError        the store's place is wrong: no such bucket, root or region
        ├── StoreUnavailableError   (retryable) I/O error, stale handle, connection refused or reset, 5xx
        ├── StoreThrottledError     (retryable) asked to slow down
        └── StoreTimeoutError       (retryable) the store's own deadline passed

`retryable` is a fact of the class, so no caller ever matches on text: True means that the same call may succeed
if it is made again shortly.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import ClassVar

HIDDEN = "***"
_KEY = re.compile(r"(?<![0-9A-Za-z])(0x)?[0-9A-Fa-f]{64}(?![0-9A-Za-z])")


class KVTiersError(Exception):
    """Base of everything this package raises on purpose.

    A message may repeat what others called something, or what a server said: all of it passes ``printable``.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class ConfigError(KVTiersError, ValueError):
    """Bad input. The message names the field, shows the value and says what would be accepted.

    Args:
        message: what is wrong and what would be accepted. It may have several lines.
        field: dotted path of the field, such as ``tiers[1].max_bytes``; empty where no single field is at fault.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        self.field = printable(field)
        self.message = printable_lines(message)
        super().__init__()
        self.args = (f"{self.field}: {self.message}" if field else self.message,)


def quoted(text: str) -> str:
    """A configuration's text as a message may repeat it: without what may be a login, a signature or a key."""
    return repr(re.sub(r"(?s).*@", f"{HIDDEN}@", _without_query(without_keys(text))))


def without_keys(text: str) -> str:
    """A text without the keys of ``tiers.blocks.keyring``, which somebody may have written in the wrong place."""
    return _KEY.sub(HIDDEN, text)


def printable(text: str) -> str:
    """A text that is not ours, for a log or a terminal: on one line, and without characters that a terminal obeys.

    These are control characters (ESC begins a command) and those that reverse or hide the rest of a line. Everything
    on its way to a terminal or a log passes this function: by ``KVTiersError``, ``tiers.plain_logs`` and
    ``connector.commands.places``.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """As ``printable``, for a text of several lines that are ours."""
    return "\n".join(map(printable, text.split("\n")))


def public_url(url: str) -> str:
    """A URL without what may be a secret in it: who logs in, and the query.

    Rather too much goes than too little: drivers take a login with any character, also those that end one elsewhere.
    """
    return re.sub(r"(?s)(?<=//).*@", f"{HIDDEN}@", _without_query(url))


def _without_query(text: str) -> str:
    """An "@" in it may be the end of a login with a question mark, so it stays."""
    place, mark, query = text.partition("?")
    return f"{place}{'@' if '@' in query else ''}?{HIDDEN}" if mark else text


class NamespaceMismatchError(ConfigError):
    """The ``config.json`` of a namespace does not say what this process would write there."""


class SealReason(StrEnum):
    """Why a blob was refused; also the ``reason`` label of the ``verify_failures`` counter."""

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
    PAYLOAD_CHECKSUM = "payload_checksum"
    AUTHENTICATION = "authentication"
    UNVERIFIED = "unverified"


class SealError(KVTiersError):
    """A blob is not the block that was asked for.

    Attributes:
        reason: which check failed.
        foreign: True when the blob may be perfectly good for another reader: a newer version, an unknown checksum or
            authentication scheme, or, in a folder that engines share, another engine's block or one that vLLM's own
            tier wrote without a seal. Such a blob is a miss and is never moved, replaced or deleted.
    """

    def __init__(self, reason: SealReason, message: str, *, foreign: bool = False) -> None:
        self.reason = reason
        self.foreign = foreign or reason is SealReason.UNSUPPORTED
        super().__init__(f"{reason}: {message}")


class QueueFullError(KVTiersError):
    """A bounded queue is full; nothing was queued."""


class RegionError(KVTiersError):
    """The shared CPU region cannot be created, joined or used."""


class StoreError(KVTiersError):
    """What a Store raises, and nothing else.

    Attributes:
        key: the store key the call was about, or "" where it was about the store itself.
    """

    retryable: ClassVar[bool] = False
    key: str = ""  # also of a subclass of other people that does not call this constructor

    def __init__(self, message: str, *, key: str = "") -> None:
        self.key = key
        super().__init__(f"{message} (key {key!r})" if key else message)


class BlobNotFoundError(StoreError):
    """No blob is stored under the key."""


class BlobCorruptError(StoreError):
    """Something is stored under the key, but it is not a blob of the size that was asked for."""


class InvalidKeyError(StoreError, ValueError):
    """The key is not one a store may be asked for (see ``tiers.store.check_key``)."""


class StoreClosedError(StoreError):
    """The store was closed."""


class StoreFullError(StoreError):
    """No space, no inodes, over quota, or the configured reserve was reached."""


class StorePermissionError(StoreError):
    """Refused by credentials, modes or a read-only medium: retrying does not help, an operator has to act."""


class StoreConfigError(StoreError):
    """The place itself is wrong: the bucket, root folder or region does not exist."""


class StoreUnavailableError(StoreError):
    """I/O error, stale handle, refused or reset connection, 5xx."""

    retryable = True


class StoreThrottledError(StoreError):
    """The store asked us to slow down."""

    retryable = True


class StoreTimeoutError(StoreError):
    """The store's own deadline for one operation passed."""

    retryable = True
