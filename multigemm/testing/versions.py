"""What a result was found with: the versions that kept summaries name."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("multigemm", "torch", "triton", "numba-cuda", "cupy-cuda13x", "numpy")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """Packages that are installed, and the GPU if there is one."""
    found = {name: _version(name) for name in PACKAGES}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    return {"python": platform.python_version()} | {name: text for name, text in found.items() if text}
