"""S3Control: what is rare at an S3 bucket, by boto3: listing, deletion, checks and lifecycle rules.

Each request is made in a thread of its own: a name server that does not answer would keep its caller.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

from botocore import exceptions as boto_errors

from kvtiers.tiers.errors import BlobNotFoundError, StoreConfigError, StoreError, StorePermissionError
from kvtiers.tiers.store import KeyInfo
from kvtiers.tiers.stores.s3.boto_errors import BOTO_ERRORS, code_of, is_of_s3
from kvtiers.tiers.stores.s3.errors import NO_S3, VagueRefusalError, deadline_error, server_error, without_absence
from kvtiers.tiers.stores.s3.session import S3Session
from kvtiers.tiers.stores.watchdog import begin

DELETE_KEYS_MAX = 1000  # S3's limit for one batch delete
LIFECYCLE_ID = "kvtiers"
RULE_DIGITS = 12  # of a rule's own in its ID, of which S3 takes 255 characters


class S3Control:
    """Any thread may call."""

    def __init__(self, session: S3Session) -> None:
        self._session = session
        self._options = session.options
        self._own = f"{self._options.prefix}/" if self._options.prefix else ""
        self._asking = threading.BoundedSemaphore(session.options.max_connections)

    def list_page(self, prefix: str, *, token: str = "") -> tuple[list[KeyInfo], str]:
        """Up to 1,000 objects, and the token of the next page, "" after the last. Keys are the objects' whole names.

        boto3's parser is slow (50 ms of CPU a page), but obstore refuses a page with a name like "a//b" on it.

        Args:
            token: of the page before.
        """
        start = {"ContinuationToken": token} if token else {}
        page = self._list(Prefix=prefix, **start)
        with self._as_no_s3():
            found = [KeyInfo(o["Key"], o["Size"], o["LastModified"].timestamp()) for o in page.get("Contents", ())]
        return found, self._next_token(page, token)

    def delete(self, key: str) -> None:
        """Delete an object by its whole name; absent is success. (obstore would take any page with 200 for that.)"""
        client = self._session.client
        answer = self._ask_about(key, client.delete_object)
        if answer is None:
            return
        said = answer["ResponseMetadata"]
        if said["HTTPStatusCode"] == HTTPStatus.NO_CONTENT or "x-amz-request-id" in said["HTTPHeaders"]:
            return
        # A server that gives no ids, or something else's page.
        if self._ask_about(key, client.head_object) is not None:
            raise StoreConfigError(NO_S3.format(self._session.endpoint_url))

    def metadata(self, key: str) -> dict[str, str]:
        """An object's own metadata; none where it is absent."""
        answer = self._ask_about(key, self._session.client.head_object)
        return {} if answer is None else dict(answer.get("Metadata", {}))

    def delete_batch(self, keys: Sequence[str]) -> dict[str, StoreError]:
        """Delete up to ``DELETE_KEYS_MAX`` objects by their whole names; the errors of those that are still there.

        Raises:
            VagueRefusalError: the answer names no object, and so may not be S3's.
        """
        objects = [{"Key": key} for key in keys]
        try:
            # Not "Quiet", whose answer is as empty as a page of HTML.
            answer = self._ask(
                self._session.client.delete_objects, Bucket=self._options.bucket, Delete={"Objects": objects}
            )
        except BOTO_ERRORS as e:
            raise without_absence(self._session.translate(e), self._session.place) from None
        if not (answer.get("Deleted") or answer.get("Errors")):
            raise VagueRefusalError(NO_S3.format(self._session.endpoint_url))
        failed: dict[str, StoreError] = {}
        for error in answer.get("Errors", ()):
            code = code_of(error)
            if code != "NoSuchKey":
                # Where the server does not say which key is still there, any may be.
                names = [error["Key"]] if error.get("Key") in keys else keys
                failed.update(dict.fromkeys(names, server_error(500, code, place=self._session.place)))
        return failed

    def check(self) -> None:
        """Ask the bucket one question that needs endpoint, credentials, clock, bucket and region to be right.

        Raises:
            StoreError: begins with what is wrong: endpoint, secret, clock, bucket or region.
        """
        answer = self._list(Prefix=self._options.prefix, MaxKeys=1)
        # boto3 follows a redirect to the right region, at a cost for each request; obstore does not.
        region = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", self._session.region)
        if region != self._session.region and self._session.is_aws:
            raise StoreConfigError(f"region: bucket {self._options.bucket} is in {region}; set region: {region}")

    def keeps_versions(self, beginnings: Sequence[str]) -> bool:
        """Whether the bucket keeps what is deleted or replaced, and no rule removes it for all names that begin so.

        Raises:
            StoreError: it does not say.
        """
        if self._versioning() != "Enabled":
            return False
        try:
            rules = self._lifecycle().get("Rules", [])
        except StoreError:  # to read rules takes another right
            return True
        names = [self._own + beginning for beginning in beginnings or ("",)]
        prefixes = tuple(prefix for rule in rules if (prefix := _expires_versions_of(rule)) is not None)
        return not all(name.startswith(prefixes) for name in names)

    def list_folder(self, prefix: str) -> tuple[list[str], list[str]]:
        """Names right below a prefix: of folders (what has a "/" behind the name) and of objects."""
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

    def expire_after(self, days: int | None, beginnings: Sequence[str]) -> bool:
        """Have the bucket delete objects below the prefix whose names begin so, ``days`` after they were written.

        A bucket with versions deletes those a day after they were replaced or deleted, even if ``days`` is None. Our
        rules for the prefix are replaced; other rules stay. Returns whether versions are deleted.

        Raises:
            ValueError: ``days`` is below 1, S3's unit.
            StoreError: the bucket refused.
        """
        bucket = self._options.bucket
        rule_id = f"{LIFECYCLE_ID}:{self._options.prefix}"
        # Without digits it is a rule that an earlier version made, for all that is below the prefix.
        ours = re.compile(re.escape(rule_id) + f"(:[0-9a-f]{{{RULE_DIGITS}}})?")
        new = []
        versions = bool(beginnings) and self._may_have_versions()
        for beginning in beginnings if versions or days is not None else ():
            digits = hashlib.sha256(beginning.encode()).hexdigest()[:RULE_DIGITS]
            new.append(lifecycle_rule(f"{rule_id}:{digits}", self._own + beginning, days, versions=versions))
        found = self._lifecycle()
        before = found.get("Rules", [])
        # The bucket's own setting, which would become AWS's default if it were left out.
        also = {name: found[name] for name in ("TransitionDefaultMinimumObjectSize",) if name in found}
        rules = [rule for rule in before if not ours.fullmatch(rule.get("ID", ""))] + new
        try:
            if rules:
                change = self._session.client.put_bucket_lifecycle_configuration
                self._ask(change, Bucket=bucket, LifecycleConfiguration={"Rules": rules}, **also)
            elif before:
                self._ask(self._session.client.delete_bucket_lifecycle, Bucket=bucket)
        except BOTO_ERRORS as e:
            raise self._session.translate(e) from None
        return versions

    # -- private ---------------------------------------------------------------------------------------------------

    def _ask(self, call: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
        """Make a request of the control plane in an attempt's time."""
        timeout_s = self._options.attempt_timeout_s
        deadline = time.monotonic() + timeout_s
        # Requests that were given up count until they end, so that a server holds no more threads than may ask.
        if not self._asking.acquire(timeout=timeout_s):
            raise deadline_error(timeout_s, self._session.place)
        try:
            asked = begin("kvtiers-s3-control", partial(call, **arguments))
        except StoreError:
            self._asking.release()
            raise
        asked.add_done_callback(lambda _: self._asking.release())
        if not wait([asked], deadline - time.monotonic()).done:
            raise deadline_error(timeout_s, self._session.place)
        return asked.result()

    def _ask_about(self, key: str, call: Callable[..., dict[str, Any]]) -> dict[str, Any] | None:
        """Make a request about an object; None: there is none."""
        try:
            return self._ask(call, Bucket=self._options.bucket, Key=key)
        except BOTO_ERRORS as e:
            if not isinstance(error := self._session.translate(e), BlobNotFoundError):
                raise error from None
            return None

    def _versioning(self) -> str:
        """Enabled, Suspended, or "" of a bucket that never had versions."""
        try:
            found = self._ask(self._session.client.get_bucket_versioning, Bucket=self._options.bucket)
        except BOTO_ERRORS as e:
            raise without_absence(self._session.translate(e), self._session.place) from None
        return str(found.get("Status", ""))

    def _may_have_versions(self) -> bool:
        try:
            return self._versioning() != ""
        except StoreError as e:
            if e.retryable:
                raise
            return isinstance(e, StorePermissionError)  # else the server has no versions, and may not know such rules

    def _lifecycle(self) -> dict[str, Any]:
        try:
            return self._ask(self._session.client.get_bucket_lifecycle_configuration, Bucket=self._options.bucket)
        except boto_errors.ClientError as e:
            if code_of(e.response.get("Error", {})) != "NoSuchLifecycleConfiguration":
                raise without_absence(self._session.translate(e), self._session.place) from None
            return {}
        except BOTO_ERRORS as e:
            raise self._session.translate(e) from None

    def _list(self, **arguments: Any) -> dict[str, Any]:
        try:
            answer = self._ask(self._session.client.list_objects_v2, Bucket=self._options.bucket, **arguments)
        except boto_errors.ClientError as e:
            code = code_of(e.response.get("Error", {}))
            status = e.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            # S3 says in a document what is wrong. If there is none, botocore's code is the status; HTML has no code.
            says_nothing = (not code or code.isdigit()) and status in (400, 401, 403)
            is_no_s3 = says_nothing or (status == HTTPStatus.NOT_FOUND and code != "NoSuchBucket")
            if is_no_s3 and is_of_s3(e):
                raise StoreConfigError(f"{NO_S3.format(self._session.endpoint_url)} (HTTP {status})") from None
            raise self._session.translate(e) from None
        except BOTO_ERRORS as e:
            raise self._session.translate(e) from None
        if "Name" not in answer:  # a page of HTML is XML enough for botocore
            raise StoreConfigError(NO_S3.format(self._session.endpoint_url))
        return answer

    @contextmanager
    def _as_no_s3(self) -> Iterator[None]:
        """Around code that takes a listing apart, in which an entry may lack its size or date."""
        try:
            yield
        except (KeyError, TypeError, AttributeError):
            raise StoreConfigError(NO_S3.format(self._session.endpoint_url)) from None

    def _next_token(self, page: dict[str, Any], token: str) -> str:
        """The token of the next page, "" after the last.

        Raises:
            StoreConfigError: there is more, but no token for it, or this page's: that would be listed for ever.
        """
        if not page.get("IsTruncated"):
            return ""
        following: str = page.get("NextContinuationToken", "")
        if following in ("", token):
            raise StoreConfigError(
                f"endpoint: {self._session.endpoint_url} cuts a listing off and does not say where it goes on"
            )
        return following


def lifecycle_rule(rule_id: str, prefix: str, days: int | None, *, versions: bool) -> dict[str, Any]:
    """A bucket's rule that deletes objects whose whole names begin with ``prefix`` after ``days``.

    Args:
        days: None: never.
        versions: delete what was deleted or replaced, too, which a bucket with versioning keeps.

    Raises:
        ValueError: ``days`` is below 1, S3's unit.
    """
    if days is not None and days < 1:
        raise ValueError(f"days is {days}; a bucket expires blobs after whole days, 1 or more")
    # Markers of deletions outlive what was deleted; a rule with days removes them, too.
    expiration = {"ExpiredObjectDeleteMarker": True} if days is None else {"Days": days}
    rule = {"ID": rule_id, "Status": "Enabled", "Filter": {"Prefix": prefix}, "Expiration": expiration}
    return rule | {"NoncurrentVersionExpiration": {"NoncurrentDays": 1}} if versions else rule


def _expires_versions_of(rule: dict[str, Any]) -> str | None:
    """The prefix below which a rule deletes all versions; None: it does not, or not all below one."""
    expires = rule.get("NoncurrentVersionExpiration", {})
    if rule.get("Status") != "Enabled" or "NoncurrentDays" not in expires or "NewerNoncurrentVersions" in expires:
        return None
    found: dict[str, str] = rule.get("Filter", {"Prefix": rule.get("Prefix", "")})
    return found.get("Prefix", "") if found.keys() <= {"Prefix"} else None
