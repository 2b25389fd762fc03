"""A mixture of experts learns: four kinds of input, four rules, and a router that has to find them.

    python examples/moe_training.py

Each input carries a marker for its kind, and each kind has its own random linear rule. One small
network of the same active size cannot hold four rules; a mixture can, once its router sends each
kind to an expert of its own. Shows the loss falling and a table of which expert serves which kind.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from multigemm.nn import MoE

KINDS, WIDTH, HIDDEN, STEPS, BATCH = 4, 16, 24, 250, 256


def batch(rules: Tensor, make: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, answers, kinds): the first KINDS features say the kind, the rule of the kind gives the answer."""
    kinds = torch.randint(KINDS, (BATCH,), generator=make)
    x = torch.randn(BATCH, WIDTH, generator=make)
    x[:, :KINDS] = 2 * nn.functional.one_hot(kinds, KINDS)
    return x, torch.einsum("bi,bio->bo", x, rules[kinds]), kinds


def train(model: nn.Module, rules: Tensor, balance: float) -> list[float]:
    make = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        x, y, _ = batch(rules, make)
        if isinstance(model, MoE):
            out, logits = model(x, return_logits=True)
            share = logits.softmax(-1).mean(0)
            extra = balance * KINDS * (share * share).sum()  # smallest when all experts are used alike
        else:
            out, extra = model(x), torch.zeros(())
        loss = nn.functional.mse_loss(out, y)
        optimizer.zero_grad()
        (loss + extra).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    rules = torch.randn(KINDS, WIDTH, WIDTH) / WIDTH**0.5
    dense = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))
    moe = MoE(WIDTH, HIDDEN, KINDS, top_k=1, normalize=False)
    print(moe)
    plain, mixed = train(dense, rules, 0.0), train(moe, rules, 0.1)
    print(f"{'step':>6}{'one network':>14}{'mixture':>10}")
    for step in (0, 10, 50, 100, 200, STEPS - 1):
        print(f"{step:>6}{plain[step]:>14.3f}{mixed[step]:>10.3f}")

    x, _, kinds = batch(rules, torch.Generator().manual_seed(2))
    served = moe.route(x)[1][:, 0]
    print("rows: kind of input; columns: inputs that each expert got")
    for kind in range(KINDS):
        print(f"{kind:>6}  {torch.bincount(served[kinds == kind], minlength=KINDS).tolist()}")
    assert mixed[-1] < 0.5 * plain[-1], "the mixture should have learned more than one network"
    print(f"the mixture's loss is {plain[-1] / mixed[-1]:.1f} times smaller")


if __name__ == "__main__":
    main()
