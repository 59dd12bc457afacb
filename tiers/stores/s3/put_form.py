"""The forms in which a put proves its payload, from the cheapest to the one that every server takes."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from kvtiers.tiers.errors import StoreError, StorePermissionError
from kvtiers.tiers.stores.s3.errors import CredentialsExpiredError, DigestRefusedError, RequestRefusedError
from kvtiers.tiers.stores.s3.options import Checksum

#: Errors by which a server may refuse a form.
REFUSALS: Final = (RequestRefusedError, StorePermissionError, DigestRefusedError)


class PutForm(Enum):
    """How a put proves its payload."""

    CHECKED = auto()  # by the checksum of the options; the signature does not cover the payload
    SIGNED = auto()  # by a signature that covers the payload, and by its SHA-256 as a checksum
    PLAIN = auto()  # by a signature that covers the payload


def forms_of(checksum: Checksum) -> tuple[PutForm, ...]:
    """The forms to try, in this order. A bucket with object lock takes no put without a checksum."""
    if checksum == "none":
        return (PutForm.PLAIN, PutForm.SIGNED)
    return (PutForm.CHECKED, PutForm.SIGNED, PutForm.PLAIN)


def may_be_of_the_form(error: StoreError, form: PutForm) -> bool:
    """Whether another form may be taken where this one was refused.

    Credentials may be refused because of a policy that denies payloads without a signature.
    """
    if isinstance(error, CredentialsExpiredError):
        return False
    return isinstance(error, RequestRefusedError) or form is PutForm.CHECKED


def refusal_in_words(error: StoreError, form: PutForm, taken: PutForm, checksum: Checksum) -> str:
    """What to log of a form that was refused."""
    if form is PutForm.PLAIN:
        return "the server wants a checksum; SHA-256 is sent"
    if isinstance(error, RequestRefusedError) and taken is PutForm.PLAIN:
        return f"the server refuses {checksum}; payloads are signed instead"
    return f"the server refuses {checksum} with unsigned payloads; payloads are signed instead"
