"""Compiles every CUDA kernel and shipped config of the cupy backend with NVRTC, without a GPU.

What is read back is what a profiler would show first: registers, spills, shared memory, and whether
the main loop is made of wgmma instructions.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("cupy", reason="the package cupy is not installed", exc_type=ImportError)

from multigemm.backends.cupy import build, generic, hopper, hopper_shift_b, small, small_list
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.build import SOURCES, Source, architecture, compile_source, headers
from multigemm.backends.cupy.config import Config
from multigemm.backends.cupy.fused import sum_source
from multigemm.backends.cupy.launch import KERNELS
from multigemm.backends.cupy.support import packed_spec
from multigemm.problem.spec import FusedSpec, OperandSpec, Order, ProblemSpec, ScaleSpec
from tests.support.compiled_before import compiled_before

REGISTERS_PER_SM = 65536
A_WORD_PER_TILE = 8
"""Bytes stored and loaded by what finds the next tile, which holds nothing up."""
CAPABILITIES = {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_100": (10, 0)}


def spec(dtype: torch.dtype = torch.bfloat16, a: Order = "row", b: Order = "row", **changes: object) -> ProblemSpec:
    """A jagged-m problem of one dtype and two layouts."""
    operand = OperandSpec(dtype)
    out = OperandSpec(torch.int32 if dtype == torch.int8 else dtype)
    base = ProblemSpec(
        "jagged_m",
        32,
        None,
        4096,
        4096,
        8192,
        0,
        replace(operand, order=a),
        replace(operand, order=b),
        out,
        compute=dtype,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def with_odd_lines(problem: ProblemSpec, names: str) -> ProblemSpec:
    """The problem with lines of these operands that begin at any element."""
    odd = {name: replace(getattr(problem, name), align=2) for name in names}
    return replace(problem, **odd)


class Compiled(NamedTuple):
    """What the compiler says of a kernel, and its PTX."""

    log: str
    ptx: str


def compile_text(text: str, source: Source, arch: str) -> Compiled:
    """A text under the definitions of a source; for a virtual architecture (compute_90a) ptxas has no part in it."""
    from cupy.cuda import nvrtc

    options = [*source.options(arch), *([] if arch.startswith("compute") else ["--ptxas-options=-v"])]
    return compiled_before(
        lambda: _compile(text, source.file, options), nvrtc.getVersion(), headers(), text, source.file, options
    )


def _compile(text: str, file: str, options: list[str]) -> Compiled:
    from cupy.cuda import nvrtc

    names = [(name.encode(), body.encode()) for name, body in headers()]
    program = nvrtc.createProgram(text, file, [body for _, body in names], [name for name, _ in names])
    try:
        nvrtc.compileProgram(program, options)
        log, ptx = nvrtc.getProgramLog(program), nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise AssertionError(nvrtc.getProgramLog(program)) from error
    finally:
        nvrtc.destroyProgram(program)
    return Compiled(log, ptx.decode() if isinstance(ptx, bytes) else str(ptx))


@cache
def compiled(source: Source, arch: str) -> Compiled:
    """A kernel for an architecture."""
    return compile_text((SOURCES / source.file).read_text(), source, arch)


def report(source: Source, arch: str) -> tuple[int, int]:
    """Registers per thread and bytes spilled, as ptxas reports them."""
    log = compiled(source, arch).log
    assert "serialized" not in log, "ptxas gave up running products of wgmma side by side"
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
    return registers, sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))


def static_shared(source: Source, arch: str) -> int:
    """The bytes of shared memory that a kernel declares."""
    return max(int(n) for n in ("0", *re.findall(r"(\d+) bytes smem", compiled(source, arch).log)))


def ptx_of(source: Source, arch: str) -> str:
    """The PTX text of a kernel of which nothing else is asked."""
    return compiled(source, arch.replace("sm", "compute")).ptx


def float8_by_blocks(**changes: Any) -> ProblemSpec:
    """e4m3 with scales of 1 x 128 of the rows and 128 x 128 of the weights."""
    e4m3, scale = OperandSpec(torch.float8_e4m3fn), ScaleSpec(torch.float32)
    a = replace(e4m3, scale=replace(scale, rows=1, k=128))
    b = replace(e4m3, order="col", scale=replace(scale, rows=128, k=128))
    out = OperandSpec(torch.bfloat16)
    given: dict[str, Any] = {"a": a, "b": b, "out": out, "compute": torch.float8_e4m3fn}
    return replace(spec(), **given | changes)


def mxfp4_weights(**changes: Any) -> ProblemSpec:
    """Codes of e2m1 under bfloat16, a power of two for each 32 of k of a column."""
    scale = ScaleSpec(torch.float8_e8m0fnu, rows=1, k=32)
    b = OperandSpec(torch.uint8, "col", packed="e2m1", scale=scale)
    return replace(spec(), **{"b": b, **changes})


def coarse(config: Config) -> Config:
    """The same tiles in steps of 64 rows, compiled in half of the time: the highest ones, which need most registers."""
    return replace(config, step=64)


HALVES = (torch.bfloat16, torch.float16)
KINDS: dict[str, tuple[tuple[torch.dtype, ...], str]] = {
    "16 bits": (HALVES, "ieee"), "tf32": ((torch.float32,), "tf32"), "float32": ((torch.float32,), "ieee"),
    "float64": ((torch.float64,), "ieee"), "int8": ((torch.int8,), "ieee"),
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, Order, Order, str, Config]] = {
    "NN": (0, "row", "row", "sm_80", configs.GENERIC),
    "TT": (1, "col", "col", "sm_90a", configs.GENERIC_64),
    "NT": (1, "row", "col", "sm_100", configs.GENERIC),
    "TN": (0, "col", "row", "sm_90a", configs.GENERIC_PAIR),
    "NN, tiny": (0, "row", "row", "sm_90a", configs.GENERIC_32),
    "TN, tiny": (1, "col", "row", "sm_80", configs.GENERIC_32),
}
ONCE = {"NT": ("16 bits", "tf32"), "TN, tiny": ("16 bits", "float32", "int8")}
"""Kinds that meet a layout which repeats a tile; on sm_100 float64 is compiled with picked rows."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kind"), [(x, kind) for x in LAYOUTS for kind in KINDS if kind in ONCE.get(x, KINDS)], ids=str
)
def test_generic_kernel_compiles_without_spills(layout: str, kind: str) -> None:
    """Both dtypes of 16 bits, which differ in the names of a few instructions, take turns."""
    (turn, a, b, arch, config), (dtypes, precision) = LAYOUTS[layout], KINDS[kind]
    dtype = dtypes[turn % len(dtypes)]
    problem = spec(dtype, a, b, precision=precision)
    if not configs.tile_fits(problem, config.tile, CAPABILITIES[arch]):
        assert (config.tile, dtype) in ((32, torch.float16), (32, torch.bfloat16), (128, torch.float64))
        return
    source = generic.source(problem, config)
    registers, spilled = report(source, arch)
    assert 0 < static_shared(source, arch) <= configs.PLACE_BYTES, "as the rule for smaller GPUs takes it to be"
    shape = configs.shapes_of(problem)[config.tile]
    assert spilled <= A_WORD_PER_TILE * (arch == "sm_100")
    assert registers * shape.threads * shape.resident <= REGISTERS_PER_SM


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_copying_kernel_compiles_without_spills(arch: str, dtype: torch.dtype) -> None:
    assert report(hopper.copy_source(dtype), arch)[1] == 0
    if arch == "sm_90a" and dtype != torch.bfloat16:
        assert report(hopper.padding_source(dtype), arch)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("config", [configs.SMALL_32, configs.SMALL_64, configs.SMALL_DEEP], ids=["32", "64", "deep"])
@pytest.mark.parametrize(
    ("problem", "arch"),
    [
        (spec(), "sm_90a"),
        (spec(torch.float16, b="col", form="per_group"), "sm_80"),
        (spec(a="col", form="jagged_k"), "sm_100"),
        (with_odd_lines(spec(b="col", form="masked", activation="silu"), "ab"), "sm_90a"),
        (with_odd_lines(spec(torch.float16, form="jagged_k"), "b"), "sm_80"),
        (with_odd_lines(spec(b="col", form="per_group"), "b"), "sm_100"),
    ],
    ids=["jagged_m", "list", "jagged_k", "odd, any-epilogue", "odd, jagged_k", "odd list"],
)
def test_small_kernel_compiles_without_spills(problem: ProblemSpec, arch: str, config: Config) -> None:
    source = small.source(problem, config)
    registers, spilled = report(source, arch)
    assert spilled == 0 and registers <= (168 if config.tile == 64 else 80)
    assert static_shared(source, arch) + small.shared_bytes(problem, config) <= configs.LEAST_SHARED


PLAIN = [
    pytest.param(spec(), configs.WIDE, id="jagged_m"),
    pytest.param(spec(a="col", b="row", form="jagged_k"), configs.WIDE, id="jagged_k"),
    pytest.param(spec(torch.float16, b="col"), configs.MIDDLE, id="middle"),
    pytest.param(spec(b="col", form="per_group"), configs.NARROW, id="list-narrow"),
    pytest.param(spec(a="col", b="row", form="jagged_k"), configs.TURNS, id="turns-jagged_k"),
    pytest.param(spec(b="col", form="per_group"), configs.TURNS, id="turns-list"),
    pytest.param(spec(out=OperandSpec(torch.bfloat16, align=2)), configs.TURNS, id="turns-odd-rows"),
    pytest.param(spec(form="jagged_n"), configs.WIDE, id="along-rows"),
    pytest.param(spec(form="jagged_n"), configs.TURNS, id="turns-along-rows"),
    pytest.param(spec(activation="silu"), configs.WIDE, id="any-epilogue"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "config"), PLAIN)
def test_hopper_kernel_does_not_spill_in_its_consumers(problem: ProblemSpec, config: Config) -> None:
    """The copy engine stores plain results where each begins at a multiple of 16 bytes. No barrier of a cluster waits
    until the whole GPU sees its writes: with release one took 0.4 us at the start and as much again at the end."""
    source = hopper.source(problem, config if config == configs.MIDDLE else coarse(config))
    registers, spilled = report(source, "sm_90a")
    assert registers * hopper.THREADS <= REGISTERS_PER_SM
    assert spilled <= 96, "a few words round the loops are harmless; an accumulator in memory is not"
    text = compiled(source, "sm_90a").ptx
    assert text.count("barrier.cluster.arrive") == 1 and "barrier.cluster.arrive.relaxed" in text
    if problem.form == "jagged_k":
        assert SENT in text and "stmatrix" in text


@pytest.mark.slow
@pytest.mark.parametrize("order", ["row col", "row row", "col row"], ids=["NT", "NN", "TN"])
def test_float64_on_hopper_does_not_spill(order: str) -> None:
    """What a product takes lies in registers as it was read: without a move between reads and products."""
    a, b = order.split()
    source = hopper.source(spec(torch.float64, a, b), configs.MIDDLE)  # type: ignore[arg-type]
    registers, spilled = report(source, "sm_90a")
    assert registers * hopper.THREADS <= REGISTERS_PER_SM and spilled == 0


SENT = "cp.async.bulk.tensor.5d.global.shared"
TF32: dict[str, Any] = {"dtype": torch.float32, "precision": "tf32"}
INT8: dict[str, Any] = {"dtype": torch.int8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "given", "config"),
    [
        *(pytest.param(kind, given, config, id=f"{name}-{case}")
          for name, kind in (("tf32", TF32), ("int8", INT8))
          for case, given, config in (("turns", {"b": "col"}, configs.TURNS),
                                      ("across-k", {"b": "row"}, configs.WIDE))),
        pytest.param(TF32, {"b": "col", "form": "per_group"}, configs.MIDDLE, id="tf32-list"),
        pytest.param(TF32, {"a": "col", "form": "jagged_k"}, configs.WIDE, id="tf32-jagged_k"),
        pytest.param(INT8, {"b": "row", "activation": "relu"}, configs.WIDE, id="int8-across-k, any-epilogue"),
    ],
)  # fmt: skip
def test_words_by_wgmma_do_not_spill_and_weights_across_k_come_in_registers(
    kind: dict[str, Any], given: dict[str, Any], config: Config
) -> None:
    """A jagged k and a list add to the load, an epilogue of any kind to the end: one kind of words meets each."""
    problem = packed_spec(spec(**kind | given))
    source = hopper.source(problem, coarse(config))
    registers, spilled = report(source, "sm_90a")
    assert registers * hopper.THREADS <= REGISTERS_PER_SM and spilled <= A_WORD_PER_TILE
    instruction = r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.(?:f32\.tf32\.tf32|s32\.s8\.s8)"
    text = compiled(source, "sm_90a").ptx.replace(" ", "")
    found, turned = re.findall(instruction, text), re.findall(instruction + r"\{[^}]*\},\{", text)
    assert found and len(turned) == (len(found) if given.get("b", "row") == "row" else 0)
    assert ("cp.async.bulk.tensor.5d.global" in text) == (
        given.get("form") != "per_group" and "activation" not in given
    )


def fused(layout: Any = "halves", **changes: Any) -> ProblemSpec:
    """A problem with picked rows, and with a gate unless its layout is ""."""
    keywords = {"a_rows": torch.int32, "layout": layout} | changes.pop("keywords", {})
    gate = {"activation": changes.pop("activation", "swiglu")} if layout else {}
    return spec(**{"b": "col"} | changes | gate, fused=FusedSpec(**keywords))


PREACT = {"keywords": {"preact": OperandSpec(torch.bfloat16)}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (fused(keywords={"a_rows": None}), configs.GATED[0]),
        (fused(), configs.GATHERED[0]),
        (fused(**PREACT), configs.GATHERED[2]),
        (fused("interleaved", b="row", **PREACT), configs.GATHERED[2]),
        (fused(activation="geglu"), configs.GATHERED[1]),
        (fused("", keywords={"a_rows": None, "row_scale": torch.float32}), configs.WIDE),
        (fused(""), configs.GATHERED_TOGETHER[0]),
        (fused("", a="col", b="row", form="jagged_k"), configs.GATHERED_TOGETHER[0]),
        (fused("", a="col", b="row", form="jagged_k", keywords={"a_rows": None, "b_rows": torch.int32}),
         configs.GATHERED[1]),
    ],
    ids=["gate", "gate and rows", "preact", "gpt-oss", "geglu", "row_scale", "rows", "dW, a_rows", "dW, b_rows"],
)  # fmt: skip
def test_fused_hopper_kernel_does_not_spill(problem: ProblemSpec, config: Config) -> None:
    registers, spilled = report(hopper.source(problem, coarse(config)), "sm_90a")
    assert registers * hopper.THREADS <= REGISTERS_PER_SM
    assert spilled <= 96, "a few words round the loops are harmless; an accumulator in memory is not"


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [generic.source(spec(), configs.GENERIC_64), hopper.source(spec(), configs.NARROW),
     hopper.source(spec(activation="silu"), configs.NARROW)],
    ids=["generic", "hopper", "any-epilogue"],
)  # fmt: skip
def test_a_plain_product_has_nothing_of_fused_ones(source: Source) -> None:
    """Without the switches, and with all of them off, the same code; and other code of the generic kernel with one."""
    off = source._replace(
        defines=(*source.defines, *((name, 0) for name in ("FUSED", "GATHER", "GATE", "PREACT", "ROW_SCALED")))
    )
    assert "FUSED" not in dict(source.defines) and ptx_of(source, "sm_90a") == ptx_of(off, "sm_90a")
    if source.entry == "generic":
        on = source._replace(defines=(*source.defines, ("FUSED", 1)))
        assert ptx_of(on, "sm_90a") != ptx_of(off, "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "config", "arch"),
    [(torch.bfloat16, configs.GENERIC, "sm_80"), (torch.bfloat16, configs.GENERIC, "sm_90a"),
     (torch.float64, configs.GENERIC_64, "sm_100")],
    ids=["bf16 sm_80", "bf16 sm_90a", "fp64 sm_100"],
)  # fmt: skip
def test_fused_generic_kernel_and_sums_compile_without_spills(dtype: torch.dtype, config: Config, arch: str) -> None:
    problem = replace(spec(dtype), fused=FusedSpec(a_rows=torch.int32))
    source = generic.source(problem, config)
    assert report(source, arch)[1] <= A_WORD_PER_TILE
    assert static_shared(source, arch) <= configs.place_bytes(problem, config.tile)
    summed = replace(spec(dtype), fused=FusedSpec(combine=torch.int32, terms=8, rows=4096))
    assert report(sum_source(summed), arch)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (spec(b="row"), configs.SHIFT_B),
        (spec(b="row", n=4095, out=OperandSpec(torch.bfloat16, align=2)), configs.SHIFT_B),
        (spec(torch.float16, b="col", form="per_group"), configs.SHIFT_B_MIDDLE),
        (spec(activation="silu"), configs.SHIFT_B_NARROW),
        (spec(b="col"), configs.SHIFT_A),
    ],
    ids=["jagged_m", "odd results", "list", "any-epilogue", "rows"],
)
def test_hopper_shift_b_kernel_does_not_spill(problem: ProblemSpec, config: Config) -> None:
    odd = with_odd_lines(problem, "ab" if config == configs.SHIFT_A else "b")
    registers, spilled = report(hopper_shift_b.source(odd, coarse(config)), "sm_90a")
    assert registers * hopper.THREADS <= REGISTERS_PER_SM and spilled == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b", "config"),
    [*(("row", "row", config) for config in configs.SMALL_LISTS[1:-1]),
     *((a, b, configs.SMALL_LISTS[-1]) for a, b in (("row", "row"), ("row", "col"), ("col", "row")))],
    ids=str,
)  # fmt: skip
def test_small_list_kernel_compiles_without_spills(a: Order, b: Order, config: Config) -> None:
    """The highest tiles, whose sums take most registers, meet each order of operands."""
    problem = spec(a=a, b=b, form="batched")
    source = small_list.source(problem, config)
    registers, spilled = report(source, "sm_90a")
    assert spilled == 0 and registers * small_list.THREADS <= REGISTERS_PER_SM and source.shared <= configs.SHARED_LIMIT
    assert compiled(source, "sm_90a").ptx.count(f"m64n{config.rows}k16") >= 4


@pytest.mark.slow
def test_hopper_shift_b_shows_shifted_weights_to_the_tensor_cores() -> None:
    """Both operands come from shared memory. What the shifting warps wrote there is fenced before they arrive."""
    text = ptx_of(hopper_shift_b.source(spec(b="col"), configs.SHIFT_B_NARROW), "sm_90a")
    widths = re.findall(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16 \{[^}]*\}, %rd\d+, %rd\d+,", text
    )
    assert {width: widths.count(width) for width in widths} == {str(n): 4 for n in range(8, 65, 8)}
    shifted = text[text.index("shf.r.wrap") :]
    stored = shifted.rindex("st.shared.v4.b32")
    fence, arrival = (shifted.index(word, stored) for word in ("fence.proxy.async", "mbarrier.arrive"))
    assert "bar.sync 3" in shifted and fence < arrival
    assert "cp.async.cg" not in text, "the copy engine brings the weights too"


@pytest.mark.slow
def test_the_main_loop_is_wgmma_for_every_width_of_the_config() -> None:
    """Read in PTX, which NVRTC gives without a disassembler: 4 instructions of k = 16 per width, in each of the loops.

    A second loop stores the results of the tile before.
    """
    for n, loops in ((4096, 2), (4095, 1)):
        source = hopper.source(spec(n=n), configs.NARROW)
        found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", ptx_of(source, "sm_90a"))
        assert {width: found.count(width) for width in found} == dict.fromkeys(("16", "32", "48", "64"), 4 * loops)
    assert "setmaxnreg" in ptx_of(source, "sm_90a") and "multicast::cluster" in ptx_of(source, "sm_90a")


@pytest.mark.slow
def test_the_compiler_knows_that_a_warps_role_is_uniform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the shuffle it would keep what follows from the role once per lane: a tenth more code, all of it cold."""
    source, shuffled = hopper.source(spec(), configs.SINGLE), "__shfl_sync(~0u, threadIdx.x >> 5, 0)"
    kept = len(compile_source(source, "sm_90a")[0])
    text = (SOURCES / source.file).read_text()
    assert text.count(shuffled) == 1
    (tmp_path / source.file).write_text(text.replace(shuffled, "threadIdx.x >> 5"))
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert kept < 0.95 * len(compile_source(source, "sm_90a")[0])  # the headers have been read by now


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "tf32"), (torch.int8, "ieee")])
def test_a_product_waits_for_rows_that_are_padded_whatever_their_layout(dtype: torch.dtype, precision: str) -> None:
    """They are written by the launch before it, after the copy of the weights."""
    orders: tuple[Order, ...] = ("row", "col")
    found = set()
    for a, b, odd in product(orders, orders, ("", "a", "b", "ab")):
        problem = with_odd_lines(spec(dtype, a=a, b=b, form="jagged_k", precision=precision), odd)
        found.add(hopper.copied_sides(problem, packed_spec(problem)))
    assert found >= {3}
    assert 2 not in found


@pytest.mark.slow
@pytest.mark.parametrize("copied", [0, 1, 2, 3])
def test_a_product_of_copies_waits_for_them_where_it_reads_them_and_at_its_end(copied: int) -> None:
    text = ptx_of(hopper.source(spec(), coarse(configs.NARROW), copied), "sm_90a")
    wait, loaders = "griddepcontrol.wait", text.index("setmaxnreg.dec")
    assert (text[:loaders].count(wait), text[loaders:].count(wait)) == ((0, 2) if copied else (1, 0))


@pytest.mark.slow
@pytest.mark.parametrize("config", [configs.NARROW, replace(configs.NARROW, pingpong=True)], ids=["late", "turns"])
def test_results_of_jagged_k_in_odd_lines_do_not_leave_by_the_copy_engine(config: Config) -> None:
    text = ptx_of(hopper.source(spec(a="col", form="jagged_k", n=4095), config), "sm_90a")
    assert SENT not in text and "stmatrix" in text


@pytest.mark.slow
def test_a_warp_has_read_its_tile_before_a_lane_writes_the_next_one() -> None:
    """All lanes of the generic kernel read the number of the tile, and the first one writes the next one there."""
    text = ptx_of(generic.source(spec(torch.float32), configs.GENERIC), "sm_80")
    (body,) = re.findall(r"\n\.(?:weak )?func \S*find_tile\S*\([^{]*\{(.*?)\n\}", text, re.DOTALL)
    read, barrier, rest = body.partition("bar.warp.sync")
    assert barrier and "bar.warp.sync" not in rest
    assert re.search(r"\bld\.\S*64", read) and not re.search(r"\bst\.", read) and re.search(r"\bst\.\S*64", rest)


def front_end_errors(source: Source) -> str:
    """What the compiler has against a source before it makes code of any kernel: the layouts' assertions among them."""
    text, cut, _ = (SOURCES / source.file).read_text().partition('extern "C" __global__')
    assert cut
    try:
        compile_text(text + 'extern "C" __global__ void nothing() {}', source, "compute_90a")
    except AssertionError as error:
        return str(error)
    return ""


EDGES = [
    pytest.param("hopper", spec(), id="plain"),
    pytest.param("hopper", spec(activation="silu"), id="any-epilogue"),
    pytest.param("hopper_gather", replace(spec(b="col"), fused=FusedSpec(a_rows=torch.int32)), id="picked rows"),
    pytest.param("hopper_shift_a", with_odd_lines(spec(), "a"), id="shifted rows"),
    pytest.param("hopper_shift_b", with_odd_lines(spec(), "b"), id="shifted weights"),
    pytest.param("hopper_shift_b", with_odd_lines(spec(b="col"), "b"), id="shifted weights along k"),
    pytest.param("hopper_fp8", float8_by_blocks(), id="float8"),
    pytest.param("hopper_fp8", float8_by_blocks(out=OperandSpec(torch.float32)), id="float8, any-epilogue"),
    pytest.param("hopper_weights", mxfp4_weights(), id="weights"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "problem"), EDGES)
def test_every_valid_config_has_a_layout_that_fits(kernel: str, problem: ProblemSpec) -> None:
    """With the most stages of each height: what `is_valid` counts is never less than a kernel takes."""
    found = 0
    for rows, (turns, step) in product((64, 128, 192, 256), ((False, 8), (True, 64))):
        config = Config(kernel, rows=rows, cluster=2, step=step, pingpong=turns)  # type: ignore[arg-type]
        valid = [n for n in range(1, 40) if configs.is_valid(replace(config, stages=n), problem)]
        for stages in valid[-1:]:
            (source, *_) = KERNELS[kernel].sources(problem, replace(config, stages=stages))
            assert front_end_errors(source) == "", (rows, turns, step, stages)
            found += 1
    assert found >= 2
    wide = Config("hopper_fp8", rows=128, stages=2, cluster=2, step=64)
    assert not configs.is_valid(wide, float8_by_blocks()), "tiles of 16 rows have no instruction"


def test_headers_hold_one_instruction_for_each_width_and_the_architecture_has_its_suffix() -> None:
    texts = dict(headers())
    assert len(texts) == len(headers())
    for name, widths in (("mma.cuh", range(8, 257, 8)), ("fragments.cuh", range(8, 257, 8))):
        for kind in ("bf16", "f16"):
            assert all(f"m64n{n}k16.f32.{kind}.{kind}" in texts[name] for n in widths)
    assert [architecture(c) for c in ((8, 0), (9, 0), (10, 0))] == ["sm_80", "sm_90a", "sm_100"]
