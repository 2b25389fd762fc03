"""Numba CUDA: every form and dtype on plain cores, and tensor cores from pure Python.

Importing this package imports neither Numba nor a GPU library; a plan does.
"""

from __future__ import annotations

from multigemm.backend import BuiltinBackend
from multigemm.backends.numba import choice, launch, support

BACKEND = BuiltinBackend("numba", support.availability, support.not_supported_reasons, choice.candidates, launch.plan)
