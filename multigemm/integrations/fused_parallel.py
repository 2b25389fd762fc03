"""Fused experts on many ranks: a token travels once to each rank that has experts of it, and one sum comes back.

The fused products read rows by number, so rows are not exchanged by expert: what came is one matrix X, this rank's own
tokens first, and a token's pairs of token and expert read the same row of it (many are copied before a product). A
rank sums what its experts make of a token, by weight, and sends the sum home, where the sums of all ranks are added
(float32, own first, then by rank) and rounded once.

Rows are worked on in pieces: this rank's own tokens, which travel nowhere, then those of the others, in `chunks`. How
many rows and pairs a piece has changes with every routing. `room_for` rounds them up, so that the products of a step
find the bound launches of an earlier one: what is behind the last row or pair belongs to no expert, and no product
reads it.

    forward     send all; first product of the own piece; for each piece of the others: wait, both products, send the
                sums home; copy the own rows into X; second product of the own piece; wait, add
    backward    send gradients; own piece, back through down and the gate; for each other one: wait, the same, send the
                gradients of routing weights home; those of all tokens, of which others' go home; those of all weights;
                wait, add

A token travels as one row, [features | experts and weights], since each exchange needs multiprocessors of its own: the
products are persistent kernels, and an exchange that comes after one of them has begun waits for its end. So a short
kernel stands between the departure of rows and a product that might otherwise begin at the same time.

So an exchange always has products beside it: the own ones on the way there, and on the way home the second product, or
the gradients of the weights. The backward pass of the gate writes all pairs of an expert side by side, whatever piece
they are of: what comes behind it is one product over all pieces. What a caller computes between `_Leave` and `_Finish`,
such as shared experts, lies beside the way there, and in the backward pass beside the way home.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.integrations import expert_parallel
from multigemm.integrations.expert_network import Network, by_rows
from multigemm.integrations.fused_experts import (
    first_product,
    gate_backward,
    in_autocast,
    matrix_gradient,
    product,
)
from multigemm.integrations.layer_ops import (
    Pairs,
    add_returned,
    copy_rows,
    exchange_kernels,
    kernels_for,
    rows_of_pairs,
    sort_pairs,
    sum_by_expert,
)
from multigemm.integrations.rank_agreement import Input, agree, explained
from multigemm.problem.spec import bucket
from multigemm.torch_internals import no_dynamo, pause_stream

ROOM = 16
"""The smallest number of rows or pairs for which a piece has memory; larger numbers are multiples of a power of two."""
WORD, LINE = 8, 128
"""Bytes to which experts and weights are aligned in a row that travels, and rows."""
NO_EXPERT = 1 << 24
"""The value after the last row of a piece, in place of expert numbers and of the bits of their weights. As a number it
exceeds the number of experts; as bits it is a finite weight."""


def room_for(count: int) -> int:
    """`count` plus 1/64, rounded up to one of 16 sizes per octave. Counts about a round number, which an even routing
    of a round number of tokens gives, get the same size."""
    count += count // 64
    step = max(ROOM, bucket(count) // 32)
    return -(-count // step) * step


class Held(NamedTuple):
    """This rank's part of the weights, as `fused_experts.experts_forward` takes them; `experts` counts those of all
    ranks."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    experts: int


@no_dynamo
def run_fused(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    held: Held,
    net: Network,
    mesh: Any,
    chunks: int = 1,
    beside: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Runs this rank's tokens x [tokens, H] through all experts. Every rank of the mesh must call it, with equal
    `chunks`.

    Args, results and errors are those of `expert_parallel.run_experts`, but `chunks` cuts only what comes from others.
    """
    group, slices = expert_parallel.groups_of(mesh)
    device = expert_parallel.device_of(mesh, x)
    *parameters, x = in_autocast(held.up, held.down, held.up_bias, held.down_bias, x)  # x may be on any device
    if slices is not None:
        x, weights = expert_parallel.enter(x, slices), expert_parallel.enter(weights, slices)
    call = _Call(held.experts, parameters[0], group, chunks, device)
    call.records = torch.is_grad_enabled()
    tickets = _Leave.apply(call, index, x, weights)  # type: ignore[no-untyped-call]
    extra = None if beside is None else beside()
    result: Tensor = _Finish.apply(call, net, *tickets, *parameters)  # type: ignore[no-untyped-call]
    result = result if slices is None else expert_parallel.leave(result, slices)
    return result if extra is None else result + extra


# --- who goes where -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Journeys:
    """Which tokens travel to which ranks, in chunks, and where arriving rows lie.

    `send[c]` and `receive[c]`: how many rows of chunk c go to and come from each rank. `tokens` [sent rows] says which
    token each row is of, and `place` [chunks, ranks, tokens of a chunk] which row carries a token to a rank, -1 where
    none does. `pieces`: where each piece lies in X, the own one first, with room behind what `receive` says; `pairs`:
    how many pairs of token and expert each has room for.
    """

    group: dist.ProcessGroup
    send: list[list[int]]
    receive: list[list[int]]
    tokens: Tensor
    place: Tensor
    pieces: list[slice]
    pairs: list[int]

    @property
    def departures(self) -> list[slice]:
        """The positions of each chunk's rows among all sent rows."""
        ends = list(accumulate(map(sum, self.send), initial=0))
        return [slice(a, b) for a, b in pairwise(ends)]

    @property
    def arrivals(self) -> list[slice]:
        """The positions of each chunk's rows in X."""
        return [slice(at.start, at.start + sum(n)) for at, n in zip(self.pieces[1:], self.receive, strict=True)]

    def start(self, rows: Tensor, out: Tensor, chunk: int, home: bool) -> Any:
        """Starts to send the rows of a chunk, to the experts or home."""
        send, receive = self.send[chunk], self.receive[chunk]
        if home:
            send, receive, rows = receive, send, rows[: sum(receive)]
        with explained(self.group):
            return dist.all_to_all_single(out, rows, receive, send, group=self.group, async_op=True)

    def start_all(self, rows_of: Callable[[Tensor], Tensor], whole: Tensor) -> list[Any]:
        """Sends the rows that `rows_of` gives for token numbers, into X. Returns the exchanges by chunk."""
        return [
            self.start(rows_of(self.tokens[sent]), whole[where], chunk, False)
            for chunk, (where, sent) in enumerate(zip(self.arrivals, self.departures, strict=True))
        ]

    def empty_rooms(self, routing: Tensor) -> None:
        """Marks the spare rows of X as rows of no expert."""
        for piece, came in zip(self.pieces[1:], self.arrivals, strict=True):
            if came.stop < piece.stop:
                routing[came.stop : piece.stop].fill_(NO_EXPERT)

    def wait(self, *works: Any) -> None:
        """Makes the current stream wait for the rows of these exchanges."""
        with explained(self.group):
            for work in works:
                work.wait()


class Return:
    """Rows of all chunks on their way home, one for each row that was sent."""

    def __init__(self, ways: Journeys, like: Tensor) -> None:
        self._ways = ways
        self._under_way: list[tuple[Any, Tensor]] = []
        self._came = like.new_empty(len(ways.tokens), like.shape[1])

    def send(self, chunk: int, rows: Tensor) -> None:
        """Starts to send the rows of a chunk home."""
        came = self._came[self._ways.departures[chunk]]
        self._under_way.append((self._ways.start(rows, came, chunk, True), rows))

    def added_to(self, own: Tensor) -> Tensor:
        """`own` [tokens, n] plus the rows that came home for each token."""
        self.wait()
        return add_returned(own, self._came, self._ways.place)

    def wait(self) -> None:
        """Makes the current stream wait for the rows."""
        self._ways.wait(*(work for work, _ in self._under_way))
        self._under_way.clear()


class _Own(NamedTuple):
    """This rank's tokens, their weights, their routing (experts and weights side by side), and the pairs whose experts
    are here."""

    x: Tensor
    weights: Tensor
    routing: Tensor
    pairs: Pairs

    def empty_rows(self, count: int) -> Rows:
        """Memory for rows of tokens that travel."""
        (_, features), (_, numbers), x, kind = self.x.shape, self.routing.shape, self.x, self.routing.dtype
        width, start = row_layout(features, x.element_size(), numbers, self.routing.element_size())
        whole = x.new_empty((count, width))
        return Rows(whole, whole.narrow(1, 0, features), whole.view(kind).narrow(1, start, numbers))

    def rows_of(self, tokens: Tensor) -> Tensor:
        """These tokens as rows to send."""
        rows = self.empty_rows(tokens.shape[0])
        copy_rows((self.x, self.routing), tokens, (rows.x, rows.routing))
        return rows.whole


@lru_cache(maxsize=64)
def row_layout(features: int, size: int, numbers: int, number_size: int) -> tuple[int, int]:
    """The number of elements of a sent row, and the index at which experts and weights begin, given sizes in bytes."""
    start = -(-features * size // WORD) * WORD
    return -(-(start + numbers * number_size) // LINE) * LINE // size, start // number_size


class Rows(NamedTuple):
    """Sent rows of tokens and their two parts: features, then experts and weights."""

    whole: Tensor
    x: Tensor
    routing: Tensor


class _Call:
    """The state that both halves of one call share: its journeys, and the exchanges between them."""

    def __init__(self, experts: int, up: Tensor, group: dist.ProcessGroup, chunks: int, device: torch.device) -> None:
        self.experts, self.group, self.chunks, self.device = experts, group, chunks, device
        self.each = expert_parallel.experts_per_rank(experts, group.size())
        self.here, self.weight = up.shape[0], (up.dtype, tuple(up.shape[1:]))
        self.records = self.needs_grad = False
        self.ways: Journeys
        self.own: _Own
        self.rows: Rows
        self.arrivals: list[Any]
        self.returns: list[Return] = []

    def plan(self, index: Tensor, x: Tensor, weights: Tensor, needs_grad: bool) -> None:
        """Tells the other ranks how many rows will come, and lays out which."""
        here, chunks = self.group.rank(), self.chunks
        leave: list[Departures] = []
        layout: list[Tensor] = []

        def read() -> Input:
            self._check(x, index, weights)
            leave.append(Departures(index, self.experts, self.group, chunks))
            return Input(x.dtype, x.shape[1], index.shape[1], leave[0].count, needs_grad)

        def lay_out() -> None:
            layout.extend(leave[0].lay_out())
            wide = weights.to(torch.promote_types(weights.dtype, torch.float32)).contiguous()
            self.own = _Own(x, wide, _packed(index, wide), self.sorted(index))

        agreed = agree(read, 2 * chunks, self.experts, self.group, self.device, lay_out)
        send, receive = (
            [[of_rank[2 * c] for of_rank in counts] for c in range(chunks)] for counts in (agreed.sent, agreed.received)
        )
        rooms = [room_for(sum(rows)) for rows in receive]
        tokens, top_k = index.shape
        ends = [0, *accumulate(rooms, initial=tokens)]
        others = [of_rank for rank, of_rank in enumerate(agreed.received) if rank != here]
        many = [sum(agreed.sent[here][1::2]), *(sum(of_rank[2 * c + 1] for of_rank in others) for c in range(chunks))]
        self.ways = Journeys(
            self.group, send, receive, tokens=layout[0][: sum(map(sum, send))], place=layout[1],
            pieces=[slice(a, b) for a, b in pairwise(ends)],
            pairs=[min(room_for(n), rows * top_k) for n, rows in zip(many, (tokens, *rooms), strict=True)],
        )  # fmt: skip
        self.needs_grad = agreed.needs_grad

    def _check(self, x: Tensor, index: Tensor, weights: Tensor) -> None:
        expert_parallel.check_routing_on(self.device, x, index, weights)
        dtype, shape = self.weight
        if not weights.dtype.is_floating_point:
            raise InvalidProblem(
                f"top_k_weights have dtype {weights.dtype}; they must be floating-point: call .float()"
            )
        if x.dtype != dtype or x.shape[1] not in shape:
            raise InvalidProblem(
                f"x is {x.dtype} {tuple(x.shape)}, and the experts take {dtype} of {shape[0]} or {shape[1]} features"
            )

    def sorted(self, index: Tensor) -> Pairs:
        """Pairs of token and expert by this rank's experts; pairs of other ranks' experts come last."""
        return sort_pairs(index - self.group.rank() * self.each, self.here)


class Departures:
    """Which tokens travel to which ranks, by chunk. Counted first, because the other ranks wait for the counts, then
    laid out."""

    def __init__(self, index: Tensor, experts: int, group: dist.ProcessGroup, chunks: int) -> None:
        self._index, self._experts, self._chunks = index, experts, chunks
        self._ranks, self._here = group.size(), group.rank()
        self._each = max(expert_parallel.experts_per_rank(experts, self._ranks), 1)
        self._kernels = kernels_for(index, exchange_kernels)
        self._found: Tensor

    def count(self, into: Tensor) -> None:
        """Writes to a zeroed [ranks, 1 + 2 chunks]: the number of invalid expert numbers; rows and pairs of each
        chunk."""
        index, ranks, chunks = self._index, self._ranks, self._chunks
        if self._kernels is not None:
            numbers = self._experts, self._each, self._here, chunks
            self._found = self._kernels.count_departures(index, *numbers, into)
            return
        known = (index >= 0) & (index < self._experts)
        owner = torch.where(known, index // self._each, ranks).long()
        pairs = owner.new_zeros(len(index), ranks + 1).scatter_add_(1, owner, torch.ones_like(owner))
        if missing := -len(index) % chunks:
            pairs = F.pad(pairs, (0, 0, 0, missing))
        pairs = pairs.view(chunks, -1, ranks + 1)
        self._found = (pairs > 0).transpose(1, 2)[:, :ranks].contiguous()
        self._found[:, self._here] = False
        many = pairs.sum(1)
        into[:, 0] = many[:, ranks].sum()
        into[:, 1:] = torch.stack([self._found.sum(2), many[:, :ranks]], 2).transpose(0, 1).reshape(ranks, -1)

    def lay_out(self) -> tuple[Tensor, Tensor]:
        """The tokens of the rows to send, by chunk, rank and token, with room for all; and their positions [chunks,
        ranks, tokens of a chunk], -1 where a token does not travel to a rank."""
        if self._kernels is not None:
            numbers = self._experts, self._each, self._here, self._chunks
            found: tuple[Tensor, Tensor] = self._kernels.lay_out_departures(self._index, *numbers, self._found)
            return found
        flat = self._found.view(-1)
        sent = flat.cumsum(0)
        place = (sent * flat - 1).view(self._found.shape)
        chunks, ranks, tokens = self._found.shape
        found_at = torch.searchsorted(sent, torch.arange(1, flat.numel() + 1, device=flat.device))
        rows = found_at % max(tokens, 1)
        return (rows if chunks == 1 else rows + found_at // max(ranks * tokens, 1) * tokens), place


def _packed(index: Tensor, weights: Tensor) -> Tensor:
    """Experts and the bits of float32 or float64 weights side by side, [tokens, 2 k]."""
    whole = torch.int64 if weights.dtype is torch.float64 else torch.int32
    return torch.cat([index.to(whole), weights.view(whole)], 1)


def _index_of(routing: Tensor) -> Tensor:
    return routing[:, : routing.shape[1] // 2]


def _weights_of(routing: Tensor) -> Tensor:
    found = routing[:, routing.shape[1] // 2 :].contiguous()
    return found.view(torch.float64 if routing.dtype is torch.int64 else torch.float32)


# --- the layer ----------------------------------------------------------------------------------------


class _Leave(torch.autograd.Function):
    """Autograd function: tokens and weights -> two tickets without data, of their shapes. Starts to send the rows."""

    @staticmethod
    def forward(ctx: Any, call: _Call, index: Tensor, x: Tensor, weights: Tensor) -> Any:
        call.plan(index, x, weights, call.records and any(ctx.needs_input_grad[2:]))
        call.rows = call.own.empty_rows(call.ways.pieces[-1].stop)
        call.arrivals = call.ways.start_all(call.own.rows_of, call.rows.whole)
        ctx.call, ctx.dtype = call, weights.dtype
        wide = call.own.weights
        return x.new_empty(()).expand(x.shape), wide.new_empty(()).expand(weights.shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dweights: Tensor) -> Any:
        of_rows, of_weights = ctx.call.returns
        ctx.call.returns = []
        return None, None, of_rows.added_to(dx), of_weights.added_to(dweights).to(ctx.dtype)


class _Finish(torch.autograd.Function):
    """Autograd function: tickets and weights -> the result of the layer. Tensors are separate arguments so that
    autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, net: Network, ticket: Tensor, weights_ticket: Tensor, *parameters: Any
    ) -> Tensor:
        up, down, up_bias, down_bias = parameters
        own_rows, (_, x, routing) = call.own, call.rows
        layer = _Layer(call, net, up, down, up_bias, down_bias, x, routing)
        differentiable = call.records and any(ctx.needs_input_grad)
        keep = differentiable and not net.recompute
        own_hidden, own = layer.first(own_rows.x, layer.own_piece(), keep)
        call.ways.empty_rooms(routing)
        back = Return(call.ways, own_rows.x)
        pieces = [own]
        for chunk, work in enumerate(call.arrivals):
            call.ways.wait(work)
            hidden, piece = layer.first(x[call.ways.pieces[chunk + 1]], layer.arrived(chunk + 1), keep)
            back.send(chunk, layer.second(piece, hidden))
            pieces.append(piece)
        if differentiable:
            here = call.ways.pieces[0]
            copy_rows((own_rows.x, own_rows.routing), None, (x[here], routing[here]))
        else:
            pause_stream(x.device)
        result = back.added_to(layer.second(own, own_hidden))
        kept = [tensor for piece in pieces for tensor in (*piece.pairs, piece.weights, piece.preact)]
        ctx.call, ctx.net = call, net
        ctx.save_for_backward(*parameters, x, routing, *kept)
        del call.rows, call.arrivals, call.own
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise InvalidProblem("fused experts over a mesh have no second derivatives: use fused=False for them")
        call, saved = ctx.call, ctx.saved_tensors
        up, down, up_bias, down_bias, x, routing = saved[:6]
        layer = _Layer(call, ctx.net, up, down, up_bias, down_bias, x, routing)
        pieces = [_Piece(Pairs(*saved[at : at + 4]), *saved[at + 4 : at + 6]) for at in range(6, len(saved), 6)]
        tickets, found = layer.backward(pieces, grad.contiguous(), ctx.needs_input_grad[4:])
        if not (ctx.needs_input_grad[2] or ctx.needs_input_grad[3]):
            for rows in call.returns:
                rows.wait()
            call.returns = []
        return None, None, *tickets, *found


class _Piece(NamedTuple):
    """Rows that are worked on together: their pairs of token and expert, then some of no expert here; the weights of
    all pairs; and the first products before the gate, if they are kept."""

    pairs: Pairs
    weights: Tensor
    preact: Tensor | None


class _Layer(NamedTuple):
    """This rank's part of the layer."""

    call: _Call
    net: Network
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    x: Tensor
    routing: Tensor

    def own_piece(self) -> _Piece:
        """The piece of this rank's own rows."""
        return self._piece(0, self.call.own.pairs, self.call.own.weights)

    def arrived(self, number: int) -> _Piece:
        """A piece of other ranks' rows that have arrived."""
        routing = self.routing[self.call.ways.pieces[number]]
        return self._piece(number, self.call.sorted(_index_of(routing)), _weights_of(routing))

    def _piece(self, number: int, found: Pairs, weights: Tensor) -> _Piece:
        count = self.call.ways.pairs[number]
        return _Piece(found._replace(tokens=found.tokens[:count], order=found.order[:count]), weights, None)

    def first(self, x: Tensor, piece: _Piece, keep: bool) -> tuple[Tensor, _Piece]:
        """The gated values of each pair of rows x, and the piece, with the first products if `keep` them."""
        if not len(piece.pairs.tokens):
            return x.new_empty(0, self.down.shape[1 if self.net.stacked else 2]), piece
        hidden, preact = first_product(self.net, x, piece.pairs, self.up, self.up_bias, keep)
        return hidden, piece._replace(preact=preact)

    def second(self, piece: _Piece, hidden: Tensor) -> Tensor:
        """The weighted sum of each row's pairs on this rank."""
        weights = piece.weights.detach()
        return self._summed(piece.pairs, hidden, by_rows(self.down, self.net.stacked), weights, bias=self.down_bias)

    def _summed(self, pairs: Pairs, rows: Tensor, b: Tensor, weights: Tensor | None, **keywords: Any) -> Tensor:
        if not len(pairs.order):
            return rows.new_zeros(len(pairs.place), b.shape[2])
        return product(self.net, rows, b, pairs.ends, combine=(pairs.place, weights), **keywords)

    def backward(
        self, pieces: list[_Piece], grad: Tensor, wanted: tuple[bool, ...]
    ) -> tuple[tuple[Tensor | None, Tensor | None], list[Tensor | None]]:
        """The gradients of the own tokens and their weights by this rank's experts, then those of all parameters.

        The other ranks' contributions to the first two are on their way, in `call.returns`.
        """
        call, ways = self.call, self.call.ways
        whole = grad.new_empty(ways.pieces[-1].stop, grad.shape[1])
        arrivals = ways.start_all(lambda tokens: grad.index_select(0, tokens), whole)
        whole[ways.pieces[0]].copy_(grad)
        every, places = self._every_pair(pieces)
        weights = pieces[0].weights
        of_pairs = grad.new_empty(len(every.order), self.up.shape[2 if self.net.stacked else 1])
        weighted = grad.new_empty(len(every.order), self.down.shape[1 if self.net.stacked else 2])
        of_rows, of_weights = Return(ways, whole), Return(ways, weights)
        own: tuple[Tensor | None, Tensor | None] = (None, None)
        for number, piece in enumerate(pieces):
            if number:
                ways.wait(arrivals[number - 1])
            rows = whole[ways.pieces[number]]
            found = self._through_gate(number, piece, rows, (of_pairs, weighted, places[number]))
            if number and call.needs_grad:
                of_weights.send(number - 1, found)
            elif call.needs_grad:
                own = None, found
        if call.needs_grad:
            sums = self._summed(every, of_pairs, by_rows(self.up, not self.net.stacked), None)
            own = sums[ways.pieces[0]], own[1]
            for chunk, where in enumerate(ways.pieces[1:]):
                of_rows.send(chunk, sums[where])
            call.returns = [of_rows, of_weights]
        return own, self._of_parameters(every, whole, of_pairs, weighted, wanted)

    def _every_pair(self, pieces: list[_Piece]) -> tuple[Pairs, list[Tensor]]:
        """The pairs of all pieces, and the positions in them of each piece's own."""
        ways, every = self.call.ways, self.call.sorted(_index_of(self.routing))
        places = [
            every.place[rows].view(-1).index_select(0, piece.pairs.order)
            for rows, piece in zip(ways.pieces, pieces, strict=True)
        ]
        return every._replace(order=every.order[: sum(ways.pairs)]), places

    def _through_gate(self, number: int, piece: _Piece, grad: Tensor, into: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Writes the gradients of the first products, and weight * hidden. Returns the gradient of the weights."""
        net, pairs, preact = self.net, piece.pairs, piece.preact
        if not len(pairs.tokens):
            return torch.zeros_like(piece.weights)
        if preact is None:
            x, up = self.x[self.call.ways.pieces[number]], by_rows(self.up, net.stacked)
            preact = product(net, x, up, pairs.ends, a_rows=pairs.tokens, bias=self.up_bias)
        dh = product(net, grad, by_rows(self.down, not net.stacked), pairs.ends, a_rows=pairs.tokens)
        bias = self.down_bias if self.call.needs_grad else None
        added = None if bias is None else (grad, bias.detach())
        return gate_backward(net, preact, dh, pairs.order, piece.weights.detach(), pairs.ends, added, into)[2]

    def _of_parameters(
        self, every: Pairs, grad: Tensor, of_pairs: Tensor, weighted: Tensor, wanted: tuple[bool, ...]
    ) -> list[Tensor | None]:
        net, given = self.net, (self.up, self.down, self.up_bias, self.down_bias)
        if not len(every.order):
            return [
                torch.zeros_like(p) if want and p is not None else None for p, want in zip(given, wanted, strict=True)
            ]
        order, ends = every.order, every.ends
        found: list[Tensor | None] = [None] * 4
        if wanted[0]:
            found[0] = matrix_gradient(
                net, ends, rows_of_pairs(self.x, every.place, len(order)), of_pairs, turned=not net.stacked
            )
        grad_rows = rows_of_pairs(grad, every.place, len(order)) if wanted[1] or wanted[3] else None
        if wanted[1]:
            assert grad_rows is not None
            found[1] = matrix_gradient(net, ends, grad_rows, weighted, turned=net.stacked)
        if wanted[2]:
            assert self.up_bias is not None
            found[2] = sum_by_expert(of_pairs, ends, self.up_bias.dtype)
        if wanted[3]:
            assert self.down_bias is not None and grad_rows is not None
            found[3] = sum_by_expert(grad_rows, ends, self.down_bias.dtype, order, _weights_of(self.routing))
        return found
