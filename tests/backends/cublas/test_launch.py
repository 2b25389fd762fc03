"""Binding, torch's grouped_mm, and calls that the cache of launches serves: their answers, and what they cost the host
in Python calls; no GPU needed."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import multigemm as mg
from multigemm import torch_internals
from multigemm.backends.cublas import grouped_mm, launch, library
from multigemm.backends.cublas.config import Config
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate, stage
from tests.support.cublas_fake import CUDA, Fake, HostCublas, ints

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = tuple(f"{ROOT / folder}/" for folder in ("multigemm", "backends"))
SIZES = [10, 0, 16, 30, 4, 1]
FULL = [10, 2, 16, 28, 8, 8]
GROUPS, ROWS, K, N = len(SIZES), 72, 32, 24
LIES = ([0, 40, 20, 30, 64, 64], [-5, 4, 900, 3, 70, 2], [2**31 - 1] * 6, [0] * 6)


def offsets_of(head: int = 0) -> Tensor:
    return torch.tensor([head, *SIZES]).cumsum(0)


class Calls:
    """Calls of one layout, of which the cache serves all from the third on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, use: Callable[..., None], variant: str = "auto") -> None:
        use(HostCublas(variant))
        self.bound = 0
        bound = launch.bound

        def counted(*args: Any) -> Any:
            self.bound += 1
            return bound(*args)

        monkeypatch.setattr(launch, "bound", counted)

    def served(self, make: Callable[[int], tuple[Tensor, Tensor, dict[str, Any]]], turns: int = 6) -> None:
        """Makes calls of fresh tensors; each result is that of the whole way, and none after the second binds."""
        for turn in range(turns):
            a, b, more = make(turn)
            before, served = self.bound, LAUNCHES.served
            given = more.get("out")
            problem = mg.GroupedGemmProblem(a, b, **(more if given is None else more | {"out": given.clone()}))
            want = torch.from_numpy(np.asarray(mg.expected(problem), dtype=np.float64))
            out = mg.grouped_gemm(a, b, backend="cublas", **more)
            assert (self.bound == before) is (turn >= 2)
            assert (LAUNCHES.served > served) is (turn >= 2)
            assert out is given or out.is_contiguous()
            assert torch.equal(out.double(), want), turn


FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "offsets": lambda: {"offsets": offsets_of()},
    "a first offset": lambda: {"offsets": offsets_of(2)},
    "ends": lambda: {"ends": offsets_of()[1:].int()},
    "sizes": lambda: {"sizes": torch.tensor(SIZES)},
    "int32 sizes": lambda: {"sizes": torch.tensor(SIZES).int()},
    "a list of sizes": lambda: {"sizes": SIZES},
    "a list of offsets": lambda: {"offsets": (offsets_of(8) // 8 * 8).tolist()},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("jagged", ["m", "k"])
def test_a_hit_gives_what_the_whole_way_gives(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], fake: Fake, form: str, jagged: str
) -> None:
    def make(turn: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        more = FORMS[form]() | {"jagged": jagged}
        if jagged == "k":
            return ints(ROWS, K, seed=turn).t(), ints(ROWS, N, seed=turn + 99), more
        return ints(ROWS, K, seed=turn), ints(GROUPS, K, N, seed=turn + 99), more

    Calls(monkeypatch, install, "grouped_mm").served(make)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ends", "sizes", "a list of sizes", "a list of offsets"])
def test_a_given_result_keeps_what_no_group_owns(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], fake: Fake, kind: str
) -> None:
    def make(turn: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        out = torch.full((ROWS + 8, N + 8), 7.0).bfloat16()[:, :N]
        return ints(ROWS + 8, K, seed=turn), ints(GROUPS, K, N, seed=turn + 9), FORMS[kind]() | {"out": out}

    Calls(monkeypatch, install, "grouped_mm").served(make)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", LIES, ids=str)
@pytest.mark.parametrize("kind", ["ends", "sizes", "offsets"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_numbers_may_lie_and_tokens_may_be_any(
    install: Callable[..., None], fake: Fake, numbers: list[int], kind: str, dtype: torch.dtype
) -> None:
    """The launch that an entry for any number of tokens holds: its numbers are clamped as those of a plan are, for
    which another kernel makes ends of sizes, and no NaN comes from behind the last row."""
    install(HostCublas("grouped_mm"))
    b, live = ints(GROUPS, K, N, seed=9), torch.zeros(GROUPS + (kind == "offsets"), dtype=dtype)
    launched, cut = cast(Any, None), cast(dict[str, Any], {kind: live})
    for rows in (ROWS, 71, 200, 8):
        a = ints(rows, K, seed=rows)
        live.zero_()
        plan: Any = mg.plan(mg.GroupedGemmProblem(a, b, **cut), backend="cublas")
        launched = launched or getattr(plan._launch, "_steps", [plan._launch])[-1].on_tensors(kind, live)
        live.copy_(torch.tensor([3, *numbers] if kind == "offsets" else numbers))
        want, ends = plan(), live.cumsum(0) if kind == "sizes" else live
        a[min(max(0, int(ends.max())), rows) :] = float("nan")
        got = launched(a, b, live, None)
        assert torch.equal(got, want)
        assert not got.isnan().any()


PRODUCTS: dict[str, Callable[[int], tuple[Tensor, Tensor, dict[str, Any]]]] = {
    "jagged m": lambda i: (ints(70, K, seed=i), ints(GROUPS, K, N, seed=i + 9), {"offsets": offsets_of(3).tolist()}),
    "jagged n": lambda i: (ints(GROUPS, N, K, seed=i), ints(K, ROWS, seed=i + 9), {"sizes": SIZES, "jagged": "n"}),
    "jagged k": lambda i: (ints(ROWS, K, seed=i).t(), ints(ROWS, N, seed=i + 9), {"sizes": SIZES, "jagged": "k"}),
    "scattered": lambda i: (ints(ROWS, K, seed=i), ints(4, K, N, seed=i + 9), {"offsets": [0, 16, 32, 40, 56]}),
    "one weight": lambda i: (ints(ROWS, K, seed=i), ints(K, N, seed=i + 9), {"sizes": SIZES}),
    "equal sizes": lambda i: (ints(ROWS, K, seed=i), ints(4, K, N, seed=i + 9), {"sizes": [18] * 4}),
    "batched": lambda i: (ints(3, 8, K, seed=i), ints(3, K, N, seed=i + 9), {}),
    "masked": lambda i: (ints(3, 8, K, seed=i), ints(3, K, N, seed=i + 9), {"valid_rows": [8, 0, 5]}),
    "one matrix": lambda i: (ints(8, K, seed=i), ints(K, N, seed=i + 9), {}),
    "bias, relu": lambda i: (
        ints(ROWS, K, seed=i), ints(GROUPS, K, N, seed=i + 9),
        {"sizes": SIZES, "bias": ints(GROUPS, N, seed=i + 3), "activation": "relu"},
    ),
    "c": lambda i: (
        ints(ROWS, K, seed=i).float(), ints(GROUPS, K, N, seed=i + 9).float(),
        {"sizes": SIZES, "c": ints(ROWS, N, seed=i + 3).float(), "beta": 2.0},
    ),
    "a bias of its own": lambda i: (
        ints(ROWS, K, seed=i).float(), ints(GROUPS, K, N, seed=i + 9).float(),
        {"sizes": SIZES, "bias": ints(N, seed=i + 3).float()},
    ),
    "a given result": lambda i: (
        ints(ROWS, K, seed=i).t(), ints(ROWS, N, seed=i + 9),
        {"sizes": SIZES, "jagged": "k", "out": torch.full((GROUPS, K, 2 * N), 7.0).bfloat16()[..., :N]},
    ),
    "nothing to multiply": lambda i: (ints(ROWS, K, seed=i), ints(GROUPS, K, N), {"sizes": SIZES, "alpha": 0.0}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize("variant", ["loop", "streams", "batched", "grouped"])
def test_library_calls_follow_their_operands(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], fake: Fake, form: str, variant: str
) -> None:
    if variant == "grouped" and form == "bias, relu":
        pytest.skip("cublasGemmGroupedBatchedEx writes no float32 of bfloat16")
    Calls(monkeypatch, install, variant).served(PRODUCTS[form])


@pytest.mark.parametrize("form", ["scattered", "jagged m"])
def test_a_table_too_large_to_be_written_in_place_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], fake: Fake, form: str
) -> None:
    monkeypatch.setattr(library, "STAGED_BYTES", 0)
    Calls(monkeypatch, install, "batched" if form == "scattered" else "grouped").served(PRODUCTS[form])


def test_a_result_of_inference_mode_is_written_outside_of_it(install: Callable[..., None], fake: Fake) -> None:
    install(HostCublas("loop"))
    a, b = ints(ROWS, K).t(), ints(ROWS, N, seed=1)
    with torch.inference_mode():
        plan = mg.plan(mg.GroupedGemmProblem(a, b, sizes=[ROWS, 0], jagged="k"), backend="cublas")
    out: Any = plan()
    assert torch.equal(out[0].double(), (a.double() @ b.double()).to(out.dtype).double())
    assert bool((out[1] == 0).all())


# --- what it costs the host -----------------------------------------------------------------------


def python_calls(run: Callable[[], object]) -> Counter[str]:
    """The Python functions of the product, and of torch and others where the product calls them. What a garbage
    collection calls is left out."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: object) -> None:
        code, caller = frame.f_code, frame.f_back
        ours = caller is not None and str(Path(caller.f_code.co_filename).resolve()).startswith(PRODUCT)
        if event == "call" and (ours or code is run.__code__) and "tests/" not in code.co_filename:
            found[f"{code.co_filename}:{code.co_name}"] += 1

    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@pytest.mark.parametrize(
    ("variant", "form", "bar"),
    [
        *(("grouped_mm", form, 14) for form in ("offsets", "ends", "sizes")),
        ("grouped_mm", "a list of sizes", 12),
        *((variant, "a list of sizes", 22) for variant in ("loop", "streams", "batched")),
        ("grouped", "a list of sizes", 24),
    ],
)
def test_a_hit_enters_few_functions(
    install: Callable[..., None], fake: Fake, variant: str, form: str, bar: int
) -> None:
    install(HostCublas(variant))
    a, b, more = ints(ROWS + 1, K), ints(GROUPS, K, N), FORMS[form]()

    def run() -> object:
        return mg.grouped_gemm(a, b, backend="cublas", **more)

    kept = [run() for _ in range(3)]  # so that the next result lies elsewhere, and calls are told
    found = python_calls(run)
    assert kept and found.total() <= bar, found.most_common()


def operands(**grouping: Any) -> Operands:
    """Operands that count as a GPU's."""
    problem = mg.GroupedGemmProblem(ints(ROWS, K), ints(GROUPS, K, N, seed=1), **grouping)
    ops = stage(problem, problem.spec, allocate(problem)).ops
    return replace(ops, spec=replace(ops.spec, device_sizes=ops.host_offsets is None), device=torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("config", "grouping", "bar"),
    [
        (Config("auto"), {"ends": offsets_of()[1:].int()}, 20),
        (Config("auto"), {"offsets": offsets_of()}, 23),
        (Config("grouped_mm"), {"sizes": FULL}, 18),
        (Config("loop"), {"sizes": FULL}, 55),
        (Config("streams", 4), {"sizes": FULL}, 65),
        (Config("batched"), {"sizes": [12] * 6}, 66),
    ],
    ids=lambda value: value.variant if isinstance(value, Config) else None,
)
def test_a_warm_bind_and_launch_enter_few_functions(fake: Fake, config: Config, grouping: Any, bar: int) -> None:
    fake.computes, ops = False, operands(**grouping)
    bind = launch.plan(ops.spec, config, CUDA).bind

    def run() -> None:
        bind(ops)()

    for _ in range(2):
        run()
    found = python_calls(run)
    assert found.total() <= bar, found.most_common()


# --- torch's grouped_mm ---------------------------------------------------------------------------


def solved_by_grouped_mm() -> tuple[Tensor, Tensor]:
    """The result that a bound launch wrote into the given memory, and what it should be."""
    ops: Any = operands(sizes=SIZES)
    ops.out.fill_(7)
    launch.plan(ops.spec, Config("grouped_mm"), CUDA).bind(ops)()
    want = torch.zeros(ROWS, N, dtype=torch.float64)
    for g, (start, end) in enumerate(pairwise(offsets_of().tolist())):
        want[start:end] = ops.a[start:end].double() @ ops.b[g].double()
    assert (
        torch.empty_strided((ROWS, N), (N, 1), dtype=torch.bfloat16).data_ptr() != ops.out.data_ptr()
    )  # no mode is left
    return ops.out, want


def redispatch_by(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    """Puts `call` in the place of torch's operation."""
    known = torch_internals.redispatched_grouped_mm
    assert known is not None
    monkeypatch.setattr(grouped_mm, "redispatched_grouped_mm", (call, *known[1:]))


def test_grouped_mm_writes_into_the_given_memory(fake: Fake) -> None:
    out, want = solved_by_grouped_mm()
    assert torch.equal(out.double(), want)


def test_only_memory_of_the_results_shape_is_answered_with_the_result(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Tensor] = []

    def two(*arguments: Any) -> Tensor:
        asked.append(torch.empty_strided((N, ROWS), (ROWS, 1), dtype=torch.bfloat16))
        return fake.grouped_mm(*arguments)

    redispatch_by(monkeypatch, two)
    out, want = solved_by_grouped_mm()
    assert asked[0].data_ptr() != out.data_ptr()
    assert torch.equal(out.double(), want)


def test_a_second_piece_of_memory_is_not_the_result(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def two(*arguments: Any) -> Tensor:
        result = fake.grouped_mm(*arguments)
        torch.empty_strided((ROWS, N), (N, 1), dtype=torch.bfloat16).fill_(7.0)  # a workspace of the same shape
        return result

    redispatch_by(monkeypatch, two)
    out, want = solved_by_grouped_mm()
    assert torch.equal(out.double(), want)


@pytest.mark.parametrize("after", ["push", "call"])
def test_a_call_that_is_interrupted_leaves_no_mode(fake: Fake, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    known = torch_internals.redispatched_grouped_mm
    assert known is not None
    _, keys, push, pop = known

    def pushed(mode: Any) -> None:
        push(mode)
        if after == "push":
            raise KeyboardInterrupt

    def called(*arguments: Any) -> Tensor:
        raise KeyboardInterrupt

    before = torch_internals.dispatch_modes()
    monkeypatch.setattr(grouped_mm, "redispatched_grouped_mm", (called, keys, pushed, pop))
    with pytest.raises(KeyboardInterrupt):
        solved_by_grouped_mm()
    left = torch_internals.dispatch_modes() - before
    for _ in range(left):
        pop(None)
    assert not left


def test_a_torch_that_allocates_elsewhere_is_copied_from(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(*arguments: Any) -> Tensor:
        with _disable_current_modes():
            return fake.grouped_mm(*arguments).nan_to_num()

    redispatch_by(monkeypatch, elsewhere)
    out, want = solved_by_grouped_mm()
    assert torch.equal(out.double(), want)


def test_without_torchs_private_names_the_public_function_is_called(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_mm, "redispatched_grouped_mm", None)
    out, want = solved_by_grouped_mm()
    assert torch.equal(out.double(), want)


@pytest.mark.parametrize("form", ["offsets", "a list of sizes"])
def test_a_hit_calls_torchs_public_function(
    install: Callable[..., None], fake: Fake, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Parameters, too, where no gradient is recorded."""
    install(HostCublas("grouped_mm"))
    a, b, more = ints(ROWS, K), torch.nn.Parameter(ints(GROUPS, K, N)), FORMS[form]()
    with torch.no_grad():
        want = [mg.grouped_gemm(a, b, backend="cublas", **more) for _ in range(2)][-1]
        redispatch_by(monkeypatch, None)
        assert torch.equal(mg.grouped_gemm(a, b, backend="cublas", **more), want)


def test_autocast_casts_nothing_of_torchs_function() -> None:
    """It is called with whatever autocast the caller has set, which must not change its result."""
    for key in ("AutocastCUDA", "AutocastCPU"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key)


def test_the_mode_is_gone_after_an_error(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Tensor:
        raise RuntimeError("Can't process more than 1024 groups")

    redispatch_by(monkeypatch, fails)
    with pytest.raises(RuntimeError, match="1024 groups"):
        solved_by_grouped_mm()
    assert torch_internals.dispatch_modes() == 0


@pytest.mark.parametrize(
    ("form", "planned", "served"),
    [
        ("ends", [(132, 0)], [(1, 0), (131, 2)]),
        ("sizes", [(132, 0)], [(1, 0), (131, 2)]),
        ("offsets", [(132, 0), (131, 1)], [(1, 0), (131, 2)]),
        ("a list of sizes", [], []),
    ],
)
def test_launches_beside_torchs(
    install: Callable[..., None], fake: Fake, form: str, planned: list[tuple[int, int]], served: list[tuple[int, int]]
) -> None:
    """One clamps the numbers and zeroes rows of a given result; another one zeroes behind torch's where torch makes the
    result, or the device knows a first offset."""
    install(HostCublas("grouped_mm"))
    a, b = ints(ROWS, K), ints(GROUPS, K, N)
    for want in (planned, planned, served):
        fake.log.clear()
        mg.grouped_gemm(a, b, backend="cublas", **FORMS[form]())
        assert [entry[3:] for entry in fake.log if entry[0] == "kernel"] == want
