"""Stores that misbehave when a file beside their root says so; for servers in processes of their own."""

from __future__ import annotations

import builtins
import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.files.local import LocalStore

HOARD_BYTES = 1 << 20


class HostileStore(LocalStore):
    """The file ``<root_dir>.how`` has a method's name and what it does in its next call, such as "put hang"."""

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        self._act("put", parts)
        return super().put(key, parts, overwrite=overwrite)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self._act("get", parts)
        super().get_into(key, parts)

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        self._act("size", ())
        return super().size_many(keys)

    def _act(self, method: str, parts: Sequence[memoryview]) -> None:
        try:
            with open(f"{self.root_dir}.how", encoding="ascii") as file:
                wanted, what = file.read().split()
            if wanted != method:
                return
            os.unlink(f"{self.root_dir}.how")  # of several threads, one does it
        except (FileNotFoundError, ValueError):
            return
        if what == "hang":
            threading.Event().wait()
        elif what == "exit":
            os._exit(0)
        elif what in ("fork", "fork-in-c"):
            # The latter calls no hook of Python's.
            self._note((os.fork if what == "fork" else ctypes.PyDLL(None).fork)())
        elif what in ("late-child", "late-session"):
            self._leave_child(parts, is_session=what == "late-session")
        elif what == "write":
            for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
                try:
                    os.write(fd, b"WARNING: a library writes this line where it should not.\n" * 2)
                except OSError:
                    pass
        elif what == "hoard":
            self.hoard = [bytearray(HOARD_BYTES)]
            while True:
                self.hoard.append(bytearray(HOARD_BYTES))
        elif what == "program":
            self._note(subprocess.Popen(["/bin/sleep", "600"]).pid)
        elif what == "print":
            print("printed", flush=True)
            os.write(1, b"written")
        else:
            raise getattr(builtins, what)("as told")

    def _leave_child(self, parts: Sequence[memoryview], *, is_session: bool) -> None:
        """A child that writes into the slots when it is told to; the call itself does not end."""
        if not (child := os.fork()):
            if is_session:
                os.setsid()
            while not os.path.exists(f"{self.root_dir}.go"):
                time.sleep(0.01)
            for part in parts:
                part.cast("B")[:1] = b"F"
            os._exit(0)
        self._note(child)
        threading.Event().wait()

    def _note(self, pid: int) -> None:
        if pid:
            with open(f"{self.root_dir}.forks", "a", encoding="ascii") as file:
                print(pid, file=file)


class HeldStore(LocalStore):
    """Puts wait as long as there is a file beside the root, ``<root_dir>.hold``."""

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        while os.path.exists(f"{self.root_dir}.hold"):
            time.sleep(0.01)
        return super().put(key, parts, overwrite=overwrite)


def make_memory(options: Mapping[str, Any]) -> Store:
    """A store of a custom tier that two processes do not share."""
    from kvtiers.tiers.stores.memory import MemoryStore  # imports numpy, which servers with other stores need not

    return MemoryStore()


def make_local(options: Mapping[str, Any]) -> Store:
    """Make the store of a custom tier, or fail in the way that the file ``how`` beside the root says."""
    root = options["root"]
    while os.path.exists(how := f"{root}.how"):
        with open(how, encoding="ascii") as file:
            what = file.read()
        if what == "exit":
            os._exit(0)
        if what != "hang":
            raise getattr(builtins, what)("as told")
        time.sleep(0.01)
    return LocalStore(root)
