"""Keeps client libraries from writing secrets into logs."""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from types import ModuleType
from typing import Final

# At DEBUG, these packages log their requests: headers with signatures and session tokens, canonical requests, and URLs
# that contain both.
CHATTY: Final = frozenset(["aiobotocore", "aiohttp", "boto3", "botocore", "s3fs", "s3transfer", "urllib3"])


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
    """Cap the loggers of an fsspec driver, of the packages that its module uses, and of their dependencies."""
    module = sys.modules.get(driver.__module__)
    used = {driver.__module__, *(_module_of(value) for value in vars(module).values())} if module else set()
    packages = {name.partition(".")[0] for name in used} - sys.stdlib_module_names - {""}
    packages -= {"kvtiers"}
    for package in tuple(packages):
        packages |= _required_by(package)
    cap_chatty_loggers(frozenset(packages | {"fsspec"} | CHATTY))


def _module_of(value: object) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""


@functools.cache
def _required_by(package: str) -> frozenset[str]:
    """The packages in a package's distribution and in the distributions that it requires, without extras.

    Reads the lists of files of all these distributions: up to 0.3 s.
    """
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [package]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name == package:  # the distribution has a different name than the package
                waiting += _distributions_of_packages().get(name, ())
            continue
        found |= {path.parts[0] for path in installed.files or () if path.suffix == ".py" and len(path.parts) > 1}
        required = [line for line in installed.requires or () if "extra ==" not in line]
        waiting += [match[0] for line in required if (match := _REQUIRED.match(line))]
    return frozenset(name for name in found if name.isidentifier()) - sys.stdlib_module_names


@functools.cache
def _distributions_of_packages() -> Mapping[str, list[str]]:
    """Reads every installed distribution: 0.2 s or more."""
    return metadata.packages_distributions()


_REQUIRED: Final = re.compile(r"[A-Za-z0-9._-]+")
