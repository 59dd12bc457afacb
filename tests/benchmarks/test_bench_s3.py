"""That every client of bench_s3 gets through a round on nginx, which no other test uses."""

from __future__ import annotations

import pytest

from kvtiers.tiers.testing.servers import find_nginx
from tests.benchmarks.bench_s3 import CLIENTS, server
from tests.benchmarks.s3_contenders import CEILING, Region, make_contender


@pytest.mark.parametrize("name", [CEILING, "socket", *CLIENTS])
def test_every_client_puts_gets_and_looks_up_on_nginx(name: str) -> None:
    if find_nginx() is None:
        pytest.skip("nginx is not installed: apt-get install nginx")
    with server("nginx") as reached:
        region = Region(64 << 10, 1 << 20)
        contender = make_contender(name, reached, region)
        try:
            contender.put(0)
            stored = region.rows.copy()
            region.rows[:] = 0
            contender.get(0)
            assert (region.rows == stored).all()
            contender.heads(region.count)
        finally:
            contender.close()
