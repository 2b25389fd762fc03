"""What every backend keeps to with quantised operands: bits of rows alone, and scales that are no numbers."""

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


def a_nan_in_a_scale_stays_in_its_block(backend: str) -> None:
    """A row of A under one such scale, a column of one group's B under another."""
    a, b = torch.zeros(4, 256).to(torch.float8_e4m3fn), torch.ones(2, 256, 3).to(torch.float8_e4m3fn)
    scale, of_b = torch.ones(4, 2), torch.ones(2, 1, 3)
    scale[1, 1] = of_b[1, 0, 2] = torch.nan
    y = mg.grouped_gemm(a, b, sizes=[2, 2], scale_a=scale, backend=backend)
    assert y.isnan().any(1).tolist() == [False, True, False, False]
    y = mg.grouped_gemm(a, b, sizes=[2, 2], scale_b=of_b, backend=backend)
    assert y.isnan().tolist() == [[False] * 3] * 2 + [[False, False, True]] * 2
