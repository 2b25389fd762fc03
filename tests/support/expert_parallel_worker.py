"""One rank of the expert-parallel tests.

    python -m tests.support.expert_parallel_worker RANK RANKS FILE SCENARIO TIMEOUT

Every rank also computes the whole layer on all tokens by itself, and compares.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import multigemm as mg
from multigemm.integrations import expert_parallel
from multigemm.integrations.expert_parallel import groups_of, run_experts
from multigemm.nn import MoE
from multigemm.nn.moe import Experts
from multigemm.nn.parallel import ExpertParallel
from tests.support import dtensor_cases
from tests.support.plain_expert_parallel import layer as plain_layer

EXPERTS, WIDTH, HIDDEN, TOP = 8, 6, 10, 2
GATHERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""torch 2.11 cannot put the slices of both halves of a gated weight back together."""


def mesh_of(replicas: int) -> Any:
    """A mesh of `replicas` data-parallel copies, each spread over the rest of the ranks."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))


def layers(mesh: Any, chunks: int, activation: str = "swiglu", names: Any = "ep") -> tuple[MoE, MoE]:
    """(the layer spread over the ranks of `mesh`, the same layer whole)."""
    torch.manual_seed(0)
    whole = MoE(WIDTH, HIDDEN, EXPERTS, TOP, activation=activation, bias=True, dtype=torch.float64)
    spread = MoE(WIDTH, HIDDEN, EXPERTS, TOP, activation=activation, bias=True, dtype=torch.float64)
    spread.load_state_dict(whole.state_dict())
    parallelize_module(spread, mesh[names], {"experts": ExpertParallel(chunks=chunks)})
    return spread, whole


def tokens_of(ranks: int, kind: str) -> list[Tensor]:
    """Every rank's tokens: uneven, some ranks without any, or all alike so that one expert gets everything."""
    make = torch.Generator().manual_seed(1)
    counts = [3 + 4 * r for r in range(ranks)]
    if kind == "empty":
        counts = [0] * (ranks - 1) + [9]
    if kind == "one":
        return [torch.ones(c, WIDTH, dtype=torch.float64) for c in counts]
    return [torch.randn(c, WIDTH, generator=make, dtype=torch.float64) for c in counts]


def close(got: Tensor, want: Tensor) -> None:
    """Up to the router, which works in float32."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def compare(kind: str, chunks: int, activation: str = "swiglu", replicas: int = 1) -> None:
    mesh = mesh_of(replicas)
    spread, whole = layers(mesh, chunks, activation)
    ranks, rank = mesh["ep"].size(), mesh["ep"].get_local_rank()
    copy = mesh["dp"].get_local_rank()
    parts = tokens_of(dist.get_world_size(), kind)[copy * ranks : (copy + 1) * ranks]
    mine = parts[rank].clone().requires_grad_()
    everything = torch.cat(parts).requires_grad_()
    got, want = spread(mine), whole(everything)
    first = sum(len(p) for p in parts[:rank])
    rows = slice(first, first + len(mine))
    torch.testing.assert_close(got, want[rows])
    names = [n for n, _ in whole.experts.named_parameters()]
    got_grads = torch.autograd.grad(got.square().sum(), [mine, *spread.experts.parameters(), spread.gate.weight])
    want_grads = torch.autograd.grad(want.square().sum(), [everything, *whole.experts.parameters(), whole.gate.weight])
    close(got_grads[0], want_grads[0][rows])
    each = EXPERTS // ranks
    for name, g, w in zip(names, got_grads[1:-1], want_grads[1:-1], strict=True):
        here: Any = g
        torch.testing.assert_close(here.to_local(), w[rank * each : (rank + 1) * each], msg=f"gradient of {name}")
    router = got_grads[-1].clone()
    dist.all_reduce(router, group=mesh["ep"].get_group())
    close(router, want_grads[-1])


def slices(activation: str) -> None:
    """Experts over one dimension of the mesh, slices of each over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    spread, whole = layers(mesh, 2, activation, ("ep", "tp"))
    parts = tokens_of(2, "uneven")
    rank = mesh["ep"].get_local_rank()
    mine, everything = parts[rank].clone().requires_grad_(), torch.cat(parts).requires_grad_()
    rows = slice(rank * len(parts[0]), rank * len(parts[0]) + len(mine))
    got, want = spread(mine), whole(everything)
    torch.testing.assert_close(got, want[rows])
    grads: Any = torch.autograd.grad(got.square().sum(), [mine, *spread.experts.parameters(), spread.gate.weight])
    expected = torch.autograd.grad(want.square().sum(), [everything, *whole.experts.parameters(), whole.gate.weight])
    close(grads[0], expected[0][rows])
    for g, w in zip(grads[1:-1], expected[1:-1], strict=True):
        torch.testing.assert_close(g.to_local(), distribute_tensor(w, mesh, g.placements).to_local())
        if GATHERS:
            torch.testing.assert_close(g.full_tensor(), w)
    router = grads[-1].clone()
    dist.all_reduce(router, group=mesh["ep"].get_group())
    close(router, expected[-1])


def beside_plain(kind: str, chunks: int) -> None:
    """The same tokens, routes and weights through an exchange that was written by hand."""
    mesh = mesh_of(1)["ep"]
    group, rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    make = torch.Generator().manual_seed(2)
    shapes = (2 * HIDDEN, WIDTH), (WIDTH, HIDDEN)
    weights = [torch.randn(EXPERTS, *shape, generator=make).double() for shape in shapes]
    x = tokens_of(ranks, kind)[rank]
    make.manual_seed(3 + rank)
    index = torch.rand(len(x), EXPERTS, generator=make).topk(TOP).indices
    if kind == "one":
        index = torch.tensor([[EXPERTS - 1, 0]]).expand(len(x), TOP)
    share = torch.rand(len(x), TOP, generator=make).double()
    layer = Experts(EXPERTS, WIDTH, HIDDEN, dtype=torch.float64)
    for parameter, weight in zip(layer.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    parallelize_module(layer, mesh, ExpertParallel(chunks=chunks))
    each = EXPERTS // ranks
    own = [w[rank * each : (rank + 1) * each].clone().requires_grad_() for w in weights]
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = layer(ours, index, share), plain_layer(plain, index, share, own[0], own[1], group)
    torch.testing.assert_close(got, want)
    grads: Any = torch.autograd.grad(got.square().sum(), [ours, *layer.parameters()])
    expected = torch.autograd.grad(want.square().sum(), [plain, *own])
    for g, w in zip([grads[0], *(part.to_local() for part in grads[1:])], expected, strict=True):
        torch.testing.assert_close(g, w)


def agree() -> None:
    for kind, chunks in (("uneven", 1), ("empty", 2), ("one", 2)):
        beside_plain(kind, chunks)
    for kind, chunks in (("uneven", 1), ("empty", 2), ("one", 1)):
        compare(kind, chunks)
    if dist.get_world_size() == 4:
        compare("uneven", 1, replicas=2)
        slices("swiglu")
        slices("relu")
    if dist.get_world_size() == 2:  # the rest with fewer processes
        compare("uneven", 3)
        compare("uneven", 1, "gelu")
        refuse()
        travel_while_multiplying()
        compiled()


def refuse() -> None:
    torch.manual_seed(0)
    mesh = mesh_of(1)["ep"]
    cube = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("x", "y", "z"))
    odd = MoE(WIDTH, HIDDEN, dist.get_world_size() + 1, 1)
    for module, words in ((odd, "spread evenly"), (torch.nn.Linear(2, 2), "applied to Linear")):
        with pytest.raises(mg.InvalidProblem, match=words):
            parallelize_module(module, mesh, ExpertParallel())
    with pytest.raises(mg.InvalidProblem, match="spread over one of them"):
        groups_of(cube)


def compiled() -> None:
    """torch.compile around a spread layer gives the layer's results and gradients."""
    spread, _ = layers(mesh_of(1), 2)
    x = tokens_of(dist.get_world_size(), "uneven")[dist.get_rank()].requires_grad_()
    fast: Any = torch.compile(spread, backend="aot_eager")
    results = [layer(x) for layer in (spread, fast)]
    torch.testing.assert_close(results[1], results[0])
    wanted = [x, *spread.experts.parameters()]
    for got, want in zip(*(torch.autograd.grad(y.square().sum(), wanted) for y in results), strict=True):
        torch.testing.assert_close(got, want)


def travel_while_multiplying() -> None:
    """Two pieces: while one is multiplied, the other is under way; there and back, forward and backward."""
    seen: list[str] = []

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Tensor) -> Tensor:
            seen.append("multiply")
            return rows * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            seen.append("multiply")
            return grad * 2

    def noted(name: str) -> Any:
        inner = getattr(expert_parallel, name)

        def call(*args: Any) -> Any:
            seen.append(name)
            return inner(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("begin", "finish"):
            patch.setattr(expert_parallel, name, noted(name))
        x = torch.randn(8, WIDTH).requires_grad_()
        index = torch.arange(8).unsqueeze(1) % EXPERTS
        multiply: Any = Multiply.apply
        y = run_experts(x, index, torch.ones(8, 1), EXPERTS, lambda rows, _: multiply(rows), mesh_of(1)["ep"], 2)
        piece = ["begin", "finish", "multiply"]
        expected = ["begin", *piece, *piece, "begin", "finish", "finish"]
        assert seen == expected, seen
        seen.clear()
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert seen == expected, seen
    assert torch.equal(y, 2 * x)
    assert torch.equal(grad, torch.full_like(x, 2))


def die() -> None:
    """The last rank leaves without a word in the middle of the work; the others must end with an error."""
    spread, _ = layers(mesh_of(1), 1)
    x = tokens_of(dist.get_world_size(), "uneven")[dist.get_rank()]
    spread(x)
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(7)
    try:
        for _ in range(3):
            spread(x)
    except mg.LibraryError as error:
        print(f"ended: {error}", flush=True)
        os._exit(3)


if __name__ == "__main__":
    rank, ranks, path, scenario, seconds = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], float(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds)
    )
    {"agree": agree, "die": die, "dtensor": dtensor_cases.main}[scenario]()
    dist.barrier()
    dist.destroy_process_group()
    print("fine", flush=True)
    os._exit(0)  # torch's threads may outlive the interpreter, which then aborts now and then
