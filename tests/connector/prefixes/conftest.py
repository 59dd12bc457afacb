"""A bucket for prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvtiers.tiers.testing.servers import moto_server
from tests.s3_clients import use_credentials


@pytest.fixture(scope="module")
def prefix_bucket() -> Iterator[str]:
    """URL of a bucket on moto's server; endpoint and credentials are in the environment, for every client."""
    with moto_server() as server, pytest.MonkeyPatch.context() as patch:
        use_credentials(patch, server)
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        server.client().create_bucket(Bucket="kv-prefixes")
        with suppress(ImportError):
            from s3fs import S3FileSystem

            S3FileSystem.clear_instance_cache()  # a driver that was kept knows the server of an earlier module
        yield "s3://kv-prefixes"
