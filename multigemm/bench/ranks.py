"""`multigemm bench ranks`: a layer of experts over 1, 2, 4, 8 GPUs, beside one GPU and beside plain torch.

    torchrun --nproc-per-node 4 -m multigemm bench ranks --json ranks.json --picture step.svg
    torchrun --nproc-per-node 2 -m multigemm bench ranks --device cpu --scale 64

Weak scaling: every rank has as many tokens as one GPU alone; strong: all ranks together have them. The speed-up is in
tokens a second, over the fastest of our ways on one GPU. Ways: `fused` (a token travels once to each rank), `steps`
(a row for each pair of token and expert), `plain`: torch's all-to-all and grouped_mm on the same ranks, as one writes
it by hand. Results and gradients of all ways are compared with rank 0 alone before anything is timed. Each step has a
routing of its own, as in training: how many rows travel is never the same twice. `host` is the time until the call
returns; a step whose host time is its time waits for the host.

The split is of one step on rank 0, from the profiler: products; exchange, the time in which NCCL's kernels run, waits
for other ranks included; hidden, the part of it in which another kernel runs; sorting, and rows that are moved; the
rest; idle, the time in which no kernel runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import product as every
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from multigemm import fleet
from multigemm.bench import machine, plots
from multigemm.bench.peers import grouped_mm
from multigemm.bench.workloads import LAYERS, Layer, parts
from multigemm.errors import InvalidSetting, LibraryError
from multigemm.interrupts import write_whole
from multigemm.nn import Experts
from multigemm.nn.parallel import ExpertParallel

WAYS = ("fused", "steps", "plain")
SCALINGS, PASSES, ROUTINGS = ("weak", "strong"), ("forward", "training"), ("uniform", "skewed")
TOLERANCE = {"fused": 0.02, "steps": 0.02, "plain": 0.05}
"""The largest distance between results or gradients, as a part of their norm: some roundings to bfloat16 (0.004); plain
torch rounds after each step of a gate, too."""
WARM_UP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `multigemm bench ranks`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    add = parser.add_argument
    add("--layers", default=",".join(LAYERS), help="comma separated (default: all four)")
    add("--ways", default=",".join(WAYS), help=f"comma separated (default: {','.join(WAYS)})")
    add("--scaling", default=",".join(SCALINGS), help="weak, strong")
    add("--passes", default=",".join(PASSES), help="forward (without gradients), training (forward and backward)")
    add("--routing", default=",".join(ROUTINGS), help="uniform, skewed (experts are chosen as by Zipf's law)")
    add("--chunks", default="1", help="numbers of pieces in which tokens travel, separated by commas (default: 1)")
    add("--tokens", type=int, help="tokens of one GPU, instead of the layers' own numbers")
    add("--scale", type=int, default=1, help="divide hidden, intermediate and token counts by this")
    add("--rounds", type=int, default=10, help="timed rounds of each measurement (default: 10)")
    add("--backend", default="auto", help="the backend of the ways `fused` and `steps` (default: auto)")
    add("--device", default="", choices=("", "cuda", "cpu"), help="(default: cuda where there is one)")
    silent = "seconds without an answer of a rank after which all ranks end (default: 300)"
    add("--timeout", type=float, default=300.0, help=silent)
    add("--json", type=Path, metavar="FILE", help="write the measurements to this file")
    add("--picture", type=Path, metavar="FILE", help="SVG or PNG of the kernels of one training step of each layer")
    add("--draw", type=Path, metavar="JSON", help="draw --picture from what --json wrote, and do no more")


def main(args: argparse.Namespace) -> int:
    """Runs the selected layers. Returns 0 if everything ran."""
    if args.draw:
        if not args.picture:
            raise InvalidSetting("--draw needs --picture FILE, with the ending .svg or .png")
        print(f"written: {draw(json.loads(args.draw.read_text())['runs'], args.picture)}")
        return 0
    for name, known in (
        ("layers", LAYERS), ("ways", WAYS), ("scaling", SCALINGS), ("passes", PASSES), ("routing", ROUTINGS)
    ):  # fmt: skip
        if unknown := set(parts(getattr(args, name))) - set(known):
            raise InvalidSetting(f"--{name} {', '.join(sorted(unknown))}: known are {', '.join(known)}")
    if args.picture and plots.missing():
        raise InvalidSetting(f"--picture: {plots.missing()}")
    with _joined(args) as device:
        runs = _measure(args, device)
    if args.picture and fleet.here().rank == 0:
        print(f"written: {draw(runs, args.picture)}")
    return 0


@contextmanager
def _joined(args: argparse.Namespace) -> Iterator[torch.device]:
    """Joins the process group of all ranks, or of this one without torchrun; yields this rank's device."""
    place, device = fleet.here(), fleet.default_device(args.device)
    if device.type == "cuda":
        if place.locals > torch.cuda.device_count():
            raise InvalidSetting(f"{place.locals} ranks, and {torch.cuda.device_count()} GPUs: one for each")
        device = torch.device("cuda", place.local)
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # exchanges get processors while products run
    alone: dict[str, Any] = {"init_method": "tcp://127.0.0.1:0", "rank": 0, "world_size": 1}
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=args.timeout),
        **(alone if place.ranks == 1 else {}),
    )
    yield device
    dist.barrier()  # after an error the other ranks may never come
    dist.destroy_process_group()


def _measure(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    for title in parts(args.layers):
        layer = LAYERS[title].scaled(args.scale) if args.scale > 1 else LAYERS[title]
        tokens = args.tokens or layer.tokens
        bed = TestBed(layer, device, args.backend)
        for row in bed.rows(args, title, tokens):
            runs.append(row)
            if dist.get_rank() == 0:
                print(line(row), flush=True)
                if args.json:
                    write_whole(args.json, json.dumps({"machine": machine.describe(device), "runs": runs}))
        del bed
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return runs


def line(row: dict[str, Any]) -> str:
    """A row as a line of text."""
    text = (
        f"{row['layer']:12} {row['scaling']:6} {row['pass']:8} {row['routing']:7} {row['ranks']} ranks  {row['way']:5} "
        f"chunks {row['chunks']}  {row['ms']:8.3f} ms  host {row['host_ms']:.3f}"
    )
    if "speedup" in row:
        text += f"  x{row['speedup']:.2f} of one ({row['alone_ms']:.3f} ms)"
    if "of_plain" in row:
        text += f"  x{row['of_plain']:.2f} of plain"
    if row.get("split_ms"):
        s = row["split_ms"]
        hidden = s["hidden"] / s["exchange"] if s["exchange"] else 1.0
        text += f"  hidden {hidden:.2f}  " + " ".join(f"{name} {value:.2f}" for name, value in s.items())
    return text


# --- a layer, alone and together ----------------------------------------------------------------------


class TestBed:
    """One layer with the same weights in two forms: whole on rank 0, and spread over all ranks."""

    __test__ = False

    def __init__(self, layer: Layer, device: torch.device, backend: str) -> None:
        self.layer, self.device = layer, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh(device.type, (self.ranks,))
        make = {"fused": True, "backend": backend, "dtype": torch.bfloat16, **layer.options}
        shape = layer.experts, layer.hidden, layer.inner
        self.spread = Experts(*shape, **make, device="meta")
        ExpertParallel()._apply(self.spread, self.mesh)
        self.spread.to_empty(device=device)
        self.shared = Shared(layer, device) if layer.shared else None
        each = -(-layer.experts // self.ranks)
        self.here = range(min(layer.experts, self.rank * each), min(layer.experts, (self.rank + 1) * each))
        _fill(self.spread, self.here)
        self.whole: Any = None
        if self.rank == 0:
            self.whole = Experts(*shape, **make, device=device) if self.ranks > 1 else None
            if self.whole is not None:
                _fill(self.whole, range(layer.experts))

    def rows(self, args: argparse.Namespace, title: str, tokens: int) -> Iterable[dict[str, Any]]:
        """Measures everything of the layer, after comparing results."""
        for way, chunks in _variants(parts(args.ways), args.chunks):
            self.compare(way, chunks, tokens)
        yield from self.timings(args, title, tokens)

    def timings(self, args: argparse.Namespace, title: str, tokens: int) -> Iterable[dict[str, Any]]:
        """The measurements alone."""
        ways = parts(args.ways)
        for scaling, of_pass, routing in every(parts(args.scaling), parts(args.passes), parts(args.routing)):
            mine = tokens if scaling == "weak" else max(1, tokens // self.ranks)
            training = of_pass == "training"
            alone = self.alone(ways, tokens, routing, training, args.rounds)
            batch = Batch(self.layer, mine, routing, self.rank, self.device)
            plain: float | None = None
            for way, chunks in sorted(_variants(ways, args.chunks), key=lambda v: v[0] != "plain"):
                call = self.call(way, chunks, batch, training)
                ms, host_ms = milliseconds(call, args.rounds, self.device, batch.redraw)
                row = {
                    "layer": title, "scaling": scaling, "pass": of_pass, "routing": routing, "ranks": self.ranks,
                    "way": way, "chunks": chunks, "tokens": mine, "ms": ms, "host_ms": host_ms,
                }  # fmt: skip
                if way == "plain":
                    plain = ms
                else:
                    row |= {"of_plain": plain / ms} if plain else {}
                    factor = self.ranks if scaling == "weak" else 1
                    row |= {"alone_ms": alone, "speedup": factor * alone / ms}
                if self.device.type == "cuda":
                    kernels = kernels_of(call)
                    row["split_ms"] = split(kernels)
                    if way == "fused" and training and (args.json or args.picture):
                        row["kernels"] = kernels
                yield row

    def call(self, way: str, chunks: int, batch: Batch, training: bool) -> Callable[[], Any]:
        """One step of the layer over all ranks."""
        if way == "plain":
            held = [p.to_local().detach().requires_grad_() for p in self.spread.parameters()]  # type: ignore[attr-defined]
            plain = Plain(self.layer, dict(zip(dict(self.spread.named_parameters()), held, strict=True)), self.mesh)
            shared = self.shared

            def run(x: Tensor, weights: Tensor) -> Tensor:
                y = plain(x, batch.index, weights)
                return y if shared is None else y + shared(x)

            return lambda: step(run, batch, [*held, *_parameters(shared)], training)
        self.spread.fused, self.spread.chunks = way == "fused", chunks
        return self._of(self.spread, batch, training)

    def _of(self, experts: Any, batch: Batch, training: bool) -> Callable[[], Any]:
        shared = self.shared

        def run(x: Tensor, weights: Tensor) -> Tensor:
            y: Tensor = experts(x, batch.index, weights, None if shared is None else lambda: shared(x))
            return y

        return lambda: step(run, batch, [*experts.parameters(), *_parameters(shared)], training)

    def alone(self, ways: list[str], tokens: int, routing: str, training: bool, rounds: int) -> float:
        """The milliseconds of the fastest of our ways on rank 0 alone, broadcast to all ranks."""
        found = torch.zeros(1, dtype=torch.float64, device=self.device)
        if self.rank == 0:
            batch = Batch(self.layer, tokens, routing, 0, self.device)
            experts = self.spread if self.whole is None else self.whole
            times = []
            for way in [way for way in ways if way != "plain"] or ["fused"]:
                experts.fused = way == "fused"
                call = self._of(experts, batch, training)
                times.append(milliseconds(call, rounds, self.device, batch.redraw, together=False)[0])
            found += min(times)
        dist.broadcast(found, 0)
        return float(found.item())

    def compare(self, way: str, chunks: int, tokens: int) -> None:
        """Requires the result, the gradients of tokens and weights, and those of all experts to equal those of rank 0
        alone."""
        batches = [Batch(self.layer, tokens, "uniform", rank, self.device) for rank in range(self.ranks)]
        got = self.call(way, chunks, batches[self.rank], True)()[: 3 + len(list(self.spread.parameters()))]
        if self.ranks == 1:
            return
        found: list[list[Tensor]] = []  # on rank 0: of each rank the result and gradients of tokens and weights
        sums: list[Tensor] = []  # and the gradients of all experts
        for batch in batches if self.rank == 0 else ():
            self.whole.fused = way != "steps"
            mine = self._of(self.whole, batch, True)()[: len(got)]
            found.append(mine[:3])
            sums = [x.add_(y) for x, y in zip(sums, mine[3:], strict=True)] if sums else mine[3:]
        worst = torch.zeros(1, device=self.device)
        each = -(-self.layer.experts // self.ranks)
        for number, mine in enumerate(got):
            expected = torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)
            for rank in range(self.ranks):
                if self.rank == 0:
                    of_rank = found[rank][number] if number < 3 else sums[number - 3][rank * each : (rank + 1) * each]
                    if rank == 0:
                        expected.copy_(of_rank)
                    else:
                        dist.send(of_rank.contiguous(), rank)
                elif self.rank == rank:
                    dist.recv(expected, 0)
            if mine.numel():
                size = torch.linalg.vector_norm(expected, dtype=torch.float32).clamp(min=1e-30)
                far = torch.linalg.vector_norm(expected.sub_(mine), dtype=torch.float32) / size
                worst = torch.maximum(worst, far.reshape(1))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if not worst.item() <= TOLERANCE[way]:
            raise LibraryError(f"{way}, chunks {chunks}: {self.ranks} ranks are {worst.item():.3g} off one rank alone")


def _variants(ways: list[str], chunks: str) -> list[tuple[str, int]]:
    """The pairs of way and chunk count; `plain` has no chunks."""
    counts = [int(n) for n in parts(chunks)]
    return [(way, n) for way in ways for n in (counts if way != "plain" else [1])]


def _parameters(shared: nn.Module | None) -> list[Tensor]:
    return [] if shared is None else list(shared.parameters())


@torch.no_grad()
def _fill(experts: Experts, numbers: range) -> None:
    """Fills weights that depend only on the expert, not on its rank."""
    for place, number in enumerate(numbers):
        for seed, parameter in enumerate(experts.parameters()):
            held: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            make = torch.Generator(held.device).manual_seed(10 * number + seed)
            held[place].normal_(std=0.02, generator=make)


class Shared(nn.Module):
    """Shared experts, which every token passes through: a gated network."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        super().__init__()
        make: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
        torch.manual_seed(7)
        self.up = nn.Linear(layer.hidden, 2 * layer.shared, **make)
        self.down = nn.Linear(layer.shared, layer.hidden, **make)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> the same shape."""
        gate, up = self.up(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class Batch:
    """One rank's tokens, their experts and weights, and the gradient of the result; the same on whichever rank it is
    made.

    `redraw` chooses other experts, as the next step of training does.
    """

    def __init__(self, layer: Layer, tokens: int, routing: str, rank: int, device: torch.device) -> None:
        make = torch.Generator(device).manual_seed(100 + rank)
        given: dict[str, Any] = {"generator": make, "device": device}
        self._given, self._top_k = given, layer.top_k
        self.x, self.grad = (torch.randn(tokens, layer.hidden, **given).bfloat16() for _ in range(2))
        self._chance = torch.zeros(layer.experts, device=device)
        if routing == "skewed":
            order = torch.Generator().manual_seed(5)
            self._chance = -torch.log(1.0 + torch.randperm(layer.experts, generator=order).to(device))
        self.weights = torch.rand(tokens, layer.top_k, **given).softmax(-1)
        self.index: Tensor
        self.redraw()

    def redraw(self) -> None:
        """Chooses the experts of each token."""
        drawn = torch.rand(len(self.x), len(self._chance), **self._given).clamp(1e-9, 1 - 1e-7)
        self.index = (self._chance - torch.log(-torch.log(drawn))).topk(self._top_k).indices


def step(run: Callable[[Tensor, Tensor], Tensor], batch: Batch, parameters: list[Any], training: bool) -> list[Tensor]:
    """Runs the layer. Returns the result and, for training, the gradients of tokens, weights and parameters."""
    if not training:
        with torch.no_grad():
            return [run(batch.x, batch.weights)]
    x, weights = batch.x.detach().requires_grad_(), batch.weights.detach().requires_grad_()
    y = run(x, weights)
    grads = torch.autograd.grad(y, [x, weights, *parameters], batch.grad)
    return [y.detach(), *(g.to_local() if isinstance(g, DTensor) else g for g in grads)]


# --- the peer -----------------------------------------------------------------------------------------


class _Swap(torch.autograd.Function):
    """An all-to-all whose gradient is the reverse all-to-all."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way = received, sent, group
        came = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(came, rows.contiguous(), received, sent, group=group)
        return came

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Swap.apply(grad, *ctx.way), None, None, None  # type: ignore[no-untyped-call]


class Plain:
    """Expert parallelism as one writes it with torch: a row for each pair of token and expert, torch's all-to-all,
    two products by grouped_mm."""

    def __init__(self, layer: Layer, held: dict[str, Tensor], mesh: Any) -> None:
        self.layer, self.held, self.group = layer, held, mesh.get_group(0)
        self.ranks = self.group.size()
        self.each = -(-layer.experts // self.ranks)

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """This rank's tokens [tokens, hidden] through all experts."""
        top_k, pairs = index.shape[1], index.reshape(-1)
        order = torch.argsort(pairs, stable=True)
        counts = torch.bincount(pairs, minlength=self.each * self.ranks)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        by_rank = torch.stack([counts.view(self.ranks, -1).sum(1), theirs.view(self.ranks, -1).sum(1)])
        sent, received = by_rank.tolist()
        rows: Tensor = _Swap.apply(x[order // top_k], sent, received, self.group)  # type: ignore[no-untyped-call]
        experts = torch.arange(self.each, device=x.device).repeat(self.ranks)
        local = experts.repeat_interleave(theirs, output_size=sum(received))
        by_expert = torch.argsort(local, stable=True)
        ends = theirs.view(self.ranks, -1).sum(0).cumsum(0).int()
        results = self._networks(rows[by_expert], local[by_expert], ends)
        back = torch.empty_like(results).index_copy(0, by_expert, results)
        home: Tensor = _Swap.apply(back, received, sent, self.group)  # type: ignore[no-untyped-call]
        spread = torch.empty_like(home).index_copy(0, order, home)
        return (spread.view(*index.shape, -1) * weights.unsqueeze(-1).to(spread.dtype)).sum(1)

    def _networks(self, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        call = grouped_mm()
        ends = ends[: len(self.held["down_proj"])]
        up, down = (
            w if self.layer.stacked else w.transpose(1, 2) for w in (self.held["gate_up_proj"], self.held["down_proj"])
        )
        hidden = call(rows, up, offs=ends)
        if "gate_up_proj_bias" in self.held:
            hidden = hidden + self._bias_of("gate_up_proj_bias", experts)
        results: Tensor = call(self.layer.gate(hidden), down, offs=ends)
        return results + self._bias_of("down_proj_bias", experts) if "down_proj_bias" in self.held else results

    def _bias_of(self, name: str, experts: Tensor) -> Tensor:
        """The bias of each row; its gradient is summed in float32, for in bfloat16 thousands of rows are some percent
        off."""
        bias = self.held[name]
        return bias.float()[experts].to(bias.dtype)


# --- time ---------------------------------------------------------------------------------------------


def milliseconds(
    call: Callable[[], Any], rounds: int, device: torch.device, before: Callable[[], Any], together: bool = True
) -> tuple[float, float]:
    """The medians over the rounds of the slowest rank's time, and of the time until its call returned; `before` runs
    ahead of each round."""
    times = []
    for _ in range(rounds + WARM_UP):
        before()
        if together:
            dist.barrier()
        _wait(device)
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        _wait(device)
        times.append((time.perf_counter() - start, returned - start))
    spent = torch.tensor(times[WARM_UP:], device=device, dtype=torch.float64)
    if together:
        dist.all_reduce(spent, dist.ReduceOp.MAX)
    whole, host = (statistics.median(column) * 1e3 for column in spent.t().tolist())
    return whole, host


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels_of(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The kernels of one call on this GPU: kind, name, start and length in microseconds. Every rank must call it."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    dist.barrier()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    first = min((e["ts"] for e in found), default=0.0)
    return [
        {"kind": kind(e["name"]), "name": e["name"][:48], "start": round(e["ts"] - first, 1), "us": e["dur"]}
        for e in sorted(found, key=lambda e: e["ts"])
    ]


KINDS = {
    "exchange": ("nccl", "memcpy ptop", "memcpy peer"),
    "rest": ("sum_rows", "pair_backward", "add_returned", "gate"),
    "products": (
        "gemm", "hopper", "generic", "nvjet", "cutlass", "wgmma", "xmma", "grouped", "small", "pointer", "fused",
        "list", "shift_b", "few",
    ),
    "sorting": (
        "sort", "count_kernel", "start_kernel", "scatter", "scan", "gather", "index",
        "search", "cat", "memcpy", "place_kernel", "spread_kernel", "departures", "copy_rows",
    ),
}  # fmt: skip
"""What a kernel is for, by parts of its name, in this order."""


def kind(name: str) -> str:
    """The purpose of a kernel, by its name."""
    lower = name.lower()
    return next((which for which, words in KINDS.items() if any(word in lower for word in words)), "rest")


def split(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """The milliseconds of each kind, of exchanges during another kernel, and without any kernel."""
    spans = {which: [(k["start"], k["start"] + k["us"]) for k in kernels if k["kind"] == which] for which in KINDS}
    found = {which: union(of) for which, of in spans.items()}
    others = [(k["start"], k["start"] + k["us"]) for k in kernels if k["kind"] != "exchange"]
    hidden = union(spans["exchange"]) + union(others) - union(spans["exchange"] + others)
    everything = others + spans["exchange"]
    whole = max((b for _, b in everything), default=0.0) - min((a for a, _ in everything), default=0.0)
    in_order = {
        "products": found["products"], "exchange": found["exchange"], "hidden": hidden, "sorting": found["sorting"],
        "rest": found["rest"], "idle": whole - union(everything),
    }  # fmt: skip
    return {name: round(us / 1e3, 3) for name, us in in_order.items()}


def union(spans: list[tuple[float, float]]) -> float:
    """The total length that the spans cover."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# --- a picture of a step ------------------------------------------------------------------------------

LANES = {
    "products": (1, "#2a6fb0"), "sorting": (1, "#8a6d3b"), "rest": (1, "#a9bdd0"), "exchange": (0, "#d9822b"),
}  # fmt: skip


def draw(runs: list[dict[str, Any]], path: Path) -> Path:
    """Draws the kernels of one training step of each layer: one lane for exchanges, one for all else."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run.get("kernels"):
            chosen.setdefault(run["layer"], run)
    if not chosen:
        raise InvalidSetting(
            "there is no kernel to draw: it takes a training step of the way `fused` on GPUs, and --json"
        )
    figure, grid = pyplot.subplots(len(chosen), 1, figsize=(10, 1.7 * len(chosen)), layout="constrained", squeeze=False)
    for axes, run in zip(grid[:, 0], chosen.values(), strict=True):
        for which, (lane, colour) in LANES.items():
            spans = [(k["start"] / 1e3, k["us"] / 1e3) for k in run["kernels"] if k["kind"] == which]
            axes.broken_barh(spans, (lane + 0.1, 0.8), color=colour)
        axes.set_yticks([1.5, 0.5], ["compute", "exchange"])
        axes.set(title=f"{run['layer']}: a training step on rank 0 of {run['ranks']}, {run['tokens']} tokens of each")
    axes.set(xlabel="ms")
    return plots.save(figure, path)
