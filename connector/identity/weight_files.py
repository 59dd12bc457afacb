"""Where a file of weights has its headers and tensors: safetensors, PyTorch's zip format, and GGUF.

Nothing is unpickled. A file of another format, or with a malformed header, is one tensor.
"""

from __future__ import annotations

import json
import operator
import os
import struct
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

HEADER_BYTES_MAX = 100 << 20  # safetensors' own limit
_SLICE_BYTES_MIN = 64 << 10

#: Exceptions for a malformed header. json, struct and zipfile do not document all exceptions that they raise.
_MALFORMED = (
    ValueError, TypeError, KeyError, AttributeError, OverflowError, EOFError, RecursionError, MemoryError,
    struct.error, zipfile.BadZipFile, NotImplementedError,
)  # fmt: skip

#: Sizes of GGUF's kinds of values. Strings and arrays contain their lengths.
_GGUF_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_STRING, _GGUF_ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets and sizes in a file of weights.

    Attributes:
        headers: descriptions of the tensors. For PyTorch's zip format they include a CRC-32 of every tensor.
        tensors: tensors, and the slices of stacked ones, such as a layer's experts.
    """

    size_bytes: int
    headers: Sequence[tuple[int, int]]
    tensors: Sequence[tuple[int, int]]


def layout_of(file: Path) -> Layout:
    """Return the layout of a file of weights.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        magic = opened.read(4)
        opened.seek(0)
        read = _gguf if magic == b"GGUF" else _zip if magic == b"PK\x03\x04" else _safetensors
        try:
            return read(opened, size)
        except _MALFORMED:
            return Layout(size, (), [(0, size)])


def _safetensors(file: BinaryIO, size: int) -> Layout:
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > min(HEADER_BYTES_MAX, size - 8):
        raise ValueError
    data, end = 8 + header_bytes, 0
    tensors: list[tuple[int, int]] = []
    header: dict[str, Any] = json.loads(file.read(header_bytes))
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    for entry in sorted(entries, key=lambda entry: tuple(entry["data_offsets"])):
        first, last = map(operator.index, entry["data_offsets"])
        if first != end or last < first:
            raise ValueError
        tensors += _slices(data + first, last - first, entry["shape"])
        end = last
    if data + end != size:
        raise ValueError
    return Layout(size, [(0, data)], tensors)


def _slices(first: int, size: int, shape: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Cut a stack of matrices along its outermost dimension. Slices of a few KiB, as in convolutions, stay together."""
    count = shape[0] if len(shape) > 2 else 1
    if count < 2 or size // count < _SLICE_BYTES_MIN:
        return [(first, size)]
    bounds = [first + size * index // count for index in range(count + 1)]
    return [(start, end - start) for start, end in pairwise(bounds)]


def _zip(file: BinaryIO, size: int) -> Layout:
    with zipfile.ZipFile(file) as archive:
        starts = sorted(member.header_offset for member in archive.infolist())
        directory = archive.start_dir
    bounds = [0, *starts, directory]
    if bounds != sorted(bounds):
        raise ValueError
    return Layout(size, [(directory, size - directory)], [(first, end - first) for first, end in pairwise(bounds)])


def _gguf(file: BinaryIO, size: int) -> Layout:
    header = _GgufHeader(file)
    header.read(4)
    if header.number(4) not in (2, 3):
        raise ValueError
    tensors, values = header.number(), header.number()
    for _ in range(values):
        header.skip_string()
        header.skip_value(header.number(4))
    places = []
    for _ in range(tensors):
        header.skip_string()
        shape = [header.number() for _ in range(header.number(4))]
        header.number(4)
        places.append((header.number(), shape[::-1]))
    # Tensors begin at the next multiple of an alignment. Without it the pieces begin a few bytes early.
    data = header.position
    places.sort()
    ends = [place for place, _ in places[1:]] + [size - data]
    if not places or places[0][0] or ends != sorted(ends):
        raise ValueError
    pieces = [
        piece
        for (first, shape), end in zip(places, ends, strict=True)
        for piece in _slices(data + first, end - first, shape)
    ]
    return Layout(size, [(0, data)], pieces)


class _GgufHeader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = 0

    def read(self, count: int) -> bytes:
        self.position += count
        if self.position > HEADER_BYTES_MAX:
            raise ValueError
        found = self._file.read(count)
        if len(found) != count:
            raise EOFError
        return found

    def number(self, size: int = 8) -> int:
        return int.from_bytes(self.read(size), "little")

    def skip_string(self) -> None:
        self.read(self.number())

    def skip_value(self, kind: int) -> None:
        if kind == _GGUF_STRING:
            self.skip_string()
        elif kind != _GGUF_ARRAY:
            self.read(_GGUF_VALUE_BYTES[kind])
        else:
            element, count = self.number(4), self.number()
            if element in _GGUF_VALUE_BYTES:
                self.read(count * _GGUF_VALUE_BYTES[element])
                return
            for _ in range(count):
                self.skip_value(element)
