"""The forms in which a put proves its payload, from the cheapest to one that every server accepts."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from kvtiers.tiers.errors import StoreError, StorePermissionError
from kvtiers.tiers.stores.s3.errors import CredentialsExpiredError, DigestRefusedError, RequestRefusedError
from kvtiers.tiers.stores.s3.options import Checksum

#: Errors with which a server may refuse a form.
REFUSALS: Final = (RequestRefusedError, StorePermissionError, DigestRefusedError)


class PutForm(Enum):
    """How a put proves its payload."""

    CHECKED = auto()  # by the configured checksum; the signature does not cover the payload
    SIGNED = auto()  # by a signature that covers the payload, and by its SHA-256 as a checksum
    PLAIN = auto()  # by a signature that covers the payload


def forms_of(checksum: Checksum) -> tuple[PutForm, ...]:
    """The forms to try, in order. A bucket with object lock requires a checksum, which SIGNED provides."""
    if checksum == "none":
        return (PutForm.PLAIN, PutForm.SIGNED)
    return (PutForm.CHECKED, PutForm.SIGNED, PutForm.PLAIN)


def may_depend_on_form(error: StoreError, form: PutForm) -> bool:
    """Whether the server may accept another form after it refused this one.

    It may refuse credentials because of a bucket policy that denies unsigned payloads.
    """
    if isinstance(error, CredentialsExpiredError):
        return False
    return isinstance(error, RequestRefusedError) or form is PutForm.CHECKED


def describe_refusal(error: StoreError, form: PutForm, taken: PutForm, checksum: Checksum) -> str:
    """The log message for a refused form; ``taken`` is the form that the server accepted."""
    if form is PutForm.PLAIN:
        return "the server wants a checksum; SHA-256 is sent"
    if isinstance(error, RequestRefusedError) and taken is PutForm.PLAIN:
        return f"the server refuses {checksum}; payloads are signed instead"
    return f"the server refuses {checksum} with unsigned payloads; payloads are signed instead"
