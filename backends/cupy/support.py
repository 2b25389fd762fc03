"""What this backend can run: the reasons against a machine, a problem, or one of its kernels.

Also how the kernels see a problem: which operand is which side, and what its results are.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch

from multigemm.backend import Availability, fused_reasons, quantised_reasons
from multigemm.planning.fused import KEYWORDS
from multigemm.planning.fused_steps import gathered_spec
from multigemm.problem.spec import HALVES, INPUT_DTYPES, FusedSpec, OperandSpec, Order, ProblemSpec

OLDEST = (8, 0)
E8M0 = torch.float8_e8m0fnu
RESULTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32)
INSTALL = "pip install cupy-cuda13x  (cupy-cuda12x for CUDA 12)"
MAX_GROUPS = 960
"""Groups that the Hopper kernel's schedule holds."""
MAX_ROWS = 1 << 30
"""The most rows of a result, and the longest k of a group of a jagged k, that tensor maps reach."""
MAX_LISTED_GROUPS, SMALL_MAX_ROWS = 16, 8192
"""Groups that the small kernel (of a list) and the kernel for small lists take as an argument; rows from which tiles as
small as the small kernel's only lose."""


def availability() -> Availability:
    """Whether CuPy, its compiler and a GPU are available."""
    if importlib.util.find_spec("cupy") is None:
        return Availability(False, "the package cupy is not installed", INSTALL)
    if not torch.cuda.is_available():
        why = "installed, but torch sees no CUDA GPU: it takes a CUDA build of torch on a machine with one"
        return Availability(False, why)
    try:
        import cupy
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        return Availability(False, f"cupy does not import: {error}", INSTALL)
    return Availability(True, version=str(cupy.__version__))


def not_supported_reasons(spec: ProblemSpec, device: torch.device) -> list[str]:
    """Every reason against this problem on this device; none means that it runs."""
    takes = ("combine", "out_rows") if spec.quantised else KEYWORDS
    if reasons := quantised_reasons(spec, takes=("float8", "weights")) + fused_reasons(spec, takes):
        return reasons
    reasons = []
    if device.type != "cuda":
        move = "move them there (torch: .cuda(), NumPy: cupy.asarray)"
        reasons.append(f"the operands are on {device}; this backend runs on CUDA devices: {move}")
    elif torch.cuda.is_available() and torch.cuda.get_device_capability(device) < OLDEST:
        seen = ".".join(map(str, torch.cuda.get_device_capability(device)))
        reasons.append(f"{device} has compute capability {seen}; the kernels need 8.0 or later: use another backend")
    if spec.compute not in INPUT_DTYPES and not spec.quantised:
        reasons.append(
            f"products of {spec.compute} are not implemented; cast to one of {', '.join(map(str, INPUT_DTYPES))}"
        )
    if spec.out.dtype not in RESULTS:
        reasons.append(
            f"results of {spec.out.dtype} are not implemented; ask for one of {', '.join(map(str, RESULTS))}"
        )
    if (spec.compute == torch.int8) != (spec.out.dtype == torch.int32):
        reasons.append(f"{spec.compute} gives {spec.out.dtype}: int8 operands give int32 results, and no others do")
    return reasons + spec.too_long


def words_of(spec: ProblemSpec) -> Literal["", "TF32", "INT8"]:
    """The Hopper kernel's operand type if its sums and plain results have 4 bytes; "" for 16 bits and others."""
    if spec.quantised:
        return ""
    if spec.compute is torch.int8:
        return "INT8"
    return "TF32" if spec.compute is torch.float32 and spec.precision == "tf32" else ""


def is_swapped(spec: ProblemSpec) -> bool:
    """Whether the result's rows are on the weight side: if they are contiguous, or for jagged n."""
    return spec.form == "jagged_n" or (spec.form in ("batched", "per_group", "jagged_k") and spec.out.order == "col")


def plain_kind(spec: ProblemSpec) -> int:
    """The kind of result: 0 for any epilogue; for alpha * A @ B in the operands' type (float8: 16 bits, int8: int32) 1
    along contiguous columns (see is_swapped), 2 along rows."""
    same = spec.out.dtype == (torch.int32 if spec.compute is torch.int8 else spec.compute)
    if spec.quantised == "float8":
        same = spec.out.dtype in HALVES
    preact = spec.fused is not None and spec.fused.preact is not None
    plain = spec.c is None and spec.bias is None and spec.activation is None and same and not preact
    along = "col" if is_swapped(spec) else "row"
    return 0 if not plain or spec.out.order == "strided" else 1 if spec.out.order == along else 2


def sends(spec: ProblemSpec) -> bool:
    """Whether the copy engine stores the results: plain ones but float64, in rows of whole 16-byte pieces.

    Where the rows are jagged, k must be contiguous in them: then no piece begins with rows of another group.
    """
    columns, x, along = (spec.m, spec.b, "col") if is_swapped(spec) else (spec.n, spec.a, "row")
    jagged_rows = spec.form in ("jagged_m", "jagged_n")
    known = spec.form != "per_group" and not (jagged_rows and (x.order != along or spec.total > MAX_ROWS))
    whole = spec.out.align == 16 and (columns or 1) % (16 // spec.out.dtype.itemsize) == 0
    return known and plain_kind(unbiased(spec)) == 1 and whole and spec.compute is not torch.float64


def stores_anywhere(spec: ProblemSpec) -> bool:
    """Whether the Hopper kernel's results are plain rows of 16 bits that begin at any address."""
    return spec.out.align < 16 and spec.compute in HALVES and spec.fused is None and hopper_plain_kind(spec) == 1


def unbiased(spec: ProblemSpec) -> ProblemSpec:
    """The spec without a bias that the Hopper kernel adds to sums in registers: 16 bits, along the weight side."""
    if spec.bias is None or spec.compute not in HALVES or spec.quantised:
        return spec
    along_weights = spec.form in ("jagged_m", "batched", "masked") and not is_swapped(spec)
    return replace(spec, bias=None) if along_weights else spec


def is_biased(spec: ProblemSpec) -> bool:
    """Whether the Hopper kernel's results are plain except for such a bias."""
    return spec.bias is not None and plain_kind(spec) == 0 and plain_kind(unbiased(spec)) > 0


def hopper_plain_kind(spec: ProblemSpec) -> int:
    """`plain_kind` for the Hopper kernel, whose plain results of 4 bytes are those that the copy engine stores."""
    return plain_kind(unbiased(spec)) if spec.compute in HALVES or not words_of(spec) else int(sends(spec))


def pads_rows(spec: ProblemSpec) -> bool:
    """Whether the row side must be a copy with groups at addresses that TMA can read, followed by zeros."""
    return spec.form == "jagged_k" and bool(words_of(spec))


def turns_weights(spec: ProblemSpec) -> bool:
    """Whether weights reach the tensor cores through registers: elements of 4 bytes or 1 byte, contiguous across k."""
    weights, along = (spec.a, "row") if is_swapped(spec) else (spec.b, "col")
    return bool(words_of(spec)) and weights.order != along


def begins_anywhere(spec: ProblemSpec, name: Literal["a", "b"]) -> bool:
    """Whether some lines of an operand, or of its groups, do not start at multiples of 16 bytes."""
    operand: OperandSpec = getattr(spec, name)
    across, along = ("m", "k") if name == "a" else ("k", "n")
    return operand.align < 16 or spec.jagged == (across if operand.order == "col" else along)


def has_odd_lines(spec: ProblemSpec) -> bool:
    """Whether the small kernel must read an operand's lines at unaligned starts (OddLines in lines.cuh)."""
    return begins_anywhere(spec, "a") or begins_anywhere(spec, "b")


def halves_reasons(spec: ProblemSpec) -> list[str]:
    """Why a kernel for 16-bit operands cannot run a spec."""
    precision = f" as {spec.precision}" if spec.compute is torch.float32 else ""
    return [] if spec.compute in HALVES else [f"{spec.compute} operands{precision}: it takes float16 and bfloat16"]


def _words_reasons(spec: ProblemSpec, padded: bool) -> list[str]:
    """Why the Hopper kernel cannot run tf32 or int8, which wgmma reads from shared memory along k only."""
    reasons = []
    name, rows, along = ("b", spec.b, "col") if is_swapped(spec) else ("a", spec.a, "row")
    if rows.order != along:
        reasons.append(f"{name} is contiguous across k: wgmma takes rows of {spec.a.dtype} along k")
    if spec.form == "jagged_k" and not padded:
        reasons.append("jagged k, where a group may begin between the pieces of 16 bytes that TMA reads")
    if spec.fused is not None:
        reasons.append(f"rows picked by index, a gate, preact_out or row_scale of {spec.a.dtype}")
    return reasons


def _double_reasons(spec: ProblemSpec) -> list[str]:
    """Why the Hopper kernel cannot run float64, whose products take registers."""
    reasons = []
    if plain_kind(spec) != 1:
        along = "col" if is_swapped(spec) else "row"
        reasons.append(f"an epilogue, or results by {spec.out.order}: of float64 it stores plain ones by {along}")
    if spec.fused is not None:
        reasons.append("rows picked by index, a gate, preact_out or row_scale of float64")
    rows, weights = (spec.b.order == "col", spec.a.order == "row")[:: 1 if is_swapped(spec) else -1]
    if weights and not rows:
        reasons.append("float64 with weights along k and rows across it")
    return reasons


def _cluster_reasons(spec: ProblemSpec) -> list[str]:
    """What all kernels of resident clusters have against a spec."""
    reasons = []
    if not 0 < spec.groups <= MAX_GROUPS:
        reasons.append(f"{spec.groups} groups: its schedule holds 1 to {MAX_GROUPS}")
    if spec.form == "masked" and spec.out.order == "col":
        reasons.append("a masked result stored by columns")
    return reasons


def _across_k_reasons(spec: ProblemSpec) -> list[str]:
    """What kernels of quantised operands have against those that TMA does not read along k."""
    return [
        f"{name} is {x.order}, aligned to {x.align} bytes: TMA and wgmma need contiguous k and 16"
        for name, x, order in (("a", spec.a, "row"), ("b", spec.b, "col"))
        if x.order != order or x.align < 16 or not x.dense
    ]


def hopper_reasons(spec: ProblemSpec, padded: bool = False) -> list[str]:
    """Why the Hopper kernel cannot run a spec. The generic one can. `padded`: rows of a jagged k are a copy."""
    reasons = list[str]()
    if spec.compute is torch.float64:
        reasons = _double_reasons(spec)
    elif spec.compute not in HALVES:
        reasons = _words_reasons(spec, padded) if words_of(spec) else halves_reasons(spec)
    for name, operand in (("a", spec.a), ("b", spec.b)):
        if operand.order == "strided" or operand.align < 16 or not operand.dense:
            reasons.append(
                f"{name} is {operand.order}, aligned to {operand.align} bytes: TMA needs a contiguous direction and 16"
            )
    reasons += _cluster_reasons(spec)
    if spec.form == "jagged_k" and not padded and not (spec.a.order == "col" and spec.b.order == "row"):
        reasons.append("jagged k is the contiguous direction of an operand, where a group may start at any address")
    if spec.form == "jagged_k" and spec.total > MAX_ROWS:
        reasons.append(f"a group's k may be up to {spec.total}: tensor maps of a jagged k reach {MAX_ROWS}")
    return reasons if spec.fused is None else reasons + _hopper_fused_reasons(spec, spec.fused)


GATED_FORMS = ("jagged_m", "batched", "masked")


def _hopper_fused_reasons(spec: ProblemSpec, fused: FusedSpec) -> list[str]:
    """Why the Hopper kernel cannot run picked rows, gates, preact_out or row_scale."""
    reasons = []
    if spec.form == "jagged_k":
        if fused.a_rows is not None and fused.b_rows is not None:
            reasons.append("picked rows of both operands: it picks those of one")
        if fused.preact is not None:
            reasons.append("preact_out of jagged k")
        return reasons
    if fused.b_rows is not None or (fused.a_rows is not None and (spec.form != "jagged_m" or spec.a.order != "row")):
        reasons.append("picked rows of b, or without contiguous k: it picks rows of a in jagged m")
    if spec.form not in GATED_FORMS or is_swapped(spec):
        reasons.append(f"{spec.form} with results in order {spec.out.order}: it fuses {', '.join(GATED_FORMS)} by rows")
    if not fused.layout:
        return reasons
    outputs = [spec.out] if fused.preact is None else [spec.out, fused.preact]
    if any(x.order != "row" or x.dtype != spec.compute for x in outputs):
        reasons.append("a gate with results or preact_out in another dtype than the operands, or not by rows")
    if spec.b.order == "row" and fused.layout != "interleaved" and (spec.n or 0) % 16:
        reasons.append(f"{spec.n} contiguous columns of g and u in halves: each half must be a multiple of 8")
    return reasons


def gather_reasons(spec: ProblemSpec) -> list[str]:
    """Why the Hopper kernel whose warps copy picked rows cannot run a spec, or has no reason to."""
    return hopper_reasons(spec) + ([] if picks_rows(spec) else ["no rows are picked by index"])


def gathered_reasons(spec: ProblemSpec) -> list[str]:
    """Why the Hopper kernel cannot run a spec after its picked rows were copied."""
    if not picks_rows(spec):
        return ["no rows are picked by index"]
    return halves_reasons(spec) + hopper_reasons(gathered_spec(spec))


def picks_rows(spec: ProblemSpec) -> bool:
    """Whether rows of an operand are picked by index."""
    return spec.fused is not None and (spec.fused.a_rows is not None or spec.fused.b_rows is not None)


def picks_weights(spec: ProblemSpec) -> bool:
    """Whether the rows that are picked by index are on the weight side."""
    if spec.fused is None:
        return False
    return (spec.fused.a_rows if is_swapped(spec) else spec.fused.b_rows) is not None


def has_gate(spec: ProblemSpec) -> bool:
    """Whether two columns of the products become one of the result."""
    return spec.fused is not None and bool(spec.fused.layout)


def has_block_scales(spec: ProblemSpec) -> bool:
    """Whether scales differ from one block of k to the next."""
    return any(x.scale is not None and x.scale.k for x in (spec.a, spec.b))


def trades_sides(spec: ProblemSpec) -> bool:
    """Whether `hopper_fp8` has the rows on wgmma's first side: columns share scales that change along k."""
    columns = (spec.a if is_swapped(spec) else spec.b).scale
    return has_block_scales(spec) and sends(spec) and (columns is None or columns.rows != 1)


def fp8_reasons(spec: ProblemSpec) -> list[str]:
    """Why the Hopper kernel for float8 cannot run a spec. The kernel `quantised` can."""
    reasons = [] if spec.quantised == "float8" else [f"{spec.a.dtype} x {spec.b.dtype}: it takes float8 on both sides"]
    if spec.form != "jagged_k":  # whose operands are copied
        reasons += _across_k_reasons(spec)
    for name, operand in (("a", spec.a), ("b", spec.b)):
        scale = operand.scale
        if scale is None:
            continue
        if scale.dtype is not torch.float32 or scale.align < 4:
            reasons.append(f"scale_{name} in {scale.dtype}, aligned to {scale.align} bytes: it takes aligned float32")
        if scale.k not in (0, 128):
            reasons.append(f"scale_{name} covers {scale.k} of k: it promotes after 128")
    reasons += _cluster_reasons(spec)
    if spec.form == "per_group":
        reasons.append(f"the form {spec.form}: it takes jagged m, n and k, batched and masked")
    return reasons


def folds_scales(spec: ProblemSpec) -> bool:
    """Whether scales along k are multiplied into the weights, exactly: powers of two under bfloat16."""
    scale = spec.b.scale
    return scale is not None and bool(scale.k) and scale.dtype is E8M0 and spec.compute is torch.bfloat16


def weights_reasons(spec: ProblemSpec) -> list[str]:
    """Why the Hopper kernel for quantised weights cannot run a spec. The kernel `quantised` can."""
    reasons = [] if spec.quantised == "weights" else [f"{spec.a.dtype} x {spec.b.dtype}: it takes quantised weights"]
    reasons += _across_k_reasons(spec)
    scale = spec.b.scale
    if scale is not None and scale.k not in (0, 32, 64, 128):
        reasons.append("scale_b covers unlike parts of k")
    if scale is not None and scale.align < scale.dtype.itemsize:
        reasons.append(f"scale_b in {scale.dtype}, aligned to {scale.align} bytes")
    reasons += _cluster_reasons(spec)
    if spec.form not in ("jagged_m", "batched", "masked") or is_swapped(spec):
        reasons.append(
            f"the form {spec.form}, result by {spec.out.order}: it takes jagged m, batched and masked by rows"
        )
    return reasons


def small_reasons(spec: ProblemSpec) -> list[str]:
    """Why the small kernel cannot run a spec."""
    reasons = halves_reasons(spec)
    for name, operand in (("a", spec.a), ("b", spec.b)):
        if operand.order == "strided":
            reasons.append(f"{name} is strided: it takes operands with a contiguous direction")
    if spec.form == "per_group" and (spec.groups > MAX_LISTED_GROUPS or plain_kind(spec) != 1 or is_swapped(spec)):
        reasons.append(
            f"a list of {spec.groups} groups: at most {MAX_LISTED_GROUPS}, without epilogue, results by rows"
        )
    if (
        spec.groups == 0
        or spec.total > SMALL_MAX_ROWS
        or spec.groups > SMALL_MAX_ROWS
        or max(spec.m or 0, spec.n or 0) > 1 << 20
    ):
        reasons.append(
            f"{spec.groups} groups, T<={spec.total}, m={spec.m}, n={spec.n}: 1 to {SMALL_MAX_ROWS} and 2^20 at most"
        )
    return reasons


def _copy_reasons(spec: ProblemSpec, copied: ProblemSpec) -> list[str]:
    """Why the operands that differ from their copies cannot be copied."""
    return [
        f"{name} has 2^31 elements or more, which are not copied: kernel='generic' reads it"
        for name, given, copy in (("a", spec.a, copied.a), ("b", spec.b, copied.b))
        if given.wide and given != copy
    ]


def small_list_reasons(spec: ProblemSpec) -> list[str]:
    """Why the kernel for one wave of a list or batch cannot run a spec. Operands that TMA cannot read are copied."""
    copied = packed_spec(spec)
    reasons = hopper_reasons(copied) if spec.compute in HALVES else halves_reasons(spec)
    reasons += _copy_reasons(spec, copied)
    if spec.form not in ("per_group", "batched") or spec.groups > MAX_LISTED_GROUPS:
        reasons.append(
            f"{spec.groups} groups of {spec.form}: it takes a list or a batch of at most {MAX_LISTED_GROUPS}"
        )
    if plain_kind(spec) != 1 or is_swapped(spec):
        reasons.append("an epilogue, or a result by columns: it stores plain results by rows")
    return reasons


@lru_cache(maxsize=1024)
def packed_spec(spec: ProblemSpec) -> ProblemSpec:
    """The spec after the operands that TMA cannot read were copied."""
    a, b = (_packed(spec, "a", "row", "col"), _packed(spec, "b", "col", "row"))
    return spec if (a, b) == (spec.a, spec.b) else replace(spec, a=a, b=b)


def _packed(spec: ProblemSpec, name: Literal["a", "b"], along_k: Order, across_k: Order) -> OperandSpec:
    operand: OperandSpec = getattr(spec, name)
    order: Order = "row" if operand.order == "strided" else operand.order
    if spec.compute not in HALVES and words_of(spec) and is_swapped(spec) == (name == "b"):
        order = along_k
    elif spec.form == "jagged_k":
        order = across_k
    readable = operand.align == 16 and operand.dense and operand.order == order
    return operand if readable else replace(operand, order=order, align=16, dense=True)


def packed_reasons(spec: ProblemSpec) -> list[str]:
    """Why copying does not make a spec one for the Hopper kernel."""
    copied = packed_spec(spec)
    reasons = [*hopper_reasons(copied, pads_rows(spec)), *_copy_reasons(spec, copied)]
    if pads_rows(spec) and (spec.b if is_swapped(spec) else spec.a).wide:
        reasons.append("rows of 2^31 elements or more, which are not copied: kernel='generic' reads them")
    if copied == spec and not pads_rows(spec):
        reasons.append("nothing needs copying")
    if spec.compute is torch.float64:
        reasons.append("float64 is not copied: kernel='generic' reads it")
    return reasons


def weights_of(spec: ProblemSpec) -> OperandSpec:
    """The operand whose lines are the result's columns, or its rows if the problem is swapped."""
    return spec.a if is_swapped(spec) else spec.b


@lru_cache(maxsize=1024)
def shift_b_spec(spec: ProblemSpec) -> ProblemSpec:
    """The spec after rows that TMA cannot read were copied; the weights stay."""
    rows = "b" if is_swapped(spec) else "a"
    return replace(spec, **{rows: getattr(packed_spec(spec), rows)})


def shift_a_spec(spec: ProblemSpec) -> ProblemSpec:
    """The spec after weights that TMA cannot read were copied; the rows stay."""
    return replace(spec, b=packed_spec(spec).b)


def shift_a_reasons(spec: ProblemSpec) -> list[str]:
    """Why the kernel that shifts the rows of a jagged m cannot run a spec, or has no reason to."""
    if spec.compute not in HALVES:
        return halves_reasons(spec)
    copied = shift_a_spec(spec)
    reasons = hopper_reasons(replace(copied, a=replace(spec.a, align=16)))
    if spec.a.align == 16:
        reasons.append("nothing needs shifting")
    if spec.form != "jagged_m" or spec.a.order != "row":
        reasons.append("it takes rows of a jagged m along k")
    if plain_kind(spec) != 1:
        reasons.append("an epilogue, or a result by columns: it stores plain results by rows")
    if spec.a.wide:
        reasons.append("2^31 elements of rows or more, which it would have to count")
    return [*reasons, *_copy_reasons(spec, copied)]


def shift_b_reasons(spec: ProblemSpec) -> list[str]:
    """Why the kernel that shifts its weights cannot run a spec, or has no reason to."""
    given, copied = weights_of(spec), shift_b_spec(spec)
    readable = replace(given, align=16)
    if spec.compute not in HALVES:
        return halves_reasons(spec)
    reasons = hopper_reasons(replace(copied, a=readable) if is_swapped(spec) else replace(copied, b=readable))
    if given == readable:
        reasons.append("nothing needs shifting")
    if spec.form == "jagged_k":
        reasons.append("jagged k: both operands are copied")
    if given.wide and spec.form != "per_group" and min(x for x in (spec.m, spec.n, spec.k, 64) if x is not None) < 64:
        reasons.append("2^31 elements of weights or more in short lines, which it would have to count")
    return [*reasons, *_copy_reasons(spec, copied)]
