"""The calls made on libcuda, through ctypes, into a library that copies on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtiers.connector.transfer.cuda_driver import ACCESS_ORDER_ANY, ACCESS_ORDER_STREAM, CudaDriver, CudaDriverError
from kvtiers.connector.transfer.transfer_plan import Int64s

NO_VERSION = 10_000_000


def _array(address: int, count: int) -> Int64s:
    return np.frombuffer(memoryview((ctypes.c_int64 * count).from_address(address)), np.int64)


class FakeCuda:
    """libcuda.so.1 as far as ``CudaDriver`` calls it.

    Attributes:
        batches: (access order, flags, stream, copies) of each batch.
        registered: address -> (bytes, flags).
        fail_at: number of the copy to fail at, or -1 to fail without saying where.
        mapped_by: what a device's address of registered memory is away from the host's.
    """

    def __init__(self, *, batch_since: int = 12080) -> None:
        self.batch_since = batch_since
        self.asked: list[tuple[bytes, int]] = []
        self.batches: list[tuple[int, int, int, int]] = []
        self.registered: dict[int, tuple[int, int]] = {}
        self.register_code = 0
        self.fail_at: int | None = None
        self.mapped_by = 0
        self.before_batch: Callable[[], None] = lambda: None
        # dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, stream, as cuda.h of 12.8 has them
        signature = ctypes.CFUNCTYPE(
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        self._batch = signature(self._memcpy_batch)

    def cuGetProcAddress_v2(self, name: bytes, entry: Any, version: Any, flags: Any, status: Any) -> int:
        self.asked.append((name, version.value))
        if version.value >= self.batch_since:
            entry._obj.value = ctypes.cast(self._batch, ctypes.c_void_p).value
        return 0

    def _memcpy_batch(
        self,
        dsts: int,
        srcs: int,
        sizes: int,
        count: int,
        attributes: int,
        first: int,
        num_attributes: int,
        failed: int,
        stream: int,
    ) -> int:
        self.before_batch()
        # struct CUmemcpyAttributes: order, {type, id} twice, flags: six 32-bit words
        words = (ctypes.c_uint32 * 6).from_address(attributes)
        assert num_attributes == 1
        assert ctypes.c_size_t.from_address(first).value == 0
        assert list(words[1:5]) == [0, 0, 0, 0]
        self.batches.append((words[0], words[5], stream, count))
        for at, (dst, src, size) in enumerate(
            zip(*(_array(column, count).tolist() for column in (dsts, srcs, sizes)), strict=True)
        ):
            if self.fail_at == at:
                ctypes.c_size_t.from_address(failed).value = at
                return 1
            ctypes.memmove(dst, src, size)
        return 1 if self.fail_at == -1 else 0

    def cuMemHostRegister_v2(self, address: Any, nbytes: Any, flags: Any) -> int:
        if self.register_code:
            return self.register_code
        self.registered[address.value] = nbytes.value, flags.value
        return 0

    def cuMemHostUnregister(self, address: Any) -> int:
        return 0 if self.registered.pop(address.value, None) else 713

    def cuMemHostGetDevicePointer_v2(self, pointer: Any, address: Any, flags: Any) -> int:
        pointer._obj.value = address.value + self.mapped_by
        return 0

    def cuGetErrorName(self, code: Any, name: Any) -> int:
        name._obj.value = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY"}.get(code.value)
        return 0


def _copies(count: int) -> tuple[np.ndarray, np.ndarray, Int64s, Int64s, Int64s]:
    src = np.arange(count * 16, dtype=np.uint8)
    dst = np.zeros_like(src)
    at = np.random.default_rng(1).permutation(count)
    sizes = np.arange(1, count + 1, dtype=np.int64)
    return src, dst, dst.ctypes.data + at * 16, src.ctypes.data + at * 16, sizes


@pytest.mark.parametrize("order", [ACCESS_ORDER_STREAM, ACCESS_ORDER_ANY])
def test_batch_makes_all_copies_in_one_call(order: int) -> None:
    cuda = FakeCuda()
    driver = CudaDriver(cuda)
    src, dst, dst_addresses, src_addresses, sizes = _copies(9)
    driver.memcpy_batch(dst_addresses, src_addresses, sizes, access_order=order, stream=0x77)
    assert cuda.batches == [(order, 0, 0x77, 9)]
    for address, size in zip((dst_addresses - dst.ctypes.data).tolist(), sizes.tolist(), strict=True):
        assert (dst[address : address + size] == src[address : address + size]).all()
        assert not dst[address + size : address + 16].any()


def test_batch_function_is_requested_by_version_12080() -> None:
    cuda = FakeCuda()
    assert CudaDriver(cuda).has_batch
    assert cuda.asked == [(b"cuMemcpyBatchAsync", 12080)]


def test_older_driver_has_no_batch() -> None:
    assert not CudaDriver(FakeCuda(batch_since=NO_VERSION)).has_batch
    assert not CudaDriver(object()).has_batch


@pytest.mark.parametrize(
    ("fail_at", "where"), [(4, "cuMemcpyBatchAsync at copy 4 of 9: "), (-1, "cuMemcpyBatchAsync: ")]
)
def test_error_of_refused_batch_names_the_call_and_copy(fail_at: int, where: str) -> None:
    cuda = FakeCuda()
    cuda.fail_at = fail_at
    _src, _dst, dst_addresses, src_addresses, sizes = _copies(9)
    with pytest.raises(CudaDriverError, match=where + r"CUDA_ERROR_INVALID_VALUE \(1\)"):
        CudaDriver(cuda).memcpy_batch(dst_addresses, src_addresses, sizes, access_order=ACCESS_ORDER_STREAM, stream=1)


def test_large_batch_is_split_and_its_error_counts_from_the_first_copy() -> None:
    cuda = FakeCuda()
    driver = CudaDriver(cuda)
    src, dst, dst_addresses, src_addresses, _sizes = _copies(10_000)
    sizes = np.full(10_000, 16, np.int64)
    driver.memcpy_batch(dst_addresses, src_addresses, sizes, access_order=ACCESS_ORDER_ANY, stream=0x77)
    assert [count for *_, count in cuda.batches] == [4096, 4096, 1808]
    assert (dst == src).all()

    def fail_in_the_second() -> None:
        cuda.fail_at = 4 if len(cuda.batches) == 1 else None

    cuda.batches.clear()
    cuda.before_batch = fail_in_the_second
    with pytest.raises(CudaDriverError, match="cuMemcpyBatchAsync at copy 4100 of 10000: "):
        driver.memcpy_batch(dst_addresses, src_addresses, sizes, access_order=ACCESS_ORDER_STREAM, stream=1)
    assert len(cuda.batches) == 2


def test_host_memory_is_registered_portable_and_mapped() -> None:
    cuda = FakeCuda()
    driver = CudaDriver(cuda)
    driver.host_register(0x7000, 0x2000)
    assert cuda.registered == {0x7000: (0x2000, 3)}
    assert driver.device_address(0x7000) == 0x7000
    driver.host_unregister(0x7000)
    with pytest.raises(CudaDriverError, match=r"cuMemHostUnregister: unknown error \(713\)"):
        driver.host_unregister(0x7000)


def test_machine_without_libcuda_has_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert CudaDriver.load() is None
