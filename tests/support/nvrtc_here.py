"""The NVRTC of this machine, with or without a GPU: for tests that compile CUDA C++."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def nvrtc_here() -> Any:
    """The library; skips the test where none is installed."""
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.1*")):
            return ctypes.CDLL(str(path))
    pytest.skip("no NVRTC is installed")
