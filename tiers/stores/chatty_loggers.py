"""Keeps client libraries from writing secrets into logs."""

from __future__ import annotations

import logging
from typing import Final

# At DEBUG they log what they send: headers with signatures and session tokens, canonical requests, URLs with both.
CHATTY: Final = frozenset(["aiobotocore", "aiohttp", "boto3", "botocore", "s3fs", "s3transfer", "urllib3"])


# At each refresh that fails they log an exception, of which a credential process has written the text.
TELLTALE: Final = ("aiobotocore.credentials", "aiobotocore.tokens", "botocore.credentials", "botocore.tokens")


def cap_chatty_loggers() -> None:
    """Let the AWS libraries' loggers, and those below them, never log at DEBUG, whatever the root logger does later.

    A logger that is quieter stays as it is. What they say of credentials is logged without its exception.
    """
    for name in (*CHATTY, *logging.root.manager.loggerDict):
        if name.partition(".")[0] in CHATTY:
            logger = logging.getLogger(name)
            if name in CHATTY or logger.level != logging.NOTSET:
                logger.setLevel(max(logging.INFO, logger.getEffectiveLevel()))
    for name in TELLTALE:
        logging.getLogger(name).addFilter(_without_exception)  # once: a filter that is there is not added again


def _without_exception(record: logging.LogRecord) -> bool:
    record.exc_info = record.exc_text = None
    return True
