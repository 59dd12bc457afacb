"""S3Session: credentials and the control plane of an S3 bucket, by boto3. One per process: nothing here survives fork.

boto3's credential chain covers what operators use (environment, profiles, SSO, assume-role, web identity, container and
instance metadata, ``credential_process``) and refreshes it. The data plane asks it for credentials; listing, batch
delete, checks and lifecycle rules are rare and done by it, each request in a thread of its own.
"""

from __future__ import annotations

import hashlib
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import boto3
import botocore.session
from botocore import exceptions as boto_errors
from botocore.config import Config
from botocore.credentials import Credentials, DeferredRefreshableCredentials, create_assume_role_refresher

if TYPE_CHECKING:
    from obstore.store import S3Credential

from tiers.errors import BlobNotFoundError, ConfigError, StoreConfigError, StoreError, StorePermissionError
from tiers.store import KeyInfo
from tiers.stores.chatty_loggers import cap_chatty_loggers
from tiers.stores.s3_boto_errors import BOTO_ERRORS, code_of, is_of_s3, translate
from tiers.stores.s3_credentials import ChainCredentials
from tiers.stores.s3_errors import NO_S3, Place, VagueRefusalError, deadline_error, server_error, without_absence
from tiers.stores.s3_options import IDLE_S_MAX, S3Options, check_endpoint
from tiers.stores.s3_proxy import proxy_of
from tiers.stores.watchdog import begin

DEFAULT_REGION = "us-east-1"
DELETE_KEYS_MAX = 1000  # S3's limit for one batch delete
# boto3 hands out credentials that are good for 10 more minutes. obstore asks again 5 minutes before this ends, so the
# chain is asked once a minute.
CREDENTIALS_TTL = timedelta(minutes=6)
LIFECYCLE_ID = "kvtiers"
RULE_DIGITS = 12  # of a rule's own in its ID, of which S3 takes 255 characters


class S3Session:
    """Any thread may call; nothing changes after the constructor but boto3's own caches, which lock themselves.

    Args:
        options: where and how.

    Raises:
        StorePermissionError: no credentials, or the chain failed to get them.
        StoreConfigError: no such profile; an endpoint from the environment that S3Options would refuse.
    """

    def __init__(self, options: S3Options) -> None:
        cap_chatty_loggers()
        self.options = options
        self._proxies: dict[str, str] | None = None
        # Until the client is made, what the options say is all there is to name in an error.
        self.place = Place(options.bucket, options.region or "", options.endpoint_url or "AWS")
        try:
            botocore_session = self._make_botocore_session()
            self._session = boto3.Session(botocore_session=botocore_session)
            self.region = options.region or self._session.region_name or DEFAULT_REGION
            chain = self._find_credentials(botocore_session)
            if chain is not None:
                self._credentials = ChainCredentials(chain, self.translate, options.attempt_timeout_s)
                botocore_session.register_component("credential_provider", _Fixed(self._credentials))  # for clients
            self.client = self.make_client(sign_payload=options.checksum == "none")
        except boto_errors.BotoCoreError as e:
            raise self.translate(e) from None
        except ValueError:  # boto3 checks an endpoint of the environment or the profile by hand
            raise StoreConfigError("endpoint: AWS_ENDPOINT_URL or the profile's endpoint_url is no URL") from None
        self.ca_path: str | None = options.ca_bundle or botocore_session.get_config_variable("ca_bundle")
        self.ca_pem = _read_ca_bundle(self.ca_path)
        if chain is None:
            raise StorePermissionError(
                "secret: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
            )
        self.endpoint_url: str = self.client.meta.endpoint_url
        self.place = Place(options.bucket, self.region, self.endpoint_url)
        try:
            check_endpoint(self.endpoint_url, allow_insecure=options.allow_insecure, virtual=self.virtual_host)
        except ConfigError as e:  # S3Options saw the option; the environment or the profile may name another one
            raise StoreConfigError(f"endpoint: {e}") from None
        self.proxy = proxy_of(self.endpoint_url)
        if getproxies():  # a client reads them by itself, and it took one to know the endpoint
            self._proxies = {urlsplit(self.endpoint_url).scheme: self.proxy} if self.proxy else {}
            self.client = self.make_client(sign_payload=options.checksum == "none")
        self._asking = threading.BoundedSemaphore(options.max_connections)
        #: Why the data plane got no credentials: it sees the exception of its provider as text only.
        self.credentials_error: StoreError | None = None

    @property
    def virtual_host(self) -> bool:
        """Whether objects are addressed as bucket.endpoint/key."""
        style = self.options.addressing_style
        return style == "virtual" or (style == "auto" and self._is_aws and "." not in self.options.bucket)

    def credentials(self) -> S3Credential:
        """Credentials that are good for some minutes; obstore's ``credential_provider``."""
        try:
            frozen = self._credentials.get_frozen_credentials()
        except StoreError as e:
            self.credentials_error = type(e)(str(e))  # never raised: a traceback holds its callers' memory
            raise
        self.credentials_error = None
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + CREDENTIALS_TTL,
        }

    def list_page(self, prefix: str, *, after: str = "", token: str = "") -> tuple[list[KeyInfo], str]:
        """Up to 1,000 objects, and the token of the next page, "" after the last. Keys are the objects' whole names.

        boto3's parser is slow (50 ms of CPU a page), but obstore refuses a page with a name like "a//b" on it.

        Args:
            after: list only names after this one, where the bucket lists in order.
            token: of the page before.
        """
        start = {"ContinuationToken": token} if token else {"StartAfter": after} if after else {}
        page = self._list(Prefix=prefix, **start)
        with self._as_no_s3():
            found = [KeyInfo(o["Key"], o["Size"], o["LastModified"].timestamp()) for o in page.get("Contents", ())]
        return found, self._next_token(page, token)

    def delete(self, key: str) -> None:
        """Delete an object by its whole name; absent is success. (obstore takes any page with status 200 for it.)"""
        try:
            answer = self._ask(self.client.delete_object, Bucket=self.options.bucket, Key=key)
        except BOTO_ERRORS as e:
            if not isinstance(error := self.translate(e), BlobNotFoundError):
                raise error from None
            return
        said = answer["ResponseMetadata"]
        if said["HTTPStatusCode"] != HTTPStatus.NO_CONTENT and "x-amz-request-id" not in said["HTTPHeaders"]:
            raise StoreConfigError(NO_S3.format(self.endpoint_url))

    def delete_batch(self, keys: Sequence[str]) -> dict[str, StoreError]:
        """Delete up to ``DELETE_KEYS_MAX`` objects by their whole names; the errors of those that are still there.

        Raises:
            VagueRefusalError: the answer names no object, so it may be no answer of S3's.
        """
        objects = [{"Key": key} for key in keys]
        try:
            # Not "Quiet": the answer would look like a page of HTML.
            answer = self._ask(self.client.delete_objects, Bucket=self.options.bucket, Delete={"Objects": objects})
        except BOTO_ERRORS as e:
            raise without_absence(self.translate(e), self.place) from None
        if not (answer.get("Deleted") or answer.get("Errors")):
            raise VagueRefusalError(NO_S3.format(self.endpoint_url))
        failed: dict[str, StoreError] = {}
        for error in answer.get("Errors", ()):
            code = code_of(error)
            if code != "NoSuchKey":
                # Of a server that does not say which key is still there, any may be.
                names = [error["Key"]] if error.get("Key") in keys else keys
                failed.update(dict.fromkeys(names, server_error(500, code, place=self.place)))
        return failed

    def check(self) -> None:
        """Ask the bucket one question that needs endpoint, credentials, clock, bucket and region to be right.

        Raises:
            StoreError: begins with what is wrong: endpoint, secret, clock, bucket or region.
        """
        answer = self._list(Prefix=self.options.prefix, MaxKeys=1)
        # boto3 follows a redirect to the right region by itself; obstore does not, and each request would pay for it.
        region = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", self.region)
        if region != self.region and self._is_aws:
            raise StoreConfigError(f"region: bucket {self.options.bucket} is in {region}; set region: {region}")

    def keeps_versions(self) -> bool:
        """Whether the bucket keeps what is deleted or replaced.

        Raises:
            StoreError: it does not say.
        """
        try:
            found = self._ask(self.client.get_bucket_versioning, Bucket=self.options.bucket)
        except BOTO_ERRORS as e:
            raise without_absence(self.translate(e), self.place) from None
        return bool(found.get("Status") == "Enabled")

    def list_folder(self, prefix: str) -> tuple[list[str], list[str]]:
        """What is right below a prefix, by name: folders, that is what has a "/" behind the name, and objects."""
        folders: list[str] = []
        objects: list[str] = []
        token = ""
        while True:
            start = {"ContinuationToken": token} if token else {}
            page = self._list(Prefix=prefix, Delimiter="/", **start)
            with self._as_no_s3():
                folders += [folder["Prefix"][len(prefix) : -1] for folder in page.get("CommonPrefixes", ())]
                objects += [found["Key"][len(prefix) :] for found in page.get("Contents", ())]
            token = self._next_token(page, token)
            if not token:
                return folders, objects

    def expire_after(self, days: int | None, beginnings: Sequence[str]) -> None:
        """Have the bucket delete what lies below the prefix under names that begin so ``days`` after it was written.

        All rules of ours for the prefix are replaced; None leaves none. Other rules stay.

        Raises:
            ValueError: ``days`` is below 1, S3's unit.
            StoreError: the bucket refused.
        """
        bucket = self.options.bucket
        rule_id = f"{LIFECYCLE_ID}:{self.options.prefix}"
        # Without the digits it is the one rule for all of the prefix that was made once, whoever else is in there.
        ours = re.compile(re.escape(rule_id) + f"(:[0-9a-f]{{{RULE_DIGITS}}})?")
        new = []
        if days is not None:
            own = f"{self.options.prefix}/" if self.options.prefix else ""
            for beginning in beginnings:
                digits = hashlib.sha256(beginning.encode()).hexdigest()[:RULE_DIGITS]
                new.append(lifecycle_rule(f"{rule_id}:{digits}", own + beginning, days))
        try:
            found = self._ask(self.client.get_bucket_lifecycle_configuration, Bucket=bucket)
        except boto_errors.ClientError as e:
            if code_of(e.response.get("Error", {})) != "NoSuchLifecycleConfiguration":
                raise without_absence(self.translate(e), self.place) from None
            found = {}
        except BOTO_ERRORS as e:
            raise self.translate(e) from None
        before = found.get("Rules", [])
        # Of the bucket's own, and back to AWS's default if it is left out.
        also = {name: found[name] for name in ("TransitionDefaultMinimumObjectSize",) if name in found}
        rules = [rule for rule in before if not ours.fullmatch(rule.get("ID", ""))] + new
        try:
            if rules:
                change = self.client.put_bucket_lifecycle_configuration
                self._ask(change, Bucket=bucket, LifecycleConfiguration={"Rules": rules}, **also)
            elif before:
                self._ask(self.client.delete_bucket_lifecycle, Bucket=bucket)
        except BOTO_ERRORS as e:
            raise self.translate(e) from None

    def make_client(self, *, sign_payload: bool) -> Any:
        """A boto3 client. With ``sign_payload`` the signature covers the payload's SHA-256, otherwise its checksum."""
        options = self.options
        style = {"addressing_style": options.addressing_style, "payload_signing_enabled": sign_payload}
        client = self._session.client(
            "s3",
            region_name=self.region,
            endpoint_url=options.endpoint_url,
            verify=options.ca_bundle if options.verify else False,  # None: AWS_CA_BUNDLE, the profile's, or the usual
            config=Config(
                connect_timeout=options.connect_timeout_s,
                read_timeout=options.attempt_timeout_s,
                retries=_ONE_ATTEMPT,  # S3Store retries, for both clients alike
                max_pool_connections=options.max_connections,
                proxies=self._proxies,
                s3=style,
                # Our own checksum is sent with every put; the seal proves what is read.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                tcp_keepalive=True,
                user_agent_extra="kvtiers",
            ),
        )
        client.meta.events.register("before-call.s3.HeadBucket", _follow_no_redirect)
        client.meta.events.register("before-send.s3", _IdleLimit(client))
        client.meta.events.register("before-sign.s3.PutObject", _expect_no_continue)
        return client

    def translate(self, error: Exception) -> StoreError:
        """Our exception for one of botocore's."""
        return translate(error, self.place, self.options.attempt_timeout_s)

    def close(self) -> None:
        """Close idle connections."""
        self.client.close()

    # -- private ---------------------------------------------------------------------------------------------------

    def _make_botocore_session(self) -> botocore.session.Session:
        options = self.options
        session = botocore.session.Session(profile=options.profile)
        # STS, SSO and web identity clients that the chain makes: a refresh must end within an attempt, too.
        session.set_default_client_config(
            Config(
                connect_timeout=options.connect_timeout_s, read_timeout=options.attempt_timeout_s, retries=_ONE_ATTEMPT
            )
        )
        if options.role_arn is not None:
            session.register_component("credential_provider", _Fixed(self._find_credentials(session)))
            region = options.region or session.get_config_variable("region") or DEFAULT_REGION
            sts = session.create_client("sts", region_name=region)
            refresh = create_assume_role_refresher(
                sts, {"RoleArn": options.role_arn, "RoleSessionName": f"kvtiers-{int(time.time())}"}
            )
            session = botocore.session.Session(profile=options.profile)
            assumed = DeferredRefreshableCredentials(refresh_using=refresh, method="assume-role")
            session.register_component("credential_provider", _Fixed(assumed))
        return session

    def _find_credentials(self, session: botocore.session.Session) -> Any:
        try:
            return session.get_component("credential_provider").load_credentials()
        except Exception as e:  # noqa: BLE001 - the chain stumbles over what helpers print and files hold
            raise self.translate(e) from None

    def _ask(self, call: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
        """Make a request of the control plane in an attempt's time: boto3 itself waits for as long as bytes come."""
        timeout_s = self.options.attempt_timeout_s
        deadline = time.monotonic() + timeout_s
        # Of requests that were given up, too: the threads that a server can hold are as few as those that may ask.
        if not self._asking.acquire(timeout=timeout_s):
            raise deadline_error(timeout_s, self.place)
        try:
            asked = begin("kvtiers-s3-control", partial(call, **arguments))
        except StoreError:
            self._asking.release()
            raise
        asked.add_done_callback(lambda _: self._asking.release())
        if not wait([asked], deadline - time.monotonic()).done:
            raise deadline_error(timeout_s, self.place)
        return asked.result()

    def _list(self, **arguments: Any) -> dict[str, Any]:
        try:
            answer = self._ask(self.client.list_objects_v2, Bucket=self.options.bucket, **arguments)
        except boto_errors.ClientError as e:
            code = code_of(e.response.get("Error", {}))
            status = e.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            # S3 says what is wrong in a document. Without one botocore repeats the number; a page of HTML has no code.
            says_nothing = (not code or code.isdigit()) and status in (400, 401, 403)
            is_no_s3 = says_nothing or (status == HTTPStatus.NOT_FOUND and code != "NoSuchBucket")
            if is_no_s3 and is_of_s3(e):
                raise StoreConfigError(f"{NO_S3.format(self.endpoint_url)} (HTTP {status})") from None
            raise self.translate(e) from None
        except BOTO_ERRORS as e:
            raise self.translate(e) from None
        if "Name" not in answer:  # a page of HTML is XML enough for botocore
            raise StoreConfigError(NO_S3.format(self.endpoint_url))
        return answer

    @contextmanager
    def _as_no_s3(self) -> Iterator[None]:
        """Around what takes a listing apart: an entry without a size or a date, say."""
        try:
            yield
        except (KeyError, TypeError, AttributeError):
            raise StoreConfigError(NO_S3.format(self.endpoint_url)) from None

    def _next_token(self, page: dict[str, Any], token: str) -> str:
        """The token of the next page, "" after the last.

        Raises:
            StoreConfigError: there is more and no token, or that of this page, which would be listed for ever.
        """
        if not page.get("IsTruncated"):
            return ""
        following: str = page.get("NextContinuationToken", "")
        if following in ("", token):
            raise StoreConfigError(
                f"endpoint: {self.endpoint_url} cuts a listing off and does not say where it goes on"
            )
        return following

    @property
    def _is_aws(self) -> bool:
        host = urlsplit(self.endpoint_url).hostname or ""
        return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu"))


def lifecycle_rule(rule_id: str, prefix: str, days: int) -> dict[str, Any]:
    """A bucket's rule that deletes objects whose whole names begin with ``prefix`` after ``days``.

    Raises:
        ValueError: ``days`` is below 1, S3's unit.
    """
    if days < 1:
        raise ValueError(f"days is {days}; a bucket expires blobs after whole days, 1 or more")
    return {
        "ID": rule_id,
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "Expiration": {"Days": days},
        "NoncurrentVersionExpiration": {"NoncurrentDays": 1},  # else a bucket with versioning keeps all of them
    }


def _read_ca_bundle(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        pem = Path(path).read_bytes()
    except OSError as e:
        raise StoreConfigError(f"ca_bundle: {path} cannot be read: {e.strerror}") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError:
        raise StoreConfigError(f"ca_bundle: {path} holds no certificate in PEM form, or a broken one") from None
    return pem


class _Fixed:
    """A credential chain of one link."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials

    def load_credentials(self) -> Credentials | None:
        return self._credentials


class _IdleLimit:
    """Before each request: has a client forget its idle connections every so often, all of them.

    urllib3 keeps them for ever and does not say how old they are. Those in use go on.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._forgot_at = time.monotonic()

    def __call__(self, **_: Any) -> None:
        now = time.monotonic()
        if now - self._forgot_at > IDLE_S_MAX:
            self._forgot_at = now
            self._client.close()


def _follow_no_redirect(context: dict[str, Any], **_: Any) -> None:
    """For the HEAD by which botocore asks where a bucket is that redirects: that it redirects, too, is the answer."""
    context.get("s3_redirect", {})["redirected"] = True


def _expect_no_continue(request: Any, **_: Any) -> None:
    """Send a body at once: to ask first costs a round trip a put, and 1 s where the server or a proxy never says go."""
    del request.headers["Expect"]


_ONE_ATTEMPT = {"total_max_attempts": 1, "mode": "standard"}
