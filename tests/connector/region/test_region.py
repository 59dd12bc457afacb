"""SharedOffloadRegion within one process: layout, arguments, limits and what happens at the name."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtiers.connector.region import region_file, region_header
from kvtiers.connector.region.region_file import reap_stale_regions, region_path, remove_name
from kvtiers.connector.region.region_header import NUM_WORKERS_MAX
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.errors import ConfigError, RegionError
from kvtiers.tiers.testing.faults import run_in_child

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def instance_id() -> Iterator[str]:
    name = f"test-{os.getpid()}-{os.urandom(4).hex()}"
    yield name
    Path(region_path("/dev/shm", name)).unlink(missing_ok=True)


def test_row_has_one_cell_for_each_worker_and_starts_on_a_page(instance_id: str) -> None:
    cell = PAGE // 2 + 100
    scheduler = SharedOffloadRegion(instance_id, 5, cell, 2, None)
    workers = [SharedOffloadRegion(instance_id, 5, cell, 2, rank) for rank in range(2)]
    for rank, worker in enumerate(workers):
        for tensor, size in enumerate((100, PAGE // 2)):
            view = worker.create_next_view(size)
            assert view.shape == (5, size)
            assert view.stride() == (2 * PAGE, 1)
            for block in range(5):
                view[block] = 40 * rank + 20 * tensor + block
            del view
    rows = scheduler.create_kv_memoryview()
    assert (rows.shape, rows.format, rows.c_contiguous, rows.readonly) == ((5, 2 * PAGE), "b", True, False)
    assert scheduler.geometry.row_stride == 2 * PAGE
    for block, row in enumerate(np.asarray(rows)):
        for rank in range(2):
            worker_cell = row[rank * cell : (rank + 1) * cell]
            assert set(worker_cell[:100]) == {40 * rank + block}
            assert set(worker_cell[100:]) == {40 * rank + 20 + block}
        assert not row[2 * cell :].any()
    del rows, row, worker_cell
    for region in (scheduler, *workers):
        region.cleanup()


def test_workers_that_have_not_mapped_the_region_are_absent(instance_id: str) -> None:
    first = SharedOffloadRegion(instance_id, 5, PAGE, 3, 1)
    scheduler = SharedOffloadRegion(instance_id, 5, PAGE, 3, None)
    assert scheduler.absent_workers() == [0, 2]
    others = [SharedOffloadRegion(instance_id, 5, PAGE, 3, rank) for rank in (2, 0)]
    assert scheduler.absent_workers() == []
    for region in (first, *others):
        region.cleanup()
    assert scheduler.absent_workers() == []  # they were there: who leaves is the engine's end
    scheduler.cleanup()


def test_slot_written_through_one_view_is_visible_in_every_view() -> None:
    region = SharedOffloadRegion.anonymous(4, 64)
    rows = region.create_kv_memoryview().cast("B")
    view = region.create_next_view(64)
    rows[PAGE : PAGE + 64] = bytes(range(64))
    assert view[1].tolist() == list(range(64))
    view[2] = 7
    assert bytes(rows[2 * PAGE : 2 * PAGE + 64]) == b"\7" * 64


def test_views_past_the_cell_are_refused() -> None:
    region = SharedOffloadRegion.anonymous(2, 100)
    region.create_next_view(60)
    with pytest.raises(RegionError, match="tensor_page_size 41 does not fit: 60 of the cell's 100 bytes"):
        region.create_next_view(41)
    with pytest.raises(RegionError, match="tensor_page_size 0"):
        region.create_next_view(0)
    region.create_next_view(40)
    region.cleanup()


def test_view_of_the_scheduler_is_refused() -> None:
    region = SharedOffloadRegion(None, 2, 100, num_workers=1, rank=None)
    with pytest.raises(RegionError, match="scheduler"):
        region.create_next_view(10)
    region.cleanup()


def test_region_file_is_private_and_removed_once_mapped_by_all_processes(instance_id: str) -> None:
    path = region_path("/dev/shm", instance_id)
    old_umask = os.umask(0)
    try:
        first = SharedOffloadRegion(instance_id, 2, PAGE, 1, None)
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    second = SharedOffloadRegion(instance_id, 2, PAGE, 1, 0)
    assert not os.path.exists(path)
    first.create_kv_memoryview().cast("B")[0] = 9
    assert second.create_kv_memoryview()[0, 0] == 9
    first.cleanup()
    second.cleanup()


def test_region_file_is_removed_after_a_reaper_releases_its_lock(instance_id: str) -> None:
    region = SharedOffloadRegion(instance_id, 2, PAGE, 1, 0)
    path = region_path("/dev/shm", instance_id)
    reaper = os.open(path, os.O_RDWR)
    fcntl.flock(reaper, fcntl.LOCK_EX)
    remove_name(region.fd, path, sleep=lambda _: fcntl.flock(reaper, fcntl.LOCK_UN))
    assert not os.path.exists(path)
    os.close(reaper)
    region.cleanup()


def test_cleanup_removes_the_name_and_is_idempotent(instance_id: str) -> None:
    region = SharedOffloadRegion(instance_id, 2, PAGE, 1, 0)
    region.cleanup()
    region.cleanup()
    assert not os.path.exists(region_path("/dev/shm", instance_id))
    for use in (region.create_kv_memoryview, lambda: region.create_next_view(1), lambda: region.fd):
        with pytest.raises(RegionError, match="cleaned up"):
            use()


def test_cleanup_leaves_a_newer_region_of_the_same_name(instance_id: str) -> None:
    old = [SharedOffloadRegion(instance_id, 2, PAGE, 1, rank) for rank in (None, 0)]
    new = SharedOffloadRegion(instance_id, 2, PAGE, 1, None)
    for region in old:
        region.cleanup()
    assert os.path.exists(region_path("/dev/shm", instance_id))
    new.cleanup()


def test_views_outlive_cleanup() -> None:
    region = SharedOffloadRegion.anonymous(2, PAGE)
    rows = region.create_kv_memoryview().cast("B")
    view = region.create_next_view(PAGE)
    region.cleanup()
    rows[0] = 5
    assert view[0, 0] == 5


def test_tensor_keeps_memory_mapped_after_cleanup() -> None:
    region = SharedOffloadRegion.anonymous(2, PAGE)
    view = region.create_next_view(PAGE)
    view[1, 7] = 5
    start = f"{view.data_ptr():x}-"

    def is_mapped() -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return any(line.startswith(start) and "kvtiers-region" in line for line in lines)

    region.cleanup()
    assert is_mapped()
    assert view[1, 7] == 5
    del view
    assert not is_mapped()


def test_an_anonymous_region_cannot_be_resized() -> None:
    region = SharedOffloadRegion(None, 3, PAGE, num_workers=2, rank=None)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 100 * PAGE)
    region.cleanup()


def test_output_to_closed_stderr_does_not_get_into_the_region(instance_id: str) -> None:
    def use() -> None:
        os.close(2)
        for name in (None, instance_id):
            region = SharedOffloadRegion(name, 1, PAGE, 1, 0)
            os.write(2, b"printed")
            assert bytes(region.create_kv_memoryview()) == bytes(PAGE)

    assert run_in_child(use) == 0


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"instance_id": ""}, "instance_id"),
        ({"instance_id": "a/b"}, "instance_id"),
        ({"instance_id": "a\0b"}, "instance_id"),
        ({"instance_id": "a\nb"}, "instance_id"),
        ({"instance_id": "x" * 300}, "instance_id"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"num_blocks": 1.5}, "num_blocks"),
        ({"num_blocks": True}, "num_blocks"),
        ({"num_blocks": 1 << 40, "cpu_page_size": 1 << 40}, "num_blocks"),
        ({"cpu_page_size": 0}, "cpu_page_size"),
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": NUM_WORKERS_MAX + 1}, "num_workers"),
        ({"rank": 1}, "rank"),
        ({"rank": -1}, "rank"),
    ],
)
def test_invalid_argument_is_refused_by_name(changed: dict[str, object], field: str) -> None:
    arguments: dict[str, object] = {
        "instance_id": "good",
        "num_blocks": 1,
        "cpu_page_size": 1,
        "num_workers": 1,
        "rank": 0,
    }
    with pytest.raises(ConfigError) as e:
        SharedOffloadRegion(**(arguments | changed))  # type: ignore[arg-type]
    assert e.value.field == field
    assert not os.path.exists(region_path("/dev/shm", "good"))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"num_blocks": 3}, "num_blocks"),
        ({"cpu_page_size": PAGE - 1}, "cpu_page_size"),
        ({"num_workers": 2}, "num_workers"),
    ],
)
def test_two_configs_for_one_region_are_refused_by_field(instance_id: str, changed: dict[str, int], field: str) -> None:
    first = SharedOffloadRegion(instance_id, 2, PAGE, 1, None)
    shape = {"num_blocks": 2, "cpu_page_size": PAGE, "num_workers": 1} | changed
    num_blocks, cpu_page_size, num_workers = shape.values()
    with pytest.raises(RegionError, match=f"{field} .*this process has.*two configs for one region"):
        SharedOffloadRegion(instance_id, num_blocks, cpu_page_size, num_workers, 0)
    assert os.path.exists(region_path("/dev/shm", instance_id))  # the one who is wrong breaks nothing
    first.cleanup()


def test_rank_that_is_taken_is_refused(instance_id: str) -> None:
    first = SharedOffloadRegion(instance_id, 2, PAGE, 2, 1)
    with pytest.raises(RegionError, match=f"rank 1 is process {os.getpid()} already, or a process that"):
        SharedOffloadRegion(instance_id, 2, PAGE, 2, 1)
    first.cleanup()


def _symlink(path: Path) -> None:
    path.symlink_to(path.with_name("victim"))


def _folder(path: Path) -> None:
    path.mkdir()


def _fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _readable_by_others(path: Path) -> None:
    path.write_bytes(b"\0" * 3 * PAGE)
    path.chmod(0o644)


def _foreign(path: Path) -> None:
    path.write_bytes(b"\0" * 3 * PAGE)
    path.chmod(0o600)


@pytest.mark.parametrize("plant", [_symlink, _folder, _fifo, _readable_by_others, _foreign])
def test_file_that_is_not_a_region_is_neither_used_nor_removed(plant: Callable[[Path], None], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = Path(region_path(str(tmp_path), "x"))
    plant(path)
    before = os.lstat(path)
    with pytest.raises(RegionError, match="remove it"):
        SharedOffloadRegion("x", 2, PAGE, 1, 0, directory=str(tmp_path))
    assert reap_stale_regions(str(tmp_path)) == []
    assert os.path.samestat(before, os.lstat(path))
    assert victim.read_bytes() == b"precious"


def test_empty_region_file_is_replaced_as_left_by_a_dead_creator(tmp_path: Path) -> None:
    path = Path(region_path(str(tmp_path), "x"))
    path.touch(mode=0o600)
    region = SharedOffloadRegion("x", 2, PAGE, 1, 0, directory=str(tmp_path))
    region.cleanup()
    assert list(tmp_path.iterdir()) == []


def test_region_of_another_version_is_refused_and_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_header, "_VERSION", 3)
    newer = SharedOffloadRegion("x", 2, PAGE, 1, None, directory=str(tmp_path))
    monkeypatch.undo()
    with pytest.raises(RegionError, match=f"{tmp_path}.* version 3, this program knows 2: .* remove the file"):
        SharedOffloadRegion("x", 2, PAGE, 1, 0, directory=str(tmp_path))
    assert reap_stale_regions(str(tmp_path)) == []
    newer.cleanup()


def test_a_missing_directory_is_a_region_error(tmp_path: Path) -> None:
    with pytest.raises(RegionError, match="No such file"):
        SharedOffloadRegion("x", 2, PAGE, 1, 0, directory=str(tmp_path / "absent"))


def test_region_larger_than_the_memory_is_refused_at_once() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE
    with pytest.raises(RegionError, match=r"does not fit: .* free\. Make region\.size smaller"):
        SharedOffloadRegion.anonymous(2 * memory // PAGE, PAGE)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[str]:
    yield from mounted_tmpfs(tmp_path, "size=1M")


@pytest.fixture
def unlimited_tmpfs(tmp_path: Path) -> Iterator[str]:
    yield from mounted_tmpfs(tmp_path, "size=0")


def mounted_tmpfs(tmp_path: Path, option: str) -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", option, "none", tmp_path], check=False, capture_output=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.decode()}")
    yield str(tmp_path)
    subprocess.run(["umount", tmp_path], check=True)


def test_error_for_region_larger_than_tmpfs_suggests_smaller_region_or_more_shm(small_tmpfs: str) -> None:
    with pytest.raises(
        RegionError, match=rf"{small_tmpfs} has 10\d\d KiB free\. Make region\.size smaller.*--shm-size"
    ):
        SharedOffloadRegion("x", 1024, PAGE, 1, 0, directory=small_tmpfs)
    assert os.listdir(small_tmpfs) == []


def test_tmpfs_without_a_limit_holds_a_region(unlimited_tmpfs: str) -> None:
    SharedOffloadRegion("x", 4, PAGE, 1, 0, directory=unlimited_tmpfs).cleanup()


def test_tmpfs_that_fills_meanwhile_raises_an_error_and_no_sigbus(
    small_tmpfs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def stale_answer(directory: str) -> Iterator[tuple[str, int]]:
        seen.append(directory)
        yield directory, (1 << 40 if len(seen) == 1 else 0)

    monkeypatch.setattr(region_file, "_limits", stale_answer)
    with pytest.raises(RegionError, match="does not fit"):
        SharedOffloadRegion("x", 1024, PAGE, 1, 0, directory=small_tmpfs)
    assert os.listdir(small_tmpfs) == []
    assert os.statvfs(small_tmpfs).f_bfree * PAGE == 1 << 20  # the memory came back
