"""Faults to plant in the sources of numba's Hopper kernel, and a case of the model in which each one shows."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A line that is changed in one of the modules, and a problem that shows it."""

    module: str
    line: str
    changed: str
    case: str


UNEVEN, LONG, SHORT = "uneven groups, three blocks of columns", "many blocks of k", "one block of k"
FAULTS = {
    "a stage too many is filled": Fault(
        "hopper_tiles",
        "while int32(begin + size - ring_bytes - oldest) > 0:",
        "while int32(begin - ring_bytes - oldest) > 0:",
        LONG,
    ),
    "stages of one size are not waited for": Fault(
        "hopper_tiles",
        "int32(ring.parity ^ 1))\n            return room",
        "int32(ring.parity))\n            return room",
        "tiles of 128 rows",
    ),
    "the oldest stage is forgotten": Fault(
        "hopper_tiles",
        "oldest = ptx.load_shared_u32(int32(begins + place * 4))",
        "oldest = begin",
        LONG,
    ),
    "a stage reaches past the end of the ring": Fault(
        "hopper_tiles",
        "        where = ring.at\n        if variable and int32(where + size) > ring_bytes:",
        "        where = ring.at\n        if variable and int32(where) > ring_bytes:",
        UNEVEN,
    ),
    "the parity stays": Fault(
        "hopper_tiles",
        "place, parity = int32(0), int32(parity ^ 1)\n            if not variable:",
        "place, parity = int32(0), int32(parity)\n            if not variable:",
        LONG,
    ),
    "a record is written over": Fault(
        "hopper_tiles",
        "int32(((number // SLOTS) & 1) ^ 1))\n        a, b",
        "int32(1))\n        a, b",
        UNEVEN,
    ),
    "the other block does not expect a tile": Fault(
        "hopper_tiles",
        "ptx.mbarrier_expect_tx(int32(base + full + (number & (SLOTS - 1)) * 8), RECORD_BYTES)",
        "pass",
        UNEVEN,
    ),
    "a block ends before the other one has read its last tile": Fault(
        "hopper_tiles",
        "if cluster > 1:  # warps of other blocks still arrive",
        "if cluster > 9:  #",
        UNEVEN,
    ),
    "a block ends before its stages are handed back": Fault(
        "hopper_load",
        "if cluster > 1:  # a block must not end",
        "if cluster > 9:  #",
        UNEVEN,
    ),
    "the counters stay": Fault(
        "hopper_tiles",
        "                finish(counters, clusters)",
        "                pass",
        UNEVEN,
    ),
    "the next tile is not asked for": Fault(
        "hopper_load",
        "                if rank == 0 and ptx.elected():",
        "                if rank == 9:",
        "no k",
    ),
    "lean tiles come twice": Fault(
        "hopper_tiles",
        "place = int32(lean - (busy + lean - number))",
        "place = int32(lean - (busy + lean - number) - 1)",
        UNEVEN,
    ),
    "a block takes all of a tile that is shared by its rows": Fault(
        "hopper_tiles",
        "if not halves or (tile.group & HALVES) == 0:",
        "if True:",
        UNEVEN,
    ),
    "a half begins at the first row": Fault(
        "hopper_tiles",
        "int32(tile.row + before), column, tile.k",
        "tile.row, column, tile.k",
        UNEVEN,
    ),
    "the second block's rows are the first's": Fault(
        "hopper_load",
        "first = int32(rank * part)",
        "first = int32(0)",
        LONG,
    ),
    "a stage expects the rows that are multiplied": Fault(
        "hopper_load",
        "expected = int32(tile.height * ROW_BYTES)",
        "expected = int32((tile.height + 15) // 16 * 2048)",
        UNEVEN,
    ),
    "a map is used before its fence": Fault(
        "hopper_load",
        "if (used & ~fenced) != 0:",
        "if fenced == 0:",
        UNEVEN,
    ),
    "a list's map is used before its fence": Fault(
        "hopper_load",
        "fenced, group = int32(0), g",
        "group = g",
        "a list",
    ),
    "jagged k does not end": Fault(
        "hopper_load",
        "k = int32(FAR - tile.k)",
        "k = int32(FAR - 64)",
        "jagged k",
    ),
    "a stage is handed back too early": Fault(
        "hopper",
        (
            "            words, to = send(words, to, base, maps, warpgroup, thread)\n"
            "            _wait_one()\n"
            "            release(base, before)"
        ),
        (
            "            words, to = send(words, to, base, maps, warpgroup, thread)\n"
            "            _wait_one()\n"
            "            release(base, ring.place)"
        ),
        UNEVEN,
    ),
    "products are not waited for": Fault(
        "hopper",
        "        acc = result(acc)\n        release(base, before)\n        return pack(acc), ring",
        "        return pack(acc), ring",
        UNEVEN,
    ),
    "the last stage is not handed back": Fault(
        "hopper",
        "        release(base, before)\n        return pack(acc), ring",
        "        return pack(acc), ring",
        LONG,
    ),
    "staging is written over": Fault(
        "hopper",
        "        ptx.tma_store_read(sender)",
        "        pass",
        LONG,
    ),
    "staging is written over by other warps": Fault(
        "hopper",
        "        ptx.named_barrier(int32(warpgroup + 1), WARPGROUP)\n        put(",
        "        put(",
        LONG,
    ),
    "the copy engine does not see the staging": Fault(
        "hopper",
        "        ptx.fence_async()\n        ptx.named",
        "        ptx.named",
        UNEVEN,
    ),
    "other warps' results are not waited for": Fault(
        "hopper",
        "        ptx.fence_async()\n        ptx.named_barrier(int32(warpgroup + 1), WARPGROUP)",
        "        ptx.fence_async()",
        UNEVEN,
    ),
    "stores are not waited for": Fault(
        "hopper",
        "        ptx.tma_store_wait()",
        "        pass",
        UNEVEN,
    ),
    "the last tile is never stored": Fault(
        "hopper",
        (
            "        while to.rows > 0:\n"
            "            words, to = send(words, to, base, maps, warpgroup, thread)\n"
            "        ptx."
        ),
        "        ptx.",
        UNEVEN,
    ),
    "a tile has fewer blocks than rows to store": Fault(
        "hopper",
        "while to.rows > blocks * LATE_ROWS:",
        "while to.rows > 9999:",
        SHORT,
    ),
    "results end at the group's own row": Fault(
        "hopper",
        "int32(end + tile.start)",
        "int32(end)",
        UNEVEN,
    ),
    "a barrier expects too few": Fault(
        "hopper",
        "full + place * 8), LOADERS)",
        "full + place * 8), 1)",
        UNEVEN,
    ),
    "a barrier waits for one block's warps": Fault(
        "hopper",
        "empty + place * 8), CONSUMER_WARPS * cluster)",
        "empty + place * 8), CONSUMER_WARPS)",
        LONG,
    ),
}
