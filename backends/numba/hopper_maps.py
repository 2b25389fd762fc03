"""The tensor maps of one problem: A and B of every group of a list, or of the packed operands."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from multigemm.backends.numba.call import Call
from multigemm.backends.numba.config import HopperConfig, Signature
from multigemm.backends.numba.hopper_shape import ELEMENT, MAPS, ROW_BYTES, token_boxes
from multigemm.backends.numba.tensormap import MAP_BYTES, encode
from multigemm.planning.operands import TABLE

Words = npt.NDArray[np.int64]
ACROSS = 64


def tensor_maps(config: HopperConfig, signature: Signature, call: Call, table: Words | None) -> Words:
    """[G or 1, MAPS, 16] words: the maps of each group that has its own."""
    if table is None:
        pairs = [_maps_of(config, signature, call.m, call.n, call.k, call.groups, call[11:15], call[15:19])]
    else:
        pairs = [
            _maps_of(
                config, signature, int(row[TABLE.M]), int(row[TABLE.N]), int(row[TABLE.K]), 1,
                (int(row[TABLE.A]), 0, int(row[TABLE.A_ROW]), int(row[TABLE.A_COL])),
                (int(row[TABLE.B]), 0, int(row[TABLE.B_ROW]), int(row[TABLE.B_COL])),
            )
            for row in table
        ]  # fmt: skip
    return np.frombuffer(b"".join(pairs), dtype=np.int64).copy()


def _maps_of(
    config: HopperConfig, signature: Signature, m: int, n: int, k: int, groups: int,
    a: tuple[int, ...], b: tuple[int, ...],
) -> bytes:  # fmt: skip
    """B's map and A's; blank ones where the product has no terms, since nothing is loaded then."""
    if min(m, n, k, groups) <= 0:
        return bytes(MAPS * MAP_BYTES)
    size = ELEMENT[signature.compute]
    bk, name = ROW_BYTES // size, signature.compute
    a_across, b_across = signature.a_order == "col", signature.b_order == "row"
    a_groups, b_groups = (groups if a[1] else 1), (groups if b[1] else 1)
    if b_across:
        maps = [encode(name, size, b[0], (n, k, b_groups), (b[2], b[1]), (ACROSS, bk))]
    else:
        maps = [encode(name, size, b[0], (k, n, b_groups), (b[3], b[1]), (bk, ACROSS))]
    if a_across:
        maps.append(encode(name, size, a[0], (m, k, a_groups), (a[3], a[1]), (ACROSS, bk)))
    else:
        for height in token_boxes(config):
            maps.append(encode(name, size, a[0], (k, m, a_groups), (a[2], a[1]), (bk, height)))
    return b"".join(maps).ljust(MAPS * MAP_BYTES, b"\0")
