"""copy, between real folders and S3."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import typer

from kvtiers.connector.commands.copy import _read_names
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.keyring import KeyRing
from kvtiers.tiers.blocks.protected_seal import GcmSeal
from kvtiers.tiers.blocks.seal import TRAILER_BYTES
from kvtiers.tiers.capacity.usage import Usage, publish_usage
from kvtiers.tiers.capacity.written import Writer, used_bytes
from kvtiers.tiers.errors import StoreConfigError, StoreFullError, StorePermissionError, StoreUnavailableError
from kvtiers.tiers.server.namespace import open_namespace
from kvtiers.tiers.stores.files import listing as folder_listing
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.faults import Fault, FaultyStore, run_in_child
from kvtiers.tiers.testing.servers import moto_server
from kvtiers.tiers.tools.copying import Copier, find_blocks
from tests.connector.commands.test_storage_commands import ok, result_of, run, write_tiers
from tests.connector.commands.test_verify_command import COUNT, NAMES, SIZE, flip, make_newer, put_blocks
from tests.identity import FakeSpec, block_key
from tests.s3_clients import use_credentials
from tests.tiers.stores.files.test_local_faults import Damaged
from tests.web_server import serve_folder

BLOB = SIZE + TRAILER_BYTES
#: As a near tier is filled from a far one.
FILL = ("--from", "far", "--to", "near", "--until-full")
NAMESPACE = NAMES[0].partition("/")[0].removesuffix("_r0")


@pytest.fixture
def far(tmp_path: Path) -> Path:
    store = LocalStore(tmp_path / "far")
    put_blocks(store)
    store.close()
    return tmp_path / "far"


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


def write_config(near: Path, far: Path, *options: str) -> str:
    first = ", ".join(("type: fs", "name: near", f"root_dir: {near}", *options))
    return write_tiers(near.parent / "c.yaml", first, f"type: nfs, name: far, root_dir: {far}")


def stored(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.bin") if ".tmp" not in path.parts}


def test_copy_fills_the_first_tier_from_the_last(near: Path, far: Path) -> None:
    config = write_config(near, far)
    assert f"copied: {COUNT} blocks" in ok("copy", config, *FILL)
    assert stored(near) == stored(far)
    assert "all blocks are intact" in ok("verify", config, "--tier", "near")
    assert f"already present: {COUNT} blocks" in ok("copy", config, *FILL)
    assert (near / NAMESPACE / "config.json").read_bytes() == (far / NAMESPACE / "config.json").read_bytes()


def test_copy_is_limited_by_names_or_namespace(near: Path, far: Path, tmp_path: Path) -> None:
    config = write_config(near, far)
    names = tmp_path / "names"
    names.write_text(f"{NAMES[3]}\n\n{NAMES[5][:-9]}\n{NAMESPACE}_r7/\n")
    assert result_of(ok("copy", config, *FILL, "--names", str(names), "--json"))["copied"] == 2
    assert stored(near).keys() == {NAMES[3], NAMES[5]}
    result = result_of(ok("copy", config, *FILL, "--namespace", NAMESPACE, "--json"))
    assert (result["copied"], result["present"]) == (COUNT - 2, 2)


def test_copy_fails_if_no_block_matches(near: Path, far: Path, tmp_path: Path) -> None:
    config = write_config(near, far)
    names = tmp_path / "names"
    names.write_text("nothing\n")
    for option in (("--namespace", "other_0123"), ("--names", str(names))):
        code, out = run("copy", config, *FILL, *option)
        assert code == 1
        assert "far at " in out
        assert "no block with such a name" in out


def test_copy_reports_folder_that_cannot_be_read_and_copies_the_rest(
    near: Path, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = NAMES[0].split("/")[1]
    monkeypatch.setattr(folder_listing, "os", Damaged({folder}, errno.EIO))
    code, out = run("copy", write_config(near, far), "--from", "far", "--to", "near")
    assert code == 1
    assert "has 1 folders or files that cannot be read" in out
    assert stored(near).keys() == {name for name in NAMES if name.split("/")[1] != folder}


@pytest.fixture
def no_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of a few small blocks are accepted."""
    monkeypatch.setattr("kvtiers.tiers.config.tier_options.MAX_BYTES_MIN", 1)


@pytest.mark.usefixtures("no_least")
def test_copy_stops_at_max_bytes_of_the_target(near: Path, far: Path) -> None:
    room = 10 * BLOB + 3000  # for its config.json, and less than one more
    out = ok("copy", write_config(near, far, f"max_bytes: {room}"), *FILL)
    assert "copied: 10 blocks" in out
    assert "the target is full" in out
    assert len(stored(near)) == 10
    assert "copied: 0 blocks" in ok("copy", write_config(near, far, f"max_bytes: {room}"), *FILL)


@pytest.mark.usefixtures("no_least")
def test_copy_counts_blocks_of_running_writers_against_max_bytes(near: Path, far: Path) -> None:
    """The limit counts blocks that writers have put, and the collector counts blocks that copy has put."""
    max_bytes = 16 * BLOB
    config = write_config(near, far, f"max_bytes: {max_bytes}")
    store = LocalStore(near)
    publish_usage(store, Usage(bytes=4 * BLOB, listed=1))
    writer = Writer(store, poll_s=1.0)
    writer.note_put(2 * BLOB)
    writer.poll()
    copied = result_of(ok("copy", config, *FILL, "--json"))
    assert copied["no_room"]
    assert copied["copied"] == 10
    assert used_bytes(store) == 16 * BLOB
    store.close()


@pytest.mark.usefixtures("no_least")
def test_copy_that_reaches_max_bytes_fails(near: Path, far: Path) -> None:
    config = write_config(near, far, f"max_bytes: {10 * BLOB}")
    assert run("copy", config, "--from", "far", "--to", "near")[0] == 1


def test_bad_blocks_are_not_copied(near: Path, far: Path) -> None:
    flip(far / NAMES[0], 100)
    flip(far / NAMES[1], SIZE + 20)
    code, out = run("copy", write_config(near, far), *FILL)
    assert code == 1
    assert "the seal is bad" in out
    assert stored(near).keys() == set(NAMES[2:])
    assert len(stored(far)) == COUNT


@pytest.mark.parametrize("how", ["truncated", "trailer", "another block"])
def test_copy_replaces_a_damaged_block_in_the_target(near: Path, far: Path, how: str) -> None:
    config = write_config(near, far)
    ok("copy", config, *FILL)
    if how == "trailer":
        flip(near / NAMES[0], SIZE + 60)
    else:
        (near / NAMES[0]).write_bytes(b"short" if how == "truncated" else (near / NAMES[1]).read_bytes())
    planned = result_of(ok("copy", config, *FILL, "--json", "--dry-run"))
    result = result_of(ok("copy", config, *FILL, "--json"))
    assert (planned["copied"], result["copied"], result["present"]) == (1, 1, COUNT - 1)
    assert stored(near) == stored(far)


@pytest.mark.usefixtures("no_least")
def test_copy_replaces_a_damaged_block_in_a_full_target(near: Path, far: Path) -> None:
    ok("copy", write_config(near, far), *FILL)
    flip(near / NAMES[0], SIZE + 60)
    full = sum(path.stat().st_size for path in near.rglob("*") if path.is_file())
    ok("copy", write_config(near, far, f"max_bytes: {full}"), "--from", "far", "--to", "near")
    assert stored(near) == stored(far)


@pytest.mark.parametrize("more", [b"", bytes(4096)], ids=["same size", "other size"])
def test_copy_keeps_a_newer_versions_block_and_fails(near: Path, far: Path, more: bytes) -> None:
    config = write_config(near, far)
    ok("copy", config, *FILL)
    make_newer(near / NAMES[0])
    (near / NAMES[0]).write_bytes(more + (near / NAMES[0]).read_bytes())
    before = stored(near)
    code, out = run("copy", config, *FILL)
    assert code == 1
    assert "or the target has a newer version's block: 1 block" in out
    assert stored(near) == before


def test_copy_skips_namespace_without_identity_and_fails(near: Path, far: Path) -> None:
    (far / NAMESPACE / "config.json").unlink()
    code, out = run("copy", write_config(near, far), *FILL)
    assert code == 1
    assert "config.json is missing or damaged" in out
    assert f"not copied, because their namespace is skipped: {COUNT} blocks" in out
    assert "could not be read" not in out
    assert not stored(near)


def test_copy_of_other_namespaces_goes_on_after_namespace_without_identity(near: Path, far: Path) -> None:
    digest = NAMESPACE.rpartition("_")[2]
    other = far / NAMES[0].partition("/")[0].replace(digest, "0" * 12)  # listed before the good one, or after it
    shutil.copytree(far / NAMES[0].partition("/")[0], other)
    shutil.copytree(other, other.with_name(other.name.replace("0" * 12, "f" * 12)))
    config = write_config(near, far)
    code, out = run("copy", config, *FILL, "--json")
    assert code == 1
    result = result_of(out)
    assert (result["copied"], result["failed"], result["skipped"]) == (COUNT, 0, 2 * COUNT)
    assert sorted(result["left_out"]) == [NAMESPACE.replace(digest, digit * 12) for digit in "0f"]
    assert sum(line.startswith("kvtiers") and "is skipped:" in line for line in out.splitlines()) == 2


def test_skipped_namespace_takes_no_room_in_the_target(near: Path, far: Path) -> None:
    digest = NAMESPACE.rpartition("_")[2]
    other = far / NAMES[0].partition("/")[0].replace(digest, "0" * 12)  # listed before the good one
    shutil.copytree(far / NAMES[0].partition("/")[0], other)
    source, target = LocalStore(far, read_only=True), LocalStore(near)
    room_bytes = (far / NAMES[0]).stat().st_size
    report = Copier(source, target, room_bytes=room_bytes).copy(find_blocks(source, [""]))
    assert (report.copied, report.no_room) == (1, True)


def test_kept_oversized_block_of_target_gives_no_room_to_other_blocks(near: Path, far: Path) -> None:
    ok("copy", write_config(near, far), *FILL)
    source, target = LocalStore(far), LocalStore(near)
    first, *others = (info.key for info, _ in find_blocks(source, [""]))
    flip(far / first, 100)  # so it does not replace the target's
    (near / first).write_bytes(bytes(9 * BLOB))
    for name in others[:5]:
        (near / name).unlink()
    report = Copier(source, target, room_bytes=0).copy(find_blocks(source, [""]))
    assert (report.copied, report.bad, report.no_room) == (0, 1, True)
    assert (near / first).stat().st_size == 9 * BLOB


def test_copy_stops_if_target_refuses_every_store(near: Path, far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million blocks not one would be copied."""

    def refuse(*_: object, **__: object) -> bool:
        raise StoreConfigError("this file system has no hard links")

    source, target = LocalStore(far, read_only=True), LocalStore(near)
    monkeypatch.setattr(target, "put", refuse)
    with pytest.raises(StoreConfigError, match="no hard links"):
        Copier(source, target).copy(find_blocks(source, [""]))


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
@pytest.mark.parametrize("refused", ["000", "leaf", "namespace"])
def test_copy_goes_on_past_unwritable_folders_of_the_target(near: Path, far: Path, refused: str) -> None:
    """As a command leaves them that was run by root."""
    ok("copy", write_config(near, far), *FILL)
    name = NAMES[0]
    folder = (
        near / {"000": "/".join(name.split("/")[:2]), "leaf": name.rpartition("/")[0], "namespace": NAMESPACE}[refused]
    )
    files = [path for path in near.rglob("*.bin") if path != near / name]
    for path in files:
        path.unlink()
    missing = [path for path in files if folder not in path.parents]
    for path in (near, *near.rglob("*"), far, *far.rglob("*")):
        os.chown(path, 65534, 65534)
    os.chown(folder, 0, 0)
    for outer in (near, *near.parents):
        if outer.stat().st_mode & 0o001 == 0:
            outer.chmod(outer.stat().st_mode | 0o711)

    def use() -> None:
        os.setgid(65534)
        os.setuid(65534)
        source, target = LocalStore(far, read_only=True), LocalStore(near)
        report = Copier(source, target).copy(find_blocks(source, [""]))
        if refused == "namespace":
            assert (report.copied, list(report.left_out)) == (0, [NAMESPACE])
        else:
            assert report.copied == len(missing)
        assert report.copied + report.present + report.failed + report.skipped == COUNT
        assert report.skipped if refused == "namespace" else report.failed

    assert run_in_child(use) == 0


def test_copy_with_names_from_closed_standard_input_is_bad_input(
    near: Path, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.connector.commands.copy.sys.stdin", None)
    with pytest.raises(typer.Exit) as caught:
        _read_names(Path("-"))
    assert caught.value.exit_code == 2


def test_target_folder_of_another_namespace_is_refused(near: Path, far: Path) -> None:
    (near / NAMESPACE).mkdir(parents=True)
    (near / NAMESPACE / "config.json").write_text("{}")
    code, out = run("copy", write_config(near, far), *FILL)
    assert code == 1
    assert "belongs to another namespace" in out


def test_wrong_arguments_of_copy_are_bad_input(near: Path, far: Path, tmp_path: Path) -> None:
    config = write_config(near, far)
    empty = tmp_path / "empty"
    empty.touch()
    for args, expected in (
        ((config,), "--from: say which tier; accepted: near, far"),
        ((config, "--from", "nowhere"), "--from: no tier 'nowhere'; accepted: near, far"),
        ((config, "--from", "far"), "--to: say which tier; accepted: near, far"),
        ((config, "--from", "near", "--to", "near"), "choose two tiers"),
        ((config, *FILL, "--names", str(tmp_path / "none")), "No such file"),
        ((config, *FILL, "--names", str(empty)), "is empty; write the beginning"),
        ((config, *FILL, "--names", str(empty), "--namespace", "x"), "are mutually exclusive"),
        ((config, str(tmp_path / "none.yaml")), "none.yaml"),
    ):
        code, out = run("copy", *args)
        assert code == 2, out
        assert expected in out


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A tier's options."""
    with moto_server() as server:
        use_credentials(monkeypatch, server)
        client = boto3.client("s3", endpoint_url=server.endpoint_url, region_name=server.region)
        client.create_bucket(Bucket="copies")
        yield f"type: s3, bucket: copies, prefix: p, endpoint_url: '{server.endpoint_url}'"


def test_copy_to_bucket_and_back_preserves_blocks(near: Path, far: Path, tmp_path: Path, bucket: str) -> None:
    there = write_tiers(tmp_path / "s3.yaml", bucket)
    config = write_config(near, far)
    assert result_of(ok("copy", config, there, "--from", "far", "--json"))["copied"] == COUNT
    assert "all blocks are intact" in ok("verify", there)
    assert result_of(ok("copy", there, config, "--to", "near", "--json"))["copied"] == COUNT
    assert stored(near) == stored(far)


def make_old(root: Path) -> dict[str, float]:
    """Block n was used n hours ago."""
    for number, path in enumerate(sorted(root.rglob("*.bin"))):
        os.utime(path, (time.time() - 3600 * number,) * 2)
    return used_at(root)


def used_at(root: Path) -> dict[str, float]:
    return {name: (root / name).stat().st_mtime for name in stored(root)}


def test_copied_blocks_keep_their_age(near: Path, far: Path) -> None:
    before = make_old(far)
    config = write_config(near, far, "ttl: 2.5h", "max_bytes: 100MiB")
    ok("copy", config, *FILL)
    assert used_at(near) == pytest.approx(before, abs=1e-3)
    # What its source's collector would remove, the target's removes as well.
    assert f"removed by ttl: {COUNT - 3} blocks" in ok("gc", config, "--tier", "near")


def test_copied_blocks_with_future_times_get_the_current_time(near: Path, far: Path) -> None:
    """Clocks differ, and nobody has used a block tomorrow."""
    for path in far.rglob("*.bin"):
        os.utime(path, (time.time() + 86_400,) * 2)
    ok("copy", write_config(near, far), *FILL)
    assert all(at <= time.time() + 1 for at in used_at(near).values())


@pytest.mark.parametrize("exists", [False, True])
def test_dry_run_of_copy_writes_nothing_and_predicts_the_result(near: Path, far: Path, exists: bool) -> None:
    if exists:
        LocalStore(near).close()
        shutil.copytree(far / Path(NAMES[0]).parent, near / Path(NAMES[0]).parent)
        shutil.copytree(far / NAMESPACE, near / NAMESPACE)
    config = write_config(near, far)
    before = sorted(near.rglob("*"))
    present = len(stored(near))
    assert f"would be copied: {COUNT - present} blocks" in ok("copy", config, *FILL, "--dry-run")
    result = result_of(ok("copy", config, *FILL, "--dry-run", "--json"))
    assert (result["dry_run"], result["copied"], result["present"]) == (True, COUNT - present, present)
    assert result["copied_bytes"] == (COUNT - present) * BLOB
    assert sorted(near.rglob("*")) == before
    assert near.exists() == exists
    done = result_of(ok("copy", config, *FILL, "--json"))
    assert {**done, "seconds": 0} == {**result, "seconds": 0, "dry_run": False}


@pytest.mark.usefixtures("no_least")
def test_dry_run_of_copy_says_where_copy_would_stop(near: Path, far: Path) -> None:
    config = write_config(near, far, f"max_bytes: {10 * BLOB + 3000}")
    out = ok("copy", config, *FILL, "--dry-run")
    assert "would be copied: 10 blocks" in out
    assert "would stop: the target is full" in out
    assert not near.exists()
    assert run("copy", config, *FILL[:4], "--dry-run")[0] == 1


def test_dry_run_of_copy_names_skipped_namespaces(near: Path, far: Path) -> None:
    (far / NAMESPACE / "config.json").unlink()
    code, out = run("copy", write_config(near, far), *FILL, "--dry-run")
    assert code == 1
    assert f"{NAMESPACE} is skipped" in out
    assert not near.exists()


def test_copy_from_web_server_without_sizes_in_listings_copies_all_blocks(
    near: Path, far: Path, tmp_path: Path
) -> None:
    """Whose listings have names and no sizes."""
    config = write_config(near, far)
    with serve_folder(far) as server:
        there = write_tiers(tmp_path / "web.yaml", f"type: fsspec, url: '{server.url}', read_only: true")
        assert result_of(ok("copy", there, config, "--to", "near", "--json"))["copied"] == COUNT
        assert stored(near) == stored(far)
        assert "all blocks are intact" in ok("verify", there)
        assert len(ok("ls", there).splitlines()) >= COUNT


def test_copy_counts_passing_errors_and_stops_at_full_or_forbidden_target() -> None:
    source, target = MemoryStore(), MemoryStore()
    put_blocks(source)
    faulty = FaultyStore(target, [Fault("put", error=lambda: StoreUnavailableError("away"), first=3)])
    report = Copier(source, faulty).copy(find_blocks(source, [""]))
    assert (report.copied, report.failed, report.no_room) == (COUNT - 1, 1, False)
    assert Copier(source, target).copy(find_blocks(source, [""])).copied == 1
    full = FaultyStore(MemoryStore(), [Fault("put", error=lambda: StoreFullError("full"), first=9, count=None)])
    assert Copier(source, full).copy(find_blocks(source, [""])).no_room
    refused = FaultyStore(MemoryStore(), [Fault("put", error=lambda: StorePermissionError("no"), first=5)])
    with pytest.raises(StorePermissionError):
        Copier(source, refused).copy(find_blocks(source, [""]))


def test_copy_keeps_unreadable_target_block_and_counts_an_error() -> None:
    """A bad sector; it may be a newer version's."""
    source, target = MemoryStore(), MemoryStore()
    put_blocks(source)
    target.put(NAMES[0], [memoryview(bytes(BLOB))])
    faulty = FaultyStore(target, [Fault("get_tail", error=lambda: StoreUnavailableError("EIO"))])
    report = Copier(source, faulty).copy(find_blocks(source, [""]))
    assert (report.copied, report.failed) == (COUNT - 1, 1)
    there = bytearray(BLOB)
    target.get_into(NAMES[0], [memoryview(there)])
    assert there == bytes(BLOB)


def test_copy_stops_if_the_target_is_unavailable() -> None:
    source, target = MemoryStore(), MemoryStore()
    put_blocks(source)
    away = FaultyStore(target, [Fault("size", error=lambda: StoreUnavailableError("away"), first=9)])
    with pytest.raises(StoreUnavailableError):
        Copier(source, away).copy(find_blocks(source, [""]))


def test_copy_goes_on_past_block_that_may_not_be_read() -> None:
    source, target = MemoryStore(), MemoryStore()
    put_blocks(source)
    one = FaultyStore(source, [Fault("get_into", error=lambda: StorePermissionError("no"), first=9)])
    report = Copier(one, target).copy(find_blocks(source, [""]))
    assert (report.copied, report.failed) == (COUNT - 1, 1)


def test_protected_blocks_are_verified_and_copied_without_keys(near: Path, tmp_path: Path) -> None:
    far = tmp_path / "protected"
    mapper = FileMapper.from_offloading_spec("", FakeSpec(), extra_fields={"protection": "aes-gcm"})
    names = [mapper.relative_name(block_key(number)) for number in range(COUNT)]
    seal = GcmSeal(mapper.fingerprint, mapper.rank, keys=KeyRing(bytes(range(32))))
    store = LocalStore(far)
    open_namespace(store, mapper)
    for number, name in enumerate(names):
        store.put(name, seal.seal_parts(block_key(number), memoryview(bytes([number]) * SIZE)))
    store.close()
    config = write_config(near, far)
    assert "all blocks are intact" in ok("verify", str(far))
    flip(far / names[0], 100)
    code, out = run("verify", config, "--tier", "far")
    assert (code, "bad (payload_checksum): 1 block" in out) == (1, True)
    assert run("copy", config, *FILL)[0] == 1
    assert stored(near).keys() == set(names[1:])
    assert {name: blob for name, blob in stored(far).items() if name != names[0]} == stored(near)
    assert f"already present: {COUNT - 1} blocks" in run("copy", config, *FILL)[1]


@pytest.mark.parametrize("spelling", ["{far}/", "{far}/../far", "{link}/far"])
def test_copy_between_two_names_of_one_place_is_refused(near: Path, far: Path, tmp_path: Path, spelling: str) -> None:
    """Who then removed what it calls the old one would lose everything."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    other = write_tiers(tmp_path / "other.yaml", f"type: fs, root_dir: {spelling.format(far=far, link=link)}")
    code, out = run("copy", write_config(near, far), other, "--from", "far")
    assert code == 2
    assert "are the same place" in out
