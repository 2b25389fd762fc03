"""compute-sanitizer over chosen problems, one command for all backends and tools:

    python -m multigemm.testing.sanitize --jobs 4
    python -m multigemm.testing.sanitize --backend triton --tools memcheck,racecheck --problems 8

Value oracles cannot see a read outside an allocation whose result is thrown away, nor a race that
happens to end well. memcheck runs without torch's caching allocator and with padding behind every
allocation, so that a neighbour is never hit by accident. initcheck does not see what a vendor's library
writes by TMA and would call all of it unwritten: for backends over libraries, fresh memory is
filled with NaN instead, so that an unwritten element that is used shows in the values.

Two kinds of reports are set aside, report by report and never for a whole kernel, and only while the tool says the same
of a program that is right by construction (CONTROLS) and all values are right:

* racecheck does not follow one thread's arrival at an mbarrier on behalf of many that a named barrier has gathered, in
  which way Triton's specialised warps hand over. A race is set aside if each access that it names lies in one of
  HAND_OVERS.
* initcheck does not follow every way in which a kernel can write. A warp of the kernel behind torch's grouped_mm reads
  128 bytes, the size of a tensor map, in words of 4, and the tool takes them for unwritten, also in the bare call over
  operands every byte of which ordinary stores have written. Such reads are set aside.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

from multigemm.testing.campaigns import versions
from multigemm.testing.case import Case, classes
from multigemm.testing.strategies import most_new_first

BACKENDS = ("cublas", "triton", "cupy", "numba")
LIBRARIES = ("cublas",)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
BARRIERS = ("--num-cuda-barriers", "64")
"""The number of barriers of each thread block. The tools find it themselves only for code compiled by nvcc. They ignore
an mbarrier that they do not count, and report races where it orders accesses."""
OPTIONS = {"memcheck": ("--padding", "4096"), "racecheck": BARRIERS, "synccheck": BARRIERS}
PROBLEMS = 20
QUANTISED = 3
"""One kind in this many has quantised operands."""
TURNS = 3
"""As in docs/notes/proof.md, so that both find the same compiled kernels."""
SOURCES = Path(__file__).resolve().parents[1] / "backends"

FIRST_ACCESS = re.compile(r"Race reported between (\w+) access at (\S+?)\+0x[0-9a-f]+ in (\S+?):(\d+)")
FURTHER_ACCESS = re.compile(r"and (\w+) access at (\S+?)\+0x[0-9a-f]+ in (\S+?):(\d+)")
RACES_COUNTED = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")


@dataclass(frozen=True, slots=True)
class HandOver:
    """A synchronisation that racecheck does not see: the kernel, the functions whose lines take part, and what orders
    them."""

    kernel: str
    functions: frozenset[tuple[str, str]]
    reason: str


WORDS = (
    "a tile's words: stores, bar.warp.sync, one arrival at `issued`, acquired by the readers' try_wait; their loads, "
    "bar.sync of their warps, one arrival of each partition at `taken`, acquired before the next stores"
)
START = (
    "Triton's own start and end of specialised warps: arguments and numbers of partitions in shared memory, between "
    "barrier.sync 1 of all warps of the block"
)
LINES = (
    "a block of unaligned weights: copies, an arrival of each copying thread at `w_full` once its copies are there, "
    "acquired by the readers' try_wait; their loads, bar.sync of their warps, one arrival of each partition at "
    "`w_empty`, acquired before the next copies"
)
COPIED = frozenset(
    {("hopper_shift_b.py", "copy16"), ("hopper_shift_b.py", "copy_some"), ("hopper_shift_b.py", "fragment")}
)
TILE_WORDS = frozenset({("hopper_tiles.py", "publish"), ("hopper_tiles.py", "take")})

HAND_OVERS: dict[str, tuple[HandOver, ...]] = {
    "triton": (
        *(
            HandOver(kernel, functions, reason)
            for kernel, file in (("hopper_kernel", "hopper.py"), ("shift_b_kernel", "hopper_shift_b.py"))
            for functions, reason in ((TILE_WORDS, WORDS), (frozenset({(file, kernel)}), START))
        ),
        HandOver("shift_b_kernel", COPIED, LINES),
        HandOver("list_kernel", frozenset({("lists.py", "list_kernel")}), START),
    ),
}
"""By backend."""


@dataclass(slots=True)
class Race:
    """One race: its accesses as (read or write, kernel, file, line), the first against each of the others."""

    accesses: list[tuple[str, str, str, int]] = field(default_factory=list)

    def __str__(self) -> str:
        first, *rest = (f"{kind} {file}:{line}" for kind, _, file, line in self.accesses)
        return f"{self.accesses[0][1]}: {first} against {', '.join(dict.fromkeys(rest))}"


def races_in(text: str) -> tuple[list[Race], bool]:
    """The races in a tool's output, and whether it shows as many as it counts."""
    found = list[Race]()
    for line in text.splitlines():
        for pattern in (FIRST_ACCESS, FURTHER_ACCESS):
            if match := pattern.search(line):
                kind, kernel, file, number = match.groups()
                if pattern is FIRST_ACCESS:
                    found.append(Race())
                if found:
                    found[-1].accesses.append((kind, kernel, file, int(number)))
    counted = RACES_COUNTED.search(text)
    return found, counted is not None and int(counted.group(1)) == len(found)


@cache
def _functions(backend: str, file: str) -> tuple[tuple[int, int, str], ...]:
    """First line, last line and name of each function in a backend's file."""
    folder = SOURCES / backend
    path = (folder / "kernels" if (folder / "kernels").is_dir() else folder) / file
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    return tuple((n.lineno, n.end_lineno or n.lineno, n.name) for n in tree.body if isinstance(n, ast.FunctionDef))


def function_at(backend: str, file: str, line: int) -> str:
    """The function of a backend's file that contains a line; "" if none does."""
    return next((name for first, last, name in _functions(backend, file) if first <= line <= last), "")


def hand_over_of(backend: str, report: Race) -> HandOver | None:
    """The listed `HandOver` to which all accesses of a report belong."""
    places = {(file, function_at(backend, file, line)) for _, _, file, line in report.accesses}
    kernels = {kernel for _, kernel, _, _ in report.accesses}
    fits = (known for known in HAND_OVERS.get(backend, ()) if kernels == {known.kernel} and places <= known.functions)
    return next(fits, None)


LIBRARY_KERNELS = {
    "cublas": "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<"
    "cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<"
}
"""By backend, how the names of a library's kernels begin that read what initcheck takes for unwritten."""
TENSOR_MAP_READS = "one warp of torch's own kernel reads the words of tensor maps, and does so in the bare call too"
READ = re.compile(
    r"Uninitialized __global__ memory read of size (\d+) bytes\s*\n=========\s+at (.+?)\+0x[0-9a-f]+\s*\n"
    r"=========\s+by thread \((\d+),0,0\)"
)
ERRORS_COUNTED = re.compile(r"ERROR SUMMARY: (\d+) errors?$", re.MULTILINE)
WORD, LANES = 4, 32


def library_reads(backend: str, text: str) -> list[tuple[str, str, str]]:
    """The reports (size, kernel, thread) if each of them, and all that the tool counts, are words that one warp of such
    a kernel reads, a whole tensor map at a time; else none."""
    found, counted = READ.findall(text), ERRORS_COUNTED.search(text)
    begin = LIBRARY_KERNELS.get(backend)
    whole = counted is not None and int(counted.group(1)) == len(found)
    if begin is None or not found or not whole or len(found) % LANES:
        return []
    fits = (int(size) == WORD and kernel.startswith(begin) for size, kernel, _ in found)
    lanes = [sum(int(thread) % LANES == lane for _, _, thread in found) for lane in range(LANES)]
    return found if all(fits) and len(set(lanes)) == 1 else []


# --- programs that are right by construction: what does the tool say of them? ----------------------------

HAND_OVER = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
__device__ u32 at(const void* p) { return u32(__cvta_generic_to_shared(p)); }
__device__ void init(u64* b) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(b)) : "memory"); }
__device__ void arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(b)) : "memory"); }
__device__ void wait(u64* b, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\nbra again;\nover:\n}" ::"r"(at(b)), "r"(parity) : "memory");
}
extern "C" __global__ void hand_over(int* out, int rounds) {
    __shared__ __align__(8) u64 full[2], taken[2];
    __shared__ int words[2][8];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; ++i) init(&full[i]), init(&taken[i]);
    __syncthreads();
    int sum = 0;
    for (int r = 0; r < rounds; ++r) {
        const int slot = r & 1, turn = r >> 1 & 1;
        if (warp == 4) {
            wait(&taken[slot], turn ^ 1);
            if (lane < 8) words[slot][lane] = r * 8 + lane;
            __syncwarp();
            if (lane == 0) arrive(&full[slot]);
        } else {
            wait(&full[slot], turn);
            sum += words[slot][lane & 7];
            asm volatile("bar.sync 1, 128;" ::: "memory");
            if (threadIdx.x == 0) arrive(&taken[slot]);
        }
    }
    if (warp < 4) out[threadIdx.x] = sum;
}
"""
"""One warp hands words to four others through shared memory, as the Hopper kernel of the triton backend hands over tile
numbers, and every step is ordered by the PTX memory model: the writers' stores, then `bar.warp.sync`, then one lane's
`mbarrier.arrive` (a release), which the readers' `try_wait` acquires; the readers' loads, then `bar.sync` of the four
warps, then one thread's arrival, which the writers acquire before they store again. The results prove nothing (a race
may end well); the order of the program does. A racecheck that reports this kernel does not follow one arrival on behalf
of many threads, and what it says of the same pattern elsewhere is worth nothing. NVIDIA's release notes of Compute
Sanitizer list false reports of this kind as mended in 2025.4, 2026.1 and 2026.3; CUDA 13.0 has 2025.3."""
ROUNDS = 50
SIZES = ((96, 64, 64, 3), (256, 128, 128, 4))
"""Rows, columns, depth and groups of the products of `grouped_mm`."""


def hand_over() -> bool:
    """Runs the kernel once; whether the words came through."""
    import cupy

    out = cupy.zeros(128, dtype=cupy.int32)
    cupy.RawModule(code=HAND_OVER).get_function("hand_over")((1,), (160,), (out, ROUNDS))
    wanted = sum(range(0, 8 * ROUNDS, 8)) + ROUNDS * (cupy.arange(128) % 8)
    return bool((out == wanted).all())


def grouped_mm() -> bool:
    """Whether torch's own call, over operands that kernels of torch have written whole, gives the sums of powers of two
    that it must."""
    import torch

    right = True
    for rows, columns, depth, groups in SIZES:
        a, b = (torch.full(shape, 0.5, dtype=torch.bfloat16, device="cuda") for shape in
                ((rows, depth), (groups, columns, depth)))  # fmt: skip
        ends = torch.arange(1, groups + 1, dtype=torch.int32, device="cuda") * (rows // groups)
        out = torch._grouped_mm(a, b.transpose(1, 2), ends)
        right = right and bool((out == depth / 4).all())
    return right


CONTROLS = {"hand_over": hand_over, "grouped_mm": grouped_mm}


# --- the tools over the problems -------------------------------------------------------------------------


def command(tool: str, inner: list[str]) -> list[str]:
    """The command line that runs a module's process under the sanitizer."""
    given = [*OPTIONS.get(tool, ()), "--error-exitcode", "9", "--print-limit", "2000"]
    return ["compute-sanitizer", "--tool", tool, *given, sys.executable, "-W", "ignore", "-m", *inner]


def problems_of(backend: str, tool: str, args: argparse.Namespace) -> list[str]:
    """The command of this module that runs the problems."""
    inner = ["multigemm.testing.sanitize", "--inside", backend, "--problems", str(args.problems)]
    inner += ["--kinds", str(args.kinds), "--work", str(args.work)]
    return inner + (["--fill"] if tool == "initcheck" and backend in LIBRARIES else [])


def configs_first(pairs: Iterable[tuple[Case, Any]]) -> Iterator[tuple[Case, Any]]:
    """Orders cases with their configs: each config once before any comes twice, and among those the case of the most
    new classes."""
    return most_new_first(pairs, lambda x: classes(x[0]) | {x[1]}, lambda x, new: (x[1] in new, len(new)))


def inside(backend: str, problems: int, kinds: int, work: int, fill: bool) -> int:
    """Runs the problems inside the sanitizer, and judges the values as well."""
    import torch

    from multigemm.testing.oracles import check
    from multigemm.testing.placed_case import DeviceCase
    from multigemm.testing.strategies import Limits
    from multigemm.testing.strategies import kinds as kinds_of
    from multigemm.testing.subject import Subject, assigned, compile_singly

    torch.set_num_threads(1)
    compile_singly()
    if fill:  # torch fills what `empty` returns in its deterministic mode
        torch.use_deterministic_algorithms(True, warn_only=True)
    device, bad, ran, configs = torch.device("cuda"), 0, 0, set()
    every = kinds_of(Limits(work=work, quantised=QUANTISED), kinds)
    configs_of = assigned(every, Subject(backend), device, TURNS)
    pairs = [(case, offered[0]) for case, offered in zip(every, configs_of, strict=True) if offered]
    for case, config in islice(configs_first(pairs), problems):
        subject = Subject(backend)
        subject.pin(config)
        outcome = check(DeviceCase.from_case(case, device), subject)
        ran += outcome.ran
        configs.add(outcome.config)
        bad += not outcome.ok
        for finding in outcome.findings:
            print(f"{case!r}: {finding}")
    print(f"{backend}: {ran} problems ran under {len(configs)} configs, {bad} wrong", flush=True)
    return 1 if bad else 0


def run(words: list[str], seconds: float) -> tuple[str, str]:
    """The verdict of one tool ("clean", "FINDINGS", "wrong values", "timeout") and the end of its output."""
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode(errors="replace")
        return "timeout", text[-1500:]
    state = {0: "clean", 9: "FINDINGS", 1: "wrong values"}.get(done.returncode, f"exit code {done.returncode}")
    return state, done.stdout + done.stderr


def set_aside(backend: str, tool: str, text: str, seconds: float) -> tuple[list[str], bool]:
    """The explanation of a tool's reports, and whether all of them may be set aside: each is listed, the tool also
    reports the control program, which is right by construction, and all values are right."""
    ways = {"racecheck": ordered, "initcheck": foreign_reads}
    said, control = ways[tool](backend, text) if tool in ways else ([], "")
    if not control or ", 0 wrong" not in text:
        return said, False
    state, _ = run(command(tool, ["multigemm.testing.sanitize", "--control", control]), seconds)
    return [
        f"{tool} of the control program {control}, which is right by construction: {state}",
        *said,
    ], state == "FINDINGS"


def ordered(backend: str, text: str) -> tuple[list[str], str]:
    """racecheck's reports that belong to a listed `HandOver` each."""
    found, whole = races_in(text)
    orders = [hand_over_of(backend, report) for report in found]
    strange = [f"{report}: NOT a known hand-over" for report, order in zip(found, orders, strict=True) if not order]
    if not found or not whole or strange:
        return strange, ""
    said = list[str]()
    for known in dict.fromkeys(order for order in orders if order):
        ordered_so = [str(race) for race, order in zip(found, orders, strict=True) if order is known]
        said.append(f"{len(ordered_so)} reports set aside, for these accesses are ordered: {known.reason}")
        said += dict.fromkeys(ordered_so)
    return said, "hand_over"


def foreign_reads(backend: str, text: str) -> tuple[list[str], str]:
    """initcheck's reports of a library's own kernel."""
    found = library_reads(backend, text)
    return ([f"{len(found)} reports set aside: {TENSOR_MAP_READS}"], "grouped_mm") if found else ([], "")


def examine(backend: str, tool: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one tool over one backend's problems. Prints and returns the verdict."""
    begin = time.monotonic()
    state, text = run(command(tool, problems_of(backend, tool, args)), args.seconds)
    said, excused = set_aside(backend, tool, text, args.seconds) if state == "FINDINGS" else ([], False)
    content = state == "clean" or excused
    verdict = f"{state}{', all of them set aside' if excused else ''}"
    lines = [line for line in text.splitlines() if "SUMMARY" in line or "problems ran" in line]
    kernels = Counter(re.findall(r"^=========\s+at (.+?)\+0x", text, re.MULTILINE))
    said += [f"{count} reports in {name[:160]}" for name, count in kernels.most_common()]
    shown = "\n".join([*said, *(lines[-2:] if content else text.splitlines()[-25:])])
    spent = time.monotonic() - begin
    print(f"{backend}: {tool}: {verdict} ({spent:.0f} s)\n{shown}", flush=True)
    return {
        "backend": backend, "tool": tool, "state": state, "clean": content,
        "set_aside": said if excused else [], "kernels": dict(kernels), "seconds": round(spent, 1), "said": lines[-2:],
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="compute-sanitizer over chosen problems of each backend")
    parser.add_argument("--backend", default=",".join(BACKENDS), help="backends, separated by commas")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--control", choices=sorted(CONTROLS), help="only run this program; tells whether it is right")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"separated by commas (default: {','.join(TOOLS)})")
    parser.add_argument(
        "--problems", type=int, default=PROBLEMS, help=f"problems of each backend (default: {PROBLEMS})"
    )
    parser.add_argument("--kinds", type=int, default=40, help="kinds from which problems are drawn (default: 40)")
    parser.add_argument("--work", type=int, default=65536, help="largest number of multiply-adds (default: 65536)")
    parser.add_argument("--seconds", type=float, default=900.0, help="limit for each tool, in seconds (default: 900)")
    parser.add_argument("--jobs", type=int, default=1, help="number of tools that run side by side (default: 1)")
    parser.add_argument("--json", default="", help="write all verdicts to this file")
    args = parser.parse_args(arguments)
    if args.control:
        right = CONTROLS[args.control]()
        print("right" if right else "WRONG", flush=True)
        return 0 if right else 1
    if args.inside:
        return inside(args.inside, args.problems, args.kinds, args.work, args.fill)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    pairs, results = list(product(args.backend.split(","), args.tools.split(","))), list[dict[str, Any]]()
    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(lambda pair: examine(pair[0], pair[1], args), pairs):
            results.append(result)
            if args.json:  # after each, for whoever is cut off
                summary = {"versions": versions(), "problems": args.problems, "kinds": args.kinds, "runs": results}
                Path(args.json).write_text(json.dumps(summary, indent=1) + "\n")
    clean = sum(result["clean"] for result in results)
    print(f"{clean} of {len(pairs)} runs are clean")
    return 0 if clean == len(pairs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
