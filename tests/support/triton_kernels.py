"""Classes of problems that stand for all of them, the Triton kernels that they run, and what those cost.

    python -m tests.support.triton_kernels 80 90 100        (--quick: a few classes)

compiles every kernel of every class for those compute capabilities (no GPU is needed) and prints registers, stack bytes
(spills) and shared memory. A stack frame is a bug: the config is then too large for its class. Only in float8 with
blocks of scales does it hold what all tiles share, outside of the loop along K. They are read from the cubin itself, so
any machine that can compile can also check.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from multigemm.backends.triton import generic, hopper, hopper_float8, lists, quantised, sum_rows
from multigemm.backends.triton.build import KernelSource, cubin
from multigemm.backends.triton.choice import candidates_of
from multigemm.backends.triton.config import Config
from multigemm.problem.spec import GLU_LAYOUTS, Form, FusedSpec, OperandSpec, Order, ProblemSpec, ScaleSpec

FRAME_SIZE, REGISTERS = 0x11, 0x2F
FORMAT_WORDS = 0x04


@dataclass(frozen=True, slots=True)
class Usage:
    """Per-thread registers and stack bytes (spills, or arrays that would not stay in registers)."""

    registers: int
    stack: int


def _sections(code: bytes) -> dict[str, bytes]:
    """The sections of a 64-bit little-endian ELF file by name."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(count)]
    text = headers[names][4]

    def name(at: int) -> str:
        return code[text + at : code.index(b"\0", text + at)].decode()

    return {name(h[0]): code[h[4] : h[4] + h[5]] for h in headers}


def _attributes(raw: bytes) -> list[tuple[int, bytes]]:
    """The records of an .nv.info section: format, attribute, then a size and that many bytes (or a value)."""
    found, at = [], 0
    while at + 4 <= len(raw):
        kind, attribute, size = struct.unpack_from("<BBH", raw, at)
        length = size if kind == FORMAT_WORDS else 0
        found.append((attribute, raw[at + 4 : at + 4 + length]))
        at += 4 + length
    return found


def usage(code: bytes) -> Usage:
    """The largest register count and stack frame of any function in the cubin."""
    values: dict[int, list[int]] = {FRAME_SIZE: [0], REGISTERS: [0]}
    for attribute, data in _attributes(_sections(code).get(".nv.info", b"")):
        if attribute in values and len(data) == 8:
            values[attribute].append(struct.unpack("<II", data)[1])
    return Usage(max(values[REGISTERS]), max(values[FRAME_SIZE]))


@dataclass(frozen=True)
class Report:
    """The resources of one compiled kernel."""

    kernel: str
    problem: str
    capability: int
    registers: int
    stack: int
    shared: int


def _spec(form: Form, dtype: torch.dtype, rows: int = 256, align: int = 16) -> ProblemSpec:
    out = torch.int32 if dtype == torch.int8 else dtype
    extent = 1024 if align == 16 else 1023
    a = OperandSpec(dtype, "col" if form == "jagged_k" else "row", align)
    return ProblemSpec(
        form=form,
        groups=8,
        m=None if form in ("per_group", "jagged_m") else extent,
        n=None if form in ("per_group", "jagged_n") else extent,
        k=None if form in ("per_group", "jagged_k") else extent,
        total=8 * rows,
        largest=0,
        a=a,
        b=OperandSpec(dtype, "row", align),
        out=OperandSpec(out, "row", align),
        compute=dtype,
        index=None if form in ("per_group", "batched") else torch.int32,
    )


def specs() -> Iterator[tuple[str, ProblemSpec]]:
    """Every dtype, every form, both ends of alignment and of the epilogue."""
    bf16, f32 = torch.bfloat16, torch.float32
    for form in ("jagged_m", "per_group", "jagged_k", "masked", "jagged_n", "batched"):
        yield f"{form} bf16", _spec(form, bf16)
        yield f"{form} bf16 unaligned", _spec(form, bf16, align=2)
    yield "jagged_m bf16 thin", _spec("jagged_m", bf16, rows=8)
    yield "jagged_m bf16 many groups", replace(_spec("jagged_m", bf16), groups=300)
    yield "per_group bf16 few groups", replace(_spec("per_group", bf16), groups=4)
    for dtype in (torch.float16, f32, torch.float64, torch.int8):
        yield f"jagged_m {dtype}", _spec("jagged_m", dtype)
        yield f"jagged_m {dtype} unaligned", _spec("jagged_m", dtype, align=dtype.itemsize)
    yield "jagged_m tf32", replace(_spec("jagged_m", f32), precision="tf32")
    single = _spec("jagged_m", f32)
    yield "jagged_m torch.float32 along k", replace(single, b=replace(single.b, order="col"))
    full = replace(_spec("jagged_m", bf16), bias=bf16, activation="gelu", alpha="any")
    yield "jagged_m bf16 bias gelu", full
    yield "jagged_m bf16 C bias gelu", replace(full, c=OperandSpec(f32))


def _quantised(
    form: Form, a: torch.dtype, b: torch.dtype, covers_a: tuple[int, int] | None, covers_b: tuple[int, int] | None,
    rows: int = 1024, dtype: torch.dtype = torch.float32, **of_b: Any,
) -> ProblemSpec:  # fmt: skip
    """Operands along K, as quantised ones usually lie; what one number covers: (rows, K) of it."""
    spec = _spec(form, torch.bfloat16, rows)
    scales = (None if x is None else ScaleSpec(dtype, form != "jagged_k", *x) for x in (covers_a, covers_b))
    scale_a, scale_b = scales
    if scale_b is not None and "zero" in of_b:
        scale_b = replace(scale_b, zero=of_b.pop("zero"))
    order: Order = "row" if form == "jagged_k" else "col"
    of_a = replace(spec.a, dtype=a, scale=scale_a)
    return replace(spec, a=of_a, b=OperandSpec(b, order, scale=scale_b, **of_b), compute=a)


def quantised_specs() -> Iterator[tuple[str, ProblemSpec]]:
    """Both classes of quantised operands: granularities, formats, forms, few and many tokens."""
    e4m3, e5m2, bf16, codes = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.uint8
    row, block, square, fine = (1, 0), (1, 128), (128, 128), (1, 32)
    e8m0 = torch.float8_e8m0fnu
    for thin, rows in (("", 1024), (" thin", 8)):
        yield f"float8 rows{thin}", _quantised("jagged_m", e4m3, e4m3, row, row, rows)
        yield f"float8 blocks{thin}", _quantised("jagged_m", e4m3, e5m2, block, square, rows)
        yield f"float8 mx{thin}", _quantised("jagged_m", e4m3, e4m3, fine, fine, rows, e8m0)
        yield f"float8 weights{thin}", _quantised("jagged_m", bf16, e4m3, None, row, rows)
        yield f"int8 weights{thin}", _quantised("jagged_m", bf16, torch.int8, None, row, rows)
        yield f"int4 weights{thin}", _quantised("jagged_m", bf16, codes, None, block, rows, packed="int4")
        zeros = _quantised("jagged_m", bf16, codes, None, block, rows, packed="uint4", zero=codes)
        yield f"uint4 weights with zero points{thin}", zeros
        yield f"mxfp4 weights{thin}", _quantised("jagged_m", bf16, codes, None, fine, rows, e8m0, packed="e2m1")
    yield "e5m2 weights", _quantised("jagged_m", bf16, e5m2, None, row)
    yield "float8 fast", replace(_quantised("jagged_m", e4m3, e4m3, row, row), accumulate="fast")
    yield "float8 unscaled", _quantised("jagged_m", e4m3, e4m3, None, None)
    stacks: tuple[Form, ...] = ("per_group", "masked", "batched")
    for form in stacks:
        yield f"{form} float8 blocks", _quantised(form, e4m3, e4m3, block, square)
    yield "jagged_n float8 blocks", _quantised("jagged_n", e4m3, e4m3, block, block)
    yield "jagged_k float8 blocks", _quantised("jagged_k", e4m3, e4m3, block, block)
    blocks = _quantised("jagged_m", e4m3, e4m3, block, square)
    yield "float8 blocks by rows of K", replace(blocks, b=replace(blocks.b, order="row"))
    a, b = (replace(x, align=1) for x in (blocks.a, blocks.b))
    yield "float8 blocks unaligned", replace(blocks, k=1023, a=a, b=b)
    full = replace(blocks, bias=bf16, activation="gelu", alpha="any")
    yield "float8 blocks C bias gelu", replace(full, c=OperandSpec(torch.float32))


def fused_specs() -> Iterator[tuple[str, ProblemSpec]]:
    """The specs of a mixture of experts: its products forward and backward, few and many tokens, each layout of
    gates."""
    bf16, index = torch.bfloat16, torch.int32
    for thin, rows in (("", 1024), (" thin", 8)):
        spec = _spec("jagged_m", bf16, rows)
        along_k = replace(spec, b=replace(spec.b, order="col"), activation="swiglu")
        for layout in GLU_LAYOUTS:
            yield f"gather swiglu {layout}{thin}", replace(along_k, fused=FusedSpec(index, layout=layout))
        preact = FusedSpec(index, layout="halves", preact=spec.out)
        yield f"gather swiglu preact_out{thin}", replace(along_k, fused=preact)
        gpt = FusedSpec(index, layout="interleaved", alpha=True, beta=True, limit=True, preact=spec.out)
        yield f"gather gpt-oss{thin}", replace(spec, activation="swiglu", bias=bf16, fused=gpt)
        yield f"gather row_scale{thin}", replace(along_k, activation=None, fused=FusedSpec(index, row_scale=bf16))
        yield f"combine{thin}", replace(along_k, activation=None, fused=FusedSpec(combine=index, weights=bf16, terms=8))
        yield f"out_rows{thin}", replace(along_k, activation=None, fused=FusedSpec(out_rows=torch.int64))
    both = _spec("jagged_k", bf16, 1024)
    for name, rows_of in (("a_rows", (index, None)), ("b_rows", (None, index)), ("a_rows b_rows", (index, index))):
        yield f"jagged_k {name}", replace(both, fused=FusedSpec(*rows_of))
    yield "jagged_n b_rows", replace(_spec("jagged_n", bf16), fused=FusedSpec(b_rows=index))
    gated = FusedSpec(layout="halves", limit=True)
    forms: tuple[Form, ...] = ("masked", "batched", "per_group")
    for form in forms:
        yield f"{form} geglu", replace(_spec(form, bf16), n=1024, activation="geglu", fused=gated)
    for dtype in (torch.float32, torch.float64):
        yield f"gather geglu {dtype}", replace(_spec("jagged_m", dtype), activation="geglu", fused=FusedSpec(
            index, layout="halves", preact=OperandSpec(dtype)))  # fmt: skip
    yield "gather torch.int8", replace(_spec("jagged_m", torch.int8), fused=FusedSpec(index))
    unaligned = _spec("jagged_m", bf16, 1024, align=2)
    yield (
        "gather geglu unaligned",
        replace(unaligned, n=1022, activation="geglu", fused=FusedSpec(index, layout="halves")),
    )


def every_spec() -> dict[str, ProblemSpec]:
    """All of them by name."""
    return dict((*specs(), *quantised_specs(), *fused_specs()))


def hopper_list_sources(spec: ProblemSpec, config: Config) -> dict[str, KernelSource]:
    """The Hopper kernels of a list, of which a plan loads the one for its extents."""
    return {f"main {multiple}": lists.list_source(spec, config, multiple) for multiple in lists.multiples(spec)}


def sources_of(spec: ProblemSpec, config: Config, capability: int = 90) -> dict[str, KernelSource]:
    """All kernels that problems of a spec may run with a config, by name."""
    if spec.fused is not None:
        scatters = spec.fused.scatters  # sums of rows, behind products that are a spec of their own
        return {"sums": sum_rows.sum_source(spec, False)} if scatters else generic.generic_sources(spec, config)
    if config.kernel == "quantised":
        return quantised.quantised_sources(spec, config, capability)
    if spec.quantised:
        return hopper_float8.float8_sources(spec, config)
    if spec.form == "per_group":
        of_lists = hopper_list_sources if config.kernel == "hopper" else lists.generic_list_sources
        return of_lists(spec, config)
    of_packed = hopper.hopper_sources if config.kernel == "hopper" else generic.generic_sources
    return of_packed(spec, config)


def sources(spec: ProblemSpec, capability: int, most: int = 2) -> Iterator[tuple[str, KernelSource]]:
    """The kernels that this spec may run: `most` configs of each kernel, or of quantised operands in all."""
    seen = Counter[str]()
    for config in candidates_of(spec, (capability // 10, capability % 10)):
        kind = "quantised" if spec.quantised else config.kernel
        in_steps = spec.fused is not None and kind == "hopper"  # a plain product among steps
        seen[kind] += 1
        if seen[kind] > most or in_steps:
            continue
        for name, source in sources_of(spec, config, capability).items():
            if name != "prefix" or spec.groups > generic.CHUNK:
                yield f"{config.kernel} {name} {config}", source


def reports(capability: int, most: int = 2, only: Sequence[str] = ()) -> Iterator[Report]:
    """Compiles (or loads) all of them, or those of the named problems."""
    for problem, spec in every_spec().items():
        if only and problem not in only:
            continue
        for kernel, source in sources(spec, capability, most):
            code = cubin(source, capability)
            seen = usage(code.code)
            yield Report(kernel, problem, capability, seen.registers, seen.stack, code.shared)


FEW = (
    "jagged_m bf16",
    "jagged_m torch.float64",
    "jagged_m bf16 C bias gelu",
    "float8 blocks",
    "gather swiglu preact_out",
)
QUICK = (
    *FEW,
    "per_group bf16 few groups",
    "jagged_m bf16 unaligned",
    "jagged_m bf16 many groups",
    "jagged_k bf16",
    "jagged_n bf16",
    "jagged_m torch.float32",
    "jagged_m torch.int8",
    "float8 blocks thin",
    "jagged_k float8 blocks",
    "mxfp4 weights thin",
    "gather gpt-oss",
    "jagged_k a_rows b_rows",
    "combine",
)


def main(arguments: list[str]) -> None:
    quick = "--quick" in arguments
    for capability in [int(word) for word in arguments if not word.startswith("-")] or [90]:
        for report in reports(
            capability, most=1 if quick else 2, only=(QUICK if capability == 90 else FEW) if quick else ()
        ):
            print(json.dumps(asdict(report)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
