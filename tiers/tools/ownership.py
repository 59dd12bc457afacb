"""Checks that a storage is kvtiers' own. Destructive commands require this, because a path may be a mistake.

A storage is kvtiers' own if it has one of these:

- a namespace whose ``config.json`` names that namespace, as every engine writes it at its start;
- a record below ``_kvtiers/``, which stays when the last namespace is removed. The record's content is not checked.
  That is safe: commands remove only files with the name of a block, a writer's record or a private file;
- a block: its long name is unlikely to be made by another program.

A storage without any blob is accepted as well: no file can be removed, and a scheduled job must not fail because no
engine has started yet.
"""

from __future__ import annotations

import contextlib

from ..capacity.records import OWN_PREFIX, UNREADABLE
from ..capacity.walker import is_block
from ..errors import ConfigError, printable
from ..store import KeepsFiles, Store
from .block_reader import read_identity
from .namespaces import namespace_names


def check_is_ours(store: Store) -> None:
    """Check that kvtiers wrote to this storage, or that it is empty.

    Raises:
        ConfigError: the storage holds only foreign files.
        StoreError: the storage cannot be listed.
    """
    hidden = store.hidden_names() if isinstance(store, KeepsFiles) else []
    found = next((info.key for info in store.keys()), hidden[0] if hidden else None)  # noqa: SIM118 - not a dict
    if found is None or _has_identity(store) or _has_record_or_block(store):
        return
    raise ConfigError(
        f"is not a kvtiers storage, so nothing is changed: it holds {printable(found)!r}, but no namespace with a "
        f"config.json of kvtiers, no record below {OWN_PREFIX} and no block; check the path"
    )


def _has_identity(store: Store) -> bool:
    for namespace in namespace_names(store):
        with contextlib.suppress(*UNREADABLE):  # one folder may belong to another user
            if read_identity(store, namespace) is not None:
                return True
    return False


def _has_record_or_block(store: Store) -> bool:
    return any(info.key.startswith(OWN_PREFIX) or is_block(info.key) for info in store.keys())  # noqa: SIM118 - not a dict
