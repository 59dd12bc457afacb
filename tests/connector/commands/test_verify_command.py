"""verify over real folders: what it finds and repairs."""

from __future__ import annotations

import errno
import os
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from kvtiers.connector.commands import verify
from kvtiers.connector.commands.places import Place
from kvtiers.tiers.blocks.file_mapper import BlockName, FileMapper, parse_block_name
from kvtiers.tiers.blocks.seal import CHECK_AT, Seal
from kvtiers.tiers.config.tier_options import FsTierConfig
from kvtiers.tiers.errors import SealReason, StoreUnavailableError
from kvtiers.tiers.server.namespace import open_namespace
from kvtiers.tiers.store import Capabilities, KeyInfo
from kvtiers.tiers.stores.files import listing as folder_listing
from kvtiers.tiers.stores.files.local import LOGGED_MAX, LocalStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.faults import Fault, FaultyStore
from kvtiers.tiers.tools.block_reader import BlockReader
from kvtiers.tiers.tools.verify import RepairResult, Subset, VerifyReport, repair, verify_blocks
from tests.connector.commands.test_storage_commands import ok, result_of, write_tiers
from tests.connector.commands.test_storage_commands import run as run_command
from tests.identity import FakeSpec, block_key
from tests.tiers.stores.files.test_local_faults import Damaged

MAPPER = FileMapper.from_offloading_spec("", FakeSpec())
COUNT, SIZE = 40, 8192
NAMES = [MAPPER.relative_name(block_key(n)) for n in range(COUNT)]


def put_blocks(store: Any) -> None:
    open_namespace(store, MAPPER)
    seal = Seal(MAPPER.fingerprint, MAPPER.rank)
    for number, name in enumerate(NAMES):
        payload = memoryview(random.Random(number).randbytes(SIZE))
        store.put(name, (payload, memoryview(seal.trailer(block_key(number), payload))))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = LocalStore(tmp_path / "kv")
    put_blocks(store)
    store.close()
    return tmp_path / "kv"


@pytest.fixture
def config(root: Path) -> str:
    return write_tiers(root.parent / "c.yaml", f"type: fs, root_dir: {root}")


run = partial(run_command, "verify")


def run_json(*args: str) -> dict[str, Any]:
    _, out = run(*args, "--json")
    (tier,) = result_of(out)["tiers"]
    assert isinstance(tier, dict)
    return tier


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def make_newer(path: Path) -> None:
    """Make a block one of a version to come."""
    data = bytearray(path.read_bytes())
    data[SIZE + 8] = 2
    data[SIZE + CHECK_AT : SIZE + CHECK_AT + 8] = xxhash.xxh3_64_intdigest(data[SIZE : SIZE + CHECK_AT]).to_bytes(
        8, "little"
    )
    path.write_bytes(data)


def test_verify_of_good_blocks_reports_them_as_intact(config: str) -> None:
    code, out = run(config)
    assert code == 0
    assert f"{COUNT} blocks, 480 KiB checked" in out
    assert "all blocks are intact" in out


def test_verify_names_the_reason_of_each_bad_block(config: str, root: Path) -> None:
    flip(root / NAMES[0], 100)
    flip(root / NAMES[1], SIZE + 60)
    with (root / NAMES[2]).open("ab") as file:
        file.truncate(SIZE)
    (root / NAMES[3]).write_bytes(b"x")
    (root / NAMES[4]).write_bytes((root / NAMES[5]).read_bytes())
    make_newer(root / NAMES[6])
    flip(root / NAMES[7], SIZE + 9)  # version
    code, out = run(config)
    assert code == 1
    assert "from another version, not verified: 1 block" in out
    assert "intact" not in out
    found = run_json(config)
    assert found["bad_blocks"] == {
        NAMES[0]: "payload_checksum",
        NAMES[1]: "trailer_checksum",
        NAMES[2]: "magic",
        NAMES[3]: "size",
        NAMES[4]: "key",
        NAMES[7]: "trailer_checksum",
    }
    assert found["foreign"] == 1


def test_verify_does_not_call_unverified_blocks_intact(config: str, root: Path) -> None:
    make_newer(root / NAMES[6])
    code, out = run(config)
    assert (code, "all other blocks are intact" in out) == (0, True)
    for name in NAMES:
        if name != NAMES[6]:
            (root / name).unlink()
    assert "intact" not in run(config)[1]


def test_repair_moves_only_bad_blocks_aside(config: str, root: Path) -> None:
    flip(root / NAMES[0], 100)
    make_newer(root / NAMES[6])
    code, out = run(config, "--repair")
    assert code == 0
    assert "deleted: 1 block" in out
    assert {str(path.relative_to(root)) for path in root.glob("*/*/*/*.bin")} == set(NAMES[1:])
    assert run(config)[0] == 0


@pytest.mark.parametrize(("bad", "removed"), [(3, 3), (4, 0), (COUNT, 0)])
def test_repair_of_many_bad_blocks_without_terminal_needs_yes(config: str, root: Path, bad: int, removed: int) -> None:
    for name in NAMES[:bad]:
        flip(root / name, 100)
    code, out = run(config, "--repair")
    assert len(list(root.glob("*/*/*/*.bin"))) == COUNT - removed
    if removed:
        assert code == 0
        return
    assert code == 1
    assert f"nothing was removed: {bad} of {COUNT} blocks are bad" in out
    assert socket.gethostname() in out
    assert run_json(config, "--repair")["stopped"]
    code, out = run(config, "--repair", "--yes")
    assert (code, f"deleted: {bad} blocks" in out) == (0, True)
    assert len(list(root.glob("*/*/*/*.bin"))) == COUNT - bad


def test_repair_of_one_percent_or_less_does_not_ask() -> None:
    place = Place("fs", FsTierConfig(type="fs", root_dir="/nowhere"), "/nowhere")
    assert verify._may_remove(place, VerifyReport(blocks=1000, bad=10), yes=False, asks=False)
    assert not verify._may_remove(place, VerifyReport(blocks=999, bad=10), yes=False, asks=False)
    assert not verify._may_remove(place, VerifyReport(blocks=2, bad=2), yes=False, asks=False)
    assert verify._may_remove(place, VerifyReport(blocks=2, bad=2), yes=True, asks=False)


@pytest.mark.parametrize("answer", [True, False])
def test_repair_of_many_bad_blocks_asks_on_a_terminal(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    asked: list[str] = []

    def confirm(question: str) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr(verify, "confirm", confirm)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    place = Place("shared", FsTierConfig(type="fs", root_dir="/nowhere"), "/nowhere")
    total = VerifyReport(blocks=100, bad=20)
    assert verify._may_remove(place, total, yes=False, asks=True) == answer
    assert "shared: 20 of 100 blocks are bad" in asked[0]
    assert not verify._may_remove(place, total, yes=False, asks=False)
    assert len(asked) == 1


def test_repair_reads_a_bad_block_again_before_removing_it(root: Path) -> None:
    flip(root / NAMES[0], 100)
    with closing(LocalStore(root)) as store:
        bad = dict.fromkeys(NAMES[:3], "payload_checksum")
        (root / NAMES[1]).unlink()
        make_newer(root / NAMES[2])
        assert repair(store, bad) == RepairResult(removed=1, good_again=2)
    assert not (root / NAMES[0]).exists()
    assert (root / NAMES[2]).exists()


def test_yes_without_repair_is_refused(config: str) -> None:
    code, out = run(config, "--yes")
    assert (code, "has no effect without --repair" in out) == (2, True)


class Healed(LocalStore):
    """An engine heals a block when it was listed."""

    good = b""

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        yield from super().keys(prefix)
        if prefix == "":
            self.put(NAMES[0], [memoryview(self.good)], overwrite=True)


def test_block_replaced_after_its_listing_is_good(root: Path) -> None:
    store = Healed(root)
    store.good = (root / NAMES[0]).read_bytes()
    os.truncate(root / NAMES[0], 5000)
    result = verify_blocks(store, workers=1)
    assert result.bad == 0
    assert (root / NAMES[0]).read_bytes() == store.good


def test_damaged_file_and_folder_are_errors_and_keep_no_other_from_being_checked(
    root: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, name = NAMES[0].split("/")[1:]
    others = sum(each.split("/")[1] != NAMES[1].split("/")[1] for each in NAMES) - 1
    monkeypatch.setattr(folder_listing, "os", Damaged({name, NAMES[1].split("/")[1]}, errno.EIO))
    assert folder != NAMES[1].split("/")[1]
    result = verify_blocks(LocalStore(root), workers=2)
    assert (result.blocks, result.failed) == (others, 2)
    code, out = run(config)
    assert (code, "could not be read: 2 blocks" in out) == (1, True)


def test_folder_that_may_not_be_read_is_an_error_only_in_a_namespace(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "lost+found").mkdir()
    store = LocalStore(root)
    monkeypatch.setattr(folder_listing, "os", Damaged({"lost+found"}, errno.EACCES))
    assert verify_blocks(store, workers=1).failed == 0
    monkeypatch.setattr(folder_listing, "os", Damaged({NAMES[0].split("/")[1]}, errno.EACCES))
    assert verify_blocks(store, workers=1).failed == 1


def test_unreadable_folder_of_a_namespace_is_counted_beside_many_of_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {f"A{number}" for number in range(2 * LOGGED_MAX)}
    for name in others:
        (root / name).mkdir()
    monkeypatch.setattr(folder_listing, "os", Damaged(others, errno.EACCES))
    store = LocalStore(root)
    assert verify_blocks(store, workers=1).failed == 0
    monkeypatch.setattr(folder_listing, "os", Damaged({NAMES[0].split("/")[1]}, errno.EACCES))
    assert verify_blocks(store, workers=1).failed == 1


@pytest.mark.parametrize("text", [None, "{}", "{", "[1]"])
def test_repair_keeps_blocks_of_namespace_without_identity(config: str, root: Path, text: str | None) -> None:
    path = root / MAPPER.relative_config_name
    path.unlink()
    if text is not None:
        path.write_text(text)
    found = run_json(config, "--repair")
    assert found["bad"] == COUNT
    assert set(found["bad_blocks"].values()) == {"no_identity"}
    assert len(list(root.glob("*/*/*/*.bin"))) == COUNT


def test_blocks_removed_meanwhile_are_not_bad(root: Path) -> None:
    memory = MemoryStore()
    put_blocks(memory)
    store = FaultyStore(memory)
    names = NAMES[:3]
    real = store.get_into

    def get_into(key: str, parts: Any) -> None:
        if key in names:
            memory.delete(key)
        real(key, parts)

    store.get_into = get_into  # type: ignore[method-assign]
    result = verify_blocks(store, workers=2)
    assert (result.bad, result.failed) == (0, 0)


def test_unreadable_blocks_count_as_errors_and_are_kept() -> None:
    memory = MemoryStore()
    put_blocks(memory)
    store = FaultyStore(memory)
    # The first read is of config.json.
    store.plan = [Fault("get_into", first=2, error=lambda: StoreUnavailableError("no"), count=None)]
    result = verify_blocks(store, workers=1)
    assert result.failed == result.blocks == COUNT
    assert len([key for key in memory.keys("") if key.key.endswith(".bin")]) == COUNT


class SlowLocalStore(LocalStore):
    """One whose reads mostly wait."""

    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=True)


def test_verify_with_concurrent_reads_finds_the_bad_block(root: Path) -> None:
    flip(root / NAMES[0], 100)
    store = SlowLocalStore(root)
    result = verify_blocks(store, workers=2)
    assert result.blocks == COUNT
    assert list(result.bad_blocks) == [NAMES[0]]


def test_verify_goes_on_past_impossible_names_and_sizes(root: Path, config: str, tmp_path: Path) -> None:
    flip(root / NAMES[3], 100)
    odd = root / NAMES[3].replace("_g0/", f"_g{2**32}/")
    odd.parent.mkdir(parents=True)
    odd.write_bytes(b"no block")
    found = run_json(config)
    assert list(found["bad_blocks"].values()) == ["payload_checksum"]
    assert found["blocks"] == COUNT

    class Vast(MemoryStore):
        def size(self, key: str) -> int | None:
            return 1 << 60 if key == NAMES[0] else super().size(key)

    store = Vast()
    put_blocks(store)
    name = parse_block_name(NAMES[0])
    assert name is not None
    assert BlockReader(store).read(KeyInfo(NAMES[0], 1 << 60, 0.0), name) == (SealReason.SIZE, True)


def test_deeply_nested_json_is_not_an_identity(root: Path, config: str) -> None:
    (root / MAPPER.relative_config_name).write_text("[" * 200_000)
    assert set(run_json(config)["bad_blocks"].values()) == {"no_identity"}


@pytest.mark.parametrize("command", ["verify", "copy"])
def test_name_with_impossible_rank_is_not_a_block(root: Path, config: str, command: str) -> None:
    """Whoever may write there could end the command for all other blocks."""
    odd = root / NAMES[0].replace("_r0/", f"_r{2**32}/")
    odd.parent.mkdir(parents=True)
    odd.write_bytes((root / NAMES[0]).read_bytes())
    target = write_tiers(root.parent / "target.yaml", f"type: fs, root_dir: {root.parent}/other, min_free: 0")
    arguments = [config, target] if command == "copy" else [config]
    assert f"{COUNT} blocks" in ok(command, *arguments)


def test_subset_is_chosen_by_block_hashes_and_seed(config: str, root: Path) -> None:
    parts = [run_json(config, "--subset", "30%", "--seed", str(seed)) for seed in range(4)]
    assert all(0 < part["blocks"] < COUNT for part in parts)
    assert len({part["blocks"] for part in parts}) > 1
    assert run_json(config, "--subset", "30%", "--seed", "3")["blocks"] == parts[3]["blocks"]
    assert run_json(config, "--subset", "100%")["blocks"] == COUNT
    out = run(config, "--subset", "30%")[1]
    assert f"{parts[0]['blocks']} blocks, {parts[0]['blocks'] * 12} KiB checked (a subset of 30%) at" in out
    has = [Subset(0.3, 5).has(BlockName(NAMES[0], 0, 0, f"{n:064x}")) for n in range(10_000)]
    assert 2_800 < sum(has) < 3_200


def test_verify_of_subset_fails_only_if_a_bad_block_is_in_the_subset(config: str, root: Path) -> None:
    flip(root / NAMES[7], 5)
    name = parse_block_name(NAMES[7])
    assert name is not None
    having = [seed for seed in range(12) if Subset(0.25, seed).has(name)]
    lacking = [seed for seed in range(12) if seed not in having]
    for seed, code in ((having[0], 1), (having[1], 1), (lacking[0], 0), (lacking[1], 0)):
        assert run(config, "--subset", "25%", "--seed", str(seed))[0] == code


@pytest.mark.parametrize("options", [("--subset", "5"), ("--subset", "0%"), ("--subset", "x%"), ("--seed", "1")])
def test_invalid_subset_or_seed_is_bad_input(config: str, options: tuple[str, ...]) -> None:
    code, out = run(config, *options)
    assert (code, f"{options[0]}: " in out) == (2, True)


def test_dry_run_of_repair_moves_nothing(config: str, root: Path) -> None:
    flip(root / NAMES[0], 100)
    before = sorted(path for path in root.rglob("*"))
    code, out = run(config, "--repair", "--dry-run")
    assert code == 1
    assert "would be deleted: 1 block" in out
    assert sorted(path for path in root.rglob("*")) == before
    next(root.glob("*/config.json")).unlink()
    assert "would be deleted" not in run(config, "--repair", "--dry-run")[1]  # no_identity is left alone
    code, out = run(config, "--dry-run")
    assert (code, "has no effect without --repair" in out) == (2, True)
