"""A small MoE transformer whose answer to a prompt has the same bits alone and in a batch of 64.

    python examples/batch_invariant.py

Shows: with `batch_invariant=True` in every product, the logits of a prompt and its greedily decoded tokens do not
depend on the rest of the batch, in the prefill and in every step of decoding. The same weights without it, with
torch's own products for the dense layers, differ; the script says where. torch computes what involves one sequence
only: a row's norm, the attention of a sequence to itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multigemm as mg
from multigemm.nn import MoE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32  # in 16 bits, sums in another order mostly round to the same number
WIDTH, INNER = (1024, 1536) if DEVICE == "cuda" else (128, 192)
VOCABULARY, HEADS, LAYERS, EXPERTS, TOP_K = 512, 4, 2, 8, 2
LONGEST, STEPS, BATCH = 56, 8, 64


@dataclass
class Sequence:
    """A prompt and what was decoded; `keys` and `values` [tokens, HEADS, head] of each layer."""

    tokens: list[int]
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Block(nn.Module):
    """Attention, then a mixture of experts, on rows of all sequences packed together."""

    def __init__(self, invariant: bool) -> None:
        super().__init__()
        place = {"device": DEVICE, "dtype": DTYPE}
        self.invariant = invariant
        self.qkv = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH, **place) / WIDTH**0.5)
        self.proj = nn.Parameter(torch.randn(WIDTH, WIDTH, **place) / WIDTH**0.5)
        self.moe = MoE(
            WIDTH, INNER, EXPERTS, TOP_K, activation="silu", batch_invariant=invariant, device=DEVICE, dtype=DTYPE
        )

    def forward(self, x: Tensor, sequences: list[Sequence], lengths: list[int], layer: int) -> Tensor:
        q, k, v = (
            product(norm(x, self.invariant), self.qkv, self.invariant).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
        )
        mixed = []
        for sequence, *rows in zip(sequences, *(part.split(lengths) for part in (q, k, v)), strict=True):
            mixed.append(attend(sequence, layer, *rows))
        x = x + product(torch.cat(mixed), self.proj, self.invariant)
        y = self.moe(norm(x, self.invariant))
        assert isinstance(y, Tensor)
        return x + y


class Model(nn.Module):
    """Embeddings of tokens and places, blocks, and logits over the vocabulary."""

    def __init__(self, invariant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.invariant = invariant
        self.tokens = nn.Parameter(torch.randn(VOCABULARY, WIDTH, device=DEVICE, dtype=DTYPE))
        self.places = nn.Parameter(torch.randn(LONGEST, WIDTH, device=DEVICE, dtype=DTYPE))
        self.blocks = nn.ModuleList(Block(invariant) for _ in range(LAYERS))

    def forward(self, sequences: list[Sequence]) -> Tensor:
        """The logits of each sequence's last token; reads the tokens that no cache holds."""
        known = [len(s.keys[0]) if s.keys else 0 for s in sequences]
        lengths = [len(s.tokens) - start for s, start in zip(sequences, known, strict=True)]
        fresh = [token for s, start in zip(sequences, known, strict=True) for token in s.tokens[start:]]
        places = [place for s, start in zip(sequences, known, strict=True) for place in range(start, len(s.tokens))]
        x = self.tokens[torch.tensor(fresh, device=DEVICE)] + self.places[torch.tensor(places, device=DEVICE)]
        for layer, block in enumerate(self.blocks):
            x = block(x, sequences, lengths, layer)
        last = x[torch.tensor(lengths, device=DEVICE).cumsum(0) - 1]
        return product(norm(last, self.invariant), self.tokens.T, self.invariant)


def product(x: Tensor, weight: Tensor, invariant: bool) -> Tensor:
    """x @ weight: as a grouped GEMM of one group, or as everybody does."""
    return mg.grouped_gemm(x, weight, batch_invariant=True) if invariant else x @ weight


def norm(x: Tensor, invariant: bool) -> Tensor:
    """x over the root of its mean square, which is a product with a column of ones."""
    wide = x.float()
    ones = torch.full((WIDTH, 1), 1 / WIDTH, device=DEVICE)
    mean = product(wide * wide, ones, True) if invariant else (wide * wide).mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean + 1e-6)).to(x.dtype)


def attend(sequence: Sequence, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention of one sequence's new tokens to all of its own: no other sequence is in these products."""
    if layer == len(sequence.keys):
        sequence.keys.append(k)
        sequence.values.append(v)
    else:
        sequence.keys[layer] = torch.cat((sequence.keys[layer], k))
        sequence.values[layer] = torch.cat((sequence.values[layer], v))
    keys, values = sequence.keys[layer].transpose(0, 1), sequence.values[layer].transpose(0, 1)
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2)).float() / (WIDTH // HEADS) ** 0.5
    seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=DEVICE).tril(keys.shape[1] - len(q))
    weights = F.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1).to(values.dtype)
    return (weights @ values).transpose(0, 1).reshape(len(q), WIDTH)


@torch.no_grad()
def decode(model: Model, prompts: list[list[int]]) -> tuple[Tensor, list[list[int]]]:
    """The logits behind each prompt, and the tokens that the greedy choice appends."""
    sequences = [Sequence(list(prompt)) for prompt in prompts]
    logits = first = model(sequences)
    for _ in range(STEPS):
        for sequence, token in zip(sequences, logits.argmax(dim=-1).tolist(), strict=True):
            sequence.tokens.append(token)
        logits = model(sequences)
    return first, [s.tokens[len(p) :] for s, p in zip(sequences, prompts, strict=True)]


def compare(invariant: bool, prompts: list[list[int]]) -> bool:
    """Whether prompts alone give what they give in the batch; says where not."""
    model = Model(invariant)
    together, tokens = decode(model, prompts)
    same = True
    for index in (0, 17, 63):
        alone, (decoded,) = decode(model, [prompts[index]])
        different = alone[0] != together[index]
        where = f"prompt {index} ({len(prompts[index])} tokens)"
        if different.any():
            gap = (alone[0].float() - together[index].float()).abs().max()
            print(f"  {where}: {int(different.sum())} of {VOCABULARY} logits differ, by up to {gap:.2e}")
        step = next((s for s, pair in enumerate(zip(decoded, tokens[index], strict=True)) if len(set(pair)) > 1), None)
        if step is not None:
            print(f"  {where}: another token at step {step}: {decoded[step]} alone, {tokens[index][step]} in the batch")
        same &= not different.any() and step is None
    return bool(same)


def main() -> None:
    source = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, LONGEST - STEPS - 1, (BATCH,), generator=source).tolist()
    prompts = [torch.randint(VOCABULARY, (n,), generator=source).tolist() for n in lengths]
    print(f"{BATCH} prompts of {min(lengths)} to {max(lengths)} tokens, {STEPS} steps of decoding, {DTYPE} on {DEVICE}")
    print("with batch_invariant=True:")
    same = compare(True, prompts)
    print("  the same logits, bit for bit, and the same tokens" if same else "  NOT the same")
    print("without it:")
    if compare(False, prompts):
        print("  no difference on this machine")
    assert same


if __name__ == "__main__":
    main()
