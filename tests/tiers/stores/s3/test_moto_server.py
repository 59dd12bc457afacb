from __future__ import annotations

import boto3
import pytest

from kvtiers.tiers.testing.servers import moto_server
from tests.s3_clients import use_credentials


def test_new_moto_server_has_no_objects_of_an_earlier_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that finds other blocks under its keys stores nothing, and loads those."""
    use_credentials(monkeypatch)
    for _ in range(2):
        with moto_server() as server:
            client = boto3.client("s3", endpoint_url=server.endpoint_url)
            client.create_bucket(Bucket="bucket")
            assert client.list_objects_v2(Bucket="bucket")["KeyCount"] == 0
            client.put_object(Bucket="bucket", Key="key", Body=b"value")
