"""What a slip is told: the name that was meant, the entrance, and the remedy in the words of the caller's library."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.integrations import grouped_gemm as operator

A, B = torch.ones(6, 4), torch.ones(2, 4, 3)
SIZES = [4, 2]
ENTRANCES: dict[str, Any] = {
    "grouped_gemm": mg.grouped_gemm,
    "GroupedGemmProblem": mg.GroupedGemmProblem,
    "plan": mg.plan,
    "explain": mg.explain,
    "multigemm::grouped_gemm": operator,
}
OPERATOR_ENTRANCES: list[Any] = [operator, torch.ops.multigemm.grouped_gemm]


def refused(call: Any, *args: Any, **keywords: Any) -> str:
    with pytest.raises(mg.InvalidProblem) as caught:
        call(*args, **keywords)
    return str(caught.value)


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [
        ("activaton", "did you mean activation=?"),
        ("offs", "torch's offs are ends= here"),
        ("group_sizes", "that is sizes= here"),
        ("batch_sizes", "that is sizes= here"),
        ("m_sizes", "that is sizes= here"),
        ("trans_b", "pass b.transpose(1, 2), a view"),
        ("zzz", "it takes "),
    ],
)
def test_unknown_keywords(entrance: str, keyword: str, remedy: str) -> None:
    with pytest.raises(mg.UnknownKeyword) as caught:
        ENTRANCES[entrance](A, B, **{keyword: None})
    assert str(caught.value).startswith(f"{entrance}() takes no keyword {keyword}=: {remedy}")
    assert isinstance(caught.value, TypeError), "as Python's own"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_unknown_keywords_in_a_compiled_call() -> None:
    """Dynamo reports an exception of the code that it traces as its own, with the text."""
    compiled: Any = torch.compile(mg.grouped_gemm, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="takes no keyword activaton=: did you mean activation="):
        compiled(A, B, activaton="relu")


def test_plan_and_explain_take_the_arguments_of_grouped_gemm() -> None:
    want = mg.grouped_gemm(A, B, sizes=SIZES, activation="relu")
    assert torch.equal(mg.plan(A, B, sizes=SIZES, activation="relu", backend="cpu")(), want)
    assert torch.equal(mg.plan(a=A, b=B, sizes=SIZES, activation="relu")(), want)
    assert mg.explain(A, B, sizes=SIZES, backend=["cpu"]).chosen == "cpu"
    problem = mg.GroupedGemmProblem(A, B, sizes=SIZES)
    assert mg.plan(problem, "cpu").backend == mg.plan(problem=problem, backend="cpu").backend == "cpu"
    assert mg.explain(problem, "cpu", None).chosen == "cpu"


@pytest.mark.parametrize("call", [mg.plan, mg.explain])
def test_what_plan_and_explain_refuse(call: Any) -> None:
    problem = mg.GroupedGemmProblem(A, B, sizes=SIZES)
    assert "got a problem and sizes: give these to GroupedGemmProblem" in refused(call, problem, sizes=SIZES)
    assert "problem is a Tensor: pass a GroupedGemmProblem, or a, b and" in refused(call, A, sizes=SIZES)
    assert "problem is missing" in refused(call, sizes=SIZES)
    assert "keywords of grouped_gemm by name" in refused(call, A, B, "cpu")


def test_a_plan_takes_no_operands() -> None:
    plan = mg.plan(A, B, sizes=SIZES, backend="cpu")
    for args, keywords in (((A,), {}), ((A, B), {}), ((), {"a": A})):
        assert "plan.run(GroupedGemmProblem(a, b, ...))" in refused(plan, *args, **keywords)


@pytest.mark.parametrize(
    ("a", "b", "keywords", "torch_remedy", "numpy_remedy"),
    [
        ((2, 3, 4), (2, 4, 3), {"sizes": SIZES}, "a.flatten(0, 1)", "a.reshape(-1, 4)"),
        ((2, 5, 3, 4), (10, 4, 3), {"valid_rows": [1] * 10}, "a.flatten(0, 1)", "a.reshape(-1, 3, 4)"),
        ((6, 4), (1, 2, 4, 3), {"sizes": SIZES}, "b.flatten(0, 1)", "b.reshape(-1, 4, 3)"),
        ((1, 2, 3, 4), (2, 4, 3), {"sizes": SIZES}, "a.flatten(0, 2)", "a.reshape(-1, 4)"),
        (
            (2, 5, 3, 4),
            (2, 5, 4, 3),
            {},
            "a.flatten(0, 1) and b.flatten(0, 1)",
            "a.reshape(-1, 3, 4) and b.reshape(-1, 4, 3)",
        ),
    ],
)
def test_leading_dimensions_are_to_be_folded(
    a: tuple[int, ...], b: tuple[int, ...], keywords: dict[str, Any], torch_remedy: str, numpy_remedy: str
) -> None:
    x, y = torch.ones(a), torch.ones(b)
    assert refused(mg.grouped_gemm, x, y, **keywords).endswith(f"fold the leading dimensions: {torch_remedy}")
    numpy = refused(mg.grouped_gemm, x.numpy(), y.numpy(), **keywords)
    assert numpy.endswith(f"fold the leading dimensions: {numpy_remedy}")


def test_remedies_speak_the_callers_library() -> None:
    cut = np.array(SIZES, dtype=np.int16)
    assert "call .astype('int64')" in refused(mg.grouped_gemm, A, B, sizes=cut)
    assert "call .to(torch.int64)" in refused(mg.grouped_gemm, A, B, sizes=torch.from_numpy(cut))
    with pytest.raises((mg.BackendUnsupported, mg.BackendUnavailable)) as caught:
        mg.grouped_gemm(A.numpy(), B.numpy(), sizes=SIZES, backend=["cupy", "triton", "numba", "cublas"])
    assert "move them with .cuda()" not in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        (
            {"sizes": SIZES},
            "sizes is a list, and the torch operator takes a tensor: pass torch.as_tensor(sizes,",
        ),
        ({"offsets": (0, 4, 6)}, "offsets is a tuple"),
        ({"ends": np.array([4, 6])}, "ends is a ndarray"),
        ({"sizes": torch.tensor(SIZES), "backend": ["cpu"]}, "takes one text: join the names by commas"),
    ],
)
@pytest.mark.parametrize("call", OPERATOR_ENTRANCES)
def test_the_operator_refuses_lists(call: Any, keywords: dict[str, Any], text: str) -> None:
    call(A, B, sizes=torch.tensor(SIZES))  # what a warm call is told is no less
    assert text in refused(call, A, B, **keywords)
    with torch.autocast("cpu"):
        assert text in refused(call, A, B, **keywords)
    assert text in refused(call, A.clone().requires_grad_(), B, **keywords)
    assert "a is a list" in refused(call, [A], [B])


@pytest.mark.parametrize("call", OPERATOR_ENTRANCES)
@pytest.mark.parametrize("wants_gradient", [False, True])
def test_the_operator_refuses_none(call: Any, wants_gradient: bool) -> None:
    a, b = (x.clone().requires_grad_(wants_gradient) for x in (A, B))
    assert "a is None: pass a tensor" in refused(call, None, b)
    assert "b is None: pass a tensor" in refused(call, a, None)
    with torch.autocast("cpu"):
        assert "b is None: pass a tensor" in refused(call, a, None)


def test_the_operator_in_torch_ops_refuses_slips() -> None:
    call = torch.ops.multigemm.grouped_gemm
    assert "offsets is a list, and the torch operator takes a tensor" in refused(call, A, B, [0, 4, 6])
    assert "takes no keyword offs=: torch's offs are ends= here" in refused(call, A, B, offs=torch.tensor([4, 6]))
    assert "a_rows without offsets, sizes or ends" in refused(call, A, B, a_rows=torch.tensor([0]))
    with pytest.raises(RuntimeError, match="argument 'alpha'"):  # torch's own words of what has no better ones
        call(A, B, sizes=torch.tensor(SIZES), alpha="one")
