"""A bound layer follows its operands: moved, its launches are byte for byte those of a bind to the new ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from multigemm.backends.triton import choice, launch
from multigemm.cuda import nvrtc
from multigemm.cuda.arguments import Address
from multigemm.cuda.launch import Kernel
from multigemm.integrations import layer_call
from multigemm.integrations.fused_experts import Network
from multigemm.integrations.layer_call import Networks
from multigemm.planning.binding import Choice
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.planning.staging import staged_spec
from tests.support.cuda_driver import FakeDriver, steps_of
from tests.support.triton_world import GPU, world

__all__ = ["world"]

EXPERTS, HIDDEN, INNER, TOP_K = 4, 64, 128, 2
NETS: dict[str, Any] = {
    "steps": {"gelu": False},
    "plain steps": {"activation": "silu"},
    "fused": {"fused": Network()},
    "fused gpt-oss": {"fused": Network("swiglu", "interleaved", 1.702, 1.0, 7.0, stacked=True), "stacked": True},
}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros at a multiple of 256 bytes, as an allocator of a GPU places them."""
    memory = torch.zeros(torch.Size(shape).numel() * dtype.itemsize + 256, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 256 :][: memory.numel() - 256].view(dtype).view(shape)


def half(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.bfloat16)


def given(tokens: int, options: Any) -> tuple[Tensor, Tensor, Tensor, Networks]:
    width = INNER if "activation" in options else 2 * INNER
    shapes = [(width, HIDDEN), (HIDDEN, INNER)]
    up, down = (half(EXPERTS, *(shape[::-1] if options.get("stacked") else shape)) for shape in shapes)
    index = zeros(tokens, TOP_K, dtype=torch.int64)
    return half(tokens, HIDDEN), index, zeros(tokens, TOP_K), Networks(up, down, half(EXPERTS, width), **options)


def step_bound(device: int, kernel: Any, grid: tuple[int, ...], warps: int, values: dict[str, Any]) -> Any:
    """What `bound` makes of a step, of a kernel that nobody compiled."""
    names = {id(x): name for name, x in layer_call.operands_of(kernel, values).items()}
    known = (values[name] for name in kernel.arg_names)
    words = [Address(x.data_ptr(), names[id(x)]) if isinstance(x, Tensor) else x for x in known]
    return Kernel(b"", str(kernel), 0).bound([x for x in words if type(x) in (int, Address)], grid=grid[0], threads=32)


@pytest.fixture
def layers(world: FakeDriver, monkeypatch: pytest.MonkeyPatch, setting: Callable[..., None]) -> FakeDriver:
    pytest.importorskip("triton")
    setting(MULTIGEMM_BIND_LAYERS=1)

    def chosen(problem: Any, which: Any, **_: Any) -> Choice:
        spec = replace(staged_spec(problem), device_sizes=True)
        return Choice("triton", launch.plan(spec, choice.candidates_of(spec, (9, 0))[0], GPU), spec, "")

    monkeypatch.setattr(layer_call, "choose", chosen)
    monkeypatch.setattr(layer_call, "bound", step_bound)
    monkeypatch.setattr(layer_call, "_bindable", lambda x: True)
    monkeypatch.setattr(layer_call, "current_raw_stream", lambda index: 7)
    monkeypatch.setattr(layer_call, "empty_cuda", lambda shape, strides, dtype: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(nvrtc, "loaded", lambda source, name, defines, index: Kernel(b"", name, index))
    return world


def described(launches: list[Any], work: tuple[int, int]) -> list[Any]:
    """What each kernel is started with; what it owns, and where in the memory between the launches it points."""
    found = []
    for step in (step for one in launches for step in steps_of(one)):
        own = {x.data_ptr() for x in step._keep if isinstance(x, Tensor)}
        words = np.frombuffer(step._block._words, np.uint64).tolist()
        begin, end = work
        places = [("work", x - begin) if begin <= x < end else x for x in words]
        found.append((step._kernel.name, tuple(step._records._record.grid), [-1 if x in own else x for x in places]))
    return found


@pytest.mark.parametrize("tokens", [3, 700])
@pytest.mark.parametrize("name", NETS)
def test_a_moved_layer_is_the_one_bound_there(name: str, tokens: int, layers: FakeDriver) -> None:
    LAUNCHES.clear()
    with torch.no_grad():
        assert layer_call.call(*given(tokens, NETS[name])) is None
        assert layer_call.call(*given(tokens, NETS[name])) is not None
        kept = [x for x in LAUNCHES._entries.values() if isinstance(x, layer_call._Bound)]
        assert len(kept) == 1
        for _ in range(3):
            x, index, weights, nets = given(tokens, NETS[name])
            del layers.launched[:]
            out = layer_call.call(x, index, weights, nets)
            assert out is not None and kept[0]._at is not None
            count = len(layers.launched)
            moved = [move.__self__ for move, _ in kept[0]._moves]  # type: ignore[union-attr]
            work = kept[0]._at[layer_call._WORK]
            size = kept[0].layer.size
            fresh_work = zeros(size, dtype=torch.uint8)
            fresh = [x for x, _ in layer_call._bind(kept[0].layer, x, index, weights, nets, out, fresh_work)]
            span = fresh_work.data_ptr(), fresh_work.data_ptr() + size
            lent = [step._lent for one in fresh for step in steps_of(one) if step._lent is not None]
            there = {(x.data_ptr(), x.data_ptr() + x.nbytes) for x in lent}
            seen = described(moved, (work, work + kept[0]._size))
            assert without_lent(described(fresh, span), there, size) == seen
            assert count == len(seen)
    LAUNCHES.clear()


def without_lent(found: list[Any], lent: set[tuple[int, int]], size: int) -> list[Any]:
    """Memory that a launch has until it is lent some, as what it is lent: behind the layer's own."""

    def place(x: Any) -> Any:
        return next((("work", size + x - start) for start, end in lent if type(x) is int and start <= x < end), x)

    return [(name, grid, [place(x) for x in words]) for name, grid, words in found]


def test_the_launches_of_a_fused_layer(layers: FakeDriver) -> None:
    """A sort, the gated product, and the product with the sum: four kernels for few tokens, two more for many."""
    for tokens, most in ((8, 4), (700, 8)):
        LAUNCHES.clear()
        with torch.no_grad():
            for _ in range(3):
                layers.launched.clear()
                layer_call.call(*given(tokens, NETS["fused"]))
        assert 3 <= len(layers.launched) <= most, [x.kernel for x in layers.launched]
    LAUNCHES.clear()


def test_a_layer_is_kept_for_one_device(layers: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default streams of all devices have the same handle, and memory may lie alike on two of them."""
    keys = list[Any]()
    monkeypatch.setattr(LAUNCHES, "find", keys.append)
    x, index, weights, nets = given(3, NETS["fused"])
    with torch.no_grad():
        layer_call.call(x, index, weights, nets)
    assert keys[0][1] == x.get_device()


class Weights:
    """What is asked of weights on a GPU, as if they lay at `address`."""

    is_cuda = True

    def __init__(self, *shape: int, address: int = 1 << 20) -> None:
        self.shape, self._like, self._address = shape, torch.empty(shape, dtype=torch.bfloat16, device="meta"), address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._like, name)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self._address


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton")
    from multigemm.integrations import layer_kernels

    monkeypatch.setattr(layer_kernels, "starts_early", lambda index: True)
    return layer_kernels


@pytest.mark.parametrize(
    ("shape", "stacked", "pairs", "experts", "lines", "piece"),
    [
        ((128, 1536, 2048), False, 8, 8, 1536, 2048),  # all columns of all experts at once: the first half of k
        ((128, 1536, 2048), False, 512, 11, 1536, 1488),
        ((8, 28672, 4096), False, 2, 1, 16896, 1488),  # the first columns of the first expert
        ((32, 2880, 5760), True, 4, 3, 728, 11520),  # whole lines of k
    ],
)
def test_what_is_fetched_ahead(
    kernels: Any, shape: tuple[int, ...], stacked: bool, pairs: int, experts: int, lines: int, piece: int
) -> None:
    programs, values = kernels.weights_ahead(Weights(*shape), stacked, pairs)
    assert values["lines"] == lines and values["FETCH"] == kernels.FETCH.format(piece)
    assert programs == experts * -(-lines // kernels.AHEAD_LINES)
    assert experts * lines * piece <= kernels.AHEAD_BYTES
    assert lines <= shape[1] and piece <= 2 * shape[2] and piece % 16 == 0


def test_nothing_is_fetched_from_addresses_that_the_instruction_does_not_take(kernels: Any) -> None:
    assert kernels.weights_ahead(Weights(8, 64, 512), False, 8) is not None
    assert kernels.weights_ahead(Weights(8, 64, 512, address=(1 << 20) + 8), False, 8) is None
    assert kernels.weights_ahead(Weights(8, 64, 516), False, 8) is None, "lines begin anywhere"
    assert kernels.weights_ahead(Weights(8, 64, 128), False, 8) is None, "too little of each line"
    assert kernels.weights_ahead(Weights(0, 64, 512), False, 8) is None
    assert kernels.weights_ahead(torch.zeros(8, 64, 512), False, 8) is None


def test_the_sort_that_fetches_ahead_compiles(kernels: Any) -> None:
    compiler, target = pytest.importorskip("triton.compiler"), pytest.importorskip("triton.backends.compiler")
    kernel = kernels._one_block_kernel
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("another test's interpreter has replaced the compiler in this process")
    constants = {"K": 8, "ORDER": False, "SIZE": 256, "BINS": 256, "EARLY": True, "FETCH": kernels.FETCH.format(2048),
                 "LINES": kernels.AHEAD_LINES}  # fmt: skip
    pointers = {"pairs": "*i64", "weights": "*bf16"} | dict.fromkeys(("order", "inverse", "ends", "rows"), "*i32")
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = compiler.ASTSource(fn=kernel, signature=types, constexprs=at)
    made = compiler.compile(source, target=target.GPUTarget("cuda", 90, 32))
    assert made.asm["ptx"].count("cp.async.bulk.prefetch.L2.global") == 1
