"""One mixture-of-experts layer, forward, with weights and activations in several formats: time and error.

    python benchmarks/quantised_layer.py                          # DeepSeek-V3's layer, on a GPU with 60 GB
    python benchmarks/quantised_layer.py --device cpu --scale 32  # a small one, to see that it runs

bf16: everything in bfloat16. fp8-blocks: weights in float8 with scales of 128 x 128, activations quantised 1 x 128
before both products, as DeepSeek-V3 has it. fp8, mxfp4: weights alone, under bfloat16 activations
(`Experts.quantize_`). Times are medians of replays of a CUDA graph that begin with cold caches; quantising
activations, routing, gathers, the gate and the weighted sum are in them. The error is that of the result against
float32 with unquantised weights: root of the sum of squares over that of the result.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import multigemm as mg
from multigemm.integrations.layer_ops import swiglu
from multigemm.integrations.quantised_weights import quantize_stack
from multigemm.integrations.routing import combine, dispatch, route
from multigemm.nn import Experts
from multigemm.select.timing import measure

LAYER = (256, 8, 7168, 2048)
"""Experts, top k, hidden, intermediate."""
WEIGHTS = ("gate_up_proj", "down_proj")
E8M0 = torch.float8_e8m0fnu
WEIGHTS_ONLY = {"fp8": ("e4m3", "128x128", torch.float32), "mxfp4": ("e2m1", "1x32", E8M0)}
CHUNK = 4
"""Experts quantised at a time."""


def stack(weights: Tensor, format: Any, scale: str, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of all experts."""
    parts = [quantize_stack(part, format, scale, scale_dtype) for part in torch.split(weights, CHUNK)]
    return joined([part.data for part in parts]), joined([part.scale for part in parts])


def joined(parts: list[Tensor]) -> Tensor:
    """One stack; through bytes, since a GPU joins no float8_e8m0fnu."""
    size = parts[0].dtype.itemsize
    return torch.cat([x.view(torch.uint8) for x in parts]).view(parts[0].dtype) if size == 1 else torch.cat(parts)


def layer_of(dense: Experts, format: Any, scale: str, scale_dtype: torch.dtype) -> Experts:
    """The layer after `quantize_`, a few experts at a time."""
    held = copy(dense)
    held._parameters, held._buffers = dict(dense._parameters), dict(dense._buffers)
    for name in WEIGHTS:
        data, numbers = stack(getattr(dense, name).detach(), format, scale, scale_dtype)
        held._parameters[name] = torch.nn.Parameter(data, requires_grad=False)
        held.register_buffer(f"{name}_scale", numbers)
    held.weight_format = format
    return held


def float8_layer(held: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Both products in float8, by the weights of a layer in float8: tokens are quantised once, and gathered with their
    scales."""

    def product(name: str, rows: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
        weights, numbers = getattr(held, name).mT, getattr(held, f"{name}_scale").mT
        found: Tensor = mg.grouped_gemm(
            rows, weights, ends=ends, scale_a=scale, scale_b=numbers, out_dtype=torch.bfloat16
        )
        return found

    def forward(x: Tensor, index: Tensor, top: Tensor) -> Tensor:
        routing = route(index, held.num_experts)
        tokens = mg.quantize.quantize(x, "e4m3", "1x128")
        rows = dispatch(tokens.data.view(torch.uint8), routing).view(tokens.data.dtype)
        hidden = swiglu(product(WEIGHTS[0], rows, dispatch(tokens.scale, routing), routing.ends))
        inner = mg.quantize.quantize(hidden, "e4m3", "1x128")
        return combine(product(WEIGHTS[1], inner.data, inner.scale, routing.ends), top, routing)

    return forward


def exact(dense: Experts, x: Tensor, index: Tensor, top: Tensor) -> Tensor:
    """The layer in float32 and without TF32, expert by expert."""
    found = torch.zeros(x.shape, device=x.device)
    up_proj, down_proj = (getattr(dense, name) for name in WEIGHTS)
    for expert in torch.unique(index).tolist():
        token, slot = (index == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ up_proj[expert].float().T).chunk(2, dim=1)
        rows = (torch.nn.functional.silu(gate) * up) @ down_proj[expert].float().T
        found.index_add_(0, token, rows * top[token, slot, None].float())
    return found


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divides experts, hidden and intermediate")
    parser.add_argument("--tokens", type=numbers, default="1,64,4096")
    parser.add_argument("--checked", type=int, default=64, help="tokens whose error is measured")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mode", default="graph", choices=("graph", "cold"), help="a replayed graph, or an eager call")
    parser.add_argument("--backend", default="auto", help="of the layers of bf16 and weights alone")
    parser.add_argument("--json", type=Path, help="a file for the numbers, written after each row")
    parser.add_argument("--verbose", action="store_true", help="say what is done while it is done")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no CUDA GPU; to try it out: --device cpu --scale 32")
    torch.backends.cuda.matmul.allow_tf32 = False
    experts, top_k, hidden, inner = LAYER
    experts, hidden, inner = max(top_k, experts // args.scale), hidden // args.scale, inner // args.scale
    began, torch_name = time.perf_counter(), torch.__version__
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"

    def say(what: str) -> None:
        if args.verbose:
            print(f"[{time.perf_counter() - began:.1f} s] {what}", flush=True)

    torch.manual_seed(0)
    dense = Experts(experts, hidden, inner, backend=args.backend, device=args.device, dtype=torch.bfloat16)
    for name in WEIGHTS:
        getattr(dense, name).normal_(std=0.02)
    weights_only = {}
    for name, words in WEIGHTS_ONLY.items():
        say(f"weights in {name}")
        weights_only[name] = layer_of(dense, *words)
    layers: dict[str, Any] = {"bf16": dense, "fp8-blocks": float8_layer(weights_only["fp8"]), **weights_only}
    table = []
    print(
        "| tokens | " + " | ".join(f"{name}, us | error" for name in layers) + " |\n|" + "---|" * (1 + 2 * len(layers))
    )
    for tokens in args.tokens:
        x = torch.randn(tokens, hidden, device=args.device, dtype=torch.bfloat16)
        top, index = torch.topk(torch.randn(tokens, experts, device=args.device).softmax(-1), top_k)
        top = (top / top.sum(-1, keepdim=True)).to(torch.bfloat16)
        few = min(tokens, args.checked)
        say(f"{tokens} tokens in float32")
        wanted = exact(dense, x[:few], index[:few], top[:few])
        calls: dict[str, Callable[[], Any]] = {n: partial(layer, x, index, top) for n, layer in layers.items()}
        errors = {}
        for name, call in calls.items():
            say(f"{tokens} tokens in {name}")
            errors[name] = float((call()[:few].float() - wanted).norm() / wanted.norm())
        cells = [str(tokens)]
        for name, timing in measure(calls, args.device, args.mode, reps=args.rounds, min_reps=args.rounds).items():
            us = None if timing.error else timing.median
            table.append({"tokens": tokens, "layer": name, "us": us, "error": errors[name], "failed": timing.error})
            cells += [timing.error if us is None else f"{us:.0f}", f"{errors[name]:.4f}"]
        print("| " + " | ".join(cells) + " |", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"device": device, "torch": torch_name, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
