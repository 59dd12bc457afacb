"""A store whose library misbehaves when a file beside its root says so; for servers in processes of their own."""

from __future__ import annotations

import builtins
import ctypes
import os
import threading
import time
from collections.abc import Sequence

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
