"""Hides environment variables from obstore: object_store treats every ``AWS_…`` variable that it knows as an option.

Explicit options override most variables. But some options (checksum, encryption) have no value for "not set", and the
next release may read more variables. So the variables are hidden from the C library while a client is made. Variables
that boto3 and its credential programs read stay, because we set every obstore option that they correspond to.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import botocore.session
from botocore.credentials import EnvProvider

_lock = threading.Lock()  # guards the changes that this module makes to the C library's environment

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
    """Hide ``AWS_…`` variables that boto3 does not read. ``os.environ`` is unchanged. Usually there are none."""
    with _lock:
        names = [name for name in os.environ if name.startswith("AWS_") and name not in _READ_BY_BOTO3]
        hidden = {name: value for name in names if (value := os.environ.get(name)) is not None}
        try:
            for name in hidden:
                os.unsetenv(name)
            yield
        finally:
            for name, value in hidden.items():
                os.putenv(name, value)
