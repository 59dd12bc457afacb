"""Which requests go through a proxy: all clients agree."""

from __future__ import annotations

import pytest

from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.proxies import proxy_of
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing.contract import as_parts, fetch, make_data
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from tests.s3_clients import use_credentials

PROXY = "http://proxy.example:3128"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("endpoint_url", "variables", "proxy"),
    [
        ("http://10.1.2.3:9000", {}, None),
        ("http://10.1.2.3:9000", {"http_proxy": PROXY}, PROXY),
        ("http://10.1.2.3:9000", {"http_proxy": "proxy.example:3128"}, PROXY),
        ("http://10.1.2.3:9000", {"https_proxy": PROXY}, None),
        ("https://s3.example", {"https_proxy": PROXY}, PROXY),
        ("http://10.1.2.3:9000", {"all_proxy": PROXY}, PROXY),
        ("http://10.1.2.3:9000", {"all_proxy": "socks5://proxy.example:1080"}, None),
        ("http://10.1.2.3:9000", {"no_proxy": "10.1.2.3:9000"}, None),
        ("https://s3.example", {"no_proxy": "s3.example"}, None),
    ],
)
def test_proxy_comes_from_the_variable_of_the_endpoints_scheme(
    monkeypatch: pytest.MonkeyPatch, endpoint_url: str, variables: dict[str, str], proxy: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_of(endpoint_url) == proxy


@pytest.mark.parametrize(
    ("endpoint_url", "no_proxy", "excluded"),
    [
        ("http://10.1.2.3:9000", "10.1.2.3:9000", True),
        ("http://10.1.2.3:9000", "10.1.2.3:9001", False),
        ("http://10.1.2.3:9000", "10.1.2.3", True),
        ("http://10.1.2.3:9000", "example.com, 10.0.0.0/8", True),
        ("http://10.1.2.3:9000", "11.0.0.0/8,,", False),
        ("http://10.1.2.3:9000", "*", True),
        ("http://10.1.2.3:9000", "example.com,*", True),
        ("http://[fd00::1]:9000", "fd00::1", True),
        ("http://[fd00::1]:9000", "fd00::/8", True),
        ("http://s3.example.com:9000", ".example.com", True),
        ("http://s3.example.com:9000", "EXAMPLE.com", True),
        ("http://s3.example.com:9000", "ample.com", False),
        ("http://s3.example.com", "s3.example.com:80", True),
        ("http://s3.example.com", "10.0.0.0/8", False),
    ],
)
def test_no_proxy_excludes_matching_endpoints(
    monkeypatch: pytest.MonkeyPatch, endpoint_url: str, no_proxy: str, excluded: bool
) -> None:
    monkeypatch.setenv("http_proxy", PROXY)
    monkeypatch.setenv("no_proxy", no_proxy)
    assert proxy_of(endpoint_url) == (None if excluded else PROXY)


@pytest.mark.parametrize(
    ("host", "no_proxy", "excluded"),
    [
        ("127.0.0.1", "{host}:{port}", True),
        ("localhost", "{host}:{port}", True),
        ("127.0.0.1", "127.0.0.0/8", True),
        ("127.0.0.1", "*", True),
        ("localhost", "example.com,*", True),
        ("127.0.0.1", "{host}:1", False),
    ],
)
def test_all_clients_agree_on_the_use_of_a_proxy(
    server: HttpFaultServer,
    boto_models_once: None,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    no_proxy: str,
    excluded: bool,
) -> None:
    use_credentials(monkeypatch)
    endpoint_url = f"http://{host}:{server.port}"
    with HttpFaultServer() as proxy:  # which is asked for any host, and knows the same buckets
        monkeypatch.setenv("http_proxy", proxy.endpoint_url)
        monkeypatch.setenv("no_proxy", no_proxy.format(host=host, port=server.port))
        store = S3Store(S3Options(bucket="bucket", endpoint_url=endpoint_url, request_timeout_s=120.0))
        data = make_data(300_000)
        store.check()
        store.put("f/a", as_parts(data))
        assert fetch(store, "f/a", len(data)) == data
        assert [info.key for info in store.keys("f/")] == ["f/a"]
        assert store.delete_many(["f/a"]) == [None]
        store.close()
        asked, other = (server, proxy) if excluded else (proxy, server)
        assert (len(asked.requests()), len(other.requests())) == (5, 0)
