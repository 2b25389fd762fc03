"""A small mixture-of-experts language model learns with fused experts what it learns with a plain loop over them.

    python examples/moe_language_model.py                     # 60 steps on the CPU
    python examples/moe_language_model.py --steps 2000 --device cuda --width 512 --experts 64

It reads characters of a text that it makes: sentences of a small grammar, so that a model has words, agreement and
punctuation to find. Two models with the same first weights see the same batches: one with `nn.MoE(fused=True)`, one
with experts in plain torch. Prints both loss curves, how far they are apart, and how far two seeds are.
"""

from __future__ import annotations

import argparse
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multigemm.nn import MoE

LENGTH, BATCH = 32, 8


def text(sentences: int = 2000) -> str:
    """Sentences of a grammar: who does what to whom, how and where."""
    draw = random.Random(0)
    who, verbs = ("the cat", "a dog", "my sister", "their teacher", "the old man"), ("sees", "likes", "finds", "calls")
    how, where = ("quietly", "at once", "again", "with care"), ("in the house", "by the river", "under a tree")
    return " ".join(
        f"{draw.choice(who)} {draw.choice(verbs)} {draw.choice(who)} {draw.choice(how)} {draw.choice(where)}."
        for _ in range(sentences)
    )


class PlainMoE(MoE):
    """The same layer, by a loop over experts in plain torch."""

    def forward(self, x: Tensor, return_logits: bool = False) -> Tensor:
        """x [..., H] -> [..., H]."""
        rows = x.reshape(-1, x.shape[-1])
        _, index, weights = self.route(rows)
        held: dict[str, Tensor] = dict(self.experts.named_parameters())
        up, down = held["gate_up_proj"], held["down_proj"]
        y = torch.zeros_like(rows)
        for expert in range(self.experts.num_experts):
            token, place = (index == expert).nonzero(as_tuple=True)
            gate, value = (rows[token] @ up[expert].T).chunk(2, dim=-1)
            h = (F.silu(gate) * value) @ down[expert].T
            y = y.index_add(0, token, h * weights[token, place, None].to(h.dtype))
        return y.view(x.shape)


class Block(nn.Module):
    """Attention over what came before, then a mixture of experts."""

    def __init__(self, width: int, moe: MoE) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.moe = nn.Linear(width, 3 * width), moe

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, length, width]."""
        q, k, v = self.attend(self.norms[0](x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = x + self.moe(self.norms[1](x))
        return y


class LanguageModel(nn.Module):
    """Characters in, logits of the next one out."""

    def __init__(self, kinds: int, width: int, experts: int, layer: type[MoE], **options: object) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(kinds, width), nn.Embedding(LENGTH, width)
        made = (layer(width, 2 * width, experts, top_k=2, **options) for _ in range(2))  # type: ignore[arg-type]
        self.blocks = nn.Sequential(*(Block(width, moe) for moe in made))
        self.head = nn.Linear(width, kinds)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, length]."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        out: Tensor = self.head(self.blocks(x))
        return out


def curve(
    layer: type[MoE], steps: int, seed: int = 0, device: str = "cpu", width: int = 32, experts: int = 8,
    **options: object,
) -> list[float]:  # fmt: skip
    """The loss of each step of a training run; `seed` chooses the first weights and the batches."""
    known = text()
    alphabet = sorted(set(known))
    data = torch.tensor([alphabet.index(x) for x in known])
    torch.manual_seed(seed)
    model = LanguageModel(len(alphabet), width, experts, layer, **options).to(device)
    optimizer, draw, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=draw)
        pieces = torch.stack([data[s : s + LENGTH + 1] for s in starts.tolist()]).to(device)
        logits = model(pieces[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def apart(one: list[float], other: list[float]) -> float:
    """The mean distance of two curves."""
    return sum(abs(x - y) for x, y in zip(one, other, strict=True)) / len(one)


def main() -> None:
    """Trains the three and prints what came of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--experts", type=int, default=8)
    given = vars(parser.parse_args())
    fused, plain = curve(MoE, fused=True, **given), curve(PlainMoE, **given)
    other = curve(PlainMoE, seed=1, **given)
    for step in range(0, given["steps"], max(1, given["steps"] // 10)):
        print(f"step {step:5}: loss {fused[step]:.4f} fused, {plain[step]:.4f} plain, {other[step]:.4f} another seed")
    print(f"apart: fused from plain {apart(fused, plain):.1e}, another seed from plain {apart(other, plain):.1e}")


if __name__ == "__main__":
    main()
