"""``format: vllm-raw``: payloads alone in files, seals in an attribute, and what vLLM's own tier puts beside them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtiers.connector.commands.cli import app
from kvtiers.tiers.base import JobMetadata, JobResult, SecondaryTierManager
from kvtiers.tiers.blocks.file_mapper import VllmLayout
from kvtiers.tiers.blocks.seal import NO_TRAILER, TRAILER_BYTES, Seal
from kvtiers.tiers.errors import BlobCorruptError, BlobNotFoundError, ConfigError, StoreConfigError, StoreError
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores import vectored_io
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.files.vllm_raw import VllmRawStore
from kvtiers.tiers.testing.faults import SyscallFaults
from kvtiers.tiers.tools.conversion import Converter
from kvtiers.tiers.tools.copying import Copier, find_blocks
from kvtiers.tiers.tools.inventory import parse_block_name
from tests.identity import FakeSpec, block_key
from tests.tiers.stores.files import test_local_store
from tests.waiting import PATIENT, wait_for

ROWS, ROW_BYTES = 8, 8192
KEYS = [block_key(number) for number in range(ROWS)]
MODEL = FakeSpec().config.model.name
LAYOUT = VllmLayout(f"{MODEL.replace('/', '_')}_0123456789ab", 0, {"model_name": MODEL, "tokens_per_hash": 32})
ATTRIBUTE = "user.kvtiers.seal"
NAME = f"m_0123456789ab_r0/012/34_g0/{'01234567' * 8}.bin"


@dataclass
class VllmSpec(FakeSpec):
    """An engine of vLLM's, whose own tier would keep blocks there."""

    vllm_layout: VllmLayout = LAYOUT


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


class TestPlainFiles(test_local_store.TestLocalStore):
    """The contract, for what is no block."""

    def make_store(self) -> Store:
        return VllmRawStore(self.tmp_path / "root")


class TestStore:
    payload = bytes(range(256)) * 32
    trailer = Seal(bytes(32), 0).trailer(KEYS[0], memoryview(payload))

    def put(self, store: Store, **options: Any) -> bool:
        return store.put(NAME, [memoryview(self.payload), memoryview(self.trailer)], **options)

    @staticmethod
    def get(store: Store, size: int = ROW_BYTES) -> tuple[bytes, bytes]:
        payload, trailer = bytearray(size), bytearray(TRAILER_BYTES)
        store.get_into(NAME, [memoryview(payload), memoryview(trailer)])
        return bytes(payload), bytes(trailer)

    def plant(self, root: Path, data: bytes) -> None:
        """As vLLM's own tier does."""
        path = root / NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.with_suffix(".tmp")).write_bytes(data)
        os.replace(path.with_suffix(".tmp"), path)

    def test_a_block_is_its_payload_and_looks_sealed(self, root: Path) -> None:
        store = VllmRawStore(root)
        assert self.put(store)
        assert (root / NAME).read_bytes() == self.payload
        assert len(os.getxattr(root / NAME, ATTRIBUTE)) == 216
        assert self.get(store) == (self.payload, self.trailer)
        whole = bytearray(ROW_BYTES + TRAILER_BYTES)  # in one part
        store.get_into(NAME, [memoryview(whole)])
        assert bytes(whole) == self.payload + self.trailer
        assert store.size(NAME) == len(whole)
        assert [info.size for info in store.keys("m_")] == [len(whole)]
        assert store.get_tail(NAME, TRAILER_BYTES) == (len(whole), self.trailer)
        assert store.get_tail(NAME, 100) == (len(whole), self.trailer[-100:])
        assert not self.put(store)
        assert self.put(store, overwrite=True)
        assert self.get(store) == (self.payload, self.trailer)

    def test_without_a_seal_it_is_absent_and_is_replaced(self, root: Path) -> None:
        store = VllmRawStore(root)
        self.plant(root, b"x" * ROW_BYTES)
        assert store.size(NAME) is None
        assert store.get_tail(NAME, TRAILER_BYTES) is None
        with pytest.raises(BlobNotFoundError, match="no seal"):
            self.get(store)
        assert [info.key for info in store.keys("")] == [NAME]  # a collector may remove it
        assert self.put(store)
        assert self.get(store) == (self.payload, self.trailer)

    def test_without_a_seal_it_is_there_where_that_is_allowed(self, root: Path) -> None:
        store = VllmRawStore(root, unverified="allow")
        self.plant(root, b"x" * ROW_BYTES)
        assert self.get(store) == (b"x" * ROW_BYTES, NO_TRAILER)
        assert not self.put(store)
        assert self.get(store)[0] == b"x" * ROW_BYTES

    def test_pieces_of_a_block(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vectored_io, "READ_PIECE_BYTES", 4096)
        monkeypatch.setattr(vectored_io, "WRITE_PIECE_BYTES", 4096)
        monkeypatch.setattr(vectored_io, "RUN_SLACK_BYTES", 0)
        store = VllmRawStore(root)
        trailer = bytearray(TRAILER_BYTES)
        seen: list[tuple[int, int]] = []

        def look(offset: int, piece: memoryview) -> None:
            seen.append((offset, piece.nbytes))
            if offset == ROW_BYTES:
                trailer[:] = self.trailer

        assert store.put_pieces(NAME, [memoryview(self.payload), memoryview(trailer)], look)
        assert seen == [(at, 4096) for at in range(0, ROW_BYTES + TRAILER_BYTES, 4096)]
        assert (root / NAME).read_bytes() == self.payload
        assert self.get(store) == (self.payload, self.trailer)
        payload, trailer = bytearray(ROW_BYTES), bytearray(TRAILER_BYTES)
        back = bytearray()
        store.get_pieces_into(NAME, [memoryview(payload), memoryview(trailer)], lambda _, piece: back.extend(piece))
        assert bytes(back) == payload + trailer == self.payload + self.trailer

    def test_another_size_and_what_is_no_block(self, root: Path) -> None:
        store = VllmRawStore(root)
        self.put(store)
        with pytest.raises(BlobCorruptError, match="8192 bytes are stored, 4096"):
            self.get(store, 4096)
        for bad in ([memoryview(self.trailer)], [memoryview(self.payload), memoryview(b"short")]):
            with pytest.raises(BlobCorruptError, match="payload and 4096 bytes of trailer"):
                store.put(NAME, bad)
        store.delete(NAME)
        (root / NAME).mkdir(parents=True)
        assert store.size(NAME) is None
        with pytest.raises(BlobCorruptError):
            self.get(store)
        assert not self.put(store)

    @pytest.mark.parametrize("planted", [False, True])
    def test_when_a_system_call_fails_no_half_block_is_seen(self, tmp_path: Path, planted: bool) -> None:
        struck = set()
        for number in range(100):
            store = VllmRawStore(tmp_path / str(number))
            if planted:
                self.plant(tmp_path / str(number), b"x" * ROW_BYTES)
            published = False
            with SyscallFaults(at=number, error=errno.EIO) as faults, contextlib.suppress(StoreError):
                published = self.put(store)
            struck.update(faults.failed)
            with contextlib.suppress(BlobNotFoundError):
                assert self.get(store) == (self.payload, self.trailer)
                published = False
            assert not published
            assert self.put(store) in (True, False)
            assert self.get(store) == (self.payload, self.trailer)
            if not faults.failed:
                break
        assert {"setxattr", "pwritev", "rename" if planted else "link"} <= struck

    def test_a_file_system_without_attributes_is_refused(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def none(*_: object) -> bytes:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(os, "getxattr", none)
        with pytest.raises(StoreConfigError, match="no extended attributes"):
            VllmRawStore(root)


class Tier:
    """A tier over the folder, and a region."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.region = np.zeros((ROWS, ROW_BYTES), np.int8)
        config = PATIENT | {"type": "fs", "root_dir": str(root), "min_free": 0, "format": "vllm-raw", **options}
        config |= {"n_read_threads": 1, "n_write_threads": 1}  # a process each
        self.tier: SecondaryTierManager = SecondaryTierFactory.create_secondary_tier(
            config, self.region.data, VllmSpec()
        )

    def fill(self, seed: int) -> np.ndarray[Any, Any]:
        self.region[:] = np.random.default_rng(seed).integers(-128, 128, self.region.shape, np.int8)
        return self.region.copy()

    def run(self, operation: str) -> JobResult:
        getattr(self.tier, f"submit_{operation}")(JobMetadata(1, KEYS, np.arange(ROWS, dtype=np.int32)))
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished()
        return result

    def present(self) -> list[bool | None]:
        def ask() -> list[bool | None]:
            answers = [self.tier.lookup(key) for key in KEYS]
            self.tier.on_schedule_end()
            return [] if None in answers else answers

        return wait_for(ask)

    def failures(self) -> dict[str, float]:
        samples = self.tier.metrics.snapshot()  # type: ignore[attr-defined]
        found = [sample for sample in samples if sample.name == "kvtiers_verify_failures_total" and sample.value]
        return {sample.labels["reason"]: sample.value for sample in found}


@pytest.fixture(params=["thread"])
def tiers(request: pytest.FixtureRequest, root: Path) -> Iterator[Any]:
    made: list[Tier] = []

    def make(**options: Any) -> Tier:
        made.append(Tier(root, **{"isolation": request.param, **options}))
        return made[-1]

    yield make
    for tier in made:
        tier.tier.shutdown()


def blocks(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.bin") if parse_block_name(str(path.relative_to(root))))


def unseal(root: Path) -> None:
    for path in blocks(root):
        os.removexattr(path, ATTRIBUTE)


@pytest.mark.parametrize("tiers", ["thread", "process"], indirect=True)
def test_blocks_come_back_and_a_flipped_one_does_not(tiers: Any, root: Path) -> None:
    original = tiers().fill(1)
    writer = tiers()
    writer.region[:] = original
    assert writer.run("store").success
    assert sorted(path.read_bytes() for path in blocks(root)) == sorted(row.tobytes() for row in original)
    reader = tiers()
    assert all(reader.present())
    assert reader.run("load").success
    assert np.array_equal(reader.region, original)
    flipped = bytearray(blocks(root)[0].read_bytes())
    flipped[7] ^= 1
    with blocks(root)[0].open("r+b") as file:  # in place: the seal stays
        file.write(flipped)
    result = reader.run("load")
    assert len(result.successful_keys) == ROWS - 1
    assert reader.failures() == {"payload_checksum": 1}
    assert len(blocks(root)) == ROWS  # the next store overwrites it
    assert tiers().run("load").successful_keys == result.successful_keys


def test_vllms_own_blocks_are_misses_by_default(tiers: Any, root: Path) -> None:
    writer = tiers()
    original = writer.fill(2)
    writer.run("store")
    unseal(root)
    reader = tiers()
    assert reader.present() == [False] * ROWS
    assert not reader.run("load").successful_keys
    assert len(blocks(root)) == ROWS  # left alone
    reader.region[:] = original
    assert reader.run("store").transfer_bytes == ROWS * ROW_BYTES
    assert tiers().run("load").success  # sealed now
    assert not reader.failures()


def test_vllms_own_blocks_are_taken_where_that_is_allowed(tiers: Any, root: Path) -> None:
    writer = tiers()
    original = writer.fill(3)
    writer.run("store")
    unseal(root)
    reader = tiers(unverified="allow")
    assert all(reader.present())
    assert reader.run("load").success
    assert np.array_equal(reader.region, original)
    assert reader.run("store").transfer_bytes == 0  # they are there
    blocks(root)[0].write_bytes(b"torn")
    assert len(reader.run("load").successful_keys) == ROWS - 1
    assert reader.failures() == {"size": 1}


def test_an_engine_with_other_weights_takes_none_of_them(tiers: Any, root: Path) -> None:
    """vLLM's folder is the same for every revision of the weights (vllm#49261)."""
    writer = tiers()
    writer.fill(4)
    writer.run("store")
    other = VllmSpec(FakeSpec().changed("model", revision="other").config)
    region = np.zeros((ROWS, ROW_BYTES), np.int8)
    options = {"type": "fs", "root_dir": str(root), "min_free": 0, "format": "vllm-raw"}
    tier = SecondaryTierFactory.create_secondary_tier(options, region.data, other)
    tier.submit_load(JobMetadata(1, KEYS, np.arange(ROWS, dtype=np.int32)))
    tier.drain_jobs()
    (result,) = tier.get_finished()
    assert not result.successful_keys
    tier.submit_store(JobMetadata(2, KEYS, np.arange(ROWS, dtype=np.int32)))
    tier.drain_jobs()
    (result,) = tier.get_finished()
    assert not result.successful_keys
    tier.shutdown()
    assert len(list((root / LAYOUT.namespace).glob("kvtiers-*.json"))) == 2
    assert tiers().run("load").success  # nothing was removed or replaced


def test_what_was_stored_without_a_key_keeps_its_place(tiers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/security.md says: vLLM's folder is the same with keys and without."""
    pytest.importorskip("cryptography")
    monkeypatch.setenv("KEYS", "ab" * 32)
    writer = tiers()
    writer.fill(5)
    writer.run("store")
    protected = tiers(auth="gmac", keys_env="KEYS")
    assert not protected.run("load").successful_keys
    assert not protected.run("store").successful_keys
    assert set(protected.failures()) == {"fingerprint"}
    assert tiers().run("load").success


@pytest.mark.parametrize("content", [b"", b'{\n  "blocks_per_'])
def test_a_config_that_vllm_is_writing_does_not_stop_the_engine(tiers: Any, root: Path, content: bytes) -> None:
    path = root / LAYOUT.namespace / "config.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert tiers().run("store").success
    assert path.read_bytes() == content


def verify(root: Path, *options: str) -> tuple[int, dict[str, Any]]:
    config = root.parent / "c.yaml"
    config.write_text(
        f"region: {{size: 1MiB}}\ntiers: [{{type: fs, root_dir: {root}, format: vllm-raw, min_free: 0}}]\n"
    )
    result = CliRunner().invoke(app, ["verify", str(config), "--json", *options])
    (tier,) = json.loads(result.output)["result"]["tiers"]
    return result.exit_code, tier


def test_verify_tells_bad_blocks_from_those_that_nobody_can_judge(root: Path) -> None:
    tier = Tier(root, isolation="thread")
    tier.fill(7)
    tier.run("store")
    tier.tier.shutdown()
    paths = blocks(root)
    os.removexattr(paths[0], ATTRIBUTE)
    with paths[1].open("r+b") as file:
        file.write(b"\x55\x55")
    code, found = verify(root, "--repair")
    assert (code, found["bad_count"], found["foreign"], found["quarantined"]) == (0, 1, 1, 1)
    (identity,) = (root / LAYOUT.namespace).glob("kvtiers-*.json")
    identity.unlink()
    code, found = verify(root, "--repair")
    assert code == 1
    assert {reason for _, reason in found["bad"]} == {"no_identity"}
    assert (found["bad_count"], found["foreign"], found["quarantined"]) == (ROWS - 2, 1, 0)
    assert len(blocks(root)) == ROWS - 1  # nothing more was moved


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"format": "sealed-1", "unverified": "allow"}, "unverified"),
        ({"encrypt": "aes-gcm", "keys_env": "KEYS"}, "encrypt"),
        ({"unverified": "allow", "auth": "gmac", "keys_env": "KEYS"}, "unverified"),
        ({"format": "raw"}, "format"),
    ],
)
def test_what_does_not_go_together(tiers: Any, options: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiers(**options)
    assert caught.value.field is not None
    assert field in caught.value.field


def test_only_inside_vllm(root: Path) -> None:
    region = np.zeros((ROWS, ROW_BYTES), np.int8)
    options = {"type": "fs", "root_dir": str(root), "min_free": 0, "format": "vllm-raw"}
    with pytest.raises(ConfigError, match="works only with KVTiersTier") as caught:
        SecondaryTierFactory.create_secondary_tier(options, region.data, FakeSpec())
    assert caught.value.field == "format"


def migrate(root: Path, target: Path, *, to_raw: bool, allow: bool = False) -> tuple[int, str]:
    raw = "format: vllm-raw, min_free: 0" + (", unverified: allow" if allow else "")
    formats = ("min_free: 0", raw) if to_raw else (raw, "min_free: 0")
    config = root.parent / "m.yaml"
    tiers = "".join(
        f"- {{type: fs, root_dir: {place}, {options}}}\n"
        for place, options in zip((root, target), formats, strict=True)
    )
    config.write_text(f"region: {{size: 1MiB}}\ntiers:\n{tiers}")
    result = CliRunner().invoke(app, ["migrate", str(config), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout + result.stderr


def started(root: Path, **options: Any) -> Tier:
    made = Tier(root, isolation="thread", **options)
    made.tier.shutdown()
    return made


@pytest.mark.parametrize("namespace", [LAYOUT.namespace, "_root_cache_ab12cd34_0123456789ab"], ids=["hub", "bucket"])
def test_migrate_to_sealed_blocks_and_back(
    root: Path, tmp_path: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = replace(LAYOUT, namespace=namespace)
    monkeypatch.setattr(f"{__name__}.VllmSpec", partial(VllmSpec, vllm_layout=layout))
    tier = Tier(root, isolation="thread")
    original = tier.fill(8)
    tier.run("store")
    tier.tier.shutdown()
    sealed, back = tmp_path / "sealed", tmp_path / "back"
    assert json.loads(migrate(root, sealed, to_raw=False)[1])["result"]["copied"] == ROWS
    reader = Tier(sealed, format="sealed-1", isolation="thread")
    assert reader.run("load").success
    reader.tier.shutdown()
    assert np.array_equal(reader.region, original)
    code, text = migrate(sealed, back, to_raw=True)
    assert code == 1
    assert "start that engine once" in text
    started(back)
    assert json.loads(migrate(sealed, back, to_raw=True)[1])["result"]["copied"] == ROWS
    assert json.loads(migrate(sealed, back, to_raw=True)[1])["result"]["present"] == ROWS
    assert [path.read_bytes() for path in blocks(back)] == [path.read_bytes() for path in blocks(root)]
    reader = Tier(back, isolation="thread")
    assert reader.run("load").success
    reader.tier.shutdown()


def test_what_nobody_can_prove_is_not_migrated(root: Path, tmp_path: Path) -> None:
    tier = Tier(root, isolation="thread")
    tier.fill(9)
    tier.run("store")
    tier.tier.shutdown()
    unseal(root)
    with blocks(root)[1].open("r+b") as file:
        file.truncate(100)
    code, text = migrate(root, tmp_path / "a", to_raw=False)
    assert (code, json.loads(text)["result"]["bad"], json.loads(text)["result"]["copied"]) == (1, ROWS, 0)
    copied = json.loads(migrate(root, tmp_path / "b", to_raw=False, allow=True)[1])["result"]
    assert (copied["copied"], copied["bad"]) == (ROWS - 1, 1)
    (identity,) = (root / LAYOUT.namespace).glob("kvtiers-*.json")
    identity.rename(tmp_path / "gone")
    code, text = migrate(root, tmp_path / "c", to_raw=False, allow=True)
    assert (code, json.loads(text)["result"]["bad"]) == (1, ROWS)


OTHERS = VllmSpec(FakeSpec().changed("model", revision="other").config)


@contextlib.contextmanager
def others_tier(root: Path, row_bytes: int = ROW_BYTES) -> Iterator[Any]:
    """What stores and loads the same keys for an engine with other weights."""
    region = np.full((ROWS, row_bytes), 5, np.int8)
    options = {"type": "fs", "root_dir": str(root), "min_free": 0, "format": "vllm-raw", "isolation": "thread"}
    tier = SecondaryTierFactory.create_secondary_tier(options, region.data, OTHERS)

    def run(operation: str) -> int:
        getattr(tier, f"submit_{operation}")(JobMetadata(1, KEYS, np.arange(ROWS, dtype=np.int32)))
        tier.drain_jobs()
        (result,) = tier.get_finished()
        return len(result.successful_keys)

    yield run
    tier.shutdown()


def test_blocks_of_an_engine_with_another_size_are_its_own(tiers: Any, root: Path) -> None:
    """Another model at the same path: vLLM's folder and names are the same."""
    writer = tiers()
    original = writer.fill(5)
    assert writer.run("store").success
    with others_tier(root, 2 * ROW_BYTES) as run:
        assert run("load") == 0
        assert run("store") == 0
    reader = tiers()
    assert reader.run("load").success
    assert np.array_equal(reader.region, original)


def test_a_block_that_another_engine_put_meanwhile_is_not_migrated_as_the_first_ones(
    root: Path, tmp_path: Path
) -> None:
    class Racing(VllmRawStore):
        """After the look at the first block all are collected, and another engine stores its own."""

        has_raced = False

        def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
            found = super().get_tail(key, length)
            if not self.has_raced:
                self.has_raced = True
                for path in blocks(root):
                    path.unlink()
                with others_tier(root) as run:
                    assert run("store") == ROWS
            return found

    tier = Tier(root, isolation="thread")
    tier.fill(6)
    tier.run("store")
    tier.tier.shutdown()
    with others_tier(root):  # so that the folder knows it
        pass
    source, target = Racing(str(root)), LocalStore(tmp_path / "sealed")
    report = Copier(source, target, converter=Converter(source, target, "sealed-1")).copy(find_blocks(source, [""]))
    assert (report.copied, report.errors) == (ROWS - 1, 1)  # the rest was looked at afterwards, and is the other one's
    reader = Tier(tmp_path / "sealed", format="sealed-1", isolation="thread")
    assert not reader.run("load").successful_keys
    reader.tier.shutdown()


@pytest.mark.parametrize("row_bytes", [ROW_BYTES, 2 * ROW_BYTES])
def test_migrate_leaves_another_engines_blocks_and_says_so(root: Path, tmp_path: Path, row_bytes: int) -> None:
    sealed = tmp_path / "sealed"
    writer = Tier(sealed, format="sealed-1", isolation="thread")
    writer.fill(7)
    writer.run("store")
    writer.tier.shutdown()
    started(root)
    with others_tier(root, row_bytes) as run:
        assert run("store") == ROWS
        code, text = migrate(sealed, root, to_raw=True)
        assert (code, json.loads(text)["result"]["errors"], json.loads(text)["result"]["copied"]) == (1, ROWS, 0)
        assert run("load") == ROWS


def test_protected_blocks_keep_their_format(root: Path, tmp_path: Path) -> None:
    started(root)
    config = tmp_path / "p.yaml"
    config.write_text(
        f"region: {{size: 1MiB}}\ntiers:\n- {{type: fs, root_dir: {root}, format: vllm-raw, auth: gmac, keys_env: K}}\n"
        f"- {{type: fs, root_dir: {tmp_path}/sealed, auth: gmac, keys_env: K}}\n"
    )
    result = CliRunner().invoke(app, ["migrate", str(config)])
    assert result.exit_code == 2
    assert "keeps its format" in result.output
