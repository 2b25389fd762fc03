"""Experts on many ranks: rows travel to the rank that holds their expert, and back. Dropless.

Rank r of R holds experts [r*E/R, (r+1)*E/R). A rank sorts its rows by expert, so what goes to one rank
is one piece; counts travel first, then rows, by torch's functional all-to-all, whose gradient is the
way back. Between the two sits whatever the caller does to rows that are sorted by local expert.

The splits of an uneven all-to-all are host numbers in torch, so each exchange waits for the device
once, for all counts together. With `chunks` > 1 tokens are cut in pieces: all pieces are sent before
the first is computed on, so that rows travel while others are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from multigemm.errors import InvalidProblem, LibraryError
from multigemm.integrations.routing import Routing, combine, dispatch, permute, route
from multigemm.integrations.tensor_parallel import enter, leave

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows [S, H] sorted by local expert, ends [experts here]) -> rows [S, H']."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One piece of the tokens under way: what came here, and how to send results home."""

    routing: Routing
    rows: Tensor
    local: Tensor
    sent: list[int]
    received: list[int]


def groups_of(mesh: Any) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """(the ranks that the experts are spread over, the ranks that hold slices of each, or None) of a DeviceMesh.

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


def experts_here(experts: int, group: dist.ProcessGroup) -> int:
    """How many of `experts` each rank of the group holds."""
    ranks = group.size()
    if experts % ranks:
        raise InvalidProblem(f"{experts} experts cannot be spread evenly over {ranks} ranks: choose a divisor")
    return experts // ranks


def run_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: int, compute: Compute, mesh: Any, chunks: int = 1
) -> Tensor:
    """This rank's tokens x [tokens, H] through all `experts`; every rank of the mesh must call it.

    `compute` runs on the rows that reach this rank's experts. Ranks may have different numbers of
    tokens, none included; `chunks` must be the same on all of them. Ranks that hold slices of the same
    experts (the mesh's second dimension) pass the same tokens, and `compute` gives partial sums.
    """
    group, slices = groups_of(mesh)
    here = experts_here(experts, group)
    if slices is not None:
        x, top_k_weights = enter(x, slices), enter(top_k_weights, slices)
    pieces = [p.tensor_split(chunks) for p in (x, top_k_index, top_k_weights)]
    with _explained(group):
        under_way = [_send(part, index, experts, here, group) for part, index in zip(*pieces[:2], strict=True)]
        results = [_send_home(piece, compute, here, group) for piece in under_way]
        home = [
            combine(rows, weights, piece.routing)
            for rows, weights, piece in zip(results, pieces[2], under_way, strict=True)
        ]
        result = torch.cat(home) if chunks > 1 else home[0]
        return result if slices is None else leave(result, slices)


def _send(x: Tensor, index: Tensor, experts: int, here: int, group: dist.ProcessGroup) -> Sent:
    routing = route(index, experts)
    counts = routing.ends.diff(prepend=routing.ends.new_zeros(1)).to(torch.int64)
    arriving = collectives.all_to_all_single(counts, None, None, group).view(group.size(), here)
    # the one wait for the device: how many rows go to and come from each rank
    splits = torch.stack([counts.view(group.size(), here).sum(1), arriving.sum(1)]).tolist()
    rows = dispatch(x, routing)
    if sum(splits[0]) != rows.shape[0]:
        raise InvalidProblem(f"an expert number lies outside of 0..{experts - 1}")
    received = collectives.all_to_all_single_autograd(rows, splits[1], splits[0], group)
    local = torch.arange(here, device=x.device).repeat(group.size())
    local = local.repeat_interleave(arriving.reshape(-1), output_size=sum(splits[1]))
    return Sent(routing, received, local, splits[0], splits[1])


def _send_home(piece: Sent, compute: Compute, here: int, group: dist.ProcessGroup) -> Tensor:
    """Rows came by rank, and within a rank by expert; a stable sort puts each expert's rows together.

    The first operation on `piece.rows` waits for them; nothing waits here for what is sent back.
    """
    sorting = route(piece.local.unsqueeze(1), here)
    results = compute(permute(piece.rows, sorting.order, sorting.inverse), sorting.ends)
    back = permute(results, sorting.inverse, sorting.order)
    return collectives.all_to_all_single_autograd(back, piece.sent, piece.received, group)


@contextmanager
def _explained(group: dist.ProcessGroup) -> Iterator[None]:
    """A collective that fails says what was going on, and whom to look at."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "onnection" in str(error) or "imed out" in str(error):
            raise LibraryError(
                f"rank {dist.get_rank()} could not exchange rows with its group of {group.size()} ranks; one of them "
                f"has probably died or hangs: see their logs ({error})"
            ) from error
        raise
