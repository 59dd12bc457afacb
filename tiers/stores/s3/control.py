"""S3Control: rare requests to an S3 bucket, made with boto3: listing, deletion and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from botocore import exceptions as boto_errors

from ...errors import BlobNotFoundError, StoreConfigError, StoreError
from ...store import KeyInfo
from .boto_errors import BOTO_ERRORS, code_of, is_from_s3
from .errors import NO_S3, RequestRefusedError, server_error, without_absence
from .listing import Page
from .session import S3Session


class S3Control:
    """Control plane of one bucket. Any thread may call."""

    def __init__(self, session: S3Session) -> None:
        self._session = session
        self._options = session.options
        self._own = f"{self._options.prefix}/" if self._options.prefix else ""

    def list_page(self, prefix: str, delimiter: str = "", token: str = "") -> Page:
        """List up to 1,000 objects and folders by their whole names.

        Args:
            delimiter: "/" to list only the objects and folders directly below the prefix; "" to list all objects below
                it.
            token: from the previous page.

        Raises:
            StoreConfigError: an entry is incomplete, or is outside the request. A caller might delete a wrong object.
        """
        more = {"ContinuationToken": token, "Delimiter": delimiter}
        page = self._list(Prefix=prefix, **{name: value for name, value in more.items() if value})
        try:
            found = [KeyInfo(o["Key"], o["Size"], o["LastModified"].timestamp()) for o in page.get("Contents", ())]
            folders = [folder["Prefix"] for folder in page.get("CommonPrefixes", ())]
        except (KeyError, AttributeError):  # an entry without its name, size or date
            raise StoreConfigError(NO_S3.format(self._session.endpoint_url)) from None
        if any(info.size < 0 for info in found):
            raise StoreConfigError(f"{NO_S3.format(self._session.endpoint_url)} (an object has a negative size)")
        self._raise_unless_asked_for(prefix, delimiter, [info.key for info in found], folders)
        return found, folders, self._next_token(page, token)

    def delete(self, key: str) -> None:
        """Delete an object by its whole name; absent is success."""
        client = self._session.client
        answer = self._ask_about(key, client.delete_object)
        if answer is None:
            return
        said = answer["ResponseMetadata"]
        if said["HTTPStatusCode"] == HTTPStatus.NO_CONTENT or "x-amz-request-id" in said["HTTPHeaders"]:
            return
        # Either the server sends no request IDs, or this is a web page and not from S3.
        if self._ask_about(key, client.head_object) is not None:
            raise StoreConfigError(NO_S3.format(self._session.endpoint_url))

    def delete_batch(self, keys: Sequence[str]) -> dict[str, StoreError]:
        """Delete up to 1,000 objects by their whole names; return the errors of those not deleted.

        Raises:
            RequestRefusedError: the response names no object, so it may not come from S3.
        """
        objects = [{"Key": key} for key in keys]
        # Not "Quiet": its response would be as empty as a page of HTML.
        answer = self._ask_bucket(self._session.client.delete_objects, Delete={"Objects": objects})
        if not (answer.get("Deleted") or answer.get("Errors")):
            raise RequestRefusedError(NO_S3.format(self._session.endpoint_url))
        failed: dict[str, StoreError] = {}
        for error in answer.get("Errors", ()):
            code = code_of(error)
            if code != "NoSuchKey":
                # If the server does not name the key that it kept, any of the keys may still exist.
                names = [error["Key"]] if error.get("Key") in keys else keys
                failed.update(dict.fromkeys(names, server_error(500, code, place=self._session.place)))
        return failed

    def check(self) -> None:
        """See ``S3Store.check``."""
        answer = self._list(Prefix=self._options.prefix, MaxKeys=1)
        # boto3 follows redirects to the right region; our own client does not.
        region = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", self._session.region)
        if region != self._session.region and self._session.is_aws:
            raise StoreConfigError(f"region: bucket {self._options.bucket} is in {region}; set region: {region}")

    def keeps_versions(self) -> bool:
        """See ``S3Store.keeps_versions``."""
        if self._ask_bucket(self._session.client.get_bucket_versioning).get("Status") != "Enabled":
            return False
        try:
            found = self._session.client.get_bucket_lifecycle_configuration(Bucket=self._options.bucket)
        except BOTO_ERRORS:  # the bucket has no rules, or the permission to read them is missing
            return True
        return not any(_removes_versions(rule, self._own) for rule in found.get("Rules", ()))

    # -- private ---------------------------------------------------------------------------------------------------

    def _ask_about(self, key: str, call: Callable[..., dict[str, Any]]) -> dict[str, Any] | None:
        """Make a request about an object; None if the object is absent."""
        try:
            return call(Bucket=self._options.bucket, Key=key)
        except BOTO_ERRORS as e:
            if not isinstance(error := self._session.translate(e), BlobNotFoundError):
                raise error from None
            return None

    def _ask_bucket(self, call: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
        """Make a request about the bucket, to which S3 never answers that an object is absent."""
        try:
            return call(Bucket=self._options.bucket, **arguments)
        except BOTO_ERRORS as e:
            raise without_absence(self._session.translate(e), self._session.place) from None

    def _list(self, **arguments: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._session.client.list_objects_v2(Bucket=self._options.bucket, **arguments)
        except BOTO_ERRORS as e:
            if isinstance(e, boto_errors.ClientError) and is_from_s3(e):
                code = code_of(e.response.get("Error", {}))
                status = e.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
                # S3 sends an error document. Without one, botocore's code is the HTTP status; HTML has no code at all.
                has_no_reason = (not code or code.isdigit()) and status in (400, 401, 403)
                if has_no_reason or (status == HTTPStatus.NOT_FOUND and code != "NoSuchBucket"):
                    raise StoreConfigError(f"{NO_S3.format(self._session.endpoint_url)} (HTTP {status})") from None
            raise self._session.translate(e) from None
        if "Name" not in answer:  # botocore parses a page of HTML as XML
            raise StoreConfigError(NO_S3.format(self._session.endpoint_url))
        return answer

    def _raise_unless_asked_for(self, prefix: str, delimiter: str, keys: list[str], folders: list[str]) -> None:
        are_below = all(name and name.startswith(prefix) for name in (*keys, *folders))
        are_parted = not delimiter or not any(delimiter in key[len(prefix) :] for key in keys)
        are_folders = all(delimiter and name.endswith(delimiter) for name in folders)
        if not (are_below and are_parted and are_folders):
            raise StoreConfigError(
                f"endpoint: {self._session.endpoint_url} lists names outside the requested prefix; does a proxy or "
                "gateway drop the prefix of a listing?"
            )

    def _next_token(self, page: dict[str, Any], token: str) -> str:
        """The token of the next page, "" after the last.

        Raises:
            StoreConfigError: there is another page, but its token is missing, or is this page's (an endless loop).
        """
        if not page.get("IsTruncated"):
            return ""
        following: str = page.get("NextContinuationToken", "")
        if following in ("", token):
            raise StoreConfigError(
                f"endpoint: {self._session.endpoint_url} cuts a listing off without a valid token for the next page"
            )
        return following


def _removes_versions(rule: Mapping[str, Any], prefix: str) -> bool:
    """Whether a lifecycle rule deletes all old versions below a prefix, not only some of them."""
    expires = rule.get("NoncurrentVersionExpiration", {})
    if rule.get("Status") != "Enabled" or "NoncurrentDays" not in expires or "NewerNoncurrentVersions" in expires:
        return False
    found: Mapping[str, str] = rule.get("Filter", {"Prefix": rule.get("Prefix", "")})
    return found.keys() <= {"Prefix"} and prefix.startswith(found.get("Prefix", ""))
