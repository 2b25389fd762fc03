"""Experts on many ranks: rows travel to the rank that holds their expert, and back. No row is dropped.

Every rank holds ceil(E/R) of E experts; the last ranks may hold fewer or none. A rank sorts its rows by expert, so that
the rows for one rank are contiguous. Counts travel first, then rows, by torch's functional all-to-all, whose gradient
is the reverse exchange. Between the two exchanges the caller's function runs on rows sorted by local expert. Fused
experts (fused_parallel.py) send each token once to each rank instead.

In torch the splits of an uneven all-to-all are host numbers, so each exchange waits for the device once, for all counts
together. With `chunks` > 1 the tokens are cut into pieces. All pieces are sent before the first is computed, and
results are waited for after the last was computed, so that rows travel during products; the same holds for the backward
pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.integrations.expert_network import Compute, Routing, check_routing, combine, dispatch, permute, route
from multigemm.integrations.rank_agreement import Agreed, Input, agree, explained
from multigemm.torch_internals import no_dynamo

_collectives: Any = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Journey:
    """How many rows of one piece go to and come from each rank, and the local expert of each arriving row."""

    sent: list[int]
    received: list[int]
    local: Tensor


@dataclass(frozen=True, slots=True)
class Sent:
    """One piece of tokens on its way: the rows that arrived here, and how to send results back."""

    routing: Routing
    rows: Exchange
    way: Journey


def groups_of(mesh: Any) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """The process groups of a DeviceMesh: the ranks over which experts are spread, and the ranks that hold slices of
    each expert, or None.

    A mesh of one dimension, or a process group, spreads experts; the second dimension of a mesh slices them.
    """
    if isinstance(mesh, dist.ProcessGroup):
        return mesh, None
    if mesh.ndim > 2:
        raise InvalidProblem(
            f"the mesh has dimensions {mesh.mesh_dim_names}; experts are spread over one of them, and sliced over a "
            "second if there is one: pass mesh['name'] or mesh['name', 'name']"
        )
    return mesh.get_group(0), mesh.get_group(1) if mesh.ndim == 2 else None


def experts_per_rank(experts: int, ranks: int) -> int:
    """The number of experts of a rank, as DTensor's Shard(0) has it; the last ranks may hold fewer or none."""
    return -(-experts // ranks)


def experts_here(experts: int, group: dist.ProcessGroup) -> int:
    """The number of `experts` that this rank of the group holds."""
    each = experts_per_rank(experts, group.size())
    return max(0, min(each, experts - group.rank() * each))


@no_dynamo
def run_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: int,
    compute: Compute,
    mesh: Any,
    chunks: int = 1,
    beside: Callable[[], Tensor] | None = None,
) -> Tensor:
    """This rank's tokens x [tokens, H] through all `experts`; every rank of the mesh must call it.

    `compute` runs on the rows that reach this rank's experts. Ranks may have different numbers of
    tokens, none included; `chunks` must be the same on all of them. Ranks that hold slices of the same
    experts (the mesh's second dimension) pass the same tokens, and `compute` gives partial sums. What `beside` returns,
    [tokens, H], is computed while rows travel, and added.

    Raises:
        InvalidProblem: on every rank alike, if one of them passes what is no routing, or what does not fit the others.
        LibraryError: a rank does not answer within the group's timeout.
    """
    group, slices = groups_of(mesh)
    device = device_of(mesh, x)
    if slices is not None:
        x, top_k_weights = enter(x, slices), enter(top_k_weights, slices)
    here, ranks = experts_per_rank(experts, group.size()), group.size()
    routings: list[Routing] = []

    def read() -> Input:
        check_routing_on(device, x, top_k_index, top_k_weights)
        routings.extend(route(index, experts) for index in top_k_index.tensor_split(chunks))
        ends = torch.stack([routing.ends for routing in routings]).to(torch.int64)
        counts = F.pad(ends.diff(dim=1, prepend=ends.new_zeros(chunks, 1)), (0, here * ranks - experts))

        def count(into: Tensor) -> None:
            into[:, 0] = top_k_index.numel() - counts.sum()
            into[:, 1:] = counts.view(chunks, ranks, here).transpose(0, 1).reshape(ranks, -1)

        return Input(x.dtype, x.shape[1], top_k_index.shape[1], count)

    agreed = agree(read, chunks * here, experts, group, device)
    journeys = _journeys(agreed, chunks, here)
    pieces = zip(x.tensor_split(chunks), top_k_weights.tensor_split(chunks), routings, journeys, strict=True)
    with explained(group):
        under_way = [
            (Sent(routing, Exchange(dispatch(part, routing), way.received, way.sent, group), way), weights)
            for part, weights, routing, way in pieces
        ]
        extra = None if beside is None else beside()
        results = [_send_home(piece, compute, experts_here(experts, group), group) for piece, _ in under_way]
        home = [
            combine(rows.arrive(), weights, piece.routing)
            for rows, (piece, weights) in zip(results, under_way, strict=True)
        ]
        result = torch.cat(home) if chunks > 1 else home[0]
        result = result if slices is None else leave(result, slices)
        return result if extra is None else result + extra


def device_of(mesh: Any, x: Tensor) -> torch.device:
    """The device on which the ranks of a mesh exchange rows, wherever a rank's tokens lie."""
    if isinstance(mesh, dist.ProcessGroup):
        return x.device
    cuda = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(mesh.device_type)


def check_routing_on(device: torch.device, x: Tensor, index: Tensor, weights: Tensor) -> None:
    """Refuses an index or weights that are not [tokens, k] for tokens x [tokens, H], or not on the device."""
    check_routing(x, index, weights)
    for name, given in (("x", x), ("top_k_index", index), ("top_k_weights", weights)):
        if given.device != device:
            raise InvalidProblem(f"{name} is on {given.device}, and the ranks exchange rows on {device}: move it there")


def _journeys(agreed: Agreed, chunks: int, here: int) -> list[Journey]:
    """The `Journey` of each piece, from the counts [ranks, pieces, experts of a rank]."""
    ranks = len(agreed.sent)
    cuts = [slice(piece * here, (piece + 1) * here) for piece in range(chunks)]
    sent, received = ([[sum(n[cut]) for n in counts] for cut in cuts] for counts in (agreed.sent, agreed.received))
    arriving = agreed.arriving.reshape(ranks, chunks, here)
    experts = torch.arange(here, device=arriving.device).repeat(ranks)
    return [
        Journey(out, back, experts.repeat_interleave(arriving[:, piece].reshape(-1), output_size=sum(back)))
        for piece, (out, back) in enumerate(zip(sent, received, strict=True))
    ]


def _send_home(piece: Sent, compute: Compute, here: int, group: dist.ProcessGroup) -> Exchange:
    """Computes on the rows of a piece and sends the results back. Rows arrive by rank, and by expert within a rank; a
    stable sort makes each expert's rows contiguous.

    Waits for the rows of this piece, but not for the results to arrive.
    """
    sorting = route(piece.way.local.unsqueeze(1), here)
    results = compute(permute(piece.rows.arrive(), sorting.order, sorting.inverse), sorting.ends)
    back = permute(results, sorting.inverse, sorting.order)
    return Exchange(back, piece.way.sent, piece.way.received, group)


# --- an all-to-all in two halves ----------------------------------------------------------------------
#
# Something else can be computed while rows are under way. The gradients of the halves are each other's mirror image:
# the gradient of `arrive` starts the way back, that of the departure waits for it. So whatever lies between the two in
# the forward pass also lies between them in the backward pass, where autograd runs the youngest call first.


def begin(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Starts to send `sent[r]` rows to each rank r. The result will hold `received[r]` rows of each rank."""
    with explained(group):
        under_way: Tensor = _collectives.all_to_all_single(rows.contiguous(), received, sent, group.group_name)
    return under_way


def finish(under_way: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of `begin`, which work on the current stream may read from now on."""
    with explained(group):
        there: Tensor = _collectives.wait_tensor(under_way)
    return there


class _Depart(torch.autograd.Function):
    """Autograd function: rows -> a ticket without data, which has the rows' shape because its gradient is theirs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return rows.new_empty(()).expand(rows.shape)

    @staticmethod
    def backward(ctx: Any, under_way: Tensor) -> Any:
        return finish(under_way, ctx.group), None


class _Arrive(torch.autograd.Function):
    """Autograd function: a ticket, and the rows on their way for it -> the rows."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, under_way: Tensor, *way: Any) -> Tensor:
        ctx.way = way
        return finish(under_way, way[2]).view_as(under_way)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        received, sent, group = ctx.way
        back = begin(grad, sent, received, group)
        if torch.is_anomaly_enabled():
            finish(back, group)  # anomaly detection reads every gradient as soon as it is returned
        return back, None, None, None, None


class Exchange:
    """Rows on their way. `arrive()` returns them and can be called once."""

    def __init__(self, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> None:
        self._way = received, sent, group
        self._ticket: Tensor = _Depart.apply(rows, group)  # type: ignore[no-untyped-call]
        self._under_way = begin(rows.detach(), *self._way)

    def arrive(self) -> Tensor:
        """Returns the rows that came, which may be read from now on."""
        rows: Tensor = _Arrive.apply(self._ticket, self._under_way, *self._way)  # type: ignore[no-untyped-call]
        return rows


# --- the two ends of a tensor-parallel region ---------------------------------------------------------
#
# Inside, ranks hold slices of the weights and form partial sums of one result. What enters is the same on all ranks, so
# its gradients are summed; what leaves is summed, so its gradient is the same on all.


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Share(torch.autograd.Function):
    """Autograd function: this rank's share of a bias that every rank adds to its partial sum. Its gradient is that of
    the whole bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        return x / ranks

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    with explained(group):
        total: Tensor = collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))  # type: ignore[no-untyped-call]
    return total


def enter(x: Tensor, group: Any) -> Tensor:
    """Enters the sliced region, in which `x` is the same on all ranks."""
    return _Enter.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def leave(x: Tensor, group: Any) -> Tensor:
    """Leaves the sliced region: adds the parts of all ranks."""
    return _Leave.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def share(bias: Tensor, ranks: int) -> Tensor:
    """This rank's share of a bias of the summed result."""
    return _Share.apply(bias, ranks)  # type: ignore[no-any-return, no-untyped-call]
