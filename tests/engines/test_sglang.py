"""SGLang's HiCache over kvtiers: its own controller and host memory, pages on disk."""

from __future__ import annotations

import random
import re
import time
import urllib.request
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="SGLang is not installed: make test-engines")

import msgspec
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.server_args import ServerArgs

from kvtiers.connector.engines.release import Release
from kvtiers.connector.engines.sglang import identity
from kvtiers.connector.engines.sglang import storage as door
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.testing.fuse import FuseFault, FuseMount, why_no_fuse
from kvtiers.tiers.testing.servers import free_ports
from tests.engines.damage import damaged
from tests.engines.hicache import PAGE, Controller, config_of, host_pool, open_storage, set_arguments
from tests.engines.processes import in_two_processes, killing

NEEDS_FUSE = pytest.mark.skipif(bool(why_no_fuse()), reason=str(why_no_fuse()))


@pytest.fixture(autouse=True)
def arguments(tmp_path: Path) -> None:
    """SGLang's arguments, in this process."""
    set_arguments(tmp_path)


def hashes(count: int, seed: int = 1) -> list[str]:
    """Names of pages."""
    return [random.Random(f"{seed} {number}").randbytes(32).hex() for number in range(count)]


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_prompt_stored_by_one_server_is_prefetched_by_another(layout: str, tmp_path: Path) -> None:
    key = RadixKey(array("q", range(20 * PAGE + 5)))
    names = get_storage_hash_str(key, None, page_size=PAGE)
    one, two = host_pool(32, layout), host_pool(32, layout)
    indices = torch.arange(20 * PAGE)
    with closing(open_storage(config_of(tmp_path / "kv"), one)) as storage:
        assert Controller(storage, one).back_up(names[:20], indices) == 20 * PAGE
        stats = storage.get_stats()
        assert stats.backup_pgs == [20]
        assert not stats.prefetch_pgs
    with closing(open_storage(config_of(tmp_path / "kv"), two)) as storage:
        # Pages go to other places than they came from.
        places = torch.cat([torch.arange(p * PAGE, (p + 1) * PAGE) for p in range(30, 10, -1)])
        found, loaded = Controller(storage, two).prefetch(key, places)
        assert (found, loaded) == (names[:20], 20)
        assert storage.get_stats().prefetch_pgs == [20]
        for number in range(20):
            mine, theirs = one.get_data_page(number * PAGE), two.get_data_page((30 - number) * PAGE)
            assert torch.equal(mine, theirs)


def test_lookup_counts_leading_pages_only(tmp_path: Path) -> None:
    pool = host_pool(8)
    with closing(open_storage(config_of(tmp_path / "kv"), pool)) as storage:
        names = hashes(8)
        assert storage.batch_set_v1(names[:5], torch.arange(5 * PAGE)) == [True] * 5
        assert storage.batch_exists([*names[:3], hashes(1, 2)[0], names[4]]) == 3
        assert [storage.exists(names[4]), storage.exists(names[5])] == [True, False]
        got = storage.batch_get_v1([names[0], names[6], names[1]], torch.arange(3 * PAGE))
        assert got == [True, False, True]


@pytest.mark.parametrize("is_mla", [False, True])
def test_metrics_port_of_each_rank_is_base_port_plus_rank(is_mla: bool, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    changed: dict[str, Any] = {
        "options": {"metrics_port": port - 1}, "tp_size": 2, "tp_rank": 1, "is_mla_model": is_mla,
    }  # fmt: skip
    with closing(open_storage(config_of(tmp_path / "kv", **changed), host_pool(4))) as storage:
        assert storage.batch_set_v1(hashes(2), torch.arange(2 * PAGE)) == [True, True]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            text = response.read().decode()
        assert re.search(r'kvtiers_blocks_total\{[^}]*op="store"[^}]*\} 2.0', text)


def test_tenants_share_no_pages(tmp_path: Path) -> None:
    tokens = array("q", range(4 * PAGE))
    pool = host_pool(8)
    keys = [RadixKey(tokens, extra_key=extra) for extra in (None, "one", "two")] + [RadixKey(tokens, cache_salt="one")]
    with closing(open_storage(config_of(tmp_path / "kv"), pool)) as storage:
        controller = Controller(storage, pool)
        names = get_storage_hash_str(keys[1], None, page_size=PAGE)
        assert controller.back_up(names, torch.arange(4 * PAGE)) == 4 * PAGE
        found = [len(controller.prefetch(key, torch.arange(4 * PAGE, 8 * PAGE))[0]) for key in keys]
        assert found == [0, 4, 0, 0]


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, {}),
        ({"quantization": "fp8"}, {}),
        ({"attention_backend": "triton"}, {}),
        ({"json_model_override_args": '{"rope_theta": 5}'}, {}),
        ({"weights": b"other weights"}, {}),
        ({}, {"tp_size": 2}),
        ({}, {"tp_size": 2, "tp_rank": 1}),
        ({}, {"pp_size": 2, "pp_rank": 1}),
        ({}, {"attn_cp_size": 2}),
        ({}, {"is_mla_model": True}),
        ({}, {"model_name": "org/other"}),
        ({}, {"pool": {"layout": "layer_first"}}),
        ({}, {"pool": {"heads": 1}}),
    ],
    ids=str,
)
def test_engine_with_another_identity_finds_no_pages(
    changed: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """W6: each part of the identity alone."""
    pool = host_pool(4)
    with closing(open_storage(config_of(tmp_path / "kv"), pool)) as storage:
        assert all(storage.batch_set_v1(hashes(4), torch.arange(4 * PAGE)))
    set_arguments(tmp_path, **changed)
    options = dict(options)
    shape = options.pop("pool", {})
    with closing(open_storage(config_of(tmp_path / "kv", **options), host_pool(4, **shape))) as storage:
        assert storage.batch_exists(hashes(4)) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"port": 31000, "host": "0.0.0.0", "log_level": "debug"},
        {"mem_fraction_static": 0.5, "max_running_requests": 7, "chunked_prefill_size": 512},
        {"hicache_ratio": 3.0, "hicache_write_policy": "write_back", "enable_metrics": True, "random_seed": 7},
        {"disaggregation_mode": "prefill", "served_model_name": "x", "api_key": "secret"},
    ],
    ids=str,
)
def test_replica_with_other_addresses_and_limits_shares_pages(changed: dict[str, Any], tmp_path: Path) -> None:
    pool = host_pool(4)
    with closing(open_storage(config_of(tmp_path / "kv"), pool)) as storage:
        assert all(storage.batch_set_v1(hashes(4), torch.arange(4 * PAGE)))
    set_arguments(tmp_path, **changed)
    with closing(open_storage(config_of(tmp_path / "kv"), host_pool(4))) as storage:
        assert storage.batch_exists(hashes(4)) == 4


class NewerArgs(ServerArgs):  # type: ignore[misc]  # SGLang is not installed where mypy runs
    """Arguments of a later release: options with names like those that do not count."""

    attention_port: int = 0
    log_scale_attention: bool = False


def test_unknown_option_of_newer_release_counts_in_identity(tmp_path: Path) -> None:
    newer = NewerArgs(model_path=str(tmp_path / "model"), attention_port=1, log_scale_attention=True, port=31000)
    found = identity.counted(newer, environ={})
    assert {"attention_port", "log_scale_attention"} <= found.keys()
    assert "port" not in found


def test_environment_variable_counts_in_identity_unless_known_not_to_change_pages() -> None:
    arguments = ServerArgs(model_path="x")
    counting = ["SGLANG_OPT_USE_MINIMAX_FP8_Q_EPILOGUE", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "SGLANG_NEW_EXPORT"]
    others = ["SGLANG_HOST_IP", "SGLANG_LOG_GC", "SGLANG_HICACHE_HOST_HUGEPAGE", "SGLANG_REQ_WAITING_TIMEOUT", "PATH"]
    usual = identity.counted(arguments, environ={})
    found = identity.counted(arguments, environ=dict.fromkeys([*counting, *others], "1"))
    assert found.keys() - usual.keys() == set(counting)


def test_uncounted_options_are_options_of_the_tested_release() -> None:
    names = {field.name for field in msgspec.structs.fields(ServerArgs)}
    assert names >= identity._UNCOUNTED


def test_ten_thousand_pages_stored_by_two_processes_load_equal(tmp_path: Path) -> None:
    count, each = 10_000, 128
    small: dict[str, Any] = {"heads": 1, "dim": 8, "layers": 1}

    def content(number: int) -> torch.Tensor:
        return torch.full((PAGE * 16,), float(number % 200), dtype=torch.bfloat16)

    def work(part: int) -> None:
        pool = host_pool(each, **small)
        with closing(open_storage(config_of(tmp_path / "kv"), pool)) as storage:
            for start in range(part * count // 2, (part + 1) * count // 2, each):
                names = hashes(count)[start : min(start + each, (part + 1) * count // 2)]
                for place in range(len(names)):
                    pool.set_from_flat_data_page(place * PAGE, content(start + place))
                assert all(storage.batch_set_v1(names, torch.arange(len(names) * PAGE)))

    in_two_processes(work)
    pool = host_pool(each, **small)
    names = hashes(count)
    with closing(open_storage(config_of(tmp_path / "kv"), pool)) as storage:
        assert storage.batch_exists(names) == count
        for start in range(0, count, each):
            some = names[start : start + each]
            assert all(storage.batch_get_v1(some, torch.arange(len(some) * PAGE)))
            for place in range(len(some)):
                assert torch.equal(pool.get_data_page(place * PAGE), content(start + place))


@pytest.mark.parametrize("times", [1_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_damaged_page_is_a_miss_until_stored_again(times: int, tmp_path: Path) -> None:
    """W1: a damaged page is a miss that leaves the memory as it was, and the next store heals it."""
    small: dict[str, Any] = {"heads": 1, "dim": 8, "layers": 1}
    pool, names = host_pool(33, **small), hashes(32)
    by_name = {f"{name}.bin": number for number, name in enumerate(names)}
    spare = torch.arange(32 * PAGE, 33 * PAGE)
    with closing(open_storage(config_of(tmp_path / "kv"), pool)) as storage:
        assert all(storage.batch_set_v1(names, torch.arange(32 * PAGE)))
        for name in damaged(tmp_path / "kv", times, seed=5):
            number = by_name[name]
            own = torch.arange(number * PAGE, (number + 1) * PAGE)
            pool.set_from_flat_data_page(32 * PAGE, torch.zeros(PAGE * 16, dtype=torch.bfloat16))
            assert storage.batch_get_v1([names[number]], spare) == [False]
            assert not pool.get_data_page(32 * PAGE).any()
            assert storage.batch_set_v1([names[number]], own) == [True]
            assert storage.batch_get_v1([names[number]], spare) == [True]
            assert torch.equal(pool.get_data_page(32 * PAGE), pool.get_data_page(number * PAGE))


@NEEDS_FUSE
def test_calls_on_hung_mount_fail_in_time_and_succeed_after_recovery(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").mkdir()
    pool = host_pool(16)
    tier = {"type": "fs", "root_dir": str(tmp_path / "kv"), "min_free": 0, "job_deadline_s": 1.0}
    with (
        FuseMount(tmp_path / "real", tmp_path / "kv") as mount,
        closing(open_storage(config_of(tmp_path / "kv", options={"tier": tier}), pool)) as storage,
    ):
        names = hashes(16)
        assert all(storage.batch_set_v1(names, torch.arange(16 * PAGE)))
        with mount.stopped():
            began = time.monotonic()
            assert not any(storage.batch_get_v1(names, torch.arange(16 * PAGE)))
            assert storage.batch_exists(names) == 0
            assert not any(storage.batch_set_v1(names, torch.arange(16 * PAGE)))
            assert time.monotonic() - began < 8
        until = time.monotonic() + 40
        while storage.batch_exists(names) < 16 and time.monotonic() < until:
            time.sleep(0.1)
        while not all(storage.batch_get_v1(names, torch.arange(16 * PAGE))) and time.monotonic() < until:
            time.sleep(0.1)
        assert all(storage.batch_get_v1(names, torch.arange(16 * PAGE)))


@NEEDS_FUSE
def test_store_on_full_disk_fails_and_stored_pages_still_load(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").mkdir()
    pool = host_pool(16)
    with (
        FuseMount(tmp_path / "real", tmp_path / "kv") as mount,
        closing(open_storage(config_of(tmp_path / "kv"), pool)) as storage,
    ):
        names = hashes(16)
        assert all(storage.batch_set_v1(names[:8], torch.arange(8 * PAGE)))
        mount.plan = [FuseFault("write", errno=28)]
        assert Controller(storage, pool).back_up(names[8:], torch.arange(8 * PAGE)) == 0
        assert all(storage.batch_get_v1(names[:8], torch.arange(8 * PAGE)))


def test_start_succeeds_and_calls_fail_soon_when_bucket_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    tier = {"type": "s3", "bucket": "blocks", "endpoint_url": "http://127.0.0.1:9", "job_deadline_s": 2.0}
    pool = host_pool(4)
    with closing(open_storage(config_of(tmp_path, options={"tier": tier}), pool)) as storage:
        began = time.monotonic()
        assert storage.batch_exists(hashes(4)) == 0
        assert not any(storage.batch_set_v1(hashes(4), torch.arange(4 * PAGE)))
        assert time.monotonic() - began < 3


def test_pages_survive_kills_of_tier_processes(tmp_path: Path) -> None:
    pool, other = host_pool(64), host_pool(64)
    names = hashes(64)
    with closing(open_storage(config_of(tmp_path / "kv"), pool)) as storage:
        with killing(lambda: storage._door.tier.tier._channel.pids[:1]):
            for _ in range(6):
                storage.batch_set_v1(names, torch.arange(64 * PAGE))
                storage.mem_pool_host = other
                other.kv_buffer.zero_()
                for number, is_loaded in enumerate(storage.batch_get_v1(names, torch.arange(64 * PAGE))):
                    if is_loaded:
                        assert torch.equal(other.get_data_page(number * PAGE), pool.get_data_page(number * PAGE))
                storage.mem_pool_host = pool
        until = time.monotonic() + 60
        while not all(storage.batch_set_v1(names, torch.arange(64 * PAGE))) and time.monotonic() < until:
            time.sleep(0.1)
    with closing(open_storage(config_of(tmp_path / "kv"), other)) as storage:
        assert all(storage.batch_get_v1(names, torch.arange(64 * PAGE)))
        assert torch.equal(other.kv_buffer, pool.kv_buffer)


@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        ({"interface_v1": 0}, {}, "interface_v1: is missing; write 1"),
        ({"teir": {}}, {}, "teir: is not an option of kvtiers; accepted are"),
        ({"tier": {"type": "memory"}}, {}, "type: memory cannot be shared by processes"),
        ({"staging": "1KiB"}, {}, "staging: "),
        ({"metrics_port": "9100"}, {}, "metrics_port: '9100' is not accepted; write 1 to 65535"),
        ({}, {"should_split_heads": True}, "tp_lcm_size: splits pages by heads"),
        ({"identity": {"ignore": ["no_such"]}}, {}, "identity.ignore: no_such is not an option of SGLang"),
        ({"identity": {"ingore": []}}, {}, "identity.ingore"),
        ({"identity": "port"}, {}, "identity"),
    ],
)
def test_wrong_option_is_refused_at_start(
    options: dict[str, Any], changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_storage(config_of(tmp_path, options=options, **changed), host_pool(4))


def test_model_without_known_weights_is_refused(tmp_path: Path) -> None:
    set_arguments(tmp_path, model_path="org/not-here")
    with pytest.raises(ConfigError, match="its weights are unknown; give --revision"):
        open_storage(config_of(tmp_path), host_pool(4))


def test_host_pool_with_more_than_kv_is_refused(tmp_path: Path) -> None:
    with closing(open_storage(config_of(tmp_path), host_pool(4))) as storage:
        storage.register_mem_host_pool_v2(host_pool(4), PoolName.KV)
        with pytest.raises(ConfigError, match="host pool: mamba: this model keeps more than KV"):
            storage.register_mem_host_pool_v2(host_pool(4), PoolName.MAMBA)

    class HiSparseMHATokenToKVPoolHost:
        pass

    with pytest.raises(ConfigError, match="pages of HiSparseMHATokenToKVPoolHost are not supported"):
        open_storage(config_of(tmp_path), HiSparseMHATokenToKVPoolHost())


def test_tested_release_is_accepted_and_error_for_changed_release_names_missing_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door.RELEASE.check(door.KVTiersHiCacheStorage)
    assert door.RELEASE.version in door.RELEASE.tested
    changed = Release("sglang", ("0.5.23",), {"sglang.srt.runtime_context": ["get_no_args()"]})
    with pytest.raises(ConfigError, match=r"sglang: version .*get_no_args is gone"):
        changed.check()
    monkeypatch.delattr(HiCacheStorage, "batch_get_v1")
    with pytest.raises(ConfigError, match=r"HiCacheStorage\.batch_get_v1 is gone"):
        door.RELEASE.check(door.KVTiersHiCacheStorage)
