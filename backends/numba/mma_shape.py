"""Where the sm_80 kernel keeps what in shared memory; read by the kernel and by its launch."""

from __future__ import annotations

from multigemm.backends.numba.config import MmaConfig

ROW_BYTES = 128
KEPT_ROWS = 64
"""Rows, and columns, of C that a warp keeps in registers."""
WARPS = 4
THREADS = WARPS * 32
SIZE = {"f16": 2, "bf16": 2, "tf32": 4}
ALIGNMENT = 128


def shared_bytes(config: MmaConfig) -> int:
    """The stages, which the epilogue reuses; and what aligning their base may cost."""
    staging = WARPS * KEPT_ROWS * KEPT_ROWS * 4
    return max(config.stages * (config.bm + config.bn) * ROW_BYTES, staging) + ALIGNMENT - 16
