"""FileMapper: maps a block to its path, which names the block's namespace, rank, group and hash. Does no I/O.

The layout is the same for every tier::

    <root_dir>/<model>_<digest12>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin
    <root_dir>/<model>_<digest12>/config.json

``digest12`` is the first 12 hex digits of the SHA-256 of the namespace's fields as canonical JSON. Each block's seal
holds all 32 bytes, because a short digest in a folder name does not prove identity. The rank is not in the digest, so
all ranks share one ``config.json``. ``hhh`` and ``hh``, the first five hex digits of the block hash, give 4,096 x 256
folders: about one block per folder at a million blocks, ten at ten million.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from ..errors import ConfigError
from .keys import (
    GROUP_INDEX_MAX,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

DIGEST_HEX_DIGITS = 12
CONFIG_FILE_NAME = "config.json"
FORMAT_SEALED = "sealed-1"
# A folder's name is "<model>_<12 digits>_r<rank>", and file systems allow 255 bytes.
MODEL_NAME_BYTES_MAX = 200

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: Pattern of a namespace's name: a single folder, because a namespace in a subfolder belongs to another root.
NAMESPACE = rf"[^/]+_[0-9a-f]{{{DIGEST_HEX_DIGITS}}}"
_NAME = re.compile(rf"({NAMESPACE})_r([0-9]+)/([0-9a-f]{{3}})/([0-9a-f]{{2}})_g([0-9]+)/(\3\4[0-9a-f]{{0,123}})\.bin")
_SIZES = ("hash_block_size", "gpu_blocks_per_file", "tp_size", "pp_size", "pcp_size", "dcp_size")
_OWN_FIELDS = frozenset({"model_name", *_SIZES, "dtype", "kv_cache_groups", "inference_engine"})


class FileMapper:
    """Maps OffloadKeys to file names within one namespace.

    Args:
        root_dir: folder or key prefix; "" for names without a prefix.
        model_name: hub id or path; "/" becomes "_" in the folder's name.
        hash_block_size: tokens that one block hash covers.
        gpu_blocks_per_file: GPU blocks in one offloaded block.
        tp_size: tensor parallel size.
        pp_size: pipeline parallel size.
        pcp_size: prefill-context parallel size.
        dcp_size: decode-context parallel size.
        rank: this process's rank; part of the path, not of the digest.
        dtype: data type of the KV cache.
        kv_cache_groups: for each group ``{"block_size": n, "layer_names": [...]}``.
        inference_engine: the engine that defines the layout of the bytes.
        parallel_agnostic: sets the four sizes to 1 and the rank to 0. Correct only if the bytes of a block do not
            depend on the parallel layout.
        extra_fields: more identity fields, merged into the others; see ``strict_fields``.

    Raises:
        ConfigError: a field cannot be part of a path, or is not a valid size.
    """

    def __init__(
        self,
        root_dir: str,
        model_name: str,
        hash_block_size: int,
        gpu_blocks_per_file: int,
        tp_size: int,
        pp_size: int,
        pcp_size: int,
        dcp_size: int,
        rank: int,
        dtype: str,
        kv_cache_groups: Sequence[Mapping[str, Any]] | None = None,
        inference_engine: str = "vllm",
        parallel_agnostic: bool = False,
        extra_fields: Mapping[str, Any] | None = None,
    ) -> None:
        if parallel_agnostic:
            tp_size = pp_size = pcp_size = dcp_size = 1
            rank = 0
        self._fields: dict[str, Any] = {
            "model_name": model_name,
            "hash_block_size": hash_block_size,
            "gpu_blocks_per_file": gpu_blocks_per_file,
            "tp_size": tp_size,
            "pp_size": pp_size,
            "pcp_size": pcp_size,
            "dcp_size": dcp_size,
            "dtype": str(dtype),
            "kv_cache_groups": [dict(group) for group in kv_cache_groups or ()],
            "inference_engine": inference_engine,
        }
        for name, value in (extra_fields or {}).items():
            if name in self._fields:
                raise ConfigError(f"{name!r} is one of the ten fields; choose another name", field="extra_fields")
            self._fields[name] = value
        _check_fields(self._fields, rank)
        self.rank = rank
        self.fingerprint: bytes = fingerprint_of(self._fields)
        """SHA-256 of the canonical fields; goes into every block's seal."""
        self._base = namespace_of(self._fields)
        self.root_dir = root_dir
        self.name_prefix = f"{self._base}_r{rank}"
        """First folder of every block's name."""

    @property
    def block_tokens(self) -> str:
        """The tokens of a stored block, as text: "256", or "16 or 32" if the KV groups differ."""
        fields = self._fields
        sizes = {int(group["block_size"]) for group in fields["kv_cache_groups"]} or {fields["hash_block_size"]}
        return " or ".join(f"{size * fields['gpu_blocks_per_file']:,}" for size in sorted(sizes))

    @classmethod
    def from_offloading_spec(
        cls,
        root_dir: str,
        offloading_spec: Any,
        parallel_agnostic: bool = False,
        extra_fields: Mapping[str, Any] | None = None,
    ) -> Self:
        """Create a mapper from an engine's spec.

        Args:
            parallel_agnostic: takes effect only if the spec says that its bytes do not depend on the parallel layout.
        """
        config = offloading_spec.config
        agnostic = getattr(getattr(config, "parallel", None), "is_parallelism_agnostic", False) or getattr(
            config, "replicated_layout", False
        )
        parallel_agnostic = bool(parallel_agnostic and agnostic)
        fields = _fields_of(offloading_spec)
        return cls(root_dir, **fields, parallel_agnostic=parallel_agnostic, extra_fields=extra_fields)

    def to_json(self) -> dict[str, Any]:
        """The fields for a child process to create an equal mapper."""
        return {"root_dir": self.root_dir, "rank": self.rank, "fields": self.get_run_config()}

    @classmethod
    def from_json(cls, parts: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``."""
        own = {name: value for name, value in parts["fields"].items() if name in _OWN_FIELDS}
        extra = {name: value for name, value in parts["fields"].items() if name not in _OWN_FIELDS}
        return cls(parts["root_dir"], rank=parts["rank"], **own, extra_fields=extra)

    def relative_name(self, key: OffloadKey) -> str:
        """The block's name without ``root_dir``: its key in a Store whose root is ``root_dir``."""
        return block_name(self.name_prefix, key)

    def key_of(self, name: str) -> OffloadKey | None:
        """The block with this ``relative_name``; None if the name is not a block's in this namespace and rank."""
        found = parse_block_name(name) if name.startswith(self.block_prefix) else None
        if found is None or len(found.digits) % 2:
            return None
        key = found.offload_key
        return key if self.relative_name(key) == name else None

    @property
    def block_prefix(self) -> str:
        """Prefix of every block's ``relative_name``."""
        return f"{self.name_prefix}/"

    def get_file_name(self, key: OffloadKey) -> str:
        """The block's full name: ``<base>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin``."""
        return self.rooted(self.relative_name(key))

    @property
    def base_path(self) -> str:
        """``<root_dir>/<model>_<digest12>``, without the rank."""
        return self.rooted(self._base)

    @property
    def relative_config_name(self) -> str:
        """Name of the namespace's ``config.json`` without ``root_dir``."""
        return f"{self._base}/{CONFIG_FILE_NAME}"

    def get_config_file_path(self) -> str:
        """``<base>/config.json``."""
        return self.rooted(self.relative_config_name)

    def get_run_config(self) -> dict[str, Any]:
        """A copy of the fields."""
        copy: dict[str, Any] = json.loads(json.dumps(self._fields))
        return copy

    def rooted(self, name: str) -> str:
        """Prepend ``root_dir`` to a name."""
        return f"{self.root_dir}/{name}" if self.root_dir else name


def fingerprint_of(fields: Mapping[str, Any]) -> bytes:
    """SHA-256 of a namespace's fields as canonical JSON, 32 bytes."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).digest()


def namespace_of(fields: Mapping[str, Any]) -> str:
    """A namespace's folder, ``<model>_<digest12>``."""
    return f"{fields['model_name'].replace('/', '_')}_{fingerprint_of(fields).hex()[:DIGEST_HEX_DIGITS]}"


def block_name(name_prefix: str, key: OffloadKey) -> str:
    """A block's name without ``root_dir``. ``name_prefix``: see ``FileMapper.name_prefix``."""
    digits = get_offload_block_hash(key).hex()
    return f"{name_prefix}/{digits[:3]}/{digits[3:5]}_g{get_offload_group_idx(key)}/{digits}.bin"


class BlockName(NamedTuple):
    """The parts of a block's name, as FileMapper writes it.

    Attributes:
        namespace: ``<model>_<digest12>``.
        digits: the block hash in hexadecimal.
    """

    namespace: str
    rank: int
    group: int
    digits: str

    @property
    def offload_key(self) -> OffloadKey:
        """The block's key. Raises ValueError if ``digits`` has an odd number of digits."""
        return make_offload_key(bytes.fromhex(self.digits), self.group)

    @property
    def path(self) -> str:
        """The complete name."""
        return block_name(f"{self.namespace}_r{self.rank}", self.offload_key)


def parse_block_name(key: str) -> BlockName | None:
    """Parse a block's name; None if the name is not a block's."""
    found = _NAME.fullmatch(key)
    if found is None:
        return None
    namespace, rank_digits, group_digits, digits = found.group(1, 2, 5, 6)
    rank, group = int(rank_digits), int(group_digits)
    if rank > GROUP_INDEX_MAX or group > GROUP_INDEX_MAX:  # a seal has 32 bits for each
        return None
    return BlockName(namespace, rank, group, digits)


def strict_fields(offloading_spec: Any) -> dict[str, Any]:
    """Identity fields besides the ten of ``FileMapper``. Leaving them out led to wrong tokens in other systems.

    Blocks with the same path and size but a different meaning were reported for other weight revisions, KV layouts and
    hash algorithms (vllm#49261, #55904, #55191), so each of these gets its own namespace. So does each platform whose
    kernels pack KV in their own order.
    """
    config = getattr(offloading_spec, "config", None)
    engine = getattr(config, "engine", None)
    return {
        # For people who compare two namespaces. model_revision already contains a digest of these options.
        **({"engine": dict(engine)} if engine else {}),
        # A rank's own bytes, not a row of all ranks' bytes.
        **({"ranks": "apart"} if getattr(config, "ranks_apart", False) else {}),
        "model_revision": getattr(getattr(config, "model", None), "revision", None),
        "kv_cache_layout": getattr(config, "kv_cache_layout", None),
        "platform": getattr(config, "platform", None),
        "canonical_layout": bool(getattr(config, "canonical_layout", False)),
        "hash_algorithm": getattr(getattr(config, "cache", None), "hash_algorithm", None),
        "format": FORMAT_SEALED,
    }


def _fields_of(spec: Any) -> dict[str, Any]:
    config = spec.config
    parallel = getattr(config, "parallel", None)
    chunk = getattr(spec, "blocks_per_chunk", None) or getattr(config.cache, "blocks_per_chunk", 1)
    return {
        "model_name": config.model.name,
        "hash_block_size": config.cache.tokens_per_hash,
        "gpu_blocks_per_file": chunk,
        **{name: getattr(parallel, name, 1) for name in ("tp_size", "pp_size", "pcp_size", "dcp_size")},
        "rank": getattr(parallel, "rank", 0),
        "dtype": str(config.model.dtype).removeprefix("torch."),
        **({"inference_engine": engine} if (engine := getattr(config, "inference_engine", None)) else {}),
        "kv_cache_groups": [
            {"block_size": group.tokens_per_block, "layer_names": list(group.layer_names)}
            for group in getattr(config, "groups", ())
        ],
    }


def _check_fields(fields: Mapping[str, Any], rank: int) -> None:
    name = fields["model_name"]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{name!r} is not a model name; accepted is a non-empty string", field="model_name")
    if _CONTROL.search(name) or "\\" in name or name.startswith("."):
        raise ConfigError(
            f"{name!r} cannot be a folder name; accepted are names without control characters or backslash that "
            'do not start with "."',
            field="model_name",
        )
    try:
        length_bytes = len(name.encode())
    except UnicodeEncodeError as e:
        raise ConfigError(f"{name!r} is not encodable as UTF-8", field="model_name") from e
    if length_bytes > MODEL_NAME_BYTES_MAX:
        raise ConfigError(
            f"{length_bytes} bytes long ({name[:40]!r}…); accepted are {MODEL_NAME_BYTES_MAX}, because it becomes part "
            "of a folder name",
            field="model_name",
        )
    for size_name in _SIZES:
        size = fields[size_name]
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{size!r}; accepted is a whole number of 1 or more", field=size_name)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ConfigError(f"{rank!r}; accepted is a whole number of 0 or more", field="rank")
    try:
        json.dumps(fields, sort_keys=True)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"cannot be written as JSON ({e})", field="extra_fields or kv_cache_groups") from e
