"""Digests of local weights: which parts of large files are read, in each format."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvtiers.connector.identity import model_files
from kvtiers.connector.identity.model_files import files_digest
from kvtiers.connector.identity.weight_files import layout_of

KIB, MIB = 1 << 10, 1 << 20

#: Sizes and shapes of tensors of one layer, with experts stacked in one tensor.
TENSORS: Mapping[str, tuple[int, list[int]]] = {
    "embed": (MIB, [512, 1024]),
    "norm.0": (2 * KIB, [1024]),
    "qkv": (512 * KIB, [256, 1024]),
    "norm.1": (2 * KIB, [1024]),
    "k_scale": (4, []),
    "experts": (2 * MIB, [32, 32, 1024]),
    "bias": (6 * KIB, [3072]),
    "norm.2": (2 * KIB, [1024]),
}


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit for files that are read whole, so that the test's files are sampled."""
    monkeypatch.setattr(model_files, "READ_BYTES", MIB // 2)


def data_of(name: str, size: int, filled: str, part: slice) -> bytes:
    data = bytearray(size)
    if name == filled:
        data[part] = b"x" * len(data[part])
    return bytes(data)


def safetensors(path: Path, filled: str = "", part: slice = slice(None)) -> None:
    header, at = {}, 0
    for name, (size, shape) in TENSORS.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    data = b"".join(data_of(name, size, filled, part) for name, (size, _) in TENSORS.items())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def torch_zip(path: Path, filled: str = "", part: slice = slice(None)) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", "never unpickled")
        for name, (size, _) in TENSORS.items():
            archive.writestr(zipfile.ZipInfo(f"archive/data/{name}"), data_of(name, size, filled, part))


def torch_zip_without_checksums(path: Path, filled: str = "", part: slice = slice(None)) -> None:
    """As after ``torch.serialization.set_crc32_options(False)``."""
    torch_zip(path, filled, part)
    with zipfile.ZipFile(path) as archive:
        crcs = [struct.pack("<I", member.CRC) for member in archive.infolist()[1:]]
    data = path.read_bytes()
    for crc in crcs:
        data = data.replace(crc, bytes(4)) if crc != bytes(4) else data
    path.write_bytes(data)


def gguf(path: Path, filled: str = "", part: slice = slice(None), theta: float = 1e4) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    infos, at = b"", 0
    for name, (size, shape) in TENSORS.items():
        infos += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        infos += struct.pack("<IQ", 1, at)
        at += -(-size // 32) * 32
    tokens = b"".join(text(f"token {n}") for n in range(2000))
    values = text("tokens") + struct.pack("<IIQ", 9, 8, 2000) + tokens
    values += (
        text("rope.freq_base")
        + struct.pack("<If", 6, theta)
        + text("scores")
        + struct.pack("<IIQ4f", 9, 6, 4, 1, 2, 3, 4)
    )
    header = b"GGUF" + struct.pack("<IQQ", 3, len(TENSORS), 3) + values + infos
    data = b"".join(
        data_of(name, size, filled, part).ljust(-(-size // 32) * 32, b"\0") for name, (size, _) in TENSORS.items()
    )
    path.write_bytes(header + bytes(-len(header) % 32) + data)


FORMATS = pytest.mark.parametrize(
    ("suffix", "write"),
    [
        (".safetensors", safetensors),
        (".bin", torch_zip),
        (".pt", torch_zip_without_checksums),
        (".gguf", gguf),
    ],
    ids=["safetensors", "zip", "zip-without-checksums", "gguf"],
)


@FORMATS
@pytest.mark.parametrize("name", TENSORS)
def test_digest_changes_with_bytes_of_any_tensor(
    suffix: str, write: Callable[..., None], name: str, tmp_path: Path
) -> None:
    file = tmp_path / f"model{suffix}"
    write(file)
    before = files_digest(str(tmp_path))
    write(file, name)
    assert files_digest(str(tmp_path)) not in (before, None)


@pytest.mark.parametrize(("suffix", "write"), [(".safetensors", safetensors), (".gguf", gguf)])
@pytest.mark.parametrize("expert", [0, 1, 15, 30, 31])
def test_digest_changes_with_bytes_of_any_stacked_expert(
    suffix: str, write: Callable[..., None], expert: int, tmp_path: Path
) -> None:
    file = tmp_path / f"model{suffix}"
    write(file)
    before = files_digest(str(tmp_path))
    write(file, "experts", slice(expert * 64 * KIB, (expert + 1) * 64 * KIB))
    assert files_digest(str(tmp_path)) not in (before, None)


@pytest.mark.parametrize("third", range(3))
def test_digest_changes_with_bytes_of_any_fused_projection(third: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors(file)
    before = files_digest(str(tmp_path))
    safetensors(file, "qkv", slice(third * 512 * KIB // 3, (third + 1) * 512 * KIB // 3))
    assert files_digest(str(tmp_path)) not in (before, None)


@FORMATS
def test_digest_of_folder_copy_is_equal(suffix: str, write: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    write(tmp_path / "one" / f"model{suffix}", "qkv")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    assert files_digest(str(tmp_path / "one")) == files_digest(str(tmp_path / "other")) is not None


@FORMATS
def test_layout_covers_every_byte_of_every_tensor(suffix: str, write: Callable[..., None], tmp_path: Path) -> None:
    file = tmp_path / f"model{suffix}"
    write(file)
    layout = layout_of(file)
    assert layout.headers
    assert len(layout.tensors) >= len(TENSORS)
    end = 0
    for first, size in sorted([*layout.headers, *layout.tensors]):
        assert first == end
        end = first + size
    assert end == layout.size_bytes == file.stat().st_size


def test_digest_changes_with_value_in_gguf_header(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    gguf(file)
    before = files_digest(str(file))
    gguf(file, theta=5e5)
    assert files_digest(str(file)) not in (before, None)


def malformed_safetensors(header: str) -> bytes:
    return struct.pack("<Q", len(header)) + header.encode()


@pytest.mark.parametrize(
    "start",
    [
        b"no format at all",
        bytes(16),
        b"\xff" * 16,
        struct.pack("<Q", 90 << 20),
        malformed_safetensors("[]"),
        malformed_safetensors("{}"),
        malformed_safetensors('{"a": {"shape": [1], "data_offsets": [0, 8]}}'),
        malformed_safetensors('{"a": {"shape": [1], "data_offsets": [8, 2097000]}}'),
        malformed_safetensors('{"a": {"shape": [1], "data_offsets": [0.0, 1e300]}}'),
        malformed_safetensors('{"a": {"shape": 1, "data_offsets": [0]}}'),
        malformed_safetensors('{"a": {"shape": [1], "data_offsets": [0, 123456789012345678901234567890]}}'),
        malformed_safetensors("[" * 30_000),
        b"PK\x03\x04 and no archive",
        b"GGUF" + struct.pack("<IQQ", 1, 1, 1),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60),
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 1 << 63),
        b"GGUF" + struct.pack("<IQQQIIQ", 3, 1, 1, 0, 9, 9, 1 << 40) + struct.pack("<IQ", 9, 1) * 5000,
    ],
)
def test_digest_samples_file_with_malformed_header_evenly(start: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    digests = set()
    for filled in (None, 0, 11, 20, 30):  # of 32 pieces of 64 KiB
        data = bytearray(2 * MIB)
        if filled is not None:
            data[filled * 64 * KIB : (filled + 1) * 64 * KIB] = b"x" * (64 * KIB)
        data[: len(start)] = start
        file.write_bytes(data)
        digests.add(files_digest(str(file)))
    assert None not in digests
    assert len(digests) == 5


@pytest.mark.parametrize("offset", [0, 333, MIB // 2 - 1])
def test_digest_reads_small_files_whole(offset: int, tmp_path: Path) -> None:
    """LoRA adapters are this small."""
    (tmp_path / "adapter_config.json").write_text("{}")
    data = bytearray(MIB // 2)
    digests = set()
    for value in (0, 1):
        data[offset] = value
        (tmp_path / "adapter_model.safetensors").write_bytes(data)
        digests.add(files_digest(str(tmp_path), also="adapter_config.json"))
    assert len(digests) == 2


@pytest.mark.parametrize("tensors_before", [0, 90_000])
def test_digest_changes_with_index(tensors_before: int, tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors")
    before = {
        f"model.layers.0.mlp.experts.{number}.down_proj.weight": "model.safetensors" for number in range(tensors_before)
    }
    digests = set()
    for name in ("model.safetensors", "other.safetensors"):
        index = {"weight_map": before | {"norm.0": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        digests.add(files_digest(str(tmp_path)))
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("files", "tensors", "tensor_bytes"),
    [(4, 10, 8 * MIB), (2, 1500, 32 * KIB), (3, 2, 8 * KIB), (1, 0, 0)],
    ids=["dense", "many experts", "small", "no tensors"],
)
def test_digest_reads_are_bounded(
    files: int, tensors: int, tensor_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers_bytes = 0
    for number in range(files):
        header = {
            f"t{n}": {
                "dtype": "U8",
                "shape": [tensor_bytes],
                "data_offsets": [n * tensor_bytes, (n + 1) * tensor_bytes],
            }
            for n in range(tensors)
        }
        text = json.dumps(header).encode()
        headers_bytes += 8 + len(text)
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + tensors * tensor_bytes)
    read: list[int] = []
    pread = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    assert files_digest(str(tmp_path)) is not None
    samples = model_files.READ_BYTES // model_files.SAMPLE_BYTES
    assert len(read) <= files + files * tensors + samples
    assert sum(read) <= headers_bytes + 2 * model_files.READ_BYTES + files * tensors * model_files.SAMPLE_BYTES
