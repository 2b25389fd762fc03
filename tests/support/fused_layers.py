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


def layer_problem(seed: int, device: torch.device | str = "cpu", largest: int = 260) -> Drawn:
    """The problem of a seed: jagged m, batched or masked, mostly with picked rows and a gate."""
    rng = np.random.default_rng(seed)
    memory, pick = AlignedMemory(rng, torch.device(device)), lambda options: options[int(rng.integers(len(options)))]
    dtype, whole = pick((torch.bfloat16, torch.float16)), bool(rng.integers(2))
    groups, k = int(rng.integers(1, 6)), 8 * int(rng.integers(1, 26))
    form = pick(("jagged_m", "jagged_m", "jagged_m", "batched", "masked"))
    gate = pick((*GATES, "swiglu", "reglu" if whole else "swiglu", None))
    n = 2 * int(rng.integers(1, 150)) if gate and rng.integers(3) == 0 else 16 * int(rng.integers(1, 36))
    by_columns = bool(n % 8) or bool(rng.integers(2))
    traits = {f"form:{form}", f"dtype:{dtype}", f"gate:{gate}", f"weights:{'col' if by_columns else 'row'}"}

    def numbers(*shape: int) -> Tensor:
        found = rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape)
        return torch.from_numpy(np.asarray(found, dtype=np.float64)).to(dtype)

    keywords: dict[str, Any] = {}
    sizes = [int(pick((0, 1, 7, 8, 31, 64, 65, 130, 200, largest))) for _ in range(groups)]
    tokens, m = sum(sizes), int(rng.integers(1, largest))
    shape: tuple[int, ...] = (tokens, n)
    if form == "jagged_m":
        keywords["sizes" if rng.integers(2) else "ends"] = sizes
        if "ends" in keywords:
            ends = np.cumsum(sizes)
            shape = (int(rng.integers(0, 9)) + tokens, n)
            keywords["ends"] = torch.from_numpy(ends).to(device)
        rows = int(pick((0, 1, 40, 300)))
        if rng.integers(4):
            traits.add("a_rows")
            index = rng.integers(0, max(rows, 1), shape[0])
            if rng.integers(2) or not rows:
                wrong = rng.integers(0, 3, shape[0]) == 0 if rows else np.ones(shape[0], bool)
                index[wrong] = rng.choice((*LIES, rows), int(wrong.sum()))
            kind = pick((torch.int32, torch.int64))
            keywords["a_rows"] = memory.place("a_rows", torch.from_numpy(index).to(kind))
        else:
            rows = shape[0]
        a = memory.place("a", numbers(rows, k))
    else:
        shape = (groups, m, n)
        a = memory.place("a", numbers(groups, m, k))
        if form == "masked":
            keywords["valid_rows"] = [int(x) for x in rng.integers(0, m + 1, groups)]
    b = numbers(groups, k, n)
    b = memory.place("b", b.mT.contiguous()).mT if by_columns else memory.place("b", b)
    if gate:
        layout = pick(GLU_LAYOUTS)
        traits.add(f"layout:{layout}")
        keywords |= {"activation": gate, "glu_layout": layout}
        if rng.integers(2):
            keywords |= {"glu_beta": 1.0, "glu_limit": pick((2.0, 7.0))}
        if gate == "swiglu" and rng.integers(2):
            keywords["glu_alpha"] = 1.702
    elif rng.integers(3) == 0:
        keywords["activation"] = pick(ACTIVATIONS)
    if rng.integers(2):
        traits.add("bias")
        keywords["bias"] = memory.place("bias", numbers(groups, n).to(pick((dtype, torch.float32))))
    if form != "batched" and rng.integers(2):
        traits.add("row_scale")
        keywords["row_scale"] = memory.place("row_scale", numbers(*shape[:-1]).to(pick((dtype, torch.float32))))
    if rng.integers(4) == 0:
        keywords["alpha"] = -0.5
    if keywords.get("activation") and rng.integers(2):
        traits.add("preact_out")
        keywords["preact_out"] = memory.place("preact_out", torch.full(shape, torch.nan, dtype=dtype), True)
    width = n // 2 if gate else n
    if form == "jagged_m" and rng.integers(3) == 0:
        traits.add("combine")
        index = torch.from_numpy(rng.integers(-2, shape[0] + 2, (19, 3)))
        keywords["combine"] = (index.to(device), torch.from_numpy(rng.integers(-2, 3, (19, 3))).float().to(device))
    elif rng.integers(2):
        traits.add("out")
        keywords["out"] = memory.place("out", torch.full((*shape[:-1], width), torch.nan, dtype=dtype), True)
    return Drawn(GroupedGemmProblem(a, b, **keywords), frozenset(traits), memory, a, b, keywords)
