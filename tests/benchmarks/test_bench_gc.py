"""bench_gc: its tier configurations are valid for any number of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtiers.connector.commands.places import find_places
from kvtiers.tiers.config.tier_options import FsTierConfig
from tests.benchmarks.bench_gc import blob_bytes, write_config


@pytest.mark.parametrize(("count", "size"), [(1, 1 << 20), (10_000, 105), (100_000, 64), (10_000_000, 64)])
def test_bench_gc_config_is_accepted(tmp_path: Path, count: int, size: int) -> None:
    assert blob_bytes(count) == size
    (place,) = find_places(write_config(tmp_path / "c.yaml", tmp_path, count * size, "29d"), None)
    assert isinstance(place.config, FsTierConfig)
    assert place.config.max_bytes == count * size
