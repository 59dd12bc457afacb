from __future__ import annotations

import logging
import mmap
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.connector.transfer.cuda_driver import CudaDriver, CudaDriverError
from kvtiers.connector.transfer.pinning import PinnedMemory, pieces_of
from tests.connector.transfer.test_cuda_driver import FakeCuda

PAGE = mmap.PAGESIZE


@given(
    start=st.integers(1, 100).map(lambda n: n * PAGE),
    cell_offset=st.integers(0, PAGE * 2),
    rows=st.integers(1, 50),
    row_pages=st.integers(3, 6),
    piece_pages=st.integers(1, 40),
)
def test_pieces_cover_the_memory_and_cut_no_row(
    start: int, cell_offset: int, rows: int, row_pages: int, piece_pages: int
) -> None:
    row_bytes, cell_bytes = row_pages * PAGE, 100
    address = start + cell_offset
    nbytes = (rows - 1) * row_bytes + cell_bytes
    pieces = pieces_of(address, nbytes, row_bytes, piece_pages * PAGE)
    assert pieces[0][0] <= address < pieces[0][0] + PAGE
    assert pieces[-1][0] + pieces[-1][1] >= address + nbytes
    for (at, size), (following, _) in pairwise(pieces):
        assert at + size == following
    for at, size in pieces:
        assert at % PAGE == size % PAGE == 0
        assert 0 < size <= max(piece_pages, row_pages) * PAGE
    for row in range(rows):
        cell = address + row * row_bytes
        assert any(at <= cell and cell + cell_bytes <= at + size for at, size in pieces)


@pytest.mark.parametrize("row_bytes", [1000, PAGE])
def test_rows_not_separated_by_page_boundaries_are_pinned_as_one_piece(row_bytes: int) -> None:
    assert pieces_of(PAGE + 5, 10 * PAGE, row_bytes, PAGE) == [(PAGE, 11 * PAGE)]


def test_memory_is_unpinned_by_the_last_user(caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCuda()
    ticks = iter([10.0, 12.5])
    with caplog.at_level(logging.INFO):
        memory = PinnedMemory(CudaDriver(cuda), [(PAGE, PAGE), (2 * PAGE, PAGE)], users=2, clock=lambda: next(ticks))
    assert memory.pinned
    assert memory.mapped
    assert memory.cuts.tolist() == [PAGE, 2 * PAGE]
    assert "pinned 0.00 GiB of the region in 2 pieces in 2.50 s" in caplog.text
    memory.release()
    assert len(cuda.registered) == 2
    memory.release()
    assert cuda.registered == {}


class Refusing:
    """Registers ``room`` pieces and refuses the next."""

    def __init__(self, room: int, error: str = "CUDA_ERROR_OUT_OF_MEMORY (2)") -> None:
        self.room = room
        self.error = error
        self.registered: list[int] = []

    def host_register(self, address: int, nbytes: int) -> None:
        if len(self.registered) == self.room:
            raise CudaDriverError(f"cuMemHostRegister: {self.error}")
        self.registered.append(address)

    def host_unregister(self, address: int) -> None:
        self.registered.remove(address)

    def device_address(self, address: int) -> int:
        return address + 1


def test_refused_piece_unpins_other_pieces_and_log_mentions_ulimit(caplog: pytest.LogCaptureFixture) -> None:
    driver = Refusing(room=2)
    memory = PinnedMemory(driver, [(at * PAGE, PAGE) for at in range(1, 4)])
    assert not memory.pinned
    assert not memory.mapped
    assert len(memory.cuts) == 0
    assert driver.registered == []
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    assert "ulimit -l" in caplog.text
    memory.release()


def test_only_out_of_memory_error_is_blamed_on_the_locked_memory_limit(caplog: pytest.LogCaptureFixture) -> None:
    PinnedMemory(Refusing(room=0, error="CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (712)"), [(PAGE, PAGE)])
    assert "ALREADY_REGISTERED" in caplog.text
    assert "ulimit" not in caplog.text


def test_memory_at_another_device_address_is_pinned_but_not_mapped() -> None:
    memory = PinnedMemory(Refusing(room=9), [(PAGE, PAGE)])
    assert memory.pinned
    assert not memory.mapped
