"""List the namespaces of a root, compare those of one model, and remove one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ..blocks.file_mapper import CONFIG_FILE_NAME, NAMESPACE
from ..errors import StoreError
from ..store import KeyInfo, Store
from .block_reader import read_identity
from .inventory import Share, list_blocks
from .neighbors import Namespace, differing_fields, shown_values

FIELDS_SHOWN_MAX = 3
DELETE_BATCH_KEYS = 512
_FOLDER = re.compile(rf"({NAMESPACE})(_r[0-9]+)?")


def differences(namespaces: Iterable[Namespace]) -> dict[str, dict[str, str]]:
    """For each namespace that has siblings: the fields in which the namespaces of its model differ, and its values.

    Siblings are namespaces with the same model name. Values are JSON, shortened; "not set" if the field is missing.
    """
    by_model: dict[str, list[Namespace]] = {}
    for namespace in namespaces:
        by_model.setdefault(namespace.model, []).append(namespace)
    return {
        namespace.name: {field: shown_values([namespace], field)[0] for field in fields}
        for siblings in by_model.values()
        if (fields := differing_fields(siblings))
        for namespace in siblings
    }


def differences_in_words(fields: Mapping[str, str]) -> str:
    """The first ``FIELDS_SHOWN_MAX`` differences on one line."""
    shown = [f"{name}={value}" for name, value in list(fields.items())[:FIELDS_SHOWN_MAX]]
    left = len(fields) - len(shown)
    return ", ".join(shown) + (f" and {left} more" if left > 0 else "")


def namespace_names(store: Store) -> list[str]:
    """The names of all namespaces that have an identity file or blocks.

    Raises:
        StoreError: the storage cannot be listed.
    """
    return sorted({found[1] for folder in store.folders() if (found := _FOLDER.fullmatch(folder))})


def rank_folders(store: Store) -> list[str]:
    """The folders that hold blocks: ``<namespace>_r<rank>``.

    Raises:
        StoreError: the storage cannot be listed.
    """
    return sorted({folder for folder in store.folders() if (found := _FOLDER.fullmatch(folder)) and found[2]})


def is_of_model(store: Store, namespace: str, model: str) -> bool:
    """Whether a namespace's identity names the model. False if the identity is missing or damaged.

    Raises:
        StoreError: the identity cannot be read.
    """
    fields = read_identity(store, namespace)
    return fields is not None and fields["model_name"] == model


def may_be_of_model(namespace: str, model: str) -> bool:
    """Whether a namespace's name fits the model. Names of models that differ may fit: a/b_c and a_b/c."""
    return namespace.rpartition("_")[0] == model.replace("/", "_")


def blocks_of(store: Store, namespace: str) -> Iterator[KeyInfo]:
    """The blocks of one namespace, of all ranks.

    Raises:
        StoreError: the storage cannot be listed.
    """
    for info, name in list_blocks(store, f"{namespace}_r"):
        if name.namespace == namespace:  # another namespace's name may begin like this one's
            yield info


@dataclass(slots=True)
class NamespaceRemoval:
    """Removes the blocks of one namespace and then the files that identify it. Nothing else is touched.

    An engine may write to the namespace meanwhile. Blocks that appear during the removal stay, with the files that
    identify them.

    Attributes:
        removed: the blocks that are gone.
        failed: the blocks that could not be removed.
        written: blocks that were written during the removal.
        error: why a block could not be removed; "": all were removed.
    """

    store: Store
    namespace: str
    removed: Share = field(default_factory=Share)
    failed: int = 0
    written: int = 0
    error: str = ""

    def run(self, on_progress: Callable[[Share], None] = lambda _: None) -> None:
        """Remove the namespace.

        Args:
            on_progress: called after each batch with the blocks that are gone.

        Raises:
            StoreError: the storage cannot be listed. What was removed stays removed.
        """
        blocks = blocks_of(self.store, self.namespace)
        while batch := list(islice(blocks, DELETE_BATCH_KEYS)):
            for info, error in zip(batch, self.store.delete_many([info.key for info in batch]), strict=True):
                if error is None:
                    self.removed.add(info.size)
                else:
                    self.failed += 1
                    self.error = str(error)
            on_progress(self.removed)
        self.written = max(0, sum(1 for _ in blocks_of(self.store, self.namespace)) - self.failed)
        if not self.written and not self.failed:
            self._remove_identity()

    def _remove_identity(self) -> None:
        if not self.removed.blocks and read_identity(self.store, self.namespace) is None:
            return  # a foreign folder may have such a name, and a config.json
        try:
            self.store.delete(f"{self.namespace}/{CONFIG_FILE_NAME}")
        except StoreError as e:
            self.failed += 1
            self.error = str(e)
