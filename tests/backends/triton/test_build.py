"""What the shipped kernels compile to, for GPUs that need not be here: no spills, the right instructions.

One other process compiles them all, because the interpreter that other tests use changes Triton for the whole process.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import build
from multigemm.backends.triton.choice import fitting
from multigemm.backends.triton.config import shared_memory
from multigemm.backends.triton.hopper import hopper_source
from multigemm.backends.triton.hopper_choice import hopper_candidates
from multigemm.backends.triton.hopper_float8 import float8_source
from multigemm.backends.triton.quantised_choice import float8_candidates
from multigemm.problem.spec import ProblemSpec
from tests.support import triton_kernels
from tests.support.compiled_before import compiled_before, files_of
from tests.support.python_process import run_python

pytest.importorskip("triton", reason="the triton package is not installed: pip install triton")
pytestmark = pytest.mark.slow

COMPILED = "backends/triton", "multigemm", "tests/support/triton_kernels.py", "tests/backends/triton/test_build.py"
"""What a kernel may be made of, and how it is read."""
Compile = Callable[..., Any]
"""Calls a function of this file in the process that compiles."""


@pytest.fixture(scope="module")
def in_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """A process whose Triton compiles, with a cache of its own; it starts when something was not compiled before."""
    folder = tmp_path_factory.mktemp("compiled")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=keep_what_is_built) as pool:

        def ask(work: Callable[..., Any], *given: Any) -> Any:
            with pytest.MonkeyPatch.context() as environment:
                for name in [name for name in os.environ if name.startswith(("TRITON_", "MULTIGEMM_"))]:
                    environment.delenv(name)
                environment.setenv("MULTIGEMM_CACHE_DIR", str(folder))
                environment.setenv("TRITON_CACHE_DIR", str(folder / "triton-own"))
                return pool.submit(work, *given).result()

        def compiled(work: Callable[..., Any], *given: Any) -> Any:
            kept = [x for x in given if not isinstance(x, Path)]
            return compiled_before(lambda: ask(work, *given), files_of(*COMPILED), work.__name__, kept)

        yield compiled


# --- what runs in the process that compiles ---------------------------------------------------------------------------


FUSION = "TRITON_DEFAULT_FP_FUSION"


def keep_what_is_built() -> None:
    """Of a kernel that one test was told the registers of, another one reads the PTX."""
    first = build.build
    kept = cache(lambda source, capability, fusion: first(source, capability))
    vars(build)["build"] = lambda source, capability: kept(source, capability, os.environ.get(FUSION))


def quick_reports(capability: int, names: tuple[str, ...]) -> list[Any]:
    """Registers, stack and shared memory of a kernel of each kind that these problems run."""
    return list(triton_kernels.reports(capability, most=1, only=names))


def largest_shared(capability: int, limit: int, problem: str) -> tuple[int, int]:
    """The shared memory of the config that may take most of what is offered within a limit: the estimate, and what its
    kernels take."""
    spec = triton_kernels.every_spec()[problem]
    pair = capability // 10, capability % 10
    config = max(fitting(spec, pair, limit), key=lambda x: shared_memory(x, spec, pair))
    made = (build.cubin(x, capability) for x in triton_kernels.sources_of(spec, config, capability).values())
    return shared_memory(config, spec, pair), max(code.shared for code in made)


def ptx_of(source: Any, capability: int) -> str:
    """The PTX text of a kernel."""
    return str(build.build(source, capability).asm["ptx"])


def sass_of(source: Any, folder: Path) -> str:
    """The machine code of a kernel for sm_90, as text."""
    from triton import knobs

    (folder / "kernel.cubin").write_bytes(build.cubin(source, 90).code)
    command = [str(knobs.nvidia.nvdisasm.path), "-c", str(folder / "kernel.cubin")]
    return subprocess.check_output(command, text=True)


def sass_of_shifted_weights(folder: Path) -> str:
    """The Hopper kernel for weights in odd lines."""
    spec = dict(triton_kernels.specs())["jagged_m bf16 unaligned"]
    config = next(x for x in hopper_candidates(spec) if x.shift_b and x.block_m == 128)
    return sass_of(hopper_source(spec, config), folder)


def sass_of_two_widths(folder: Path) -> str:
    """The Hopper kernel with tiles of two widths."""
    spec = dict(triton_kernels.specs())["jagged_m bf16"]
    config = next(x for x in hopper_candidates(spec) if x.wide_tails)
    return sass_of(hopper_source(spec, config), folder)


def loops_of(sass: str) -> list[list[str]]:
    """The lines of each loop."""
    lines = sass.splitlines()
    label = {match[1]: at for at, line in enumerate(lines) if (match := re.match(r"(\.L_x_\d+):", line))}
    jumps = [(label[match[1]], at) for at, line in enumerate(lines) if (match := re.search(r"BRA `\((\S+)\)", line))]
    return [lines[first:last] for first, last in jumps if first < last]


def sass_of_float8(name: str, folder: Path) -> str:
    """The Hopper kernel for float8."""
    spec = dict(triton_kernels.quantised_specs())[name]
    return sass_of(float8_source(spec, float8_candidates(spec)[0]), folder)


def products_of(capability: int, *names: str) -> dict[str, dict[str, Any]]:
    """What kernels of quantised operands multiply by: `fresh` counts wgmma that begin a sum of their own instead of
    going on with one."""
    specs, found = dict(triton_kernels.quantised_specs()), dict[str, dict[str, Any]]()
    for name in names:
        _, source = next(triton_kernels.sources(specs[name], capability))
        ptx = ptx_of(source, capability)
        products = re.findall(r"(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\S*?\.((?:f32|cta)\S*) (.*?);", ptx)
        found[name] = {
            "kinds": sorted({f"{unit} {types}" for unit, types, _ in products}),
            "all": len(products),
            "fresh": sum(bool(re.search(r", 0, 1, 1(, [01], [01])?$", rest)) for _, _, rest in products),
            "depth": dict(source.constants).get("BK", 128),
            "multiplied": "mul.rn.bf16x2" in ptx,
        }
    return found


def products_of_rearranged_codes(capability: int, *formats: str) -> dict[str, tuple[int, int]]:
    """For weights of four bits without scales: the products in Triton's own code, and how many of them multiply what
    was joined and then took a new shape, without an operation on its elements in between."""
    spec, found = dict(triton_kernels.quantised_specs())["int4 weights"], dict[str, tuple[int, int]]()
    for name in formats:
        bare = replace(spec, b=replace(spec.b, packed=cast(Any, name), scale=None))
        _, source = next(triton_kernels.sources(bare, capability))
        text = str(build.build(source, capability).asm["ttir"])
        made = dict(re.findall(r"(%\w+) = (tt\.\w+ %\w+)", text))
        products = re.findall(r"= tt\.dot (%\w+), (%\w+),", text)

        def before(value: str, *operations: str, made: dict[str, str] = made) -> str:
            for operation in operations:
                taken, _, of = made.get(value, "").partition(" ")
                value = of if taken == operation else value
            return made.get(value, "")

        rearranged = sum(
            any(before(value, "tt.trans", "tt.reshape").startswith("tt.join") for value in pair) for pair in products
        )
        found[name] = len(products), rearranged
    return found


def products_that_are_summed(
    spec: ProblemSpec, name: str, kernels: tuple[str, ...]
) -> dict[str, list[tuple[str, str]]]:
    """For each of these kernels of a spec the sums in its PTX one of whose terms is a product; compiled without fusion
    of both by Triton itself."""
    found = {}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(FUSION, "0")
        for label, source in triton_kernels.sources(spec, 90, 1):
            if label.startswith(kernels):
                ptx = ptx_of(source, 90)
                products = set(re.findall(rf"\bmul(?:\.rn)?\.{name}\s+(%\w+),", ptx))
                sums = re.findall(rf"\b(?:add|sub)(?:\.rn)?\.{name}\s+%\w+, (%\w+), (%\w+);", ptx)
                found[label.split()[0]] = [pair for pair in sums if products & set(pair)]
    return found


# --- tests ------------------------------------------------------------------------------------------------------------


SHARED_BY_TILES = {("float8 blocks", "hopper"): 64, ("jagged_k float8 blocks", "hopper"): 64}
"""Bytes of stack that hold what all tiles of a program share: loops of whole tiles touch none of them (see below)."""


PARTS = 4
"""Of the kernels for sm_90, so that no test takes long after all others."""


@pytest.mark.parametrize(
    ("capability", "names"),
    [(80, triton_kernels.FEW), (100, triton_kernels.FEW),
     *((90, triton_kernels.QUICK[part::PARTS]) for part in range(PARTS))],
    ids=["80", "100", *(f"90, {part}" for part in range(PARTS))],
)  # fmt: skip
def test_shipped_kernels_compile_without_spills(capability: int, names: tuple[str, ...], in_compiler: Compile) -> None:
    reports = in_compiler(quick_reports, capability, names)
    assert {r.problem for r in reports} == set(names)
    spilled = [r for r in reports if r.stack > SHARED_BY_TILES.get((r.problem, r.kernel.split()[0]), 0)]
    assert not spilled
    assert all(0 < r.registers <= 255 for r in reports)
    limit = {80: 163, 90: 227, 100: 227}[capability] * 1024
    assert all(r.shared <= limit for r in reports)
    assert any(r.kernel.startswith("hopper") for r in reports) == (capability == 90)


@pytest.mark.parametrize(
    ("capability", "limit", "problem"),
    [(86, 99, name) for name in ("jagged_m bf16", "jagged_m torch.float32", "jagged_k a_rows b_rows", "float8 weights")]
    + [(80, 163, "per_group bf16")],
)
def test_what_is_offered_fits_gpus_with_less_shared_memory(
    capability: int, limit: int, problem: str, in_compiler: Compile
) -> None:
    estimate, taken = in_compiler(largest_shared, capability, 1024 * limit, problem)
    assert 0.9 * estimate < taken <= estimate <= 1024 * limit


def test_a_second_process_loads_what_the_first_compiled(tmp_path: Path) -> None:
    code = (
        "import sys; from multigemm.backends.triton import build as c; from tests.support import triton_kernels as s;"
        "spec = dict(s.specs())['jagged_m torch.float32']; source = next(s.sources(spec, 90))[1];"
        "made = c.cubin(source, 90); print(c.compilations, 'triton' in sys.modules, len(made.code), made.params)"
    )
    caches = {"MULTIGEMM_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "own")}
    first, second = (run_python("-c", code, environment=caches).stdout.split() for _ in range(2))
    assert first[0] == "1"
    assert second[0] == "0"
    assert second[1] == "False", "a cached kernel must not import triton"
    assert first[2:] == second[2:]


def test_products_of_shifted_weights_overlap(in_compiler: Compile, tmp_path: Path) -> None:
    """ptxas lets each wgmma wait for the one before where a register that one reads is written in between, and only
    tells a log that nobody reads. Then every product would be followed by a wait for all."""
    sass = in_compiler(sass_of_shifted_weights, tmp_path)
    products, waits_for_all = sass.count("HGMMA"), sass.count("DEPBAR.LE gsb0, 0x0")
    assert products >= 16
    assert waits_for_all < products / 2


def test_tiles_of_two_widths_load_a_block_in_few_instructions(in_compiler: Compile, tmp_path: Path) -> None:
    """One warp loads. If the compiler makes coordinates uniform anew for each block of K, that takes 58 instructions
    more, and low tiles wait for them."""
    loops = loops_of(in_compiler(sass_of_two_widths, tmp_path))
    of_blocks = [loop for loop in loops if len(loop) < 250 and sum("UTMALDG" in line for line in loop) == 8]
    assert len(of_blocks) >= 3, "up to the draw of the next tile, to its record, to the end"
    assert not any("R2UR" in line for loop in sorted(of_blocks, key=len)[:3] for line in loop)


@pytest.mark.parametrize(("name", "read"), [("float8 blocks", 0), ("jagged_k float8 blocks", 16)])
def test_whole_tiles_of_float8_are_multiplied_without_the_stack(
    name: str, read: int, in_compiler: Compile, tmp_path: Path
) -> None:
    """Between the products of a block and those of the next one lie the promotion and the loads of scales alone. Where
    each column has its own they are read from shared memory, four at a time."""
    loops = loops_of(in_compiler(sass_of_float8, name, tmp_path))
    of_two_strips = [loop for loop in loops if sum("QGMMA" in line for line in loop) == 8]
    assert len(of_two_strips) == 2, "one in each warpgroup"
    assert not any("LDL" in line or "STL" in line for loop in of_two_strips for line in loop)
    assert all(sum("FFMA" in line for line in loop) == 128 for loop in of_two_strips)
    assert all(sum("LDS.128" in line for line in loop) == read for loop in of_two_strips)


def test_hopper_multiplies_float8_as_such_and_promotes_its_sums(in_compiler: Compile) -> None:
    """Every 128 of K, or every block of scales, begins a sum of its own; only "fast" goes on with one."""
    promoted = ("float8 rows", "float8 unscaled", "float8 blocks", "float8 blocks thin", "float8 mx",
                "jagged_k float8 blocks")  # fmt: skip
    found = in_compiler(products_of, 90, *promoted, "float8 fast", "float8 weights")
    for name in promoted:
        seen = found[name]
        assert all(kind.startswith("wgmma.mma_async f32.e") for kind in seen["kinds"]), seen
        assert seen["fresh"] > 0 and seen["all"] == seen["fresh"] * seen["depth"] // 32, seen
    assert found["float8 blocks"]["kinds"] == ["wgmma.mma_async f32.e4m3.e5m2"]
    assert found["float8 fast"]["fresh"] == 0 and "e4m3" in found["float8 fast"]["kinds"][0]
    assert found["float8 weights"]["kinds"] == ["wgmma.mma_async f32.bf16.bf16"]


def test_infinities_of_e5m2_weights_stay_infinite(in_compiler: Compile) -> None:
    """Triton's own way from e5m2 to bfloat16 multiplies by 2^112, which makes 65536 of infinity."""
    [seen] = in_compiler(products_of, 90, "e5m2 weights").values()
    assert seen["kinds"] == ["wgmma.mma_async f32.bf16.bf16"] and not seen["multiplied"]


def test_codes_of_four_bits_are_numbers_only_in_their_places(in_compiler: Compile) -> None:
    """Triton 3.6 ends with "Illegal shared layout" where a product multiplies what was just joined and reshaped."""
    for name, (products, rearranged) in in_compiler(products_of_rearranged_codes, 90, "int4", "e2m1").items():
        assert products and not rearranged, name


@pytest.mark.parametrize("capability", [89, 120])
def test_float8_is_converted_where_its_products_are_narrow_or_missing(capability: int, in_compiler: Compile) -> None:
    [seen] = in_compiler(products_of, capability, "float8 rows").values()
    assert seen["kinds"] == ["mma.sync f32.f16.f16.f32"], seen


@pytest.mark.parametrize(
    ("inputs", "wide", "name", "kernels"),
    [(torch.float16, torch.float32, "f32", ("pointer", "hopper")), (torch.float64, torch.float64, "f64", ("pointer",))],
    ids=["16 bits", "64 bits"],
)
def test_no_product_of_the_epilogue_is_left_to_be_fused_or_not(
    inputs: torch.dtype, wide: torch.dtype, name: str, kernels: tuple[str, ...], in_compiler: Compile
) -> None:
    """Else an element's last bit depends on the tile: compilers fuse in one kernel and not in the next. What the second
    epilogue has of its own is a function that all kernels call."""
    a, b = torch.zeros(512, 264, dtype=inputs), torch.zeros(6, 264, 264, dtype=inputs).mT
    c = torch.zeros(512, 264, dtype=wide)
    epilogues: list[dict[str, Any]] = [
        {"c": c, "alpha": 0.3, "beta": -0.6, "bias": c[:6], "activation": "gelu"},
        {"bias": c[:6], "alpha": 0.3, "activation": "gelu_tanh"},
    ]
    for epilogue, asked in zip(epilogues, (kernels, ("pointer",))):
        spec = mg.GroupedGemmProblem(a, b, sizes=[100] * 5 + [12], out_dtype=wide, **epilogue).spec
        found = in_compiler(products_that_are_summed, spec, name, asked)
        assert set(found) == set(asked) and not any(found.values()), (found, epilogue.keys())
