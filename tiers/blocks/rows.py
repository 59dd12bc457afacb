"""Rows: the region's slots, one row each."""

from __future__ import annotations

import ctypes
from typing import Any

from ..errors import ConfigError
from .seal import PAYLOAD_MULTIPLE_BYTES


class Rows:
    """The region's rows as flat memoryviews. (Python's memoryview cannot take ``view[b]`` of a 2-D view.)"""

    def __init__(self, view: memoryview) -> None:
        if view.ndim != 2 or not view.c_contiguous or view.readonly:
            raise ConfigError(
                "must be a writable, C-contiguous view of shape (num_chunks, row_bytes)",
                field="primary_kv_view",
            )
        assert view.shape is not None
        self.num_rows = view.shape[0]
        self.row_bytes = view.shape[1] * view.itemsize
        if self.row_bytes % PAYLOAD_MULTIPLE_BYTES or not self.row_bytes:
            raise ConfigError(
                f"rows of {self.row_bytes} bytes; must be a multiple of {PAYLOAD_MULTIPLE_BYTES}",
                field="primary_kv_view",
            )
        self._flat = view.cast("B")
        self._whole = ctypes.c_ubyte * self._flat.nbytes

    def __getitem__(self, block: int) -> memoryview:
        start = block * self.row_bytes
        return self._flat[start : start + self.row_bytes]

    def lend(self) -> Any:
        """The region as an object that lives as long as anything refers to a view made of it."""
        return self._whole.from_buffer(self._flat)

    def release(self) -> None:
        """Release the region, so that it can be unmapped. Call it only when no thread can use a row any more."""
        self._flat.release()

    def check_ids(self, block_ids: Any) -> list[int]:
        # tolist, because converting 512 numpy integers one by one takes the scheduler's thread 50 µs.
        is_integers = getattr(getattr(block_ids, "dtype", None), "kind", "") in ("i", "u")
        blocks = block_ids.tolist() if is_integers else list(map(int, block_ids))
        if blocks and not (min(blocks) >= 0 and max(blocks) < self.num_rows):
            bad = next(block for block in blocks if not 0 <= block < self.num_rows)
            raise ValueError(f"block id {bad} is outside the region's 0..{self.num_rows - 1}")
        return blocks
