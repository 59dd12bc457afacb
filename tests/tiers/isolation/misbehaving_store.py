"""A store that does what a key says, for workers that must import little."""

from __future__ import annotations

import builtins
import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.tiers import errors
from kvtiers.tiers.errors import StoreUnavailableError
from kvtiers.tiers.isolation.worker import pack_frame
from kvtiers.tiers.store import Capabilities, KeyInfo, Store
from kvtiers.tiers.stores.files.local import LocalStore


@dataclass(frozen=True)
class OptionsDataclass:
    """Options as S3's are."""

    name: str
    count: int
    inner: dict[str, list[object]]


class HeldStore(LocalStore):
    """Puts wait as long as there is a file beside the root, ``<root_dir>.hold``."""

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        while os.path.exists(f"{self.root_dir}.hold"):
            time.sleep(0.01)
        return super().put(key, parts, overwrite=overwrite)


def make_memory(options: Mapping[str, Any]) -> Store:
    """A store of a custom tier that two processes do not share."""
    from kvtiers.tiers.stores.memory import MemoryStore  # imports numpy, which workers of the other stores need not

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


class Number:
    """What numpy's scalars are to JSON: no number, and with an ``item`` that is one."""

    def __init__(self, value: int | bool) -> None:
        self._value = value

    def item(self) -> int | bool:
        return self._value


class TheirError(StoreUnavailableError):
    """Does not call its base's constructor."""

    def __init__(self, code: int) -> None:
        self.code = code


class OddStore(LocalStore):
    """A store whose answers are not what a worker can send as they are."""

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        return Number(super().put(key, parts, overwrite=overwrite))  # type: ignore[return-value]

    def size(self, key: str) -> int | None:
        size = super().size(key)
        return object() if key == "object" else size and Number(size)  # type: ignore[return-value]

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        if key == "their/error":
            raise TheirError(404)
        if key == "bytes/key":
            raise errors.BlobNotFoundError("none", key=key.encode())  # type: ignore[arg-type]
        super().get_into(key, parts)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        return 5  # type: ignore[return-value]

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        yield KeyInfo(b"key", 0, 0.0)  # type: ignore[arg-type]


class IntrudingStore(LocalStore):
    """A store whose library forks, writes into its worker's socket, and writes into parts of a put."""

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        if key == "scribble":
            for part in parts:
                part.cast("B")[:1] = b"S"
        return super().put(key, parts, overwrite=overwrite)

    def size(self, key: str) -> int | None:
        return ["printable", "x", ""] if key == "list" else super().size(key)  # type: ignore[return-value]

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        if key in ("fork", "fork-in-c"):
            fork = os.fork if key == "fork" else ctypes.PyDLL(None).fork  # the latter calls no hook of Python's
            self._note(fork())
        elif key in ("late-child", "late-session"):
            if not (child := os.fork()):
                if key == "late-session":
                    os.setsid()
                self._wait_for_go()
                for part in parts:
                    part.cast("B")[:1] = b"F"
                os._exit(0)
            self._note(child)
            threading.Event().wait()
        elif key == "program":
            self._note(subprocess.Popen(["/bin/sleep", "600"]).pid)
        elif key.startswith("stray-"):
            threading.Thread(target=self._intrude, args=(key,), daemon=True).start()
            if key != "stray-later":
                threading.Event().wait()  # otherwise the worker would answer the call first
        super().get_into(key, parts)

    def _intrude(self, key: str) -> None:
        sockets = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_socket(fd)]
        if key == "stray-later":
            self._wait_for_go()
        content: object = {"stray-answer": [[None], None], "stray-null": None}.get(key, ["x"])
        frame = os.urandom(64) if key == "stray-before" else pack_frame(content)
        os.write(sockets[0], frame)
        with open(f"{self.root_dir}.wrote", "w", encoding="ascii"):
            pass

    def _wait_for_go(self) -> None:
        while not os.path.exists(f"{self.root_dir}.go"):
            time.sleep(0.01)

    def _note(self, pid: int) -> None:
        if pid:
            with open(f"{self.root_dir}.forks", "a", encoding="ascii") as file:
                print(pid, file=file)


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:  # the descriptor of the listing
        return False


class PlainStore(Store):
    """Only the six methods; a key says what happens. Stores nothing."""

    capabilities = Capabilities(exclusive_create=False, shared=False, latency_bound=True)

    def __init__(self, root_dir: str, options: OptionsDataclass | None = None) -> None:
        self._texts = {"options": repr(options).encode()}
        while os.path.exists(os.path.join(root_dir, "hang-at-start")):
            time.sleep(0.01)

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        self._act(key)
        return True

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self._act(key)
        parts[0][:] = self._texts[key]

    def size(self, key: str) -> int | None:
        self._act(key)
        if key == "modules":
            self._texts[key] = " ".join(sorted(sys.modules)).encode()
        return len(self._texts[key]) if key in self._texts else 4 if key == "slow" else None

    def delete(self, key: str) -> None:
        self._act(key)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        for i in range(512):  # two pages
            yield KeyInfo("first" if not i else f"k{i}", 0, 0.0)
        self._act(prefix)

    def close(self) -> None:
        pass

    def _act(self, key: str) -> None:
        if key == "hang":
            threading.Event().wait()
        elif key == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif key == "print":
            for descriptor in (1, 2):
                os.write(descriptor, b"printed")
        elif key == "slow":
            threading.Event().wait(0.3)
        elif key.startswith("raise/") and hasattr(builtins, name := key.removeprefix("raise/")):
            raise getattr(builtins, name)
        elif key.startswith("raise/"):
            raise getattr(errors, key.removeprefix("raise/"))("as told", key=key)
