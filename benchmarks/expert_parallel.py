"""Expert parallelism beside one GPU: forward and backward of one layer at the same total of tokens.

    torchrun --nproc-per-node 2 benchmarks/expert_parallel.py --json ep.json --timeline ep_timeline.json
    torchrun --nproc-per-node 2 benchmarks/expert_parallel.py --device cpu --scale 64   # a small one
    python benchmarks/expert_parallel.py --draw ep_timeline.json --layers qwen3-30b     # writes ep_timeline.svg

Rank 0 first runs the whole layer alone, then all ranks run it together, each with its share of the tokens.
The result and the gradients of tokens and experts are compared before anything is timed. The timeline holds the kernels
of one step on rank 0: how long NCCL was at work, and for how much of that a product ran beside it. The drawing has one
lane for the exchanges and one for everything else: an exchange below a product is hidden behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from multigemm.nn import MoE
from multigemm.nn.parallel import ExpertParallel

LAYERS = {  # experts, top k, hidden, intermediate, tokens in total
    "mixtral": (8, 2, 4096, 14336, 16384),
    "qwen3-30b": (128, 8, 2048, 768, 32768),
}


LANES = {"product": (1, "#2a6fb0"), "other": (1, "#a9bdd0"), "exchange": (0, "#d9822b")}


def make(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> MoE:
    """The same layer on every rank."""
    experts, top_k, hidden, inner, _ = shape
    torch.manual_seed(0)
    moe = MoE(hidden, inner, experts, top_k, device=device, dtype=dtype)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return moe


def step(moe: MoE, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Result, gradient of the tokens, and gradients of this rank's experts; the router's is computed too."""
    x = x.detach().requires_grad_()
    y = moe(x)
    experts = list(moe.experts.parameters())
    wanted = torch.autograd.grad(y, [x, *experts, moe.gate.weight], grad)
    return [y.detach(), wanted[0], *(getattr(g, "to_local", lambda g=g: g)() for g in wanted[1:-1])]


def milliseconds(call: Callable[[], Any], rounds: int, device: str, together: bool) -> float:
    """The median over the rounds of the slowest rank's time."""
    times = []
    for _ in range(rounds + 2):
        if together:
            dist.barrier()
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        spent = torch.tensor(time.perf_counter() - start, device=device)
        if together:
            dist.all_reduce(spent, dist.ReduceOp.MAX)
        times.append(spent.item() * 1e3)
    return statistics.median(times[2:])


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def distance(got: Tensor, want: Tensor) -> float:
    return float((got - want).float().norm() / want.float().norm())


def kernels_of(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The kernels of one call on this GPU: kind, start and length in microseconds, stream."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [e for e in events if e.get("cat") == "kernel"]
    first = min(e["ts"] for e in found)
    return [
        {"kind": kind(e["name"]), "name": e["name"][:60], "start": round(e["ts"] - first, 1), "us": e["dur"],
         "stream": e["args"].get("stream")}
        for e in sorted(found, key=lambda e: e["ts"])
    ]  # fmt: skip


def kind(name: str) -> str:
    """What a kernel is for."""
    lower = name.lower()
    if "nccl" in lower:
        return "exchange"
    products = ("gemm", "hopper", "portable", "nvjet", "cutlass", "wgmma", "xmma", "grouped", "small_kernel", "pointer")
    return "product" if any(word in lower for word in products) else "other"


def overlap(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of exchanges, of products, and of exchanges while a product ran."""
    spans = {
        which: [(k["start"], k["start"] + k["us"]) for k in kernels if k["kind"] == which]
        for which in ("exchange", "product")
    }
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans["exchange"] for c, d in spans["product"])
    total = {which: round(sum(b - a for a, b in found), 1) for which, found in spans.items()}
    return {**total, "exchange beside a product": round(both, 1)}


def draw(path: Path, title: str) -> Path:
    """The kernels of a layer, from what `--timeline` wrote, as SVG beside it."""
    from matplotlib import pyplot

    kernels = json.loads(path.read_text())[title]
    figure, axes = pyplot.subplots(figsize=(10, 1.8), layout="constrained")
    for which, (lane, colour) in LANES.items():
        spans = [(k["start"] / 1e3, k["us"] / 1e3) for k in kernels if k["kind"] == which]
        axes.broken_barh(spans, (lane + 0.1, 0.8), color=colour)
    axes.set_yticks([1.5, 0.5], ["compute", "exchange"])
    axes.set(xlabel="ms", title=f"{title}: one step, forward and backward, on one rank")
    figure.savefig(path.with_suffix(".svg"))
    return path.with_suffix(".svg")


def run(title: str, args: argparse.Namespace, chunks: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One layer, alone and together; the kernels of one step on this rank."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), args.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    experts, top_k, *sizes = LAYERS[title]
    hidden, inner, tokens = (max(16, n // args.scale) for n in sizes)
    shape = experts, top_k, hidden, inner, tokens
    moe = make(shape, device, dtype)
    torch.manual_seed(1)
    x, grad = (torch.randn(tokens, hidden, device=device, dtype=dtype) for _ in range(2))
    alone = milliseconds(lambda: step(moe, x, grad), args.rounds, device, False) if rank == 0 else 0.0
    whole = step(moe, x, grad)
    parallelize_module(moe, init_device_mesh(device, (ranks,)), {"experts": ExpertParallel(chunks=chunks)})
    mine = slice(rank * tokens // ranks, (rank + 1) * tokens // ranks)
    here, seed = x[mine].contiguous(), grad[mine].contiguous()
    held = slice(rank * experts // ranks, (rank + 1) * experts // ranks)
    wanted = [want[mine if index < 2 else held] for index, want in enumerate(whole)]
    off = [distance(got, want) for got, want in zip(step(moe, here, seed), wanted, strict=True)]
    del whole, wanted
    worst = torch.tensor(max(off), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if worst.item() > 0.02:
        raise AssertionError(f"{title}: the ranks together are {worst.item():.3g} off one rank alone")
    together = milliseconds(lambda: step(moe, here, seed), args.rounds, device, True)
    kernels = kernels_of(lambda: step(moe, here, seed)) if device == "cuda" else []
    result = {
        "layer": title, "ranks": ranks, "chunks": chunks, "tokens": tokens, "alone_ms": round(alone, 3),
        "together_ms": round(together, 3), "ratio": round(alone / together, 3), "difference": worst.item(),
        **({"rank 0, us": overlap(kernels)} if kernels else {}),
    }  # fmt: skip
    return result, kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divides hidden, intermediate and token counts")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--chunks", default="1,2,4", help="pieces that each rank's tokens are cut in, comma separated")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--timeline", type=Path, default=None, help="kernels of one step on rank 0, last chunk count")
    parser.add_argument(
        "--draw", type=Path, help="draw the first of --layers from a file of --timeline, and do no more"
    )
    args = parser.parse_args()
    if args.draw:
        print(f"written: {draw(args.draw, args.layers.split(',')[0])}")
        return
    if "LOCAL_RANK" not in os.environ:
        parser.error("it takes one process for each GPU: torchrun --nproc-per-node 2 benchmarks/expert_parallel.py")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no CUDA GPU; to try it out: --device cpu --scale 64")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    results, timelines = [], {}
    for title in args.layers.split(","):
        for chunks in args.chunks.split(","):
            result, timelines[title] = run(title, args, int(chunks))
            results.append(result)
            if dist.get_rank() == 0:
                print(json.dumps(result), flush=True)
                if args.json:
                    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
                    args.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "runs": results}))
                if args.timeline:
                    args.timeline.write_text(json.dumps(timelines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
