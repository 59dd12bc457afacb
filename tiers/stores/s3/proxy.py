"""Which proxy requests to an endpoint go through: one answer for three clients, which read ``NO_PROXY`` in three ways.

botocore (as urllib) knows host:port and no networks, reqwest under obstore networks and no host:port, and only reqwest
``ALL_PROXY``.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_PORTS = {"http": 80, "https": 443}


def proxy_of(endpoint_url: str) -> str | None:
    """The proxy's URL, from the environment; None if requests go to the endpoint itself."""
    parts = urlsplit(endpoint_url)
    host = parts.hostname or ""
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or _is_excluded(host, parts.port or _PORTS[parts.scheme], proxies.get("no", "")):
        return None
    if "://" not in proxy:
        return f"http://{proxy}"
    return proxy if proxy.startswith("http") else None  # SOCKS: none of the clients can


def _is_excluded(host: str, port: int, excluded: str) -> bool:
    """Whether ``NO_PROXY`` names it: as ``*``, a name, the end of one, an address or a network, with a port or not."""
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
