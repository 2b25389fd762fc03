"""CUDA C++ kernels, compiled by NVRTC through CuPy at first use: one for every problem, and fast ones for Hopper.

Importing this package imports neither CuPy nor a GPU library.
"""

from __future__ import annotations

from multigemm.backend import BuiltinBackend
from multigemm.backends.cupy import choice, launch, support

BACKEND = BuiltinBackend("cupy", support.availability, support.not_supported_reasons, choice.candidates, launch.plan)
