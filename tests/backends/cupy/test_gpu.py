"""The cupy backend on a GPU: launches in a graph, each with sizes of its own.

That its configs are right is shown beside this folder, in test_gpu_configs.py.
"""

from __future__ import annotations

import pytest
import torch

import multigemm as mg
from multigemm.backends.cupy import choice
from multigemm.planning.staging import staged_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("odd", [0, 1], ids=["aligned", "odd"])
def test_ten_thousand_launches_in_one_graph_are_right_for_random_sizes(odd: int) -> None:
    """40 rounds of 250 launches, all configs in turn, each with sizes of its own, compared exactly within the graph."""
    rounds, launches, rows, groups, k, n = 40, 250, 300, 6, 136 - odd, 264 - odd
    a = torch.randint(-2, 3, (rows, k), device="cuda").bfloat16()
    b = torch.randint(-2, 3, (groups, k, n), device="cuda").bfloat16()
    products = (a.double() @ b.double()).bfloat16()  # of every row with every group: whole numbers, rounded once
    row = torch.arange(rows, device="cuda").expand(launches, rows).contiguous()
    offsets = torch.zeros(launches, groups + 1, dtype=torch.int64, device="cuda")
    out = torch.empty(launches, rows, n, dtype=torch.bfloat16, device="cuda")
    problems = [mg.GroupedGemmProblem(a, b, offsets=own, out=result) for own, result in zip(offsets, out, strict=True)]
    choices = choice.candidates(staged_spec(problems[0]), a.device)
    plans = [mg.plan(p, backend="cupy", config=choices[i % len(choices)]) for i, p in enumerate(problems)]
    drawn = torch.zeros(rounds, *offsets.shape, dtype=torch.int64, device="cuda")
    wrong = torch.zeros(rounds, launches, dtype=torch.bool, device="cuda")

    def one_round(number: int) -> None:
        offsets.copy_(drawn[number])
        out.fill_(-12345.0)
        for plan in plans:
            plan()
        group = torch.searchsorted(offsets, row, right=True) - 1
        owned = (group >= 0) & (group < groups)
        expected = torch.where(owned[..., None], products[group.clamp(0, groups - 1), row], -12345.0)
        wrong[number] = (out != expected).flatten(1).any(1)

    one_round(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(rounds):
            one_round(number)
    random_sizes = torch.Generator("cuda").manual_seed(7)
    for replay in range(3):
        drawn.copy_(torch.randint(0, rows + 1, drawn.shape, device="cuda", generator=random_sizes).sort(dim=2).values)
        wrong.fill_(True)
        graph.replay()
        places = wrong.nonzero().tolist()
        assert not places, (replay, places[:5], {str(plans[i].config) for _, i in places})
