"""Rows picked by index, gates, weights and sums of rows: what is refused, what is adopted, what every corner means."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.problem.fused import FusedKeywords
from multigemm.problem.spec import GATES, GLU_LAYOUTS

A, B = torch.randn(10, 4), torch.randn(3, 4, 6)
SIZES = torch.tensor([3, 0, 5])
ROWS = torch.tensor([3, -1, 9, 10, 2, 2, 0, 2**40])
INDEX, WEIGHTS = torch.tensor([[0, 7, -1], [3, 8, 9], [2, 2, 10**12], [-1, -(2**63), 99]]), torch.rand(4, 3)
PLACES = torch.tensor([0, 0, 2, 2, 9, 1, -1, 0, 3, 3])
SUMS: dict[str, Any] = {"combine": (INDEX, WEIGHTS)}


def product(a: Tensor = A, b: Tensor = B, sizes: Any = SIZES) -> Any:
    return mg.grouped_gemm(a, b, sizes=sizes, backend="cpu", config={"kernel": "loop"})


def fused(*, a: Any = A, b: Any = B, kernel: str = "loop", **keywords: Any) -> Any:
    return mg.grouped_gemm(a, b, backend="cpu", config={"kernel": kernel}, **({"sizes": SIZES} | keywords))


BATCH = {"a": torch.randn(3, 5, 4), "sizes": None}
LISTS = {"a": [A, A], "b": [B[0], B[1]], "sizes": None}
MASKED = BATCH | {"valid_rows": [1, 2, 3]}
COLUMNS = {"a": torch.randn(3, 5, 4), "b": torch.randn(4, 8), "jagged": "n"}
WEIGHT_GRADIENT = {"a": torch.randn(5, 8), "b": torch.randn(8, 6), "jagged": "k"}
BYTES = {"a": torch.ones(10, 4, dtype=torch.int8), "b": torch.ones(3, 4, 6, dtype=torch.int8)}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"a_row": ROWS}, r"takes no keyword a_row=: did you mean a_rows=\?"),
    # gates
    ({"activation": "swigly"}, "did you mean 'swiglu'"),
    ({"b": torch.randn(3, 4, 5), "activation": "swiglu"}, "b has 5 columns; .*pass an even number"),
    ({**LISTS, "b": [B[0], B[1][:, :3]], "activation": "glu"}, r"b\[1\] has 3 columns"),
    ({**BYTES, "activation": "swiglu"}, "'swiglu' with int8 operands"),
    ({**COLUMNS, "activation": "reglu"}, "activation='reglu' with jagged='n'.*apply it afterwards"),
    ({**WEIGHT_GRADIENT, "activation": "reglu"}, "activation='reglu' with jagged='k'"),
    ({"activation": "swiglu", "glu_layout": "halfs"}, "glu_layout='halfs' is unknown.*did you mean 'halves'"),
    ({"glu_layout": "interleaved"}, "glu_layout without a gate: pass activation= one of 'swiglu'"),
    ({"activation": "silu", "glu_limit": 7.0}, "glu_limit without a gate"),
    ({"activation": "geglu", "glu_alpha": 1.702}, "glu_alpha=1.702 with activation='geglu': only swiglu has it"),
    ({"activation": "swiglu", "glu_limit": -1.0}, "glu_limit=-1.0 is negative"),
    ({"activation": "swiglu", "glu_limit": float("nan")}, "glu_limit=nan; it must be finite"),
    ({"activation": "swiglu", "glu_limit": float("inf")}, "glu_limit=inf; .* leave it out for no limit"),
    ({"activation": "swiglu", "glu_alpha": float("inf")}, "glu_alpha=inf; it must be finite: leave it out"),
    ({"activation": "swiglu", "glu_alpha": True}, "glu_alpha=True is a bool; it must be a real number"),
    ({"activation": "swiglu", "glu_beta": "1"}, "glu_beta='1' is a str; it must be a real number"),
    ({"activation": "swiglu", "c": torch.zeros(10, 3)}, "c with activation='swiglu'.*pass combine or out_rows"),
    ({"activation": "swiglu", "beta": 0.5}, "beta=0.5 with activation='swiglu'"),
    ({"activation": "swiglu", "bias": torch.zeros(3)}, r"bias has shape \(3,\); it must be \(6,\) or \(3, 6\)"),
    # preact_out and row_scale
    ({"preact_out": torch.zeros(10, 6)}, "preact_out without an activation"),
    ({"preact_out": torch.zeros(10, 3), "activation": "swiglu"}, r"\(10, 3\); it must be \(10, 6\), .* products"),
    ({"preact_out": torch.zeros(10, 6, requires_grad=True), "activation": "relu"}, "or leave preact_out away"),
    ({"preact_out": torch.zeros(10, 6).half(), "activation": "relu"}, "preact_out has dtype torch.float16"),
    ({"preact_out": A.view(-1)[:40].as_strided((10, 6), (1, 1)), "activation": "relu"}, "preact_out overlaps itself"),
    ({"preact_out": B[0, 0, 0].as_strided((10, 6), (6, 1)), "activation": "relu"}, "preact_out shares memory with b"),
    ({"row_scale": torch.ones(8)}, r"row_scale has shape \(8,\); it must be \(10,\), a number for each row"),
    ({"row_scale": torch.ones(10).double()}, "row_scale has dtype torch.float64; it must be float32: convert it"),
    ({**MASKED, "row_scale": torch.ones(3)}, r"row_scale has shape \(3,\); it must be \(3, 5\)"),
    ({**BATCH, "row_scale": torch.ones(3, 5)}, "row_scale with the form batched"),
    ({**COLUMNS, "row_scale": torch.ones(5)}, "row_scale with the form jagged_n"),
    ({**BYTES, "row_scale": torch.ones(10)}, "row_scale with int8 operands"),
    # rows of the operands
    ({**LISTS, "a_rows": ROWS}, "a_rows with lists: it picks the tokens of jagged='m'.*index the operand yourself"),
    ({**BATCH, "a_rows": ROWS}, "a_rows without offsets, sizes or ends: it picks"),
    ({**MASKED, "a_rows": ROWS}, "a_rows without offsets, sizes or ends"),
    ({**COLUMNS, "a_rows": ROWS}, "a_rows with jagged='n'"),
    ({"b_rows": ROWS}, "b_rows with jagged='m'"),
    ({"a_rows": ROWS.float()}, "a_rows has dtype torch.float32; it must be int32 or int64"),
    ({"a_rows": ROWS[None]}, "a_rows has 2 dimensions; it must be a vector"),
    ({"a_rows": ROWS.tolist()}, r"a_rows\[1\] is -1; it must lie in 0..9: only a tensor on the operands' device"),
    ({"a_rows": ROWS.numpy()}, r"a_rows\[1\] is -1"),
    ({"a_rows": ROWS, "check": "full"}, r"a_rows\[1\] is -1"),
    ({"a_rows": torch.arange(7)}, "sizes add up to 8, the jagged extent is 7"),
    ({**WEIGHT_GRADIENT, "a_rows": torch.arange(7)}, "a_rows has 7 tokens and b has 8: pass as many"),
    ({**WEIGHT_GRADIENT, "b_rows": torch.arange(7)}, "a has 8 tokens and b_rows has 7"),
    # sums of rows
    ({"combine": INDEX}, r"combine is a Tensor; it must be a pair \(index \[R, k\], weights \[R, k\] or None\)"),
    ({"combine": (INDEX,)}, "combine is a tuple of 1; it must be a pair"),
    ({"combine": (INDEX[0], None)}, "combine index has 1 dimensions; it must be a matrix"),
    ({"combine": (INDEX.float(), None)}, "combine index has dtype torch.float32"),
    ({"combine": ([[0, 1], [2]], None)}, "combine index has rows of 1 and 2 numbers; all must have as many"),
    ({"combine": ([0, 1], None)}, r"combine index\[0\] is 0; it must be a list of k numbers: pass an array \[R, k\]"),
    ({"combine": ([[0], "ab"], None)}, r"combine index\[1\] is 'ab'; it must be a list of k numbers"),
    ({"combine": (None, WEIGHTS)}, "combine index is of type NoneType; it must be a matrix of integers"),
    ({"combine": ([[0, 10]], None)}, r"combine index\[0, 1\] is 10; it must lie in 0..9"),
    ({"combine": (INDEX, None), "check": "full"}, r"combine index\[0, 2\] is -1"),
    ({"combine": (INDEX, WEIGHTS[:2])}, r"combine weights has shape \(2, 3\); it must be \(4, 3\), the shape"),
    ({"combine": (INDEX, WEIGHTS.double())}, "combine weights has dtype torch.float64"),
    ({**SUMS, "out_rows": PLACES}, "combine and out_rows were given together"),
    ({**SUMS, "rows": 4}, "combine and rows were given together"),
    ({**MASKED, **SUMS}, "combine sums rows of the form jagged_m; this one is masked"),
    ({**LISTS, **SUMS}, "combine sums rows of the form jagged_m; this one is per_group"),
    ({**BYTES, **SUMS}, "combine with int8 operands"),
    ({"rows": 4}, "rows=4 without out_rows"),
    ({"out_rows": PLACES}, "out_rows without out: say with rows="),
    ({"out_rows": PLACES, "rows": -1}, "rows=-1 must be a whole number, 0 or more"),
    ({"out_rows": PLACES, "rows": 2**63}, "must be a whole number, 0 or more, that fits in 64 bits"),
    ({"out_rows": PLACES, "rows": 2.5}, "rows=2.5 must be a whole number"),
    ({"out_rows": PLACES, "rows": True}, "rows=True must be a whole number"),
    ({"out_rows": PLACES, "rows": 4, "out": torch.zeros(3, 6)}, "rows=4 and out has 3: leave rows out"),
    ({"out_rows": PLACES[:4], "rows": 4}, "out_rows has length 4; it must have one number for each of the 10 tokens"),
    ({"out_rows": PLACES.tolist(), "rows": 4}, r"out_rows\[4\] is 9; it must lie in 0..3"),
    ({"out_rows": [0] * 10, "rows": 0}, r"out_rows\[0\] is 0; there are no rows: only a tensor"),
    ({"out_rows": PLACES, "out": 5.0}, "out is a float, not an array"),
    ({"out_rows": PLACES, "out": [torch.zeros(4, 6)]}, "out is a list, not an array"),
    ({"out_rows": PLACES, "out": torch.zeros(())}, r"out has shape \(\); out_rows sums rows into a matrix"),
    ({**SUMS, "out": torch.zeros(10, 6)}, r"out has shape \(10, 6\); it must be \(4, 6\)"),
    ({**SUMS, "c": torch.zeros(10, 6)}, r"c has shape \(10, 6\); it must be \(4, 6\)"),
    ({"combine": (INDEX, X := torch.rand(4, 6)[:, :3]), "out": X.as_strided((4, 6), (6, 1))}, "out shares memory"),
    ({"row_scale": (X := torch.rand(60))[:10], "out": X.view(10, 6)}, "out shares memory with row_scale"),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "words"), REFUSED, ids=[words[:50] for _, words in REFUSED])
def test_what_has_no_meaning_is_refused(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(mg.InvalidProblem, match=words):
        fused(**keywords)


def test_defaults_ask_for_nothing() -> None:
    plain: dict[str, Any] = dict.fromkeys(FusedKeywords.__annotations__) | {
        "glu_layout": "halves",
        "glu_alpha": 1,
        "glu_beta": 0.0,
    }
    problem = mg.GroupedGemmProblem(A, B, sizes=SIZES, **plain)
    assert problem.fused is None and problem.spec.fused is None
    assert problem.spec is mg.GroupedGemmProblem(A, B, sizes=SIZES).spec


def test_keywords_that_are_left_at_none_keep_a_warm_call_warm() -> None:
    from multigemm.planning.launch_cache import LAUNCHES

    for _ in range(3):
        before = LAUNCHES.served
        product_again = mg.grouped_gemm(A, B, sizes=SIZES, a_rows=None, combine=None, backend="cpu")
    assert LAUNCHES.served == before + 1 and torch.allclose(product_again, product())
    gated = [
        mg.grouped_gemm(A, B, sizes=SIZES, activation="swiglu", glu_limit=x, backend="cpu") for x in (0.1, 9.0) * 3
    ]
    assert all(torch.equal(x, y) for x, y in zip(gated, gated[:2] * 3, strict=True)) and not gated[0].equal(gated[1])


def test_what_is_asked_for_is_part_of_the_spec() -> None:
    asked: list[dict[str, Any]] = [
        {}, {"a_rows": ROWS}, {"a_rows": ROWS.int()}, {"row_scale": torch.ones(10)}, {"combine": (INDEX, None)}, SUMS,
        {"combine": (INDEX[:, :2], None)}, {"out_rows": PLACES, "rows": 4}, {"activation": "swiglu", "glu_beta": 1.0},
        *({"activation": gate, "glu_layout": layout} for gate in GATES for layout in GLU_LAYOUTS),
        {"activation": "swiglu", "preact_out": torch.empty(10, 6)},
    ]  # fmt: skip
    specs = [mg.GroupedGemmProblem(A, B, sizes=SIZES, **keywords).spec for keywords in asked]
    assert len(set(specs)) == len(asked)
    for spec, keywords in zip(specs, asked, strict=True):
        assert mg.GroupedGemmProblem(A, B, sizes=SIZES, **keywords).spec is spec


# --- meaning ------------------------------------------------------------------------------------------


def test_an_index_out_of_range_is_a_row_of_zeros_before_the_product() -> None:
    there = (ROWS >= 0) & (ROWS < 10)
    x = torch.where(there[:, None], A[torch.where(there, ROWS, 0)], 0)
    bias = torch.randn(6)
    assert torch.equal(fused(a_rows=ROWS), product(x))
    silu = fused(a_rows=ROWS, bias=bias, activation="silu")
    assert torch.equal(silu[1], torch.nn.functional.silu(bias)), "y = act(bias)"
    poisoned = B.clone()
    poisoned[2] = torch.nan
    assert fused(a_rows=torch.full((8,), -1), b=poisoned)[3:].isnan().all(), "0 * NaN of the other operand is NaN"
    assert torch.equal(fused(a=A[:0], a_rows=ROWS), torch.zeros(8, 6)), "no index points into an operand without rows"


@pytest.mark.parametrize("kernel", ["loop", "blas"])
def test_picked_columns_and_rows_of_weight_gradients(kernel: str) -> None:
    x, dy, rows = torch.randn(9, 5), torch.randn(7, 6), torch.tensor([8, 8, 0, -5, 9, 3, 1, 2], dtype=torch.int32)
    there = ((rows >= 0) & (rows < 9))[:, None]
    picked = torch.where(there, x[rows.clamp(0, 8)], 0)
    others = torch.where((rows < 7)[:, None] & (rows >= 0)[:, None], dy[rows.clamp(0, 6)], 0)
    cut: dict[str, Any] = {"sizes": SIZES, "jagged": "k", "backend": "cpu", "config": {"kernel": kernel}}
    want = mg.grouped_gemm(picked.T, others, **cut)
    assert torch.allclose(mg.grouped_gemm(x.T, others, a_rows=rows, **cut), want, atol=1e-6)
    assert torch.allclose(mg.grouped_gemm(picked.T, dy, b_rows=rows, **cut), want, atol=1e-6)
    assert torch.allclose(mg.grouped_gemm(x.T, dy, a_rows=rows, b_rows=rows, **cut), want, atol=1e-6)
    want = mg.grouped_gemm(torch.ones(3, 2, 5), picked.T.contiguous(), **{**cut, "jagged": "n"})
    assert torch.allclose(mg.grouped_gemm(torch.ones(3, 2, 5), x.T, b_rows=rows, **{**cut, "jagged": "n"}), want)


@pytest.mark.parametrize("layout", GLU_LAYOUTS)
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate: str, layout: str) -> None:
    """Against torch, step by step; `preact_out` receives what the gate is applied to, before the limits."""
    bias, preact = torch.randn(3, 6), torch.full((10, 6), 7.0)
    pre = mg.grouped_gemm(A, B, sizes=SIZES, bias=bias, backend="cpu", config={"kernel": "loop"})
    g, u = (pre[:, 0::2], pre[:, 1::2]) if layout == "interleaved" else (pre[:, :3], pre[:, 3:])
    if layout == "halves_up_first":
        g, u = u, g
    g, u = g.clamp(max=0.5), u.clamp(-0.5, 0.5) + 1
    alpha = 1.702 if gate == "swiglu" else 1.0
    functional: Any = torch.nn.functional
    acts = {"swiglu": lambda x: x * torch.sigmoid(alpha * x), "geglu": functional.gelu, "reglu": torch.relu,
            "geglu_tanh": lambda x: functional.gelu(x, approximate="tanh"), "glu": torch.sigmoid}  # fmt: skip
    numbers: dict[str, Any] = {"glu_alpha": alpha, "glu_beta": 1.0, "glu_limit": 0.5, "glu_layout": layout}
    got = fused(bias=bias, activation=gate, preact_out=preact, **numbers)
    assert got.shape == (10, 3)
    assert torch.allclose(got[:8], (acts[gate](g) * u)[:8], atol=1e-6)
    assert (got[8:] == 0).all() and (preact[8:] == 7).all(), "rows that no group owns"
    assert torch.equal(preact[:8], pre[:8])


def test_gates_of_batches_masks_and_lists() -> None:
    a, b, valid = torch.randn(3, 5, 4), B, torch.tensor([5, 0, 2])
    pre = torch.bmm(a, b)
    want = torch.nn.functional.silu(pre[..., :3]) * pre[..., 3:]
    assert torch.allclose(mg.grouped_gemm(a, b, activation="swiglu"), want, atol=1e-6)
    scale, preact = torch.rand(3, 5), torch.zeros(3, 5, 6)
    got = mg.grouped_gemm(a, b, valid_rows=valid, activation="swiglu", row_scale=scale, preact_out=preact)
    live = torch.arange(5) < valid[:, None]
    assert torch.allclose(got, torch.where(live[..., None], want * scale[..., None], 0), atol=1e-6)
    assert torch.allclose(preact, torch.where(live[..., None], pre, 0), atol=1e-6)
    preacts = [torch.zeros(5, 6) for _ in range(3)]
    listed = mg.grouped_gemm(list(a), list(b), activation="swiglu", preact_out=preacts)
    for g in range(3):
        assert torch.allclose(listed[g], want[g], atol=1e-6)
        assert torch.allclose(preacts[g], pre[g], atol=1e-6)
    assert torch.allclose(mg.grouped_gemm(a[0], b[0], activation="swiglu"), want[0], atol=1e-6)
    assert mg.grouped_gemm([], [], activation="swiglu") == []


def test_nan_passes_limits_and_zero_weights() -> None:
    b = B.clone()
    b[0, :, 0], b[2, :, 4] = torch.nan, torch.nan
    got = fused(b=b, activation="swiglu", glu_limit=1.0)
    assert got[:3, 0].isnan().all() and got[3:8, 1].isnan().all()
    rows = fused(b=b, combine=(INDEX, torch.zeros(4, 3)))
    assert rows[0, 0].isnan() and rows[1, 4].isnan(), "0 * NaN"


def test_combine_reads_nothing_of_absent_and_unowned_rows() -> None:
    rows, weights = product(), WEIGHTS.clone()
    weights[0, 2] = weights[1, 1:] = weights[3] = torch.nan  # of no row, and of rows that no group owns
    weights[2, 2] = torch.inf
    a = A.clone()
    a[8:] = torch.nan
    got = fused(a=a, combine=(INDEX, weights))
    assert torch.allclose(got[0], weights[0, 0] * rows[0] + weights[0, 1] * rows[7], atol=1e-6)
    assert torch.allclose(got[1], weights[1, 0] * rows[3], atol=1e-6)
    assert torch.allclose(got[2], weights[2, 0] * rows[2] + weights[2, 1] * rows[2], atol=1e-6), "added twice"
    assert (got[3] == 0).all()
    c, out = torch.randn(4, 6), torch.full((4, 6), torch.nan)
    with_c = fused(combine=(INDEX, weights), c=c, beta=0.5)
    assert torch.allclose(with_c, got + 0.5 * c, atol=1e-6) and torch.equal(with_c[3], 0.5 * c[3])
    fused(combine=(INDEX, weights), out=out)
    assert torch.equal(out, got), "a row without contributions is written as 0, whatever out held"
    own = c.clone()
    assert fused(combine=(INDEX, weights), c=own, beta=0.5, out=own) is own and torch.equal(own, with_c)


def test_sums_are_in_order() -> None:
    """2^24 + 1 + 1 in float32 is 2^24; 1 + 1 + 2^24 is 2^24 + 2: the order of j, and of s, shows."""
    a, b = torch.tensor([[2.0**24], [1.0], [1.0]]), torch.ones(1, 1, 1)
    index = torch.tensor([[0, 1, 2], [1, 2, 0], [1, 0, 2], [2, 1, 0]])
    assert fused(a=a, b=b, sizes=[3], combine=(index, None)).flatten().tolist() == [
        2.0**24,
        2.0**24 + 2,
        2.0**24,
        2.0**24 + 2,
    ]
    together: dict[str, Any] = {"b": b, "sizes": [3], "out_rows": torch.tensor([1, 1, 1]), "rows": 2}
    assert fused(a=a, **together).flatten().tolist() == [0, 2.0**24]
    assert fused(a=a.flip(0), **together).flatten().tolist() == [0, 2.0**24 + 2]


def test_out_rows_add_up() -> None:
    want, rows = torch.zeros(4, 6), product()
    for s, r in enumerate(PLACES[:8].tolist()):
        if 0 <= r < 4:
            want[r] += rows[s]
    assert torch.equal(fused(out_rows=PLACES, rows=4), want)
    preact = torch.zeros(10, 6)
    assert fused(out_rows=PLACES - 99, rows=0, activation="relu", preact_out=preact).shape == (0, 6)
    assert torch.equal(preact, rows), "written where the result has no elements, too"
    out, c = torch.full((4, 6), torch.nan), torch.randn(4, 6)
    assert torch.equal(fused(out_rows=PLACES.int(), out=out), want) and torch.equal(out, want)
    assert torch.allclose(fused(out_rows=PLACES, rows=4, c=c), want + c, atol=1e-6)
    assert fused(out_rows=PLACES, rows=0).shape == (0, 6)


def test_weights_beside_bfloat16_are_not_rounded() -> None:
    a, b = torch.ones(2, 1, dtype=torch.bfloat16), torch.ones(1, 1, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[1 + 2.0**-20]])
    keywords: dict[str, Any] = {"a": a, "b": b, "sizes": [2], "out_dtype": torch.float32}
    assert fused(**keywords, combine=(torch.tensor([[1]]), weight)).item() == weight.item()
    assert (fused(**keywords, row_scale=weight.expand(2, 1)[:, 0]) == weight.item()).all()


@pytest.mark.parametrize("sizes", [[0, 0, 0], [], [0]])
def test_no_tokens_no_sums_no_terms(sizes: list[int]) -> None:
    b = torch.randn(len(sizes), 4, 6)
    none = torch.empty(0, dtype=torch.int64)
    assert fused(b=b, sizes=sizes, a_rows=none).shape == (0, 6)
    got = fused(b=b, sizes=sizes, a_rows=none, activation="swiglu", combine=(torch.tensor([[0], [1]]), None))
    assert torch.equal(got, torch.zeros(2, 3))
    assert torch.equal(fused(b=b, sizes=sizes, combine=(torch.empty(2, 0, dtype=torch.int64), None)), torch.zeros(2, 6))
    assert fused(b=b, sizes=sizes, combine=(torch.empty(0, 3, dtype=torch.int64), None)).shape == (0, 6)
    assert torch.equal(fused(b=b, sizes=sizes, out_rows=torch.zeros(10).long(), rows=2), torch.zeros(2, 6))
    c = torch.randn(2, 6)
    assert torch.equal(fused(b=b, sizes=sizes, out_rows=torch.zeros(10).long(), rows=2, c=c), c)


# --- indices ------------------------------------------------------------------------------------------


def test_indices_on_the_device_are_followed_and_those_of_the_host_copied() -> None:
    rows, places = torch.arange(8), torch.tensor([[1], [2]])
    scale, weights = torch.ones(8), torch.ones(2, 1)
    plan = mg.plan(A, B, sizes=SIZES, a_rows=rows, row_scale=scale, combine=(places, weights), backend="cpu")
    assert torch.equal(plan(), product(A[:8])[[1, 2]])
    rows.copy_(torch.arange(8).flip(0))
    places[1], scale[5], weights[0] = 5, 3.0, 2.0
    want = product(A[:8].flip(0))
    assert torch.allclose(plan(), torch.stack([2 * want[1], 3 * want[5]]))
    listed, array = list(range(8)), np.arange(8)
    fixed = [mg.plan(A, B, sizes=SIZES, a_rows=x, backend="cpu") for x in (listed, array)]
    listed[0] = array[0] = 7
    assert all(torch.equal(p(), product(A[:8])) for p in fixed)


def test_row_numbers_from_the_host_may_pass_32_bits() -> None:
    a, row = A[:1].expand(2**31 + 5, 4), 2**31 + 2
    problem = mg.GroupedGemmProblem(a, B, sizes=[1, 0, 0], a_rows=[row])
    assert problem.fused is not None and problem.fused.a_rows is not None
    assert problem.fused.a_rows.values.tolist() == [row]
    assert torch.allclose(mg.solve(problem), A[:1] @ B[0])


def test_any_strides_and_either_width() -> None:
    wide = torch.full((8, 3), 7)
    wide[:, 1] = ROWS
    index = INDEX.t().contiguous().t()
    weights = torch.rand(3, 8)[:, ::2].t()
    narrow = torch.where(ROWS > 99, -1, ROWS).int()
    want = fused(a_rows=ROWS, combine=(INDEX, weights.contiguous()))
    assert torch.equal(fused(a_rows=wide[:, 1], combine=(index, weights)), want)
    assert torch.equal(fused(a_rows=narrow, combine=(INDEX.clamp(-1, 99).int(), weights)), want)
    plan = mg.plan(A, B, sizes=SIZES, a_rows=wide[:, 1], backend="cpu", config={"kernel": "loop"})
    wide[:, 1] = 2
    assert torch.equal(plan(), product(A[2:3].expand(8, 4))), "strided indices are followed as well"


def test_numpy_in_numpy_out() -> None:
    got = mg.grouped_gemm(
        A.numpy(), B.numpy(), sizes=SIZES.tolist(), a_rows=np.arange(8)[::-1], row_scale=np.ones(16, np.float32)[::2],
        combine=([[0, 1], [2, 3]], np.ones((2, 2), np.float32)), activation="relu",
    )  # fmt: skip
    want = torch.relu(product(A[:8].flip(0)))
    assert isinstance(got, np.ndarray) and np.allclose(got, torch.stack([want[0] + want[1], want[2] + want[3]]))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["copy", "pickle"])
def test_a_copy_asks_for_the_same(again: Any) -> None:
    preact = torch.zeros(8, 6)
    problem = mg.GroupedGemmProblem(
        A, B, sizes=SIZES, a_rows=ROWS, activation="swiglu", glu_limit=2.0, glu_beta=1.0, glu_layout="interleaved",
        combine=([[0, 1]], torch.rand(1, 2)), preact_out=preact, row_scale=torch.rand(8),
    )  # fmt: skip
    made = again(problem)
    assert problem.fused is not None
    assert made.spec == problem.spec and made.fused.gate == problem.fused.gate
    assert torch.equal(mg.solve(made), mg.solve(problem)) and made.fused.preact is not preact
    assert torch.equal(made.fused.preact, preact)
    scattered = mg.GroupedGemmProblem(A, B, sizes=SIZES, out_rows=PLACES, rows=4)
    assert torch.equal(mg.solve(again(scattered)), mg.solve(scattered))
    text = eval(repr(problem), {"torch": torch, "GroupedGemmProblem": mg.GroupedGemmProblem})
    assert text.spec == problem.spec


def test_flops_and_bytes_are_those_of_the_tokens() -> None:
    plain = mg.GroupedGemmProblem(A[:8], B, sizes=SIZES)
    assert mg.GroupedGemmProblem(A, B, sizes=SIZES, a_rows=ROWS).flops == plain.flops == 2 * 8 * 4 * 6
    gated = mg.GroupedGemmProblem(A[:8], B, sizes=SIZES, activation="swiglu")
    assert plain.bytes - gated.bytes == 8 * 3 * 4
    both = mg.GroupedGemmProblem(A[:8], B, sizes=SIZES, activation="swiglu", combine=(INDEX, None))
    assert plain.bytes - both.bytes == (8 * 6 - 4 * 3) * 4
    assert plain.bytes - mg.GroupedGemmProblem(A[:8], B, sizes=SIZES, combine=(INDEX, None)).bytes == 4 * 6 * 4


# --- who refuses --------------------------------------------------------------------------------------


def test_backends_that_take_steps_refuse_lists() -> None:
    from multigemm.backends import registry

    lists = mg.GroupedGemmProblem([A], [B[0]], activation="swiglu")
    for name in ("numba", "cublas"):
        (reason,) = registry.get(name).not_supported_reasons(lists.spec, torch.device("cuda", 0))
        assert (
            reason
            == "fused keywords with lists: the steps round a product take packed operands: pack them, or use 'triton'"
        )
    assert mg.explain(lists).chosen == "cpu"


def test_a_foreign_backend_is_asked_only_if_it_says_that_it_knows() -> None:
    from multigemm.backend import BuiltinBackend, refusals
    from multigemm.backends.cpu import BACKEND

    class Foreign(BuiltinBackend):
        takes_fused = False

    fields: dict[str, Any] = {
        name: getattr(BACKEND, name) for name in ("availability", "not_supported_reasons", "configs", "plan")
    }
    backend, spec = Foreign("foreign", **fields), mg.GroupedGemmProblem(A, B, sizes=SIZES, a_rows=ROWS).spec
    assert "a_rows" in refusals(backend, spec, torch.device("cpu"))[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Foreign, "takes_fused", True)
        assert refusals(backend, spec, torch.device("cpu")) == []


# --- quantised operands -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["tensor", "group", "row", "1x32"])
@pytest.mark.parametrize("format", ["int8", "uint4"])
def test_an_absent_row_of_weights_with_zero_points_is_zero(format: str, scale: str) -> None:
    """Its bytes are 0, and less a zero point they would not be."""
    shape = {"tensor": (), "group": (3,), "row": (1, 10), "1x32": (2, 10)}[scale]
    rows, dtype = (32, torch.uint8) if format == "uint4" else (64, torch.int8)
    problem = mg.GroupedGemmProblem(
        torch.ones(3, 5, 64, dtype=torch.bfloat16), torch.full((rows, 10), 3, dtype=dtype), sizes=SIZES, jagged="n",
        b_rows=ROWS, b_format="uint4" if format == "uint4" else None, scale_b=torch.ones(shape),
        zero_b=torch.ones(shape, dtype=torch.uint8),
    )  # fmt: skip
    each = 64 * 2 if format == "int8" else 32 * (2 - 1)  # 3 - 1; of a byte of 3 the codes 3 and 0
    want = torch.where((ROWS >= 0) & (ROWS < 10), float(each), 0.0).expand(5, 8)
    for got in (mg.solve(problem, backend="cpu").float(), torch.from_numpy(mg.expected(problem).astype(np.float32))):
        assert torch.equal(got, want)


def test_scales_of_rows_go_with_the_rows() -> None:
    a, b = A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn)
    scale, there = torch.rand(10, 1) + 0.5, (ROWS >= 0) & (ROWS < 10)
    scale[0] = torch.nan  # absent rows must not meet it
    at = torch.where(there, ROWS, 1)
    picked = torch.where(there[:, None], a.float()[at], 0).to(a.dtype)
    keywords: dict[str, Any] = {"b": b, "scale_b": torch.rand(3) + 0.5, "out_dtype": torch.float32}
    problem = mg.GroupedGemmProblem(
        a, b, sizes=SIZES, a_rows=ROWS, scale_a=scale, **{n: keywords[n] for n in ("scale_b",)}
    )
    got = fused(a=a, a_rows=torch.where(ROWS == 0, 1, ROWS), scale_a=scale, **keywords)
    want = fused(a=picked, scale_a=torch.where(there[:, None], scale[torch.where(at == 0, 1, at)], 1.0), **keywords)
    picked_one = (ROWS != 0)[:, None]
    assert torch.equal(torch.where(picked_one, got, 0), torch.where(picked_one, want, 0))
    assert mg.verify(problem, mg.solve(problem)).ok
    columns = mg.GroupedGemmProblem(
        torch.randn(3, 5, 4).bfloat16(), torch.randint(-9, 9, (4, 10), dtype=torch.int8), sizes=SIZES, jagged="n",
        b_rows=ROWS, scale_b=torch.rand(1, 10), zero_b=torch.randint(0, 3, (1, 10), dtype=torch.uint8),
    )  # fmt: skip
    assert mg.verify(columns, mg.solve(columns)).ok
    with pytest.raises(mg.InvalidProblem, match="a_rows with quantised operands and jagged='k' comes later"):
        fused(a=a.t(), b=b[0].t()[:4].t().repeat(2, 1), a_rows=ROWS, jagged="k")
