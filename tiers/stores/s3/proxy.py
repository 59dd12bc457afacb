"""Chooses the proxy for an endpoint, once for all three clients, which each read ``NO_PROXY`` differently.

botocore (like urllib) supports host:port but not networks. reqwest, which obstore uses, supports networks but not
host:port. Only reqwest reads ``ALL_PROXY``.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_PORTS = {"http": 80, "https": 443}


def proxy_of(endpoint_url: str) -> str | None:
    """The proxy's URL from the environment; None if requests go to the endpoint directly."""
    parts = urlsplit(endpoint_url)
    host = parts.hostname or ""
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or _is_excluded(host, parts.port or _PORTS[parts.scheme], proxies.get("no", "")):
        return None
    if "://" not in proxy:
        return f"http://{proxy}"
    return proxy if proxy.startswith("http") else None  # no client supports SOCKS


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
