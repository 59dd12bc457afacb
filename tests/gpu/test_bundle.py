"""Unpacking a bundle for a GPU machine. Packing needs a network and three minutes: ``make gpu-bundle``."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from tests.gpu.bundle import unpack


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Eleven parts, because 10 sorts after 2 only as a number, not as text."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("vllm/__init__.py", "x = 1\n" * 100)
    data = whole.getvalue()
    size = -(-len(data) // 11)
    for index in range(11):
        part = tmp_path / "parts" / str(index + 1) / "part"
        part.parent.mkdir(parents=True)
        part.write_bytes(data[index * size : (index + 1) * size])
    (part.parent / "sha256").write_text(hashlib.sha256(data).hexdigest())
    return tmp_path / "parts"


def test_unpack_joins_parts_in_order(parts: Path, tmp_path: Path) -> None:
    unpack(parts, tmp_path / "site")
    assert (tmp_path / "site/vllm/__init__.py").read_text() == "x = 1\n" * 100
    assert not (parts / "site.zip").exists()


@pytest.mark.parametrize("damage", ["missing", "flipped", "no sum"])
def test_unpack_of_damaged_parts_is_refused(parts: Path, tmp_path: Path, damage: str) -> None:
    part = parts / "3" / "part"
    if damage == "missing":
        part.unlink()
    elif damage == "flipped":
        part.write_bytes(bytes(byte ^ 1 for byte in part.read_bytes()))
    else:
        (parts / "11" / "sha256").unlink()
    with pytest.raises(SystemExit, match="missing or damaged"):
        unpack(parts, tmp_path / "site")
    assert not (tmp_path / "site").exists()
