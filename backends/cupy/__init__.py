"""CUDA C++ kernels compiled at run time by CuPy: a portable one for every problem, a fast one for Hopper."""

from __future__ import annotations

from multigemm.backends.cupy.launch import CupyBackend

BACKEND = CupyBackend()
