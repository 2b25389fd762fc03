"""Problems of every form, as the GPU tests of the Triton backend draw them."""

from __future__ import annotations

from typing import Any

import torch

import multigemm as mg

SIZES = [5, 0, 70, 1, 130, 300, 640, 64]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).cuda()


def problem(
    form: str, n: int = 136, k: int = 104, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> mg.GroupedGemmProblem:
    groups, rows, m = len(SIZES), sum(SIZES) + 14, 328
    offsets = (torch.tensor([0, *SIZES]).cumsum(0) + 3).to(torch.int32).cuda()
    valid = torch.tensor([min(m, s) for s in SIZES], dtype=torch.int32).cuda()
    makers: dict[str, Any] = {
        "jagged_m": lambda: ((draw(rows, k, dtype=dtype), draw(groups, k, n, dtype=dtype)), {"offsets": offsets}),
        "jagged_m_nt": lambda: (
            (draw(rows, k, dtype=dtype), draw(groups, n, k, dtype=dtype).transpose(1, 2)),
            {"offsets": offsets},
        ),
        "jagged_n": lambda: (
            (draw(m, k, dtype=dtype), draw(k, rows, dtype=dtype)),
            {"offsets": offsets, "jagged": "n"},
        ),
        "jagged_k": lambda: (
            (draw(rows, m, dtype=dtype).T, draw(rows, n, dtype=dtype)),
            {"offsets": offsets, "jagged": "k"},
        ),
        "batched": lambda: ((draw(groups, m, k, dtype=dtype), draw(groups, k, n, dtype=dtype)), {}),
        "masked": lambda: ((draw(groups, m, k, dtype=dtype), draw(groups, k, n, dtype=dtype)), {"valid_rows": valid}),
        "per_group": lambda: (
            ([draw(s, k, dtype=dtype) for s in SIZES], [draw(k, n + 8 * i, dtype=dtype) for i in range(groups)]),
            {},
        ),
    }
    (a, b), given = makers[form]()
    return mg.GroupedGemmProblem(a, b, **given, **options)


def tensor(operand: Any) -> torch.Tensor:
    assert isinstance(operand, torch.Tensor)
    return operand


def offsets_of(given: mg.GroupedGemmProblem) -> torch.Tensor:
    assert given.grouping is not None
    return tensor(given.grouping.live)


FORMS = ["jagged_m", "jagged_m_nt", "jagged_n", "jagged_k", "batched", "masked", "per_group"]
