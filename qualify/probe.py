"""The environment probe: what a machine is, read from inside a worker, whatever is broken on it.

Nothing here may fail: every reading that raises, whatever it raises, becomes the reason for its absence.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PACKAGES: Mapping[str, str] = {
    "torch": "torch",
    "triton": "triton",
    "numpy": "numpy",
    "gdn-qualify": "qualify",
    "flash-linear-attention": "",
    "fla-core": "fla",
    "flash-qla": "",
    "tilelang": "tilelang",
    "apache-tvm-ffi": "tvm_ffi",
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine",
    "nvidia-modelopt": "modelopt",
    "transformers": "transformers",
}
"""Distribution -> the module that shows whether it works (empty: none is imported)."""

LIGHT = ("torch", "triton", "numpy")
"""Packages that a worker has loaded anyway; only these are imported to be probed, the others on request."""

VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "FLA_CI_ENV",
    "FLA_TILELANG",
    "FLA_TRIL_PRECISION",
    "FLA_USE_FAST_OPS",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTHONHASHSEED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCHINDUCTOR_FX_GRAPH_CACHE",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_F32_DEFAULT",
    "TRITON_INTERPRET",
    "TRITON_PTXAS_PATH",
)
"""Environment variables that reach numbers; no other is read."""


def guarded(read: Callable[[], Any]) -> tuple[Any, str]:
    """The value of a reading and an empty reason, or None and what it raised."""
    try:
        return read(), ""
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        text = " ".join(str(error).split())[:200]
        return None, f"{type(error).__name__}: {text}" if text else type(error).__name__


def environment(worker: str, *, shard: int = 0, thorough: bool = False) -> dict[str, Any]:
    """Everything that a receipt records about a worker's machine.

    Args:
        worker: its name.
        shard: the part of the run that it belongs to.
        thorough: also import the packages that a worker does not need, to see whether they work.
    """
    return {
        "worker": worker,
        "shard": shard,
        "gpu": gpu(),
        "software": software(thorough=thorough),
        "switches": switches(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "system": system(),
    }


def machine_facts(*, on_cpu: bool = False) -> dict[str, str]:
    """The facts that requirements look at, read without torch.

    Args:
        on_cpu: the run leaves any GPU alone.

    Returns:
        `sm` (`cpu`, `sm90`, ...), `sm_number` (0 or 90, ...), `gpus` and `gpu_memory_gib`, with `gpu_reason`
        where there is no GPU; `python`, `system`.
    """
    facts = {"sm": "cpu", "sm_number": "0", "gpus": "0", "gpu_memory_gib": "0"}
    facts |= {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "system": platform.system()}
    if on_cpu:
        return {**facts, "gpu_reason": "the profile runs on the CPU"}
    devices, reason = guarded(visible_devices)
    if not devices:
        return {**facts, "gpu_reason": reason or "CUDA_VISIBLE_DEVICES shows none"}
    first, reason = guarded(lambda: _nvml(devices[0]))
    if first is None:
        return {**facts, "gpu_reason": reason}
    number = sm_number(first["sm"])
    memory = int(first["memory_bytes"]) / 2**30
    return {
        **facts,
        "sm": sm_level(number),
        "sm_number": str(number),
        "gpus": str(len(devices)),
        "gpu_memory_gib": f"{memory:.1f}",
        "gpu": first["name"],
    }


def sm_number(text: str) -> int:
    """90 for `9.0`."""
    major, _, minor = text.partition(".")
    return int(major) * 10 + int(minor or 0)


def sm_level(number: int) -> str:
    """The level of the axis `sm` that a machine is on: SM 10.x and 12.x share one level each."""
    family = number // 10
    return f"sm{family}0" if family in (10, 12) else f"sm{number}"


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` would name them.

    Raises:
        Exception: whatever NVML raises where there is none.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [text.strip() for text in given.split(",") if text.strip() and text.strip() != "-1"]
    import pynvml

    pynvml.nvmlInit()
    return [str(i) for i in range(pynvml.nvmlDeviceGetCount())]


def gpu() -> dict[str, str]:
    """The first GPU that this process may use; `reason` where there is none."""
    devices, reason = guarded(visible_devices)
    if not devices:
        return {"reason": reason or "CUDA_VISIBLE_DEVICES shows none"}
    facts, reason = guarded(lambda: _nvml(devices[0]))
    return facts if facts is not None else {"reason": reason}


def uuid_of(device: str) -> str:
    """The driver's UUID of a GPU, named by its index or its UUID.

    Raises:
        Exception: whatever NVML raises where there is no such GPU.
    """
    import pynvml

    value = pynvml.nvmlDeviceGetUUID(_handle(device))
    return value.decode() if isinstance(value, bytes) else str(value)


def _handle(device: str) -> Any:
    import pynvml

    pynvml.nvmlInit()
    if device.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(device))
    return pynvml.nvmlDeviceGetHandleByUUID(device)


def _nvml(device: str) -> dict[str, str]:
    import pynvml

    handle = _handle(device)
    readings: Mapping[str, Callable[[], Any]] = {
        "name": lambda: pynvml.nvmlDeviceGetName(handle),
        "uuid": lambda: pynvml.nvmlDeviceGetUUID(handle),
        "sm": lambda: "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "memory_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        "driver": pynvml.nvmlSystemGetDriverVersion,
        "cuda_driver": pynvml.nvmlSystemGetCudaDriverVersion_v2,
        "ecc": lambda: bool(pynvml.nvmlDeviceGetEccMode(handle)[0]),
        "mig": lambda: bool(pynvml.nvmlDeviceGetMigMode(handle)[0]),
        "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power_limit_w": lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle) // 1000,
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    }
    facts = {}
    for name, read in readings.items():
        value, reason = guarded(read)
        text = value.decode() if isinstance(value, bytes) else str(value)
        facts[name] = f"unknown ({reason})" if reason else text
    return facts


def software(*, thorough: bool = False) -> dict[str, dict[str, Any]]:
    """Package -> its version, or None and the reason; a package that is installed but broken has both."""
    found = {name: _package(name, module, thorough) for name, module in PACKAGES.items()}
    for name, read in (("ptxas", _ptxas), ("cuda", _torch_cuda), ("python", platform.python_version)):
        version, reason = guarded(read)
        found[name] = {"version": version, "reason": reason}
    return found


def _package(name: str, module: str, thorough: bool) -> dict[str, Any]:
    version, reason = guarded(lambda: importlib.metadata.version(name))
    if version is None:
        return {"version": None, "reason": "not installed" if "PackageNotFound" in reason else reason}
    if module and (thorough or name in LIGHT or module.partition(".")[0] in sys.modules):
        loaded, broken = guarded(lambda: importlib.import_module(module))
        if loaded is None:
            return {"version": version, "reason": f"installed but broken: {broken}"}
        version = str(getattr(loaded, "__version__", version))
    return {"version": version, "reason": ""}


def _ptxas() -> str:
    import triton

    path = os.environ.get("TRITON_PTXAS_PATH") or str(
        Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    )
    text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    return text.strip().splitlines()[-1]


def _torch_cuda() -> str | None:
    import torch

    if torch.version.cuda is None:
        raise RuntimeError("torch was built without CUDA")
    return torch.version.cuda


def switches() -> dict[str, Any]:
    """Torch's numeric switches as found; empty where torch does not import."""
    found, reason = guarded(_switches)
    return found if found is not None else {"reason": reason}


def _switches() -> dict[str, Any]:
    import torch

    readings: Mapping[str, Callable[[], Any]] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
        "cuda.matmul.allow_bf16_reduced_precision_reduction": (
            lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        ),
        "cuda.matmul.allow_fp16_reduced_precision_reduction": (
            lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        ),
        "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "default_dtype": lambda: str(torch.get_default_dtype()),
        "threads": torch.get_num_threads,
    }
    found = {}
    for name, read in readings.items():
        value, reason = guarded(read)
        found[name] = f"unknown ({reason})" if reason else value
    return found


def system() -> dict[str, str]:
    """Operating system, processor and Python."""
    readings: Mapping[str, Callable[[], Any]] = {
        "platform": platform.platform,
        "machine": platform.machine,
        "processor": _processor,
        "cpus": lambda: len(os.sched_getaffinity(0)),
        "libc": lambda: " ".join(platform.libc_ver()),
        "python": sys.version.split()[0].__str__,
        "implementation": platform.python_implementation,
    }
    found = {}
    for name, read in readings.items():
        value, reason = guarded(read)
        found[name] = f"unknown ({reason})" if reason else str(value)
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
