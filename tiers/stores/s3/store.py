"""S3Store: keeps blobs as objects in a bucket on AWS S3 or any S3-compatible server.

A put is one request, so an object is visible whole or not at all. ``If-None-Match: *`` lets the first of many writers
win. The server may answer such a put with:

- 412: the object exists. This is success, also if it is our own earlier attempt whose response was lost.
- 409: another operation, perhaps a delete, is in progress on the key. The put is retried.
- 501: the server refuses the header (Backblaze B2). Each put then first checks for the object; the last writer wins.

``DirectClient`` moves blocks. Behind a proxy, and for directory buckets, boto3 moves them. boto3 also provides the
credentials and makes all rare requests (``S3Control``).

An attempt ends after half of ``request_timeout_s``, by its client's own total timeout. Retryable errors are retried
after growing, jittered pauses. No attempt starts in the second half of ``request_timeout_s``.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ...errors import (
    BlobCorruptError,
    InvalidKeyError,
    StoreError,
    StorePermissionError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from ...plain_logs import get_logger
from ...store import (
    KEY_LENGTH_MAX,
    KEY_PART_LENGTH_MAX,
    Capabilities,
    KeyInfo,
    Look,
    Store,
    check_key,
    parts_size,
)
from ..vectored_io import look_at
from ..watchdog import begin
from .attempts import Attempts
from .clients import Clients
from .errors import (
    BareRefusalError,
    CredentialsLateError,
    CredentialsRefusedError,
    Place,
    RequestRefusedError,
    deadline_error,
)
from .listing import Page, follow
from .options import S3Options
from .polling import Threads, run_all
from .put_form import (
    REFUSALS,
    PutForm,
    PutWay,
    PutWays,
    describe_refusal,
    may_depend_on_way,
    with_asked_for,
)

logger = get_logger(__name__)

DELETE_KEYS_MAX: Final = 1000  # S3's limit for one batch delete
DELETERS_MAX: Final = 8
SCRATCH_BYTES: Final = 1 << 20
SKIPPED_BYTES_MAX: Final = 1 << 30  # largest blob whose tail is read if the server ignores ranges
CHECK_S_MAX: Final = 10.0  # making the clients takes seconds on a busy machine, resolving an unknown host half a minute


class S3Store(Store):
    """Keeps blobs in an S3 bucket.

    Any thread may call. The constructor does no I/O; the first call makes the clients. ``_ways`` remembers
    which requests the server refuses. ``capabilities.exclusive_create`` may become False.

    Args:
        options: bucket, endpoint and request settings.
        clock: returns monotonic seconds.
        sleep: pauses between attempts.
        rng: returns numbers in 0..1 for the jitter.
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
        self._ways = PutWays(clock)
        self._warned: set[str] = set()
        self._attempts = Attempts(options, clock=clock, sleep=sleep, rng=rng)

    def __repr__(self) -> str:
        return f"S3Store({self.options.bucket!r}, prefix={self.options.prefix!r})"

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        return self._put(key, _as_bytes(parts), create=not overwrite)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self._get_into(key, parts, None)

    def put_pieces(self, key: str, parts: Sequence[memoryview], look: Look, *, overwrite: bool = False) -> bool:
        """See ``SupportsPieces``. ``look`` sees all parts before a client reads any."""
        look_at(look, 0, _as_bytes(parts))
        return self.put(key, parts, overwrite=overwrite)

    def get_pieces_into(self, key: str, parts: Sequence[memoryview], look: Look) -> None:
        """See ``SupportsPieces``."""
        raised: list[BaseException] = []

        def look_safely(offset: int, piece: memoryview) -> None:  # an error of ``look`` must not break the transfer
            if not raised:
                try:
                    look(offset, piece)
                except BaseException as e:  # noqa: BLE001 - raised below
                    raised.append(e)

        self._get_into(key, parts, look_safely)
        if raised:
            raise raised.pop()  # not kept: its traceback refers to this frame, and thereby to the caller's memory

    def size(self, key: str) -> int | None:
        return self._size(key, self._attempts.latest_start())

    def delete(self, key: str) -> None:
        name = self._name(key)
        self._attempts.run(key, lambda clients: clients.control.delete(name))

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        """List blobs, 1,000 per request. Skip objects whose names are not valid keys, such as folder markers."""
        if "//" in f"/{prefix}":  # no key has such a prefix, and some servers take it for "/"
            return
        root = self.options.object_key("")
        for objects, _ in self._pages(root + prefix):
            for info in objects:
                key = info.key[len(root) :]
                try:
                    check_key(key)
                except InvalidKeyError:
                    continue
                yield KeyInfo(key, info.size, info.mtime)

    def close(self) -> None:
        self._attempts.close()

    def prepare(self) -> None:
        """See ``Store``."""
        with contextlib.suppress(StoreError):
            self._attempts.raise_if_closed()  # a closed store would never close the new clients
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
                pass  # the object is empty and has no ranges, or the server ignores ranges
        size = self._size(key, latest_start)
        if size is None or min(size, length) == 0:
            return None if size is None else (size, b"")
        if size > SKIPPED_BYTES_MAX:
            raise BlobCorruptError(f"{size} bytes are stored, and the server ignores ranges", key=key)
        # All bytes before the tail go into one scratch buffer: only the server vouches for the size, which may be huge.
        tail = bytearray(min(size, length))
        skipped, rest = divmod(size - len(tail), SCRATCH_BYTES)
        scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._get_into(key, [*[scratch] * skipped, scratch[:rest], memoryview(tail)], None, latest_start)
        return size, bytes(tail)

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        """See ``Store``. After ``request_timeout_s`` without a response, the remaining keys get StoreTimeoutErrors.

        Sends a HEAD for each key. A LIST is cheaper only in a namespace with few blocks: names are hashes, so a page of
        1,000 names from a large namespace holds few of the wanted names. SeaweedFS took 0.2 to 0.7 s for a LIST of
        1,000 blocks.
        """
        self._attempts.raise_if_closed()
        answers: dict[str, int | Exception | None] = {}
        answered_at = self._clock()

        async def look_up(name: str) -> int | None:
            nonlocal answered_at
            if self._clock() - answered_at > self.options.request_timeout_s:
                raise StoreTimeoutError("not asked: the server stopped answering", key=names[name])
            size = await self._ask_size(names[name], name, threads)
            answered_at = self._clock()
            return size

        names = self._names(keys, answers)
        with Threads("kvtiers-s3-head") as threads:
            found = run_all(look_up, names, self.options.max_connections, self._clock)
        answers.update((key, found[name]) for name, key in names.items())
        return [answers[key] for key in keys]

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        """See ``Store``. Deletes 1,000 keys per request, or a single key if the server refuses batches."""
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
        """Verify the endpoint, credentials, clock, bucket and region with one request.

        The request runs in its own thread, because resolving an unknown host name can block for half a minute.

        Raises:
            StoreError: within ``CHECK_S_MAX``. Its message is one line that begins with the cause (endpoint, proxy,
                secret, clock, bucket or region) and says how to fix it.
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

    @property
    def checksum_refused(self) -> bool:
        """Whether the server has refused puts because of their checksum; payloads have been signed since."""
        return self._ways.first_form is not PutForm.CHECKED

    def folders(self) -> list[str]:
        """List the first components of all keys, with one request per 1,000 of them.

        Raises:
            StoreError: the bucket cannot be listed.
        """
        own = self.options.object_key("")
        return [name[len(own) : -1] for _, folders in self._pages(own, "/") for name in folders]

    def keeps_versions(self) -> bool:
        """Whether the bucket keeps old versions of blobs, and no lifecycle rule for the whole prefix removes them.

        Raises:
            StoreError: the bucket's settings cannot be read, which needs a separate permission.
        """
        return self._attempts.run("", lambda clients: clients.control.keeps_versions())

    # -- private ---------------------------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        name = self.options.object_key(check_key(key))
        if len(name) > KEY_PART_LENGTH_MAX and len(name.encode()) > KEY_LENGTH_MAX:
            raise InvalidKeyError(f"longer than {KEY_LENGTH_MAX} bytes with its prefix", key=key)
        return name

    def _names(self, keys: Sequence[str], outcomes: MutableMapping[str, Any]) -> dict[str, str]:
        """Map object names to keys, each once. An invalid key gets its error in ``outcomes`` instead."""
        names: dict[str, str] = {}
        for key in dict.fromkeys(keys):
            try:
                names[self._name(key)] = key
            except InvalidKeyError as e:
                outcomes[key] = e
        return names

    def _put(self, key: str, plain: list[memoryview], *, create: bool) -> bool:
        """Put a blob in the first way that the server accepts."""
        latest_start = self._attempts.latest_start()
        name = self._name(key)
        refusals: dict[PutWay, StoreError] = {}
        may_exist = create
        for way in self._ways.to_try(create=create):
            if refusals and not self._may_go_on(refusals, way, latest_start):
                break
            if may_exist and not way.create:
                if self._size(key, latest_start) is not None:
                    return False
                may_exist = False
            try:
                published = self._put_in(way, key, name, plain, latest_start)
            except REFUSALS as e:
                refusals[way] = e.with_traceback(None)
                continue
            self._ways.accepted(way, refusals)
            if refusals:
                self._tell_refusals(way, refusals)
            return published
        if self._clock() <= latest_start:
            self._ways.all_refused()
        # The first refusal says most about the cause. Raise a copy: the original would get a traceback that refers to
        # this frame, and this cycle would hold the caller's memory until the next garbage collection.
        raise copy.copy(next(iter(refusals.values())))

    def _may_go_on(self, refusals: dict[PutWay, StoreError], way: PutWay, latest_start: float) -> bool:
        """Whether the server may accept ``way`` after these refusals, and there is time for it."""
        last, error = next(reversed(refusals.items()))
        is_futile = self._ways.are_all_refused or not may_depend_on_way(error, last, way)
        return not is_futile and self._clock() <= latest_start

    def _tell_refusals(self, taken: PutWay, refused: Collection[PutWay]) -> None:
        """Log once that the server refused some ways. ``taken``: the way that the server accepted."""
        if any(way.create == taken.create for way in refused):
            self._warn_once(describe_refusal(taken.form))
        if not taken.create and any(way.create for way in refused):
            self.capabilities = replace(self.capabilities, exclusive_create=False)
            self._warn_once("the server refuses If-None-Match; each put first checks for the object")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%r: %s", self, text)

    def _put_in(self, way: PutWay, key: str, name: str, plain: list[memoryview], latest_start: float) -> bool:
        def send(clients: Clients) -> bool:
            try:
                return clients.data.put(name, plain, create=way.create, form=way.form)
            except (RequestRefusedError, StorePermissionError) as e:
                raise with_asked_for(e, self.options) from None

        return self._attempts.run(key, send, latest_start)

    def _pages(self, prefix: str, delimiter: str = "") -> Iterator[tuple[list[KeyInfo], list[str]]]:
        """List the objects and folders below a prefix, by their whole names, 1,000 per request."""

        def list_page(token: str) -> Page:
            return self._attempts.run("", lambda clients: clients.control.list_page(prefix, delimiter, token))

        return follow(list_page, self.options.endpoint_url or "the endpoint")

    def _delete_batch(self, names: Sequence[str]) -> dict[str, StoreError]:
        try:
            return self._attempts.run("", lambda clients: clients.control.delete_batch(names))
        except RequestRefusedError:  # MissingContentMD5, NotImplemented and the like
            return self._delete_each(names)

    def _delete_each(self, names: Sequence[str]) -> dict[str, StoreError]:
        """Delete objects one by one, for servers that refuse DeleteObjects. Returns the errors of objects not deleted.

        A retryable error was already retried. So after such an error the remaining objects are not tried.
        """
        failed: dict[str, StoreError] = {}
        lasting: list[StoreError] = []
        waiting = iter(list(names))  # next() on a list iterator is atomic

        def delete(name: str) -> None:
            if lasting:
                failed[name] = lasting[0]
                return
            try:
                self._attempts.run("", lambda clients: clients.control.delete(name))
            except StoreError as e:
                failed[name] = e.with_traceback(None)  # the traceback refers to ``failed``
                if e.retryable:
                    lasting.append(e)

        def delete_waiting() -> None:
            for name in waiting:
                delete(name)

        others = []
        with contextlib.suppress(StoreUnavailableError):  # without further threads, fewer threads work
            for _ in range(min(DELETERS_MAX, len(names)) - 1):
                others.append(begin("kvtiers-s3-delete", delete_waiting))
        try:
            delete_waiting()
        except BaseException:  # such as Ctrl-C: the other threads end after their current objects
            lasting.append(StoreUnavailableError("interrupted"))
            raise
        for other in others:
            other.result()
        return failed

    def _get_into(
        self, key: str, parts: Sequence[memoryview], look: Look | None, latest_start: float | None = None
    ) -> None:
        name = self._name(key)
        plain = _as_bytes(parts)
        size = parts_size(plain)
        self._attempts.run(key, lambda clients: clients.data.get_into(name, plain, size, look), latest_start)

    async def _ask_size(self, key: str, name: str, threads: Threads) -> int | None:
        """``size`` as a coroutine (see ``polling``). Anything beyond a HEAD on an idle connection runs in a thread."""
        latest_start = self._attempts.latest_start()
        failed: StoreError | None = None
        try:
            return await self._attempts.try_now(lambda clients: clients.data.ask_size(name))
        except OSError:
            pass
        except StoreError as e:
            failed = e.with_traceback(None)
        return await threads.run(lambda: self._size(key, latest_start, failed))

    def _size(self, key: str, latest_start: float, failed: StoreError | None = None) -> int | None:
        """See ``size``. ``failed``: see ``Attempts.run``."""
        name = self._name(key)
        try:
            return self._attempts.run(key, lambda clients: clients.data.size(name), latest_start, failed)
        except (RequestRefusedError, BareRefusalError) as e:
            refused = e.with_traceback(None)
        # The response to a HEAD has no body, so an expired session token is a bare 400. A GET returns the reason.
        if self._clock() <= latest_start:
            with contextlib.suppress(BlobCorruptError):  # the object is empty, or the server ignores ranges
                tail = self._attempts.run(key, lambda clients: clients.data.get_tail(name, 1), latest_start)
                return tail and tail[0]
        raise copy.copy(refused)  # a copy, as in ``_put``, which may be the caller


def _as_bytes(parts: Sequence[memoryview]) -> list[memoryview]:
    """The non-empty parts as views of unsigned bytes, so that a view's length is its size in bytes."""
    return [part.cast("B") for part in parts if part.nbytes]
