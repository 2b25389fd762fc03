"""Rows of a quantised product have the same bits alone, in another form, and in another order."""

from __future__ import annotations

from typing import Any

import torch

import multigemm as mg
from multigemm import quantize as q

GRAINS = ("row", "1x32", "1x128")


def rows_alone_have_the_same_bits(backend: str, grain: Any) -> None:
    """What `batch_invariant=True` promises, by four rows of a jagged product."""
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(19, 200, generator=g), torch.randn(3, 200, 17, generator=g)
    a, b = q.quantize(x, "e4m3", grain), q.quantize(w, "e4m3", grain, side="b")
    options: dict[str, Any] = {"batch_invariant": True, "backend": backend, "activation": "silu"}
    whole = mg.grouped_gemm(a.data, b.data, sizes=[7, 0, 12], scale_a=a.scale, scale_b=b.scale, **options)
    for row, group in ((0, 0), (6, 0), (7, 2), (18, 2)):
        alone = mg.grouped_gemm(
            a.data[row : row + 1], b.data[group], scale_a=a.scale[row : row + 1], scale_b=b.scale[group], **options
        )
        assert torch.equal(alone[0], whole[row])
