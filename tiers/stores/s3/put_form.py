"""Ways to put a blob, from the cheapest way to a way that every server accepts; remembers the accepted way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from ...errors import StoreError, StorePermissionError
from .errors import (
    CredentialsRefusedError,
    DigestRefusedError,
    RequestRefusedError,
    SignatureRefusedError,
)
from .options import S3Options

CHECKSUM: Final = "crc64nvme"  # S3's own default. It costs most servers nothing, and kvtiers 0.1 ms per MiB
#: Errors by which a server may refuse a way.
REFUSALS: Final = (RequestRefusedError, StorePermissionError, DigestRefusedError)

#: How long the way that was accepted after refusals is tried first. Also how long only the first way is tried after all
#: ways were refused. A refusal may come from a load balancer whose servers restart.
REMEMBERED_S: Final = 60.0


class PutForm(Enum):
    """The proof of a put's payload."""

    CHECKED = auto()  # proved by CHECKSUM; the signature does not cover the payload
    SIGNED = auto()  # proved by a signature that covers the payload, and by SHA-256 as a checksum
    PLAIN = auto()  # proved by a signature that covers the payload


class PutWay(NamedTuple):
    """One way to put a blob. ``create``: with If-None-Match."""

    create: bool
    form: PutForm


#: In the order in which they are tried. A bucket with object lock requires a checksum, which SIGNED provides.
FORMS: Final = (PutForm.CHECKED, PutForm.SIGNED, PutForm.PLAIN)


#: The ways of a put, in order: those of a put that must not replace a blob, and those of any other.
ALL_WAYS: Final = {
    create: tuple(PutWay(condition, form) for condition in ([True, False] if create else [False]) for form in FORMS)
    for create in (True, False)
}


class PutWays:
    """Remembers for ``REMEMBERED_S`` which ways of putting a bucket accepts.

    Any thread may call; a race costs at most one more upload.

    After all ways were refused, only the first way is tried. The cause is then not the way but a proxy, a permission or
    the encryption, and each further try would send a large blob.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accepted: tuple[PutWay, float] | None = None  # after refusals, and until when it is tried first
        self._in_vain_until = float("-inf")

    @property
    def first_form(self) -> PutForm:
        """The form that a put tries first."""
        return self.to_try(create=False)[0].form

    def to_try(self, *, create: bool) -> Sequence[PutWay]:
        """The ways of one put, in order.

        Args:
            create: the put must not replace a blob.
        """
        ways: Sequence[PutWay] = ALL_WAYS[create]
        if (noted := self._accepted) is not None:  # read once: another thread may forget it
            accepted, until = noted
            if self._clock() < until:
                ways = [way for way in ways if way.create <= accepted.create and way.form in _from(accepted.form)]
            else:
                self._accepted = None
        return ways[:1] if self.are_all_refused else ways

    @property
    def are_all_refused(self) -> bool:
        """Whether all ways of a put were refused recently."""
        return self._clock() < self._in_vain_until

    def all_refused(self) -> None:
        """Note that the server refused all ways."""
        self._in_vain_until = self._clock() + REMEMBERED_S

    def accepted(self, way: PutWay, refused: Collection[PutWay]) -> None:
        """Note that the server accepted a way after it had refused others."""
        self._in_vain_until = float("-inf")
        if refused:
            takes_condition = way.create or not any(each.create for each in refused)
            self._accepted = PutWay(takes_condition, way.form), self._clock() + REMEMBERED_S


def _from(form: PutForm) -> Sequence[PutForm]:
    return FORMS[FORMS.index(form) :]


def may_depend_on_way(error: StoreError, way: PutWay, other: PutWay) -> bool:
    """Whether the server may accept another way after it refused this one.

    A bucket policy that denies unsigned payloads makes the server refuse the credentials. A server that does not know
    the headers of checksums may refuse the signature.
    """
    if isinstance(error, RequestRefusedError):
        return True
    if isinstance(error, CredentialsRefusedError) and not isinstance(error, SignatureRefusedError):
        return False
    return other.create == way.create and (isinstance(error, StorePermissionError) or way.form is PutForm.CHECKED)


def describe_refusal(taken: PutForm) -> str:
    """The log message for a refused form; ``taken`` is the form that the server accepted."""
    how = "" if taken is PutForm.PLAIN else " with unsigned payloads"
    return f"the server refuses {CHECKSUM}{how}; payloads are signed instead"


def with_asked_for(error: StoreError, options: S3Options) -> StoreError:
    """Add to the error of a refused put the options that each put requests, because they may be the cause."""
    if isinstance(error, CredentialsRefusedError):
        return error
    asked = [
        f"{name}: {value}"
        for name, value in (("sse", options.sse), ("storage_class", options.storage_class))
        if value is not None
    ]
    if not asked:
        return error
    lacking = "may need another permission" if isinstance(error, StorePermissionError) else "the server may not support"
    return type(error)(f"{error}; each put asks for {' and '.join(asked)}, which {lacking}")
