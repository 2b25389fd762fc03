"""Quantised weights as layers keep them: stacks [E, out, in], with scales [E, out or blocks, blocks of in]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multigemm.quantize import Format, Quantized, quantize


def quantize_stack(weight: Tensor, format: Format, scale: str, scale_dtype: torch.dtype) -> Quantized:
    """Quantises a stack [E, out, in] as b of the product x @ weight[e].T. Grids are transposed like the weight."""
    found = quantize(weight.mT, format, scale, side="b", scale_dtype=scale_dtype, zero=format == "uint4")
    return Quantized(found.data.mT, *(None if t is None else turned(t) for t in (found.scale, found.zero)))


def scale_keywords(format: Format, scale: Tensor, zero: Tensor | None = None) -> dict[str, Any]:
    """The keywords of `grouped_gemm` that go with the transposed stack."""
    packed = format if format in ("int4", "uint4", "e2m1") else None
    return {"scale_b": turned(scale), "zero_b": None if zero is None else turned(zero), "b_format": packed}


def turned(scale: Tensor) -> Tensor:
    """A grid with its last two axes exchanged. Numbers and vectors are returned as they are."""
    return scale.mT if scale.dim() > 1 else scale
