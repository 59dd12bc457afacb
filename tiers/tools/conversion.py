"""Converter: finds a block's name and seal in the other format, from ``sealed-1`` to ``vllm-raw`` or back.

The payload is the same in both formats. The namespace's folder differs, because vLLM's digest leaves fields out. The
fingerprint in the seal differs, because it covers the field ``format``.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, cast

from ..blocks.file_mapper import (
    CONFIG_FILE_NAME,
    FORMAT_SEALED,
    FORMAT_VLLM_RAW,
    fingerprint_of,
    identity_file_name,
    namespace_of,
)
from ..blocks.seal import NO_TRAILER, TRAILER_BYTES, Seal, fingerprint_in
from ..errors import BlobNotFoundError, StoreConfigError
from ..store import KeyInfo, Store, SupportsTail
from .block_reader import read_identities
from .inventory import BlockName


class Conversion(NamedTuple):
    """A block's name and seal in the target.

    Attributes:
        name: the block's name in the target.
        seal: makes the block's trailer in the target.
        fingerprint: expected in the source's trailer; another engine may replace the block before it is copied.
    """

    name: BlockName
    seal: Seal
    fingerprint: bytes


class Converter:
    """Finds the target's name and seal for the source's blocks. For one thread.

    Args:
        to_format: the target's format, ``sealed-1`` or ``vllm-raw``; the source has the other.
        takes_unverified: attribute blocks without a seal to the one kvtiers engine that uses their folder.
        dry_run: only read the target; a namespace missing there counts as created.
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
        """Find a block's name and seal in the target; None if the block's writer is unknown.

        Raises:
            BlobNotFoundError: the block was removed since it was listed.
            StoreConfigError: the target lacks the folder that an engine must have created.
            StoreError: a storage call failed.
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
        """The fields of the engine that wrote a block, and the fingerprint in its trailer."""
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
                self._target.put(name, [memoryview(content)])  # an existing file is kept
            elif self._target.size(name) is None:
                return namespace, fingerprint
        else:
            namespace = self._find_folder(fields, fingerprint)
        if fingerprint not in read_identities(self._target, namespace):
            raise StoreConfigError(f"the target's {namespace} is damaged or belongs to another namespace")
        return namespace, fingerprint

    def _find_folder(self, fields: dict[str, Any], fingerprint: bytes) -> str:
        model = fields["model_name"].replace("/", "_")
        for prefix in (f"{model}_", ""):  # "": for a model in a bucket, vLLM's folder has another name
            for info in self._target.keys(prefix):
                namespace, _, _ = info.key.partition("/")
                if info.key == identity_file_name(namespace, fingerprint):
                    return namespace
        raise StoreConfigError(
            f"the target has no folder for {fields['model_name']} with the source engine's options. vLLM chooses its "
            f"name: start that engine once with format: {FORMAT_VLLM_RAW} on this root"
        )
