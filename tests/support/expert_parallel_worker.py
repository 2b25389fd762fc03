"""The ranks of the expert-parallel tests.

    python -m tests.support.expert_parallel_worker

reads scenarios from its input, a JSON object on each line, and forks their ranks, so that torch and its compiler are
imported once. Every rank also computes the whole layer on all tokens by itself, and compares.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import multigemm as mg
from multigemm.integrations import expert_parallel, fused_parallel
from multigemm.integrations.expert_parallel import groups_of, run_experts
from multigemm.integrations.fused_experts import first_product
from multigemm.nn import MoE
from multigemm.nn.moe import Experts
from multigemm.nn.parallel import ExpertParallel
from tests.support import dtensor_cases
from tests.support.plain_expert_parallel import layer as plain_layer
from tests.support.row_copies import note_row_copies

EXPERTS, WIDTH, HIDDEN, TOP = 8, 6, 10, 2
FOLDER = Path()
"""Where the scenarios of one launcher keep files."""
TIMEOUT = 0.0
"""Seconds of the process group, of the scenario that runs."""
GATHERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""torch 2.11 cannot put the slices of both halves of a gated weight back together."""


def mesh_of(replicas: int) -> Any:
    """A mesh of `replicas` data-parallel copies, each spread over the rest of the ranks."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))


def layers(mesh: Any, chunks: int, names: Any = "ep", experts: int = EXPERTS, **options: Any) -> tuple[MoE, MoE]:
    """(the layer spread over the ranks of `mesh`, the same layer whole and in steps)."""
    torch.manual_seed(0)
    shape = (WIDTH, HIDDEN, experts, min(TOP, experts))
    given: dict[str, Any] = {"bias": True, "dtype": torch.float64, "backend": "cpu", **options}
    whole, spread = (MoE(*shape, **given) for _ in range(2))
    whole.experts.fused = False
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


def compare(kind: str, chunks: int, replicas: int = 1, experts: int = EXPERTS, **options: Any) -> None:
    """A spread layer beside the whole one."""
    mesh = mesh_of(replicas)
    ranks, copy = mesh["ep"].size(), mesh["dp"].get_local_rank()
    parts = tokens_of(dist.get_world_size(), kind)[copy * ranks : (copy + 1) * ranks]
    results_and_gradients(*layers(mesh, chunks, experts=experts, **options), mesh["ep"], parts)


def slices(**options: Any) -> None:
    """Experts over one dimension of the mesh, slices of each over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    results_and_gradients(*layers(mesh, 2, ("ep", "tp"), **options), mesh["ep"], tokens_of(2, "uneven"))


def results_and_gradients(spread: MoE, whole: MoE, ranks: Any, parts: list[Tensor]) -> None:
    """Those of the layer that is spread over `ranks`, each of which has a part of the tokens, are the whole one's."""
    rank = ranks.get_local_rank()
    mine, everything = parts[rank].clone().requires_grad_(), torch.cat(parts).requires_grad_()
    first = sum(len(part) for part in parts[:rank])
    rows = slice(first, first + len(mine))
    got, want = spread(mine), whole(everything)
    torch.testing.assert_close(got, want[rows])
    grads: Any = torch.autograd.grad(got.square().sum(), [mine, *spread.experts.parameters(), spread.gate.weight])
    expected = torch.autograd.grad(want.square().sum(), [everything, *whole.experts.parameters(), whole.gate.weight])
    close(grads[0], expected[0][rows])
    names = [name for name, _ in whole.experts.named_parameters()]
    for name, g, w in zip(names, grads[1:-1], expected[1:-1], strict=True):
        here = distribute_tensor(w, g.device_mesh, g.placements).to_local()
        torch.testing.assert_close(g.to_local(), here, msg=f"gradient of {name}")
        if GATHERS:
            torch.testing.assert_close(g.full_tensor(), w, msg=f"gradient of {name}")
    router = grads[-1].clone()
    dist.all_reduce(router, group=ranks.get_group())
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


NETWORKS: tuple[dict[str, Any], ...] = (
    {"activation": "geglu"},
    {"activation": "relu"},
    {"recompute": True, "stacked": True, "glu_layout": "interleaved", "glu_limit": 0.4, "glu_alpha": 1.7},
)
"""What fused experts may be, besides the usual."""


def agree() -> None:
    for kind, chunks in (("uneven", 1), ("empty", 2), ("one", 2)):
        beside_plain(kind, chunks)
        compare(kind, chunks, fused=True)
    for kind, chunks in (("uneven", 1), ("empty", 2), ("one", 1)):
        compare(kind, chunks)
    for experts in (EXPERTS - 1, 1):  # a rank with fewer experts than the others, and ranks without any
        compare("uneven", 2, experts=experts)
        compare("uneven", 2, experts=experts, fused=True)
    if dist.get_world_size() == 4:
        compare("uneven", 1, replicas=2)
        compare("uneven", 1, replicas=2, fused=True)
        for activation in ("swiglu", "relu"):
            slices(activation=activation)
            slices(activation=activation, fused=True)
    if dist.get_world_size() == 2:  # the rest with fewer processes
        compare("uneven", 3)
        compare("uneven", 1, activation="gelu")
        for options in NETWORKS:
            compare("uneven", 2, fused=True, **options)
        compare("uneven", 1, fused=True, shared_experts=torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
        compare("uneven", 1, shared_experts=torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
        within_the_bound()
        refuse()
        travel_while_multiplying()
        fused_rows_travel_while_multiplying()
        other_routings_have_the_same_shapes()
        compiled()


def within_the_bound() -> None:
    """Fused experts in bfloat16: as near to the exact layer as their roundings allow, with one more for each rank."""
    mesh = mesh_of(1)
    spread, _ = layers(mesh, 1, fused=True, bias=False, dtype=torch.bfloat16)
    exact: Any = copy.deepcopy(layers(mesh, 1, fused=True, bias=False, dtype=torch.bfloat16)[1]).double()
    x = tokens_of(dist.get_world_size(), "uneven")[dist.get_rank()].bfloat16().requires_grad_()
    wide = x.detach().double().requires_grad_()
    _, index, weights = spread.route(x.detach())
    got, want = spread.experts(x, index, weights), exact.experts(wide, index, weights.double())
    up, down = exact.experts.gate_up_proj.detach(), exact.experts.down_proj.detach()
    reach = torch.zeros_like(want)
    for t, j in torch.cartesian_prod(torch.arange(len(x)), torch.arange(TOP)).tolist():
        expert = int(index[t, j])
        gate, value = (up[expert] @ wide[t]).chunk(2)
        hidden = torch.nn.functional.silu(gate) * value
        size = (up[expert].abs() @ wide[t].abs()).chunk(2)
        slack = 1.1 * size[0] * value.abs() + gate.abs() * size[1]  # of sums in float32, as a part of each
        reach[t] += weights[t, j] * (down[expert].abs() @ (hidden.abs() + slack.detach() * 2**-10).detach())
    # the hidden features, each row, each rank's sum and the sum of these are rounded once, by 2**-9 of their size
    assert ((got.double() - want).abs() <= 4 * 2**-9 * 1.01 * reach).all()


def refuse() -> None:
    torch.manual_seed(0)
    mesh = mesh_of(1)["ep"]
    cube = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("x", "y", "z"))
    with pytest.raises(mg.InvalidProblem, match="applied to Linear"):
        parallelize_module(torch.nn.Linear(2, 2), mesh, ExpertParallel())
    with pytest.raises(mg.InvalidProblem, match="spread over one of them"):
        groups_of(cube)
    spread, _ = layers(mesh_of(1), 1, fused=True)
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    with pytest.raises(mg.InvalidProblem, match="no second derivatives: use fused=False"):
        torch.autograd.grad(spread(x).sum(), x, create_graph=True)


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


def fused_rows_travel_while_multiplying() -> None:
    """Own rows are multiplied between the departure of the others and their arrival, in both directions."""
    seen: list[str] = []

    def noted(where: Any, name: str, of: str) -> None:
        inner = getattr(where, name)

        def call(*args: Any, **keywords: Any) -> Any:
            seen.append(of)
            return inner(*args, **keywords)

        patch.setattr(where, name, call)

    with pytest.MonkeyPatch.context() as patch:
        noted(fused_parallel.Journeys, "start", "start")
        noted(fused_parallel.Journeys, "wait", "wait")
        noted(fused_parallel, "product", "product")
        kept: list[bool] = []

        def keeps(*given: Any) -> Any:
            kept.append(given[5])
            seen.append("first")
            return first_product(*given)

        patch.setattr(fused_parallel, "first_product", keeps)
        noted(fused_parallel, "matrix_gradient", "weights")
        copies = note_row_copies(patch, fused_parallel)
        spread, _ = layers(mesh_of(1), 1, fused=True, bias=False, shared_experts=Noted(seen))
        x = torch.randn(20, WIDTH, dtype=torch.float64, requires_grad=True)
        y: Any = spread(x)
        assert seen == ["start", "shared", "first", "wait", "first", "product", "start", "product", "wait"], seen
        seen.clear()
        y.sum().backward()
        there = ["start", "product", "wait", "product"]  # through down, own pairs first
        home = ["start", "product", "start"]  # gradients of routing weights; those of tokens
        assert seen == [*there, *home, "weights", "weights", "shared", "wait", "wait"], seen
        assert len(copies) == 2, "of tokens and of their gradients"
        kept.clear()
        with torch.no_grad():
            assert torch.equal(spread(x), y)
        assert kept == [False, False], "nothing is kept where no gradient is wanted"


def other_routings_have_the_same_shapes() -> None:
    """Steps whose numbers of rows and pairs differ, as every routing has others, make products of few shapes."""
    spread, _ = layers(mesh_of(1), 1, fused=True, bias=False)
    tokens, make = 4096, torch.Generator().manual_seed(dist.get_rank())
    x, weights = torch.ones(tokens, WIDTH).double().requires_grad_(), torch.ones(tokens, TOP).double()
    counts, shapes, asked = set[int](), set[Any](), 0

    def noted(*operands: Tensor, **keywords: Any) -> Tensor:
        nonlocal asked
        asked += 1
        given = (*operands, *keywords.values(), *(keywords.get("combine") or ()))
        shapes.add(tuple(t.shape for t in given if isinstance(t, Tensor)))
        result: Tensor = mg.grouped_gemm(*operands, **keywords)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multigemm.integrations.fused_experts.grouped_gemm", noted)
        for _ in range(12):
            index = torch.rand(tokens, EXPERTS, generator=make).topk(TOP).indices
            counts.add(int((index < EXPERTS // 2).sum()))
            spread.experts(x, index, weights).sum().backward()
    products = 9  # each piece: two, and back through down; those of all tokens, and of two weights
    assert len(counts) > 8 and asked == 12 * products and len(shapes) <= 3 * products, (counts, asked, shapes)
    assert all(n <= fused_parallel.room_for(n) <= max(n + n / 64 + 15, n * 1.08) for n in range(3000))
    assert {fused_parallel.room_for(8192 + n) for n in range(-120, 120)} == {8704}


class Noted(torch.nn.Module):
    """Shared experts that say when they run."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        """Twice x."""
        seen = self.seen

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                seen.append("shared")
                return 2 * x

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                seen.append("shared")
                return 2 * grad

        found: Tensor = Twice.apply(x)  # type: ignore[no-untyped-call]
        return found


# --- checkpoints, data parallelism ---------------------------------------------------------------------


def fill(moe: MoE, seed: int) -> None:
    """Weights that are the same whatever the ranks: expert by expert."""
    torch.manual_seed(seed)
    whole = MoE(WIDTH, HIDDEN, EXPERTS - 1, TOP, bias=True, dtype=torch.float64)
    given: Any = moe.parameters()
    for mine, theirs in zip(given, whole.parameters(), strict=True):
        with torch.no_grad():
            mine.copy_(
                distribute_tensor(theirs, mine.device_mesh, mine.placements) if isinstance(mine, DTensor) else theirs
            )


def trained(mesh: Any) -> tuple[MoE, Any]:
    """Seven experts over the ranks of `mesh`, and Adam after one step."""
    moe = MoE(WIDTH, HIDDEN, EXPERTS - 1, TOP, bias=True, dtype=torch.float64, backend="cpu", fused=True)
    parallelize_module(moe, mesh["ep"], {"experts": ExpertParallel()})
    fill(moe, 11)
    adam = torch.optim.Adam(moe.experts.parameters(), lr=0.1)
    moe(torch.ones(5, WIDTH, dtype=torch.float64)).square().sum().backward()
    adam.step()
    return moe, adam


def save() -> None:
    """Writes the layer and its optimizer, as all ranks hold them; the last rank's parts are smaller."""
    moe, adam = trained(mesh_of(1))
    model, optimizer = get_state_dict(moe, adam)
    save_checkpoint({"model": model, "optimizer": optimizer}, checkpoint_id=FOLDER / "checkpoint")
    if dist.get_rank() == 0:
        torch.save({name: whole(value) for name, value in moe.state_dict().items()}, FOLDER / "weights.pt")
    else:
        for value in moe.state_dict().values():
            whole(value)


def whole(x: Any) -> Tensor:
    """A parameter of all ranks."""
    found: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return found


def load() -> None:
    """Reads what another number of ranks wrote; the next step is theirs."""
    moe, adam = trained(mesh_of(1))
    for value in moe.parameters():
        value.data.zero_()
    model, optimizer = get_state_dict(moe, adam)
    load_checkpoint({"model": model, "optimizer": optimizer}, checkpoint_id=FOLDER / "checkpoint")
    set_state_dict(moe, adam, model_state_dict=model, optim_state_dict=optimizer)
    wanted = torch.load(FOLDER / "weights.pt")
    for name, value in moe.state_dict().items():
        assert torch.equal(whole(value), wanted[name]), name
    moments: Any = adam.state[moe.experts.down_proj]
    assert whole(moments["exp_avg"]).abs().sum() > 0 and moments["step"] == 1


def sharded() -> None:
    """FSDP2 over data-parallel copies of spread experts: the step of one process that has all tokens."""
    mesh = mesh_of(2)
    for fused in (False, True):
        moe = MoE(WIDTH, HIDDEN, EXPERTS, TOP, dtype=torch.float64, backend="cpu", fused=fused)
        torch.manual_seed(3)
        alone = MoE(WIDTH, HIDDEN, EXPERTS, TOP, dtype=torch.float64, backend="cpu")
        moe.load_state_dict(alone.state_dict())
        parallelize_module(moe, mesh["ep"], {"experts": ExpertParallel()})
        fully_shard(moe.experts, mesh=mesh["dp"])
        parts = tokens_of(dist.get_world_size(), "uneven")
        for _ in range(2):  # the second step gathers what the first one changed
            moe.zero_grad()
            alone.zero_grad()
            y = moe(parts[dist.get_rank()])
            y.square().sum().backward()
            alone(torch.cat(parts)).square().sum().backward()
            for mine, theirs in zip(moe.experts.parameters(), alone.experts.parameters(), strict=True):
                assert mine.grad is not None and theirs.grad is not None
                close(2 * whole(mine.grad), theirs.grad)  # FSDP averages over the two copies
                with torch.no_grad():
                    mine.sub_(0.2 * mine.grad)
                    theirs.sub_(0.1 * theirs.grad)
                close(whole(mine), theirs)


# --- faults -------------------------------------------------------------------------------------------


def faults() -> None:
    """Bad input of one rank ends the call on all of them alike, and nothing else; then one hangs."""
    for fused in (False, True):
        bad_input(fused)
    with pytest.raises(mg.InvalidProblem, match=r"the experts differ between ranks: chunks is 1 on rank 0 and 2"):
        parallelize_module(
            layers(mesh_of(1), 1)[1], mesh_of(1)["ep"], {"experts": ExpertParallel(chunks=1 + is_last())}
        )
    end("hang")


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def bad_input(fused: bool) -> None:
    """Each case: what the last rank passes, and what every rank says."""
    spread, _ = layers(mesh_of(1), 2, fused=fused)
    experts = spread.experts
    good = torch.randn(5, WIDTH, dtype=torch.float64), torch.arange(10).view(5, 2) % EXPERTS, torch.ones(5, 2).double()
    last = dist.get_world_size() - 1
    rank = rf"rank {last} of {last + 1}: "
    x, index, weights = good
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((x[0], index, weights), rank + r"x \(6,\), index \(5, 2\)"),
        ((x[:3], index, weights), rank + r"x \(3, 6\), index \(5, 2\)"),
        ((x, index, weights[:, :1]), rank + r"x \(5, 6\), index \(5, 2\), weights \(5, 1\)"),
        ((x, index.double(), weights), rank + r"top_k_index has dtype torch.float64"),
        ((x, index + 1, weights), rank + r"an expert number lies outside of 0..7"),
        ((x, index - 1, weights), rank + r"an expert number lies outside of 0..7"),
        (
            (x.float(), index, weights),
            "x is torch.float32" if fused else r"dtype is torch.float64 on rank 0 and torch.f",
        ),
        ((x[:, :5], index, weights), r"x is torch.float64 \(5, 5\)" if fused else "features is 6 on rank 0 and 5 on"),
        ((x, index[:, :1], weights[:, :1]), "experts of each token is 2 on rank 0 and 1 on rank"),
        ((x.to("meta"), index, weights), rank + "x is on meta, and the ranks exchange rows on cpu"),
        ((x, index, weights.to("meta")), rank + "top_k_weights is on meta, and the ranks"),
        ((None, index, weights), "'NoneType' object has no attribute" if is_last() else rank + "'NoneType'"),
    ]
    state = {name: value.to_local().clone() for name, value in experts.state_dict().items()}
    for given, words in cases:
        with pytest.raises((mg.InvalidProblem, mg.LibraryError, AttributeError), match=words):
            experts(*(given if is_last() else good))
        for name, value in experts.state_dict().items():
            assert torch.equal(value.to_local(), state[name])
        assert all(p.grad is None for p in experts.parameters())
    (y := experts(*good)).sum().backward()  # the group is as good as before
    assert y.isfinite().all() and all(p.grad is not None for p in experts.parameters())


def end(how: str) -> None:
    """The last rank dies or hangs in the middle of a step; every other one must end with an error, and say why."""
    spread, _ = layers(mesh_of(1), 1, fused=True)
    x = tokens_of(dist.get_world_size(), "uneven")[dist.get_rank()].requires_grad_()
    y: Any = spread(x)

    def steps() -> None:
        y.sum().backward()
        for _ in range(3):
            spread(x).sum().backward()

    start = time.monotonic()
    if is_last():
        if how == "die":
            os._exit(7)
        time.sleep(2 * TIMEOUT)
    with pytest.raises(mg.LibraryError, match="one of them has probably died or hangs"):
        steps()
    assert is_last() or time.monotonic() - start < TIMEOUT + 2
    print("ended", flush=True)


def die() -> None:
    """The last rank leaves without a word."""
    end("die")


# --- processes ----------------------------------------------------------------------------------------

SCENARIOS: dict[str, Any] = {
    "agree": agree, "die": die, "faults": faults, "dtensor": dtensor_cases.main, "save": save, "load": load,
    "sharded": sharded,
}  # fmt: skip


def of_rank(rank: int, ranks: int, folder: Path, scenario: str) -> None:
    """One rank, from its start to its end; what it prints goes to a file."""
    with (folder / f"{scenario}-{rank}").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    try:
        torch.set_num_threads(1)
        meet = f"file://{folder}/meet-{scenario}"
        limit = timedelta(seconds=TIMEOUT)
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=limit)
        SCENARIOS[scenario]()
        if scenario not in ("die", "faults"):
            dist.barrier()
            dist.destroy_process_group()
        print("fine", flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # torch's threads may outlive the interpreter, which then aborts now and then


def run_ranks(ranks: int, folder: Path, scenario: str, limit: float) -> list[int]:
    """The exit codes of all ranks of a scenario; those that do not end within `limit` seconds are killed (-9)."""
    children: dict[int, int] = {}
    for rank in range(ranks):
        child = os.fork()
        if not child:
            of_rank(rank, ranks, folder, scenario)
        children[rank] = child
    codes: dict[int, int] = {}
    end = time.monotonic() + limit
    while len(codes) < ranks:
        for rank in children.keys() - codes.keys():
            if time.monotonic() > end:
                os.kill(children[rank], signal.SIGKILL)
            done, status = os.waitpid(children[rank], os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return [codes[rank] for rank in range(ranks)]


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        TIMEOUT, FOLDER = asked["timeout"], Path(asked["folder"]).parent
        codes = run_ranks(asked["ranks"], Path(asked["folder"]), asked["scenario"], asked["limit"])
        print(json.dumps(codes), flush=True)
