"""Starts and ends the processes of this package, and sets them up.

Every process is a fresh interpreter. A fork of a process with threads would copy locks that no thread will release, and
multiprocessing's other start methods use pickle and run the main module again.

Import only the standard library here, because an engine waits while a process is started again.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final, TextIO

STDERR: Final = 2  # C libraries print to this descriptor, no matter which file it refers to

_LOGGER = "kvtiers"  # the parent of all loggers of this package
_THREAD_STACK_BYTES = 1 << 20  # instead of 8 MiB, which would count toward ``limit_memory`` although hardly used
_FORKED_STATUS = 4


# ---- in the process that starts another ------------------------------------------------------------------------------


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a fresh interpreter that calls ``main`` of a module in this process's ``sys.path``.

    The interpreter gets this interpreter's flags, such as -E and -X utf8, as in multiprocessing.
    """
    start = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from {module} import main; main()"
    path = [entry for entry in sys.path if isinstance(entry, str)]  # imports ignore other types, such as a Path
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-c", start, *arguments, json.dumps(path)]


def environment_without(variables: Collection[str]) -> dict[str, str]:
    """This process's environment without some variables."""
    return {name: value for name, value in os.environ.items() if name not in variables}


def occupy_standard_streams() -> None:
    """Open /dev/null on each closed descriptor from 0 to 2, for this process and its child processes.

    Otherwise the next opened file, or the descriptor copy that ``mmap`` keeps, would get such a number, and text that
    libraries print to stderr would overwrite that file.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)


def own_log_level() -> int:
    """This process's log level, to be passed to ``log_to_stderr`` in a child process."""
    return logging.getLogger(_LOGGER).getEffectiveLevel()


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process that was started with ``process_group=0``, and all processes that its libraries have started.

    Call it before the process is reaped: afterwards another group may have its number.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# ---- in the process that was started ---------------------------------------------------------------------------------


def end_if_forked(pid: int) -> None:
    """End this process at once if it is not process ``pid``, but a fork that a library made and returned from.

    Call it before each message to the parent, which would otherwise get two answers.
    """
    if os.getpid() != pid:
        os._exit(_FORKED_STATUS)


def log_to_stderr(process_name: str, level: int) -> None:
    """Log to standard error, in the format of an engine's log lines: process, level, time, file and line.

    Args:
        level: the level of kvtiers' loggers in the parent.
    """
    text = f"({process_name} pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
    logging.basicConfig(format=text, datefmt="%m-%d %H:%M:%S")
    logging.getLogger(_LOGGER).setLevel(level)


def limit_memory(bytes_max: int) -> None:
    """Limit the private memory that this process may allocate from now on. Allocations beyond the limit fail.

    Shared memory, such as the region, does not count. If the process aborts, no core file is written.
    """
    threading.stack_size(_THREAD_STACK_BYTES)
    with open("/proc/self/status", encoding="ascii") as f:
        used_kib = next(int(line.split()[1]) for line in f if line.startswith("VmData:"))
    for kind, limit in ((resource.RLIMIT_DATA, (used_kib << 10) + bytes_max), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, hard))


def own_output() -> TextIO:
    """Reserve standard output for this process's messages: from now on, output of libraries goes to standard error."""
    fd = os.dup(1)
    os.register_at_fork(after_in_child=lambda: os.close(fd))  # otherwise the parent would not see this process's end
    output = os.fdopen(fd, "w", encoding="utf-8")
    os.dup2(2, 1)
    return output
