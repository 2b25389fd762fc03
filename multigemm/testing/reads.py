"""Which reads that initcheck reports are none of ours, and why: a library's own kernel, report by report.

A warp of the kernel behind torch's grouped_mm reads 128 bytes, the size of a tensor map, in words of 4, which the
tool takes for unwritten: it does not follow every way in which a kernel can write. It says so of the bare call
too, with operands every byte of which was written by ordinary stores (multigemm.testing.control). Only while it
does, and only if all values are right with fresh memory full of NaN, such reports are set aside.
"""

from __future__ import annotations

import re

KERNELS = {
    "cublas": "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<"
    "cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<"
}
"""By backend, how the names of a library's kernels begin that read what initcheck takes for unwritten."""
REASON = "one warp of torch's own kernel reads the words of tensor maps, and does so in the bare call too"
READ = re.compile(
    r"Uninitialized __global__ memory read of size (\d+) bytes\s*\n=========\s+at (.+?)\+0x[0-9a-f]+\s*\n"
    r"=========\s+by thread \((\d+),0,0\)"
)
COUNTED = re.compile(r"ERROR SUMMARY: (\d+) errors?$", re.MULTILINE)
WORD, LANES = 4, 32


def foreign(backend: str, text: str) -> list[tuple[str, str, str]]:
    """The reports (size, kernel, thread) if each of them, and all that the tool counts, are words that one warp of such
    a kernel reads, a whole tensor map at a time; else none."""
    found, counted = READ.findall(text), COUNTED.search(text)
    begin = KERNELS.get(backend)
    whole = counted is not None and int(counted.group(1)) == len(found)
    if begin is None or not found or not whole or len(found) % LANES:
        return []
    fits = (int(size) == WORD and kernel.startswith(begin) for size, kernel, _ in found)
    lanes = [sum(int(thread) % LANES == lane for _, _, thread in found) for lane in range(LANES)]
    return found if all(fits) and len(set(lanes)) == 1 else []
