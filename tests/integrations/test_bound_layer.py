"""A layer that is bound as a whole: left to its operators where more than the result is wanted, else the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from multigemm.backends.triton import choice, launch
from multigemm.cuda import nvrtc
from multigemm.cuda.arguments import Address
from multigemm.cuda.launch import Kernel
from multigemm.errors import LibraryError
from multigemm.integrations import bound_layer, layer_ops
from multigemm.integrations.bound_layer import Given, run_bound
from multigemm.integrations.expert_network import Network
from multigemm.nn import Experts, moe
from multigemm.planning import launch_cache
from multigemm.planning.binding import Choice
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.planning.launch_key import PLAIN
from multigemm.planning.staging import staged_spec
from tests.support.concurrency import on_new_threads
from tests.support.cuda_driver import FakeDriver, steps_of
from tests.support.layer_cases import EXPERTS, HIDDEN, TOKENS, VARIANTS, in_steps, layer_of, networks
from tests.support.python_calls import python_calls
from tests.support.python_process import run_python
from tests.support.triton_world import GPU, block_of, kernels_of, world

__all__ = ["world"]


@pytest.fixture(autouse=True)
def bound_layers(setting: Callable[..., None]) -> None:
    setting(MULTIGEMM_BIND_LAYERS=1)


LAYER: dict[str, Any] = {
    "x": torch.ones(6, 24), "top_k_index": torch.zeros(6, 2, dtype=torch.int64), "top_k_weights": torch.ones(6, 2),
    "up": torch.ones(4, 40, 24), "down": torch.ones(4, 24, 20), "up_bias": None, "down_bias": None,
}  # fmt: skip
FOR_STEPS: dict[str, dict[str, Any]] = {
    "another dtype than the weights'": {"x": torch.ones(6, 24, dtype=torch.bfloat16)},
    "rows with strides": {"x": torch.ones(24, 6).T},
    "another type of index": {"top_k_index": torch.zeros(6, 2, dtype=torch.int16)},
    "no tokens": {
        "x": torch.ones(0, 24), "top_k_index": torch.zeros(0, 2, dtype=torch.int64), "top_k_weights": torch.ones(0, 2)
    },
    "weights of another width": {"up": torch.ones(4, 42, 24)},
    "a result of another width": {"down": torch.ones(4, 28, 20)},
    "more tokens than pairs": {"x": torch.ones(7, 24)},
    "more experts than the sort takes": {
        "up": torch.ones(1, 1, 1).expand(2000, 40, 24), "down": torch.ones(1, 1, 1).expand(2000, 24, 20)
    },
}  # fmt: skip


@pytest.mark.parametrize("case", FOR_STEPS)
def test_what_the_steps_have_to_arrange_is_left_to_them(case: str) -> None:
    pytest.importorskip("triton")
    assert bound_layer._parts_of(Network(), False, Given(**LAYER)) is not None
    assert bound_layer._parts_of(Network(), False, Given(**{**LAYER, **FOR_STEPS[case]})) is None


@pytest.mark.slow
def test_the_launches_in_an_interpreter_are_the_steps() -> None:
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "1", "MULTIGEMM_BIND_LAYERS": "1"}
    done = run_python("-m", "tests.support.layer_cases", environment=environment)
    assert " ".join(done.stdout.split()) == "129 1 9 129 fused 9 fused 1 few fused 129 fused 9"


@pytest.mark.slow
def test_a_bound_kernel_has_the_words_that_its_code_takes() -> None:
    triton = pytest.importorskip("triton")
    kernels = layer_ops.triton_kernels()
    kernel = kernels._spread_kernel
    types = {"x": "*bf16", "place": "*i64", "rows": "*bf16", "count": "i32", "width": "i32", "stride": "constexpr"}
    constants = {"K": 2, "PAIRS": 2, "BLOCK": 64}
    source = triton.compiler.ASTSource(
        kernel, {**types, **dict.fromkeys(constants, "constexpr")}, {"stride": 1, **constants}
    )
    compiled = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32))
    memory = {name: torch.ones(1) for name in ("x", "place", "rows")}
    words = bound_layer.words(kernel, compiled, {**memory, "count": 7, "width": 40, "stride": 1, **constants})
    assert words == [*(memory[name].data_ptr() for name in ("x", "place", "rows")), 7, 40, 0, 0]  # two of Triton's own


class _Compiled:
    """What Triton makes of a kernel, and loads where a context is current."""

    name, function = "name", 77
    src = SimpleNamespace(signature={"x": "*bf16", "width": "i32", "K": "constexpr"})
    metadata = SimpleNamespace(shared=512, global_scratch_size=0)
    asm: ClassVar = {"ptx": ".entry name( .param .u64 x, .param .u32 y, .param .u64 s, .param .u64 p )"}

    def __init__(self, world: FakeDriver) -> None:
        self._world = world

    def _init_handles(self) -> None:
        assert self._world.current


def test_a_bound_kernel_is_launched_where_it_lies(world: FakeDriver) -> None:
    """On a thread without a context too."""
    compiled, asked, bound = _Compiled(world), list[dict[str, Any]](), list[Any]()
    x = torch.ones(4)

    def warmup(**given: Any) -> _Compiled:
        asked.append(given)
        return compiled

    kernel = SimpleNamespace(arg_names=["x", "width", "K"], warmup=warmup)

    def work() -> None:
        bound.append(bound_layer.bound(0, kernel, (5, 6), 8, {"x": x, "width": 40, "K": 2}))
        bound[0]()

    on_new_threads(work)
    [launch] = bound
    assert asked == [{"grid": (5, 6), "num_warps": 8, "x": x, "width": 40, "K": 2}]
    [step] = kernels_of(launch)
    assert memoryview(block_of(step)).cast("Q").tolist() == [x.data_ptr(), 40, 0, 0]
    [launched] = world.launched
    assert (launched.grid, launched.block, launched.shared) == ((5, 6, 1), (256, 1, 1), 512)
    assert (launched.stream, launched.handle) == (7, 77)


# --- launches that follow their operands ---------------------------------------------------------------

FEW_EXPERTS, WIDTH, DEPTH, TOP_K = 4, 64, 128, 2
LAYERS: dict[str, tuple[Network, bool]] = {
    "steps": (Network(), False),
    "plain steps": (Network("silu"), False),
    "fused": (Network(), True),
    "fused gpt-oss": (Network("swiglu", "interleaved", 1.702, 1.0, 7.0, stacked=True), True),
}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros at a multiple of 256 bytes, as an allocator of a GPU places them."""
    memory = torch.zeros(torch.Size(shape).numel() * dtype.itemsize + 256, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 256 :][: memory.numel() - 256].view(dtype).view(shape)


def half(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.bfloat16)


def given(tokens: int, net: Network) -> Given:
    width = 2 * DEPTH if net.gate else DEPTH
    shapes = [(width, WIDTH), (WIDTH, DEPTH)]
    up, down = (half(FEW_EXPERTS, *(shape[::-1] if net.stacked else shape)) for shape in shapes)
    index = zeros(tokens, TOP_K, dtype=torch.int64)
    return Given(half(tokens, WIDTH), index, zeros(tokens, TOP_K), up, down, half(FEW_EXPERTS, width), None)


def step_bound(device: int, kernel: Any, grid: tuple[int, ...], warps: int, values: dict[str, Any], waits: bool) -> Any:
    """What `bound` makes of a step, of a kernel that nobody compiled."""
    names = {id(x): name for name, x in bound_layer.operands_of(kernel, values).items()}
    known = (values[name] for name in kernel.arg_names)
    words = [Address(x.data_ptr(), names[id(x)]) if isinstance(x, Tensor) else x for x in known]
    return Kernel(b"", str(kernel), 0).bound([x for x in words if type(x) in (int, Address)], grid=grid[0], threads=32)


@pytest.fixture
def layers(world: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Layers of CPU tensors are bound as far as the driver's door."""
    pytest.importorskip("triton")
    LAUNCHES.clear()

    def chosen(problem: Any, which: Any, **_: Any) -> Choice:
        spec = replace(staged_spec(problem), device_sizes=True)
        return Choice("triton", launch.plan(spec, choice.candidates_of(spec, (9, 0))[0], GPU), spec, "")

    monkeypatch.setattr(bound_layer, "choose", chosen)
    monkeypatch.setattr(bound_layer, "bound", step_bound)
    monkeypatch.setattr(bound_layer, "_on_current_device", lambda x: True)
    monkeypatch.setattr(bound_layer, "current_raw_stream", lambda index: 7)
    monkeypatch.setattr(bound_layer, "empty_cuda", lambda shape, strides, dtype: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(nvrtc, "loaded", lambda source, name, defines, index: Kernel(b"", name, index))
    yield world
    LAUNCHES.clear()


@pytest.fixture
def warm(layers: FakeDriver) -> Given:
    """The operands of a fused layer that was called twice, and is served from now on."""
    operands = given(3, Network())
    with torch.no_grad():
        assert run_bound(Network(), True, *operands) is None
        assert run_bound(Network(), True, *operands) is not None
        assert run_bound(Network(), True, *operands) is not None
    return operands


class _Own(Tensor):
    """A subclass that may mean anything."""


class _OnAnotherDevice(Tensor):
    """A tensor that lies elsewhere, of a type that is known."""

    def get_device(self) -> int:
        return 1


def freed(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "freed": freed,
    "negated": torch._neg_view,
    "without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "a subclass": lambda x: x.as_subclass(_Own),
    "on another device": lambda x: x.as_subclass(_OnAnotherDevice),
    "with a gradient": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("case", LEFT)
def test_other_tensors_are_left_to_the_operators(case: str, warm: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_layer, "PLAIN", PLAIN | {_OnAnotherDevice})
    x = LEFT[case](warm.x)
    for _ in range(3):
        assert run_bound(Network(), True, x, *warm[1:]) is None


@contextmanager
def autocasting() -> Iterator[None]:
    """Autocast of a GPU as it is in force, on any machine."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("mode", [FakeTensorMode, TorchFunctionMode, TorchDispatchMode, autocasting])
def test_calls_under_a_mode_are_left_to_the_operators(mode: Any, warm: Given) -> None:
    with torch.no_grad(), mode():
        assert run_bound(Network(), True, *warm) is None
    with torch.inference_mode():
        assert run_bound(Network(), True, *warm) is not None


@pytest.mark.filterwarnings("ignore:`torch.jit.trace`:DeprecationWarning")
def test_calls_under_transforms_and_traces_are_left_to_the_operators(warm: Given) -> None:
    found: list[Tensor | None] = []

    def look(x: Tensor) -> Tensor:
        found.append(run_bound(Network(), True, *warm))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)  # type: ignore[no-untyped-call]
    assert len(found) >= 3 and all(y is None for y in found)


def test_a_warm_call_is_short(warm: Given) -> None:
    """Python functions and files between the call of a module and the driver, on a layer of few tokens."""
    layer = Experts(FEW_EXPERTS, WIDTH, DEPTH, fused=True, dtype=torch.bfloat16, device="meta")
    layer.gate_up_proj, layer.down_proj = (torch.nn.Parameter(x) for x in (warm.up, warm.down))
    with torch.no_grad():
        for _ in range(3):
            layer(*warm[:3])
        calls = python_calls(lambda: layer(*warm[:3]))
    assert calls.functions <= 20 and len(calls.files) <= 6, calls


def test_only_addresses_that_changed_are_written(warm: Given) -> None:
    [kept] = [x for x in LAUNCHES._entries.values() if isinstance(x, bound_layer._BoundLayer)]
    patched = kept._patched
    assert patched is not None
    written: list[int] = []

    class Noted(dict[int, int]):
        def __setitem__(self, piece: int, address: int) -> None:
            written.append(piece)

    patched._words = tuple((piece, [(0, Noted(), piece)]) for piece, _ in patched._words)
    addresses: Any = patched._at
    patched(addresses)
    assert written == []
    patched([addresses[0] + 256, *addresses[1:]])
    assert set(written) == {0}


def bound_layers_of(*layers: Given) -> list[Any]:
    """The entries of fused layers, each called until it is served."""
    with torch.no_grad():
        for operands in layers:
            for _ in range(3):
                run_bound(Network(), True, *operands)
    return [x for x in LAUNCHES._entries.values() if isinstance(x, bound_layer._BoundLayer)]


def test_layers_lend_each_other_the_memory_between_their_launches(
    layers: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little of it is kept, as long as a layer is; and no other layer runs in the middle of a call."""
    few, many = given(3, Network()), given(40, Network())
    one, other = bound_layers_of(few, many, few)
    assert one._between is other._between
    places = [kept._patched._at[bound_layer.WORK] for kept in (one, other)]
    assert places[0] == places[1] == one._between._kept.data_ptr()
    one._between.busy = True
    with torch.no_grad():
        assert run_bound(Network(), True, *few) is run_bound(Network(), True, *many) is None
    one._between.busy = False
    monkeypatch.setattr(bound_layer, "KEPT_BYTES", 1000)
    one._between._kept = None
    with torch.no_grad():
        assert run_bound(Network(), True, *many) is not None
    assert one._between._kept is None
    LAUNCHES.clear()
    del one, other
    assert not bound_layer._between


def test_a_launch_that_fails_says_so(warm: Given, monkeypatch: pytest.MonkeyPatch, layers: FakeDriver) -> None:
    """On a thread without a context it is made once more, with one; any other error is raised."""
    results: list[Tensor | None] = []
    layers.launched.clear()
    key = next(key for key, x in LAUNCHES._entries.items() if isinstance(x, bound_layer._BoundLayer))
    entry = LAUNCHES.find(key)

    def work() -> None:
        at = [0 if x is None else x.data_ptr() for x in warm]
        results.append(entry.run(tuple(warm), at))

    on_new_threads(work)
    assert results[0] is not None and len(layers.launched) == len(entry._patched._starts)
    monkeypatch.setattr(layers, "_cuLaunchKernelEx", lambda *given: 700)
    with torch.no_grad(), pytest.raises(LibraryError, match="returned 700"):
        run_bound(Network(), True, *warm)


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
@pytest.mark.parametrize("name", LAYERS)
def test_a_moved_layer_is_the_one_bound_there(name: str, tokens: int, layers: FakeDriver) -> None:
    net, fused = LAYERS[name]
    with torch.no_grad():
        assert run_bound(net, fused, *given(tokens, net)) is None
        assert run_bound(net, fused, *given(tokens, net)) is not None
        [kept] = [x for x in LAUNCHES._entries.values() if isinstance(x, bound_layer._BoundLayer)]
        for _ in range(3):
            operands = given(tokens, net)
            del layers.launched[:]
            out = run_bound(net, fused, *operands)
            assert out is not None and kept._patched is not None
            moved = [start[5] for start in kept._patched._starts]
            at: Any = kept._patched._at
            work, size = at[bound_layer.WORK], bound_layer._starts(kept._parts)[-1]
            fresh_work = zeros(size, dtype=torch.uint8)
            fresh = [x for x, _ in bound_layer._bind(net, fused, kept._parts, operands, out, fresh_work)]
            span = fresh_work.data_ptr(), fresh_work.data_ptr() + size
            lent = [step._lent for one in fresh for step in steps_of(one) if step._lent is not None]
            there = {(x.data_ptr(), x.data_ptr() + x.nbytes) for x in lent}
            seen = described(moved, (work, work + kept._size))
            assert without_lent(described(fresh, span), there, size) == seen
            assert len(layers.launched) == len(seen)


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
                run_bound(Network(), True, *given(tokens, Network()))
        assert 3 <= len(layers.launched) <= most, [x.kernel for x in layers.launched]


def test_a_layer_is_kept_for_one_device(layers: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default streams of all devices have the same handle, and memory may lie alike on two of them."""
    keys = list[Any]()
    monkeypatch.setattr(LAUNCHES, "find", keys.append)
    operands = given(3, Network())
    with torch.no_grad():
        run_bound(Network(), True, *operands)
    assert keys[0][1] == operands.x.get_device()


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
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("another test's interpreter has replaced the compiler in this process")
    kernel = kernels._sort_kernel
    constants = {"COUNTED": False, "K": 8, "ORDER": False, "SIZE": 1024, "BINS": 256, "EARLY": True,
                 "FETCH": kernels.FETCH.format(2048), "LINES": kernels.AHEAD_LINES}  # fmt: skip
    numbers = dict.fromkeys(("starts", "order", "inverse", "ends", "rows"), "*i32")
    pointers = {"pairs": "*i64", "weights": "*bf16", **numbers}
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = compiler.ASTSource(fn=kernel, signature=types, constexprs=at)
    made = compiler.compile(source, target=target.GPUTarget("cuda", 90, 32))
    assert made.asm["ptx"].count("cp.async.bulk.prefetch.L2.global") == 1


# --- on a GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((8, 2, 512, 256), torch.bfloat16), ((128, 8, 256, 128), torch.bfloat16), ((5, 3, 70, 34), torch.float32)],
)
def test_a_bound_layer_has_the_bits_of_its_steps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    experts, top_k, hidden, inner = shape
    torch.manual_seed(0)
    for net, parameters in networks(experts, hidden, inner, dtype, "cuda"):
        for tokens in (1, 300):
            x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
            index = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
            index[tokens // 2, -1] = experts  # a pair of nobody's
            weights = torch.rand(tokens, top_k, device="cuda")
            given = (x, index, weights, *parameters)
            with torch.no_grad():
                want = [in_steps(net, *given) for _ in range(2)][1]
                assert run_bound(net, False, *given) is None  # once in steps, which choose
                for _ in range(4):
                    got = run_bound(net, False, *given)
                    assert got is not None
                    assert torch.equal(got, want)
                index.copy_(index.flip(0))
                x.mul_(2)
                got, want = run_bound(net, False, *given), in_steps(net, *given)
            assert got is not None
            assert torch.equal(got, want)


@pytest.mark.gpu
def test_results_of_bound_layers_share_nothing_and_keep_no_memory() -> None:
    layer = Experts(8, 256, 128, device="cuda", dtype=torch.bfloat16)
    index = torch.rand(40, 8, device="cuda").topk(2).indices
    weights = torch.rand(40, 2, device="cuda")
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(40, 256, device="cuda", dtype=torch.bfloat16)
            layer(x, index, weights)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        kept = [layer(x, index, weights) for _ in range(5)]
        assert len({y.data_ptr() for y in kept}) == 5
        assert all(torch.equal(y, kept[0]) for y in kept)
        del kept
        assert torch.cuda.memory_allocated() - before <= launch_cache.WORKSPACE // 16


@pytest.mark.gpu
def test_a_layer_is_captured_in_steps() -> None:
    layer = Experts(8, 256, 128, device="cuda", dtype=torch.bfloat16)
    index = torch.rand(16, 8, device="cuda").topk(2).indices
    x, weights = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16), torch.rand(16, 2, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            layer(x, index, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, index, weights)
        x.normal_()
        graph.replay()
        assert torch.equal(out, layer(x, index, weights))


@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "dtype", "bias"), VARIANTS)
@pytest.mark.parametrize("tokens", [3, TOKENS, 700])
def test_every_variant_is_bound_with_the_bits_of_its_steps(
    activation: str, dtype: torch.dtype, bias: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _, _ = layer_of(activation, dtype, bias, "cuda")
    x = torch.randn(tokens, HIDDEN, dtype=dtype, device="cuda")
    index, weights = torch.rand(tokens, EXPERTS, device="cuda").topk(2).indices, torch.rand(tokens, 2, device="cuda")
    bound: Any = vars(moe)["run_bound"]
    met: list[bool] = []

    def counted(*args: Any) -> Tensor | None:
        y: Tensor | None = bound(*args)
        met.append(y is not None)
        return y

    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(moe, "run_bound", lambda *_: None)
            want = [layer(x, index, weights) for _ in range(2)][1]
        monkeypatch.setattr(moe, "run_bound", counted)
        assert all(torch.equal(layer(x, index, weights), want) for _ in range(4))
    assert met == [False, True, True, True], "the first call at some addresses runs in steps"
