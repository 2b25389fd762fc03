"""Sizes on the host that differ from call to call: answers, what the library is passed, and what it costs the host; no
GPU needed."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.cublas import choice, host_sizes, launch, library
from multigemm.backends.cublas.config import Config
from multigemm.backends.cublas.host_sizes import BOUND, HostSizes
from multigemm.backends.cublas.products import Bytes, packed_forms, packed_products
from multigemm.cuda import nvrtc
from multigemm.planning import launch_cache, launch_key
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.planning.operands import Operands, packed
from multigemm.planning.staging import allocate, stage
from tests.support.cublas_fake import CUDA, Fake, HostCublas, ints, products_of
from tests.support.nvrtc_here import nvrtc_here
from tests.support.python_calls import python_calls

GROUPS, K, N = 6, 32, 24


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch, fake: Fake) -> list[Any]:
    """What the grouped call was passed: the number of groups, their members, and each product's arguments."""
    found, call = list[Any](), fake.grouped

    def noted(blas: Any, *args: Any) -> int:
        count = args[16].value
        found.append((count, list(args[17])[:count], [tuple(one) for one in products_of("grouped", args)]))
        return call(blas, *args)

    monkeypatch.setattr(fake, "grouped", noted)
    return found


def operands(form: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, dict[str, Any]]:
    if form == "weight gradients":
        return ints(tokens, K, dtype=dtype).t(), ints(tokens, N, seed=1, dtype=dtype), {"jagged": "k"}
    b = ints(GROUPS, K, N, seed=1, dtype=dtype)
    if form == "transposed weights":
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    return ints(tokens, K, dtype=dtype), b, {}


FORMS = ("rows", "transposed weights", "weight gradients")
UNEVEN = ([8, 0, 16, 24, 8, 0], [16, 8, 8, 16, 8, 8], [0, 0, 0, 0, 16, 8], [40, 0, 0, 0, 8, 8])
FEW = ([0, 0, 0, 64, 0, 0], [0] * 6, [8, 0, 8, 8, 0, 8])


def bound(a: Tensor, b: Tensor, offsets: list[int], more: dict[str, Any], variant: str = "auto") -> Tensor:
    """The result of a bind for these sizes."""
    problem = mg.GroupedGemmProblem(a, b, offsets=offsets, **more)
    out = cast(Tensor, allocate(problem))
    how = launch.method(problem.spec, Config(cast(Any, variant)), CUDA)
    ops = stage(problem, problem.spec, out).ops
    launch.bound(ops, how, ops.host_offsets, None)()
    return out


def with_sizes(a: Tensor, b: Tensor, offsets: list[int], more: dict[str, Any], variant: str = "auto") -> Any:
    problem = mg.GroupedGemmProblem(a, b, offsets=offsets, **more)
    recipe = launch.plan(problem.spec, Config(cast(Any, variant)), CUDA)
    assert recipe.bind_sizes is not None
    return recipe.bind_sizes(stage(problem, problem.spec, allocate(problem)).ops)


@pytest.mark.parametrize("variant", ["auto", "grouped", "grouped_mm"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_the_library_gets_what_a_bind_passes(
    monkeypatch: pytest.MonkeyPatch, fake: Fake, passed: list[Any], form: str, variant: str, long: bool
) -> None:
    if long:
        monkeypatch.setattr(library, "LONG", 1.0)
        monkeypatch.setattr(host_sizes, "LONG", 1.0)
    launched = with_sizes(*operands(form, 72)[:2], [0, 8, 24, 24, 48, 56, 72], operands(form, 72)[2], variant)
    assert type(launched) is HostSizes
    for head, tokens, sizes in ((0, 72, UNEVEN[0]), (8, 90, UNEVEN[1]), (0, 72, UNEVEN[2]), (0, 56, UNEVEN[3]), *(
        (8, 80, few) for few in FEW
    )):  # fmt: skip
        a, b, more = operands(form, tokens)
        offsets = list(accumulate(sizes, initial=head))
        fake.log.clear()
        want = bound(a, b, offsets, more, variant)
        bound_calls, bound_passed = [x[:2] for x in fake.log if x[0] != "kernel"], passed[:]
        fake.log.clear()
        passed.clear()
        launched.offsets[:] = array("i", offsets)
        got = launched(a, b)
        assert got is not None and torch.equal(got, want)
        assert [x[:2] for x in fake.log if x[0] != "kernel"] == bound_calls
        assert [at_distance(x, got) for x in passed] == [at_distance(x, want) for x in bound_passed]
        passed.clear()


@pytest.mark.parametrize("form", FORMS)
def test_as_many_groups_as_an_argument_holds_are_answered_right(fake: Fake, form: str) -> None:
    rng, groups, tokens = random.Random(5), host_sizes.MOST_GROUPS, 1200
    a, b, more = operands(form, tokens)
    if not more:
        b = ints(1, 8, N, seed=1).expand(groups, 8, N).clone()
        a = a[:, :8].contiguous()
    launched = with_sizes(
        a, b, [0, *sorted(8 * rng.randrange(140) for _ in range(groups - 1)), tokens], more, "grouped"
    )
    for _ in range(3):
        offsets = sorted(rng.randrange(100, 1100) for _ in range(groups + 1))
        offsets[4:9] = [offsets[4]] * 5
        launched.offsets[:] = array("i", offsets)
        got = launched(a, b)
        assert torch.equal(got, bound(a, b, offsets, more, "grouped"))


def test_the_kernel_compiles_and_its_argument_fits_into_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    here = nvrtc_here()
    monkeypatch.setattr(nvrtc, "compiler", lambda: here)
    for arch in ("sm_80", "sm_90"):
        options = (f"--gpu-architecture={arch}", "--std=c++17", f"-DMOST={host_sizes.MOST_GROUPS}")
        assert nvrtc.compile_source(host_sizes.SOURCE, "place_groups", options)[:4] == b"\x7fELF"
    kind = host_sizes.argument_of(host_sizes.MOST_GROUPS)
    assert ctypes.sizeof(kind) <= 4096
    words = [field.offset // 8 for field in (kind.out, kind.bases, kind.lines)]
    assert words == [host_sizes.OUT, host_sizes.BASES, host_sizes.LINES]


def at_distance(passed: Any, out: Tensor) -> Any:
    """What was passed, with results by their distance from the first."""
    count, members, products = passed
    return count, members, [(*one[:13], one[13] - out.data_ptr(), *one[14:16]) for one in products]


# --- the choice -----------------------------------------------------------------------------------


def drawn(rng: random.Random, groups: int, tokens: int) -> list[int]:
    """Offsets of groups that are even, skewed or mostly empty."""
    kind, most = rng.randrange(3), tokens // groups
    if kind == 0:
        return [0, *sorted(rng.randrange(tokens + 1) for _ in range(groups - 1)), tokens]
    sizes = [rng.randrange(most + 1) if kind == 1 or rng.random() < 0.3 else 0 for _ in range(groups)]
    return list(accumulate(sizes, initial=rng.randrange(tokens - sum(sizes) + 1)))


def described(form: str, groups: int, tokens: int, k: int, n: int, dtype: torch.dtype) -> tuple[Operands, int]:
    """Operands without memory."""
    a, b = torch.empty(tokens, k, dtype=dtype, device="meta"), torch.empty(groups, k, n, dtype=dtype, device="meta")
    more: dict[str, Any] = {}
    if form == "weight gradients":
        a, b, more = a.t(), torch.empty(tokens, n, dtype=dtype, device="meta"), {"jagged": "k"}
    elif form == "transposed weights":
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    zeros = (torch.zeros(1, dtype=dtype).expand(x.shape).as_strided(x.shape, [0] * x.dim()) for x in (a, b))
    spec = mg.GroupedGemmProblem(*zeros, sizes=[tokens // groups] * groups, **more).spec
    out = torch.empty((tokens, n) if form != "weight gradients" else (groups, k, n), dtype=dtype, device="meta")
    return Operands(spec, a, b, out, head=True, device=torch.device("cpu")), spec.groups


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_sizes_lead_to_the_variant_that_a_bind_chooses(fake: Fake, form: str, dtype: torch.dtype) -> None:
    rng, seen = random.Random(7), set[str]()
    for _ in range(60):
        groups, tokens = rng.choice((2, 8, 64, 200)), 16 * rng.choice((4, 64, 512, 4096, 1 << 20))
        k, n = (16 * rng.choice((2, 16, 64, 448)) for _ in range(2))
        ops, _ = described(form, groups, tokens, k, n, dtype)
        flags = True, dtype is torch.bfloat16
        size = Bytes(dtype.itemsize, dtype.itemsize)
        launched = host_sizes.bind_sizes(ops, Config(), flags, size, library.COMPUTE_32F, lambda ops: lambda: None)
        assert launched is not None
        for _ in range(5):
            offsets = np.array(drawn(rng, groups, tokens))
            p = packed(ops)
            products = packed_products(p, size, offsets, None, packed_forms(p, size))
            want = choice.choose(ops.spec, products, *flags).variant
            if want in ("loop", "streams", "batched"):
                want = BOUND.variant
            lengths = np.diff(offsets)
            count = int(np.count_nonzero(lengths))
            falling = launched._views[1][0][:count]
            falling[:] = -np.sort(-lengths)[:count]
            if len(products.shapes) > 1:
                assert launched._chosen(falling, int(lengths.sum())).variant == want
                apart = choice.separately(choice.work_of(ops.spec, products))
                assert choice.separately(launched._work) == pytest.approx(apart)
            seen.add(want)
    assert seen >= {"grouped", "auto"} and ("grouped_mm" in seen) is (dtype is torch.bfloat16)


# --- calls ----------------------------------------------------------------------------------------


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on CPU tensors have classes, as those on a GPU do."""
    original = launch_key.class_key_of

    def class_key(key: Any, call: Any) -> Any:
        return original((*key[: launch_key.INDEX], 0, *key[launch_key.INDEX + 1 :]), call)

    monkeypatch.setattr(launch_cache, "class_key_of", class_key)


@pytest.fixture
def binds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each bind."""
    found, real = list[Any](), launch.bound

    def noted(*args: Any) -> Any:
        found.append(args)
        return real(*args)

    monkeypatch.setattr(launch, "bound", noted)
    return found


@pytest.mark.parametrize("kind", ["sizes", "offsets", "ends"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", ["auto", "grouped", "grouped_mm"])
def test_ever_new_sizes_are_bound_twice_and_answered_right(
    install: Callable[..., None], fake: Fake, as_on_gpu: None, binds: list[Any], form: str, kind: str, variant: str
) -> None:
    install(HostCublas(variant))
    rng, served = random.Random(2), LAUNCHES.served
    for turn in range(8):
        tokens = 8 * rng.randrange(9, 12)
        sizes = [8, 16, *(8 * rng.randrange(2) for _ in range(GROUPS - 3)), 8 + 8 * (turn % 2)]
        offsets = list(accumulate(sizes, initial=0 if kind != "offsets" else 8 * (turn % 2)))
        a, b, more = operands(form, tokens)
        given = more | {kind: {"sizes": sizes, "offsets": offsets, "ends": offsets[1:]}[kind]}
        before = len(binds)
        got = mg.grouped_gemm(a, b, backend="cublas", **given)
        want = np.asarray(mg.expected(mg.GroupedGemmProblem(a, b, **given)), dtype=np.float64)
        assert torch.equal(got.double(), torch.from_numpy(want))
        assert (len(binds) == before) is (turn >= 2), turn
    assert LAUNCHES.served == served + 6
    a, b, more = operands(form, 72)
    with pytest.raises(mg.InvalidProblem):
        mg.grouped_gemm(a, b, sizes=[80, 0, 0, 0, 0, 8], backend="cublas", **more)


@pytest.mark.parametrize(
    ("kind", "falling"),
    [("sizes", [24, -8, 16, 8, 8, 8]), ("sizes", [8, 16, 8, 8, 24, -8]), ("offsets", [0, 16, 8, 24, 32, 40, 48]),
     ("offsets", [0, 8, 16, 24, 32, 48, 40]), ("ends", [16, 8, 24, 32, 40, 48]), ("ends", [-8, 8, 24, 32, 40, 48]),
     ("offsets", [0, 2**31 - 1, -(2**31), 24, 32, 40, 48])],
)  # fmt: skip
def test_a_warm_call_refuses_offsets_that_fall(
    install: Callable[..., None], fake: Fake, as_on_gpu: None, kind: str, falling: list[int]
) -> None:
    install(HostCublas("auto"))
    a, b, _ = operands("rows", 80)
    for turn in range(3):
        offsets = list(accumulate([8, 0, 16, 24, 8 * turn, 8], initial=0))
        rising = {"sizes": np.diff(offsets).tolist(), "offsets": offsets, "ends": offsets[1:]}[kind]
        given: dict[str, Any] = {kind: rising}
        mg.grouped_gemm(a, b, backend="cublas", **given)
    fake.log.clear()
    given = {kind: falling}
    with pytest.raises(mg.InvalidProblem):
        mg.grouped_gemm(a, b, backend="cublas", **given)
    assert not fake.log


def test_a_call_with_new_sizes_enters_few_functions(install: Callable[..., None], fake: Fake, as_on_gpu: None) -> None:
    install(HostCublas("auto"))
    a, b, _ = operands("rows", 80)
    for turn in range(3):
        mg.grouped_gemm(a, b, sizes=[8, 0, 16, 24, 8 * turn, 8], backend="cublas")
    served, fake.computes = LAUNCHES.served, False
    found = python_calls(lambda: mg.grouped_gemm(a, b, sizes=[16, 8, 0, 24, 8, 0], backend="cublas"))
    assert LAUNCHES.served == served + 1
    assert found.functions <= 50, found


def test_a_launch_of_any_sizes_keeps_no_operand(fake: Fake) -> None:
    a, b, more = operands("rows", 72)
    launched = with_sizes(a, b, [0, 8, 24, 24, 48, 56, 72], more)
    assert launched.workspace_bytes() == 28 * GROUPS
    launched.offsets[:] = array("i", [0, 8, 16, 40, 40, 56, 64])
    out = launched(a, b)
    alive = [weakref.ref(x) for x in (a, b, out)]
    del a, b, out
    gc.collect()
    assert [x() for x in alive] == [None] * 3


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (lambda: (ints(72, K), ints(GROUPS, K, N)), {"bias": ints(N).float(), "out_dtype": torch.float32}),
        (lambda: (ints(72, K), ints(GROUPS, K, N)), {"alpha": 0.0}),
        (lambda: (ints(72, K), ints(1, K, N).expand(GROUPS, K, N)), {}),
        (lambda: (ints(72, K), ints(GROUPS, K, 1)), {}),
        (lambda: (ints(72, 8)[:, :1], ints(GROUPS, 1, N)), {}),
        (lambda: (ints(72, K, dtype=torch.int8), ints(GROUPS, K, N, dtype=torch.int8)), {"out_dtype": torch.int32}),
        (lambda: (ints(72, 2 * K)[:, ::2], ints(GROUPS, K, N)), {}),
        (lambda: (ints(72, K), ints(1, K, N)), {"sizes": [64]}),
    ],
    ids=["an epilogue", "no product", "one weight", "one column", "one k", "no grouped call", "a copy", "one group"],
)  # fmt: skip
def test_what_a_bind_must_look_at_is_bound(fake: Fake, make: Callable[[], Any], more: dict[str, Any]) -> None:
    a, b = make()
    problem = mg.GroupedGemmProblem(a, b, **{"sizes": [8, 16, 8, 0, 24, 8]} | more)
    recipe = launch.plan(problem.spec, Config(), CUDA)
    assert recipe.bind_sizes is not None
    assert recipe.bind_sizes(stage(problem, problem.spec, allocate(problem)).ops) is None
