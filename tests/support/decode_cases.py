"""Layers for few tokens, by the kernels of `decode_kernels` in Triton's interpreter, beside the loop over pairs.

TRITON_INTERPRET=1 python -m tests.support.decode_cases
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from multigemm.integrations import layer_ops
from multigemm.integrations.expert_network import Network
from multigemm.integrations.gradients import gate_by_torch
from tests.support.triton_interpreted import quicken

EXPERTS, TOP_K, HIDDEN, INNER = 5, 3, 70, 38
GPT_OSS = Network("swiglu", "interleaved", 1.702, 1.0, 0.7)
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def by_pairs(net: Network, x: Tensor, index: Tensor, weights: Tensor, *parameters: Any) -> Tensor:
    """The layer in float64, pair by pair."""
    up, down, up_bias, down_bias = (None if t is None else t.double() for t in parameters)
    assert up is not None and down is not None
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, row in enumerate(index.tolist()):
        for j, expert in enumerate(row):
            if not 0 <= expert < len(up):
                continue
            first, second = up[expert].t(), down[expert].t()
            h = x[token : token + 1].double() @ first
            h = gate_by_torch(h if up_bias is None else h + up_bias[expert], net.activation, net.gate)
            y = h @ second
            y = y if down_bias is None else y + down_bias[expert]
            out[token] += weights[token, j].double() * y[0]
    return out


def networks() -> Iterator[tuple[Network, bool]]:
    """Networks with every gate and every layout, and whether they have biases."""
    layouts = ("halves", "interleaved", "halves_up_first")
    for number, kind in enumerate(("swiglu", "geglu", "geglu_tanh", "reglu", "glu")):
        yield Network(kind, layouts[number % 3]), number % 2 == 1
    yield GPT_OSS, True


def parameters_of(bias: bool, dtype: torch.dtype, device: str, sizes: tuple[int, int, int]) -> list[Any]:
    experts, hidden, inner = sizes
    made: list[Any] = []
    for out, deep in ((2 * inner, hidden), (hidden, inner)):
        made.append((torch.randn(experts, out, deep, device=device) / deep**0.5).to(dtype))
    return made + [torch.randn(experts, n, device=device).to(dtype) if bias else None for n in (2 * inner, hidden)]


def interpreted(x: Tensor, *steps: Any) -> None:
    """Runs steps in the interpreter, on memory that was written before."""
    for step in steps:
        for name in {"hidden", "out"} & set(step.values):
            step.values[name].fill_(float("nan"))
    for step in steps:
        step.kernel[step.grid](**step.values)


def main() -> None:
    quicken()
    torch.manual_seed(0)
    kernels: Any = layer_ops.decode_kernels()
    kernels.run_steps = interpreted
    dtypes = cycle((torch.float32, torch.bfloat16, torch.float64))
    for number, (net, bias) in enumerate(networks()):
        tokens, dtype = 1 + number % 2, next(dtypes)
        x = torch.randn(tokens, HIDDEN).to(dtype)
        weights = torch.rand(tokens, TOP_K).to(torch.float32 if number == 1 else dtype)
        index = torch.randint(-2, EXPERTS + 2, (tokens, TOP_K))
        index[-1] = torch.tensor([EXPERTS - 1, 2**31 + 1, EXPERTS - 1])  # one twice, and one that lies
        if number == 2:  # one expert for each token
            index, weights = index[:, :1].to(torch.uint8), weights[:, :1]
        parameters = parameters_of(bias, dtype, "cpu", (EXPERTS, HIDDEN, INNER))
        kernels.FEW_COLUMNS = 8 - 4 * (number % 2)
        kernels.SUMMED_BYTES, kernels.WHOLE_BYTES, kernels.GATED_BYTES = 512, 512 * (number % 3), 128  # several pieces
        got = kernels.decode(net, x, index, weights, *parameters)
        want = by_pairs(net, x, index, weights, *parameters)
        off = float((got.double() - want).norm() / want.norm())
        assert off < LIMITS[dtype], (net, tokens, dtype, off)
    print("right")


if __name__ == "__main__":
    main()
