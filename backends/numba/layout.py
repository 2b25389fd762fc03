"""Where the tensor-core kernels keep what in shared memory; read by the kernels and by their launches."""

from __future__ import annotations

from multigemm.backends.numba.config import HopperConfig, MmaConfig, Signature

ROW_BYTES = 128
"""Bytes of k, or of the rows' own dimension, that lie side by side: the width of a swizzle."""
SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "i8": 1, "f64": 8, "f32": 4}
"""Bytes of an element, by the kind of product; "f32" is the one without tensor cores."""

# The sm_80 kernel.

KEPT_COLUMNS = 64
"""Columns of C that a warp keeps in registers; `kept_rows` says how many rows."""
WARPS = 4
THREADS = WARPS * 32
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


# The Hopper kernel.

COLUMNS = 128
WEIGHT_BYTES = COLUMNS * ROW_BYTES
STAGING_BYTES = 2 * 16384
SLOTS = 4
SLOT_BYTES = 80
HOPPER_ALIGNMENT = 1024
TURNS = 2
"""Tile numbers that may be on their way from the first block of a cluster to the others."""
MAPS = 6
"""Tensor maps per group: B, then A with boxes of different heights (or one, where A lies across k)."""


def token_boxes(config: HopperConfig) -> list[int]:
    """Heights of the boxes that any block's share of a tile is made of, largest first; at most MAPS - 1."""
    smallest, largest = config.step // config.cluster, config.n_max // config.cluster
    return [size for size in (256, 128, 64, 32, 16, 8) if smallest <= size <= largest]


class Layout:
    """Byte offsets from the aligned base; `bk` elements of k fill one stage."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self.kind = "tf32" if signature.compute == "f32" else signature.compute
        self.bk = ROW_BYTES // SIZE[signature.compute]
        self.stage_bytes = WEIGHT_BYTES + config.n_max * ROW_BYTES
        self.staging = config.stages * self.stage_bytes
        self.slots = self.staging + STAGING_BYTES
        self.full = self.slots + SLOTS * SLOT_BYTES
        self.empty = self.full + config.stages * 8
        self.slot_full = self.empty + config.stages * 8
        self.slot_empty = self.slot_full + SLOTS * 8
        self.turn = self.slot_empty + SLOTS * 8
        self.turn_full = self.turn + TURNS * 4
        self.turn_empty = self.turn_full + TURNS * 8
        self.end = self.turn_empty + TURNS * 8

    @property
    def bytes(self) -> int:
        """Dynamic shared memory to ask for: the layout, and what aligning its base may cost."""
        return self.end + HOPPER_ALIGNMENT - 16
