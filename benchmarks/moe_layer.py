"""A mixture-of-experts layer, forward and with backward: multigemm beside transformers' own implementations.

    python benchmarks/moe_layer.py                        # on a GPU; needs transformers
    python benchmarks/moe_layer.py --device cpu --scale 64   # a small one, to see that it runs

Medians of interleaved calls, CUDA events around each; the layers share weights, tokens and routing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import multigemm.integrations.transformers  # noqa: F401  (registers the name "multigemm")

LAYERS = {  # experts, top k, hidden, intermediate, tokens
    "qwen3-30b": (128, 8, 2048, 768, 8192),
    "mixtral": (8, 2, 4096, 14336, 4096),
}
NAMES = ("multigemm", "grouped_mm", "eager")


def build(shape: tuple[int, ...], scale: int, device: str) -> tuple[Any, Tensor, Tensor, Tensor]:
    experts, top_k, hidden, inner, tokens = shape
    hidden, inner, tokens = (max(16, n // scale) for n in (hidden, inner, tokens))
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts)
    torch.manual_seed(0)
    layer = Qwen3MoeExperts(config).to(device=device, dtype=torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    weights, index = torch.topk(torch.randn(tokens, experts, device=device).softmax(-1), top_k)
    weights = (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16).requires_grad_()
    return layer, x, index, weights


def clock(call: Callable[[], Any], device: str) -> float:
    """Milliseconds of one call."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divides hidden, intermediate and token counts")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    print(f"{'layer':12}{'what':18}" + "".join(f"{name:>14}" for name in NAMES) + "   ms; times of multigemm's")
    for title, shape in LAYERS.items():
        layer, x, index, weights = build(shape, args.scale, args.device)
        leaves, grad = [x, weights, *layer.parameters()], torch.randn_like(x)

        def call(name: str, backward: bool, parts: Any = (layer, x, index, weights, leaves, grad)) -> None:
            layer, x, index, weights, leaves, grad = parts
            layer.config._experts_implementation_internal = name
            with torch.set_grad_enabled(backward):
                y = layer(x, index, weights)
                if backward:
                    torch.autograd.grad(y, leaves, grad)

        for backward in (False, True):
            for name in NAMES:
                call(name, backward)
            runs: dict[str, list[float]] = {name: [] for name in NAMES}
            for _ in range(args.rounds):
                for name in NAMES:
                    runs[name].append(clock(lambda name=name, b=backward: call(name, b), args.device))
            medians = {name: statistics.median(times) for name, times in runs.items()}
            cells = [f"{m:9.2f}{m / medians['multigemm']:5.2f}" for m in medians.values()]
            print(f"{title:12}{'forward+backward' if backward else 'forward':18}" + "".join(cells))


if __name__ == "__main__":
    main()
