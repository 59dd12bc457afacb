"""Which seal: by a config's ``protection``, or by what another process says. Imports cryptography only for keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from kvtiers.tiers.blocks.keyring import KeyRing
from kvtiers.tiers.blocks.seal import Authentication, Seal


def seal_factory(protection: Literal["none", "gmac", "aes-gcm"], keys: KeyRing | None = None) -> Callable[..., Seal]:
    """Makes seals of a kind; called as ``Seal``.

    Args:
        keys: needed by all but "none".

    Raises:
        ConfigError: cryptography is missing.
    """
    if protection == "none":
        return Seal
    from kvtiers.tiers.blocks.protected_seal import GcmSeal, GmacSeal

    assert keys is not None
    return partial(GcmSeal if protection == "aes-gcm" else GmacSeal, keys=keys)


def seal_from_json(fields: dict[str, Any]) -> Seal:
    """The other end of ``Seal.to_json``, for a worker process."""
    if "authentication" not in fields:
        return Seal.from_json(fields)
    from kvtiers.tiers.blocks.protected_seal import GcmSeal, GmacSeal

    kinds: dict[int, type[Seal]] = {Authentication.AES_256_GMAC: GmacSeal, Authentication.AES_256_GCM: GcmSeal}
    return kinds[fields["authentication"]].from_json(fields)
