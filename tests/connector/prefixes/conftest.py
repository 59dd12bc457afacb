"""A bucket for prefixes."""

from __future__ import annotations

from collections.abc import Iterator

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
        yield "s3://kv-prefixes"
