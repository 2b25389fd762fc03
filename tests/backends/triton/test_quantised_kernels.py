"""Quantised operands on a GPU that need not be here: which kernel takes them, its arguments, codes as numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from multigemm.backends.triton import Config, choice, hopper
from multigemm.backends.triton.config import problem_with, summation_of
from multigemm.backends.triton.hopper_float8 import float8_source
from multigemm.backends.triton.quantised import quantised_source
from multigemm.backends.triton.quantised_choice import float8_candidates, quantised_candidates
from multigemm.problem.spec import ProblemSpec, ScaleSpec
from tests.support.triton_kernels import quantised_specs

KERNELS = Path(choice.__file__).parent / "kernels"
SPECS = dict(quantised_specs())
BLOCKS, WGRAD = SPECS["float8 blocks"], SPECS["jagged_k float8 blocks"]
TALL = Config("hopper", block_m=256, block_n=128, block_k=128, stages=4, warps=4)
COPIED = replace(TALL, pack=("a", "b"))
Words = npt.NDArray[np.uint32]


def function_of(file: str, name: str) -> ast.FunctionDef:
    """A function of the device code, which importing would need Triton for."""
    tree = ast.parse((KERNELS / file).read_text())
    return next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name)


# --- arguments ----------------------------------------------------------------------------------------


TAKEN = ("float8 rows", "float8 blocks", "float8 unscaled", "masked float8 blocks", "batched float8 blocks",
         "jagged_k float8 blocks")  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_arguments_stand_in_the_kernels_order(name: str) -> None:
    """Addresses and strides are handed over by place."""
    spec = SPECS[name]
    first = quantised_candidates(spec)[0]
    assert first.kernel == "hopper"
    small = quantised_candidates(spec)[-1]
    for file, kernel, source in (("hopper_float8.py", "float8_kernel", float8_source(spec, first)),
                                 ("quantised.py", "quantised_kernel", quantised_source(spec, small, 90))):  # fmt: skip
        taken = [x.arg for x in function_of(file, kernel).args.args]
        given = [argument for argument, _ in source.signature]
        assert taken[: len(given)] == given
        assert set(taken[len(given) :]) == {constant for constant, _ in source.constants}


def test_jagged_columns_bring_their_scales_along() -> None:
    """Computed as jagged rows of the transposed problem: scales of b become those of rows."""
    spec = SPECS["jagged_n float8 blocks"]
    wide = replace(spec, a=replace(spec.a, scale=ScaleSpec(torch.float32, True, 128, 128)))
    constants = dict(float8_source(wide, TALL).constants)
    assert (constants["SA_ROWS"], constants["SA_K"]) == (1, 128)
    assert (constants["SB_ROWS"], constants["SB_K"]) == (128, 128)
    assert "a scale for each column" in problem_with(TALL, spec)


# --- which kernel -------------------------------------------------------------------------------------


def _scaled(spec: ProblemSpec, side: str, **changes: Any) -> ProblemSpec:
    operand = getattr(spec, side)
    return replace(spec, **{side: replace(operand, scale=replace(operand.scale, **changes))})


REFUSED: dict[str, tuple[ProblemSpec, Config, str]] = {
    "weights": (SPECS["int8 weights"], TALL, "multiplies packed forms of float8"),
    "lists": (SPECS["per_group float8 blocks"], TALL, "multiplies packed forms of float8"),
    "jagged k": (WGRAD, TALL, "with a jagged K after a copy of a and b"),
    "a longer jagged k": (replace(WGRAD, total=2**30 - 1000), COPIED, "tensor maps need"),
    "mx": (SPECS["float8 mx"], TALL, "covers 32 of K"),
    "rows of K": (SPECS["float8 blocks by rows of K"], TALL, "multiplies float8 along K"),
    "unaligned": (SPECS["float8 blocks unaligned"], TALL, "multiplies float8 along K"),
    "unaligned scales": (_scaled(BLOCKS, "a", align=2), TALL, "scale_a is 2-byte aligned"),
    "columns beside blocks": (_scaled(BLOCKS, "b", rows=1), TALL, "a scale for each column beside blocks"),
    "wide tiles of a jagged k": (WGRAD, replace(COPIED, block_m=128, block_n=256), "leave registers"),
    "tall tiles with results of 32 bits": (
        replace(WGRAD, out=replace(WGRAD.out, dtype=torch.float32)),
        COPIED,
        "leave registers",
    ),
    "no products": (replace(BLOCKS, alpha="zero"), TALL, "multiplied as it lies"),
    "a copy": (BLOCKS, replace(TALL, pack=("a",)), "multiplied as it lies"),
    "narrow tiles": (BLOCKS, replace(TALL, block_n=64), "by 128 columns"),
    "wide tiles of three": (BLOCKS, replace(TALL, block_m=192, block_n=256), "by 128 columns"),
    "another pointer kernel": (BLOCKS, Config(), "quantised operands have kernels of their own"),
    "batch invariance": (replace(BLOCKS, batch_invariant=True), TALL, "multiplies every size by one tile"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_the_warp_specialised_kernel_leaves_to_the_portable_one(why: str) -> None:
    spec, config, words = REFUSED[why]
    assert words in problem_with(config, spec)
    found = quantised_candidates(spec)
    assert found[-1].kernel == "quantised", "the portable kernel takes every problem"


@pytest.mark.parametrize("name", TAKEN)
def test_float8_along_k_is_taken_by_the_warp_specialised_kernel(name: str) -> None:
    spec = SPECS[name]
    found = quantised_candidates(spec)
    kernels = [config.kernel for config in found]
    assert kernels == sorted(kernels), "hopper before quantised"
    assert all(not problem_with(config, spec) for config in found)
    assert {config.kernel for config in quantised_candidates(spec, (8, 0))} == {"quantised"}
    assert {summation_of(config, spec).unit for config in float8_candidates(spec)} == {"wgmma"}


def test_few_rows_are_left_to_low_tiles() -> None:
    """A strip of 64 rows would keep one warpgroup of two."""
    found = quantised_candidates(SPECS["float8 blocks thin"])
    assert [config.kernel for config in found[:2]] == ["quantised", "hopper"]
    assert found[0].block_m == 16
    by_format = {name: quantised_candidates(SPECS[f"{name} weights thin"])[0] for name in ("int8", "int4", "mxfp4")}
    tiles = {name: (config.block_n, config.warps) for name, config in by_format.items()}
    assert tiles == {"int8": (32, 1), "int4": (64, 2), "mxfp4": (64, 2)}, "mma.sync: wgmma takes four warps"


def test_a_short_jagged_k_is_not_worth_copies() -> None:
    """As measured: 4 groups of 128 of K are multiplied as they lie, 8 groups of 512 after copies."""
    brief = replace(WGRAD, groups=4, m=256, n=256, total=512)
    assert quantised_candidates(brief)[0].kernel == "quantised"
    longer = replace(WGRAD, groups=8, m=1024, n=1024, total=4096)
    assert quantised_candidates(longer)[0].pack == ("a", "b")


def test_a_part_and_a_sum_of_its_size_share_the_registers() -> None:
    """Products of 128 columns start anew at each block of K, whatever the tile's width."""
    for config in float8_candidates(BLOCKS):
        assert hopper.boxes(BLOCKS, config)["b_desc"] == (1, 128, 128)
        assert dict(float8_source(BLOCKS, config).constants)["STAGES"] == config.stages


# --- codes --------------------------------------------------------------------------------------------


def code_of(format: str, bfloat: bool) -> str:
    """What `decoder` gives, without Triton."""
    function = function_of("quantised.py", "decoder")
    function.decorator_list = []
    scope: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), "quantised.py", "exec"), scope)
    found: str = scope["decoder"](format, bfloat)
    return found


def permuted(low: Words, high: Words, selector: Words) -> Words:
    both, made = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32), np.zeros_like(low | high)
    for place in range(4):
        number = int(selector) >> 4 * place & 15
        assert number < 8, "this mode copies a sign"
        made |= (both >> np.uint64(8 * number) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * place)
    return made


def looked_up(a: Words, b: Words, c: Words, table: Words) -> Words:
    made = np.zeros_like(a | b | c)
    for number in range(8):
        if int(table) >> number & 1:
            made |= (a if number & 4 else ~a) & (b if number & 2 else ~b) & (c if number & 1 else ~c)
    return made


def half(words: Words, which: int, dtype: torch.dtype) -> torch.Tensor:
    """One of the two numbers in each word."""
    bits = (words >> np.uint32(16 * which) & np.uint32(0xFFFF)).astype(np.uint16)
    return torch.from_numpy(bits.view(np.int16).copy()).view(dtype)


def multiplied_and_added(dtype: torch.dtype, a: Words, b: Words, c: Words) -> Words:
    x, y, z = np.broadcast_arrays(a, b, c)
    made = np.zeros_like(x)
    for which in (0, 1):
        exact = half(x, which, dtype).double() * half(y, which, dtype).double() + half(z, which, dtype).double()
        rounded = exact.to(dtype)
        assert torch.equal(rounded.double(), exact), "an instruction rounds"
        made |= rounded.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << np.uint32(16 * which)
    return made


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": permuted,
    "lop3.b32": looked_up,
    "xor.b32": lambda a, b: a ^ b,
    "fma.rn.bf16x2": partial(multiplied_and_added, torch.bfloat16),
    "fma.rn.f16x2": partial(multiplied_and_added, torch.float16),
}


def run(code: str, registers: dict[str, Words]) -> None:
    """Interprets machine code without branches."""
    for statement in re.sub(r"\s+", " ", code).strip("{} ").split(";"):
        operation, _, operands = statement.strip().partition(" ")
        if operation and not operation.startswith("."):
            target, *sources = operands.split(", ")
            values = [registers[x] if x in registers else np.uint32(int(x, 0)) for x in sources]
            registers[target] = INSTRUCTIONS[operation](*values)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MEANINGS: dict[str, Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]]] = {
    "int8": lambda code: np.where(code > 127, code - 256, code),
    "int4": lambda code: np.where(code > 7, code - 16, code),
    "uint4": lambda code: code,
    "e2m1": lambda code: np.where(code > 7, -1, 1) * E2M1[code & 7],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("format", MEANINGS)
def test_every_code_becomes_the_number_that_it_means(format: str, place: int, dtype: torch.dtype) -> None:
    """At every place of a word, whatever stands beside it."""
    codes = np.arange(256, dtype=np.uint32)
    beside = np.random.default_rng(place).integers(0, 1 << 32, 256, dtype=np.uint32)
    words = beside & ~np.uint32(255 << 8 * place) | codes << np.uint32(8 * place)
    wide = format == "int8"
    registers = {"$2" if wide else "$4": words}
    run(code_of(format, dtype is torch.bfloat16), registers)
    for which in (0, 1):
        made = registers[f"${place // 2 if wide else place}"]
        if wide and which != place % 2:
            continue
        meant = MEANINGS[format]((codes if wide else codes >> np.uint32(4 * which) & np.uint32(15)).astype(np.int64))
        assert (half(made, which, dtype).float().numpy() == meant).all()
