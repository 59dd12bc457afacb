"""LoadedCode: an engine whose package is replaced on disk starts no processes of other code."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.tiers import connections, loaded_code
from kvtiers.tiers.loaded_code import LoadedCode
from tests.tiers.server.process_bench import Bench
from tests.waiting import wait_for

MESSAGE = "kvtiers was replaced on disk while this engine runs: restart it"


class Package:
    """One on disk, and what was loaded of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "inner").mkdir(parents=True)
        (folder / "a.py").write_text("a = 1\n")
        (folder / "inner" / "b.py").write_text("b = 1\n")
        self.code = LoadedCode(str(folder))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    package = Package(tmp_path / "package")
    monkeypatch.setattr("kvtiers.tiers.child_process.OWN_CODE", package.code)
    return package


def test_reinstalled_identical_package_passes_the_check(package: Package) -> None:
    shutil.copytree(package.folder, package.folder.with_name("copy"))
    shutil.rmtree(package.folder)
    with pytest.raises(RuntimeError, match=MESSAGE):
        package.code.check()
    package.folder.with_name("copy").rename(package.folder)
    (package.folder / "a.pyc").write_text("made at the first import")
    package.code.check()


@pytest.mark.parametrize("name", ["a.py", "inner/b.py", "inner/new.py"])
def test_package_with_other_code_is_refused(package: Package, name: str) -> None:
    package.code.check()
    (package.folder / name).write_text("a = 2\n")
    with pytest.raises(RuntimeError, match=MESSAGE):
        package.code.check()


def test_package_that_cannot_be_read_is_not_called_replaced(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    for taken in ("builtins.open", "os.scandir"):
        with monkeypatch.context() as few:
            few.setattr(taken, scarce)
            with pytest.raises(OSError, match="Too many open files"):
                package.code.check()
        package.code.check()


def test_link_to_nothing_in_the_package_is_accepted(package: Package) -> None:
    """Some editors make one beside a file that is being edited."""
    (package.folder / ".#a.py").symlink_to("user@host.1234")
    LoadedCode(str(package.folder)).check()


def test_import_of_the_registry_imports_loaded_code() -> None:
    """Not when the first process is started: a model is loaded in between, for minutes."""
    program = "import sys, kvtiers.tiers.registry; sys.exit('kvtiers.tiers.loaded_code' not in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_killed_process_is_not_replaced_after_a_code_change(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PAUSE_S", (0.01, 0.05))
    bench = Bench(tmp_path / "kv")
    try:
        assert bench.works()
        (package.folder / "a.py").write_text("a = 2\n")
        refused = []
        monkeypatch.setattr(bench.tier._channel, "_lost", lambda _, why: refused.append(why))
        assert bench.works()  # the one that lives has the code of before
        (pid,) = bench.pids
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: bench.has_lost(pid) and any(MESSAGE in why for why in refused))
        assert bench.pids == []
        assert not bench.run("get").success
        (package.folder / "a.py").write_text("a = 1\n")
        wait_for(bench.works)
    finally:
        bench.tier.shutdown()


def test_own_package_passes_the_loaded_code_check() -> None:
    assert Path(loaded_code.__file__).parent == Path(loaded_code.OWN_CODE._package)
    loaded_code.OWN_CODE.check()
