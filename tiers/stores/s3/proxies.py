"""Finds the proxy for requests, and names it in error messages."""

from __future__ import annotations

import os
from ipaddress import ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ...errors import StoreConfigError

_PORTS: Final = {"http": 80, "https": 443}
_VARIABLES: Final = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def proxy_of(endpoint_url: str) -> str | None:
    """The proxy's URL from the environment; None if requests go to the endpoint directly.

    Like curl, it reads ``ALL_PROXY``, and networks in ``NO_PROXY``; botocore itself reads neither.
    """
    parts = urlsplit(endpoint_url)
    host = parts.hostname or ""
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or _is_excluded(host, parts.port or _PORTS[parts.scheme], proxies.get("no", "")):
        return None
    if "://" not in proxy:
        return f"http://{proxy}"
    return proxy if proxy.startswith("http") else None  # botocore does not support SOCKS


def check_proxy(proxy_url: str) -> None:
    """Refuse a proxy's URL that the clients would read differently.

    Raises:
        StoreConfigError: the message does not show the login.
    """
    try:
        parts = urlsplit(proxy_url)
        is_valid = bool(parts.hostname) and parts.port != 0 and "@" not in f"{parts.path}{parts.query}{parts.fragment}"
    except ValueError:
        is_valid = False
    if not is_valid:
        raise StoreConfigError(
            f"proxy: the URL of the proxy {name_proxy(proxy_url)} is not valid; write http://host:port or "
            "http://user:password@host:port, with %2F for '/', %3F for '?' and %23 for '#' in the login"
        )


def name_proxy(proxy_url: str) -> str:
    """A proxy's address without its login, and the environment variable that sets it: "http://host:3128 (HTTPS_PROXY)".

    A password may hold any character, so only the text after the last "@" is shown.
    """
    scheme, _, rest = proxy_url.rpartition("://")
    host = rest.rpartition("@")[2].partition("/")[0]
    address = f"{scheme or 'http'}://{host}"
    variable = next((name for name in _VARIABLES if os.environ.get(name, "").rstrip("/").endswith(host)), None)
    return f"{address} ({variable})" if variable else address


def _is_excluded(host: str, port: int, excluded: str) -> bool:
    """Whether ``NO_PROXY`` covers the host: by ``*``, name, suffix, address or network, with or without a port."""
    if proxy_bypass(f"{host}:{port}"):
        return True
    for entry in map(str.strip, excluded.split(",")):
        if entry == "*":
            return True
        try:
            if ip_address(host) in ip_network(entry, strict=False):
                return True
        except ValueError:
            pass
    return False
