"""Where the Hopper kernel keeps what in shared memory; read by the kernel and by its launch."""

from __future__ import annotations

from multigemm.backends.numba.config import HopperConfig, Signature

COLUMNS = 128
ROW_BYTES = 128
WEIGHT_BYTES = COLUMNS * ROW_BYTES
STAGING_BYTES = 2 * 16384
SLOTS = 4
SLOT_BYTES = 80
ALIGNMENT = 1024
TURNS = 2
"""Tile numbers that may be on their way from the first block of a cluster to the others."""
ELEMENT = {"f16": 2, "bf16": 2, "f32": 4}


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
        self.bk = ROW_BYTES // ELEMENT[signature.compute]
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
        return self.end + ALIGNMENT - 16
