"""The kernels for GPUs before Hopper, on a Hopper GPU, beside CUTLASS' grouped GEMM for sm_80.

    nvcc -O3 -std=c++17 -arch=sm_90 -I CUTLASS/include -shared -Xcompiler -fPIC \\
        -o before_hopper.so benchmarks/before_hopper.cu
    python benchmarks/before_hopper.py --cutlass ./before_hopper.so --json before-hopper.json

The backends are told that the GPU has compute capability 8.0, so that they choose configs and kernels for it:
`mma.sync` and `cp.async`, no TMA, no `wgmma`. Only the last step is for the GPU at hand, for which these instructions
are assembled.
Suite `moe` in bfloat16, L2 flushed, medians of graphs in turns; every result is checked before it is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

OLD, HERE = (8, 0), (9, 0)
BACKENDS = ("cupy", "triton", "numba")
TILES = ("128x128x32, 4", "128x256x64, 3", "128x128x64, 3", "128x256x32, 3", "256x128x32, 3", "64x128x64, 4")
"""CUTLASS' tiles, rows x columns x k, and their stages, in the order of before_hopper.cu; the first is tgale96's."""
REST, REPS, BUDGET_MS = 0.4, 6, 60.0


def pretend_to_be_old() -> Callable[[bool], None]:
    """Makes multigemm compile for `OLD` and assemble for `HERE`. Returns a switch: the benchmark's clock, which has a
    kernel of its own, must see the GPU as it is."""
    import torch
    from triton.backends.nvidia.compiler import CUDABackend

    from multigemm.backends.cupy import build as cupy
    from multigemm.backends.numba import build as numba

    as_it_is, assemble, make_cubin = torch.cuda.get_device_capability, numba.assemble, CUDABackend.make_cubin

    def cubin(self: Any, ptx: str, metadata: Any, options: Any, capability: int) -> Any:
        assert capability == 10 * OLD[0] + OLD[1]
        return make_cubin(self, ptx.replace(".target sm_80", ".target sm_90"), metadata, options, 90)

    def switch(old: bool) -> None:
        torch.cuda.get_device_capability = (lambda *_, **__: OLD) if old else as_it_is

    cupy.architecture = lambda capability: "sm_90"
    numba.assemble = lambda code, capability: assemble(code, HERE)
    CUDABackend.make_cubin = cubin
    switch(old=True)
    return switch


class Cutlass:
    """CUTLASS' kernels for the operands of a workload, behind the interface of before_hopper.cu."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library.resolve()))
        self._library.make.restype = ctypes.c_void_p
        number, pointer = ctypes.c_int, ctypes.c_void_p
        self._library.make.argtypes = [number, number, pointer, number, number, pointer, pointer, pointer]
        self._library.run.argtypes = [pointer, pointer]

    def calls(self, tensors: Any) -> dict[str, Callable[[], Any]]:
        """A call for each tile; each writes the workload's result."""
        import torch

        case = tensors.workload
        sizes = (ctypes.c_int * case.groups)(*map(int, case.sizes))
        pointers = [x.data_ptr() for x in (tensors.a, tensors.b, tensors.out)]

        def call(kernel: int) -> Any:
            if code := self._library.run(kernel, torch.cuda.current_stream().cuda_stream):
                raise RuntimeError(f"CUTLASS status {code}")
            return tensors.out

        given = case.groups, sizes, case.n, case.k, *pointers
        kernels = [self._library.make(tile, *given) for tile in range(len(TILES))]
        return {f"cutlass {name}": partial(call, kernel) for name, kernel in zip(TILES, kernels, strict=True)}


def measured(case: Any, cutlass: Cutlass | None, switch: Callable[[bool], None]) -> dict[str, Any]:
    """Microseconds of each kernel that gave the right result, and what is wrong with the others."""
    import torch

    import multigemm as mg
    from multigemm.bench.operands import make
    from multigemm.select.timing import measure

    device = torch.device("cuda")
    tensors = make(case, device)
    with ThreadPoolExecutor(len(BACKENDS)) as pool:
        plans = pool.map(lambda name: mg.plan(tensors.problem, backend=name), BACKENDS)
        calls: dict[str, Any] = dict(zip(BACKENDS, plans, strict=True))
    calls |= cutlass.calls(tensors) if cutlass else {}
    truth, wrong = tensors.reference(), {}
    for name, call in list(calls.items()):
        tensors.poison()
        if verdict := truth.verdict(call()):
            wrong[name] = verdict
            del calls[name]
    switch(False)
    taken = measure(calls, device, "graph", reps=REPS, min_reps=4, budget_ms=BUDGET_MS, rest=REST)
    switch(True)
    return {"case": case.key, "us": {name: round(time.median, 2) for name, time in taken.items()}, "wrong": wrong}


def summary(rows: list[dict[str, Any]]) -> str:
    """Fractions of the rate of CUTLASS' first tile, and of its fastest one for each workload: mean and least."""
    lines = []
    for title, tiles in (("of tgale96's tile", TILES[:1]), ("of the best tile", TILES)):
        for name in (*BACKENDS, "best of ours"):
            of = [
                min(row["us"][f"cutlass {tile}"] for tile in tiles)
                / min(row["us"][one] for one in (BACKENDS if name == "best of ours" else (name,)))
                for row in rows
            ]
            lines.append(f"{title}: {name} {geometric_mean(of):.3f}, least {min(of):.3f}")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cutlass", type=Path, help="the library of before_hopper.cu (default: measure ours alone)")
    parser.add_argument("--only", default="", help="workloads whose name contains this text")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HERE:
        parser.error("torch sees no Hopper GPU, and what is measured here runs on one")
    with tempfile.TemporaryDirectory() as folder:  # what is compiled here is for no other process
        os.environ["MULTIGEMM_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = folder
        from multigemm.bench.machine import describe
        from multigemm.bench.suites import suite

        switch, cutlass = pretend_to_be_old(), Cutlass(args.cutlass) if args.cutlass else None
        rows = []
        for case in suite("moe"):
            if args.only not in case.key:
                continue
            rows.append(measured(case, cutlass, switch))
            print(rows[-1], flush=True)
            torch.cuda.empty_cache()
    if cutlass:
        print(summary(rows))
    if args.json:
        switch(False)
        found = {"command": shlex.join(["python", *sys.argv]), "machine": describe(torch.device("cuda")), "rows": rows}
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
