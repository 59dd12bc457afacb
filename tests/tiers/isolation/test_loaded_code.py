"""LoadedCode: an engine whose package is replaced on disk starts no workers of other code."""

from __future__ import annotations

import errno
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.capacity.link import CollectorLink
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.errors import StoreUnavailableError
from kvtiers.tiers.isolation import loaded_code
from kvtiers.tiers.isolation import pool as worker_pool
from kvtiers.tiers.isolation.loaded_code import LOOK_EVERY_S, LoadedCode
from kvtiers.tiers.isolation.store import ProcessIsolatedStore, StoreRecipe
from kvtiers.tiers.stores.files.local import LocalStore
from tests.identity import FakeSpec
from tests.processes import kill_workers
from tests.waiting import wait_for

MESSAGE = "kvtiers was replaced on disk while this engine runs: restart it"


class Package:
    """One on disk, and what was loaded of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 0.0
        (folder / "inner").mkdir(parents=True)
        (folder / "a.py").write_text("a = 1\n")
        (folder / "inner" / "b.py").write_text("b = 1\n")
        self.code = LoadedCode(str(folder), clock=lambda: self.now)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    package = Package(tmp_path / "package")
    monkeypatch.setattr(worker_pool, "OWN_CODE", package.code)
    monkeypatch.setattr("kvtiers.tiers.capacity.link.OWN_CODE", package.code)
    return package


def test_what_is_installed_again_is_the_same(package: Package) -> None:
    shutil.copytree(package.folder, package.folder.with_name("copy"))
    shutil.rmtree(package.folder)
    with pytest.raises(RuntimeError, match=MESSAGE):
        package.code.check()
    package.folder.with_name("copy").rename(package.folder)
    (package.folder / "a.pyc").write_text("made at the first import")
    with pytest.raises(RuntimeError):
        package.code.check()  # not looked at again so soon
    package.now = LOOK_EVERY_S
    package.code.check()


@pytest.mark.parametrize("name", ["a.py", "inner/b.py", "inner/new.py"])
def test_what_differs_is_told_once(package: Package, name: str, caplog: pytest.LogCaptureFixture) -> None:
    package.code.check()
    (package.folder / name).write_text("a = 2\n")
    for _ in range(3):
        with pytest.raises(RuntimeError, match=MESSAGE):
            package.code.check()
        package.now += LOOK_EVERY_S
    assert [record.levelno for record in caplog.records if MESSAGE in record.message] == [logging.ERROR]


def test_what_cannot_be_read_is_no_other_code(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors: said as it is, and over as soon as there are some."""

    def scarce(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    for taken in ("builtins.open", "os.scandir"):
        with monkeypatch.context() as few:
            few.setattr(taken, scarce)
            with pytest.raises(OSError, match="Too many open files"):
                package.code.check()
        package.code.check()


def test_it_is_looked_at_when_the_registry_is_imported() -> None:
    """Not when the first worker is started: a model is loaded in between, for minutes."""
    program = "import sys, kvtiers.tiers.registry; sys.exit('kvtiers.tiers.isolation.loaded_code' not in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_killed_worker_is_not_replaced_by_one_of_other_code(package: Package, tmp_path: Path) -> None:
    recipe = StoreRecipe.of(LocalStore, root_dir=tmp_path / "root")
    store = ProcessIsolatedStore(recipe, n_workers=1, deadline_s=120.0)
    try:
        store.put("a", [memoryview(b"1")])
        (package.folder / "a.py").write_text("a = 2\n")
        assert store.size("a") == 1  # the one that lives has the code of before
        kill_workers(store)
        with pytest.raises(StoreUnavailableError, match=MESSAGE):
            store.size("a")
        (package.folder / "a.py").write_text("a = 1\n")
        package.now = LOOK_EVERY_S
        assert store.size("a") == 1
    finally:
        store.close()


def test_no_collector_of_other_code_is_started(package: Package, tmp_path: Path) -> None:
    (package.folder / "a.py").write_text("a = 2\n")
    mapper = FileMapper.from_offloading_spec("", FakeSpec())
    recipe = StoreRecipe.of(LocalStore, root_dir=tmp_path / "root")
    link = CollectorLink("test", recipe, CapacityPolicy(ttl_s=1000.0), mapper)
    try:
        wait_for(lambda: any("error" in report for report in link.take_reports()))
        assert not (tmp_path / "root").exists()
    finally:
        link.close()


def test_the_own_package_is_what_was_loaded() -> None:
    assert Path(loaded_code.__file__).parent.parent == Path(loaded_code.OWN_CODE._package)
    loaded_code.OWN_CODE.check()
