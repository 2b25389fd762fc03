"""Persistent kernels written in Triton, launched without Triton's dispatcher.

Importing this package imports neither Triton nor a GPU library.
"""

from __future__ import annotations

from multigemm.backend import BuiltinBackend
from multigemm.backends.triton import choice, launch, support
from multigemm.backends.triton.config import Config

__all__ = ["BACKEND", "Config"]
BACKEND = BuiltinBackend("triton", support.availability, support.not_supported_reasons, choice.candidates, launch.plan)
