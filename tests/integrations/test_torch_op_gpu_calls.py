"""The torch operator on a GPU, called again and again: right with new contents, short ways, no memory kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.integrations import grouped_gemm, op_call

pytestmark = pytest.mark.gpu


def test_repeated_calls_share_nothing_and_keep_no_memory() -> None:
    a = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4, 32, 48, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([10, 10, 30, 64], device="cuda", dtype=torch.int32)
    for step in range(12):
        a.normal_()
        ends.copy_(torch.tensor([step, 10 + step, 40, 60]))
        out = grouped_gemm(a, b, ends=ends)
        assert mg.verify(mg.GroupedGemmProblem(a, b, ends=ends), out).ok
    kept = [grouped_gemm(a, b, ends=ends) for _ in range(4)]
    assert len({x.data_ptr() for x in kept}) == 4
    assert all(torch.equal(x, out) for x in kept)
    large = torch.randn(4 << 20, 32, device="cuda", dtype=torch.bfloat16)
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        grouped_gemm(large, b, ends=ends)
    del large, kept
    assert torch.cuda.memory_allocated() <= held - (200 << 20)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *((name, "ends") for name in ("auto", "cupy", "triton", "numba", "cublas")),
        ("auto", "offsets"),
        ("auto", "sizes"),
        ("auto", "c"),
    ],
)
def test_calls_that_come_again_are_not_validated_again(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    b = torch.nn.Parameter(torch.randn(4, 32, 48, device="cuda", dtype=torch.bfloat16))
    cut = torch.zeros(5 if kind == "offsets" else 4, device="cuda", dtype=torch.int32)
    given: dict[str, Any] = {"ends" if kind == "c" else kind: cut}
    if kind == "c":
        given |= {"c": torch.randn(64, 48, device="cuda", dtype=torch.bfloat16), "beta": 0.5}
    entered: list[Any] = []

    def noted(*operands: Any, **keywords: Any) -> Any:
        entered.append(operands)
        return mg.GroupedGemmProblem(*operands, **keywords)

    monkeypatch.setattr(op_call, "GroupedGemmProblem", noted)
    operator = torch.ops.multigemm.grouped_gemm
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for step in range(8):
            a.normal_()
            cut[-4:].copy_(torch.tensor([step, 9, 40, 3] if kind == "sizes" else [step, 10 + step, 40, 60]))
            if step == 5:
                del entered[:]
            out = operator(a, b, **given, backend=backend)
            assert mg.verify(mg.GroupedGemmProblem(a, b.detach(), **given), out).ok
            del out
        assert not entered
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            others = [operator(a, b, **given, backend=backend) for _ in range(5)]
        torch.cuda.synchronize()
        assert all(torch.equal(x, others[0]) for x in others)
        assert mg.verify(mg.GroupedGemmProblem(a, b.detach(), **given), others[0]).ok
    assert operator(a, b, **given, backend=backend).requires_grad
