"""TritonBench's grouped_gemm with our entries: a stand-in for its harness, the real operator if installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.integrations import tritonbench
from multigemm.integrations.tritonbench import ADAPTERS, adapter

Entry = Callable[..., Callable[[], Any]]


class Harness:
    """What TritonBench does with an entry: a decorator enters it, its function is named, poisoned and compared."""

    def __init__(self) -> None:
        self.entered: dict[str, dict[str, bool]] = {}

    def register_benchmark(
        self, operator_name: str, func_name: str, baseline: bool = False, enabled: bool = True, fwd_only: bool = False
    ) -> Callable[[Entry], Entry]:
        def decorator(entry: Entry) -> Entry:
            self.entered.setdefault(operator_name, {})[func_name] = enabled
            return lambda operator, *args, **keywords: entry(operator, *args, **keywords)

        return decorator

    def function(self, operator: Any, name: str, inputs: tuple[Any, ...]) -> Callable[[], Any]:
        made: Callable[[], Any] = getattr(operator, name)(*inputs)
        setattr(made, "_name", name)  # noqa: B010
        return made

    def accurate(self, operator: Any, name: str) -> int:
        """The number of inputs at which an entry gave what the baseline gives, in memory that held NaN before."""
        count = 0
        for inputs in operator.inputs():
            call, baseline = self.function(operator, name, inputs), self.function(operator, "baseline", inputs)
            probe = call()
            for x in probe if isinstance(probe, list) else [probe]:
                x.fill_(torch.nan)
            torch.testing.assert_close(call(), baseline(), rtol=1e-2, atol=1e-2)
            count += 1
        return count


class Joined:
    """An operator of 2025, from September on: one B for all groups, results below each other."""

    extra: tuple[Any, ...] = ()
    shapes = ([64, 128, 192, 256], [16], [3, 0, 5], [128] * 4)

    def inputs(self) -> Iterator[tuple[Any, ...]]:
        for sizes in self.shapes:
            b = torch.rand(64, 48, dtype=torch.bfloat16)
            yield ([torch.rand(m, 64, dtype=torch.bfloat16) for m in sizes], [b] * len(sizes), *self.extra)

    def baseline(self, group_a: list[Tensor], group_b: list[Tensor], *rest: Any) -> Callable[[], Tensor]:
        return lambda: torch.cat([a @ b for a, b in zip(group_a, group_b, strict=True)])


class Four(Joined):
    """An operator of 2026: two more inputs, which are None or operands of other entries."""

    extra = (None, None)


class FourGiven(Joined):
    extra = (torch.full((4, 48, 64), torch.nan), torch.tensor([1, 2, 3, 4]))


class Apart(Joined):
    """An operator before September 2025: each group has a B of its own, the results stay a list."""

    def inputs(self) -> Iterator[tuple[Any, ...]]:
        for n in (16, 32, 64):
            yield tuple([torch.rand(n, n, dtype=torch.float16) for _ in range(4)] for _ in "AB")

    def baseline(self, group_a: list[Tensor], group_b: list[Tensor], *rest: Any) -> Any:
        return lambda: [a @ b for a, b in zip(group_a, group_b, strict=True)]


OPERATORS = [Joined, Four, FourGiven, Apart]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    """The harness under the names that `register` imports, without an operator yet."""
    made = Harness()
    for name in ("", ".operators", ".operators.grouped_gemm", ".utils", ".utils.triton_op"):
        monkeypatch.setitem(sys.modules, f"tritonbench{name}", ModuleType(f"tritonbench{name}"))
    sys.modules["tritonbench.utils.triton_op"].register_benchmark = made.register_benchmark  # type: ignore[attr-defined]
    return made


def install(operator: type) -> type:
    """A fresh copy of an operator's class, in its place."""
    fresh = type(operator.__name__, (operator,), {})
    sys.modules["tritonbench.operators.grouped_gemm"].Operator = fresh  # type: ignore[attr-defined]
    return fresh


@pytest.mark.parametrize("kind", OPERATORS)
def test_entries_give_what_the_baseline_gives(kind: type, harness: Harness) -> None:
    operator = install(kind)()
    tritonbench.register()
    tritonbench.register()  # the harness runs a plugin for each operator that it makes
    for name in ("multigemm_cpu", "multigemm_auto") if not torch.cuda.is_available() else ("multigemm_cpu",):
        assert harness.accurate(operator, name) == len(list(operator.inputs()))


def test_register_enables_what_computes_here(harness: Harness) -> None:
    install(Joined)
    tritonbench.register()
    entered = harness.entered["grouped_gemm"]
    assert set(entered) == {f"multigemm_{name}" for name in ADAPTERS}
    assert entered["multigemm_auto"]
    assert not entered["multigemm_null"]
    assert entered["multigemm_cpu"] == (not torch.cuda.is_available())
    state = {x.name: x.available and not x.emulated for x in mg.list_backends()}
    for name in ("cupy", "triton", "numba", "cublas"):
        assert entered[f"multigemm_{name}"] == (state[name] and torch.cuda.is_available())


def test_entries_are_functions_that_only_launch() -> None:
    shared = torch.randn(256, 128, dtype=torch.bfloat16)
    group_a = [torch.randn(m, 256, dtype=torch.bfloat16) for m in (64, 128, 192, 256)]
    first, second = (ADAPTERS["cpu"](None, group_a, [shared] * 4, None, None) for _ in range(2))
    first._name, second._name = "one", "two"  # type: ignore[attr-defined]
    assert (first._name, second._name) == ("one", "two")  # type: ignore[attr-defined]
    assert first() is first()  # no packing, no allocation
    torch.testing.assert_close(first(), torch.cat([a @ shared for a in group_a]), rtol=1e-2, atol=1e-2)
    with pytest.raises((mg.BackendUnavailable, mg.BackendUnsupported)):
        ADAPTERS["cupy"](None, group_a, [shared] * 4)


def test_entries_take_lists_that_differ_in_every_extent() -> None:
    group_a, group_b = [torch.randn(3, 4), torch.randn(5, 6)], [torch.randn(4, 7), torch.randn(6, 8)]
    want = [a @ b for a, b in zip(group_a, group_b, strict=True)]
    torch.testing.assert_close(adapter("cpu")(None, group_a, group_b)(), want)


# --- the real operator --------------------------------------------------------------------------------


def real_result(device: str, only: list[str]) -> dict[str, Any]:
    """The accuracy of our entries at each default input, by the harness itself: {entry: [per input]}."""
    pytest.importorskip("tritonbench.operators.grouped_gemm", reason="TritonBench is not installed")
    from tritonbench.operators.grouped_gemm import Operator
    from tritonbench.utils.parser import get_parser
    from tritonbench.utils.triton_op import BASELINE_BENCHMARKS

    tritonbench.register()
    entries = [BASELINE_BENCHMARKS["grouped_gemm"], *(f"multigemm_{name}" for name in only)]
    line = ["--op", "grouped_gemm", "--device", device, "--metrics", "accuracy", "--only", ",".join(entries)]
    args, rest = get_parser().parse_known_args(line)
    operator = Operator(args, rest)
    operator.run()
    rows = [row for _, row in operator.output.result]
    return {name: [row[name].accuracy for row in rows] for name in entries[1:]}


@pytest.mark.gpu
@pytest.mark.slow
def test_the_real_operator_finds_every_entry_accurate() -> None:
    here = [x.name for x in mg.list_backends() if x.available and x.name not in ("cpu", "null")]
    found = real_result("cuda", ["auto", *here])
    assert set(found) == {f"multigemm_{name}" for name in ("auto", *here)}
    assert all(len(row) > 1 and all(row) for row in found.values()), found
