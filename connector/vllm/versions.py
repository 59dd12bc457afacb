"""Which release of vLLM is installed. Imports nothing of vLLM but its version, so that any release gets an answer."""

from __future__ import annotations

import re

import vllm

#: Releases that kvtiers was tested with. ``contract`` says what makes another one acceptable.
TESTED = ("0.28", "0.29", "0.30", "0.31", "0.32", "0.33")

#: As vLLM states it: "dev" in a checkout that was not built.
VERSION = str(getattr(vllm, "__version__", "unknown"))


def release(version: str = VERSION) -> tuple[int, int] | None:
    """Major and minor number of a version; None for one that does not begin with them, such as ``dev``."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))
