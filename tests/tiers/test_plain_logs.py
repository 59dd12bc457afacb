"""Text from outside never reaches a log or an error with terminal control characters."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtiers
from kvtiers.tiers.errors import (
    BlobNotFoundError,
    ConfigError,
    QueueFullError,
    RegionError,
    SealError,
    SealReason,
    StoreError,
    StoreUnavailableError,
    printable,
)
from kvtiers.tiers.plain_logs import get_logger

#: Clears the screen, turns the rest about, begins a command as C1, hides a letter, and makes a line of its own.
EVIL = "a\x1b[2Jb\u202ec\x9b31md\u200be\rf\nERROR all is lost"
SHOWN = "a\\x1b[2Jb\\u202ec\\x9b31md\\u200be\\rf\\nERROR all is lost"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What a handler with logging's own formatter writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = get_logger("kvtiers.test_plain_logs")
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().removesuffix("\n").split("\n")


def test_printable_escapes_control_characters_and_keeps_plain_text() -> None:
    assert printable(EVIL) == SHOWN
    assert printable(SHOWN) == SHOWN
    assert printable("Grüße, 雪, 🙂 [red]") == "Grüße, 雪, 🙂 [red]"
    assert printable("\udc80") == "\\udc80"  # a byte of a file's name that is no text


def test_log_text_and_arguments_are_escaped(log: io.StringIO) -> None:
    logger = get_logger("kvtiers.test_plain_logs")
    logger.warning("%s, %d of %.1f %r: %s", EVIL, 3, 4.5, None, OSError(EVIL))
    logger.warning("%(name)s", {"name": EVIL})
    logger.warning(f"{EVIL}")
    logger.warning("%s and %s", Path(EVIL), [EVIL])
    assert lines(log) == [f"{SHOWN}, 3 of 4.5 None: {SHOWN}", SHOWN, SHOWN, f"{SHOWN} and {[EVIL]}"]


def test_log_traceback_is_escaped(log: io.StringIO) -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        get_logger("kvtiers.test_plain_logs").exception("a tier raised")
    assert lines(log)[:2] == ["a tier raised", "Traceback (most recent call last):"]
    assert all(line.isprintable() for line in lines(log))


def test_plain_log_arguments_keep_their_types(caplog: pytest.LogCaptureFixture) -> None:
    error = OSError("no such file")
    get_logger("kvtiers.test_plain_logs").warning("%s of %s", error, 3)
    assert caplog.records[-1].args == (error, 3)


@pytest.mark.parametrize(
    "error",
    [
        StoreError(EVIL),
        StoreUnavailableError(EVIL, key=EVIL),
        BlobNotFoundError("not stored", key=EVIL),
        SealError(SealReason.KEY, EVIL),
        RegionError(EVIL),
        QueueFullError(EVIL),
        ConfigError("is no key", field=EVIL),
    ],
)
def test_error_text_is_one_printable_line(error: Exception) -> None:
    assert str(error).isprintable()


def test_config_error_with_line_breaks_has_only_printable_lines() -> None:
    error = ConfigError(f"one\n{EVIL}")
    assert str(error).split("\n")[:2] == ["one", SHOWN.partition("\\n")[0]]
    assert all(line.isprintable() for line in str(error).split("\n"))


def test_every_module_uses_the_plain_logger() -> None:
    root = Path(kvtiers.__file__).parent
    modules = [
        path for part in ("tiers", "connector") for path in (root / part).rglob("*.py") if path.name != "plain_logs.py"
    ]
    assert len(modules) > 100
    own = [path for path in modules if re.search(r"getLogger\((__name__|\))", path.read_text(encoding="utf-8"))]
    assert own == [], "use kvtiers.tiers.plain_logs.get_logger"


def test_log_line_with_exception_without_text_names_its_class(log: io.StringIO) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    get_logger("kvtiers.test_plain_logs").warning("it failed: %s", Odd())
    assert log.getvalue() == "it failed: <Odd, whose text cannot be read: ZeroDivisionError>\n"
