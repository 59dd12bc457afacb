"""Choose the seal class by a config's ``protection`` or by JSON fields. Imports cryptography only if keys are used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from kvtiers.tiers.blocks.keyring import KeyRing
from kvtiers.tiers.blocks.seal import Authentication, Checksum, Seal


def seal_factory(protection: Literal["none", "gmac", "aes-gcm"], keys: KeyRing | None = None) -> Callable[..., Seal]:
    """Return a function that creates seals for a kind of protection; it takes the arguments of ``Seal``.

    Args:
        keys: required for every kind except "none".

    Raises:
        ConfigError: cryptography is not installed.
    """
    if protection == "none":
        return Seal
    from kvtiers.tiers.blocks.protected_seal import GcmSeal, GmacSeal

    assert keys is not None
    return partial(GcmSeal if protection == "aes-gcm" else GmacSeal, keys=keys)


def seal_from_json(fields: dict[str, Any]) -> Seal:
    """The inverse of ``Seal.to_json``, for a worker process."""
    identity = bytes.fromhex(fields["fingerprint"]), fields["rank"]
    options = {
        "checksum": Checksum(fields["checksum"]),
        "writer_id": bytes.fromhex(fields["writer_id"]),
        "shares_folder": fields["shares_folder"],
    }
    if "authentication" not in fields:
        return Seal(*identity, takes_unverified=fields["takes_unverified"], **options)
    from kvtiers.tiers.blocks.protected_seal import GcmSeal, GmacSeal

    kind = {Authentication.AES_256_GMAC: GmacSeal, Authentication.AES_256_GCM: GcmSeal}[fields["authentication"]]
    return kind(*identity, keys={number: bytes.fromhex(key) for number, key in fields["keys"]}, **options)
