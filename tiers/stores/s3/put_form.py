"""The ways to put a blob, from the cheapest to one that every server accepts, and which of them a server accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from ...errors import StoreError, StorePermissionError
from .errors import (
    CredentialsRefusedError,
    DigestRefusedError,
    RequestRefusedError,
    SignatureRefusedError,
    VagueRefusalError,
)
from .options import S3Options

CHECKSUM: Final = "crc64nvme"  # S3's own default: it costs AWS's and most other servers nothing, and us 0.1 ms a MiB
#: Errors with which a server may refuse a way.
REFUSALS: Final = (RequestRefusedError, StorePermissionError, DigestRefusedError)

#: After this many detours in a row, the detour is taken at once, although the refusals had no known error code.
VAGUE_DETOURS_MAX: Final = 3
#: How long such a detour is taken, and how long only the first way is tried after all ways were refused.
REMEMBERED_S: Final = 60.0


class PutForm(Enum):
    """How a put proves its payload."""

    CHECKED = auto()  # by CHECKSUM; the signature does not cover the payload
    SIGNED = auto()  # by a signature that covers the payload, and by its SHA-256 as a checksum
    PLAIN = auto()  # by a signature that covers the payload


class PutWay(NamedTuple):
    """One way to put a blob. ``create``: with If-None-Match."""

    create: bool
    form: PutForm


#: In the order in which they are tried. A bucket with object lock requires a checksum, which SIGNED provides.
FORMS: Final = (PutForm.CHECKED, PutForm.SIGNED, PutForm.PLAIN)


class Detour:
    """Whether requests take a detour at once, because the server refuses the straight way. Any thread may call.

    A refusal with a known code is remembered for good. Other refusals may come from a load balancer whose servers
    restart: after ``VAGUE_DETOURS_MAX`` detours in a row, the detour is taken for ``REMEMBERED_S``. Then the straight
    way is tried again. Two threads that race cost at most one more request.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._is_lasting = False
        self._in_a_row = 0
        self._until = float("-inf")

    @property
    def is_taken(self) -> bool:
        """Whether to take the detour at once."""
        return self._is_lasting or self._clock() < self._until

    def was_not_needed(self) -> None:
        """Note that the straight way succeeded."""
        self._in_a_row = 0

    def helped(self, refusals: Sequence[StoreError]) -> bool:
        """Note that the detour succeeded after these refusals. Returns whether it is now taken for good."""
        if not any(isinstance(refused, VagueRefusalError) for refused in refusals):
            self._is_lasting = True
        self._in_a_row += 1
        if self._in_a_row >= VAGUE_DETOURS_MAX:
            self._until = self._clock() + REMEMBERED_S
        return self._is_lasting


class PutWays:
    """Remembers which ways of putting a bucket accepts. Any thread may call; a race costs at most one more upload.

    After all ways were refused, only the first way is tried for ``REMEMBERED_S``. The cause is then something else (a
    proxy, a permission, the encryption), and each further try would send a large blob.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._detours = {form: Detour(clock) for form in FORMS[1:]}  # to this form from the ones before
        self._unconditional = Detour(clock)
        self._in_vain_until = float("-inf")
        self._was_refused = False
        self._straight = {create: self._all_ways(create=create) for create in (False, True)}

    @property
    def first_form(self) -> PutForm:
        """The form that a put tries first."""
        return next((form for form in reversed(FORMS[1:]) if self._detours[form].is_taken), FORMS[0])

    def to_try(self, *, create: bool) -> list[PutWay]:
        """The ways of one put, in order.

        Args:
            create: the put must not replace a blob.
        """
        if not self._was_refused:
            return self._straight[create]
        ways = self._all_ways(create=create)
        return ways[:1] if self.are_all_refused else ways

    def _all_ways(self, *, create: bool) -> list[PutWay]:
        forms = FORMS[FORMS.index(self.first_form) :]
        conditions = [False] if not create or self._unconditional.is_taken else [True, False]
        return [PutWay(condition, form) for condition in conditions for form in forms]

    @property
    def are_all_refused(self) -> bool:
        """Whether a put was lately refused in all ways."""
        return self._clock() < self._in_vain_until

    def all_refused(self) -> None:
        """Note that the server refused all ways."""
        self._was_refused = True
        self._in_vain_until = self._clock() + REMEMBERED_S

    def accepted(self, way: PutWay, refusals: Mapping[PutWay, StoreError]) -> tuple[bool, bool]:
        """Note that the server accepted a way after it had refused others.

        Returns:
            Whether this way's form, and whether its lack of If-None-Match, are now used for good.
        """
        if not (refusals or self._was_refused):  # nothing to remember: each put of most servers
            return False, False
        self._was_refused = True
        self._in_vain_until = float("-inf")
        form_refusals = [error for refused, error in refusals.items() if refused.create == way.create]
        for form in FORMS[FORMS.index(way.form) + 1 :]:
            self._detours[form].was_not_needed()
        if way.create:
            self._unconditional.was_not_needed()
        condition_refusals = [error for refused, error in refusals.items() if refused.create != way.create]
        return (
            bool(form_refusals) and self._detours[way.form].helped(form_refusals),
            bool(condition_refusals) and self._unconditional.helped(condition_refusals),
        )


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
    """The error of a refused put, with the options that each put asks the server for and that may be its cause."""
    if isinstance(error, CredentialsRefusedError):
        return error
    asked = [
        f"{name}: {value}"
        for name, value in (("sse", options.sse), ("storage_class", options.storage_class))
        if value is not None
    ]
    if not asked:
        return error
    lacking = "may need a right of its own" if isinstance(error, StorePermissionError) else "the server may not support"
    return type(error)(f"{error}; each put asks for {' and '.join(asked)}, which {lacking}")
