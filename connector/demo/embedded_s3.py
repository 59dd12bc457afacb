"""An S3 server inside the demo's own process, for s3 tiers at ``DEMO_ENDPOINT``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

from ...tiers.errors import ConfigError

DEMO_ENDPOINT = "https://kvtiers-demo.invalid"  # no name server knows such a name (RFC 2606)
PROFILE_VARIABLES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")  # unset: the clients must not see the user's AWS files
SERVER_HOST = "127.0.0.1"


def start_embedded_s3(deployment: Mapping[str, Any], cleanup: contextlib.ExitStack) -> dict[str, Any]:
    """Start one server for all s3 tiers at ``DEMO_ENDPOINT``, and create their buckets.

    The server's credentials are set in this process's environment, where child processes find them as any S3 client
    does. Variables that would keep clients from the server (the user's profile, a proxy) are unset or changed.
    ``cleanup`` restores the environment.

    Returns:
        The deployment with the server's ``endpoint_url``.

    Raises:
        ConfigError: moto is not installed.
    """
    tiers = [dict(tier) for tier in deployment["tiers"]]
    ours = [tier for tier in tiers if tier.get("endpoint_url") == DEMO_ENDPOINT]
    if ours:
        try:
            from ...tiers.testing.servers import moto_server

            server = cleanup.enter_context(moto_server())
        except ImportError as e:
            raise ConfigError("needs moto: pip install '.[demo]' in kvtiers' checkout", field="endpoint_url") from e

        # Restores the environment, including the variables that are removed below.
        cleanup.enter_context(mock.patch.dict(os.environ, {**server.environment, **_no_proxy()}))
        for name in PROFILE_VARIABLES:
            os.environ.pop(name, None)
        client = server.client()
        for tier in ours:
            client.create_bucket(Bucket=tier["bucket"])
            tier["endpoint_url"] = server.endpoint_url
    return {**deployment, "tiers": tiers}


def _no_proxy() -> dict[str, str]:
    """Return proxy exceptions for the server, in both spellings: clients differ in which spelling they read."""
    hosts = {name: os.environ.get(name) for name in ("no_proxy", "NO_PROXY")}
    before = hosts["no_proxy"] or hosts["NO_PROXY"]
    return {name: ",".join(filter(None, (own or before, SERVER_HOST))) for name, own in hosts.items()}
