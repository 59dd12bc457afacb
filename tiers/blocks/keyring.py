"""KeyRing: the secret keys that authenticate and encrypt blocks.

A key is 64 hex digits (32 random bytes). A ring is a list of keys, separated by whitespace or commas; ``#`` starts a
comment. The first key seals new blocks, and every key can read blocks. This allows key rotation (``docs/security.md``).

A key's id is derived from the key, so different keys have different ids. A reader without a block's key therefore sees
a block with an unknown key, which it leaves alone, and not a forged block, which it would discard. The keys that seal
blocks are also derived, per purpose and namespace, so that two namespaces never use a nonce with the same key.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping

from ..errors import ConfigError

KEY_BYTES = 32
KEYS_MAX = 64
TEXT_BYTES_MAX = 1 << 16


class KeyRing:
    """An immutable list of keys. Never shows the keys themselves.

    Args:
        keys: 32 bytes each; the first key seals new blocks.

    Raises:
        ConfigError: no keys, too many keys, a key of the wrong length, or a duplicate key.
    """

    __slots__ = ("_keys",)

    def __init__(self, *keys: bytes) -> None:
        if not 1 <= len(keys) <= KEYS_MAX:
            raise ConfigError(f"{len(keys)} keys; accepted are 1..{KEYS_MAX}", field="keys")
        for number, key in enumerate(keys, 1):
            if len(key) != KEY_BYTES:
                raise ConfigError(f"key {number} has {len(key)} bytes; accepted are {KEY_BYTES}", field="keys")
        self._keys = {key_id(key): key for key in keys}
        if len(self._keys) != len(keys):
            raise ConfigError("a key is listed twice", field="keys")

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(map(show_key_id, self._keys))})"

    def __reduce__(self) -> str:
        raise TypeError("a KeyRing cannot be pickled or copied, to keep its keys secret")

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of all keys, the current one first."""
        return tuple(self._keys)

    def derive(self, purpose: bytes, fingerprint: bytes) -> dict[int, bytes]:
        """Derive the keys for one purpose in one namespace: key id -> 32 bytes."""
        info = b"\0".join((b"kvtiers", purpose, fingerprint))
        return {number: hmac.digest(key, info, "sha256") for number, key in self._keys.items()}


#: Environment variables that hold keys, according to the tier configs of this process. They are hidden from its worker
#: processes: only the engine needs keys that are valid for all namespaces.
KEY_VARIABLES: set[str] = set()


def key_id(key: bytes) -> int:
    """Four bytes that identify a key but reveal nothing about it."""
    return int.from_bytes(hmac.digest(key, b"kvtiers\0key id", "sha256")[:4], "little")


def show_key_id(number: int) -> str:
    """A key's id as logs and commands show it: 8 hexadecimal digits."""
    return f"{number:08x}"


def parse_keys(text: str, source: str) -> KeyRing:
    """Parse a list of keys.

    Raises:
        ConfigError: names the source and the number of the bad key, but never shows its text.
    """
    words = [word for line in text.splitlines() for word in line.partition("#")[0].replace(",", " ").split()]
    keys = []
    for number, word in enumerate(words, 1):
        try:
            key = bytes.fromhex(word)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            # "from None": the ValueError's frame contains the text.
            raise ConfigError(
                f"key {number} is not accepted: write {2 * KEY_BYTES} hex digits (openssl rand -hex {KEY_BYTES})",
                field=source,
            ) from None
        keys.append(key)
    try:
        return KeyRing(*keys)
    except ConfigError as e:
        raise ConfigError(e.message, field=source) from None


def load_keys(
    *, keys_file: str | None = None, keys_env: str | None = None, environ: Mapping[str, str] = os.environ
) -> KeyRing:
    """Read keys from a file or an environment variable.

    Raises:
        ConfigError: the keys cannot be read or are not accepted, or other users may read or change the file; names the
            option.
    """
    if keys_file is not None:
        try:
            with open(keys_file, "rb", opener=_open_without_waiting) as f:
                _check_is_secret(os.fstat(f.fileno()), keys_file)
                raw = f.read(TEXT_BYTES_MAX + 1)
        except OSError as e:
            raise ConfigError(f"{keys_file} cannot be read: {e.strerror}", field="keys_file") from None
        if len(raw) > TEXT_BYTES_MAX:
            raise ConfigError(f"{keys_file} is larger than {TEXT_BYTES_MAX} bytes", field="keys_file")
        return parse_keys(raw.decode("ascii", "replace"), "keys_file")
    if keys_env is None:
        raise ConfigError("is required unless keys_env is set", field="keys_file")
    if keys_env not in environ:
        raise ConfigError(f"environment variable {keys_env} is not set", field="keys_env")
    return parse_keys(environ[keys_env][: TEXT_BYTES_MAX + 1], "keys_env")


def _check_is_secret(status: os.stat_result, path: str) -> None:
    """Reject a key file that other users may read or change, as ssh does.

    Args:
        status: of the open file, so that the file cannot be swapped after the check, and a symlink's mode is ignored.

    Raises:
        ConfigError: says how to fix the file.
    """
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is not a regular file", field="keys_file")
    uid, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, uid):
        raise ConfigError(
            f"{path} belongs to uid {status.st_uid}, who can read and change it; the owner must be this process's user "
            f"or root; chown {uid} {path}",
            field="keys_file",
        )
    # A non-root process may read a root-owned file through its group: a Kubernetes secret with fsGroup is such a file.
    others = stat.S_IRWXG | stat.S_IRWXO
    if status.st_uid != uid:
        others &= ~stat.S_IRGRP
    if mode & others:
        raise ConfigError(
            f"{path} can be read or changed by others (mode {mode:04o}); accepted is mode 0600 or 0400, and for a file "
            f"owned by root also 0440 (for a Kubernetes secret set defaultMode: 0400); chmod 600 {path}",
            field="keys_file",
        )


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file without blocking: to open a FIFO would wait for a writer, which may never come."""
    return os.open(path, flags | os.O_NONBLOCK)
