"""The embedded default: every form, dtype and epilogue on the CPU, with torch and NumPy alone."""

from __future__ import annotations

from multigemm.backends.cpu.support import CpuBackend

BACKEND = CpuBackend()
