"""The tiers' options as models: one class a built-in tier."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_serializer,
)

from kvtiers.tiers.blocks.file_mapper import FORMAT_SEALED, FORMAT_VLLM_RAW
from kvtiers.tiers.blocks.keyring import KEY_BYTES, KEY_VARIABLES
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.config.values import AbsolutePath, Duration, ExpandedPath, Size
from kvtiers.tiers.errors import HIDDEN, ConfigError, public_url
from kvtiers.tiers.stores.s3.options import TIMEOUT_S_MAX, S3Options

#: Keys of the s3 tier that the store takes as they are.
_S3_SAME_NAMES = (
    "bucket", "prefix", "endpoint_url", "region", "addressing_style", "profile", "role_arn", "ca_bundle", "verify",
    "allow_insecure", "sse", "sse_kms_key_id", "storage_class", "checksum", "retries", "client",
)  # fmt: skip

MAX_BYTES_MIN = 1 << 20
LOOKUP_DEADLINE = "Lookups are misses when the storage answers none of them for so long."
_KEY = re.compile(rf"(0x)?[0-9A-Fa-f]{{{2 * KEY_BYTES}}}")
POLL_S, REMOTE_POLL_S = 0.25, 15.0  # how often a collector looks whether there is something to do


def _no_key(value: object) -> object:
    words = re.split(r"[\s,]+", value) if isinstance(value, str) else ()  # a path may have a digest in it
    if any(_KEY.fullmatch(word) for word in words):
        raise ValueError("is a key itself; keys have no place here, write where they are")
    return value


Threads = Annotated[int, Field(ge=1, le=256)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
RequestSeconds = Annotated[float, Field(gt=0, le=TIMEOUT_S_MAX)]


def default_threads() -> int:
    """Threads of one kind on a fast medium.

    Copying keeps a core busy, and both kinds help each other out, so together they are as many as the cores. More
    than 4 of a kind only queue for the GIL between two system calls.
    """
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


class Model(BaseModel):
    """Frozen, and every key must be known. What may be secret is in ``dict(model)``, not in dumps and reprs."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def _reject_wrong_type(cls, value: object, validate: ValidatorFunctionWrapHandler) -> object:
        if isinstance(value, bytes):
            raise ValueError("is no text")  # YAML's !!binary
        accepted: object = validate(value)
        if isinstance(value, bool) and not isinstance(accepted, bool):
            raise ValueError("is no number")  # YAML's yes, on and true, which pydantic takes for 1
        return accepted

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return self.model_dump().items()


class TierConfig(Model):
    """What every built-in tier takes."""

    type: str = Field(description="Which tier.")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = Field(
        None, description="Label in metrics and logs; by default the type, numbered where a type occurs twice."
    )
    n_read_threads: Threads = Field(default_factory=default_threads, description="Threads that prefer loads.")
    n_write_threads: Threads = Field(default_factory=default_threads, description="Threads that prefer stores.")
    task_bytes: Size = Field(
        64 << 20, ge=1, description="Bytes one pool task moves at most, but a block for each thread that works on it."
    )
    trace: bool = Field(False, description="One OpenTelemetry span for each job (`pip install 'kvtiers[otel]'`).")
    jobs_max: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        1024, description="Jobs in flight; stores beyond it are dropped and counted."
    )
    max_bytes_in_flight: Size = Field(
        8 << 30, ge=1, description="Payload bytes of jobs in flight; stores beyond it are dropped and counted."
    )
    lookup_threads: Threads = Field(2, description="Threads that ask the storage whether blocks are there.")
    lookup_deadline_s: Seconds = Field(0.2, description=LOOKUP_DEADLINE)
    lookup_total_s: Seconds = Field(
        15.0,
        description="How long a request waits for lookups at most while the storage answers; then it uses the prefix "
        "that was found.",
    )
    present_ttl_s: Seconds = Field(60.0, description="How long 'present' is believed.")
    absent_ttl_s: Annotated[float, Field(ge=0, le=86_400)] = Field(1.0, description="How long 'absent' is believed.")
    lookup_cache_keys: Annotated[int, Field(ge=1, le=100_000_000)] = Field(
        262_144, description="Lookup answers kept in memory."
    )
    seal_checksum: Literal["xxh3_64", "xxh3_128"] = Field("xxh3_64", description="Checksum in the seal of new blocks.")
    job_deadline_s: Seconds = Field(
        10.0, description="Blocks of a job that have not begun to move by then fail; a longer task cuts the tier off."
    )
    circuit_failures: Annotated[int, Field(ge=1, le=1000)] = Field(
        3, description="Failures in a row that cut the tier off."
    )
    circuit_probe_s: Seconds = Field(
        5.0, description="How often a tier that is cut off is asked whether it works again."
    )
    shutdown_s: Annotated[float, Field(ge=0, le=60)] = Field(
        4.0, description="How long shutdown waits for running jobs. vLLM kills its engine after 5 s."
    )
    isolation: Literal["auto", "thread", "process"] = Field(
        "thread",
        description="process: I/O in processes, which do not wait for the engine's GIL and are killed when they hang. "
        "auto: process where other processes can map the region.",
    )
    parallel_agnostic: bool = Field(
        False,
        description="Share blocks between parallel layouts, where the engine says that its bytes allow it.",
    )

    auth: Literal["none", "gmac"] = Field(
        "none", description="gmac: only blocks that somebody with a key has written are taken (AES-256-GMAC)."
    )
    encrypt: Literal["none", "aes-gcm"] = Field(
        "none",
        description="aes-gcm: blocks are stored encrypted and authenticated (AES-256-GCM); one more copy a store.",
    )
    keys_file: Annotated[ExpandedPath, BeforeValidator(_no_key), AfterValidator(_no_key)] | None = Field(
        None,
        description="File of keys for auth and encrypt: 64 hex digits each, the first is for new blocks. Mode 0600.",
    )
    keys_env: Annotated[str, BeforeValidator(_no_key), Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")] | None = Field(
        None, description="Environment variable with the keys, instead of keys_file."
    )

    @property
    def protection(self) -> Literal["none", "gmac", "aes-gcm"]:
        """How blocks are protected: encrypted ones are authenticated, too."""
        return self.encrypt if self.encrypt != "none" else self.auth

    @property
    def takes_unverified(self) -> bool:
        """Whether blocks without a seal are loaded."""
        return False

    def check(self) -> None:
        """Look at what single fields cannot show.

        Raises:
            ConfigError: names the field.
        """
        given = [name for name in ("keys_file", "keys_env") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError("is one too many; give either keys_file or keys_env", field="keys_env")
        if given and self.protection == "none":
            raise ConfigError("is of no use without auth: gmac or encrypt: aes-gcm", field=given[0])
        if self.keys_env is not None:
            KEY_VARIABLES.add(self.keys_env)
        if not given and self.protection != "none":
            name = "encrypt" if self.encrypt != "none" else "auth"
            raise ConfigError(f"{getattr(self, name)} needs keys; give keys_file or keys_env", field=name)


class BoundedTierConfig(TierConfig):
    """What every tier takes whose storage outlives the process: who writes there, and how much."""

    read_only: bool = Field(
        False,
        description="Only load: nothing is written there or removed, whatever the limits, which are the writers' "
        "business.",
    )
    max_bytes: Size | None = Field(
        None,
        description="What the storage may hold, all writers together; beyond it stores are dropped until the collector "
        "has made room. Give the same to all writers of one root. null: no limit.",
    )
    ttl: Duration | None = Field(
        None,
        description="Blocks not used for so long are removed, such as 7d or 12h; on s3 and fsspec, not written for so "
        "long. null: never.",
    )
    gc_high: Annotated[float, Field(gt=0, le=1)] = Field(
        0.95, description="Part of max_bytes above which the collector begins."
    )
    gc_low: Annotated[float, Field(gt=0, le=1)] = Field(
        0.85, description="Part of max_bytes that it leaves; the least recently used blocks go."
    )
    gc_every_s: Annotated[float, Field(ge=1, le=30 * 86_400)] = Field(
        600.0, description="How often the collector looks at everything, for ttl and to measure."
    )

    def check(self) -> None:
        super().check()
        if self.gc_low > self.gc_high:
            raise ConfigError(f"{self.gc_low} is above gc_high = {self.gc_high}", field="gc_low")
        if self.max_bytes is not None and self.max_bytes < MAX_BYTES_MIN:
            raise ConfigError(
                f"{self.max_bytes} bytes do not hold a block; write at least {MAX_BYTES_MIN >> 20}MiB, or null for no "
                "limit",
                field="max_bytes",
            )

    def capacity_policy(self) -> CapacityPolicy | None:
        """The limits as the collector takes them; None where there are none, or nothing to be done about them."""
        if self.read_only or (self.max_bytes is None and self.ttl is None):
            return None
        return CapacityPolicy(
            max_bytes=self.max_bytes,
            ttl_s=self.ttl,
            high=self.gc_high,
            low=self.gc_low,
            min_free_bytes=getattr(self, "min_free", 0),
            every_s=self.gc_every_s,
            poll_s=POLL_S if self.type == "fs" else REMOTE_POLL_S,
        )


class FsTierConfig(BoundedTierConfig):
    """Blocks as files under a local folder."""

    type: Literal["fs"] = "fs"
    root_dir: AbsolutePath = Field(
        description="Folder of the blocks; made if absent, unless read_only. ~ and $VARIABLES are expanded."
    )
    min_free: Size = Field(1 << 30, description="Free space the tier leaves on the file system.")
    isolation: Literal["auto", "thread", "process"] = Field(
        "auto", description="process: as fast beside a busy engine as beside an idle one. auto: where it can be."
    )
    durability: Literal["none", "data"] = Field(
        "none", description="data: fsync each block before it is visible (0.6 -> 8 ms at 2 MiB)."
    )
    format: Literal["sealed-1", "vllm-raw"] = Field(
        "sealed-1",
        description="vllm-raw: files that vLLM's own fs tier can share, in its folders, their seals in an extended "
        "attribute; only with KVTiersTier.",
    )
    unverified: Literal["deny", "allow"] = Field(
        "deny",
        description="allow: with format: vllm-raw also load what vLLM's own tier wrote, which nothing proves.",
    )

    @property
    def takes_unverified(self) -> bool:
        return self.unverified == "allow"

    def check(self) -> None:
        super().check()
        if self.format == FORMAT_SEALED and self.takes_unverified:
            raise ConfigError(f"is of no use with format: {FORMAT_SEALED}, whose blocks have seals", field="unverified")
        if self.format == FORMAT_VLLM_RAW and self.encrypt != "none":
            raise ConfigError(
                f"vLLM's own tier cannot read such blocks; leave out format: {self.format}", field="encrypt"
            )
        if self.takes_unverified and self.auth != "none":
            raise ConfigError("allow would let anybody's blocks in; leave it out with auth: gmac", field="unverified")


class NfsTierConfig(BoundedTierConfig):
    """Blocks as files on an NFS mount that several hosts share, all with one uid. CephFS and Lustre were not tried."""

    type: Literal["nfs"] = "nfs"
    root_dir: AbsolutePath = Field(
        description="Folder on the mount; made if absent, unless read_only. ~ and $VARIABLES are expanded."
    )
    min_free: Size = Field(1 << 30, description="Free space the tier leaves on the file system.")
    isolation: Literal["auto", "thread", "process"] = Field(
        "process", description="thread: only where the mount gives up by itself (soft, softerr)."
    )
    lookup_deadline_s: Seconds = Field(0.5, description=LOOKUP_DEADLINE)
    absent_ttl_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        5.0, description="How long 'absent' is believed; a client remembers it for about 30 s without lookupcache=pos."
    )


class MemoryTierConfig(TierConfig):
    """Blocks in this process's memory: for tests and for trying things out."""

    type: Literal["memory"] = "memory"
    max_bytes: Annotated[Size, Field(ge=1)] | None = Field(
        None, description="Beyond it the least recently used blocks leave."
    )

    def check(self) -> None:
        super().check()
        if self.isolation != "thread":
            raise ConfigError(
                f"{self.isolation} would give each process a memory of its own; leave it out", field="isolation"
            )


class NetworkTierConfig(BoundedTierConfig):
    """What every tier takes whose blocks mostly wait for a network: threads are many then, and a batch takes long."""

    n_read_threads: Threads = Field(8, description="Requests of loads under way at once, at first.")
    n_write_threads: Threads = Field(8, description="Requests of stores under way at once, at first.")
    n_threads_max: Threads = Field(
        64, description="Up to so many of each, where the storage is far and more of them bring more."
    )
    worker_memory: Annotated[Size, Field(ge=64 << 20)] = Field(
        512 << 20,
        description="Memory that a worker process may take beside what its blocks and cores need. A worker that takes "
        "more, because a server's answer has no end, is ended and replaced.",
    )
    absent_ttl_s: Annotated[float, Field(ge=0, le=86_400)] = Field(5.0, description="How long 'absent' is believed.")
    gc_every_s: Annotated[float, Field(ge=1, le=30 * 86_400)] = Field(
        3600.0, description="How often the collector lists everything, for ttl and to measure."
    )


class S3TierConfig(NetworkTierConfig):
    """Blocks as objects in a bucket of any S3. Credentials come from boto3's chain, never from here."""

    type: Literal["s3"] = "s3"
    isolation: Literal["auto", "thread", "process"] = Field(
        "auto",
        description="process: as fast beside a busy engine as beside an idle one. auto: where it can be. In threads of "
        "the engine's process boto3 moves the blocks, whatever client says.",
    )
    job_deadline_s: Seconds = Field(15.0, description="As for every tier; longer, for its retries.")
    lookup_deadline_s: Seconds = Field(2.0, description=LOOKUP_DEADLINE)
    bucket: str = Field(description="Bucket; must exist. Directory buckets (…--x-s3): with client: boto3 only.")
    prefix: str = Field("", description="Folder inside the bucket.")
    endpoint_url: str | None = Field(None, description="Of an S3 that is not AWS's, such as https://minio:9000.")
    region: str | None = Field(None, description="Default: what boto3 finds, else us-east-1.")
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        "auto", description="path: endpoint/bucket/key. virtual: bucket.endpoint/key. auto: virtual on AWS, else path."
    )
    profile: str | None = Field(None, description="Profile of ~/.aws/config.")
    role_arn: str | None = Field(None, description="Role to assume.")
    ca_bundle: AbsolutePath | None = Field(
        None, description="PEM file of certificate authorities to trust besides the system's; default: AWS_CA_BUNDLE."
    )
    verify: bool = Field(True, description="Check the server's certificate.")
    allow_insecure: bool = Field(False, description="Allow http to other hosts.")
    sse: Literal["AES256", "aws:kms"] | None = Field(None, description="Server-side encryption of new blocks.")
    sse_kms_key_id: str | None = Field(None, description="Key for sse: aws:kms.")
    storage_class: str | None = Field(None, description="Of new blocks, such as STANDARD_IA.")
    checksum: Literal["crc64nvme", "crc32c", "sha256", "none"] = Field(
        "crc64nvme",
        description="Checksum the server verifies; falls back once where a clone refuses it. none: the payload's "
        "SHA-256 is signed instead, which takes twice the CPU time of a put.",
    )
    request_timeout: RequestSeconds = Field(10.0, description="Seconds for one operation with its retries.")
    connect_timeout: RequestSeconds = Field(
        2.0, description="Seconds to connect; obstore divides them by the addresses."
    )
    retries: Annotated[int, Field(ge=0, le=20)] = Field(3, description="Further attempts after 5xx, 429 or a reset.")
    client: Literal["obstore", "boto3"] = Field(
        "obstore", description="obstore (Rust, fast), or boto3 where policy allows only AWS's own."
    )

    embedded: bool = Field(False, description="kvtiers demo starts an S3 server of its own for this tier.")

    def store_options(self) -> S3Options:
        """What the store is told.

        Raises:
            ConfigError: a value that cannot work.
        """
        own = {name: getattr(self, name) for name in _S3_SAME_NAMES}
        return S3Options(
            **own,
            request_timeout_s=self.request_timeout,
            connect_timeout_s=self.connect_timeout,
            max_connections=min(1024, self.n_read_threads + self.n_write_threads + self.n_threads_max + 64),
        )

    def check(self) -> None:
        super().check()
        self.store_options()


class FsspecTierConfig(NetworkTierConfig):
    """Blocks under any fsspec URL: gs://, abfs://, s3:// by s3fs, hf://, memory://, …"""

    type: Literal["fsspec"] = "fsspec"
    lookup_deadline_s: Seconds = Field(1.0, description=LOOKUP_DEADLINE)
    url: ExpandedPath = Field(description="Where, such as gs://bucket/folder. $VARIABLES are expanded.")
    storage_options: dict[str, Any] = Field(default_factory=dict, description="Passed to the fsspec file system.")

    def check(self) -> None:
        super().check()
        if any(part.partition(":")[0] == "memory" for part in self.url.split("::")):
            wanted = {"isolation": self.isolation != "thread", "ttl": self.ttl, "max_bytes": self.max_bytes}
            if field := next((name for name, value in wanted.items() if value), None):
                raise ConfigError("takes other processes, which cannot see memory://; leave it out", field=field)

    @field_serializer("url")
    def _hide_login(self, url: str) -> str:
        return public_url(url)

    @field_serializer("storage_options")
    def _hide_values(self, options: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(options, HIDDEN)


class StoreTierConfig(BoundedTierConfig):
    """Blocks in a store of your own: what `make_store(options)` of a module returns."""

    type: Literal["store"] = "store"
    module_path: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$")] = Field(
        description="Module with `make_store(options)`, or `module:function`. Known by its type alone where a package "
        "names it in the entry point group `kvtiers.stores`."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Passed to the function as they are.")
    isolation: Literal["auto", "thread", "process"] = Field(
        "auto", description="process: the store is made in worker processes. auto: where the region can be mapped."
    )

    @field_serializer("options")
    def _hide_values(self, options: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(options, HIDDEN)


class ExternalTierConfig(BaseModel):
    """A tier that is not ours: its options are its own business, and any may be a secret."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    type: str
    module_path: str | None = Field(None, description="Module with a class named like `type`.")

    @model_serializer
    def _hide_options(self) -> dict[str, Any]:
        return {"type": self.type, "module_path": self.module_path, **dict.fromkeys(self.model_extra or {}, HIDDEN)}

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return self.model_dump().items()


TIER_MODELS: dict[str, type[TierConfig]] = {
    "fs": FsTierConfig,
    "fsspec": FsspecTierConfig,
    "memory": MemoryTierConfig,
    "nfs": NfsTierConfig,
    "s3": S3TierConfig,
    "store": StoreTierConfig,
}

AnyTierConfig = TierConfig | ExternalTierConfig
