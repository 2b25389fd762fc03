"""Where and when a number was measured: without this, it cannot be compared with any other.

Everything is read, nothing is set: a benchmark that changes clocks or power limits measures a
machine that its reader does not have.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

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
    """The output of a command, or "" where it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=cwd, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """The commit of the checkout that this code runs from, with "+" if files differ; else the version."""
    here = Path(__file__).resolve().parents[2]
    found = _run("git", "rev-parse", "--short=12", "HEAD", cwd=here) if (here / ".git").exists() else ""
    if found:
        return found + ("+" if _run("git", "status", "--porcelain", "--untracked-files=no", cwd=here) else "")
    return f"version {_version('multigemm') or 'unknown'}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def clocks(device: torch.device) -> dict[str, float | str]:
    """What nvidia-smi reports now; empty on a CPU or without nvidia-smi."""
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


def describe(device: torch.device) -> dict[str, Any]:
    """The whole picture, JSON-ready."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device_name(device),
        "device_type": device.type,
        "cpu_count": os.cpu_count(),
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda or "",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else "",
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "clocks": clocks(device),
    }
