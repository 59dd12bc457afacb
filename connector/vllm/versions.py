"""The installed release of vLLM. Imports only vLLM's version, so it works with every release."""

from __future__ import annotations

import re

import vllm

#: Releases that kvtiers was tested with. ``contract`` decides whether another release is accepted.
TESTED = ("0.28", "0.29", "0.30", "0.31", "0.32", "0.33")

#: vLLM's own version string: "dev" in a checkout that was not built.
VERSION = str(getattr(vllm, "__version__", "unknown"))


def release(version: str = VERSION) -> tuple[int, int] | None:
    """Major and minor number of a version; None if it does not begin with them, such as ``dev``."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))
