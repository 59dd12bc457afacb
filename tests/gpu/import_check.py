"""Imports vLLM's modules for a GPU run on a machine without a GPU: ``python -m tests.gpu.import_check``.

Run it in an environment with the GPU machine's versions and ``PYTHONPATH=$PWD:SITE``, where SITE holds the unpacked
bundle. It makes vLLM choose its CUDA platform, and replaces the driver's libcuda by a library of empty functions. It
computes nothing. It shows that no package, symbol or module is missing, and that kvtiers' contract fits this vLLM.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: Functions of the driver's library that the kernels and their loaders need.
_DRIVER = ("cuGetProcAddress_v2", "cuPointerGetAttribute", "cuTensorMapEncodeTiled", "cuGetErrorString", "cuInit")
_MODULES = (
    "vllm._C_stable_libtorch",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader",
    "vllm.v1.kv_offload.tiering.spec",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "kvtiers.vllm",
    "kvtiers.connector.vllm.spec",
    "kvtiers.connector.vllm.tier",
    "tests.gpu.runner",
)


def main() -> int:
    """Import all modules. The exit code is 1 if an import fails."""
    with tempfile.TemporaryDirectory() as made:
        _stand_in_for_the_driver(Path(made))
        _stand_in_for_a_gpu()
        failed = 0
        for name in _MODULES:
            try:
                importlib.import_module(name)
            except Exception as e:
                failed += 1
                print(f"FAIL {name}: {type(e).__name__}: {e}"[:500])
            else:
                print(f"ok   {name}")
    from vllm.platforms import current_platform

    print(f"platform {type(current_platform).__name__}, {failed} of {len(_MODULES)} modules failed")
    return 1 if failed or not current_platform.is_cuda() else 0


def _stand_in_for_the_driver(folder: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
        return
    except OSError:
        pass
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("needs a C compiler (cc), to build a libcuda of empty functions")
    source = folder / "cuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in _DRIVER))  # CUDA_ERROR_NO_DEVICE
    made = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", made, source], check=True)
    ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)


def _stand_in_for_a_gpu() -> None:
    import triton.backends
    import vllm.third_party.pynvml as nvml

    class Memory:
        total, free, used = 80 << 30, 79 << 30, 1 << 30

    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": object(),
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": "GPU-0",
        "nvmlDeviceGetMemoryInfo": Memory(),
    }
    for name, answer in answers.items():
        setattr(nvml, name, lambda *_, answer=answer: answer)
    for name, backend in triton.backends.backends.items():
        backend.driver.is_active = staticmethod(lambda name=name: name == "nvidia")


if __name__ == "__main__":
    sys.exit(main())
