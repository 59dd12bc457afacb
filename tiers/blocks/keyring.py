"""KeyRing: the secrets that blocks are authenticated and encrypted with. Pure.

A key is 64 hex digits (32 random bytes). A ring is a list of them, by whitespace or commas, ``#`` begins a comment:
the first is for new blocks, all are good for reading, which is how keys are rotated (``docs/security.md``).

A key's id is derived from it, so two different keys never go by one id: a reader with another key sees a block it
does not know, which it leaves alone, rather than a forged one, which it would throw away. What a namespace's blocks are
sealed with is derived, too, by purpose and namespace: no two namespaces share nonces.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping

from kvtiers.tiers.errors import ConfigError

KEY_BYTES = 32
KEYS_MAX = 64
TEXT_BYTES_MAX = 1 << 16


class ExposedKeysError(ConfigError):
    """Others may read or change a file of keys.

    Attributes:
        fix: the command that mends it.
    """

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(f"{message}: {fix}", field="keys_file")
        self.fix = fix


class KeyRing:
    """Immutable. Shows its keys nowhere.

    Args:
        keys: 32 bytes each; the first is for new blocks.

    Raises:
        ConfigError: no key, too many, one of another length, or one twice.
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
            raise ConfigError("one key is there twice", field="keys")

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(f'{number:08x}' for number in self._keys)})"

    def __reduce__(self) -> str:
        raise TypeError("a KeyRing is not written anywhere")

    @property
    def current_id(self) -> int:
        """Id of the key for new blocks."""
        return next(iter(self._keys))

    def derive(self, purpose: bytes, fingerprint: bytes) -> dict[int, bytes]:
        """Key id -> 32 bytes for one purpose in one namespace."""
        info = b"\0".join((b"kvtiers", purpose, fingerprint))
        return {number: hmac.digest(key, info, "sha256") for number, key in self._keys.items()}


#: Environment variables that the configurations of this process' tiers have keys in: no process of any of them, and
#: none but the engine's, needs keys of all namespaces.
KEY_VARIABLES: set[str] = set()


def key_id(key: bytes) -> int:
    """Four bytes that name a key and tell nothing about it."""
    return int.from_bytes(hmac.digest(key, b"kvtiers\0key id", "sha256")[:4], "little")


def parse_keys(text: str, source: str) -> KeyRing:
    """The ring that a text lists.

    Raises:
        ConfigError: names the source and which key is none, never what it is.
    """
    words = [word for line in text.splitlines() for word in line.partition("#")[0].replace(",", " ").split()]
    keys = []
    for number, word in enumerate(words, 1):
        try:
            key = bytes.fromhex(word)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            # "from None": the ValueError's frame holds the text.
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
    """The ring of a file or of an environment variable.

    Raises:
        ConfigError: names the option.
        ExposedKeysError: others may read or change the file.
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
        raise ConfigError("or keys_env is required", field="keys_file")
    if keys_env not in environ:
        raise ConfigError(f"the environment has no {keys_env}", field="keys_env")
    return parse_keys(environ[keys_env][: TEXT_BYTES_MAX + 1], "keys_env")


def _check_is_secret(status: os.stat_result, path: str) -> None:
    """Refuse a file that others may read or change, as ssh does.

    Args:
        status: of the opened file, so that nothing can be put in its place, and a link's own mode does not matter.

    Raises:
        ExposedKeysError: says how to mend it.
        ConfigError: it is no file.
    """
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is no file", field="keys_file")
    uid, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, uid):
        raise ExposedKeysError(
            f"{path} belongs to uid {status.st_uid}, who can read and change it; accepted is a file of this process's "
            "own user or of root",
            fix=f"chown {uid} {path}",
        )
    # A process that is not root's reads a file of root's by its group, as of a Kubernetes secret with fsGroup.
    others = stat.S_IRWXG | stat.S_IRWXO
    if status.st_uid != uid:
        others &= ~stat.S_IRGRP
    if mode & others:
        raise ExposedKeysError(
            f"{path} can be read or changed by others (mode {mode:04o}); accepted is mode 0600 or 0400, for a file of "
            "root's 0440 too (a Kubernetes secret takes defaultMode: 0400)",
            fix=f"chmod 600 {path}",
        )


def _open_without_waiting(path: str, flags: int) -> int:
    """A FIFO's writer may never come."""
    return os.open(path, flags | os.O_NONBLOCK)
