"""The Triton backend. Importing this package imports neither Triton nor a GPU library."""

from multigemm.backends.triton.config import Config
from multigemm.backends.triton.launch import TritonBackend

__all__ = ["BACKEND", "Config", "TritonBackend"]
BACKEND = TritonBackend()
