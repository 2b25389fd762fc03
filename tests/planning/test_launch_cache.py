"""The cache of bound launches: whatever changes between two calls, a hit gives what a miss would."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.cuda.arguments import OPERANDS
from multigemm.integrations import torch_op
from multigemm.planning import launch_cache, launch_key
from multigemm.planning.launch_cache import LAUNCHES, LaunchCache
from multigemm.planning.operands import Operands
from multigemm.select import choose
from tests.support.concurrency import held_by_another_thread, in_a_forked_child, on_new_threads
from tests.support.fake_backends import Fake, Tile
from tests.support.python_calls import python_calls

A, B, OUT, C, BIAS, ENDS, VALID = (OPERANDS.index(x) for x in ("a", "b", "out", "c", "bias", "ends", "valid_rows"))


def memory_at(address: int, like: Tensor | None) -> np.ndarray | None:
    """The array of a tensor's layout at an address: what a kernel that was bound to that tensor would read there."""
    if like is None:
        return None
    size = like.element_size()
    kind = {torch.float64: "f8", torch.float32: "f4", torch.int32: "i4", torch.int64: "i8"}[like.dtype]
    reach = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    raw = (ctypes.c_char * (max(reach, 1) * size)).from_address(address)
    flat = np.frombuffer(memoryview(raw).cast("B"), dtype=kind)
    return np.lib.stride_tricks.as_strided(flat, tuple(like.shape), [s * size for s in like.stride()])


class Follower:
    """A launch that computes with whatever lies at the addresses that it was moved to, by the layouts of its bind."""

    def __init__(self, ops: Operands, counts: dict[str, int]) -> None:
        self.spec, self.beta, self.alpha, self.head = ops.spec, ops.beta, ops.alpha, ops.head
        given: list[Any] = [ops.a, ops.b, ops.out, ops.c, ops.bias, ops.ends]
        self.likes = [None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in given]
        self.addresses = [0 if x is None else x.data_ptr() for x in given]
        self.counts = counts

    def move(self, addresses: tuple[int, ...]) -> None:
        self.counts["moved"] += 1
        self.addresses = list(addresses[:6])

    def can_resize(self, before: int, after: int) -> bool:
        return "resized" in self.counts

    def resize(self, before: int, after: int, regrid: bool) -> None:
        self.counts["resized"] += 1
        a, b, out, *_ = self.likes
        assert a is not None and b is not None and out is not None
        inner = self.spec.jagged == "k"
        assert a.shape[inner] == before and regrid is not inner
        shapes = {0: (a.shape[0], after), 1: (after, b.shape[1])}
        if not inner:
            shapes = {0: (after, a.shape[1]), 2: (after, out.shape[1])}
        for i, shape in shapes.items():
            x = self.likes[i]
            assert x is not None
            self.likes[i] = torch.empty_strided(shape, x.stride(), dtype=x.dtype)

    def stays_behind(self, spans: Any) -> bool:
        return False

    def workspace_bytes(self) -> int:
        return 0

    def __call__(self) -> None:
        a, b, out, c, bias, ends = map(memory_at, self.addresses, self.likes)
        assert out is not None and a is not None and b is not None
        if ends is None:
            cuts = None
        else:
            first = memory_at(self.addresses[5] - ends.itemsize, self.likes[5][:1])[0] if self.head else 0  # type: ignore[index]
            cuts = [int(first), *map(int, ends)]
        if self.spec.zero_unowned:
            out[...] = 0
        for g in range(self.spec.groups):
            rows = slice(None) if cuts is None else slice(cuts[g], cuts[g + 1])
            if self.spec.jagged == "k":
                x, y = a[:, rows], b[rows]
            else:
                x, y = (a[g] if a.ndim == 3 else a[rows]), (b[g] if b.ndim == 3 else b)
            product = self.alpha * (x @ y)
            target = out[g] if out.ndim == 3 else out[rows]
            if c is not None:
                product = product + self.beta * (c[g] if c.ndim == 3 else c[rows])
            if bias is not None:
                product = product + (bias[g] if bias.ndim == 2 else bias)
            target[...] = np.maximum(product, 0) if self.spec.activation == "relu" else product


class Following(Fake):
    """A backend whose launches follow their operands."""

    def __init__(self, name: str = "follower") -> None:
        super().__init__(name)
        self.counts = {"moved": 0, "bound": 0}

    def bind(self, ops: Operands) -> Any:
        self.counts["bound"] += 1
        return Follower(ops, self.counts)


@pytest.fixture
def follower(install: Callable[..., None]) -> Iterator[Following]:
    backend = Following()
    install(backend)
    yield backend
    launch_cache.clear()


def answer(a: Tensor, b: Tensor, offsets: list[int], bias: Tensor | None = None, relu: bool = False) -> Tensor:
    out = torch.zeros(a.shape[0], b.shape[-1], dtype=a.dtype)
    for g in range(len(offsets) - 1):
        rows = slice(offsets[g], offsets[g + 1])
        out[rows] = a[rows].detach() @ (b[g] if b.dim() == 3 else b).detach()
        if bias is not None:
            out[rows] += bias[g] if bias.dim() == 2 else bias
        if relu:
            out[rows].clamp_(min=0)
    return out


def new(draw: random.Random, *shape: int) -> Tensor:
    """Values in memory of some layout: dense, transposed, strided, at an odd place of a larger piece."""
    kind = draw.randrange(4)
    if kind == 1:
        return torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=torch.float64).transpose(-1, -2)
    if kind == 2:
        return torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64)[..., ::2]
    if kind == 3:
        count = int(np.prod(shape))
        return torch.randn(count + 5, dtype=torch.float64)[5:].view(*shape)
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_sequences_of_hits_and_misses_give_the_same_answers(follower: Following, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    groups, k, n = 3, 4, 6
    a, b, bias = new(draw, 20, k), new(draw, groups, k, n), None
    pool = [sorted(draw.randrange(21) for _ in range(groups)) for _ in range(2)]
    styles = [(draw.randrange(4), draw.random() < 0.3, draw.random() < 0.2) for _ in range(2)]
    for _ in range(200):
        change = draw.randrange(30)
        if change == 0:
            a = new(draw, draw.choice((20, 20, 21)), k)
        elif change == 1:
            b = new(draw, groups, k, n) if draw.random() < 0.7 else new(draw, k, n)
        elif change == 2:
            bias = None if bias is not None else new(draw, groups, n)
        elif change == 3:
            a.mul_(1.5)
        elif change == 4:
            address = a.data_ptr()
            shape = a.shape
            del a
            a = new(draw, *shape)  # often at the same address, with other strides
            assert address
        starts = draw.choice(pool)
        offsets = [0, *starts] if draw.random() < 0.7 else [min(1, starts[0]), *starts]
        cut, relu, into = draw.choice(styles)
        given: dict[str, Any] = {"bias": bias, "activation": "relu" if relu else None, "backend": "follower"}
        if cut == 0:
            given["offsets"] = torch.tensor(offsets, dtype=torch.int32)
        elif cut == 1:
            given["offsets"] = offsets
        elif cut == 2:
            offsets = [0, *offsets[1:]]
            given["ends"] = torch.tensor(offsets[1:])
        else:
            offsets = [0, *offsets[1:]]
            sizes = np.diff(offsets)
            given["sizes"] = sizes if into else sizes.tolist()
        want = answer(a, b, offsets, bias, relu)
        if into:
            given["out"] = torch.full_like(want, 7.0)
            owned = torch.zeros(a.shape[0], dtype=torch.bool)
            owned[offsets[0] : offsets[-1]] = True
            want[~owned] = 7.0
        got = mg.grouped_gemm(a, b, **given)
        torch.testing.assert_close(got, want)
    assert follower.counts["moved"] > 20


def problem() -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(8, 4, dtype=torch.float64),
        torch.randn(2, 4, 3, dtype=torch.float64),
        torch.tensor([3, 8], dtype=torch.int32),
    )


def warm(a: Tensor, b: Tensor, **given: Any) -> Tensor:
    for _ in range(3):
        out = mg.grouped_gemm(a, b, backend="follower", **given)
    return out  # type: ignore[no-any-return]


def test_a_third_call_is_moved_and_not_bound(follower: Following) -> None:
    a, b, ends = problem()
    warm(a, b, ends=ends)
    bound = follower.counts["bound"]
    for _ in range(5):
        x = torch.randn_like(a)
        torch.testing.assert_close(warm(x, b, ends=ends), answer(x, b, [0, 3, 8]))
    assert follower.counts["bound"] == bound


def test_a_packed_operand_is_bytes_in_every_bind(install: Callable[..., None]) -> None:
    """Also where neither scales nor b_format say that it is packed, and a launch is bound anew."""
    seen: list[torch.dtype] = []

    class Packed(Following):
        takes_quantised = True

        def bind(self, ops: Operands) -> Any:
            assert isinstance(ops.b, Tensor)
            seen.append(ops.b.dtype)
            return lambda: None

    install(Packed("packed"))
    a, b = torch.randn(6, 64).bfloat16(), torch.zeros(3, 32, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    served = LAUNCHES.served
    for _ in range(4):
        mg.grouped_gemm(a, b, sizes=[1, 2, 3], backend="packed")
    assert seen == [torch.uint8] * 4 and LAUNCHES.served == served + 2


def test_a_freed_operand_is_refused_on_a_hit(follower: Following) -> None:
    a, b, ends = problem()
    bias = torch.zeros(3, dtype=torch.float64)
    warm(a, b, ends=ends)
    warm(a, b, ends=ends, bias=bias)
    freed = a.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(mg.InvalidProblem, match="memory was freed"):
        warm(freed, b, ends=ends)
    bias.untyped_storage().resize_(0)
    with pytest.raises(mg.InvalidProblem, match="memory was freed"):
        warm(a, b, ends=ends, bias=bias)


def test_gradients_tangents_and_negated_views_are_not_served_by_the_cache(follower: Following) -> None:
    a, b, ends = problem()
    warm(a, b, ends=ends)
    x = a.clone().requires_grad_()
    out = warm(x, b, ends=ends)
    assert out.requires_grad
    with torch.no_grad():
        assert not warm(x, b, ends=ends).requires_grad
    with pytest.raises(mg.InvalidProblem, match="lazily negated"):
        warm(torch._neg_view(a), b, ends=ends)
    dual: Any = torch.autograd.forward_ad.make_dual
    with torch.autograd.forward_ad.dual_level(), pytest.raises(mg.InvalidProblem, match="tangent"):
        warm(dual(a, torch.ones_like(a)), b, ends=ends)
    with pytest.raises(mg.InvalidProblem, match="under vmap"):
        torch.func.vmap(lambda t: mg.grouped_gemm(t, b, ends=ends, backend="follower"))(a.unsqueeze(0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sizes": [3.0, 5]}, "integers"),
        ({"sizes": [3, True]}, "integers"),
        ({"sizes": [3, 5], "deterministic": 1}, "deterministic"),
        ({"sizes": [3, 5], "alpha": True}, "alpha"),
        ({"sizes": [3, 5], "ends": [3, 8]}, "together"),
        ({"sizes": [3, 6]}, "add up to 9"),
    ],
)
def test_what_equals_an_accepted_argument_without_being_one_is_refused(
    follower: Following, given: dict[str, Any], message: str
) -> None:
    a, b, _ = problem()
    warm(a, b, sizes=[3, 5])
    with pytest.raises(mg.InvalidProblem, match=message):
        mg.grouped_gemm(a, b, backend="follower", **given)


def test_values_on_the_host_are_checked_on_every_call(follower: Following) -> None:
    a, b, ends = problem()
    warm(a, b, ends=ends)
    ends.copy_(torch.tensor([5, 8]))
    torch.testing.assert_close(warm(a, b, ends=ends), answer(a, b, [0, 5, 8]))
    ends.copy_(torch.tensor([5, 9]))
    with pytest.raises(mg.InvalidProblem, match="past"):
        warm(a, b, ends=ends)


def test_an_out_that_shares_memory_is_refused_and_one_that_interleaves_is_not(follower: Following) -> None:
    whole = torch.randn(8, 8, dtype=torch.float64)
    a, out = whole[:, :4], whole[:, 4:7]
    _, b, ends = problem()
    apart = torch.empty(8, 8, dtype=torch.float64)[:, 4:7]
    for _ in range(3):
        warm(whole[:, :4], b, ends=ends, out=apart)
    torch.testing.assert_close(warm(a, b, ends=ends, out=out), answer(a, b, [0, 3, 8]))
    with pytest.raises(mg.InvalidProblem, match="memory"):
        warm(a, b, ends=ends, out=whole[:, 2:5])
    c = torch.randn(8, 8, dtype=torch.float64)[:, :3]
    want = answer(a, b, [0, 3, 8]) + c
    got = c.clone()
    for start in (c, c, c):
        got.copy_(start)
        mg.grouped_gemm(a, b, ends=ends, c=got, beta=1.0, out=got, backend="follower")
    torch.testing.assert_close(got, want)


def test_nothing_of_the_caller_is_kept_alive(follower: Following) -> None:
    a, b, ends = problem()
    out = warm(a, b, ends=ends)
    watched = [weakref.ref(x.untyped_storage()) for x in (a, b, ends, out)]
    assert len(LAUNCHES) == 1
    del a, b, ends, out
    gc.collect()
    assert all(w() is None for w in watched)


def test_the_cache_is_bounded_in_entries_and_in_bytes(follower: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "ENTRIES", 8)
    a, b, _ = problem()
    for rows in range(1, 30):
        warm(a[: rows % 8 + 1, :], b, ends=torch.tensor([0, rows % 8 + 1]), alpha=1.0 + rows)
    assert len(LAUNCHES) == 8
    monkeypatch.setattr(launch_cache, "WORKSPACE", 1600)

    class Entry:
        workspace = 90

    for i in range(40):
        LAUNCHES.keep(("own", i), Entry())
    assert len(LAUNCHES) <= 17
    Entry.workspace = 101
    LAUNCHES.keep(("large",), Entry())
    assert LAUNCHES.find(("large",)) is None


def test_threads_do_not_share_an_entry(follower: Following) -> None:
    a, b, ends = problem()

    def work(number: int) -> None:
        mine = torch.randn_like(a) + number
        want = answer(mine, b, [0, 3, 8])
        assert all(torch.allclose(warm(mine, b, ends=ends), want) for _ in range(50))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        on_new_threads(*(partial(work, number) for number in range(4)))
    finally:
        sys.setswitchinterval(before)


def test_a_call_from_a_finaliser_does_not_disturb_the_call_that_it_interrupts(
    follower: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, ends = problem()
    warm(a, b, ends=ends)
    other, original, inside = torch.ones_like(a), Follower.move, [False]

    def move(self: Follower, addresses: tuple[int, ...]) -> None:
        original(self, addresses)
        if not inside[0]:
            inside[0] = True
            mg.grouped_gemm(other, b, ends=ends, backend="follower")
            inside[0] = False

    monkeypatch.setattr(Follower, "move", move)
    torch.testing.assert_close(warm(a, b, ends=ends), answer(a, b, [0, 3, 8]))


def test_results_on_the_cpu_lie_there_whatever_torchs_default_device_is(follower: Following) -> None:
    a, b, ends = problem()
    warm(a, b, ends=ends)
    with torch.device("meta"):
        out = warm(a, b, ends=ends)
    torch.testing.assert_close(out, answer(a, b, [0, 3, 8]))


def test_configs_that_are_equal_but_not_alike_are_told_apart(follower: Following) -> None:
    a, b, ends = problem()
    given: Any
    for given in (Tile(16), {"size": 16}):
        for _ in range(4):
            mg.grouped_gemm(a, b, ends=ends, backend="follower", config=given)
    choose.forget()
    served = LAUNCHES.served
    for _ in range(4):
        mg.grouped_gemm(a, b, ends=ends, backend="follower", config={"size": 16})
    assert LAUNCHES.served == served + 2
    untyped: Any = Tile
    for given in (untyped(16.0), {"size": 16.0}):
        with pytest.raises(mg.InvalidSetting, match="must be of type"):
            mg.grouped_gemm(a, b, ends=ends, backend="follower", config=given)


def test_an_out_that_interleaves_is_bound_anew_and_makes_one_entry(follower: Following) -> None:
    whole = torch.randn(8, 8, dtype=torch.float64)
    _, b, ends = problem()
    kept: list[Any] = []
    for _ in range(6):
        mg.grouped_gemm(whole[:, :4], b, ends=ends, out=whole[:, 4:7], backend="follower")
        kept.append(list(LAUNCHES._entries.values()))
    assert kept[2] == kept[5] and len(kept[5]) == 1


def on_gpu(key: Any) -> Any:
    """The key of the same call on a GPU."""
    return (*key[: launch_key.INDEX], 0, *key[launch_key.INDEX + 1 :])


def class_key(*call: Any) -> Any:
    """The key of the class of a call, which counts as one on a GPU."""
    return launch_key.class_key_of(on_gpu(launch_key.key_of(call, ())), call)


def tokens_key(a: Tensor, cut: Any, kind: str = "sizes") -> Any:
    """The key of a class of token counts."""
    b = torch.ones(2, a.shape[1], 3, dtype=a.dtype)
    return class_key("m", a, b, kind, cut, None, None, None, None)


def test_classes_of_token_counts_keep_what_a_count_decides_apart() -> None:
    dense = torch.empty_strided((60, 4), (1, 62))
    overlapping = torch.empty(400).as_strided((64, 4), (1, 62))
    assert tokens_key(dense, [30, 30]) is not None
    assert tokens_key(overlapping, [30, 34]) is None
    rows = torch.ones(64, 4)
    assert tokens_key(rows, []) is None
    assert tokens_key(rows, [30, 34]) == tokens_key(rows[:60], [20, 40])
    assert tokens_key(rows, [32, 32]) != tokens_key(rows, [30, 34])
    assert tokens_key(rows, [30, 64], kind="ends") == tokens_key(rows, [10, 64], kind="ends")
    assert tokens_key(rows, [30, 64], kind="ends") != tokens_key(rows, [30, 60], kind="ends"), "equal groups"
    assert tokens_key(rows, [30, 34]) != tokens_key(rows, torch.tensor([30, 34])), "the torch operator refuses lists"
    assert tokens_key(rows, torch.tensor([30, 34])) == tokens_key(rows[:60], torch.tensor([20, 40]))
    assert tokens_key(rows[:1], [1, 0]) != tokens_key(rows[:2], [1, 1])


def test_classes_of_inner_extents_keep_what_a_count_decides_apart() -> None:
    def inner_key(tokens: int, sizes: Any, *, by_rows: bool = False, overlap: bool = False, b_rows: int = 0) -> Any:
        a = torch.ones(4, 100)[:, :tokens] if by_rows else torch.ones(tokens, 4).T
        if overlap:
            a = torch.ones(400).as_strided((4, tokens), (tokens - 1, 1))
        b = torch.ones(b_rows or tokens, 3)
        return class_key("k", a, b, "sizes", sizes, None, None, None, None)

    assert inner_key(64, [30, 34]) == inner_key(60, [60, 0]) is not None
    assert inner_key(64, [30, 34]) != inner_key(60, [30, 30])
    assert inner_key(64, [30, 34]) != inner_key(30, [10, 20]), "more than half an octave apart"
    assert inner_key(64, [30, 34], by_rows=True) == inner_key(60, [20, 40], by_rows=True)
    assert inner_key(64, [30, 34], by_rows=True) != inner_key(64, [30, 34])
    assert inner_key(2, [0, 2]) != inner_key(1, [0, 1]), "a stride that no element uses is none"
    assert inner_key(64, [30, 34], overlap=True) is None
    assert inner_key(64, [30, 34], b_rows=63) is None
    rows = tokens_key(torch.ones(64, 4), [30, 34])
    assert rows != inner_key(64, [30, 34])


def test_classes_of_token_counts_know_scales_of_tokens_by_all_but_their_number() -> None:
    def scaled(tokens: int, scale: Tensor) -> Any:
        a, b = torch.ones(tokens, 4), torch.ones(2, 4, 3)
        return class_key("m", a, b, "sizes", [1, tokens - 1], None, None, None, None, scale, None, None)

    def aligned(*shape: int) -> Tensor:
        memory = torch.ones(4 + torch.Size(shape).numel())
        return memory[-memory.data_ptr() % 16 // 4 :][: torch.Size(shape).numel()].view(shape)

    assert scaled(64, aligned(64, 2)) == scaled(60, aligned(60, 2))
    assert scaled(64, aligned(64, 2)) != scaled(60, aligned(60, 1)) != scaled(60, aligned(1, 2))
    assert scaled(64, aligned(64, 2).T.contiguous().T) != scaled(60, aligned(60, 2).T.contiguous().T)
    assert scaled(64, aligned(1, 2)) == scaled(60, aligned(1, 2))
    assert scaled(64, aligned(64)) != scaled(60, aligned(60)), "a vector is one of groups, or refused"


def test_counts_past_31_bits_have_no_class_even_where_nothing_is_multiplied() -> None:
    """Their offsets are int64 on the device, where those of a class are int32."""
    a, b = torch.ones(64, 4), torch.ones(2, 4, 3)
    call: Any = ("m", a, b, "sizes", [30, 34], None, None, None, None)
    key = on_gpu(launch_key.key_of(call, ()))
    assert launch_key.class_key_of(key, call) is not None
    rows = torch.empty(2**31, 0)
    assert (
        launch_key.class_key_of((rows.shape, rows.stride(), *key[2:4], torch.Size((2, 0, 0)), *key[5:]), call) is None
    )


def test_configs_whose_text_is_an_address_are_never_mistaken_for_each_other() -> None:
    class Config:
        pass

    assert len({launch_key.config_key(Config()) for _ in range(100)}) == 100


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on CPU tensors have classes, as those on a GPU do."""
    original = launch_key.class_key_of

    monkeypatch.setattr(launch_cache, "class_key_of", lambda key, call: original(on_gpu(key), call))
    monkeypatch.setattr(launch_cache, "upload", lambda to, source, size, index: ctypes.memmove(to, source, size))


def test_a_call_computes_the_key_of_its_class_once_and_only_where_its_own_key_is_new(
    follower: Following, as_on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, original = list[Any](), vars(launch_cache)["class_key_of"]

    def class_key(key: Any, call: Any) -> Any:
        computed.append(key)
        return original(key, call)

    monkeypatch.setattr(launch_cache, "class_key_of", class_key)
    a, b = torch.randn(60, 4, dtype=torch.float64), torch.randn(3, 4, 6, dtype=torch.float64)
    for sizes, more in (([1, 2, 3], 1), ([1, 2, 3], 1), ([1, 2, 3], 0), ([4, 2, 3], 1)):
        before = len(computed)
        mg.grouped_gemm(a, b, sizes=sizes, backend="follower")
        assert len(computed) == before + more


@pytest.mark.parametrize("resizes", [True, False], ids=["resized", "bound anew"])
@pytest.mark.parametrize("layout", ["rows", "inner extents", "inner extents by rows"])
@pytest.mark.parametrize("seed", range(3))
def test_ever_new_token_counts_and_sizes_give_the_same_answers(
    follower: Following, as_on_gpu: None, seed: int, layout: str, resizes: bool
) -> None:
    """Of rows, and of weight gradients, whose tokens are added up."""
    if resizes:
        follower.counts["resized"] = 0
    draw = random.Random(seed)
    rows, weights, others = (torch.randn(*shape, dtype=torch.float64) for shape in ((64, 4), (3, 4, 6), (64, 6)))
    columns = rows.T.contiguous() if layout.endswith("by rows") else rows.T
    kinds = draw.sample(("offsets", "sizes", "ends"), 2)
    served = LAUNCHES.served
    for _ in range(120):
        tokens = draw.randrange(46, 65)
        offsets = [draw.randrange(4), *sorted(draw.randrange(4, tokens + 1) for _ in range(3))]
        kind = draw.choice(kinds)
        if kind != "offsets":
            offsets[0] = 0
        values = {"offsets": offsets, "ends": offsets[1:], "sizes": np.diff(offsets).tolist()}[kind]
        forms: tuple[Any, ...] = (values, tuple(values), np.array(values), np.array(values, np.int32))
        given: dict[str, Any] = {kind: draw.choice(forms), "backend": "follower"}
        if layout == "rows":
            got, want = mg.grouped_gemm(rows[:tokens], weights, **given), answer(rows[:tokens], weights, offsets)
        else:
            got = mg.grouped_gemm(columns[:, :tokens], others[:tokens], jagged="k", **given)
            want = torch.stack([rows[i:j].T @ others[i:j] for i, j in pairwise(offsets)])
        torch.testing.assert_close(got, want)
    assert LAUNCHES.served > served + 90
    assert follower.counts.get("resized", 0) > 60 or not resizes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sizes": [30, -1, 2]}, "negative"),
        ({"sizes": [30, 30, 30]}, "add up to 90"),
        ({"sizes": [2**40, 1, 1]}, "add up"),
        ({"sizes": [2**70, 1, 1]}, "64 bits"),
        ({"sizes": [1, 1]}, "length 2"),
        ({"ends": [30, 20, 40]}, "must not fall"),
        ({"ends": [-3, 20, 40]}, "0 or more"),
        ({"ends": [30, 40, 70]}, "past"),
        ({"offsets": [-1, 2, 3, 4]}, "0 or more"),
        ({"offsets": [3, 2, 3, 4]}, "must not fall"),
        ({"offsets": [0, 2, 3, 2**33]}, "past"),
        ({"offsets": [0, 2, 3]}, "length 3"),
        ({"offsets": [0, 2, 3, 4.0]}, "integers"),
        ({"sizes": np.array([[1, 2, 3]])}, "vector"),
    ],
)
def test_sizes_that_lie_are_refused_by_a_class_as_by_a_first_call(
    follower: Following, as_on_gpu: None, given: dict[str, Any], message: str
) -> None:
    follower.counts["resized"] = 0
    a, b = torch.randn(60, 4, dtype=torch.float64), torch.randn(3, 4, 6, dtype=torch.float64)
    for i in range(4):
        mg.grouped_gemm(a, b, sizes=[i, i + 1, 2], backend="follower")
        mg.grouped_gemm(a, b, ends=[i, i + 3, 20], backend="follower")
        mg.grouped_gemm(a, b, offsets=[1, i + 2, i + 7, 30], backend="follower")
    assert len(LAUNCHES) == 3
    with pytest.raises(mg.InvalidProblem, match=message):
        mg.grouped_gemm(a, b, backend="follower", **given)


def test_an_entry_whose_resizing_was_interrupted_gives_way_to_another(
    follower: Following, as_on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower.counts["resized"] = 0
    whole, b = torch.randn(64, 4, dtype=torch.float64), torch.randn(1, 4, 6, dtype=torch.float64)

    def call(rows: int) -> None:
        got = mg.grouped_gemm(whole[:rows], b, sizes=[rows - 1], backend="follower")
        torch.testing.assert_close(got, answer(whole[:rows], b, [0, rows - 1]))

    for rows in (50, 51, 52):
        call(rows)
    original = Follower.resize

    def interrupted(self: Follower, *given: Any) -> None:
        original(self, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Follower, "resize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(53)
    monkeypatch.setattr(Follower, "resize", original)
    served = LAUNCHES.served
    for rows in (54, 55, 56):
        call(rows)
    assert LAUNCHES.served == served + 2


class Calling:
    """An entry whose finaliser asks the cache that dropped it, as a finaliser that calls `grouped_gemm` would."""

    workspace = 0

    def __init__(self, cache: LaunchCache, asked: list[bool]) -> None:
        self._cache, self._asked = cache, asked

    def __del__(self) -> None:
        self._asked.append(self._cache.comes_again(("another",)))


def test_a_finaliser_that_runs_while_the_cache_drops_an_entry_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "ENTRIES", 1)
    cache, asked = LaunchCache(), list[bool]()

    def fill() -> None:
        for name in ("one", "two", "three"):
            cache.keep((name,), Calling(cache, asked))

    on_new_threads(fill, seconds=10)
    assert asked == [False, True]


def test_a_new_choice_clears_the_cache(follower: Following) -> None:
    a, b, ends = problem()
    warm(a, b, ends=ends)
    assert len(LAUNCHES)
    choose.forget()
    assert not len(LAUNCHES)


def test_plans_and_solve_use_the_cache(follower: Following) -> None:
    a, b, ends = problem()
    plan = mg.plan(mg.GroupedGemmProblem(a, b, ends=ends), backend="follower")
    for _ in range(5):
        x = torch.randn_like(a)
        torch.testing.assert_close(plan.run(mg.GroupedGemmProblem(x, b, ends=ends)), answer(x, b, [0, 3, 8]))
        posed = mg.GroupedGemmProblem(x, b, ends=ends, activation="relu")
        torch.testing.assert_close(mg.solve(posed, backend="follower"), answer(x, b, [0, 3, 8], relu=True))
    assert follower.counts["moved"] >= 6
    one = [mg.solve(mg.GroupedGemmProblem(a, b[0]), backend="follower") for _ in range(4)]
    assert all(torch.equal(x, one[0]) for x in one)
    assert one[0].shape == (8, 3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_begins_with_an_empty_cache_and_free_locks(follower: Following) -> None:
    a, b, ends = problem()
    warm(a, b, ends=ends)
    twice = torch.cat([a, a])

    def work() -> bool:
        found = warm(twice, b, ends=ends) if not len(LAUNCHES) else torch.zeros(1)
        return torch.allclose(found, answer(twice, b, [0, 3, 8]))

    with held_by_another_thread(LAUNCHES._lock):
        assert in_a_forked_child(work)


@pytest.mark.parametrize("call", [mg.grouped_gemm, torch_op.packet], ids=["front door", "operator"])
def test_a_warm_call_is_short(call: Callable[..., Tensor]) -> None:
    a, b, offsets = torch.randn(48, 64), torch.randn(3, 64, 128), torch.tensor([0, 16, 16, 48], dtype=torch.int32)
    for _ in range(4):
        call(a, b, offsets=offsets, backend="null")
    served = LAUNCHES.served
    count, files = python_calls(lambda: call(a, b, offsets=offsets, backend="null"))
    assert LAUNCHES.served == served + 1
    assert count <= 30
    assert len(files) <= 6
