"""Options of the built-in tiers: one model class per tier type."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_serializer,
)

from ..blocks.keyring import KEY_BYTES, KEY_VARIABLES
from ..capacity.policy import CapacityPolicy
from ..errors import HIDDEN, ConfigError, public_url
from ..stores.s3.options import S3Options
from .values import (
    AbsolutePath,
    DurationIn,
    ExpandedPath,
    Folder,
    Size,
    SizeIn,
    absolute,
    matching,
)
from .variables import AS_WRITTEN, escape, expand

MAX_BYTES_MIN = 1 << 20
REQUEST_SHARE = 2 / 3  # share of job_deadline_s for an S3 request with its retries; a job has other work
CONNECTIONS_MAX = 1024  # limit of a client to S3; each connection takes a descriptor
ISOLATION = (
    "process: I/O runs in processes, which are killed when they hang. thread: I/O runs in the engine's threads; "
    "on nfs this needs a mount that times out (soft, softerr). auto: process if other processes can map the region."
)
LOOKUP_DEADLINE = "Lookups are misses if the storage answers none of them for this long."
_PROTOCOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]*://", re.ASCII)
_KEY = re.compile(rf"(0x)?[0-9A-Fa-f]{{{2 * KEY_BYTES}}}")
POLL_S, REMOTE_POLL_S = 0.25, 5.0  # how often writers publish their counts, and the collector reads them
LIST_EVERY_S, REMOTE_LIST_EVERY_S = 600.0, 3600.0  # how long after a listing the next one begins


def _reject_key(value: object) -> object:
    words = re.split(r"[\s,]+", value) if isinstance(value, str) else ()  # whole words: a path may contain a digest
    if any(_KEY.fullmatch(word) for word in words):
        raise ValueError("is a key itself; write the file or the variable that holds the keys")
    return value


Isolation = Literal["auto", "thread", "process"]
Load = Literal["auto", "always", "never"]
Threads = Annotated[int, Field(ge=1, le=256)]
Seconds = Annotated[float, DurationIn(0, 86_400, above=True)]


def default_threads() -> int:
    """Default number of read threads, and of write threads, for a fast medium.

    Copying keeps a core busy, and idle threads of one kind take tasks of the other kind. So both kinds together match
    the number of cores. More than 4 threads of a kind would only wait for the GIL between two system calls.
    """
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


class Model(BaseModel):
    """Base of the config models: frozen, unknown keys rejected.

    ``dict(model)`` and dumps are data that parses to the same model: dollars in texts are doubled. Dumps and reprs hide
    values that may be secret; ``dict(model)`` has them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def _expand_and_reject_wrong_type(
        cls, value: object, validate: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        if isinstance(value, bytes):
            raise ValueError("is not text")  # YAML's !!binary
        accepted: object = validate(value if info.field_name in AS_WRITTEN else expand(value))
        if isinstance(value, bool) and not isinstance(accepted, bool):
            raise ValueError("is not a number")  # YAML's yes, on and true, which pydantic converts to 1
        return accepted

    @model_serializer(mode="wrap")
    def _dump_to_parse_again(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _as_written(dump(self).items())

    def __iter__(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return iter(_as_written(super().__iter__()).items())

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return self.model_dump().items()


def _as_written(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value if name in AS_WRITTEN else escape(value) for name, value in fields}


class TierConfig(Model):
    """Options of every built-in tier.

    Attributes:
        absent_ttl_s: how long the answer "absent" to a lookup is cached. Short, because another replica may store the
            block. Longer for storage with more expensive lookups.
    """

    absent_ttl_s: ClassVar[float] = 1.0
    type: str = Field(description="Tier type.")
    name: Annotated[str, matching(r"^[A-Za-z0-9._-]{1,64}$", "1 to 64 letters, digits, '.', '_' and '-'")] | None = (
        Field(None, description="Name in metrics and logs. Default: the type, with a number if it occurs twice.")
    )
    n_read_threads: Threads = Field(
        default_factory=default_threads,
        description="Threads that prefer loads. On s3 and fsspec: concurrent requests, at most 8 with "
        "`isolation: thread`.",
    )
    n_write_threads: Threads = Field(
        default_factory=default_threads, description="Threads that prefer stores. Limits as for n_read_threads."
    )
    children: Annotated[int, Field(ge=1, le=64)] = Field(
        2, description="Processes for the tier's I/O. More than two help only with many cores."
    )
    load: Load = Field(
        "auto",
        description="auto: load blocks while that is faster than computing them. always: load every block. never: "
        "only store.",
    )
    lookup_deadline_s: Seconds = Field(0.2, description=LOOKUP_DEADLINE)
    job_deadline_s: Seconds = Field(
        10.0,
        description="A block's transfer must begin within this time, or it fails. A task that takes longer cuts the "
        "tier off. A request to S3 may take two thirds of it.",
    )
    isolation: Isolation = Field("auto", description=ISOLATION)
    parallel_agnostic: bool = Field(
        False, description="Share blocks between parallel layouts, if the engine allows it."
    )

    encrypt: Literal["none", "aes-gcm"] = Field(
        "none",
        description="aes-gcm: encrypt and authenticate blocks with AES-256-GCM.",
    )
    keys_file: (
        Annotated[ExpandedPath, BeforeValidator(_reject_key), AfterValidator(_reject_key), AfterValidator(absolute)]
        | None
    ) = Field(
        None,
        description="File with the keys, 64 hex digits each, mode 0600. New blocks use the first key.",
    )
    keys_env: (
        Annotated[
            str,
            BeforeValidator(_reject_key),
            matching(r"^[A-Za-z_][A-Za-z0-9_]{0,127}$", "a variable's name, without a dollar"),
        ]
        | None
    ) = Field(None, description="Environment variable with the keys, in place of keys_file.")

    def check(self) -> None:
        """Check options that depend on each other.

        Raises:
            ConfigError: names the field.
        """
        given = [name for name in ("keys_file", "keys_env") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError("is mutually exclusive with keys_file", field="keys_env")
        if given and self.encrypt == "none":
            raise ConfigError("has no effect without encrypt: aes-gcm", field=given[0])
        if self.keys_env is not None:
            KEY_VARIABLES.add(self.keys_env)
        if not given and self.encrypt != "none":
            raise ConfigError(f"{self.encrypt} needs keys; give keys_file or keys_env", field="encrypt")


class BoundedTierConfig(TierConfig):
    """Options of tiers whose storage outlives the engine."""

    read_only: bool = Field(
        False,
        description="Only load: write nothing and remove nothing. Limits are ignored.",
    )
    max_bytes: Size | None = Field(
        None,
        description="Limit of all writers of a root together; give each the same value. Shortly before the limit, "
        "blocks are removed. null: no limit.",
    )
    ttl: Annotated[float, DurationIn(1)] | None = Field(
        None,
        description="Remove blocks not used for this long (s3, fsspec: written this long ago). null: never.",
    )

    def check(self) -> None:
        super().check()
        if self.max_bytes is not None and self.max_bytes < MAX_BYTES_MIN:
            raise ConfigError(
                f"{self.max_bytes} bytes do not hold a block; write at least {MAX_BYTES_MIN >> 20}MiB, or null for no "
                "limit",
                field="max_bytes",
            )

    def capacity_policy(self) -> CapacityPolicy | None:
        """Return the limits for the collector; None: no limit is set, or the tier is read-only.

        A disk is a limit by itself, even with ``min_free: 0``: without a collector, a full disk would stay full.
        """
        min_free = getattr(self, "min_free", None)
        if self.read_only or (self.max_bytes is None and self.ttl is None and min_free is None):
            return None
        every_s = LIST_EVERY_S if self.type in ("fs", "nfs") else REMOTE_LIST_EVERY_S
        return CapacityPolicy(
            max_bytes=self.max_bytes,
            ttl_s=self.ttl,
            min_free_bytes=min_free or 0,
            every_s=min(every_s, self.ttl or every_s),
            poll_s=POLL_S if self.type == "fs" else REMOTE_POLL_S,
        )


class FsTierConfig(BoundedTierConfig):
    """Blocks as files under a local folder."""

    type: Literal["fs"] = "fs"
    root_dir: Folder = Field(description="Folder for the blocks; created if missing.")
    min_free: Size = Field(
        1 << 30,
        description="Free space to leave on the file system. Below it, stores are dropped until the collector has made "
        "room.",
    )


class NfsTierConfig(BoundedTierConfig):
    """Blocks as files on an NFS mount. All hosts need the same UID. Not tested on CephFS and Lustre."""

    # Without the mount option lookupcache=pos, the NFS client itself caches "absent" for about 30 s.
    absent_ttl_s: ClassVar[float] = 5.0
    type: Literal["nfs"] = "nfs"
    root_dir: Folder = Field(description="Folder on the mount; created if missing.")
    min_free: Size = Field(1 << 30, description="Free space to leave on the file system, as for fs.")
    lookup_deadline_s: Seconds = Field(0.5, description=LOOKUP_DEADLINE)


class MemoryTierConfig(TierConfig):
    """Blocks in the engine process's own memory, for tests and experiments."""

    type: Literal["memory"] = "memory"
    isolation: Isolation = Field("thread", description=ISOLATION)
    max_bytes: Annotated[int, SizeIn(1)] | None = Field(
        None, description="Maximum size. The least recently used blocks are removed."
    )


class NetworkTierConfig(BoundedTierConfig):
    """Options of tiers that mostly wait for a network, and therefore use many threads and long batches."""

    absent_ttl_s: ClassVar[float] = 5.0
    n_read_threads: Threads = Field(32, description="Concurrent load requests, at most 8 in the engine's process.")
    n_write_threads: Threads = Field(32, description="Concurrent store requests, at most 8 in the engine's process.")


def _reject_bucket_url(value: object) -> object:
    url = re.fullmatch(r"s3a?://([^/@?]+)/?([^@?]*)", value) if isinstance(value, str) else None
    if url is not None:
        prefix = f" and prefix: {url[2].rstrip('/')}" if url[2] else ""
        raise ValueError(f"is a URL; write bucket: {url[1]}{prefix}")
    return value


class S3TierConfig(NetworkTierConfig):
    """Blocks as objects in an S3 bucket. Credentials come from boto3's credential chain, never from this file."""

    type: Literal["s3"] = "s3"
    job_deadline_s: Seconds = Field(
        15.0, description="As for every tier. A request with its retries may take two thirds of it."
    )
    lookup_deadline_s: Seconds = Field(2.0, description=LOOKUP_DEADLINE)
    bucket: Annotated[str, BeforeValidator(_reject_bucket_url)] = Field(
        json_schema_extra={"x-accepted": "a bucket's name"},
        description="The bucket, which must exist.",
    )
    prefix: str = Field("", description="Folder inside the bucket.")
    endpoint_url: str | None = Field(
        None,
        description="Endpoint of an S3 other than AWS, such as https://minio:9000. https://BUCKET.HOST: for a "
        "server that wants the bucket in its host name (Alibaba OSS, Tencent COS). https://BUCKET.HOST/BUCKET: for a "
        "server whose own host name begins with the bucket's name.",
    )
    region: str | None = Field(None, description="Region. Default: as boto3 finds it, or us-east-1.")
    profile: str | None = Field(None, description="Profile in ~/.aws/config.")
    ca_bundle: AbsolutePath | None = Field(
        None, description="PEM file of CA certificates to trust as well. Default: $AWS_CA_BUNDLE."
    )
    allow_insecure: bool = Field(False, description="Allow http:// to other hosts.")
    sse: Annotated[str, Field(json_schema_extra={"x-accepted": "AES256, aws:kms, or a KMS key's ARN or id"})] | None = (
        Field(None, description="Server-side encryption of new blocks.")
    )
    storage_class: str | None = Field(None, description="Storage class of new blocks.")

    def store_options(self) -> S3Options:
        """The options of the store.

        Raises:
            ConfigError: a value is invalid.
        """
        own = {option.name: getattr(self, option.name) for option in fields(S3Options) if hasattr(self, option.name)}
        return S3Options(
            **own,
            request_timeout_s=REQUEST_SHARE * self.job_deadline_s,
            max_connections=min(CONNECTIONS_MAX, self.n_read_threads + self.n_write_threads + 64),
        )

    def check(self) -> None:
        super().check()
        self.store_options()


def _check_url(url: str, info: ValidationInfo) -> str:
    """Refuse text that is not a URL, and make the path of a local URL absolute.

    fsspec would treat both as paths in the working directory of its process.
    """
    *outer, last = url.split("::")  # every part of a chain but the last may be only a protocol
    if not all(_PROTOCOL.match(link if "://" in link else f"{link}://") for link in outer) or not _PROTOCOL.match(last):
        path = "file:///folder, or type: fs with a root_dir, for a folder on this machine"
        raise ValueError(f"is not a URL; write protocol://bucket/folder, or {path}")
    scheme, _, path = last.partition("://")
    if outer or scheme not in ("file", "local") or os.path.isabs(path) or path.startswith("~"):
        return url
    return f"{scheme}://{absolute(path, info)}"


class FsspecTierConfig(NetworkTierConfig):
    """Blocks under any fsspec URL, such as gs://, abfs:// or hf://."""

    type: Literal["fsspec"] = "fsspec"
    isolation: Isolation = Field("thread", description=ISOLATION)
    lookup_deadline_s: Seconds = Field(
        1.0,
        description=f"{LOOKUP_DEADLINE} Drivers that are not asynchronous (sftp, webdav) need more beyond 10 ms.",
    )
    url: Annotated[ExpandedPath, AfterValidator(_check_url)] = Field(
        json_schema_extra={"x-accepted": "a URL"},
        description="Location, such as gs://bucket/folder. Drivers that are not asynchronous (sftp, webdav) need a "
        "longer lookup_deadline_s if the storage is more than 10 ms away.",
    )
    storage_options: dict[str, Any] = Field(default_factory=dict, description="Options of the fsspec file system.")

    @field_serializer("url")
    def _hide_login(self, url: str) -> str:
        return public_url(url)

    @field_serializer("storage_options")
    def _hide_values(self, options: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(options, HIDDEN)


class StoreTierConfig(BoundedTierConfig):
    """Blocks in a store of your own."""

    type: Literal["store"] = "store"
    module_path: Annotated[str, matching(r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$", "a module, or module:function")] = Field(
        description="Module with `make_store(options)`, or `module:function`. A store that a package registers "
        "(entry point group `kvtiers.stores`) is a `type` of its own."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options for the function.")

    @field_serializer("options")
    def _hide_values(self, options: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(options, HIDDEN)


class ExternalTierConfig(BaseModel):
    """A tier of your own. Its options are not validated, and not shown in logs."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    type: str
    module_path: str | None = Field(None, description="Module with a class that is named as in `type`.")

    @model_serializer
    def _hide_options(self) -> dict[str, Any]:
        return {"type": self.type, "module_path": self.module_path, **dict.fromkeys(self.model_extra or {}, HIDDEN)}

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return self.model_dump().items()


def shown_place(tier: TierConfig) -> str:
    """Where a tier stores its blocks, for logs and commands: without a URL's login."""
    options: dict[str, Any] = tier.model_dump()
    if "bucket" in options:
        return f"s3://{options['bucket']}/{options['prefix']}".rstrip("/")
    places = ("root_dir", "url", "module_path")
    return next((str(options[name]) for name in places if name in options), "this process's memory")


TIER_MODELS: dict[str, type[TierConfig]] = {
    "fs": FsTierConfig,
    "fsspec": FsspecTierConfig,
    "memory": MemoryTierConfig,
    "nfs": NfsTierConfig,
    "s3": S3TierConfig,
    "store": StoreTierConfig,
}

AnyTierConfig = TierConfig | ExternalTierConfig
