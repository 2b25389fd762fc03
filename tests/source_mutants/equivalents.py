"""Changes of a kernel's source that no result can show, each with the reason.

An entry holds the text that changes and what it becomes, never a line number, so that it outlives edits
elsewhere in the file and dies with an edit of what it speaks of. Nothing is listed because it survived:
the reason has to show that no input could tell the change from the original.
"""

from __future__ import annotations

from pathlib import Path

from tests.source_mutants.mutations import Mutation

ANY = "*"
"""Whatever a line becomes."""
EQUIVALENT: tuple[tuple[str, str, str, str], ...] = (
    ("generic.py", "BYTES > SIZE", "BYTES < SIZE", "only hints of alignment are lost"),
    ("generic.py", "MULTIPLE > 1", "MULTIPLE < 1", "only hints of alignment are lost"),
    ("schedule.py", "(groups + CHUNK - 1) // CHUNK", "(groups + CHUNK + 1) // CHUNK",
     "pivots stand further apart, and the groups between two of them are all looked at"),
    ("schedule.py", "(groups + CHUNK - 1) // CHUNK", "(groups + CHUNK) // CHUNK",
     "pivots stand further apart, and the groups between two of them are all looked at"),
    ("schedule.py", "rows = tl.minimum(tl.maximum(rows, 0), m)", "rows = tl.minimum(tl.maximum(rows, 1), m)",
     "one tile for a padded group without rows, for which there is room, and which stores nothing"),
    ("epilogue.py", "(back != x) & (x == x)", "(back != x)", "a NaN whose last bit is set is a NaN"),
    ("schedule.py", "mask=ok, other=0", "mask=ok, other=1", "lanes that the mask leaves out are not counted"),
    ("schedule.py", "while distance < threads", "while distance <= threads",
     "one more round, in which no thread takes part"),
    ("generic.py", "i < rows_left)[:, None], other=0", "i < rows_left)[:, None], other=1",
     "rows that the mask leaves out are not stored"),
    ("generic.py", "j < cols_left)[None, :], other=0", "j < cols_left)[None, :], other=1",
     "columns that the mask leaves out are not stored"),
    ("generic.py", "mask=in_a, other=0", "mask=in_a, other=1",
     "behind the end of K it meets zeros of B, and rows that the mask leaves out are not stored"),
    ("generic.py", "mask=in_b, other=0", "mask=in_b, other=1",
     "behind the end of K it meets zeros of A, and columns that the mask leaves out are not stored"),
    *(("generic.py", f"({extent} - {first} + {block} - 1)", f"({new})", "further tiles lie outside and store nothing")
      for extent, first, block in (("columns", "first_column", "BN"), ("rows", "first_row", "BM"))
      for new in (f"{extent} - {first} + {block}", f"{extent} - {first} + {block} + 1",
                  f"{extent} + {first} + {block} - 1")),
    ("generic.py", "j[None, :].to(tl.int64) * col", "j[None, :].to(tl.int64)",
     "zeros go into the library's own result only, whose columns are one apart"),
    ("schedule.py", "tile + groups * 0", "tile - groups * 0", "zero either way"),
    ("generic.py", "start = g * 0", "start = g", "only its type is used: forms that read it give it a value"),
    ("schedule.py", "(offset + lane < stride)", "(offset - lane < stride)",
     "more groups, whose counts lie above the tile as the pivot's does"),
    ("schedule.py", "(offset + lane < stride)", "(offset + lane <= stride)",
     "one group more, whose count lies above the tile as the pivot's does"),
    *(("generic.py", "(last_step + SPLITS - 1) // SPLITS", f"({new}) // SPLITS", "other shares, which cover K as well")
      for new in ("last_step + SPLITS", "last_step + SPLITS + 1")),
    ("generic.py", "down * across, tl.num_programs(0)", "down * across, tl.num_programs(1)",
     "each program writes all zeros behind its own first ones, not only its share"),
    ("generic.py", "if CHUNK <= 0", "if CHUNK < 0", "a listed tile has rows, whether that is known or asked"),
    ("epilogue.py", "tl.where(x <= 0, 0, x)", "tl.where(x < 0, 0, x)", "zero either way; its sign is not specified"),
    ("epilogue.py", "mask=c_mask, other=0", "mask=c_mask, other=1", "what the mask leaves out is not stored"),
    ("epilogue.py", "mask=bias_mask, other=0", "mask=bias_mask, other=1", "what the mask leaves out is not stored"),
    ("generic.cu", "if (next < blocks) loader.load(g,", "if (next <= blocks) loader.load(g,",
     "behind the end of K nothing is owned: zeros for a stage that nobody reads"),
    *(("hopper_tiles.py", f"gl.load({word}, mask=ok, other=0)", f"gl.load({word}, mask=ok, other=1)",
       "the record of a tile behind the last one, which is not published")
      for word in ("entry", *(f"entry + {n}" for n in range(1, 7)), "ends + g", "work.ends + g")),
    *(("hopper_shift_b.py", f"Strips({strips}, 0, 0)", f"Strips({strips}, {new})",
       "a second part that begins behind the tile's last row, and stores nothing")
      for strips in (1, 2) for new in ("0, 1", "1, 0")),
    ("hopper_shift_b.py", "* 8)[:, None] + 0 * k", "* 8)[:, None] - 0 * k", "zero either way"),
    ("hopper_shift_b.py", "line_pitch(TILING.stages))[:, None] + 0 * k", "line_pitch(TILING.stages))[:, None] - 0 * k",
     "zero either way"),
    ("hopper_shift_b.py", "- ahead)[None, :] + 0 * m", "- ahead)[None, :] - 0 * m", "zero either way"),
    *(("hopper_tiles.py", "(n + TILING.columns - 1) // TILING", f"({new}) // TILING",
       "all roles see a tile more behind the last column, which stores nothing")
      for new in ("n + TILING.columns", "n + TILING.columns + 1")),
    # CUDA C++
    ("load.cuh", "oldest = 0", "oldest = 1", "compared with multiples of 1024 only"),
    ("load.cuh", "- oldest) > 0", "- oldest) > 1", "a multiple of 1024 either way"),
    ("load.cuh", "u32 begin = 0", "u32 begin = 1",
     "the first stages wait for one more than they need, which has been filled and will be read"),
    ("load.cuh", "word[i], 0)", "word[i], 1)", "all lanes hold the same tile"),
    ("load.cuh", "marks, 0)", "marks, 1)", "all lanes hold the same word"),
    *(("load.cuh", f"if (LISTED && blocks > 0) refresh_map({of})", f"if (LISTED) refresh_map({of})",
       "a map is refreshed that nothing is loaded by") for of in ("w", "x.map")),
    ("load.cuh", "t.k_len <= SHORT_K", "t.k_len < SHORT_K", "a hint for the cache"),
    ("load.cuh", "if (upper > 0)", "if (upper > 1)", "a multiple of 8"),
    ("load.cuh", "lower > 0", "lower > 1", "a multiple of 8"),
    ("load.cuh", "b < (ROWS + ACROSS", "b <= (ROWS + ACROSS", "a box behind the last one, which is left out"),
    ("pipeline.cuh", "ROWS <= 128", "ROWS < 128", "all roles agree on the bytes of a stage, and these hold its rows"),
    ("pipeline.cuh", "t.k_len > LONG_K", "t.k_len < LONG_K",
     "all roles agree on the bytes of a stage, and these hold its rows"),
    *(("pipeline.cuh", "(rows + STEP - 1)", f"({more})", "a larger stage, as all roles see it")
      for more in ("rows + STEP", "rows + STEP + 1")),
    ("announce.cuh", "s.schedule.total <= clusters", "s.schedule.total < clusters",
     "the counter is asked, and answers that no tile is left"),
    ("announce.cuh", "i < (X_K && !GATHER ? 16 : 1)", "i <= (X_K && !GATHER ? 16 : 1)", "a prefetch changes no result"),
    ("schedule.cuh", "if (rows <= most)", "if (rows < most)", "one piece of as many rows either way"),
    ("schedule.cuh", "rows <= height ? rows > 0", "rows < height ? rows > 0", "one piece either way"),
    *(("schedule.cuh", "(e.cols + columns - 1)", f"({more})", "a tile behind the last column, which stores nothing")
      for more in ("e.cols + columns", "e.cols + columns + 1")),
    ("schedule.cuh", "p.groups <= 32", "p.groups < 32", "32 groups are counted by all warps instead of one"),
    ("schedule.cuh", "base < p.groups; base", "base <= p.groups; base", "one more round, in which no group is left"),
    *((file, "d < 32; d <<= 1", "d <= 32; d <<= 1", "one more round, in which no lane takes part")
      for file in ("schedule.cuh", "common.cuh", "small.cu")),
    ("epilogue.cuh", "g.out_row == 1 && g.out_col != 1;", "g.out_row == 1;", "the order of the elements only"),
    ("epilogue.cuh", "row == 1 && col != 1;", "row == 1;", "the order of the elements only"),
    ("consume.cuh", "g.out_row == 1 && g.out_col != 1;", "g.out_row == 1;", "the order of the elements only"),
    ("common.cuh", "i < 7; ++i", "i <= 7; ++i", "less than eight values are to be stored"),
    ("tile_load.cuh", "contiguous_stride != 1 && extent > 1", "contiguous_stride != 1",
     "a single element is read by itself instead of with its neighbours"),
    ("tile_load.cuh", "min64(mn_left, 2 * MN)", "min64(mn_left, 2)", "what could be read at once is read one by one"),
    ("small.cu", "if (kb < blocks) load_stage", "if (kb <= blocks) load_stage",
     "behind the end of k: zeros for a stage that nobody reads"),
    *(("small.cu", "if (kb + STAGES < blocks)", f"if (kb {new} blocks)",
       "behind the end of k: zeros for a stage that nobody reads") for new in ("+ STAGES <=", "- STAGES <")),
    *((file, f"{row} += 4 * AT_ONCE", f"{row} += 4", "rows are stored eight times, each time the same")
      for file, row in (("consume.cuh", "row"), ("small_list.cu", "r"))),
    ("small_list.cu", "if (lane != 0) return", "if (lane != 1) return", "another lane of the warp does it"),
    ("small_list.cu", "last >= 0 && lane == 0)", "last >= 0 && lane == 1)", "another lane of the warp does it"),
    ("tile_load.cuh", "along(int c) { return ((threadIdx.x + c", "along(int c) { return ((threadIdx.x - c",
     "the threads of a block are a multiple of the chunks along a line"),
    ("products.cuh", "for (int j = 0; j < NJ / 2; ++j) fragment_b<", "for (int j = 0; j <= NJ / 2; ++j) fragment_b<",
     "a third fragment has no place in the array and is multiplied by nothing: compilers leave its load out"),
    ("products.cuh", "g.out_col != 1) return", "g.out_row != 1) return",
     "such rows have addresses that no pairs are aligned to, so all results leave by the other way, which is right"),
    ("small.cu", "int start = 0, end = 0;", "int start = 1, end = 0;",
     "read only where a group was found, which sets it"),
    ("products.cuh", "u64(g.out_row * size)) &", "u64(g.out_row)) &",
     "elements of aligned rows leave one by one where their pitch is no multiple of two pairs"),
    # Numba
    *(("tensor_epilogue.py", f"(rows + int32({rows} - 1)) //", f"(rows + int32({new})) //",
       "one more round, of which no row is stored")
      for rows in ("ROWS_16", "ROWS_32") for new in (rows, f"{rows} + 1")),
    ("mma.py", "cuda.shared.array(0, np.uint8)", "cuda.shared.array(1, np.uint8)",
     "a byte of its own at the same address, in front of memory that is asked for by the call and is rounded up"),
    ("schedule.py", "last = start_of(p, p.groups - 1, total)", "last = start_of(p, p.groups, total)",
     "unless sizes lie, the last group does not end before it starts, and a clamp holds the tail inside"),
    ("schedule.py", "while high - low > 1", "while high - low < 1",
     "the walk that follows starts at the first group and finds the same one, later"),
    ("mma.py", "if block + ahead < blocks", "if block - ahead < blocks",
     "behind the end of k: zeros for a stage that nobody reads"),
    ("hopper.py", "write(acc, staging, warpgroup + 1,", "write(acc, staging, warpgroup,",
     "other numbers of barriers, of which no other is in use then"),
    ("plain_cores.py", "blocks * teams)", "blocks)", "elements are zeroed more than once"),
    *(("schedule.py", "uint32(runs - 1)) // uint32(runs)", f"uint32({new})) // uint32(runs)",
       "longer runs of groups for each lane, which hold all groups as well") for new in ("runs", "runs + 1")),
)  # fmt: skip
"""(file, text, what it becomes, reason); a text that begins with ^ is a whole line with its indentation."""
ON_GPU: tuple[tuple[str, str, str, str], ...] = (
    ("epilogue.py", "even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16", ANY, "done in emulation only"),
)
"""The same for what a GPU never runs."""


def becomes(mutation: Mutation, old: str, new: str) -> bool:
    """Whether the change is that of `old` into `new`, at one place of the line."""
    if new == ANY:
        return mutation.before == old[1:] if old.startswith("^") else old in mutation.before
    at = mutation.before.find(old)
    while at >= 0:
        if mutation.before[:at] + new + mutation.before[at + len(old) :] == mutation.after:
            return True
        at = mutation.before.find(old, at + 1)
    return False


def excuse(mutation: Mutation, *, emulated: bool = False) -> str:
    """Why a survivor is no fault; empty if nobody has said so."""
    name, listed = Path(mutation.file).name, EQUIVALENT if emulated else (*EQUIVALENT, *ON_GPU)
    return next((reason for file, old, new, reason in listed if file == name and becomes(mutation, old, new)), "")
