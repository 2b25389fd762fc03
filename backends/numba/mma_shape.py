"""Where the sm_80 kernel keeps what in shared memory; read by the kernel and by its launch."""

from __future__ import annotations

from multigemm.backends.numba.config import MmaConfig

ROW_BYTES = 128
KEPT_COLUMNS = 64
"""Columns of C that a warp keeps in registers; `kept_rows` says how many rows."""
WARPS = 4
THREADS = WARPS * 32
SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "i8": 1, "f64": 8, "f32": 4}
SUM = {"f16": "f32", "bf16": "f32", "tf32": "f32", "i8": "i32", "f64": "f64"}
ALIGNMENT = 128


def kept_rows(config: MmaConfig) -> int:
    """Rows of C that a warp keeps: the warps first share the columns, then the rows."""
    return config.bm * (config.bn // KEPT_COLUMNS) // WARPS


def shared_bytes(config: MmaConfig) -> int:
    """The stages, which the epilogue reuses; and what aligning their base may cost."""
    staging = WARPS * kept_rows(config) * KEPT_COLUMNS * 4
    return max(config.stages * (config.bm + config.bn) * ROW_BYTES, staging) + ALIGNMENT - 16
