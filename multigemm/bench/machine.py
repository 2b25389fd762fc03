"""The machine of a measurement: its description, and its measured ceilings.

Everything is read and nothing is set: a benchmark that changes clocks or power limits measures another machine than its
reader has.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from multigemm.backend import installed_version
from multigemm.bench.operands import float32_precision
from multigemm.bench.workloads import DTYPES, RECIPES, Rates
from multigemm.errors import LibraryError, MultigemmError
from multigemm.select.timing import measure

PACKAGES = (
    "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "numba", "numba-cuda", "numpy",
    "deep_gemm", "quack-kernels", "fbgemm_gpu", "triton_kernels",
)  # fmt: skip
QUERIES = {
    "driver": "driver_version",
    "power_cap_w": "power.limit",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
}


def _run(*command: str, cwd: Path | None = None) -> str:
    """The output of a command; "" if it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=cwd, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """The commit of the checkout that this code runs from, with "+" if files differ; outside of a checkout the
    version."""
    here = Path(__file__).resolve().parents[2]
    found = _run("git", "rev-parse", "--short=12", "HEAD", cwd=here) if (here / ".git").exists() else ""
    if found:
        return found + ("+" if _run("git", "status", "--porcelain", "--untracked-files=no", cwd=here) else "")
    return f"version {versions(['multigemm']).get('multigemm', 'unknown')}"


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of these packages, as installed; of one that only lies on the path, as its loaded module says."""
    found = {name: installed_version(name) or getattr(sys.modules.get(name), "__version__", "") for name in packages}
    return {name: str(version) for name, version in found.items() if version}


def clocks(device: torch.device) -> dict[str, float | str]:
    """The clocks that nvidia-smi reports; empty on a CPU or without nvidia-smi."""
    if device.type != "cuda":
        return {}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = f"GPU-{uuid}" if uuid else str(device.index or 0)
    line = _run(
        "nvidia-smi", f"--id={which}", f"--query-gpu={','.join(QUERIES.values())}", "--format=csv,noheader,nounits"
    )
    if not line:
        return {}
    found: dict[str, float | str] = {}
    for name, text in zip(QUERIES, (part.strip() for part in line.splitlines()[0].split(",")), strict=False):
        try:
            found[name] = float(text) if name != "driver" else text
        except ValueError:
            found[name] = text
    return found


def device_name(device: torch.device) -> str:
    """The model of the GPU, or of the CPU with its number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        model = platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def load_warning(device: torch.device) -> str:
    """A warning about other processes that keep a CPU busy, with the remedy; "" if there are none, and for a GPU."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if device.type != "cpu" or load < cores:
        return ""
    return (
        f"WARNING: other processes use this machine (load {load:.1f} on {cores} cores): stop them, or times will be "
        "noisy and the run long"
    )


def describe(device: torch.device) -> dict[str, Any]:
    """The machine as JSON-ready data."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device_name(device),
        "device_type": device.type,
        "cpu_count": os.cpu_count(),
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda or "",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else "",
        "packages": versions(PACKAGES),
        "clocks": clocks(device),
    }


# --- energy -----------------------------------------------------------------------------------------

NVML = "libnvidia-ml.so.1"
COUNTED_S, PATIENCE_S = 0.5, 5.0
CHUNK_US = 8e3
"""Microseconds of calls between two readings of the counter, which moves in steps of up to 100 ms. A reading takes 4 ms
(H200)."""


class EnergyMeter:
    """The energy that a GPU has used since its driver was loaded.

    Raises:
        LibraryError: there is no GPU, no NVML, or this GPU has no energy counter; the text says which.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise LibraryError(f"energy is counted on GPUs alone, and this is a {device.type}: leave --energy out")
        self.device, self._handle = device, ctypes.c_void_p()
        try:
            self._nvml = ctypes.CDLL(NVML)
        except OSError as error:
            raise LibraryError(
                f"energy is read through NVML, which cannot be loaded ({error}): leave --energy out"
            ) from error
        self._call("nvmlInit_v2")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        self._call("nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(self._handle))
        self.joules()

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._nvml, name)(*arguments):
            raise LibraryError(f"{name} returned status {status}: this GPU's energy cannot be read: leave --energy out")

    def joules(self) -> float:
        """The energy used so far, in joules."""
        total = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(total))
        return total.value / 1e3

    def _queue(self, call: Callable[[], object], times: int) -> torch.cuda.Event:
        for _ in range(times):
            call()
        return torch.cuda.current_stream(self.device).record_event()  # type: ignore[no-any-return]

    def of_call(self, call: Callable[[], object], us: float) -> tuple[float, float]:
        """Joules and microseconds of one call that takes about `us`: means over calls back to back.

        The counter moves in steps, of which whole ones count: the calls from its first step to one that is at least
        COUNTED_S later. Raises LibraryError where it does not move for PATIENCE_S.
        """
        few, calls, steps = max(1, round(CHUNK_US / us)), 0, list[tuple[float, int, float]]()
        torch.cuda.synchronize(self.device)
        last, begin = self.joules(), time.perf_counter()
        running = self._queue(call, few)
        while len(steps) < 2 or steps[-1][2] - steps[0][2] < COUNTED_S:
            following = self._queue(call, few)  # the device has work while the host looks
            running.synchronize()
            running, calls, now, seen = following, calls + few, time.perf_counter(), self.joules()
            if seen != last:
                steps.append((seen, calls, now))
                last = seen
            if now - (steps[-1][2] if steps else begin) > PATIENCE_S:
                raise LibraryError(f"the energy counter did not move for {PATIENCE_S:g} s of work: leave --energy out")
        torch.cuda.synchronize(self.device)
        count = steps[-1][1] - steps[0][1]
        return (steps[-1][0] - steps[0][0]) / count, (steps[-1][2] - steps[0][2]) * 1e6 / count


# --- ceilings ---------------------------------------------------------------------------------------

DENSE_SIZES = {"cuda": (4096, 8192), "cpu": (512, 1024)}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


def dense_tflops(device: torch.device, dtype: str) -> float:
    """The highest rate of torch.mm on large square products of random data; for float8 of `torch._scaled_mm` with
    promoted sums, which every entry must have.

    If float8 products are not supported, the ceiling is that of bfloat16, which is also the ceiling for quantised
    weights.
    """
    recipe, best = RECIPES.get(dtype), 0.0
    on_cuda = device.type == "cuda"
    float8 = recipe is not None and recipe.a and on_cuda and torch.cuda.get_device_capability(device) >= (8, 9)
    dtype = "bf16" if recipe is not None else dtype
    for n in DENSE_SIZES[device.type]:
        values = torch.randn(2, n, n, device=device)
        if float8:
            (a, b), one = values.to(torch.float8_e4m3fn), torch.ones((), device=device)
            call = partial(torch._scaled_mm, a, b.mT, one, one, out_dtype=torch.bfloat16)
        elif dtype == "int8":
            call = partial(torch._int_mm, *(values * 3).to(torch.int8))
        else:
            a, b = values.to(DTYPES[dtype])
            call = partial(torch.mm, a, b, out=torch.empty_like(a))
        with float32_precision("high" if dtype == "tf32" else "highest"):
            taken = measure({"dense": call}, device, reps=20, min_reps=5, budget_ms=60.0)["dense"]
        if taken.ok:
            best = max(best, 2 * n**3 / taken.median / 1e6)
    return best


def copy_tbps(device: torch.device) -> float:
    """Bytes read plus bytes written by a large copy; raises MultigemmError where it cannot run."""
    source = torch.randint(0, 255, (COPY_BYTES[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = measure({"copy": lambda: target.copy_(source)}, device, reps=20, min_reps=5, budget_ms=60.0)["copy"]
    if not taken.ok:
        raise MultigemmError(f"the copy that gives the ceiling of memory failed: {taken.error}")
    return 2 * source.numel() / taken.median / 1e6


def measured_rates(device: torch.device, dtypes: set[str]) -> dict[str, Rates]:
    """The ceilings for each dtype that occurs."""
    bandwidth = copy_tbps(device)
    return {dtype: Rates(dense_tflops(device, dtype), bandwidth) for dtype in sorted(dtypes)}
