"""Fused problems in Triton's interpreter: random ones, corners, planted faults, later calls; and what is compiled."""

from __future__ import annotations

import importlib
import importlib.util
import os
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm import quantize as q
from multigemm import torch_internals
from multigemm.backends.cupy import choice as cupy_choice
from multigemm.backends.triton import BACKEND, Config, choice
from multigemm.backends.triton.config import problem_with
from multigemm.integrations import fused_experts, fused_parallel, layer_ops
from multigemm.integrations.expert_network import Network
from multigemm.integrations.fused_experts import experts_forward, gate_backward
from multigemm.integrations.gradients import gate_by_torch
from multigemm.integrations.layer_ops import add_returned, copy_rows, rows_of_pairs, sum_by_expert
from multigemm.problem.spec import GATES, GLU_LAYOUTS
from tests.model_mutants.faults import FUSED_HUNTING
from tests.support.decode_cases import LIMITS, NETWORKS, by_pairs, parameters_of
from tests.support.fused_cases import findings
from tests.support.triton_interpreted import module_with, solved

pytestmark = pytest.mark.usefixtures("interpreter")

CPU = torch.device("cpu")
KERNELS = [Path(choice.__file__).parent / "kernels" / f"{name}.py" for name in ("generic", "sum_rows")]
INTERPRETED = replace(FUSED_HUNTING, work=1 << 11, groups=5, longest=33)
FLOATS = replace(INTERPRETED, dtypes=("bfloat16", "float16", "float32", "float64"))
"""int8 takes none of the small tiles."""
TILES = ((16, 32, 16, 4), (32, 64, 32, 4), (128, 32, 64, 8))


def with_tile(tile: tuple[int, int, int, int]) -> Any:
    """The backend with one tile for all problems that do not ask for equal bits."""
    rows, columns, deep, warps = tile
    fixed = Config(block_m=rows, block_n=columns, block_k=deep, warps=warps, stages=1, width=2, programs=2)

    def configs(spec: Any, device: torch.device) -> Any:
        return BACKEND.configs(spec, device) if spec.batch_invariant else [fixed]

    return replace(BACKEND, configs=configs)


def test_random_problems() -> None:
    assert list(findings(BACKEND, 12, limits=INTERPRETED)) == []


@pytest.mark.parametrize("number", range(len(TILES)))
def test_random_problems_by_other_tiles(number: int) -> None:
    assert list(findings(with_tile(TILES[number]), 8, first=5000 + 100 * number, limits=FLOATS)) == []


@pytest.mark.slow
def test_many_random_problems() -> None:
    assert list(findings(BACKEND, 16, first=10_000, limits=INTERPRETED)) == []


def tokens(count: int, experts: int = 4, top_k: int = 2) -> dict[str, Any]:
    """Pairs of token and expert in the order of experts, and where each went."""
    index = torch.stack([torch.randperm(experts)[:top_k] for _ in range(count)])
    order = index.flatten().argsort(stable=True)
    return {
        "rows": (order // top_k).int(),
        "place": order.argsort().view(count, top_k),
        "sizes": torch.bincount(index.flatten(), minlength=experts),
        "weights": torch.rand(count, top_k),
    }


def test_a_layer_in_two_calls() -> None:
    torch.manual_seed(1)
    t = tokens(19)
    x, up, down = torch.randn(19, 24), torch.randn(4, 24, 20), torch.randn(4, 10, 24)
    h = solved(x, up, sizes=t["sizes"], a_rows=t["rows"], activation="swiglu", glu_layout="interleaved")
    y = solved(h, down, sizes=t["sizes"], combine=(t["place"], t["weights"]))
    scattered = solved(
        h, down, sizes=t["sizes"], row_scale=t["weights"].flatten()[t["place"].flatten().argsort()],
        out_rows=t["rows"], rows=19,
    )  # fmt: skip
    torch.testing.assert_close(scattered, y, rtol=1e-5, atol=1e-5)


def test_a_plan_follows_indices_weights_and_sizes_in_place() -> None:
    torch.manual_seed(2)
    held = tokens(12)
    x, b = torch.randn(12, 16), torch.randn(4, 16, 8)
    gather = mg.plan(x, b, sizes=held["sizes"], a_rows=held["rows"], backend="triton")
    rows = torch.randn(24, 16)
    combine = mg.plan(rows, b, sizes=held["sizes"], combine=(held["place"], held["weights"]), backend="triton")
    scatter = mg.plan(rows, b, sizes=held["sizes"], out_rows=held["rows"], rows=12, backend="triton")
    for seed in range(3):
        torch.manual_seed(seed)
        for name, value in tokens(12).items():
            held[name].copy_(value)
        held["rows"][seed] = (-1, 12, 2**31 - 1)[seed]
        product = torch.zeros(24, 8)
        start = 0
        for g, size in enumerate(held["sizes"].tolist()):
            product[start : start + size] = rows[start : start + size] @ b[g]
            start += size
        known = torch.where(held["rows"] < 12, held["rows"], -1)
        assert mg.verify(mg.GroupedGemmProblem(x, b, sizes=held["sizes"], a_rows=held["rows"]), gather())
        want = (product[held["place"]] * held["weights"][..., None]).sum(1)
        torch.testing.assert_close(combine(), want, rtol=1e-4, atol=1e-4)
        want = torch.zeros(13, 8).index_add_(0, known.long() % 13, product)[:12]
        torch.testing.assert_close(scatter(), want, rtol=1e-4, atol=1e-4)


def test_a_plan_runs_other_problems_of_the_class() -> None:
    """Other indices, weights and memory, of the same layout."""
    torch.manual_seed(3)
    x, b = torch.randn(12, 16), torch.randn(4, 16, 8)

    def posed(held: dict[str, Any]) -> mg.GroupedGemmProblem:
        sums = (held["place"], held["weights"])
        return mg.GroupedGemmProblem(x[held["rows"]], b.clone(), sizes=held["sizes"], combine=sums)

    plan = mg.plan(posed(tokens(12)), backend="triton")
    for _ in range(2):
        other = posed(tokens(12))
        assert mg.verify(other, plan.run(other))


def test_repeated_calls_take_the_indices_that_they_are_given() -> None:
    x, b = torch.randn(6, 8), torch.randn(2, 8, 4)
    for seed in range(5):
        torch.manual_seed(seed)
        rows = torch.randint(0, 6, (9,))
        y = mg.grouped_gemm(x, b, sizes=[4, 5], a_rows=rows, backend="triton")
        torch.testing.assert_close(y[:4], x[rows[:4]] @ b[0], rtol=1e-4, atol=1e-5)


GPT_OSS = {"glu_layout": "interleaved", "glu_alpha": 1.702, "glu_beta": 1.0, "glu_limit": 0.7, "stacked": True}


@pytest.mark.parametrize("options", [{}, {"activation": "silu"}, GPT_OSS])
def test_a_layer_and_its_gradients(options: Any) -> None:
    """Forward and backward of fused experts, by this backend and by the cpu's."""
    torch.manual_seed(4)
    width, stacked = 10 if "activation" in options else 20, "stacked" in options
    shapes = [(3, 16, width), (3, 10, 16)] if stacked else [(3, width, 16), (3, 16, 10)]
    x, weights, up, down, up_bias, down_bias = (
        torch.randn(shape, requires_grad=True) for shape in ((7, 16), (7, 2), *shapes, (3, width), (3, 16))
    )
    index = torch.rand(7, 4).argsort(1)[:, :2]  # number 3 is elsewhere
    found = []
    for backend in ("triton", "cpu"):
        y = experts_forward(x, index, weights, up, down, up_bias, down_bias, backend=backend, **options)
        inputs = (x, weights, up, down, up_bias, down_bias)
        found.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels of layers on a GPU, which the interpreter runs."""
    os.environ["TRITON_INTERPRET"] = "1"
    monkeypatch.setattr(
        torch_internals, "current_device", lambda: -1
    )  # which is where tensors on the CPU say that they lie
    return importlib.import_module("multigemm.integrations.layer_kernels")


@pytest.mark.parametrize("layout", GLU_LAYOUTS)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.usefixtures("kernels")
def test_gates_behind_a_product_and_back(kind: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that layers on a GPU take, beside the same in steps of torch. A row takes two blocks of columns.
    Every gate meets every layout with a limit, and layouts take turns without one."""
    kernels = layer_ops.gate_kernels()
    monkeypatch.setattr(kernels, "GATE_COLUMNS", 16)
    torch.manual_seed(6)
    kinds: list[tuple[torch.dtype, float | None]] = [(torch.float64, 0.7), (torch.float32, None)]
    unlimited = layout == GLU_LAYOUTS[[*map(str, GATES)].index(kind) % len(GLU_LAYOUTS)]
    for dtype, limit in kinds[: 1 + unlimited]:
        alpha = 1.702 if kind == "swiglu" else 1.0
        net = Network(kind, layout, alpha, 0.3, limit)
        preact, dh, weights = (torch.randn(shape, dtype=dtype) for shape in ((6, 40), (6, 20), (3, 2)))
        preact[0, :3], ends = limit or 0.0, torch.tensor([1, 1, 4], dtype=torch.int32)
        want = gate_by_torch(preact, net.activation, net.gate)
        for rows in (preact, torch.cat([preact, preact], 1)[:, :40]):
            torch.testing.assert_close(kernels.gated_rows(net.gate, rows), want, rtol=1e-5, atol=1e-6)
        order = torch.randperm(6).int()
        preact[4:], dh[4:], weights.view(-1)[order[4:].long()] = torch.nan, torch.nan, torch.nan
        added = torch.randn(3, 33, dtype=dtype), torch.randn(3, 33, dtype=dtype)
        there, places = slice(0, 4), torch.randperm(8)[:6]
        for more in (None, added):
            given = net.gate, preact, dh, order, weights, ends, more
            got = kernels.pair_backward(*given)
            for one, other in zip(got, gate_backward(net, *given[1:]), strict=True):
                part = there if len(one) == 6 else slice(None)  # what no expert has is anything
                torch.testing.assert_close(one[part], other[part], rtol=1e-5, atol=1e-5)
            wanted = preact.new_full((8, 40), 5.0), preact.new_full((8, 20), 5.0)
            for whole, rows in zip(wanted, got, strict=False):
                whole[places[there]] = rows[there]
            away = torch.where(torch.arange(6) < 4, places, 1 << 40)  # nothing is written for pairs of no expert
            into = preact.new_full((8, 40), 5.0), preact.new_full((8, 20), 5.0), away
            moved = kernels.pair_backward(*given, into)
            for one, other in zip(moved, (*wanted, got[2]), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.usefixtures("kernels")
def test_the_gates_of_a_layer_in_steps(gelu: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of the operators, beside torch; a row takes two blocks of columns."""
    kernels = layer_ops.gate_kernels()
    monkeypatch.setattr(kernels, "GATE_COLUMNS", 16)
    torch.manual_seed(7)
    x, grad = torch.randn(10, 80, dtype=dtype)[:, :40], torch.randn(10, 60, dtype=dtype)[:, :20]
    near: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(kernels.gated(x, gelu), layer_ops._gate(x, gelu), **near)
    want = layer_ops._gate_backward(grad, x, gelu)
    torch.testing.assert_close(kernels.gated_backward(grad, x, gelu), want, **near)


def test_rows_of_pairs_and_their_sums(kernels: Any) -> None:
    """Copied by pair, and summed by expert, where one has none, one many, and some pairs have no expert."""
    torch.manual_seed(8)
    order, ends = torch.randperm(200).int(), torch.tensor([3, 3, 150, 170], dtype=torch.int32)
    x, weights = torch.randn(50, 90)[:, :70], torch.rand(50, 4)
    place = order.argsort().int().view(50, 4)
    rows = kernels.rows_of_pairs(x, place, 200)
    assert torch.equal(rows, x[order.long() // 4]) and rows.is_contiguous()
    for copied in (kernels.rows_of_pairs, rows_of_pairs):  # places behind the last row are nobody's
        assert torch.equal(copied(x, place, 170), rows[:170])
    rows[170:] = torch.nan
    for given in ((), (order, weights)):
        got = kernels.sum_by_expert(rows, ends, torch.float32, *given)
        torch.testing.assert_close(got, sum_by_expert(rows, ends, torch.float32, *given), rtol=1e-5, atol=1e-5)
        factors = weights.view(-1)[order.long()] if given else torch.ones(200)
        torch.testing.assert_close(got[2], (factors[3:150, None] * rows[3:150]).sum(0), rtol=1e-5, atol=1e-5)
        assert (got[1] == 0).all()
        half = kernels.sum_by_expert(rows.half(), ends, torch.float16, *given)
        torch.testing.assert_close(half.float(), got, rtol=1e-2, atol=1e-2)


def test_which_layers_copy_tokens_to_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 48 rows for each expert; not for products whose bits or whose kernel would change with that."""
    x = torch.ones(1)
    assert not layer_ops.copies_rows(x, 1000, 1, False, "auto")  # no GPU
    monkeypatch.setattr(layer_ops, "kernels_for", as_on_a_gpu)
    limit = cupy_choice.PICKED_ROWS * 8
    found = [layer_ops.copies_rows(x, pairs, 8, False, "auto") for pairs in (limit, limit + 1)]
    assert found == [False, True]
    assert not layer_ops.copies_rows(x, limit + 1, 8, True, "auto")
    assert not layer_ops.copies_rows(x, limit + 1, 8, False, "triton")


def as_on_a_gpu(x: Tensor, kernels: Callable[[], Any] = layer_ops.triton_kernels) -> Any:
    return kernels()


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("options", [{"recompute": True}, {"activation": "silu"}, GPT_OSS])
@pytest.mark.usefixtures("kernels")
def test_training_by_the_kernels_of_a_layer(options: Any, copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sort, copies, gates and sums by the kernels that a GPU takes; the products by the cpu backend."""
    monkeypatch.setattr(layer_ops, "COPIED_ROWS", 0 if copied else 48)
    torch.manual_seed(4)
    width, stacked = 10 if "activation" in options else 20, "stacked" in options
    shapes = [(3, 16, width), (3, 10, 16)] if stacked else [(3, width, 16), (3, 16, 10)]
    given = [torch.randn(shape, requires_grad=True) for shape in ((7, 16), (7, 2), *shapes, (3, width), (3, 16))]
    index = torch.rand(7, 4).argsort(1)[:, :2]  # number 3 is elsewhere
    found = []
    for on_gpu in (False, True):
        for module in (fused_experts, layer_ops) if on_gpu else ():
            monkeypatch.setattr(module, "kernels_for", as_on_a_gpu)
        y = experts_forward(given[0], index, *given[1:], backend="cpu", **options)
        found.append((y, *torch.autograd.grad(y.square().sum(), given)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "same"), [({}, False), ({"batch_invariant": True}, True), ({"recompute": True}, True)]
)
@pytest.mark.usefixtures("kernels")
def test_the_gate_of_a_layer_that_keeps_its_input_rounds_it(
    options: dict[str, Any], same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else, and in batch-invariant layers, the bits do not depend on wanted gradients."""
    monkeypatch.setattr(fused_experts, "kernels_for", as_on_a_gpu)
    torch.manual_seed(5)
    x, up, down = (torch.randn(shape).bfloat16() / 4 for shape in ((40, 16), (3, 20, 16), (3, 16, 10)))
    index, weights = torch.randint(0, 3, (40, 2)), torch.rand(40, 2)
    options = {"backend": "cpu", **options}
    want = experts_forward(x, index, weights, up, down, **options)
    y = experts_forward(x.requires_grad_(), index, weights, up, down, **options)
    torch.testing.assert_close(y, want, rtol=2e-2, atol=1e-2)
    assert torch.equal(y, want) == same


def test_rows_that_came_home_are_added_to_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    kernels: Any = importlib.import_module("multigemm.integrations.exchange_kernels")
    monkeypatch.setattr(torch_internals, "current_device", lambda: -1)
    own, rows = torch.randn(4, 2100).half(), torch.randn(3, 2100).half()
    by_token = torch.tensor([[-1, 2, -1], [-1, -1, -1], [0, 1, 2], [-1, -1, 0]])
    place = by_token.view(2, 2, 3).transpose(1, 2).contiguous()
    for given in (own, own.double()):
        got = kernels.add_returned(given, rows.to(given.dtype), place)
        torch.testing.assert_close(got, add_returned(given, rows.to(given.dtype), place), rtol=0, atol=0)
        exact = given[2].double() + rows.double().sum(0)
        torch.testing.assert_close(got[2].double(), exact, rtol=1e-3, atol=1e-3)
        assert torch.equal(got[1], given[1])
    assert torch.equal(kernels.add_returned(own, rows[:0], torch.full((1, 3, 4), -1)), own)


@pytest.mark.parametrize("groups", [256, 257])
def test_more_groups_than_are_counted_at_once(groups: int) -> None:
    sizes = torch.zeros(groups, dtype=torch.int64)
    sizes[[0, 5, groups - 1]] = torch.tensor([2, 1, 3])
    options: dict[str, Any] = {"sizes": sizes, "a_rows": torch.tensor([3, 0, 1, 3, -1, 2]), "activation": "geglu"}
    solved(torch.randn(4, 20), torch.randn(groups, 20, 6), **options)
    index = torch.tensor([[0, 5], [2, 2], [3, 9]])
    solved(torch.randn(6, 20), torch.randn(groups, 20, 6), sizes=sizes, combine=(index, None))


def test_wide_sums_and_many_terms() -> None:
    """More columns than one program sums, and more terms than are on their way at once."""
    index = torch.randint(-1, 20, (5, 40))
    solved(torch.randn(20, 3), torch.randn(1, 3, 1100), sizes=[20], combine=(index, torch.randn(5, 40)))


def test_sums_behind_products_of_quantised_operands() -> None:
    a, b = q.quantize(torch.randn(9, 64), "e4m3", "row"), q.quantize(torch.randn(2, 64, 5), "e4m3", "row", side="b")
    options: dict[str, Any] = {"sizes": [4, 5], "scale_a": a.scale, "scale_b": b.scale, "out_dtype": torch.float32}
    solved(a.data, b.data, combine=(torch.tensor([[0, 8], [3, -1]]), torch.rand(2, 2)), **options)
    with pytest.raises(mg.BackendUnsupported, match=r"a_rows beside quantised operands.*backend='cpu'"):
        mg.plan(a.data, b.data, a_rows=torch.arange(9), backend="triton", **options)


def test_what_a_config_is_for() -> None:
    rows, x, b = torch.arange(9), torch.randn(9, 64).bfloat16(), torch.randn(2, 64, 64).bfloat16()
    picked = mg.GroupedGemmProblem(x, b, sizes=[4, 5], a_rows=rows, activation="swiglu").spec
    assert problem_with(Config(), picked) == ""
    assert problem_with(Config("hopper"), picked) == "", "a product among steps"
    assert "picked rows, gates" in problem_with(Config(splits=2), picked)
    assert "a gate joins two columns" in problem_with(Config(block_n=16), picked)
    summed = mg.GroupedGemmProblem(x, b, sizes=[4, 5], combine=(rows.view(3, 3), None)).spec
    assert problem_with(Config("hopper", block_n=128, stages=4, warps=4), summed) == "", "products are plain"


def test_explain_says_what_runs() -> None:
    t, x, b = tokens(6), torch.randn(6, 8), torch.randn(4, 8, 8)
    told = mg.explain(x, b, sizes=t["sizes"], a_rows=t["rows"], activation="glu", backend="triton")
    assert told.kernel == "pointer (interpreted) with gather, gate"
    told = mg.explain(torch.randn(12, 8), b, sizes=t["sizes"], out_rows=t["rows"], rows=6, backend="triton")
    assert told.kernel == "sort, then pointer (interpreted), then sum of rows"


# --- planted faults -----------------------------------------------------------------------------------

THERE = "there = (number >= 0) & (number < extent)"
FAULTS = {
    "index below 0": (THERE, "there = number < extent"),
    "index past the end": (THERE, "there = (number >= 0) & (number <= extent)"),
    "index in 32 bits": ("other=-1).to(tl.int64)", "other=-1).to(tl.int32).to(tl.int64)"),
    "index of another group": ("picked(a_rows, skip_m + row0 + i, in_rows", "picked(a_rows, row0 + i, in_rows"),
    "index of the first step": (
        "skip_k + step * BK + BK + kk, kk < k_left - BK, a",
        "skip_k + kk, kk < k_left - BK, a",
    ),
    "K tail of picked rows": ("kk < k_left - BK, b_extent", "kk < k_left + gk, b_extent"),
    "gate and up exchanged": ("acc = gated(gate, up,", "acc = gated(up, gate,"),
    "halves for up first": ("acc = gated(other, acc,", "acc = gated(acc, other,"),
    "up of the first columns": ("tl.load(b_ptrs + second,", "tl.load(b_ptrs + 0 * second,"),
    "bias of up left out": ("bias_ptrs += gn * bias_of", "bias_ptrs += 0 * gn * bias_of"),
    "beta before the clamp": (
        "    if HAS_LIMIT:",
        "    if HAS_BETA:\n        u = u + scalar_of(beta_bits, u.dtype)\n    if HAS_LIMIT:",
    ),
    "gate clamped on both sides": (
        "g = tl.where(g > limit, limit, g)",
        "g = tl.where(g > limit, limit, tl.where(g < -limit, -limit, g))",
    ),
    "up clamped on one side": ("u = tl.where(u < -limit, -limit, u)", "u = u"),
    "clamp hides NaN": ("u = tl.where(u > limit, limit, u)", "u = tl.where(u <= limit, u, limit)"),
    "alpha lost": ("tl.exp(-scalar_of(alpha_bits, g.dtype) * g)", "tl.exp(-g)"),
    "preact of up where g lies": ("p_ptrs += gn", "p_ptrs += 0 * gn"),
    "row_scale of the group's first rows": ("scale_group + skip_m + row0 + i", "scale_group + row0 + i"),
    "row_scale before the gate": (
        '        if GATE == "halves":',
        '        if ROW_SCALE:\n            acc = acc * 2.0\n        if GATE == "halves":',
    ),
    "rows behind the ends": ("there = (s >= low) & (s < high)", "there = (s >= low) & (s < high + 2)"),
    "rows before the first group": ("there = (s >= low) & (s < high)", "there = (s >= 0) & (s < high)"),
    "weight of the neighbour": ("tl.load(weights + at,", "tl.load(weights + at + 1,"),
    "weight of an absent row": (
        "mask=there, other=0).to(total.dtype)\n    return tl.where(there, total + term, total)",
        "mask=at >= 0, other=0).to(total.dtype)\n    return total + term",
    ),
    "last term lost": ("for j in tl.static_range(TERMS):", "for j in tl.static_range(TERMS - (TERMS > 1)):"),
    "last row of a place lost": ("first_from(index, tokens, row + 1)):", "first_from(index, tokens, row + 1) - 1):"),
    "beta of C lost": ("total += scalar_of(beta_bits, ACC) * given.to(ACC)", "total += given.to(ACC)"),
}
"""One thing wrong in the kernels' source: what it says, and what it says then."""
DEEP: dict[str, Any] = {"forms": ("jagged_k",), "work": 1 << 12, "longest": 80}
NARROWED: dict[str, dict[str, Any]] = {
    "index of the first step": DEEP, "K tail of picked rows": DEEP, "clamp hides NaN": {"modes": ("special",)},
    "beta of C lost": {"forms": ("jagged_m",)}, "rows before the first group": {"forms": ("jagged_m",)},
}  # fmt: skip
"""Faults that few problems show: where to look."""
FIRST_SEEDS = {
    "index past the end": 7, "index in 32 bits": 7, "index of the first step": 15, "K tail of picked rows": 14,
    "bias of up left out": 15, "clamp hides NaN": 20, "alpha lost": 17, "preact of up where g lies": 7,
    "rows before the first group": 42, "weight of the neighbour": 13, "weight of an absent row": 13,
    "last term lost": 13, "beta of C lost": 72, "gate and up exchanged": 3, "row_scale of the group's first rows": 4,
    "row_scale before the gate": 4,
}  # fmt: skip
"""Problems before show nothing of these faults: from which seed to look on, if not from 2."""

KERNEL_OF = {"generic": "pointer_kernel", "sum_rows": "sum_rows_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = next(path for path in KERNELS if FAULTS[fault][0] in path.read_text())
    module, name = module_with(source, *FAULTS[fault], tmp_path), KERNEL_OF[source.stem]
    monkeypatch.setattr(f"multigemm.backends.triton.kernels.{source.stem}.{name}", getattr(module, name))
    few = replace(FLOATS, work=1 << 9, groups=4, longest=17)
    limits, first = replace(few, **NARROWED.get(fault, {})), FIRST_SEEDS.get(fault, 2)
    hunted = findings(with_tile(TILES[0]), 300, first=first, limits=limits)
    found = next(hunted, None)
    assert found is not None and found[1].oracle != "exception", found


def test_a_rows_of_nan_stays_out_of_other_rows() -> None:
    """What is absent is a row of zeros: with bias, its result is the activation of the bias."""
    x = torch.randn(3, 8)
    x[1] = torch.nan
    bias = torch.randn(1, 4)
    rows: Tensor = torch.tensor([0, -1, 2, 3, 1])
    y = solved(x, torch.randn(1, 8, 4), sizes=[5], a_rows=rows, bias=bias)
    assert torch.equal(y[1], bias[0]) and torch.equal(y[3], bias[0])
    assert y.isnan().any(1).tolist() == [False, False, False, False, True]


@pytest.mark.parametrize(("tokens", "ranks", "chunks"), [(700, 2, 1), (11, 3, 2), (1, 1, 1), (0, 2, 2), (513, 4, 3)])
def test_tokens_that_travel_are_counted_and_laid_out(
    tokens: int, ranks: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of a GPU, beside the same in steps of torch; some numbers are no experts."""
    os.environ["TRITON_INTERPRET"] = "1"
    kernels: Any = importlib.import_module("multigemm.integrations.exchange_kernels")
    monkeypatch.setattr(torch_internals, "current_device", lambda: -1)
    experts, top_k, here = 7, 3, ranks - 1
    each = -(-experts // ranks)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        index = torch.randint(0, experts + 1, (tokens, top_k), dtype=dtype)
        group: Any = types.SimpleNamespace(size=lambda: ranks, rank=lambda: here)
        plain = fused_parallel.Departures(index, experts, group, chunks)
        want, got = (torch.zeros(ranks, 1 + 2 * chunks, dtype=torch.int64) for _ in range(2))
        plain.count(want)
        counts = kernels.count_departures(index, experts, each, here, chunks, got)
        assert torch.equal(got, want)
        rows, place = plain.lay_out()
        got_rows, got_place = kernels.lay_out_departures(index, experts, each, here, chunks, counts)
        sent = int(want[:, 1::2].sum())
        assert torch.equal(got_place, place) and torch.equal(got_rows[:sent], rows[:sent])


@pytest.mark.parametrize("picked", [True, False])
def test_rows_of_two_matrices_are_copied(picked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    kernels: Any = importlib.import_module("multigemm.integrations.exchange_kernels")
    monkeypatch.setattr(torch_internals, "current_device", lambda: -1)
    x, y = torch.randn(5, 2100).half(), torch.randint(0, 99, (5, 6), dtype=torch.int32)
    rows = torch.tensor([4, 0, 4]) if picked else None
    count = 3 if picked else 5
    got, want = ((torch.zeros(count, 2112).half()[:, 5:2105], torch.zeros(count, 9).int()[:, 1:7]) for _ in range(2))
    kernels.copy_rows((x, y), rows, got)
    copy_rows((x, y), rows, want)
    for one, other, source in zip(got, want, (x, y), strict=True):
        assert torch.equal(one, other) and torch.equal(one[1], source[0 if picked else 1])


# --- layers for few tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(NETWORKS)))
def test_a_layer_for_few_tokens_is_the_loop_over_pairs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, for experts that come twice or lie, and on memory that was written before."""
    kernels: Any = layer_ops.decode_kernels()
    experts, top_k, hidden, inner = 5, 3, 70, 38

    def interpreted(x: torch.Tensor, *steps: Any) -> None:
        for step in steps:
            for name in {"hidden", "out"} & set(step.values):
                step.values[name].fill_(float("nan"))
        for step in steps:
            step.kernel[step.grid](**step.values)

    pieces = {"SUMMED_BYTES": 512, "WHOLE_BYTES": 512 * (number % 3), "GATED_BYTES": 128}
    for name, value in {"run_steps": interpreted, "FEW_COLUMNS": 8 - 4 * (number % 2), **pieces}.items():
        monkeypatch.setattr(kernels, name, value)
    net, bias = NETWORKS[number]
    tokens, dtype = 1 + number % 2, (torch.float32, torch.bfloat16, torch.float64)[number % 3]
    x = torch.randn(tokens, hidden).to(dtype)
    weights = torch.rand(tokens, top_k).to(torch.float32 if number == 1 else dtype)
    index = torch.randint(-2, experts + 2, (tokens, top_k))
    index[-1] = torch.tensor([experts - 1, 2**31 + 1, experts - 1])  # one twice, and one that lies
    if number == 2:  # one expert for each token
        index, weights = index[:, :1].to(torch.uint8), weights[:, :1]
    parameters = parameters_of(bias, dtype, "cpu", (experts, hidden, inner))
    got = kernels.decode(net, x, index, weights, *parameters)
    want = by_pairs(net, x, index, weights, *parameters)
    assert (got.double() - want).norm() < LIMITS[dtype] * want.norm()
