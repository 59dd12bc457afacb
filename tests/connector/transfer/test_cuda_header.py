"""The calls on libcuda next to NVIDIA's own headers: a library compiled with them, in libcuda's place.

A slip in a structure or a signature that ctypes is told of would otherwise show on a GPU first, as garbage.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvtiers.connector.transfer.cuda_driver import ACCESS_ORDER_ANY, ACCESS_ORDER_STREAM, CudaDriver, CudaDriverError

# Copies, registers and refuses as the headers' comments say that the driver does.
LIBRARY = r"""
#include <cuda.h>
#include <cudaTypedefs.h>
#include <string.h>

static const void *registered;
int calls, last_order;

static CUresult batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                      size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, CUstream stream) {
    calls++;
    last_order = attrs[0].srcAccessOrder;
    *failIdx = (size_t)-1;
    if (numAttrs != 1 || attrsIdxs[0] != 0 || attrs[0].flags != 0 || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (attrs[0].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM &&
        attrs[0].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
        return CUDA_ERROR_INVALID_VALUE;
    if (attrs[0].srcLocHint.type != CU_MEM_LOCATION_TYPE_INVALID || attrs[0].dstLocHint.id != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream == 0 || stream == CU_STREAM_LEGACY)
        return CUDA_ERROR_INVALID_HANDLE;
    for (size_t i = 0; i < count; i++) {
        if (sizes[i] == 0) {
            *failIdx = i;
            return CUDA_ERROR_INVALID_VALUE;
        }
        memcpy((void *)dsts[i], (const void *)srcs[i], sizes[i]);
    }
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **entry, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    PFN_cuMemcpyBatchAsync_v12080 of_12_8 = batch;
    int found = !strcmp(symbol, "cuMemcpyBatchAsync") && version >= 12080 && version < 13000 && flags == 0;
    *entry = found ? (void *)of_12_8 : 0;
    *status = found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuMemHostRegister(void *address, size_t nbytes, unsigned int flags) {
    if (flags != (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP) || nbytes != 8192)
        return CUDA_ERROR_INVALID_VALUE;
    if (registered)
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    registered = address;
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *address) {
    if (address != registered)
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    registered = 0;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *pointer, void *address, unsigned int flags) {
    if (address != registered || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *pointer = (CUdeviceptr)address;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error == CUDA_ERROR_INVALID_VALUE                      ? "CUDA_ERROR_INVALID_VALUE"
            : error == CUDA_ERROR_INVALID_HANDLE                   ? "CUDA_ERROR_INVALID_HANDLE"
            : error == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED ? "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
                                                                   : 0;
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler (cc)")
    try:
        files = importlib.metadata.files("nvidia-cuda-runtime-cu12") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs NVIDIA's headers (pip install nvidia-cuda-runtime-cu12)")
    header = next(Path(str(file.locate())) for file in files if file.name == "cudaTypedefs.h")
    folder = tmp_path_factory.mktemp("cuda")
    source, made = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-Werror", "-I", header.parent, "-o", made, source], check=True)
    return ctypes.CDLL(str(made))


@pytest.mark.parametrize("order", [ACCESS_ORDER_STREAM, ACCESS_ORDER_ANY])
def test_batch_compiled_with_cuda_headers_makes_all_copies(library: ctypes.CDLL, order: int) -> None:
    driver = CudaDriver(library)
    assert driver.has_batch
    src = np.arange(5000 * 16, dtype=np.uint8).reshape(5000, 16)
    dst = np.zeros_like(src)
    at = np.arange(5000, dtype=np.int64) * 16
    sizes = at // 16 % 16 + 1
    before = ctypes.c_int.in_dll(library, "calls").value
    driver.memcpy_batch(dst.ctypes.data + at, src.ctypes.data + at[::-1].copy(), sizes, access_order=order, stream=0x77)
    assert ctypes.c_int.in_dll(library, "calls").value == before + 2  # 4,096 copies at most in one
    assert ctypes.c_int.in_dll(library, "last_order").value == order
    copied = np.arange(16) < sizes[:, None]
    assert (dst == np.where(copied, src[::-1], 0)).all()


def test_error_of_refused_batch_names_the_call_and_copy(library: ctypes.CDLL) -> None:
    driver = CudaDriver(library)
    src, dst = np.zeros(5000 * 8, np.uint8), np.zeros(5000 * 8, np.uint8)
    at = np.arange(5000, dtype=np.int64) * 8
    sizes = np.full(5000, 8)
    sizes[4500] = 0
    with pytest.raises(CudaDriverError, match=r"at copy 4500 of 5000: CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.memcpy_batch(dst.ctypes.data + at, src.ctypes.data + at, sizes, access_order=ACCESS_ORDER_ANY, stream=5)
    with pytest.raises(CudaDriverError, match=r"^cuMemcpyBatchAsync: CUDA_ERROR_INVALID_HANDLE \(400\)"):
        driver.memcpy_batch(dst.ctypes.data + at, src.ctypes.data + at, sizes, access_order=ACCESS_ORDER_ANY, stream=0)


def test_registration_of_memory_twice_or_after_its_end_raises(library: ctypes.CDLL) -> None:
    driver = CudaDriver(library)
    memory = np.zeros(8192, np.uint8)
    address = memory.ctypes.data
    driver.host_register(address, 8192)
    assert driver.device_address(address) == address
    with pytest.raises(CudaDriverError, match=r"cuMemHostRegister: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED \(712\)"):
        driver.host_register(address, 8192)
    driver.host_unregister(address)
    with pytest.raises(CudaDriverError, match=r"cuMemHostUnregister: unknown error \(713\)"):
        driver.host_unregister(address)
    with pytest.raises(CudaDriverError, match="cuMemHostGetDevicePointer"):
        driver.device_address(address)
