"""Which release of vLLM is installed. Imports nothing of vLLM but its version, so that any release gets an answer."""

from __future__ import annotations

import re

import vllm

from tiers.errors import ConfigError

SUPPORTED_VERSIONS = ("0.28", "0.29", "0.30", "0.31", "0.32", "0.33")

#: As vLLM states it: "dev" in a checkout that was not built.
VERSION = str(getattr(vllm, "__version__", "unknown"))


def release(version: str = VERSION) -> tuple[int, int] | None:
    """Major and minor number of a version; None for one that does not begin with them, such as ``dev``."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def check_version(version: str = VERSION) -> None:
    """Refuse a vLLM whose interface this package does not know.

    Raises:
        ConfigError: lists the versions it knows.
    """
    found = release(version)
    if found is None or "{}.{}".format(*found) not in SUPPORTED_VERSIONS:
        raise ConfigError(
            f"version {version!r} is not supported; accepted: "
            f"{', '.join(f'{known}.x' for known in SUPPORTED_VERSIONS)}",
            field="vllm",
        )
