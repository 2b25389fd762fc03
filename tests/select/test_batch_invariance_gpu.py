"""Rows on a GPU have the bits that they have alone; what `multigemm.testing.batch_invariance` does for longer."""

from __future__ import annotations

import pytest
import torch

import multigemm as mg
from multigemm.testing import batch_invariance

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["cupy", "triton", "numba", "cublas"])
def test_rows_ignore_their_neighbours(backend: str) -> None:
    count = batch_invariance.run(backend, torch.device("cuda"), 20.0, 11, True, False)
    assert count.comparisons or count.refused
    assert count.differing == 0, count.examples


def test_cublas_refuses_what_it_does_not_keep() -> None:
    a, b = torch.ones(8, 16, device="cuda"), torch.ones(1, 16, 8, device="cuda")
    with pytest.raises(mg.BackendUnsupported, match="depend on its neighbours"):
        mg.grouped_gemm(a, b, sizes=[8], backend="cublas", batch_invariant=True)


def test_a_graph_replays_the_bits_of_an_eager_call() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(300, 512, device="cuda").bfloat16(), torch.randn(3, 512, 256, device="cuda").bfloat16()
    plan = mg.plan(mg.GroupedGemmProblem(a, b, sizes=[100, 0, 200], batch_invariant=True))
    plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan()
    graph.replay()
    alone = mg.grouped_gemm(a[150:151], b[2:], sizes=[1], batch_invariant=True)
    assert torch.equal(out[150:151], alone)
