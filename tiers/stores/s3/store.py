"""S3Store: blobs as objects of a bucket on AWS or anything that speaks S3.

A put is one request: an object is visible whole or not at all, and with ``If-None-Match: *`` the first of many writers
wins. 412 says that somebody else stored it, which is success, also when a lost acknowledgement made us ask twice. 409
says that somebody is at the key, perhaps deleting it: the put is made again. A server that refuses the header (501, of
Backblaze B2) is asked what is there before each put, and the last of many writers wins.

There are two data planes behind one protocol, chosen by ``S3Options.client``; boto3 has credentials and all that is
rare. An attempt ends after half of ``request_timeout_s`` by its client's own total timeout. An operation makes further
attempts at what is retryable, after growing, jittered pauses, and begins none in the second half of its time.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvtiers.tiers.errors import BlobCorruptError, InvalidKeyError, StoreError
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import (
    KEY_LENGTH_MAX,
    KEY_PART_LENGTH_MAX,
    Capabilities,
    KeyInfo,
    Look,
    Store,
    check_key,
    parts_size,
)
from kvtiers.tiers.stores.s3.attempts import Attempts
from kvtiers.tiers.stores.s3.control import DELETE_KEYS_MAX
from kvtiers.tiers.stores.s3.delete import delete_each
from kvtiers.tiers.stores.s3.errors import (
    BareRefusalError,
    CredentialsLateError,
    CredentialsRefusedError,
    MissingHeaderError,
    Place,
    RequestRefusedError,
    VagueRefusalError,
    deadline_error,
)
from kvtiers.tiers.stores.s3.lookup import Answers, Lookups
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.put_form import REFUSALS, PutForm, forms_of, may_be_of_the_form, refusal_in_words
from kvtiers.tiers.stores.s3.trial import try_each_client
from kvtiers.tiers.stores.vectored_io import look_at
from kvtiers.tiers.stores.watchdog import begin

__all__ = ["S3Options", "S3Store"]

logger = get_logger(__name__)

SCRATCH_BYTES: Final = 1 << 20
SKIPPED_BYTES_MAX: Final = 1 << 30  # of a blob whose tail is wanted, from a server that ignores ranges
USED_AT: Final = "kvtiers-used-at"  # name of the metadata; Unix seconds
_UNIX_S: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")
CHECK_S_MAX: Final = 3.0  # `kvtiers check` answers within 5 s, imports included
TRY_S_MAX: Final = 5.0  # where the bucket has answered


class S3Store(Store):
    """Blobs in an S3 bucket.

    Any thread may call. The first call makes the clients, so that the constructor does no I/O. Three things change
    once, and never back: ``_forms`` loses what the server refuses, ``_batches_refused`` becomes True and
    ``exclusive_create`` of ``capabilities`` False.

    Args:
        options: where and how.
        clock: monotonic seconds.
        sleep: between attempts.
        rng: numbers in 0..1 for the jitter.
    """

    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=True)

    def __init__(
        self,
        options: S3Options,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.options = options
        self._clock = clock
        self._forms = forms_of(options.checksum)
        self._batches_refused = False
        self._lookups = Lookups(
            askers_max=options.max_connections, silence_s_max=options.request_timeout_s, clock=clock
        )
        self._attempts = Attempts(options, clock=clock, sleep=sleep, rng=rng)

    def __repr__(self) -> str:
        return f"S3Store({self.options.bucket!r}, prefix={self.options.prefix!r}, client={self.options.client!r})"

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        self._name(key)
        plain = _as_bytes(parts)
        latest_start = self._attempts.latest_start()
        refused: RequestRefusedError | None = None
        if not overwrite and self.capabilities.exclusive_create:
            try:
                return self._put(key, plain, latest_start, create=True)
            except RequestRefusedError as e:
                refused = e.with_traceback(None)
            if self._clock() > latest_start:
                try:
                    raise refused
                finally:
                    refused = None  # it refers to this frame, and so to the caller's memory
        if not overwrite and self._size(key, latest_start) is not None:
            return False
        published = self._put(key, plain, latest_start, create=False)
        # Without If-None-Match it was taken, so that was refused.
        if refused is not None and not isinstance(refused, VagueRefusalError) and self.capabilities.exclusive_create:
            self.capabilities = replace(self.capabilities, exclusive_create=False)
            logger.warning("%r: the server refuses If-None-Match; it is asked what is there before each put", self)
        return published

    def put_aged(self, key: str, parts: Sequence[memoryview], *, used_at: float) -> bool:
        """See ``SupportsAges``. The age is metadata, because S3 sets the time of each object itself."""
        metadata = {USED_AT: f"{used_at:.9f}"}
        return self._put(key, _as_bytes(parts), self._attempts.latest_start(), create=False, metadata=metadata)

    def used_at(self, info: KeyInfo) -> float:
        """See ``SupportsAges``."""
        name = self._name(info.key)
        noted = self._attempts.run(info.key, lambda clients: clients.control.metadata(name)).get(USED_AT, "")
        # S3 cuts the time of an object to whole seconds.
        is_past = _UNIX_S.fullmatch(noted) is not None and float(noted) < info.mtime + 1.0
        return float(noted) if is_past else info.mtime

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self._get_into(key, parts, None)

    def put_pieces(self, key: str, parts: Sequence[memoryview], look: Look, *, overwrite: bool = False) -> bool:
        """See ``SupportsPieces``. All parts are shown before a client reads them."""
        look_at(look, 0, _as_bytes(parts))
        return self.put(key, parts, overwrite=overwrite)

    def get_pieces_into(self, key: str, parts: Sequence[memoryview], look: Look) -> None:
        """See ``SupportsPieces``."""
        raised: list[BaseException] = []

        def careful(offset: int, piece: memoryview) -> None:  # so that what ``look`` raises fails no transfer
            if not raised:
                try:
                    look(offset, piece)
                except BaseException as e:  # noqa: BLE001 - raised below
                    raised.append(e)

        self._get_into(key, parts, careful)
        if raised:
            raise raised.pop()  # none is kept: it refers to this frame, and so to the caller's memory

    def size(self, key: str) -> int | None:
        return self._size(key, self._attempts.latest_start())

    def delete(self, key: str) -> None:
        name = self._name(key)
        self._attempts.run(key, lambda clients: clients.control.delete(name))

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        """List blobs, 1,000 a request. Objects whose names are no keys, such as folder markers, are left out."""
        root = self.options.object_key("")
        token = ""
        while True:
            page, token = self._list_page(root + prefix, token)
            for info in page:
                key = info.key[len(root) :]
                try:
                    check_key(key)
                except InvalidKeyError:
                    continue
                # Some servers read "a//" as "a/".
                if key.startswith(prefix):
                    yield KeyInfo(key, info.size, info.mtime)
            if not token:
                return

    def close(self) -> None:
        self._attempts.close()

    def prepare(self) -> None:
        """See ``SupportsPrepare``."""
        with contextlib.suppress(StoreError):
            self._attempts.raise_if_closed()  # nobody would close the clients
            self._attempts.current().get()

    # -- optional protocols ----------------------------------------------------------------------------------------

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """See ``SupportsTail``."""
        name = self._name(key)
        latest_start = self._attempts.latest_start()
        if length > 0:
            try:
                return self._attempts.run(key, lambda clients: clients.data.get_tail(name, length), latest_start)
            except BlobCorruptError:
                pass  # an empty object has no ranges, and some servers ignore them
        size = self._size(key, latest_start)
        if size is None or min(size, length) == 0:
            return None if size is None else (size, b"")
        if size > SKIPPED_BYTES_MAX:
            raise BlobCorruptError(f"{size} bytes are stored, and the server sends no parts of them", key=key)
        # What comes before the tail goes into the same memory again and again: the size is only what the server says.
        tail = bytearray(min(size, length))
        skipped, rest = divmod(size - len(tail), SCRATCH_BYTES)
        scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._get_into(key, [*[scratch] * skipped, scratch[:rest], memoryview(tail)], None, latest_start)
        return size, bytes(tail)

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        """See ``SupportsSizeMany``.

        When nothing was answered for ``request_timeout_s``, StoreTimeoutErrors answer what is left.
        """
        self._attempts.raise_if_closed()
        answers: Answers = {}
        self._lookups.answer(list(self._names(keys, answers).values()), answers, self.size)
        return [answers[key] for key in keys]

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        """See ``SupportsDeleteMany``. 1,000 keys a request, or one where the server refuses that."""
        self._attempts.raise_if_closed()
        outcomes: dict[str, Exception | None] = {}
        names = self._names(keys, outcomes)
        unique = list(names)
        for start in range(0, len(unique), DELETE_KEYS_MAX):
            batch = unique[start : start + DELETE_KEYS_MAX]
            try:
                failed = self._delete_batch(batch)
            except StoreError as e:
                failed = dict.fromkeys(batch, e)
            for name in batch:
                error = failed.get(name)
                outcomes[names[name]] = error and type(error)(str(error), key=names[name])
        return [outcomes[key] for key in keys]

    # -- control plane ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Ask the bucket one question that needs endpoint, credentials, clock, bucket and region to be right.

        In a thread of its own, as a name that does not resolve can keep its caller for half a minute.

        Raises:
            StoreError: within ``CHECK_S_MAX``, in one line that begins with what is wrong (endpoint, secret, clock,
                bucket or region) and says what to do about it.
        """
        self._attempts.raise_if_closed()
        process = self._attempts.current()
        deadline = self._clock() + CHECK_S_MAX
        try:
            control = process.get(deadline).control
            asked = begin("kvtiers-s3-check", control.check)
            asked.result(max(0.0, deadline - self._clock()))
        except TimeoutError:
            options = self.options
            place = Place(options.bucket, options.region or "", options.endpoint_url or "the endpoint")
            error = deadline_error(CHECK_S_MAX, place)
        except StoreError as e:
            error = type(e)(str(e))  # without the client's exception, as in Attempts.run
        else:
            return
        if isinstance(error, (CredentialsRefusedError, CredentialsLateError)):
            self._attempts.replace(process)
        raise error

    def try_out(self, *, read_only: bool) -> None:
        """``check``, and then a put, a get, a large get and a delete, so that each client moves bytes once.

        The clients differ in what they read of certificates and in how they send checksums.

        Args:
            read_only: get what is absent instead.

        Raises:
            StoreError: as ``check``'s, within ``TRY_S_MAX`` more.
        """
        self.check()
        tried = begin("kvtiers-s3-trial", lambda: try_each_client(self, read_only=read_only))
        try:
            tried.result(TRY_S_MAX)
        except TimeoutError:
            options = self.options
            place = Place(options.bucket, options.region or "", options.endpoint_url or "the endpoint")
            raise deadline_error(TRY_S_MAX, place) from None

    @property
    def checksum_refused(self) -> bool:
        """Whether the server has refused a put for its ``checksum``; payloads are signed since."""
        return self.options.checksum != "none" and self._forms[0] is not PutForm.CHECKED

    def folders(self) -> list[str]:
        """The first components of all keys; costs a request per 1,000 of them.

        Raises:
            StoreError: they cannot be listed.
        """
        own = f"{self.options.prefix}/" if self.options.prefix else ""
        return self._attempts.run("", lambda clients: clients.control.list_folder(own))[0]

    def names_in(self, folder: str) -> list[str]:
        """The last components of the keys right in a folder; costs a request per 1,000 of them and of its folders.

        Raises:
            StoreError: they cannot be listed.
        """
        own = self.options.object_key(f"{folder}/")
        return self._attempts.run(folder, lambda clients: clients.control.list_folder(own))[1]

    def expire_after(self, days: int | None, beginnings: Sequence[str] = ()) -> bool:
        """Have the bucket itself delete blobs whose keys begin so, ``days`` after they were written; None: never.

        This replaces what was asked for before; other rules of the bucket stay. Returns whether the bucket may have
        versions: those are then deleted a day after they were replaced or deleted, whatever ``days`` is.

        Raises:
            ValueError: ``days`` is below 1, S3's unit.
            StoreError: the bucket refused, or has no lifecycle rules.
        """
        return self._attempts.run("", lambda clients: clients.control.expire_after(days, beginnings))

    def keeps_versions(self, beginnings: Sequence[str]) -> bool:
        """Whether the bucket keeps what is deleted or replaced, and no rule deletes it for all keys that begin so.

        Raises:
            StoreError: it does not say; to ask takes a right of its own.
        """
        return self._attempts.run("", lambda clients: clients.control.keeps_versions(beginnings))

    # -- private ---------------------------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        name = self.options.object_key(check_key(key))
        if len(name) > KEY_PART_LENGTH_MAX and len(name.encode()) > KEY_LENGTH_MAX:
            raise InvalidKeyError(f"with its prefix longer than {KEY_LENGTH_MAX} bytes", key=key)
        return name

    def _names(self, keys: Sequence[str], outcomes: MutableMapping[str, Any]) -> dict[str, str]:
        """Objects' names -> keys, each once. A key that is not valid gets its error in ``outcomes`` instead."""
        names: dict[str, str] = {}
        for key in dict.fromkeys(keys):
            try:
                names[self._name(key)] = key
            except InvalidKeyError as e:
                outcomes[key] = e
        return names

    def _put(
        self,
        key: str,
        plain: list[memoryview],
        latest_start: float,
        *,
        create: bool,
        metadata: Mapping[str, str] | None = None,
    ) -> bool:
        forms = self._forms
        refused: StoreError | None = None
        for form in forms:
            try:
                published = self._put_as(form, key, plain, latest_start, create=create, metadata=metadata)
            except REFUSALS as e:
                refused = refused or e.with_traceback(None)
                if self._clock() > latest_start or not may_be_of_the_form(e, form):
                    break
                continue
            if refused is not None and not isinstance(refused, VagueRefusalError) and self._forms is forms:
                self._forms = forms[forms.index(form) :]
                logger.warning("%r: %s", self, refusal_in_words(refused, forms[0], form, self.options.checksum))
            return published
        assert refused is not None
        try:
            raise refused
        finally:
            del refused  # as in ``put``

    def _put_as(
        self,
        form: PutForm,
        key: str,
        plain: list[memoryview],
        latest_start: float,
        *,
        create: bool,
        metadata: Mapping[str, str] | None,
    ) -> bool:
        name = self._name(key)
        try:
            return self._attempts.run(
                key,
                lambda clients: clients.data.put(name, plain, create=create, form=form, metadata=metadata),
                latest_start,
            )
        except MissingHeaderError as e:
            missing = e.with_traceback(None)
        if self._is_listed(name, parts_size(plain), latest_start):
            return True
        try:
            raise missing
        finally:
            del missing  # as in ``put``

    def _is_listed(self, name: str, size: int, latest_start: float) -> bool:
        """Whether an object is there, by the listing: the answer to a put may lack what proves it."""
        try:
            found, _ = self._attempts.run("", lambda clients: clients.control.list_page(name), latest_start)
        except StoreError:
            return False
        return bool(found) and (found[0].key, found[0].size) == (name, size)

    def _list_page(self, prefix: str, token: str) -> tuple[list[KeyInfo], str]:
        return self._attempts.run("", lambda clients: clients.control.list_page(prefix, token=token))

    def _delete_batch(self, names: Sequence[str]) -> dict[str, StoreError]:
        if self._batches_refused:
            return self._delete_each(names)
        try:
            return self._attempts.run("", lambda clients: clients.control.delete_batch(names))
        except RequestRefusedError as e:  # MissingContentMD5, NotImplemented and the like
            failed = self._delete_each(names)
            says_so = not isinstance(e, VagueRefusalError)
            if says_so and len(failed) < len(names) and not self._batches_refused:
                self._batches_refused = True
                logger.warning("%r: the server refuses DeleteObjects; blobs are deleted one by one instead", self)
            return failed

    def _delete_each(self, names: Sequence[str]) -> dict[str, StoreError]:
        return delete_each(names, lambda name: self._attempts.run("", lambda clients: clients.control.delete(name)))

    def _get_into(
        self, key: str, parts: Sequence[memoryview], look: Look | None, latest_start: float | None = None
    ) -> None:
        name = self._name(key)
        plain = _as_bytes(parts)
        size = parts_size(plain)
        self._attempts.run(key, lambda clients: clients.data.get_into(name, plain, size, look), latest_start)

    def _size(self, key: str, latest_start: float) -> int | None:
        name = self._name(key)
        try:
            return self._attempts.run(key, lambda clients: clients.data.size(name), latest_start)
        except (RequestRefusedError, BareRefusalError) as e:
            refused = e.with_traceback(None)
        # A HEAD's answer has no body: an expired session token is a bare 400. A GET's says why.
        if self._clock() <= latest_start:
            with contextlib.suppress(BlobCorruptError):  # an empty object, or a server without ranges
                tail = self._attempts.run(key, lambda clients: clients.data.get_tail(name, 1), latest_start)
                return tail and tail[0]
        try:
            raise refused
        finally:
            del refused  # as in ``put``, which may be the caller


def _as_bytes(parts: Sequence[memoryview]) -> list[memoryview]:
    """The non-empty parts as plain unsigned bytes, the only form that obstore takes."""
    return [part.cast("B") for part in parts if part.nbytes]
