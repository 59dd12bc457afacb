"""verify over real folders: what it finds, repairs and resumes."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import xxhash

from kvtiers.connector.commands import verify
from kvtiers.connector.commands.places import Place
from kvtiers.tiers.blocks.file_mapper import BlockName, FileMapper, parse_block_name
from kvtiers.tiers.blocks.seal import CHECK_AT, Seal
from kvtiers.tiers.config.tier_options import FsTierConfig
from kvtiers.tiers.errors import SealReason, StorePermissionError, StoreUnavailableError
from kvtiers.tiers.recipe import StoreRecipe
from kvtiers.tiers.server.namespace import open_namespace
from kvtiers.tiers.store import Capabilities, KeyInfo
from kvtiers.tiers.stores.files import listing as folder_listing
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.faults import Fault, FaultyStore
from kvtiers.tiers.testing.servers import moto_server
from kvtiers.tiers.tools.block_reader import BlockReader
from kvtiers.tiers.tools.verify import RepairResult, Subset, UnitResult, Verifier, find_units, repair
from kvtiers.tiers.tools.verify_processes import verify_units
from tests.connector.commands.test_storage_commands import ok, result_of, write_tiers
from tests.connector.commands.test_storage_commands import run as run_command
from tests.identity import FakeSpec, block_key
from tests.s3_clients import use_credentials
from tests.tiers.stores.files.test_local_faults import Damaged

MAPPER = FileMapper.from_offloading_spec("", FakeSpec())
COUNT, SIZE = 40, 8192
NAMES = [MAPPER.relative_name(block_key(n)) for n in range(COUNT)]


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default there is one for each core, and each takes longer to start than to check these few blocks."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})


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


def test_good_blocks(config: str) -> None:
    code, out = run(config)
    assert code == 0
    assert f"{COUNT} blocks, 480 KiB checked" in out
    assert "all blocks are intact" in out


def test_each_kind_of_badness_has_its_reason(config: str, root: Path) -> None:
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
    assert dict(map(tuple, found["bad"])) == {
        NAMES[0]: "payload_checksum",
        NAMES[1]: "trailer_checksum",
        NAMES[2]: "magic",
        NAMES[3]: "size",
        NAMES[4]: "key",
        NAMES[7]: "trailer_checksum",
    }
    assert found["foreign"] == 1


def test_blocks_that_were_left_alone_are_not_called_good(config: str, root: Path) -> None:
    make_newer(root / NAMES[6])
    code, out = run(config)
    assert (code, "all other blocks are intact" in out) == (0, True)
    for name in NAMES:
        if name != NAMES[6]:
            (root / name).unlink()
    assert "intact" not in run(config)[1]


def test_repair_moves_bad_blocks_aside_and_no_other(config: str, root: Path) -> None:
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
    assert verify._may_remove(place, UnitResult("", blocks=1000, bad_count=10), yes=False, asks=False)
    assert not verify._may_remove(place, UnitResult("", blocks=999, bad_count=10), yes=False, asks=False)
    assert not verify._may_remove(place, UnitResult("", blocks=2, bad_count=2), yes=False, asks=False)
    assert verify._may_remove(place, UnitResult("", blocks=2, bad_count=2), yes=True, asks=False)


@pytest.mark.parametrize("answer", [True, False])
def test_repair_of_many_bad_blocks_asks_on_a_terminal(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    asked: list[str] = []

    def confirm(question: str) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr(verify, "confirm", confirm)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    place = Place("shared", FsTierConfig(type="fs", root_dir="/nowhere"), "/nowhere")
    total = UnitResult("", blocks=100, bad_count=20)
    assert verify._may_remove(place, total, yes=False, asks=True) == answer
    assert "shared: 20 of 100 blocks are bad" in asked[0]
    assert not verify._may_remove(place, total, yes=False, asks=False)
    assert len(asked) == 1


def test_repair_reads_a_bad_block_again_before_it_removes_it(root: Path) -> None:
    flip(root / NAMES[0], 100)
    with closing(LocalStore(root)) as store:
        results = [UnitResult("", bad=[(name, "payload_checksum") for name in NAMES[:3]], bad_count=3)]
        (root / NAMES[1]).unlink()
        make_newer(root / NAMES[2])
        assert repair(store, results) == RepairResult(removed=1, good_again=2)
    assert not (root / NAMES[0]).exists()
    assert (root / NAMES[2]).exists()


def test_yes_without_repair_is_refused(config: str) -> None:
    code, out = run(config, "--yes")
    assert (code, "give both, or neither" in out) == (2, True)


class Healed(LocalStore):
    """An engine heals a block when it was listed."""

    good = b""

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        yield from super().keys(prefix)
        if NAMES[0].startswith(prefix):
            self.put(NAMES[0], [memoryview(self.good)], overwrite=True)


def unit_of(name: str) -> str:
    return name[: name.index("/") + 3]


def test_a_block_that_is_healed_after_it_was_listed_stays(root: Path) -> None:
    store = Healed(root)
    store.good = (root / NAMES[0]).read_bytes()
    os.truncate(root / NAMES[0], 5000)
    result = Verifier(store).check(unit_of(NAMES[0]))
    assert result.bad == []
    assert (root / NAMES[0]).read_bytes() == store.good


def test_a_folder_that_may_not_be_read_keeps_no_other_from_being_checked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace, folder, _ = NAMES[0].split("/", 2)
    refused = f"{namespace}/{folder[:2]}{'0' if folder[2] != '0' else '1'}/"
    plain = LocalStore.keys

    def keys(self: LocalStore, prefix: str = "") -> Iterator[KeyInfo]:
        if prefix == refused:
            raise StorePermissionError("somebody else's", key=prefix)
        return plain(self, prefix)

    monkeypatch.setattr(LocalStore, "keys", keys)
    result = Verifier(LocalStore(root)).check(unit_of(NAMES[0]))
    assert (result.blocks >= 1, result.errors) == (True, 1)


def test_a_damaged_file_is_an_error(root: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_listing, "os", Damaged({Path(NAMES[0]).name}, errno.EIO))
    result = Verifier(LocalStore(root)).check(unit_of(NAMES[0]))
    assert result.errors == 1
    code, out = run(config)  # its workers are processes that can read it: the command's own listing could not
    assert (code, "could not be read: 1 block" in out) == (1, True)


def test_a_damaged_folder_keeps_no_other_from_being_checked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = unit_of(NAMES[0])
    plain = LocalStore.keys
    damaged: set[str] = set()

    def keys(self: LocalStore, prefix: str = "") -> Iterator[KeyInfo]:
        if prefix in damaged:
            raise StoreUnavailableError("EIO", key=prefix)
        return plain(self, prefix)

    monkeypatch.setattr(LocalStore, "keys", keys)
    digit = NAMES[0][len(unit)]
    damaged.add(f"{unit}{'0' if digit != '0' else '1'}/")
    verifier = Verifier(LocalStore(root))
    result = verifier.check(unit)
    assert (result.blocks >= 1, result.errors) == (True, 1)
    damaged.update(f"{unit}{digit:x}/" for digit in range(16))
    with pytest.raises(StoreUnavailableError):  # 17: the disk is gone
        verifier.check(unit)


@pytest.mark.parametrize("text", [None, "{}", "{", "[1]"])
def test_blocks_without_their_identity_are_not_moved(config: str, root: Path, text: str | None) -> None:
    path = root / MAPPER.relative_config_name
    path.unlink()
    if text is not None:
        path.write_text(text)
    found = run_json(config, "--repair")
    assert found["bad_count"] == COUNT
    assert {reason for _, reason in found["bad"]} == {"no_identity"}
    assert len(list(root.glob("*/*/*/*.bin"))) == COUNT


def test_it_goes_on_where_it_was(config: str, root: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    # As an interrupted run leaves it: three units done, a line cut off, and another place's.
    store = LocalStore(root)
    units = sorted(find_units(store))
    verifier = Verifier(store)
    lines = [json.dumps({"place": f"fs {root} check", "result": asdict(verifier.check(unit))}) for unit in units[:3]]
    other = json.dumps({"place": "s3 s3://b check", "result": asdict(verifier.check(units[3]))})
    state.write_text("\n".join([*lines, other, lines[0][:20]]))
    found = run_json(config, "--state", str(state))
    assert found["resumed_units"] == 3
    assert found["blocks"] == COUNT
    assert not state.exists()


def test_lines_of_the_state_that_are_not_understood_are_as_if_not_there(
    config: str, root: Path, tmp_path: Path
) -> None:
    unit = sorted(find_units(LocalStore(root)))[0]
    result = {"unit": unit, "blocks": 1}
    lines = [{"place": f"fs {root} check", "result": result}, {"result": {**result, "unit": "x"}}]
    (tmp_path / "state").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_json(config, "--state", str(tmp_path / "state"))["resumed_units"] == 1


@pytest.mark.parametrize(("name", "text"), [("missing/state", "cannot be used"), ("c.yaml", "is not a state file")])
def test_a_state_that_cannot_be_used_is_refused(config: str, tmp_path: Path, name: str, text: str) -> None:
    before = Path(config).read_text()
    code, out = run(config, "--state", str(tmp_path / name))
    assert (code, "Traceback" in out) == (2, False)
    assert f"kvtiers verify: --state {tmp_path / name}" in out
    assert text in out
    assert Path(config).read_text() == before


def test_a_file_that_verify_did_not_make_stays(config: str, tmp_path: Path) -> None:
    notes, pipe = tmp_path / "notes.txt", tmp_path / "pipe"
    notes.touch()
    os.mkfifo(pipe)
    for _ in range(2):
        assert run_json(config, "--state", str(notes))["resumed_units"] == 0
        assert notes.read_text() == ""
    for path in (pipe, Path(os.devnull)):
        code, out = run(config, "--state", str(path))
        assert code == 2
        assert f"kvtiers verify: --state {path} cannot be used: it is not a regular file" in out
    assert pipe.is_fifo()


def test_an_interrupted_run_leaves_its_state(
    config: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_then_fail(*args: Any, **options: Any) -> Iterator[Any]:
        results = verify_units(*args, **options)
        yield next(results)
        yield next(results)
        results.close()  # type: ignore[attr-defined]
        raise StoreUnavailableError("gone")

    monkeypatch.setattr("kvtiers.connector.commands.verify.verify_units", two_then_fail)
    state = tmp_path / "state"
    code, out = run(config, "--state", str(state))
    assert code == 1
    assert "gone" in out
    monkeypatch.undo()
    assert run_json(config, "--state", str(state))["resumed_units"] == 2


def test_the_same_bucket_at_another_server_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtiers.tiers.stores.s3.options import S3Options
    from kvtiers.tiers.stores.s3.store import S3Store

    state = tmp_path / "state"
    with moto_server() as server:
        use_credentials(monkeypatch, server)
        server.client().create_bucket(Bucket="kvcache")
        with closing(S3Store(S3Options(bucket="kvcache", endpoint_url=server.endpoint_url))) as store:
            put_blocks(store)

        def verify_at(endpoint_url: str, stop_after: int | None) -> str:
            config = write_tiers(tmp_path / "c.yaml", f"type: s3, bucket: kvcache, endpoint_url: '{endpoint_url}'")

            def check(recipe: StoreRecipe, units: Sequence[str], **options: Any) -> Iterator[Any]:
                yield from map(UnitResult, units[:stop_after])
                if stop_after:
                    raise StoreUnavailableError("gone")

            monkeypatch.setattr("kvtiers.connector.commands.verify.verify_units", check)
            return run(config, "--state", str(state))[1]

        assert "gone" in verify_at(server.endpoint_url, 2)
        assert "parts before" not in verify_at(server.endpoint_url.replace("127.0.0.1", "localhost"), 3)
        assert "2 parts in an earlier run" in verify_at(server.endpoint_url, None)


def test_a_state_that_finds_no_room_is_named(config: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        code, out = run(config, "--state", str(state))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert f"kvtiers verify: --state {state} cannot be written: File too large" in out
    assert run_json(config, "--state", str(state))["resumed_units"] > 0


def test_blocks_that_vanish_meanwhile_are_not_bad(root: Path) -> None:
    memory = MemoryStore()
    put_blocks(memory)
    store = FaultyStore(memory)
    unit = sorted(find_units(store))[0]
    names = [info.key for info in memory.keys(unit)]
    real = store.get_into

    def get_into(key: str, parts: Any) -> None:
        if key in names:
            memory.delete(key)
        real(key, parts)

    store.get_into = get_into  # type: ignore[method-assign]
    result = Verifier(store).check(unit)
    assert (result.bad_count, result.errors) == (0, 0)


def test_unreadable_blocks_are_errors_and_stay() -> None:
    memory = MemoryStore()
    put_blocks(memory)
    store = FaultyStore(memory)
    units = sorted(find_units(store))
    verifier = Verifier(store)
    assert verifier.check(units[0]).errors == 0
    store.plan = [Fault("get_into", error=lambda: StoreUnavailableError("no"), count=None)]
    result = verifier.check(units[1])
    assert result.errors == result.blocks > 0
    assert len([key for key in memory.keys("") if key.key.endswith(".bin")]) == COUNT


class SlowLocalStore(LocalStore):
    """One whose reads mostly wait."""

    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=True)


def test_many_reads_at_once(root: Path) -> None:
    flip(root / NAMES[0], 100)
    store = SlowLocalStore(root)
    results = [Verifier(store).check(unit) for unit in find_units(store)]
    assert sum(result.blocks for result in results) == COUNT
    assert [key for result in results for key, _ in result.bad] == [NAMES[0]]


def test_a_worker_that_cannot_work_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recipe = StoreRecipe.of(LocalStore, root_dir=tmp_path / "file")
    with pytest.raises(StoreUnavailableError, match="must be a folder"):
        list(verify_units(recipe, ["a/b"], n_workers=2))


@pytest.mark.parametrize(
    "said", ['{"result": {"unit": "a', '{"error": "cut"}', "no JSON\\n", "5\\n", '{"result": {}}\\n']
)
def test_a_worker_that_dies_while_it_answers_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    command = [sys.executable, "-c", f"input(); input(); print(end='{said}')"]
    monkeypatch.setattr("kvtiers.tiers.tools.verify_processes.python_command", lambda _: command)
    with pytest.raises(StoreUnavailableError, match="worker .*died"):
        list(verify_units(StoreRecipe.of(LocalStore, root_dir=tmp_path), ["a/b"], n_workers=1))


def test_workers_end_with_their_reader(root: Path) -> None:
    before = set(psutil.Process().children())
    results = verify_units(StoreRecipe.of(LocalStore, root_dir=root), sorted(find_units(LocalStore(root))), n_workers=2)
    next(results)
    assert set(psutil.Process().children()) - before
    results.close()  # type: ignore[attr-defined]
    assert not set(psutil.Process().children()) - before


def test_names_and_sizes_that_no_block_has_end_nothing(root: Path, config: str, tmp_path: Path) -> None:
    flip(root / NAMES[3], 100)
    odd = root / NAMES[3].replace("_g0/", f"_g{2**32}/")
    odd.parent.mkdir(parents=True)
    odd.write_bytes(b"no block")
    found = run_json(config)
    assert [reason for _, reason in found["bad"]] == ["payload_checksum"]
    assert found["blocks"] == COUNT

    class Vast(MemoryStore):
        def size(self, key: str) -> int | None:
            return 1 << 60 if key == NAMES[0] else super().size(key)

    store = Vast()
    put_blocks(store)
    name = parse_block_name(NAMES[0])
    assert name is not None
    assert BlockReader(store).read(KeyInfo(NAMES[0], 1 << 60, 0.0), name) == (SealReason.SIZE, True)


def test_lists_in_lists_without_end_are_no_identity(root: Path, config: str) -> None:
    (root / MAPPER.relative_config_name).write_text("[" * 200_000)
    assert {reason for _, reason in run_json(config)["bad"]} == {"no_identity"}


@pytest.mark.parametrize("command", ["verify", "copy"])
def test_a_name_with_an_impossible_rank_is_no_blocks(root: Path, config: str, command: str) -> None:
    """Whoever may write there could end the command for all other blocks."""
    odd = root / NAMES[0].replace("_r0/", f"_r{2**32}/")
    odd.parent.mkdir(parents=True)
    odd.write_bytes((root / NAMES[0]).read_bytes())
    target = write_tiers(root.parent / "target.yaml", f"type: fs, root_dir: {root.parent}/other, min_free: 0")
    arguments = [config, target] if command == "copy" else [config]
    assert f"{COUNT} blocks" in ok(command, *arguments)


def test_its_processes_have_no_keys(root: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs none."""
    monkeypatch.setenv("KVTIERS_SECRETS", "ab" * 32)
    write_tiers(Path(config), f"type: fs, root_dir: {root}, encrypt: aes-gcm, keys_env: KVTIERS_SECRETS")
    environments = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        environments.append(options.get("env") or dict(os.environ))
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    assert "all blocks are intact, but not all can be loaded" in run(config)[1]  # they have no keys
    assert environments
    assert all("KVTIERS_SECRETS" not in environment for environment in environments)


def test_a_subset_is_chosen_by_the_blocks_hashes(config: str, root: Path) -> None:
    parts = [run_json(config, "--subset", "30%", "--seed", str(seed)) for seed in range(4)]
    assert all(0 < part["blocks"] < COUNT for part in parts)
    assert len({part["blocks"] for part in parts}) > 1
    assert run_json(config, "--subset", "30%", "--seed", "3")["blocks"] == parts[3]["blocks"]
    assert run_json(config, "--subset", "100%")["blocks"] == COUNT
    out = run(config, "--subset", "30%")[1]
    assert f"{parts[0]['blocks']} blocks, {parts[0]['blocks'] * 12} KiB checked (a subset of 30%) at" in out
    has = [Subset(0.3, 5).has(BlockName(NAMES[0], 0, 0, f"{n:064x}")) for n in range(10_000)]
    assert 2_800 < sum(has) < 3_200


def test_a_bad_block_is_found_by_the_subsets_that_have_it(config: str, root: Path) -> None:
    flip(root / NAMES[7], 5)
    name = parse_block_name(NAMES[7])
    assert name is not None
    having = [seed for seed in range(12) if Subset(0.25, seed).has(name)]
    lacking = [seed for seed in range(12) if seed not in having]
    for seed, code in ((having[0], 1), (having[1], 1), (lacking[0], 0), (lacking[1], 0)):
        assert run(config, "--subset", "25%", "--seed", str(seed))[0] == code


@pytest.mark.parametrize("options", [("--subset", "5"), ("--subset", "0%"), ("--subset", "x%"), ("--seed", "1")])
def test_what_is_no_subset(config: str, options: tuple[str, ...]) -> None:
    code, out = run(config, *options)
    assert (code, f"{options[0]}: " in out) == (2, True)


def test_a_state_file_of_another_subset_is_not_used(config: str, root: Path, tmp_path: Path) -> None:
    flip(root / NAMES[0], 5)
    state = str(tmp_path / "state")
    verifier = Verifier(LocalStore(root))
    lines = [
        json.dumps({"place": f"fs {root} check", "result": asdict(verifier.check(unit))})
        for unit in sorted({unit_of(name) for name in NAMES})
    ]
    Path(state).write_text("\n".join([*lines, ""]))
    assert run_json(config, "--state", state, "--subset", "99%")["resumed_units"] == 0


def test_a_dry_run_of_a_repair_moves_nothing(config: str, root: Path) -> None:
    flip(root / NAMES[0], 100)
    before = sorted(path for path in root.rglob("*"))
    code, out = run(config, "--repair", "--dry-run")
    assert code == 1
    assert "would be deleted: 1 block" in out
    assert sorted(path for path in root.rglob("*")) == before
    next(root.glob("*/config.json")).unlink()
    assert "would be deleted" not in run(config, "--repair", "--dry-run")[1]  # no_identity is left alone
    code, out = run(config, "--dry-run")
    assert (code, "give both, or neither" in out) == (2, True)
