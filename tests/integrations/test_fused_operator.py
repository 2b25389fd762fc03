"""Fused keywords of the torch operator: results, gradients, fake tensors and graphs as of `multigemm.grouped_gemm`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.integrations import grouped_gemm
from multigemm.planning import launch_cache
from multigemm.planning.launch_cache import LAUNCHES

OP: Any = torch.ops.multigemm.grouped_gemm.default
EXPERTS, TOKENS, TOP_K, HIDDEN, INNER = 3, 6, 2, 8, 4
PAIRS = TOKENS * TOP_K
GATE: dict[str, Any] = {
    "activation": "swiglu", "glu_layout": "interleaved", "glu_alpha": 1.702, "glu_beta": 1.0, "glu_limit": 0.7
}  # fmt: skip


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def routing() -> dict[str, Tensor]:
    index = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    order = index.flatten().argsort(stable=True)
    rows, place = (order // TOP_K).int(), order.argsort().view(TOKENS, TOP_K).int()
    rows[1], place[2, 0] = -1, PAIRS  # no row
    return {"rows": rows, "place": place, "ends": torch.bincount(index.flatten(), minlength=EXPERTS).cumsum(0).int()}


def layer(gemm: Any, r: dict[str, Tensor], x: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    h = gemm(x, up, ends=r["ends"], a_rows=r["rows"], backend="cpu", **GATE)
    result: Tensor = gemm(h, down, ends=r["ends"], combine=(r["place"], weights), backend="cpu")
    return result


def operands() -> list[Tensor]:
    return [
        drawn(TOKENS, HIDDEN),
        drawn(EXPERTS, HIDDEN, 2 * INNER),
        drawn(EXPERTS, INNER, HIDDEN),
        drawn(TOKENS, TOP_K),
    ]


@pytest.mark.parametrize("way", ["operator", "compiled", "operator compiled"])
def test_a_layer_and_its_gradients(way: str) -> None:
    torch.manual_seed(0)
    given, r = operands(), routing()
    gemm = grouped_gemm if way.startswith("operator") else mg.grouped_gemm
    run: Any = torch.compile(layer, fullgraph=True, backend="aot_eager") if way.endswith("compiled") else layer
    got, want = run(gemm, r, *given), layer(mg.grouped_gemm, r, *given)
    assert torch.equal(got, want)
    flow = torch.randn_like(got)
    for g, w in zip(torch.autograd.grad(got, given, flow), torch.autograd.grad(want, given, flow), strict=True):
        torch.testing.assert_close(g, w)


def test_second_derivatives() -> None:
    torch.manual_seed(1)
    given, r = operands(), routing()

    def smooth(*given: Tensor) -> Tensor:
        x, up, down, weights = given
        h = grouped_gemm(x, up, ends=r["ends"], a_rows=r["rows"], activation="swiglu", backend="cpu")
        return grouped_gemm(h, down, ends=r["ends"], combine=(r["place"], weights), backend="cpu")

    assert torch.autograd.gradcheck(smooth, given)
    assert torch.autograd.gradgradcheck(smooth, given, fast_mode=True)  # along random directions of all elements


CASES: dict[str, Any] = {
    "gate": lambda r: ((drawn(TOKENS, HIDDEN), drawn(EXPERTS, HIDDEN, 2 * INNER)), {"a_rows": r["rows"]}, GATE),
    "combine": lambda r: (
        (drawn(PAIRS, INNER), drawn(EXPERTS, INNER, HIDDEN)),
        {"combine": r["place"], "combine_weights": drawn(TOKENS, TOP_K), "bias": drawn(HIDDEN)}, {},
    ),
    "places": lambda r: (
        (drawn(PAIRS, INNER), drawn(EXPERTS, INNER, HIDDEN)),
        {"out_rows": r["rows"], "row_scale": drawn(PAIRS)}, {"rows": TOKENS},
    ),
    "weights": lambda r: (
        (drawn(HIDDEN, TOKENS), drawn(TOKENS, INNER)), {"a_rows": r["rows"], "b_rows": r["rows"]}, {"jagged": "k"}
    ),
}  # fmt: skip


def positional(case: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    r = routing()
    operands, tensors, options = CASES[case](r)
    names = [x.name for x in OP._schema.arguments if not x.kwarg_only][2:]
    given = {"ends": r["ends"], **tensors}
    return (*operands, *(given.get(name) for name in names)), {**options, "backend": "cpu", "grad_backend": "cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_opcheck(case: str) -> None:
    torch.manual_seed(2)
    torch.library.opcheck(OP, *positional(case))


@pytest.mark.parametrize("case", CASES)
def test_warm_calls_are_served_by_the_launch_cache(case: str) -> None:
    torch.manual_seed(3)
    launch_cache.clear()
    tensors, options = positional(case)
    with torch.no_grad():
        want, served = OP(*tensors, **options), LAUNCHES.served
        got = [OP(*(x if x is None else x.clone() for x in tensors), **options) for _ in range(4)]
    assert all(torch.equal(y, want) for y in got)
    assert LAUNCHES.served - served >= (0 if case == "weights" else 2)  # a clone lies by rows
    launch_cache.clear()


def test_dynamic_tokens_are_one_graph() -> None:
    torch.manual_seed(4)
    up = torch.randn(EXPERTS, HIDDEN, 2 * INNER)
    graphs: list[Any] = []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=counted)
    def first(x: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        result: Tensor = mg.grouped_gemm(x, up, ends=ends, a_rows=rows, backend="cpu", **GATE)
        return result

    for tokens in (5, 7, 12):
        x, rows = torch.randn(tokens, HIDDEN), torch.randint(0, tokens, (2 * tokens,))
        ends = torch.tensor([tokens, tokens, 2 * tokens])
        want = mg.grouped_gemm(x, up, ends=ends, a_rows=rows, backend="cpu", **GATE)
        assert torch.equal(first(x, rows, ends), want)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preact_out": torch.empty(PAIRS, 2 * INNER)}, "preact_out"),
        ({"b_rows": torch.zeros(4, dtype=torch.int32)}, "index the operand yourself"),
        ({"combine": (torch.zeros(4, 2, dtype=torch.int32), None), "out_rows": torch.zeros(PAIRS)}, "one of them"),
        ({"out_rows": torch.zeros(PAIRS, dtype=torch.int32)}, "rows="),
    ],
)
def test_what_has_no_meaning_is_refused_in_a_graph(given: dict[str, Any], message: str) -> None:
    r, x, up = routing(), torch.randn(TOKENS, HIDDEN), torch.randn(EXPERTS, HIDDEN, 2 * INNER)

    @torch.compile(fullgraph=True, backend="eager")
    def run() -> Tensor:
        result: Tensor = mg.grouped_gemm(x, up, ends=r["ends"], a_rows=r["rows"], activation="swiglu", **given)
        return result

    with pytest.raises(Exception, match=message):
        run()
