"""The few CUDA driver functions that the handler needs, called directly in libcuda through ctypes.

cuda-bindings is not used: its ``cuMemcpyBatchAsync`` takes Python lists, and creates an object per copy under the GIL.
Here the arrays are passed as they are, and ctypes releases the GIL during the call, which takes long: about 0.5 µs a
copy (vllm#48434, measured there on an H100).
"""

from __future__ import annotations

import ctypes
from typing import Any

from .transfer_plan import Int64s

# CUmemcpySrcAccessOrder
ACCESS_ORDER_STREAM = 1
ACCESS_ORDER_ANY = 3

# cuMemcpyBatchAsync as of CUDA 12.8. CUDA 13.0 changed its signature (no failIdx). A driver still provides each of its
# earlier ABIs on request by version, so asking for 12.8 gives the same signature on every driver.
_BATCH_ABI_VERSION = 12080
# Far below the 51,828 copies of one call that failed inside a driver (vllm#49276: RTX PRO 6000, driver 580.159.04).
# Still enough to make the cost of the call itself negligible, at 0.5 µs a copy (vllm#48434, H100).
_BATCH_COPIES_MAX = 4096
_SIZE_MAX = ctypes.c_size_t(-1).value
_HOST_REGISTER_FLAGS = 1 | 2  # PORTABLE | DEVICEMAP


class CudaDriverError(RuntimeError):
    """A driver call failed."""


class _MemLocation(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _MemcpyAttributes(ctypes.Structure):
    _fields_ = [
        ("src_access_order", ctypes.c_int),
        ("src_location_hint", _MemLocation),
        ("dst_location_hint", _MemLocation),
        ("flags", ctypes.c_uint),
    ]


_MEMCPY_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # dsts
    ctypes.c_void_p,  # srcs
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # count
    ctypes.POINTER(_MemcpyAttributes),
    ctypes.POINTER(ctypes.c_size_t),  # attrsIdxs
    ctypes.c_size_t,  # numAttrs
    ctypes.POINTER(ctypes.c_size_t),  # failIdx
    ctypes.c_void_p,  # stream
)


class CudaDriver:
    """libcuda. Any thread may call; every call needs the device's context on the calling thread.

    Args:
        library: the loaded libcuda.so.1, or an object with its functions.

    Attributes:
        has_batch: whether ``memcpy_batch`` is available (CUDA >= 12.8).
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        entry, status = ctypes.c_void_p(), ctypes.c_int()
        try:
            code = library.cuGetProcAddress_v2(
                b"cuMemcpyBatchAsync",
                ctypes.byref(entry),
                ctypes.c_int(_BATCH_ABI_VERSION),
                ctypes.c_uint64(0),
                ctypes.byref(status),
            )
        except AttributeError:  # a driver older than 12.0
            code = 1
        self.has_batch = code == 0 and bool(entry.value)
        self._memcpy_batch = _MEMCPY_BATCH(entry.value) if self.has_batch and entry.value else None

    @classmethod
    def load(cls) -> CudaDriver | None:
        """Load the machine's driver. None: there is no CUDA driver (also on ROCm)."""
        try:
            return cls(ctypes.CDLL("libcuda.so.1"))
        except OSError:
            return None

    def memcpy_batch(self, dst: Int64s, src: Int64s, nbytes: Int64s, *, access_order: int, stream: int) -> None:
        """Start all copies on the stream, thousands in one call. The copies run in no defined order.

        Args:
            dst, src, nbytes: (n,) addresses and lengths, contiguous, n >= 1.
            access_order: ``ACCESS_ORDER_STREAM`` if earlier work on the stream writes the source;
                ``ACCESS_ORDER_ANY`` if the source is already final.
            stream: handle of the stream; not the legacy default stream.

        Raises:
            CudaDriverError: the driver rejected a copy; the message has its number, if the driver reports the number.
                Earlier copies may be under way.
        """
        assert self._memcpy_batch is not None
        assert all(column.flags.c_contiguous for column in (dst, src, nbytes))
        attributes, first = _MemcpyAttributes(src_access_order=access_order), ctypes.c_size_t(0)
        for start in range(0, len(nbytes), _BATCH_COPIES_MAX):
            part = slice(start, start + _BATCH_COPIES_MAX)
            failed = ctypes.c_size_t(_SIZE_MAX)
            code = self._memcpy_batch(
                dst[part].ctypes.data,
                src[part].ctypes.data,
                nbytes[part].ctypes.data,
                len(nbytes[part]),
                ctypes.byref(attributes),
                ctypes.byref(first),
                1,
                ctypes.byref(failed),
                stream,
            )
            where = "" if failed.value == _SIZE_MAX else f" at copy {start + failed.value} of {len(nbytes)}"
            self._check(code, f"cuMemcpyBatchAsync{where}")

    def host_register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory and map it for every device.

        Raises:
            CudaDriverError: the driver refused: the locked-memory limit, memory already registered, …
        """
        # This is the driver's call, not the runtime's: a failed runtime call leaves an error behind, and the next
        # kernel launch anywhere in the process would report that error as its own.
        code = self._library.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_HOST_REGISTER_FLAGS)
        )
        self._check(code, "cuMemHostRegister")

    def host_unregister(self, address: int) -> None:
        """Undo ``host_register``.

        Raises:
            CudaDriverError: the address is not registered.
        """
        self._check(self._library.cuMemHostUnregister(ctypes.c_void_p(address)), "cuMemHostUnregister")

    def device_address(self, address: int) -> int:
        """Return the address at which a kernel sees registered host memory.

        Raises:
            CudaDriverError: the memory is not mapped.
        """
        pointer = ctypes.c_uint64()
        code = self._library.cuMemHostGetDevicePointer_v2(
            ctypes.byref(pointer), ctypes.c_void_p(address), ctypes.c_uint(0)
        )
        self._check(code, "cuMemHostGetDevicePointer")
        return pointer.value

    def _check(self, code: int, what: str) -> None:
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
            raise CudaDriverError(f"{what}: {(name.value or b'unknown error').decode()} ({code})")
