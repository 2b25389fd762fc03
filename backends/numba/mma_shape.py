"""Where the sm_80 kernel keeps what in shared memory; read by the kernel and by its launch."""

from __future__ import annotations

from multigemm.backends.numba.config import MmaConfig

ROW_BYTES = 128
KEPT_COLUMNS = 64
"""Columns of C that a warp keeps in registers; `kept_rows` says how many rows."""
WARPS = 4
THREADS = WARPS * 32
SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "i8": 1, "f64": 8, "f32": 4}
"""Bytes of an element, by the kind of product; "f32" is the one without tensor cores."""
ALIGNMENT = 128


def kept_rows(config: MmaConfig) -> int:
    """Rows of C that a warp keeps: the warps first share the columns, then the rows."""
    return config.bm * (config.bn // KEPT_COLUMNS) // WARPS


def piece_step(kind: str) -> int:
    """Rows of which a tile's first one is a multiple: where rows lie side by side, 16 bytes are copied at once."""
    return max(8, 16 // SIZE[kind])


def staging_bytes(config: MmaConfig, sum_size: int) -> int:
    """What a warp needs on the way out: all its sums."""
    return kept_rows(config) * KEPT_COLUMNS * sum_size


def shared_bytes(config: MmaConfig) -> int:
    """The stages, in which all warps' `staging_bytes` find room later; and what aligning their base may cost."""
    return config.stages * (config.bm + config.bn) * ROW_BYTES + ALIGNMENT - 16
