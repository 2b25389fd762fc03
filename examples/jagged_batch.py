"""A jagged batch: sentences of different lengths, each multiplied by the matrix of its language. No padding.

    python examples/jagged_batch.py

Shows: one call for all groups, which backend ran it and why, the verified answer, gradients, and what padding
would have cost.
"""

from __future__ import annotations

import torch

import multigemm as mg

LENGTHS = [3, 47, 0, 12, 1, 130, 18, 6]
WIDTH, OUT = 96, 64


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.randn(sum(LENGTHS), WIDTH, device=device)
    matrices = torch.randn(len(LENGTHS), WIDTH, OUT, device=device)

    problem = mg.GroupedGemmProblem(tokens, matrices, sizes=LENGTHS, activation="gelu")
    result = mg.solve(problem)
    print(f"{len(LENGTHS)} products in one call: {tuple(tokens.shape)} -> {tuple(result.shape)} on {device}")
    print(mg.explain(problem))
    verdict = mg.verify(problem, result)
    print(f"against the float64 reference: {verdict}")
    assert verdict.ok

    rows = len(LENGTHS) * max(LENGTHS)
    print(
        f"padded to the longest sentence it would be {rows} rows instead of {sum(LENGTHS)}: {rows / sum(LENGTHS):.1f}x"
    )

    matrices.requires_grad_()
    mg.grouped_gemm(tokens, matrices, sizes=LENGTHS, activation="gelu").sum().backward()
    norms = [f"{norm:.1f}" for norm in matrices.grad.flatten(1).norm(dim=1).tolist()]
    print(f"norm of each matrix's gradient (the empty sentence's is exactly 0): {', '.join(norms)}")
    assert matrices.grad[LENGTHS.index(0)].abs().max() == 0


if __name__ == "__main__":
    main()
