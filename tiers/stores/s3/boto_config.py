"""BotoConfig: where boto3's configuration comes from, so that errors can name the variable or file at fault."""

from __future__ import annotations

import os
from typing import Any, Final

import botocore.session
from botocore.credentials import ReadOnlyCredentials

from ...errors import ConfigError, StoreConfigError, StorePermissionError, printable
from .boto_http import BoundedBotocoreSession, BoundedHttp
from .options import check_region

_PROFILE_VARIABLES: Final = ("AWS_DEFAULT_PROFILE", "AWS_PROFILE")  # in botocore's order
_PROFILES_MAX: Final = 32  # follow at most so many source_profile links, because they may be circular
IN_QUOTES: Final = "is in quotes, which count as part of the value (docker --env-file keeps them); remove the quotes"


class BotoConfig:
    """The profile and the files that boto3 reads. Immutable after the constructor.

    An empty environment variable counts as unset, because Kubernetes and CI systems set empty variables.

    Args:
        profile: the option ``profile``. None: use the environment's profile, or else ``default``.
    """

    def __init__(self, profile: str | None) -> None:
        environment = (value for name in _PROFILE_VARIABLES if (value := os.environ.get(name)))
        self._given = profile
        self._profile = profile or next(environment, "default")
        self._config_file = os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"

    def __str__(self) -> str:
        return printable(f"profile {self._profile!r} of {self._config_file}")

    def make_session(self, http: BoundedHttp) -> botocore.session.Session:
        """Make a botocore session that ignores empty variables and whose clients are bounded (see ``BoundedHttp``)."""
        variables = {}
        for name, (key, variable, default, convert) in botocore.session.Session.SESSION_VARIABLES.items():
            names = [variable] if isinstance(variable, str) else variable or []
            set_ones = [name for name in names if os.environ.get(name) != ""]
            if len(set_ones) < len(names):
                variables[name] = (key, set_ones or None, default, convert)
        return BoundedBotocoreSession(http, session_vars=variables, profile=self._given)

    def check_region(self, region: str) -> None:
        """Refuse a region that boto3 would refuse, because boto3's error does not name the region's source.

        Raises:
            StoreConfigError: names the variable, or the file and the key.
        """
        try:
            check_region(region)
        except ConfigError as e:
            variable = "AWS_DEFAULT_REGION"
            source = variable if os.environ.get(variable) == region else f"region of {self}"
            hint = "; a comment needs a line of its own" if {"#", ";"} & set(region) else ""
            if is_in_quotes(region):
                raise StoreConfigError(f"region: {source} {IN_QUOTES}") from None
            raise StoreConfigError(f"region: {source}: {e.message}{hint}") from None

    def explain_endpoint(self) -> str:
        """Return the error message for an endpoint, from the environment or the profile, that is not a URL."""
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if value := os.environ.get(name):
                text = IN_QUOTES if is_in_quotes(value) else "is not a URL; write https://host:port"
                return f"endpoint: {name} {text}"
        return f"endpoint: endpoint_url of {self} is not a URL; write https://host:port, without quotes"

    def check(self, credentials: ReadOnlyCredentials, method: str) -> None:
        """Refuse credentials in quotes, or with a space, control or non-ASCII character.

        Some of these characters cannot be sent in a header, and the others are typos.

        Args:
            method: botocore's name for the credentials' source.

        Raises:
            StorePermissionError: names the credential, its source and the bad character.
        """
        for field in ("access_key", "secret_key", "token"):
            value = getattr(credentials, field) or ""
            source = f"secret: the {field} from {method} (see {self})"
            if is_in_quotes(value):
                raise StorePermissionError(f"{source} {IN_QUOTES}")
            if bad := next((char for char in value if not "!" <= char <= "~"), ""):
                raise StorePermissionError(f"{source} has the character {bad!a}; remove it")

    def refuse_mfa(self, session: botocore.session.Session, credentials: Any) -> None:
        """Refuse a role that requires an MFA code: botocore would ask for it on the terminal and wait.

        Raises:
            StorePermissionError: names the profile.
        """
        if credentials.method != "assume-role":
            return
        profiles = session.full_config.get("profiles", {})
        name = self._profile
        for _ in range(_PROFILES_MAX):
            profile = profiles.get(name, {})
            if "role_arn" in profile and "mfa_serial" in profile:
                raise StorePermissionError(
                    f"secret: profile {printable(name)!r} of {self._config_file} has mfa_serial, and nobody can type a "
                    "code here; use a role without MFA, or the credentials of aws sts get-session-token"
                )
            name = profile.get("source_profile", "")


def is_in_quotes(value: str) -> bool:
    """Whether a text begins and ends with the same quote."""
    return len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
