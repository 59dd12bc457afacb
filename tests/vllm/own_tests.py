"""A pytest plugin that puts our tier in the place of vLLM's own fs tier, to run vLLM's own tests of it against ours.

They are in vLLM's source distribution, unpacked somewhere as ``$SOURCE``::

    python -m pytest -p tests.vllm.own_tests --import-mode importlib -c /dev/null --noconftest -rx \\
        --rootdir $SOURCE $SOURCE/tests/v1/kv_offload/tiering/test_fs_tier.py

with the interpreter of ``make e2e``'s environment, in this repository's folder. What cannot hold is marked below with
its reason. With vLLM 0.32.0, 31 of 44 pass, 6 look at insides, and 7 (four tests) differ on purpose.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.kv_offload.base import Locality
from vllm.v1.kv_offload.tiering.fs import manager

from kvtiers.connector.vllm.handed import handing_over
from kvtiers.connector.vllm.tier import KVTiersTier
from tests.tier_limits import tier_limits
from tests.vllm.engines import FULL, VllmConfig, kv_cache_config


class InItsPlace(KVTiersTier):
    """Takes what vLLM's own takes."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        n_read_threads: int = 16,
        n_write_threads: int = 16,
        enable_kv_events: bool = False,
        locality: str | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        tier = {
            "type": "fs",
            "root_dir": root_dir,
            "n_read_threads": n_read_threads,
            "n_write_threads": n_write_threads,
            "min_free": 0,
            "parallel_agnostic": True,  # as vLLM's own always
        }
        offloading_spec.extra_config = {}  # their spec is a mock, whose every attribute is true
        with (
            handing_over(VllmConfig(), kv_cache_config(*(FULL for _ in offloading_spec.config.groups))),
            # Longer than the tests' helper waits for a question that needs no asking.
            tier_limits(lookup={"absent_ttl_s": 60.0}),
        ):
            super().__init__(
                offloading_spec,
                primary_kv_view,
                tier_type,
                backpressure_detector,
                tier=tier,
            )
        self._publishes &= enable_kv_events
        if locality is not None:
            self.locality = Locality[locality]
        self.file_mapper = self.tier.mapper  # type: ignore[attr-defined]
        self._lookup_manager = _Lookups(self.tier)


class _Lookups:
    """What the tests' helpers look at to know when an answer is there, and whether one was asked for anew."""

    def __init__(self, tier: Any) -> None:
        self._lookup = tier._lookup

    @property
    def _pending_results(self) -> Any:
        return self._lookup._replies

    @property
    def _lookup_batch(self) -> list[Any]:
        fresh: list[Any] = self._lookup._fresh
        return fresh


#: Tests that look at the insides of vLLM's tier, and what at.
INSIDES = {
    "test_shutdown_discards_pending_tasks": "its pool's queues",
    "test_store_load_roundtrip_without_o_direct": "its flag for O_DIRECT",
    "test_mixed_job_results_emit_event_only_for_successful_job": "its function that stores a batch",
    "test_partially_failed_store_emits_no_event": "its function that stores a batch",
    "test_events_disabled_by_default": "its list of events",
    "test_events_require_global_kv_events_flag": "its list of events",
}
#: Tests that ours fails on purpose, and what it does instead.
DIFFERENT = {
    "test_invalid_path_raises_at_construction": "StoreConfigError, which is no OSError",
    "test_batched_load_first_block_fails_marks_whole_batch": "the blocks behind a bad one are loaded too",
    "test_invalid_locality_raises_at_construction": "a tier's type says where its storage is",
    "test_store_event_uses_configured_locality[None-None]": "a tier's type says where its storage is",
    "test_failed_load_after_abort_does_not_break_newer_probe": (
        "a block that is known to be there is a hit for every request until a load of it fails, and then a miss for all"
    ),
}


def pytest_configure() -> None:
    """Before the tests are imported."""
    manager.FileSystemTierManager = InItsPlace


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what cannot hold here; one that passes all the same is an error."""
    for item in items:
        for name in (item.name, item.name.partition("[")[0]):
            if name in INSIDES:
                item.add_marker(pytest.mark.xfail(reason=f"looks at {INSIDES[name]}", strict=True))
            elif name in DIFFERENT:
                item.add_marker(pytest.mark.xfail(reason=f"ours: {DIFFERENT[name]}", strict=True))
            else:
                continue
            break
