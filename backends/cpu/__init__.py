"""The default backend without a GPU: every form, dtype and epilogue on the CPU, with torch and NumPy alone."""

from __future__ import annotations

from multigemm.backend import BuiltinBackend
from multigemm.backends.cpu import config, launch, support

BACKEND = BuiltinBackend("cpu", support.availability, support.not_supported_reasons, config.candidates, launch.plan)
