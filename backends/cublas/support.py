"""What this backend can run, and the reasons why not. Pure Python; needs no GPU."""

from __future__ import annotations

import torch

from multigemm.backend import Availability, quantised_reasons
from multigemm.backends.cublas.config import LARGEST_GROUPED_MM, aligned, result_type
from multigemm.backends.cublas.products import FARTHEST_BYTES, FARTHEST_ELEMENTS, countable
from multigemm.planning.fused_steps import fused_reasons_in_steps, product_spec, taken_in_steps
from multigemm.problem.spec import FLOAT_DTYPES, ProblemSpec

INT8_STEP = 4
"""cuBLAS reads int8 in words of four: K, leading dimensions and addresses are multiples of it."""

FLOAT8_STEP = 16
"""K, N and the starts of groups along a jagged K must be multiples of this in torch's scaled_grouped_mm: 16 bytes."""

OTHERS = ": use cupy, triton or numba"
"""The remedy for quantised operands that cublas does not take."""

EXTENT, INT8_EXTENT = 1 << 32, (1 << 31) - 1
"""cuBLAS 13.0 leaves the rows behind the first 2^32 as they were, and says nothing. Extents and leading dimensions past
31 bits go to kernels of their own, and there is none for int8: cublasGemmEx returns NOT_SUPPORTED."""


def availability() -> Availability:
    """Whether torch has a GPU and a cuBLAS that can be called."""
    install = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
    if torch.version.cuda is None:
        return Availability(False, f"this torch ({torch.__version__}) was built without CUDA", install)
    if not torch.cuda.is_available():
        return Availability(False, "installed, but torch sees no CUDA GPU")
    from multigemm.backends.cublas.library import cublas
    from multigemm.cuda import nvrtc

    try:
        version = cublas().version()
        nvrtc.compiler()
    except (OSError, AttributeError) as error:
        return Availability(False, f"torch's cuBLAS or NVRTC cannot be called: {error}", install)
    return Availability(True, version=f"cuBLAS {version}, torch {torch.__version__}")


def not_supported_reasons(spec: ProblemSpec, device: torch.device) -> list[str]:
    """Each limit that this spec exceeds, with the value seen and the remedy; empty if the backend can run it."""
    if reasons := quantised_reasons(spec, takes=("float8",)) + fused_reasons_in_steps(spec):
        return reasons
    if taken_in_steps(spec):
        return not_supported_reasons(product_spec(spec), device)
    if spec.quantised:
        return scaled_grouped_mm_reasons(spec, device)
    reasons = []
    if device.type != "cuda":
        reasons.append(f"operands are on {device.type}, cuBLAS needs a CUDA device: move them, or use backend 'cpu'")
    if spec.compute not in (*FLOAT_DTYPES, torch.int8):
        reasons.append(
            f"cuBLAS variants compute in float16, bfloat16, float32, float64 or int8, not {spec.compute}: convert them"
        )
    if spec.compute is torch.int8:
        reasons += _int8_reasons(spec)
    elif spec.batch_invariant:
        reasons.append(
            f"batch_invariant=True with {spec.compute}: cuBLAS picks a kernel, and whether it cuts K into parts, by "
            "the shape of each product, so that a row's bits depend on its neighbours (not in int8, whose sums are "
            "exact): use cupy, triton or numba"
        )
    if spec.longest > EXTENT:
        reasons.append(f"an extent of {spec.longest}: cuBLAS writes no further than {EXTENT}: split the problem")
    return reasons + _line_reasons(spec)


def _line_reasons(spec: ProblemSpec) -> list[str]:
    """Refuses operands whose lines are too long for cuBLAS to address, if the spec knows their length.

    Lines that are short but lie far apart are copied (`staging`); a copy of long lines would not be closer.
    """
    written = torch.promote_types(spec.out.dtype, result_type(spec))
    extents: dict[str | None, int | None] = {"m": spec.m, "n": spec.n, "k": spec.k}
    if spec.jagged is not None:
        extents[spec.jagged] = spec.total // 2 + 1  # at least: the spec knows the next power of two
    m, n, k = (extents[axis] for axis in ("m", "n", "k"))
    operands = (
        ("a", spec.a, m, k, spec.compute),
        ("b", spec.b, k, n, spec.compute),
        ("the result", spec.out, m, n, written),
    )
    reasons = []
    for name, operand, rows, cols, dtype in operands:
        by_columns = name == "b" if spec.compute is torch.int8 else operand.order == "col"  # int8: K contiguous
        line, lines = (rows, cols) if by_columns else (cols, rows)
        if line is not None and lines not in (0, 1) and not countable(line, dtype.itemsize):
            reasons.append(f"{name} has {line_reason(line, dtype)}")
    return reasons


def line_reason(length: int, dtype: torch.dtype) -> str:
    """Why lines of that many elements are refused."""
    return (
        f"lines of {length} elements or more of {dtype}: cuBLAS counts lines that begin less than {FARTHEST_ELEMENTS} "
        f"elements and {FARTHEST_BYTES} bytes apart: split the problem along them, or use another backend"
    )


def _int8_reasons(spec: ProblemSpec) -> list[str]:
    reasons = []
    if spec.out.dtype is not torch.int32:
        reasons.append(f"int8 products give int32, not {spec.out.dtype}: use out_dtype=torch.int32")
    if spec.form == "jagged_k":
        reasons.append(
            f"cuBLAS int8 needs every K to be a multiple of {INT8_STEP}, and jagged k cuts K by data: "
            f"use another backend, or stack the groups, padded with zeros to one K that is a multiple of {INT8_STEP}"
        )
    if spec.longest > INT8_EXTENT:
        reasons.append(f"an extent of {spec.longest}: cuBLAS has int8 products up to {INT8_EXTENT}: split the problem")
    return reasons


# --- float8 -----------------------------------------------------------------------------------------


def scaled_grouped_mm_reasons(spec: ProblemSpec, device: torch.device) -> list[str]:
    """Why torch's scaled_grouped_mm cannot run a spec of float8 operands; empty if it can."""
    reasons = [] if device.type == "cuda" else [f"operands are on {device.type}, cuBLAS needs a CUDA device: move them"]
    if spec.a.dtype is not torch.float8_e4m3fn or spec.b.dtype is not torch.float8_e4m3fn:
        seen = " x ".join(str(x.dtype).removeprefix("torch.") for x in (spec.a, spec.b))
        reasons.append(f"scaled_grouped_mm multiplies float8_e4m3fn by float8_e4m3fn, not {seen}{OTHERS}")
    if spec.out.dtype is not torch.bfloat16:
        reasons.append(f"scaled_grouped_mm writes bfloat16, not {spec.out.dtype}{OTHERS}")
    if spec.form not in ("jagged_m", "jagged_k"):
        reasons.append(f"scaled_grouped_mm runs jagged m and jagged k, not {spec.form}{OTHERS}")
    if spec.bias is not None or spec.activation or spec.c is not None or spec.alpha == "any":
        reasons.append("scaled_grouped_mm has no epilogue: apply it to the result")
    if not 1 <= spec.groups <= LARGEST_GROUPED_MM:
        reasons.append(f"scaled_grouped_mm takes 1 to {LARGEST_GROUPED_MM} groups, got {spec.groups}{OTHERS}")
    if spec.batch_invariant:
        reasons.append(f"batch_invariant=True: scaled_grouped_mm chooses tiles by the whole problem's shape{OTHERS}")
    reasons += _scale_reasons(spec) + _layout_reasons(spec)
    if spec.form == "jagged_k" and spec.device_sizes:
        reasons.append(
            f"scaled_grouped_mm ends its context where a jagged K is cut off multiples of {FLOAT8_STEP}, and sizes on "
            "the device may be any: give the sizes on the host"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        reasons.append(f"scaled_grouped_mm has its kernel for rows of float8 on compute capability 9.x{OTHERS}")
    return reasons


def _scale_reasons(spec: ProblemSpec) -> list[str]:
    """Refuses scales that cover anything but a row of each group, a group, or more."""
    reasons = []
    for name, operand in (("scale_a", spec.a), ("scale_b", spec.b)):
        scale = operand.scale
        if scale is None:
            continue
        if scale.k or scale.rows not in (0, 1):
            covers = f"{scale.rows or 'all'} x {scale.k or 'all of K'}"
            reasons.append(
                f"{name} covers {covers}: scaled_grouped_mm takes one number for each row of each group{OTHERS}"
            )
        elif name == "scale_a" and spec.form == "jagged_m" and scale.by_group:
            reasons.append(f"scale_a covers groups of rows: scaled_grouped_mm takes one number for each row{OTHERS}")
    return reasons


def _layout_reasons(spec: ProblemSpec) -> list[str]:
    if spec.k == 0:  # nothing is read
        return []
    reasons = []
    if (spec.a.order, spec.b.order) != ("row", "col"):
        reasons.append(
            "scaled_grouped_mm reads both operands along K (a by rows, b by columns), got "
            f"{spec.a.order}, {spec.b.order}{OTHERS}"
        )
    operands = (spec.a, spec.b, spec.out)
    if spec.out.order != "row" or not all(map(aligned, operands)):
        reasons.append(
            "scaled_grouped_mm needs an output by rows, and bases and strides that are multiples of "
            f"{FLOAT8_STEP} bytes{OTHERS}"
        )
    for name, extent in (("N", spec.n), ("K", spec.k)):
        if extent is not None and extent % FLOAT8_STEP:
            reasons.append(f"scaled_grouped_mm needs {name} to be a multiple of {FLOAT8_STEP}, got {extent}{OTHERS}")
    return reasons
