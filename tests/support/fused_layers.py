"""Fused problems as layers have them, which the copy engine can read: aligned, in 16 bits, in guarded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ACTIVATIONS, GATES, GLU_LAYOUTS
from multigemm.testing.fused_problems import BAND, Drawn, Memory
from multigemm.testing.placed_case import bits

LIES = (-1, 2**31 - 1, -(2**31))


class AlignedMemory(Memory):
    """Tensors without gaps, whose rows begin at multiples of 16 bytes, between bands of poison."""

    def place(self, name: str, x: Tensor, written: bool = False) -> Tensor:
        """The same numbers between bands, on the device, contiguous."""
        poison = torch.nan if x.is_floating_point() else 2**31 - 1
        held = torch.full((2 * BAND + x.numel() + 8,), poison, dtype=x.dtype)
        held.as_strided(x.shape, x.contiguous().stride(), BAND).copy_(x)
        held = held.to(self._device)
        found = held.as_strided(x.shape, x.contiguous().stride(), BAND)
        self._blocks.append((name, held, held.clone(), found if written else None))
        assert bits(found).shape == x.shape
        return found


class _Draw:
    """The choices of one seed."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.rng = np.random.default_rng(seed)
        self.device, self.memory = device, AlignedMemory(self.rng, torch.device(device))
        self.dtype, self.whole = self.pick((torch.bfloat16, torch.float16)), bool(self.rng.integers(2))
        self.traits, self.keywords = {f"dtype:{self.dtype}"}, dict[str, Any]()

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def numbers(self, *shape: int) -> Tensor:
        found = self.rng.integers(-2, 3, shape) if self.whole else self.rng.standard_normal(shape)
        return torch.from_numpy(np.asarray(found, dtype=np.float64)).to(self.dtype)

    def put(self, name: str, x: Tensor, written: bool = False) -> Tensor:
        """A tensor in guarded memory as the keyword of this name."""
        self.traits.add(name)
        self.keywords[name] = self.memory.place(name, x, written)
        return self.keywords[name]

    def index(self, name: str, tokens: int) -> int:
        """Row numbers for so many tokens; how many rows there are to be picked."""
        rows, rng = int(self.pick((0, 1, 40, 300))), self.rng
        index = rng.integers(0, max(rows, 1), tokens)
        if rng.integers(2) or not rows:
            wrong = rng.integers(0, 3, tokens) == 0 if rows else np.ones(tokens, bool)
            index[wrong] = rng.choice((*LIES, rows), int(wrong.sum()))
        self.put(name, torch.from_numpy(index).to(self.pick((torch.int32, torch.int64))))
        return rows


def _cut(draw: _Draw, largest: int) -> int:
    """Sizes of groups, or ends with rows behind them that no group owns; the number of tokens."""
    rng, groups = draw.rng, int(draw.rng.integers(1, 6))
    sizes = [int(draw.pick((0, 1, 7, 8, 31, 64, 65, 130, 200, largest))) for _ in range(groups)]
    if rng.integers(2):
        draw.keywords["sizes"] = sizes
        return sum(sizes)
    draw.keywords["ends"] = torch.from_numpy(np.cumsum(sizes)).to(draw.device)
    return sum(sizes) + int(rng.integers(0, 9))


def _weight_gradient(draw: _Draw, largest: int) -> tuple[Tensor, Tensor]:
    """Tokens are a jagged k, and rows of one operand are picked."""
    tokens, m, n = _cut(draw, largest), 8 * int(draw.rng.integers(1, 40)), 8 * int(draw.rng.integers(1, 40))
    draw.keywords["jagged"] = "k"
    name = draw.pick(("a_rows", "b_rows"))
    rows = draw.index(name, tokens)
    a = draw.memory.place("a", draw.numbers(rows if name == "a_rows" else tokens, m)).mT
    b = draw.memory.place("b", draw.numbers(rows if name == "b_rows" else tokens, n))
    groups = len(draw.keywords.get("sizes", draw.keywords.get("ends")))
    if draw.rng.integers(2):
        turned = bool(draw.rng.integers(2))
        out = draw.put(
            "out", torch.full((groups, n, m) if turned else (groups, m, n), torch.nan, dtype=draw.dtype), True
        )
        draw.keywords["out"] = out.mT if turned else out
    return a, b


def layer_problem(seed: int, device: torch.device | str = "cpu", largest: int = 260) -> Drawn:
    """The problem of a seed: jagged m, batched or masked, mostly with picked rows and a gate; or a weight gradient."""
    draw = _Draw(seed, device)
    form = draw.pick(("jagged_m", "jagged_m", "jagged_m", "batched", "masked", "jagged_k"))
    draw.traits.add(f"form:{form}")
    a, b = _weight_gradient(draw, largest) if form == "jagged_k" else _layer(draw, form, largest)
    return Drawn(GroupedGemmProblem(a, b, **draw.keywords), frozenset(draw.traits), draw.memory, a, b, draw.keywords)


def _gate(draw: _Draw) -> bool:
    rng, gate = draw.rng, draw.pick((*GATES, "swiglu", "reglu" if draw.whole else "swiglu", None))
    draw.traits.add(f"gate:{gate}")
    if not gate:
        draw.keywords["activation"] = draw.pick((None, None, *ACTIVATIONS))
        return False
    layout = draw.pick(GLU_LAYOUTS)
    draw.traits.add(f"layout:{layout}")
    draw.keywords |= {"activation": gate, "glu_layout": layout}
    if rng.integers(2):
        draw.keywords |= {"glu_beta": 1.0, "glu_limit": draw.pick((2.0, 7.0))}
    if gate == "swiglu" and rng.integers(2):
        draw.keywords["glu_alpha"] = 1.702
    return True


def _layer(draw: _Draw, form: str, largest: int) -> tuple[Tensor, Tensor]:
    rng, k = draw.rng, 8 * int(draw.rng.integers(1, 26))
    gated = _gate(draw)
    n = 2 * int(rng.integers(1, 150)) if gated and rng.integers(3) == 0 else 16 * int(rng.integers(1, 36))
    if form == "jagged_m":
        tokens = _cut(draw, largest)
        groups, shape = len(draw.keywords.get("sizes", draw.keywords.get("ends"))), (tokens, n)
        a = draw.memory.place("a", draw.numbers(draw.index("a_rows", tokens) if rng.integers(4) else tokens, k))
    else:
        groups, m = int(rng.integers(1, 6)), int(rng.integers(1, largest))
        shape = (groups, m, n)
        a = draw.memory.place("a", draw.numbers(groups, m, k))
        if form == "masked":
            draw.keywords["valid_rows"] = [int(x) for x in rng.integers(0, m + 1, groups)]
    by_columns, b = bool(n % 8) or bool(rng.integers(2)), draw.numbers(groups, k, n)
    draw.traits.add(f"weights:{'col' if by_columns else 'row'}")
    b = draw.memory.place("b", b.mT.contiguous()).mT if by_columns else draw.memory.place("b", b)
    if rng.integers(2):
        draw.put("bias", draw.numbers(groups, n).to(draw.pick((draw.dtype, torch.float32))))
    if form != "batched" and rng.integers(2):
        draw.put("row_scale", draw.numbers(*shape[:-1]).to(draw.pick((draw.dtype, torch.float32))))
    if rng.integers(4) == 0:
        draw.keywords["alpha"] = -0.5
    if draw.keywords.get("activation") and rng.integers(2):
        draw.put("preact_out", torch.full(shape, torch.nan, dtype=draw.dtype), True)
    if form == "jagged_m" and rng.integers(3) == 0:
        draw.traits.add("combine")
        index = torch.from_numpy(rng.integers(-2, shape[0] + 2, (19, 3)))
        weights = torch.from_numpy(rng.integers(-2, 3, (19, 3))).float()
        draw.keywords["combine"] = (index.to(draw.device), weights.to(draw.device))
    elif rng.integers(2):
        width = n // 2 if gated else n
        draw.put("out", torch.full((*shape[:-1], width), torch.nan, dtype=draw.dtype), True)
    return a, b
