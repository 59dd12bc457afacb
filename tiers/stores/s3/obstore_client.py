"""ObstoreClient: S3's data plane on obstore (Rust's object_store), with ``DirectReader`` for whole objects.

What obstore 0.12 can and cannot do, as measured and as its source says:

- A put takes the parts where they are in memory; nothing is joined or copied. Its checksums are crc64nvme and sha256.
- ``timeout`` limits a whole request, from connecting to the last byte of the body, however slowly bytes arrive.
- Errors are a few classes and a text. We parse the text only if the class is not enough, and then only for the HTTP
  status and S3's ``<Code>``.
- Its runtime does not survive a fork: in the child of a process that has used it, every call hangs (see ``usable``).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit
from urllib.request import getproxies

import botocore.session
import obstore
from botocore.credentials import EnvProvider
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store as ObstoreS3

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, S3Config

from ...errors import (
    BlobCorruptError,
    BlobNotFoundError,
    InvalidKeyError,
    StoreConfigError,
    StoreError,
    StoreUnavailableError,
)
from ...store import Look
from .direct import DirectReader
from .errors import (
    NO_S3,
    connection_error,
    deadline_error,
    missing_header,
    server_error,
    tls_error,
    without_absence,
)
from .options import IDLE_S_MAX
from .put_form import CHECKSUM, PutForm
from .session import S3Session

_IMPORTED_BY_PID: Final = os.getpid()

# GenericError holds object_store's error only as text, so we parse text here. These are the texts of object_store 0.14;
# the fault tests fail if a later version changes them.
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
# Also an AlreadyExistsError, but it means that another operation on the key is in progress.
_CONFLICT = "Server returned non-2xx status code: 409"
# A 301 without Location: AWS's response for a bucket in another region.
_BARE_REDIRECT = "Received redirect without LOCATION"
# Status 200 instead of the expected 206.
_NOT_PARTIAL = "Received non-partial response when range requested"

_MISSING = re.compile(r"\b([A-Z][A-Za-z-]+) Header missing from response")
_CONNECTION_TEXT = "HTTP error: "
_TLS_TEXT = "InvalidCertificate"
# object_store's own words; the text after them may quote the server.
_WORDS = re.compile(r"Generic S3 error: ([A-Za-z -]{1,80})\b")

_STATUS_BY_CLASS: tuple[tuple[type[Exception], int], ...] = (
    (FileNotFoundError, 404),
    (AlreadyExistsError, 409),
    (PreconditionError, 412),
    (PermissionDeniedError, 403),
    (UnauthenticatedError, 401),
)


def usable() -> bool:
    """Whether this process may call obstore; False in a process forked after the import."""
    return os.getpid() == _IMPORTED_BY_PID


class ObstoreClient:
    """Data plane on obstore, without a proxy; each method makes one attempt. Any thread may call.

    Keys are the objects' whole names. Methods raise only StoreError. Only ``_signed`` changes: it is made on first use.
    """

    def __init__(self, session: S3Session, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._options = session.options
        self._clock = clock
        self._plain = self._make(None)
        self._checked = self._make(CHECKSUM, signed=False)
        storage_class = session.options.storage_class
        self._direct = DirectReader(session, clock=clock)
        self._attributes = {"Storage-Class": storage_class} if storage_class else {}

    def put(
        self,
        key: str,
        parts: Sequence[memoryview],
        *,
        create: bool,
        form: PutForm,
        metadata: Mapping[str, str] | None = None,
    ) -> bool:
        """See ``DataPlane``."""
        store = {PutForm.CHECKED: self._checked, PutForm.PLAIN: self._plain}.get(form) or self._signed
        started = self._clock()
        try:
            obstore.put(
                store,
                key,
                parts,
                attributes={**self._attributes, **(metadata or {})},
                mode="create" if create else "overwrite",
                use_multipart=False,
            )
        except AlreadyExistsError as e:
            if not create or _CONFLICT in str(e):
                raise self._translate(e, started) from None
            return False
        except (BaseError, OSError, ValueError) as e:
            raise without_absence(self._translate(e, started), self._session.place) from None
        return True

    def get_into(self, key: str, parts: Sequence[memoryview], size: int, look: Look | None = None) -> None:
        """See ``DataPlane``."""
        self._direct.get_into(key, parts, size, look)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """See ``DataPlane``."""
        started = self._clock()
        try:
            result = obstore.get(self._plain, key, options={"range": {"suffix": length}})
            return self._size_of(result.meta), bytes(result.bytes())
        except (BaseError, OSError, ValueError) as e:
            self._raise_unless_absent(e, started)
            return None

    def size(self, key: str) -> int | None:
        """See ``DataPlane``."""
        started = self._clock()
        try:
            return self._size_of(obstore.head(self._plain, key))
        except (BaseError, OSError, ValueError) as e:
            self._raise_unless_absent(e, started)
            return None

    def close(self) -> None:
        """Close the direct reader's connections. obstore closes its own when it is garbage-collected."""
        self._direct.close()

    # -- private ---------------------------------------------------------------------------------------------------

    @cached_property
    def _signed(self) -> ObstoreS3:
        return self._make("sha256")

    def _make(self, checksum: str | None, *, signed: bool = True) -> ObstoreS3:
        options = self._options
        session = self._session
        scheme, _, rest = session.endpoint_url.partition("://")
        client: ClientConfig = {
            "allow_http": scheme == "http",
            "connect_timeout": timedelta(seconds=options.connect_timeout_s),
            "timeout": timedelta(seconds=options.attempt_timeout_s),
            "pool_max_idle_per_host": str(options.max_connections),
            "pool_idle_timeout": timedelta(seconds=IDLE_S_MAX),
            "user_agent": "kvtiers",
        }
        if getproxies():  # they do not apply to this endpoint, but reqwest would use them unless given a proxy_url
            client["proxy_url"] = session.endpoint_url
            client["proxy_excludes"] = f"*,{urlsplit(session.endpoint_url).hostname}"  # "*" covers names, not addresses
        if scheme == "https":
            client["root_certificate"] = session.ca_pem
        endpoint = f"{scheme}://{options.bucket}.{rest}" if session.virtual_host else session.endpoint_url
        config: S3Config = {
            "region": session.region,
            "endpoint": endpoint,
            # Otherwise AWS_ENDPOINT_URL_S3 in the environment would override ``endpoint``.
            "aws_endpoint_url_s3": endpoint,
            "virtual_hosted_style_request": session.virtual_host,
            "unsigned_payload": not signed,
        }
        if checksum is not None:
            config["checksum_algorithm"] = checksum
        if options.encryption is not None:
            config["server_side_encryption"] = options.encryption
        if options.kms_key is not None:
            config["sse_kms_key_id"] = options.kms_key
        try:
            with hidden_from_obstore():
                return ObstoreS3(
                    options.bucket,
                    config=config,
                    client_options=client,
                    retry_config={"max_retries": 0},  # S3Store itself retries, for both clients
                    credential_provider=session.credentials,
                )
        except (BaseError, ValueError):
            is_tls = scheme == "https"
            what = f"ca_bundle: a certificate of {session.ca_path}" if is_tls else "endpoint: this configuration"
            raise StoreConfigError(f"{what} is not accepted by obstore") from None

    def _size_of(self, found: ObjectMeta) -> int:
        if found["e_tag"] is None:  # a web page with status 200, not from S3
            raise missing_header("ETag", self._session.place)
        return found["size"]

    def _raise_unless_absent(self, error: Exception, started: float) -> None:
        """Raise unless the error is a 404 for the key, not the bucket. A HEAD's has no body; it counts as the key's."""
        translated = self._translate(error, started)
        if not isinstance(translated, BlobNotFoundError):
            raise translated from None

    def _translate(self, error: Exception, started: float) -> StoreError:
        place = self._session.place
        known = self._session.credentials_error  # read once: another thread's refresh may clear it
        if isinstance(error, UnauthenticatedError) and known is not None:
            return type(known)(str(known))
        if isinstance(error, ValueError):
            return InvalidKeyError("obstore does not accept this key")
        text = str(error).partition("\n\nDebug source")[0]
        code = _CODE.search(text)
        for kind, status in _STATUS_BY_CLASS:
            if isinstance(error, kind):
                return server_error(status, code[1] if code else "", place=place)
        found = _STATUS.search(text)
        if found:
            return server_error(int(found[1]), code[1] if code else "", place=place)
        if _NOT_PARTIAL in text:
            return BlobCorruptError("the server sent more than the requested range")
        if _BARE_REDIRECT in text:
            return server_error(301, "PermanentRedirect", place=place)
        missing = _MISSING.search(text)
        if missing:
            return missing_header(missing[1], place)
        if self._clock() - started >= self._options.attempt_timeout_s:
            return deadline_error(self._options.attempt_timeout_s, place)
        if _CONNECTION_TEXT not in text:
            said = _WORDS.match(text)
            return StoreUnavailableError(NO_S3.format(place.endpoint_url) + (f" (obstore: {said[1]})" if said else ""))
        if _TLS_TEXT in str(error):
            return tls_error(str(error), place)
        return connection_error(place)


_environment_lock = threading.Lock()  # guards the changes that this module makes to the C library's environment

_READ_BY_BOTO3: Final = frozenset(
    (
        EnvProvider.ACCESS_KEY,
        EnvProvider.SECRET_KEY,
        *EnvProvider.TOKENS,
        *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
        *("AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
        *("AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME", "AWS_WEB_IDENTITY_TOKEN_FILE"),
        *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS", "AWS_REGION"),
        *(
            name
            for _, variable, _, _ in botocore.session.Session.SESSION_VARIABLES.values()
            for name in ([variable] if isinstance(variable, str) else variable or [])
        ),
    )
)


@contextmanager
def hidden_from_obstore() -> Iterator[None]:
    """Hide ``AWS_…`` variables that boto3 does not read from the C library. ``os.environ`` is unchanged.

    object_store treats every such variable that it knows as an option. Explicit options override most of them, but some
    (checksum, encryption) have no value for "not set", and the next release may read more variables. Variables that
    boto3 and its credential programs read stay, because we set every obstore option that they correspond to.
    """
    with _environment_lock:
        names = [name for name in os.environ if name.startswith("AWS_") and name not in _READ_BY_BOTO3]
        hidden = {name: value for name in names if (value := os.environ.get(name)) is not None}
        try:
            for name in hidden:
                os.unsetenv(name)
            yield
        finally:
            for name, value in hidden.items():
                os.putenv(name, value)
