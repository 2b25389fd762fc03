"""Quantised operands: what the shape of a scale says, dtypes, copies, and every refusal in its words."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.problem.scales import Scale
from multigemm.problem.spec import ScaleSpec

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
A8, B8 = torch.ones(12, 256).to(E4M3), torch.ones(3, 256, 200).to(E4M3)
A16 = torch.ones(12, 256, dtype=torch.bfloat16)
B4 = torch.zeros(3, 128, 200, dtype=torch.uint8)
CUT: dict[str, Any] = {"sizes": [4, 3, 5]}
ONE = torch.ones(())


def problem(a: Any = A8, b: Any = B8, **options: Any) -> mg.GroupedGemmProblem:
    return mg.GroupedGemmProblem(a, b, **{**CUT, **options})


def refuse(match: str, a: Any = A8, b: Any = B8, **options: Any) -> None:
    with pytest.raises(mg.InvalidProblem, match=match):
        problem(a, b, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"scale_a": torch.ones(12)},
            "scale_a has shape (12,): a vector holds one number for each of the 3 groups; one for each row is "
            "scale_a[:, None]",
        ),
        (
            {"scale_b": torch.ones(3, 2, 3)},
            "scale_b has shape (3, 2, 3) for b of shape (3, 256, 200): along K it takes 1, 2 (blocks of 128), 4 or 8, "
            "along N 1, 200 or 2",
        ),
        ({"scale_a": torch.ones(12, 1).double()}, "scale_a has dtype float64; it must be float32 or float8_e8m0fnu"),
        (
            {"a": A16, "scale_a": ONE, "scale_b": ONE},
            "scale_a scales a, which is bfloat16 and needs none: leave it out",
        ),
        (
            {"a": A16, "b": torch.ones(3, 256, 200).bfloat16(), "scale_b": ONE},
            "scale_b scales b, which is bfloat16 and needs none: leave it out",
        ),
        (
            {"a": A16, "b": B4},
            "b is uint8: say what it holds with b_format='int4', 'uint4' or 'e2m1'",
        ),
        (
            {"a": A16, "b": torch.zeros(3, 256, 200, dtype=torch.uint8), "b_format": "int4"},
            "a has K = 256 and b holds 512 (two in a byte)",
        ),
        ({"b": B8.view(torch.int8)}, "a is float8_e4m3fn and b is int8: float8 multiplies float8 only"),
        ({"a": A16, "zero_b": ONE}, "zero_b without scale_b"),
        ({"a": A16, "zero_b": ONE, "scale_b": ONE}, "zero_b belongs to integer weights"),
        ({"accumulate": "quick"}, "accumulate='quick' is unknown: use one of 'promoted', 'fast'"),
        ({"accumulate": "promote"}, "did you mean 'promoted'"),
        ({"scale_a": torch.ones((), requires_grad=True)}, "scale_a asks for a gradient"),
    ],
)
def test_the_words_of_the_contract(options: Any, text: str) -> None:
    with pytest.raises(mg.InvalidProblem) as caught:
        problem(**options)
    assert text in str(caught.value)


def test_out_may_not_share_memory_with_a_scale() -> None:
    memory = torch.ones(12, 200)
    refuse("out shares memory with scale_a: pass another out", out=memory, scale_a=memory[:, :1])
    refuse("out shares memory with scale_b", out=memory, scale_b=memory[0, 0])
    rows = torch.zeros(12, 256 + 4, dtype=torch.uint8)  # rows with their scales beside them
    beside = rows[:, 256:].view(torch.float32)
    assert problem(rows[:, :256].view(E4M3), scale_a=beside).spec.a.scale is not None


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("scale_b has shape .200,.: .*one for each column is scale_b.None, None, :.", {"scale_b": torch.ones(200)}),
        ("128 along N goes with 128 along K only, 2 blocks", {"scale_b": torch.ones(3, 1, 2)}),
        ("128 along N goes with 128 along K only", {"scale_b": torch.ones(3, 4, 2)}),
        ("its first extent must be 1 or 3", {"scale_b": torch.ones(2, 1, 1)}),
        ("along T 1 or 12", {"scale_a": torch.ones(6, 1)}),
        ("a grid of 2 dimensions", {"scale_a": torch.ones(1, 12, 1)}),
        ("scale_a is a list; a jagged_m problem takes one array", {"scale_a": [ONE]}),
        ("view them as torch.float8_e8m0fnu", {"scale_a": torch.ones(12, 2, dtype=torch.uint8)}),
        (r"scales in e4m3 \(nvfp4\) come later", {"scale_a": torch.ones(12, 2).to(E4M3)}),
        ("a is float8_e4m3fnuz: the fnuz formats come later", {"a": torch.ones(12, 256).to(torch.float8_e4m3fnuz)}),
        ("float8 with packed weights comes later", {"b": B4, "b_format": "int4"}),
        ("b_format='int8' is unknown", {"b_format": "int8"}),
        ("b_format='int4' says what bytes hold, and b is float8_e4m3fn", {"b_format": "int4"}),
        ("quantised weights multiply bfloat16 or float16", {"a": A16.float()}),
        ("quantised weights multiply bfloat16 or float16", {"a": A16.float(), "b": B4, "b_format": "e2m1"}),
        ("quantised weights multiply bfloat16", {"a": A16.float(), "b": B8.view(torch.int8), "scale_b": ONE}),
        ("float8 multiplies float8 only", {"b": torch.ones(3, 256, 200).bfloat16()}),
        ("int8 x int8 products come later", {"a": A8.view(torch.int8), "b": B8.view(torch.int8), "scale_a": ONE}),
        ("int8 multiplies int8 only.*scale_b", {"a": A16, "b": B8.view(torch.int8)}),
        ("must be float32, float8_e8m0fnu or bfloat16", {"a": A16, "scale_b": torch.ones((), dtype=torch.float16)}),
        ("must be float32 or float8_e8m0fnu", {"scale_b": torch.ones((), dtype=torch.bfloat16)}),
        ("float zero points come later", {"a": A16, "b": B4, "b_format": "uint4", "scale_b": ONE, "zero_b": ONE}),
        ("zero_b belongs to integer weights .*b is e2m1",
         {"a": A16, "b": B4, "b_format": "e2m1", "scale_b": ONE, "zero_b": ONE.byte()}),
        ("it must be laid out as scale_b",
         {"a": A16, "b": B4, "b_format": "int4", "scale_b": torch.ones(3), "zero_b": ONE.byte()}),
        ("cannot be torch.float64: use bfloat16, float16, float32", {"out_dtype": "float64"}),
        ("cannot be torch.int32", {"out_dtype": torch.int32}),
        ("bias has dtype torch.float8_e4m3fn", {"bias": torch.ones(200).to(E4M3)}),
        ("bias has dtype torch.float16", {"bias": torch.ones(200).half()}),
    ],
)  # fmt: skip
def test_refusals(match: str, options: Any) -> None:
    refuse(match, **options)


def test_operands_of_float8_give_no_gradient() -> None:
    refuse("a asks for a gradient, and float8_e4m3fn operands give none: pass a.detach", A8.clone().requires_grad_())
    refuse("b asks for a gradient", A16, B8.clone().requires_grad_())
    with torch.no_grad():
        problem(A8.clone().requires_grad_())
    for options in ({"a": A16.clone().requires_grad_()}, {"bias": torch.ones(200, requires_grad=True)}):
        with pytest.raises(mg.InvalidProblem, match="requires grad"):
            mg.plan(problem(**options))


def test_packed_bytes() -> None:
    refuse(r"b is packed int4 and jagged='k' cuts K", torch.ones(8, 20).half(), torch.zeros(10, 8, dtype=torch.uint8),
           b_format="int4", jagged="k", sizes=[10, 10])  # fmt: skip
    refuse("holds e2m1, and b_format='int4'", A16, B4.view(torch.float4_e2m1fn_x2), b_format="int4")
    refuse(r"a\[1\] has K = 5 and b\[1\] holds 6", [A16[:, :4], A16[:, :5]], [B4[0, :2], B4[0, :3]], b_format="int4",
           sizes=None)  # fmt: skip
    for b, word in ((B4.view(torch.float4_e2m1fn_x2), None), (B4, "e2m1"), (B4.view(torch.int8), "e2m1")):
        made = problem(A16, b, b_format=word)
        assert made.spec.b.packed == "e2m1"
        assert made.spec.k == 256
        assert made.spec.quantised == "weights"
        assert made.spec.compute is torch.bfloat16
        assert made.out_dtype is torch.bfloat16


def spec_of(**options: Any) -> tuple[ScaleSpec | None, ScaleSpec | None]:
    made = problem(**options)
    return made.spec.a.scale, made.spec.b.scale


def covers(scale: ScaleSpec | None) -> tuple[bool, int, int]:
    assert scale is not None
    return scale.by_group, scale.rows, scale.k


def test_shapes_say_what_scales_cover() -> None:
    a: dict[tuple[int, ...], tuple[bool, int, int]] = {
        (): (False, 0, 0), (3,): (True, 0, 0), (12, 1): (False, 1, 0), (12, 2): (False, 1, 128),
        (12, 4): (False, 1, 64), (12, 8): (False, 1, 32), (1, 2): (False, 0, 128), (1, 1): (False, 0, 0),
    }  # fmt: skip
    for shape, wanted in a.items():
        assert covers(spec_of(scale_a=torch.ones(shape))[0]) == wanted, shape
    b: dict[tuple[int, ...], tuple[bool, int, int]] = {
        (): (False, 0, 0), (3,): (True, 0, 0), (3, 1, 1): (True, 0, 0), (3, 1, 200): (True, 1, 0),
        (3, 2, 200): (True, 1, 128), (3, 4, 200): (True, 1, 64), (3, 8, 200): (True, 1, 32),
        (3, 2, 2): (True, 128, 128), (1, 2, 2): (False, 128, 128), (3, 8, 1): (True, 0, 32),
    }  # fmt: skip
    for shape, wanted in b.items():
        assert covers(spec_of(scale_b=torch.ones(shape))[1]) == wanted, shape


def test_one_vector_is_by_group_even_if_rows_are_as_many() -> None:
    made = problem(A8[:3], sizes=[1, 1, 1], scale_a=torch.ones(3))
    assert covers(made.spec.a.scale) == (True, 0, 0)


def test_shared_and_single_operands() -> None:
    shared = problem(b=B8[0], scale_b=torch.ones(2, 2))
    assert covers(shared.spec.b.scale) == (False, 128, 128)
    assert covers(problem(b=B8[0], scale_b=torch.ones(3)).spec.b.scale) == (True, 0, 0)
    single = problem(A8, B8[0], sizes=None, scale_a=torch.ones(12, 2), scale_b=torch.ones(2, 2))
    assert single.squeezed
    assert covers(single.spec.a.scale) == (False, 1, 128)
    assert covers(single.spec.b.scale) == (False, 128, 128)
    refuse(r"for a of shape \(12, 256\)", A8, B8[0], sizes=None, scale_a=torch.ones(12, 3))


@pytest.mark.parametrize(("total", "groups"), [(300, 3), (20, 3), (128, 1), (0, 2), (90, 90)])
def test_jagged_k(total: int, groups: int) -> None:
    a, b = torch.ones(8, total).to(E4M3), torch.ones(total, 6).to(E5M2)
    sizes = [total // groups] * groups
    for q in (128, 64, 32):
        count = total // q + groups
        made = problem(a, b, sizes=sizes, jagged="k", scale_a=torch.ones(8, count), scale_b=torch.ones(count, 6))
        seen = {covers(made.spec.a.scale)[2], covers(made.spec.b.scale)[2]}
        assert len(seen) == 1
        if total // q:
            assert total // seen.pop() == total // q
    made = problem(a, b, sizes=sizes, jagged="k", scale_a=torch.ones(8, groups), scale_b=torch.ones(1, 6))
    assert covers(made.spec.a.scale)[1:] == (1, 0)
    refuse("along K it takes", a, b, sizes=sizes, jagged="k", scale_a=torch.ones(8, total // 32 + groups + 1))


def test_blocks_of_a_jagged_k_never_meet() -> None:
    """block j of group g is entry offsets[g] // q + g + j."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        q, total, groups = int(rng.choice([32, 64, 128])), int(rng.integers(0, 700)), int(rng.integers(1, 9))
        cuts = np.sort(rng.integers(0, total + 1, groups + 1))
        grid = torch.arange(total // q + groups, dtype=torch.float32)[None].expand(4, -1)
        scale = Scale(grid, grid[None], ScaleSpec(torch.float32, False, 1, q))
        seen: set[float] = set()
        for g, (start, end) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
            entries = scale.of_group(g, slice(0, 4), slice(start, end), "a", jagged_k=True)
            assert entries.shape == (4, end - start)
            wanted = [start // q + g + i // q for i in range(end - start)]
            assert entries[0].tolist() == wanted
            assert not seen & set(wanted)
            seen |= set(wanted)


def test_lists() -> None:
    a, b = [A8[:5], A8[:0], A8[:7, :40]], [B8[0], B8[1], B8[2, :40]]
    grids = [torch.ones(5, 2), torch.ones(0, 2), torch.ones(7, 1)]
    made = problem(a, b, sizes=None, scale_a=grids, scale_b=torch.ones(3))
    assert covers(made.spec.a.scale) == (True, 1, 128)
    assert covers(made.spec.b.scale) == (True, 0, 0)
    assert covers(problem(a, b, sizes=None, scale_a=ONE).spec.a.scale) == (True, 0, 0)
    mixed = [torch.ones(5, 2), torch.ones(0, 8), torch.ones(7, 2)]
    assert covers(problem(a, b, sizes=None, scale_a=mixed).spec.a.scale) == (True, 1, -1)
    refuse("scale_a is a list of 2; the problem has 3 groups", a, b, sizes=None, scale_a=grids[:2])
    refuse(r"scale_a\[0\] has shape \(5, 3\) for a\[0\] of shape \(5, 256\): along K", a, b, sizes=None,
           scale_a=[torch.ones(5, 3), *grids[1:]])  # fmt: skip
    refuse("lists take a number for all", a, b, sizes=None, scale_a=torch.ones(2))
    refuse("scale_a mixes dtypes", a, b, sizes=None, scale_a=[grids[0].to(E8M0), *grids[1:]])
    assert problem([], [], sizes=None, scale_a=[]).spec.groups == 0


def test_results_and_accumulation() -> None:
    assert problem().out_dtype is torch.bfloat16
    assert problem(b=B8.to(E5M2)).spec.compute is E4M3
    assert problem(A16.half()).out_dtype is torch.float16
    assert problem(out_dtype="float32").out_dtype is torch.float32
    assert problem(accumulate="fast").spec.accumulate == "fast"
    assert problem(accumulate="fast", scale_a=torch.ones(12, 2)).spec.accumulate == "promoted"
    assert problem(A16, accumulate="fast").spec.accumulate == "promoted"
    plain = mg.GroupedGemmProblem(A16, A16.mT)
    assert mg.GroupedGemmProblem(A16, A16.mT, accumulate="fast").spec is plain.spec
    assert plain.quantisation is None
    assert plain.spec.quantised == ""


MAKERS: dict[str, Callable[[], mg.GroupedGemmProblem]] = {
    "blocks": lambda: problem(scale_a=torch.rand(12, 2), scale_b=torch.rand(3, 2, 2), accumulate="fast"),
    "e8m0": lambda: problem(A16, scale_b=torch.full((3, 8, 200), 2.0).to(E8M0)),
    "packed": lambda: problem(A16, B4, b_format="uint4", scale_b=torch.rand(3), zero_b=torch.ones(3).byte()),
    "lists": lambda: problem([A8], [B8[0]], sizes=None, scale_a=[torch.rand(12, 2)], scale_b=torch.rand(1)),
    "single": lambda: problem(A8, B8[0], sizes=None, scale_a=torch.rand(12, 1)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_copies_and_texts(name: str) -> None:
    made = MAKERS[name]()
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), copy.copy(made)):
        assert other.spec == made.spec
        assert mg.verify(other, mg.solve(made, "cpu"))
    text = repr(made)
    for word, x in (("scale_a", made.scale_a), ("scale_b", made.scale_b), ("zero_b", made.zero_b)):
        assert (f"{word}=" in text) == (x is not None)
    again = eval(text, {"torch": torch, "GroupedGemmProblem": mg.GroupedGemmProblem})
    assert again.spec == made.spec
    assert made.bytes > 0


def test_arrays_of_other_libraries() -> None:
    a = np.ones((12, 256), ml_dtypes.float8_e4m3fn)
    b = np.ones((3, 256, 200), ml_dtypes.float8_e5m2)
    scale = np.full((12, 2), 2.0, ml_dtypes.float8_e8m0fnu)
    result = mg.grouped_gemm(a, b, sizes=[4, 3, 5], scale_a=scale, backend="cpu", out_dtype="float32")
    assert isinstance(result, np.ndarray)
    assert (result == 512).all()
    turned = mg.grouped_gemm(a, b, sizes=[4, 3, 5], scale_a=scale[::-1, ::-1], backend="cpu", out_dtype="float32")
    np.testing.assert_array_equal(turned, result)


def test_weights_are_refused_with_one_reason() -> None:
    from multigemm.backends import registry

    for made, word in ((problem(A16), "quantised weights (float8_e4m3fn)"),
                       (problem(A16, B4, b_format="int4"), "quantised weights (int4)")):  # fmt: skip
        (reason,) = registry.get("cublas").not_supported_reasons(made.spec, torch.device("cuda", 0))
        assert word in reason
        assert "use backend='triton', 'cupy', 'numba' or 'cpu', or dequantise with" in reason
    assert registry.get("null").not_supported_reasons(problem().spec, torch.device("cuda", 0)) == []


def test_a_foreign_backend_that_knows_nothing_of_them_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from multigemm.backends import registry
    from tests.model_mutants.kernel import ModelBackend

    foreign: Any = type("Foreign", (ModelBackend,), {"takes_quantised": False})("foreign")
    monkeypatch.setattr(registry, "get", lambda name: foreign)
    spec, device = problem().spec, torch.device("cpu")
    assert "float8 operands" in registry.reasons("foreign", spec, device)[0]
    foreign.takes_quantised = True
    assert registry.reasons("foreign", spec, device) == ()


def test_benchmarks_refuse_them() -> None:
    with pytest.raises(mg.InvalidProblem, match="benchmarks of quantised operands come later"):
        mg.benchmark(problem())


def test_explain_tells_what_scales_cover() -> None:
    text = str(mg.explain(problem(scale_a=torch.ones(12, 2), scale_b=torch.ones(3, 2, 2))))
    assert "a: float8_e4m3fn, one float32 scale for a line, 128 of K" in text
    assert "chosen: cpu" in text
    assert "cast" not in text


def test_a_call_with_scales_is_never_served_by_an_entry_of_one_without() -> None:
    for scale in (1.0, 2.0, 4.0) * 3:
        got = mg.grouped_gemm(A8, B8, **CUT, out_dtype=torch.float32, scale_a=torch.full((), scale), backend="cpu")
        assert (got == 256 * scale).all()
        assert (mg.grouped_gemm(A8, B8, **CUT, out_dtype=torch.float32, backend="cpu") == 256).all()
        made = problem(out_dtype=torch.float32, scale_a=torch.full((), scale))
        assert (mg.solve(made, "cpu") == 256 * scale).all()
        assert (mg.plan(problem(out_dtype=torch.float32, scale_a=ONE), "cpu").run(made) == 256 * scale).all()


def test_saved_plans_read_scales_anew() -> None:
    scale: Tensor = torch.ones(12, 2)
    plan = mg.plan(problem(out_dtype=torch.float32, scale_a=scale), "cpu")
    assert (plan() == 256).all()
    scale[:, 1] = 3
    assert (plan() == 512).all()
