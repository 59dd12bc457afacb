"""Keeps client libraries from writing secrets into logs."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Final

# At DEBUG, these packages log their requests: headers with signatures and session tokens, canonical requests, and URLs
# that contain both. Not only AWS's, but also clients that fsspec's drivers use.
CHATTY: Final = frozenset(
    [
        *("adlfs", "aiobotocore", "aiohttp", "asyncssh", "azure", "boto3", "botocore", "dropbox", "fsspec", "gcsfs"),
        *("google", "httpcore", "httpx", "huggingface_hub", "msal", "oci", "ocifs", "oss2", "ossfs", "paramiko"),
        *("requests", "requests_oauthlib", "s3fs", "s3transfer", "smbprotocol", "urllib3", "webdav4"),
    ]
)


# After each failed refresh of credentials, these loggers log an exception whose text comes from the credential process.
CREDENTIAL_LOGGERS: Final = ("aiobotocore.credentials", "aiobotocore.tokens", "botocore.credentials", "botocore.tokens")


def cap_chatty_loggers(packages: frozenset[str] = CHATTY) -> None:
    """Keep packages' loggers, and the loggers below them, from logging at DEBUG, even if the root logger changes later.

    A logger with a higher level keeps it. The AWS libraries' log records about credentials lose their exception.

    Args:
        packages: top-level names of the packages.
    """
    for name in (*packages, *logging.root.manager.loggerDict):
        if name.partition(".")[0] in packages:
            logger = logging.getLogger(name)
            if name in packages or logger.level != logging.NOTSET:
                logger.setLevel(max(logging.INFO, logger.getEffectiveLevel()))
    for name in CREDENTIAL_LOGGERS:
        logging.getLogger(name).addFilter(_without_exception)  # logging ignores a filter that was already added


def _without_exception(record: logging.LogRecord) -> bool:
    record.exc_info = record.exc_text = None
    return True


def cap_loggers_of(driver: type) -> None:
    """Cap the loggers of an fsspec driver, and of the packages that its module uses."""
    module = sys.modules.get(driver.__module__)
    used = {driver.__module__, *(_module_of(value) for value in vars(module).values())} if module else set()
    packages = {name.partition(".")[0] for name in used} - sys.stdlib_module_names - {"", "kvtiers"}
    cap_chatty_loggers(frozenset(packages | CHATTY))


def _module_of(value: object) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""
