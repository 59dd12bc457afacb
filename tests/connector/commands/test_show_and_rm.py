"""show and rm: what they find, what they change, and what they leave alone."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
import pytest

from kvtiers.connector.commands import remove
from kvtiers.tiers.blocks.file_mapper import namespace_of
from kvtiers.tiers.errors import StorePermissionError, StoreUnavailableError
from kvtiers.tiers.store import KeyInfo
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.servers import moto_server
from kvtiers.tiers.tools import namespaces
from kvtiers.tiers.tools.namespaces import namespace_names, rank_folders
from tests.connector.commands.test_storage_commands import ok, result_of, run, write_tiers
from tests.connector.commands.test_verify_command import COUNT, MAPPER, NAMES, SIZE, flip, make_newer, put_blocks, root
from tests.s3_clients import use_credentials

__all__ = ["root"]  # a fixture

BLOB = SIZE + 4096
NAMESPACE = NAMES[0].partition("/")[0].removesuffix("_r0")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def add_sibling(root: Path, **changes: Any) -> str:
    """Copy the namespace to another one, whose identity differs in ``changes``."""
    own = json.loads((root / NAMESPACE / "config.json").read_text())
    name = namespace_of(own | changes)
    shutil.copytree(root / f"{NAMESPACE}_r0", root / f"{name}_r0")
    (root / name).mkdir()
    (root / name / "config.json").write_text(json.dumps(own | changes))
    return name


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def shown(*arguments: str) -> list[dict[str, Any]]:
    (tier,) = result_of(run("show", *arguments, "--json")[1])["tiers"]
    found: list[dict[str, Any]] = tier["matches"]
    return found


# ---- show ------------------------------------------------------------------------------------------------------------


def test_show_describes_a_block(root: Path) -> None:
    os.utime(root / NAMES[3], (time.time() - 7300, time.time() - 7300))
    out = ok("show", str(root), NAMES[3])
    (block,) = shown(str(root), NAMES[3])
    assert (block["state"], block["bytes"], block["key"]) == ("good", BLOB, NAMES[3])
    seal = block["seal"]
    assert (seal["checksum"], seal["authentication"], seal["payload_bytes"]) == ("xxh3_64", "none", SIZE)
    assert (seal["fingerprint"], seal["rank"], seal["group"]) == (MAPPER.fingerprint.hex(), 0, 0)
    assert seal["block_hash"] == block["hash"] == NAMES[3].rpartition("/")[2].removesuffix(".bin")
    assert abs(seal["written_at"] - time.time()) < 600
    for text in ("state", "good", "2h ago", "12 KiB (12,288 bytes)", "version 1, xxh3_64", MAPPER.fingerprint.hex()):
        assert text in out


def test_show_finds_block_by_beginning_of_its_hash(root: Path) -> None:
    sibling = add_sibling(root, dtype="fp8")
    digits = NAMES[3].rpartition("/")[2][:9]
    assert {block["key"] for block in shown(str(root), digits)} == {NAMES[3], NAMES[3].replace(NAMESPACE, sibling)}
    code, out = run("show", str(root), "abcde12345")
    assert (code, "no tier has 'abcde12345'" in out) == (1, True)


def test_show_fails_for_bad_block_but_not_for_block_of_newer_version(root: Path) -> None:
    flip(root / NAMES[0], 100)
    code, out = run("show", str(root), NAMES[0])
    assert (code, "bad (payload_checksum)" in out) == (1, True)
    (root / NAMES[1]).write_bytes(b"x")
    code, out = run("show", str(root), NAMES[1])
    assert (code, "bad (size)" in out, "none that can be read" in out) == (1, True, True)
    make_newer(root / NAMES[2])
    assert "not verified (version)" in ok("show", str(root), NAMES[2])


def test_show_describes_a_namespace_and_differences_to_its_siblings(root: Path) -> None:
    sibling = add_sibling(root, dtype="fp8")
    out = ok("show", str(root), NAMESPACE)
    (found,) = shown(str(root), f"{NAMESPACE}_r0/")
    assert (found["blocks"], found["bytes"], found["ranks"]) == (COUNT, COUNT * BLOB, [0])
    identity = found["identity"]
    assert identity["model_name"] == MODEL
    assert found["siblings"] == [{"namespace": sibling, "differs": {"dtype": [json.dumps(identity["dtype"]), '"fp8"']}}]
    for text in ("model_name", MODEL, f"{COUNT}, 480 KiB, ranks [0]", sibling, '"fp8" there'):
        assert text in out
    shutil.rmtree(root / NAMESPACE)
    assert "missing or damaged" in ok("show", str(root), NAMESPACE)


@pytest.mark.parametrize("what", [(), ("only-one",), ("a", "b", "c"), ("HERE", "no/such/name")])
def test_show_without_a_valid_name_is_bad_input(
    root: Path, what: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVTIERS_CONFIG", raising=False)
    code, out = run("show", *(str(root) if word == "HERE" else word for word in what))
    assert code == 2, out


# ---- rm --------------------------------------------------------------------------------------------------------------


def test_rm_removes_only_the_named_namespace(root: Path) -> None:
    sibling = add_sibling(root, dtype="fp8")
    longer = f"{sibling}_rx_0123456789ab"  # a namespace whose name begins like the folder of the removed blocks
    shutil.copytree(root / f"{NAMESPACE}_r0", root / f"{longer}_r0")
    foreign = root / f"{sibling}_r0" / "notes.txt"
    foreign.write_text("x")
    before = tree(root)
    out = ok("rm", str(root), "--namespace", sibling, "--dry-run")
    assert f"would be removed: 1 namespace\n  {sibling}: {COUNT} blocks, 480 KiB" in out
    assert tree(root) == before
    code, out = run("rm", str(root), "--namespace", sibling, "--namespace", "mistyped", "--yes")
    assert (code, "mistyped was not found" in out) == (1, True)
    assert f"removed {COUNT} blocks, 480 KiB" in out
    assert remove.MAY_WRITE in out
    gone = {name.replace(NAMESPACE, sibling) for name in NAMES} | {f"{sibling}/config.json"}
    assert tree(root) == before - gone
    assert not (root / sibling).exists()
    code, out = run("rm", str(root), "--namespace", sibling, "--yes")
    assert (code, f"{sibling} was not found" in out) == (1, True)


def test_rm_by_model_compares_identities_and_not_folder_names(root: Path) -> None:
    """a/b_c and a_b/c have folders of the same name."""
    sibling = add_sibling(root, dtype="fp8")
    other = add_sibling(root, model_name=MODEL.replace("TB/", "TB_"))
    (result,) = result_of(ok("rm", str(root), "--model", MODEL, "--yes", "--json"))["tiers"]
    assert {one["namespace"]: one["removed"] for one in result["namespaces"]} == {
        NAMESPACE: COUNT, sibling: COUNT
    }  # fmt: skip
    assert {path.name for path in root.iterdir() if not path.name.startswith(".")} == {other, f"{other}_r0"}
    (root / other / "config.json").unlink()  # now its folder's name may be of either model
    code, out = run("rm", str(root), "--model", MODEL, "--yes")
    assert (code, f"{other} may be of {MODEL}, but has no readable identity" in out) == (1, True)
    assert (root / f"{other}_r0").exists()
    ok("rm", str(root), "--namespace", other, "--yes")
    assert [path.name for path in root.iterdir() if not path.name.startswith(".")] == []


def test_rm_of_absent_model_fails_and_leaves_other_tiers_alone(root: Path, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    config = tmp_path / "c.yaml"
    tiers = [
        {"type": "fs", "name": name, "root_dir": str(place), "min_free": 0, "max_bytes": "1GiB"}
        for name, place in (("one", root), ("two", tmp_path / "two"))
    ]
    config.write_text(json.dumps({"region": {"size": "1MiB"}, "tiers": tiers}))
    code, out = run("rm", str(config), "--model", MODEL, "--model", "absent", "--yes")
    assert (code, "absent was not found" in out, "two at" in out) == (1, True, False)
    assert tree(tmp_path / "two") == set()


def test_show_of_unreadable_block_has_no_seal(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_sibling(root, dtype="fp8")
    get_into, read = LocalStore.get_into, set[str]()

    def fail_later(self: LocalStore, key: str, parts: Sequence[memoryview]) -> None:
        if key.endswith(".bin"):
            read.add(key)
            if len(read) > 1:
                raise StoreUnavailableError("gone", key=key)
        get_into(self, key, parts)

    monkeypatch.setattr(LocalStore, "get_into", fail_later)
    first, second = shown(str(root), NAMES[3].rpartition("/")[2][:9])
    assert first["seal"] is not None
    assert (second["state"], second["seal"]) == ("not_readable", None)


def test_rm_asks_for_confirmation_unless_yes_is_given(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(root)
    code, out = run("rm", str(root), "--model", MODEL)
    assert (code, "give --yes" in out) == (2, True)
    asked: list[str] = []

    def answer(question: str) -> bool:
        asked.append(question)
        return len(asked) > 1

    monkeypatch.setattr(remove, "confirm", answer)
    code, out = run("rm", str(root), "--model", MODEL)
    assert (code, "not confirmed: nothing was removed" in out) == (1, True)
    assert tree(root) == before
    ok("rm", str(root), "--model", MODEL)
    assert asked == [f"Remove 1 namespace with {COUNT} blocks, 480 KiB?"] * 2
    assert tree(root) == set()


def as_on_a_terminal() -> None:
    """Make standard input the terminal of this process, and heed Ctrl-C, which tests in the background ignore."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (b"y\n", 0, "removed 40 blocks"),
        (b"\x03", 130, "interrupted: nothing was changed"),
        (b"\x04", 1, "not confirmed: nothing was changed"),
        pytest.param(b"\n", 1, "not confirmed: ", marks=pytest.mark.full),
    ],
)
def test_rm_obeys_the_answer_typed_on_a_terminal(root: Path, typed: bytes, code: int, said: str) -> None:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtiers", "rm", str(root), "--model", MODEL],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=as_on_a_terminal,
        )
        assert process.stdout is not None
        shown = ""
        while "[y/n]" not in shown:
            char = process.stdout.read(1)
            assert char, shown
            shown += char
        os.write(ours, typed)
        rest, _ = process.communicate(timeout=120)
        assert (process.returncode, said in rest, "Traceback" in rest) == (code, True, False), rest
    finally:
        os.close(ours)
        os.close(theirs)


def test_rm_reports_blocks_written_by_an_engine_meanwhile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = (root / NAMES[0]).read_bytes()
    delete_many = LocalStore.delete_many

    def delete_and_write(self: LocalStore, keys: Sequence[str]) -> list[Exception | None]:
        outcomes = delete_many(self, keys)
        self.put(NAMES[0], [memoryview(block)])
        return outcomes

    monkeypatch.setattr(LocalStore, "delete_many", delete_and_write)
    code, out = run("rm", str(root), "--namespace", NAMESPACE, "--yes")
    assert code == 1
    assert f"removed {COUNT} blocks" in out
    assert "1 block written during the removal: an engine uses this namespace; stop" in out
    assert tree(root) == {NAMES[0], f"{NAMESPACE}/config.json"}
    assert "all blocks are intact" in ok("verify", str(root))


def test_rm_reports_files_that_cannot_be_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = StorePermissionError("Permission denied (EACCES)")
    monkeypatch.setattr(LocalStore, "delete_many", lambda self, keys: [refused for _ in keys])
    code, out = run("rm", str(root), "--namespace", NAMESPACE, "--yes")
    assert code == 1
    assert f"could not be removed: {COUNT} files (Permission denied (EACCES))" in out
    assert "meanwhile" not in out


def test_rm_in_read_only_tier_is_refused(root: Path) -> None:
    config = write_tiers(root.parent / "c.yaml", f"type: fs, root_dir: {root}, read_only: true")
    code, out = run("rm", config, "--model", MODEL, "--yes")
    assert (code, "fs is read_only" in out) == (2, True)
    assert "would be removed: 1 namespace" in ok("rm", config, "--model", MODEL, "--dry-run")


def test_interrupted_rm_says_how_much_was_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "DELETE_BATCH_KEYS", 16)
    delete_many = LocalStore.delete_many
    calls = []

    def delete(self: LocalStore, keys: Sequence[str]) -> list[Exception | None]:
        calls.append(len(keys))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return delete_many(self, keys)

    monkeypatch.setattr(LocalStore, "delete_many", delete)
    code, out = run("rm", str(root), "--namespace", NAMESPACE, "--yes")
    assert code == 130
    assert "interrupted: 32 blocks, 384 KiB removed; run the same command again to continue" in out
    monkeypatch.undo()
    assert "removed 8 blocks" in ok("rm", str(root), "--namespace", NAMESPACE, "--yes")
    assert tree(root) == set()


def test_namespaces_are_found_in_a_store_without_folders() -> None:
    store = _Listed()
    put_blocks(store)
    assert (namespace_names(store), rank_folders(store)) == ([NAMESPACE], [f"{NAMESPACE}_r0"])


class _Listed(MemoryStore):
    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        yield from super().keys(prefix)
        yield KeyInfo("file", 1, 0.0)


def test_du_show_and_rm_on_s3_handle_only_objects_of_kvtiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_server() as server:
        use_credentials(monkeypatch, server)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        client = boto3.client("s3", endpoint_url=server.endpoint_url, region_name=server.region)
        client.create_bucket(Bucket="of-rm")
        source = LocalStore(tmp_path / "kv")
        put_blocks(source)
        source.close()
        for name in ("other/results", "p/notes.txt", f"p/{NAMESPACE}_r0/notes.txt"):
            client.put_object(Bucket="of-rm", Key=name, Body=b"precious")
        assert f"copied: {COUNT} blocks" in ok("copy", str(tmp_path / "kv"), "s3://of-rm/p")
        assert f"s3 at s3://of-rm/p: {COUNT} blocks" in ok("du", "s3://of-rm/p")
        assert "good" in ok("show", "s3://of-rm/p", NAMES[0])
        assert f"removed {COUNT} blocks, 480 KiB" in ok("rm", "s3://of-rm/p", "--model", MODEL, "--yes")
        left = [found["Key"] for found in client.list_objects_v2(Bucket="of-rm")["Contents"]]
        assert left == ["other/results", f"p/{NAMESPACE}_r0/notes.txt", "p/notes.txt"]
