"""S3Session: credentials and proxy for an S3 bucket, and boto3's clients. One per process: nothing survives a fork.

boto3's credential chain supports all usual sources (environment, profiles, SSO, assume-role, web identity, container
and instance metadata, ``credential_process``) and refreshes credentials. The data plane uses the same chain.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies

import boto3
import botocore.session
from botocore import exceptions as boto_errors
from botocore.config import Config
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.httpsession import get_cert_path

from ...errors import ConfigError, StoreConfigError, StoreError
from ..chatty_loggers import cap_chatty_loggers
from ..watchdog import begin
from .boto_config import BotoConfig
from .boto_errors import translate, translate_chain
from .boto_http import BoundedHttp
from .errors import CredentialsLateError, Place
from .options import IDLE_S_MAX, S3Options, check_endpoint, without_bucket
from .proxies import check_proxy, name_proxy, proxy_of

DEFAULT_REGION = "us-east-1"
# As in botocore: before credentials with less time left are used, the chain is asked for better ones.
GOOD_S_MIN: Final = 600.0
#: In the last 15 minutes before expiry, botocore would ask the chain on every request. That is useless if credentials
#: are issued for less time, or if the chain returns the same ones until 5 minutes before expiry.
ASK_EVERY_S: Final = 30.0


class S3Session:
    """Credentials and boto3 clients of one bucket. Any thread may call.

    Only ``_client`` and boto3's own caches change, under locks. The client is made on first use: boto3 takes 0.2 s of
    CPU and 15 MB to read S3's API, which a process does not need that only moves blocks of a known endpoint.

    All clients trust the system's certificate authorities (including ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``) and those
    in the file ``ca_path``. The file is the first of these that is set: the option ``ca_bundle``, ``AWS_CA_BUNDLE`` or
    the profile's ``ca_bundle``, ``REQUESTS_CA_BUNDLE``, botocore's own bundle.

    Args:
        options: bucket, endpoint and request settings.

    Raises:
        StorePermissionError: the credential chain found no credentials, or failed.
        StoreConfigError: the profile does not exist, or S3Options would refuse the endpoint from the environment.
    """

    def __init__(self, options: S3Options) -> None:
        cap_chatty_loggers()
        self.options = options
        self._proxies: dict[str, str] | None = None
        self._endpoint_url = options.endpoint_url
        self._bucket_in_host = False
        self.http = BoundedHttp(options.attempt_timeout_s)
        self._client: Any = None
        self._making = threading.Lock()
        # For error messages. Until the client is made, only the options are known.
        source = BotoConfig(options.profile)
        self.place = Place(options.bucket, options.region or "", options.endpoint_url or "AWS", str(source))
        try:
            session = self._make_botocore_session(source)
            self._session = boto3.Session(botocore_session=session)
            self.region: str = options.region or session.get_config_variable("region") or DEFAULT_REGION
            source.check_region(self.region)
            session.set_config_variable("region", self.region)  # for STS, where the profile assumes a role
            chain = self._find_credentials(session)
            if chain is not None:
                source.refuse_mfa(session, chain)
                self._credentials = ChainCredentials(
                    chain, self._translate_chain, options.attempt_timeout_s, check=source.check
                )
                session.register_component("credential_provider", _Fixed(self._credentials))  # for clients
            self.ca_path: str = (
                options.ca_bundle
                or session.get_config_variable("ca_bundle")
                or os.environ.get("REQUESTS_CA_BUNDLE")  # as in botocore, the last source before its own bundle
                or get_cert_path(True)
            )
            _check_ca_bundle(self.ca_path)
            if chain is None:
                raise boto_errors.NoCredentialsError
            endpoint_url = options.endpoint_url
            if endpoint_url is None:  # the environment or the profile may give it, and a client knows
                self._client = self.make_client()
                endpoint_url = self._client.meta.endpoint_url
        except boto_errors.BotoCoreError as e:
            raise self.translate(e) from None
        except ValueError:  # boto3 raises it if the endpoint of the environment or the profile is not a URL
            raise StoreConfigError(source.explain_endpoint()) from None
        self.endpoint_url, self._bucket_in_host = without_bucket(endpoint_url, options.bucket)
        self.place = replace(self.place, region=self.region, endpoint_url=self.endpoint_url)
        try:
            check_endpoint(self.endpoint_url, allow_insecure=options.allow_insecure)
        except ConfigError as e:  # S3Options checked its own field; this may come from the environment or profile
            raise StoreConfigError(f"endpoint: {e}") from None
        self.proxy = proxy_of(self.endpoint_url)
        if self.proxy is not None:
            check_proxy(self.proxy)
            self.place = replace(self.place, proxy=name_proxy(self.proxy))
        proxies = getproxies()
        if proxies:  # the first client has read them in its own way
            self._proxies = {urlsplit(self.endpoint_url).scheme: self.proxy} if self.proxy else {}
        is_other = self.endpoint_url != endpoint_url
        if is_other:
            self._endpoint_url = self.endpoint_url
        if proxies or is_other:
            self._client = None

    @property
    def client(self) -> Any:
        """boto3's client of S3, which signs payloads.

        Raises:
            StoreError: boto3 does not accept its configuration.
        """
        with self._making:
            if self._client is None:
                try:
                    self._client = self.make_client()
                except (boto_errors.BotoCoreError, ValueError) as e:
                    raise self.translate(e) from None
            return self._client

    @property
    def is_aws(self) -> bool:
        """Whether the endpoint is AWS's own."""
        host = urlsplit(self.endpoint_url).hostname or ""
        return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu"))

    @property
    def virtual_host(self) -> bool:
        """Whether objects are addressed as bucket.endpoint/key."""
        # No wildcard certificate covers a bucket's name with dots.
        return self._bucket_in_host or (self.is_aws and "." not in self.options.bucket)

    def credentials(self) -> ReadOnlyCredentials:
        """Credentials that are valid now. See ``ChainCredentials.get_frozen_credentials``."""
        return self._credentials.get_frozen_credentials()

    def make_client(self, *, sign_payload: bool = True) -> Any:
        """Make a boto3 client. ``sign_payload``: the signature covers the payload's SHA-256, otherwise its checksum."""
        options = self.options
        # auto: as in virtual_host, virtual on AWS and path elsewhere.
        style = {
            "addressing_style": "virtual" if self._bucket_in_host else "auto",
            "payload_signing_enabled": sign_payload,
        }
        client = self._session.client(
            "s3",
            region_name=self.region,
            endpoint_url=self._endpoint_url,
            verify=self.ca_path,
            config=Config(
                connect_timeout=options.connect_timeout_s,
                read_timeout=options.attempt_timeout_s,
                retries=_ONE_ATTEMPT,  # S3Store itself retries, for both clients
                max_pool_connections=options.max_connections,
                proxies=self._proxies,
                s3=style,
                # We send our own checksum with each put, and verify blobs that we read by their seal.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                tcp_keepalive=True,
                user_agent_extra="kvtiers",
            ),
        )
        client.meta.events.register("before-call.s3.HeadBucket", _stop_redirects)
        client.meta.events.register("before-send.s3", _IdleLimit(client))
        client.meta.events.register("before-sign.s3.PutObject", _drop_expect_header)
        return client

    def translate(self, error: Exception) -> StoreError:
        """Translate a botocore exception into ours."""
        return translate(error, self.place, self.options.attempt_timeout_s)

    def close(self) -> None:
        """Close idle connections and end the watchdog."""
        with self._making:
            if self._client is not None:
                self._client.close()
        self.http.close()

    # -- private ---------------------------------------------------------------------------------------------------

    def _make_botocore_session(self, source: BotoConfig) -> botocore.session.Session:
        options = self.options
        session = source.make_session(self.http)
        # For the STS, SSO and web identity clients that the chain makes: a refresh must also end within an attempt.
        session.set_default_client_config(
            Config(
                connect_timeout=options.connect_timeout_s, read_timeout=options.attempt_timeout_s, retries=_ONE_ATTEMPT
            )
        )
        return session

    def _find_credentials(self, session: botocore.session.Session) -> Any:
        try:
            return session.get_component("credential_provider").load_credentials()
        except Exception as e:  # noqa: BLE001 - bad helper output or files can make the chain raise any exception
            raise self._translate_chain(e) from None

    def _translate_chain(self, error: Exception) -> StoreError:
        return translate_chain(error, self.place, self.options.attempt_timeout_s)


def _check_ca_bundle(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        raise StoreConfigError(f"ca_bundle: {path} does not hold valid certificates in PEM form") from None
    except OSError as e:
        raise StoreConfigError(f"ca_bundle: {path} cannot be read: {e.strerror}") from None


class _Fixed:
    """A credential chain that always returns the given credentials."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def load_credentials(self) -> Credentials:
        return self._credentials


class _IdleLimit:
    """Event handler called before each request. Closes the client's idle connections every ``IDLE_S_MAX``.

    urllib3 keeps idle connections forever and does not expose their age. Connections in use are not affected.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._closed_at = time.monotonic()

    def __call__(self, **_: Any) -> None:
        now = time.monotonic()
        if now - self._closed_at > IDLE_S_MAX:
            self._closed_at = now
            self._client.close()


def _stop_redirects(context: dict[str, Any], **_: Any) -> None:
    """Keep botocore from following redirects of its own HEAD request for a bucket's region, which would recurse."""
    context.get("s3_redirect", {})["redirected"] = True


def _drop_expect_header(request: Any, **_: Any) -> None:
    """Drop ``Expect: 100-continue``: it costs a round trip per put, or 1 s if a server or proxy never answers it."""
    del request.headers["Expect"]


_ONE_ATTEMPT = {"total_max_attempts": 1, "mode": "standard"}


class ChainCredentials(Credentials):  # type: ignore[misc] # botocore has no types
    """Credentials from boto3's chain, for botocore's clients in threads that cannot wait long.

    botocore refreshes credentials in the thread that signs a request, under a lock and without a time limit. A helper
    that hangs would block all threads, although the old credentials are still valid for the last ten minutes before
    expiry. Any thread may call; ``_lock`` guards ``_asked`` and ``_asked_at``.

    One thread at a time asks the chain on behalf of all; ``_frozen`` holds the last answer.

    Args:
        chain: botocore's credentials, which may refresh themselves.
        translate: turns an exception of the chain into ours.
        timeout_s: longest wait for the chain.
        clock: returns monotonic seconds.
        check: raises a StoreError for unusable credentials.
    """

    def __init__(
        self,
        chain: Any,
        translate: Callable[[Exception], StoreError],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        check: Callable[[ReadOnlyCredentials, str], None] = lambda *_: None,
    ) -> None:
        super().__init__("", "", method=chain.method)
        self._check = check
        self._chain = chain
        self._translate = translate
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._frozen: ReadOnlyCredentials | None = None
        if not self._ends_within(None):
            self._ask()
        self._asked: Future[ReadOnlyCredentials] | None = None
        self._asked_at = 0.0

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Get credentials that are valid now, and for ``GOOD_S_MIN`` more if the chain answers in time.

        Raises:
            StoreError: the chain failed or is late, and its earlier credentials have expired.
        """
        with self._lock:
            is_idle = self._asked is None or self._asked.done()
            frozen = self._frozen  # read after ``is_idle``, or a new answer might be requested again
            if frozen is not None and not self._ends_within(None):
                return frozen
            is_good = frozen is not None and not self._ends_within(0)
            if is_good and is_idle and self._asked is not None and self._clock() - self._asked_at < ASK_EVERY_S:
                assert frozen is not None
                return frozen
            if self._asked is None or is_idle:
                self._asked = begin("kvtiers-s3-credentials", self._ask)
                self._asked_at = self._clock()
            asked = self._asked
            wait_s = self._asked_at + self._timeout_s - self._clock()
        if frozen is not None and not self._ends_within(GOOD_S_MIN):
            return frozen
        if wait([asked], max(0.0, wait_s)).done:
            error = asked.exception()  # not raised itself: its traceback would hold every waiting caller's memory
            if error is None:
                return asked.result()
            if frozen is not None and not self._ends_within(0):
                return frozen
            if isinstance(error, StoreError):
                raise type(error)(str(error))  # a copy for each caller: raising adds to the traceback
            raise self._translate(error)  # type: ignore[arg-type] # the chain raises only Exceptions
        if frozen is None or self._ends_within(0):
            raise CredentialsLateError(
                f"secret: boto3's credential chain did not end within {self._timeout_s:.3g} s (credential_process, "
                "SSO, STS or metadata)"
            )
        return frozen

    def _ask(self) -> ReadOnlyCredentials:
        frozen = self._chain.get_frozen_credentials()
        self._check(frozen, self.method)
        self._frozen = frozen
        return frozen

    def _ends_within(self, seconds: float | None) -> bool:
        """Whether the chain's credentials expire within ``seconds``; None: so soon that it would refresh them."""
        refresh_needed = getattr(self._chain, "refresh_needed", None)  # static credentials lack it
        return refresh_needed is not None and bool(refresh_needed(seconds))
