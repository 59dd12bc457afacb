"""The ways into vLLM that the rows compare, as ``--kv-transfer-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.files import files_below

REGION_BYTES = 300 << 20
# A busy machine misses the defaults, and what is not found then is no fault. An answer is believed for as long.
PATIENT = {"lookup_deadline_s": 20.0}
_OFFLOADING: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
_OURS: dict[str, Any] = {
    "kv_connector": "KVTiersConnector",
    "kv_connector_module_path": "kvtiers.vllm",
    "kv_role": "kv_both",
}
_CPU_SPEC = {"spec_name": "CpuTieringOffloadingSpec", "spec_module_path": "tests.e2e.cpu_spec"}


@dataclass(frozen=True)
class Place:
    """Where a row keeps its blocks.

    Attributes:
        folder: for tiers on files.
        endpoint_url: of an S3 server; credentials come from the environment.
        bucket: on that server.
        deadlines: of lookups; of rows that are about them, the defaults.
        extra: further entries of an engine's ``kv_connector_extra_config``.
        on_gpu: engines run on a GPU, where vLLM's own spec works unchanged.
    """

    folder: Path
    endpoint_url: str = ""
    bucket: str = ""
    deadlines: Mapping[str, float] = field(default_factory=lambda: PATIENT)
    extra: Mapping[str, Any] = field(default_factory=dict)
    on_gpu: bool = False

    @property
    def fs(self) -> dict[str, Any]:
        """Our tier on the folder."""
        return {"type": "fs", "root_dir": str(self.folder), "min_free": 0, **self.deadlines}

    @property
    def s3(self) -> dict[str, Any]:
        """Our tier on the bucket."""
        place = {"type": "s3", "bucket": self.bucket, "endpoint_url": self.endpoint_url, "prefix": "kv"}
        return {**place, **self.deadlines}

    @property
    def nixl(self) -> dict[str, str]:
        """The bucket, as vLLM's obj tier takes it."""
        scheme, _, host = self.endpoint_url.partition("://")
        return {"bucket": self.bucket, "endpoint_override": host, "scheme": scheme}

    @property
    def bytes_stored(self) -> int:
        """Sizes of the files in the folder, kvtiers' records not among them."""
        return sum(status.st_size for path, status in files_below(self.folder) if "_kvtiers" not in path.parts)


def behind_vllm(tiers: list[dict[str, Any]], *, region_bytes: int = REGION_BYTES) -> dict[str, Any]:
    """Tiers behind vLLM's own TieringOffloadingSpec."""
    return {
        **_OFFLOADING,
        "kv_connector_extra_config": {
            **_CPU_SPEC,
            "cpu_bytes_to_use": region_bytes,
            "secondary_tiers": tiers,
        },
    }


def on_cpu(transfer: dict[str, Any]) -> dict[str, Any]:
    """A configuration for users, with vLLM's own spec replaced by its form for CPU tensors."""
    extra = transfer["kv_connector_extra_config"]
    if transfer["kv_connector"] != "KVTiersConnector":
        return transfer
    # From a checkout: nothing is installed that vLLM would find the name by.
    transfer = {**transfer, **_OURS}
    if extra.get("way") == "tier":
        transfer["kv_connector_extra_config"] = {**extra, **_CPU_SPEC}
    return transfer


def ours_behind_vllm(*tiers: dict[str, Any], region_bytes: int = REGION_BYTES) -> dict[str, Any]:
    """Our tiers there, through our connector."""
    return {
        **_OURS,
        "kv_connector_extra_config": {
            "way": "tier",
            **_CPU_SPEC,
            "cpu_bytes_to_use": region_bytes,
            "tiers": list(tiers),
        },
    }


def our_spec(*tiers: dict[str, Any], region_bytes: int = REGION_BYTES) -> dict[str, Any]:
    """Our own spec. Rows reset engines to empty them of all but their storage."""
    return {
        **_OURS,
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": region_bytes,
            "tiers": list(tiers),
            "storage_after_reset": "keep",
        },
    }


def shared_storage(**extra: Any) -> dict[str, Any]:
    """Our connector. As above."""
    return {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_module_path": "kvtiers.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"storage_after_reset": "keep", **extra},
    }


def way(
    name: str, place: Place, *, region_bytes: int = REGION_BYTES, limits: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The configuration of a way by its name in the report. ``limits``: of its folder."""
    transfer = _way(name, place, region_bytes, limits)
    extra = transfer["kv_connector_extra_config"]
    if "cpu_bytes_to_use" in extra:  # what rows ask of a region and its chunks
        extra |= place.extra
    if place.on_gpu and "spec_module_path" in extra:
        del extra["spec_module_path"]
        extra["spec_name"] = "TieringOffloadingSpec"
    return transfer


def _way(name: str, place: Place, region_bytes: int, limits: dict[str, Any] | None) -> dict[str, Any]:
    fs = {**place.fs, **(limits or {})}
    match name:
        case "vLLM's fs tier":
            return behind_vllm([{"type": "fs", "root_dir": str(place.folder)}], region_bytes=region_bytes)
        case "vLLM's obj tier":
            return behind_vllm([{"type": "obj", "store_config": place.nixl}], region_bytes=region_bytes)
        case "tier on fs":
            return ours_behind_vllm(fs, region_bytes=region_bytes)
        case "tier on S3":
            return ours_behind_vllm(place.s3, region_bytes=region_bytes)
        case "tier on fs in front of S3":
            return ours_behind_vllm(place.fs, place.s3, region_bytes=region_bytes)
        case "spec on fs":
            return our_spec(fs, region_bytes=region_bytes)
        case "spec on S3":
            return our_spec(place.s3, region_bytes=region_bytes)
        case "SharedStorageConnector on a folder":
            return shared_storage(shared_storage_path=str(place.folder), **place.deadlines, **(limits or {}))
        case "SharedStorageConnector on S3":
            return shared_storage(tier=place.s3, **place.deadlines)
    raise ValueError(f"{name!r} is no way")


VLLM_WAYS = ("vLLM's fs tier", "vLLM's obj tier")
REUSE_WAYS = (
    *VLLM_WAYS,
    "tier on fs",
    "tier on S3",
    "tier on fs in front of S3",
    "spec on fs",
    "spec on S3",
    "SharedStorageConnector on a folder",
    "SharedStorageConnector on S3",
)
