"""An S3 server inside the demo's own process, for configs that ask for one (``embedded: true`` on an s3 tier)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from tiers.errors import ConfigError


def start_embedded_s3(deployment: Mapping[str, Any], cleanup: contextlib.ExitStack) -> dict[str, Any]:
    """Give each s3 tier that is ``embedded`` a server, with its bucket made; one server serves them all.

    The server's credentials go into this process's environment, where child processes find them as any S3 client's,
    and out of it with ``cleanup``.

    Returns:
        The deployment with ``endpoint_url`` in place of ``embedded``.
    """
    tiers = [dict(tier) for tier in deployment["tiers"]]
    embedded = [tier for tier in tiers if tier.pop("embedded", False)]
    if embedded:
        try:
            from tiers.testing.servers import moto_server

            server = cleanup.enter_context(moto_server())
        except ImportError as e:
            raise ConfigError("needs moto: pip install 'kvtiers[demo]'", field="embedded") from e
        import boto3

        _set_environment(server.environment, cleanup)
        client = boto3.client("s3", endpoint_url=server.endpoint_url, region_name="us-east-1")
        for tier in embedded:
            client.create_bucket(Bucket=tier["bucket"])
            tier["endpoint_url"] = server.endpoint_url
    return {**deployment, "tiers": tiers}


def _set_environment(values: Mapping[str, str], cleanup: contextlib.ExitStack) -> None:
    for name, value in values.items():
        before = os.environ.get(name)
        os.environ[name] = value
        if before is None:
            cleanup.callback(os.environ.pop, name, None)
        else:
            cleanup.callback(os.environ.__setitem__, name, before)
