"""A mixture-of-experts layer, forward and with backward: multigemm beside transformers' own implementations.

    python benchmarks/moe_layer.py                            # on a GPU; needs transformers
    python benchmarks/moe_layer.py --device cpu --scale 64    # a small one, to see that it runs

Medians by the one clock of multigemm, calls interleaved and without pauses, since what ran before sets the clock of
the chip; the layers share weights, tokens and routing. Two floors are measured beside them: "dense" is torch.mm alone
on two products with the same FLOPs, and "weights" the time to read once the weights of all experts that have a token,
at the rate at which the machine copies. No layer can be faster than either, so eager's time over the longer of them
("at most") is the largest speed-up that anyone can reach.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import multigemm.integrations.transformers  # noqa: F401  (registers the name "multigemm")
from multigemm.bench.machine import copy_tbps
from multigemm.select.timing import measure

LAYERS = {  # experts, top k, hidden, intermediate
    "mixtral": (8, 2, 4096, 14336),
    "qwen3-30b": (128, 8, 2048, 768),
}
NAMES = ("multigemm", "grouped_mm", "eager")
FLOORS = ("dense", "weights")


def build(shape: tuple[int, ...], tokens: int, scale: int, device: str) -> tuple[Any, Tensor, Tensor, Tensor]:
    experts, top_k, hidden, inner = shape
    hidden, inner, tokens = (max(16, n // scale) for n in (hidden, inner, tokens))
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts)
    torch.manual_seed(0)
    with torch.device(device):
        layer = Qwen3MoeExperts(config).to(torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    weights, index = torch.topk(torch.randn(tokens, experts, device=device).softmax(-1), top_k)
    return layer, x, index, (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16)


def forward(layer: Any, name: str, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    layer.config._experts_implementation_internal = name
    with torch.no_grad():
        y: Tensor = layer(x, index, weights)
    return y


def step(layer: Any, name: str, x: Tensor, index: Tensor, weights: Tensor, grad: Tensor) -> Any:
    """Forward and all gradients."""
    layer.config._experts_implementation_internal = name
    leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_(), *layer.parameters()]
    return torch.autograd.grad(layer(leaves[0], index, leaves[1]), leaves, grad)


def dense(pairs: int, layer: Any) -> Callable[[], Any]:
    """Both products of the layer as torch.mm, as if all pairs of token and expert had one expert."""
    up, down = layer.gate_up_proj[0].detach(), layer.down_proj[0].detach()
    rows = torch.randn(pairs, up.shape[1], dtype=up.dtype, device=up.device)
    hidden = torch.randn(pairs, down.shape[1], dtype=up.dtype, device=up.device)
    return lambda: (rows @ up.T, hidden @ down.T)


def bytes_read(layer: Any, index: Tensor) -> int:
    """The weights of the experts that have a token: a layer reads each of them at least once."""
    expert = sum(weight[0].numel() * weight.element_size() for weight in (layer.gate_up_proj, layer.down_proj))
    return int(index.unique().numel()) * expert


def medians(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """Milliseconds of each; raises what a call raised."""
    taken = measure(calls, device, "sustained", reps=rounds, min_reps=rounds)
    if failed := next((timing for timing in taken.values() if timing.error), None):
        raise RuntimeError(f"{failed.name}: {failed.error}")
    return {name: timing.median / 1e3 for name, timing in taken.items()}


def row(title: str, tokens: int, what: str, ms: dict[str, float]) -> str:
    """One line of the table: milliseconds, and how often multigemm's time goes into them."""
    cells = [f"{ms['multigemm']:.3f}", *(f"{ms[n]:.3f} ({ms[n] / ms['multigemm']:.2f}x)" for n in NAMES[1:])]
    floors = [ms[n] for n in FLOORS if n in ms]
    most = f"{ms['eager'] / max(floors):.2f}x" if floors else ""
    return (
        "| " + " | ".join([title, str(tokens), what, *cells, *([f"{f:.3f}" for f in floors] or ["", ""]), most]) + " |"
    )


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divides hidden, intermediate and token counts")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=numbers, default="1,16,64,256,1024,4096,16384", help="of the forward passes")
    parser.add_argument(
        "--trained", type=numbers, default="64,1024,8192", help="token counts of the passes with backward"
    )
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no CUDA GPU; to try it out: --device cpu --scale 64")
    table = []
    print("| layer | tokens | | " + " | ".join((*NAMES, *FLOORS)) + " | at most |\n|" + "---|" * 9)
    for title, shape in LAYERS.items():
        layer, *inputs = build(shape, max(args.tokens + args.trained), args.scale, args.device)
        grad = torch.randn_like(inputs[0])
        rate = copy_tbps(torch.device(args.device)) * 1e9  # bytes per ms
        for tokens, backward in [*((n, False) for n in args.tokens), *((n, True) for n in args.trained)]:
            x, index, weights = (part[: max(1, tokens // args.scale)] for part in inputs)
            if backward:
                work: Any = partial(step, layer, x=x, index=index, weights=weights, grad=grad[: len(x)])
            else:
                work = partial(forward, layer, x=x, index=index, weights=weights)
            calls: dict[str, Callable[[], Any]] = {name: partial(work, name=name) for name in NAMES}
            if not backward:
                calls["dense"] = dense(index.numel(), layer)
            found = medians(calls, args.rounds, args.device)
            if not backward:
                found["weights"] = bytes_read(layer, index) / rate
            what = "forward+backward" if backward else "forward"
            table.append({"layer": title, "tokens": tokens, "what": what, "ms": found})
            print(row(title, tokens, what, found), flush=True)
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        args.json.write_text(json.dumps({"device": name, **versions, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
