"""Converter: a block of ``sealed-1`` under its name and seal of ``vllm-raw``, or the other way about.

The payload is the same. The two formats differ in the namespace's folder, because vLLM's digest leaves fields out, and
in the field ``format``, so that a block's seal says another fingerprint.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, cast

from kvtiers.tiers.blocks.file_mapper import (
    CONFIG_FILE_NAME,
    FORMAT_SEALED,
    FORMAT_VLLM_RAW,
    fingerprint_of,
    identity_file_name,
    namespace_of,
)
from kvtiers.tiers.blocks.seal import NO_TRAILER, TRAILER_BYTES, Seal, fingerprint_in
from kvtiers.tiers.errors import BlobNotFoundError, StoreConfigError
from kvtiers.tiers.store import KeyInfo, Store, SupportsTail
from kvtiers.tiers.tools.block_reader import read_identities
from kvtiers.tiers.tools.inventory import BlockName


class Conversion(NamedTuple):
    """What becomes of a block.

    Attributes:
        name: in the target.
        seal: makes its trailer there.
        fingerprint: in its trailer when it was looked at; another engine may put a block of its own there.
    """

    name: BlockName
    seal: Seal
    fingerprint: bytes


class Converter:
    """Finds the target's name and seal for the source's blocks. For one thread.

    Args:
        to_format: the target's, ``sealed-1`` or ``vllm-raw``; the source has the other one.
        takes_unverified: blocks that vLLM's own tier wrote are those of the one engine of ours that uses their folder.
        dry_run: the target is only read; a namespace that it lacks would be made.
    """

    def __init__(
        self, source: Store, target: Store, to_format: str, *, takes_unverified: bool = False, dry_run: bool = False
    ) -> None:
        self._source = source
        self._target = target
        self._to_format = to_format
        self._takes_unverified = takes_unverified
        self._dry_run = dry_run
        self._identities: dict[str, dict[bytes, dict[str, Any]]] = {}
        self._targets: dict[bytes, tuple[str, bytes]] = {}

    def convert(self, info: KeyInfo, name: BlockName) -> Conversion | None:
        """None where nothing says whose the block is.

        Raises:
            BlobNotFoundError: it was removed since it was listed.
            StoreConfigError: the target lacks the folder that an engine must have made.
            StoreError: the storage cannot be asked.
        """
        found = self._identity(info, name) if len(name.digits) % 2 == 0 else None
        if found is None:
            return None
        fields, stored = found
        source = fingerprint_of(fields)
        if source not in self._targets:
            self._targets[source] = self._open_namespace(fields | {"format": self._to_format})
        namespace, fingerprint = self._targets[source]
        shares_folder = self._to_format == FORMAT_VLLM_RAW
        seal = Seal(fingerprint, name.rank, shares_folder=shares_folder)
        return Conversion(name._replace(namespace=namespace), seal, stored)

    def _identity(self, info: KeyInfo, name: BlockName) -> tuple[dict[str, Any], bytes] | None:
        """The fields of who wrote a block, and the fingerprint in its trailer."""
        if name.namespace not in self._identities:
            identities = read_identities(self._source, name.namespace)
            wanted = FORMAT_SEALED if self._to_format == FORMAT_VLLM_RAW else FORMAT_VLLM_RAW
            self._identities[name.namespace] = {
                fingerprint: fields for fingerprint, fields in identities.items() if fields.get("format") == wanted
            }
        identities = self._identities[name.namespace]
        if self._to_format == FORMAT_VLLM_RAW:
            return next(((fields, fingerprint) for fingerprint, fields in identities.items()), None)
        found = cast(SupportsTail, self._source).get_tail(info.key, TRAILER_BYTES)
        if found is None:
            raise BlobNotFoundError("removed since it was listed", key=info.key)
        fingerprint = fingerprint_in(found[1])
        if found[1] == NO_TRAILER and self._takes_unverified and len(identities) == 1:
            return next(iter(identities.values())), fingerprint
        fields = identities.get(fingerprint)
        return None if fields is None else (fields, fingerprint)

    def _open_namespace(self, fields: dict[str, Any]) -> tuple[str, bytes]:
        fingerprint = fingerprint_of(fields)
        if self._to_format == FORMAT_SEALED:
            namespace = namespace_of(fields)
            content = json.dumps(fields, indent=2, sort_keys=True).encode()
            name = f"{namespace}/{CONFIG_FILE_NAME}"
            if not self._dry_run:
                self._target.put(name, [memoryview(content)])  # what is there stays
            elif self._target.size(name) is None:
                return namespace, fingerprint
        else:
            namespace = self._find_folder(fields, fingerprint)
        if fingerprint not in read_identities(self._target, namespace):
            raise StoreConfigError(f"the target's {namespace} is damaged or another namespace's")
        return namespace, fingerprint

    def _find_folder(self, fields: dict[str, Any], fingerprint: bytes) -> str:
        model = fields["model_name"].replace("/", "_")
        for prefix in (f"{model}_", ""):  # a model in a bucket has a name of vLLM's in its folder's
            for info in self._target.keys(prefix):
                namespace, _, _ = info.key.partition("/")
                if info.key == identity_file_name(namespace, fingerprint):
                    return namespace
        raise StoreConfigError(
            f"the target has no folder for {fields['model_name']} as the source's engine ran it; vLLM names it: start "
            f"that engine once with format: {FORMAT_VLLM_RAW} on this root"
        )
