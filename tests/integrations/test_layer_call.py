"""A layer that is bound as a whole: left to its steps where more than the result is wanted, else the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from multigemm.integrations import eager, layer_call, layer_ops
from multigemm.integrations.layer_call import Networks
from multigemm.nn import Experts
from multigemm.planning import launch_cache
from tests.support.concurrency import on_new_threads
from tests.support.cuda_driver import FakeDriver
from tests.support.layer_cases import EXPERTS, HIDDEN, TOKENS, VARIANTS, in_steps, layer_of, networks
from tests.support.python_process import run_python
from tests.support.triton_world import block_of, kernels_of, world

__all__ = ["world"]


@pytest.fixture(autouse=True)
def bound_layers(setting: Callable[..., None]) -> None:
    setting(MULTIGEMM_BIND_LAYERS=1)


class _Own(Tensor):
    """A subclass that may mean anything."""


def test_calls_on_plain_tensors_are_plain() -> None:
    x = torch.nn.Parameter(torch.ones(2, 3))
    assert not eager.plain_call(x)
    with torch.no_grad():
        assert eager.plain_call(x, None)
    with torch.inference_mode():
        assert eager.plain_call(x, torch.ones(2))
    assert eager.plain_call(torch.ones(2))


@contextmanager
def autocasting() -> Iterator[None]:
    """Autocast of a GPU as it is in force, on any machine."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("mode", [FakeTensorMode, TorchFunctionMode, TorchDispatchMode, autocasting])
def test_calls_under_a_mode_are_not_plain(mode: Any) -> None:
    x = torch.ones(2, 2)
    with mode():
        assert not eager.plain_call(x)
    assert eager.plain_call(x)


def freed() -> Tensor:
    x = torch.ones(4, 4)
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    "make",
    [
        freed,
        lambda: torch._neg_view(torch.ones(2, 2)),
        lambda: torch._efficientzerotensor((2, 2)),
        lambda: torch.ones(2, 2).as_subclass(_Own),
    ],
    ids=["freed", "negated", "without memory", "a subclass"],
)
def test_calls_on_other_tensors_are_not_plain(make: Any) -> None:
    assert not eager.plain_call(torch.ones(2), make())


@pytest.mark.filterwarnings("ignore:`torch.jit.trace`:DeprecationWarning")
def test_calls_under_transforms_and_traces_are_not_plain() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(not eager.plain_call(x))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)  # type: ignore[no-untyped-call]
    assert seen and all(seen)


def test_the_memory_between_launches_is_cut_without_overlap() -> None:
    x, index = torch.ones(150, 24), torch.zeros(150, 2, dtype=torch.int64)
    nets = Networks(torch.ones(4, 40, 24), torch.ones(4, 24, 20), gelu=False)
    pytest.importorskip("triton")
    layer = layer_call._layer_of(x, index, torch.ones(150, 2), nets)
    assert layer is not None
    parts = layer_call._cut(layer, torch.zeros(layer.size, dtype=torch.uint8), gated=True)
    assert (parts.rows.shape, parts.up.shape) == ((300, 24), (300, 40))
    assert (parts.inner.shape, parts.down.shape) == ((300, 20), (300, 24))
    alive = (parts.rows, parts.up, parts.inverse, parts.ends, parts.order, parts.counts)  # while rows arrive
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in alive)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert parts.up.untyped_storage().data_ptr() == parts.inner.untyped_storage().data_ptr()


LAYER = {
    "x": torch.ones(6, 24), "index": torch.zeros(6, 2, dtype=torch.int64), "weights": torch.ones(6, 2),
    "up": torch.ones(4, 40, 24), "down": torch.ones(4, 24, 20), "down_bias": None,
}  # fmt: skip
FOR_STEPS: dict[str, dict[str, Any]] = {
    "another dtype than the weights'": {"x": torch.ones(6, 24, dtype=torch.bfloat16)},
    "rows with strides": {"x": torch.ones(24, 6).T},
    "another type of index": {"index": torch.zeros(6, 2, dtype=torch.int16)},
    "no tokens": {"x": torch.ones(0, 24), "index": torch.zeros(0, 2, dtype=torch.int64), "weights": torch.ones(0, 2)},
    "weights of another width": {"up": torch.ones(4, 42, 24)},
    "a result of another width": {"down": torch.ones(4, 28, 20)},
    "a bias elsewhere": {"down_bias": torch.ones(4, 24, device="meta")},
    "more tokens than pairs": {"x": torch.ones(7, 24)},
    "more experts than the sort takes": {
        "up": torch.ones(1, 1, 1).expand(2000, 40, 24), "down": torch.ones(1, 1, 1).expand(2000, 24, 20)
    },
}  # fmt: skip


def layer_with(x: Any, index: Any, weights: Any, up: Any, down: Any, down_bias: Any) -> Any:
    return layer_call._layer_of(x, index, weights, Networks(up, down, None, down_bias, gelu=False))


@pytest.mark.parametrize("case", FOR_STEPS)
def test_what_the_steps_have_to_arrange_is_left_to_them(case: str) -> None:
    pytest.importorskip("triton")
    assert layer_with(**LAYER) is not None
    assert layer_with(**{**LAYER, **FOR_STEPS[case]}) is None


@pytest.mark.slow
def test_the_launches_in_an_interpreter_are_the_steps() -> None:
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "1", "MULTIGEMM_BIND_LAYERS": "1"}
    done = run_python("-m", "tests.support.layer_cases", environment=environment)
    assert done.stdout.split() == ["129", "1", "9", "129", "fused", "9", "fused", "129", "fused", "9"]


@pytest.mark.slow
def test_a_bound_kernel_has_the_words_that_its_code_takes() -> None:
    triton = pytest.importorskip("triton")
    kernels = layer_ops.triton_kernels()
    kernel = kernels._gather_kernel
    types = {"x": "*bf16", "order": "*i64", "rows": "*bf16", "width": "i32", "stride": "constexpr"}
    source = triton.compiler.ASTSource(
        kernel, {**types, "K": "constexpr", "BLOCK": "constexpr"}, {"stride": 1, "K": 2, "BLOCK": 64}
    )
    compiled = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32))
    memory = {name: torch.ones(1) for name in ("x", "order", "rows")}
    words = layer_call.words(kernel, compiled, {**memory, "width": 40, "stride": 1, "K": 2, "BLOCK": 64})
    assert words == [*(memory[name].data_ptr() for name in ("x", "order", "rows")), 40, 0, 0]  # two of Triton's own


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
        bound.append(layer_call.bound(0, kernel, (5, 6), 8, {"x": x, "width": 40, "K": 2}))
        bound[0]()

    on_new_threads(work)
    [launch] = bound
    assert asked == [{"grid": (5, 6), "num_warps": 8, "x": x, "width": 40, "K": 2}]
    [step] = kernels_of(launch)
    assert memoryview(block_of(step)).cast("Q").tolist() == [x.data_ptr(), 40, 0, 0]
    [launched] = world.launched
    assert (launched.grid, launched.block, launched.shared) == ((5, 6, 1), (256, 1, 1), 512)
    assert (launched.stream, launched.handle) == (7, 77)


# --- zeros and NaN ------------------------------------------------------------------------------------

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def gradients(layer: Experts, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {"x": x.detach().requires_grad_(), "weights": weights.detach().requires_grad_()}
    y = layer(leaves["x"], index, leaves["weights"])
    named = {**leaves, **dict(layer.named_parameters())}
    found = torch.autograd.grad(y, list(named.values()), torch.ones_like(y))
    return y.detach(), dict(zip(named, found, strict=True))


def without_gradients(layer: Experts, *given: Tensor) -> Tensor:
    """The layer's result; on a GPU, the one of a bound layer that was met before."""
    with torch.no_grad():
        results: list[Tensor] = [layer(*given) for _ in range(4)]
    assert all(torch.equal(y.nan_to_num(), results[0].nan_to_num()) for y in results)
    return results[-1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("activation", "dtype", "bias"), VARIANTS)
@pytest.mark.parametrize("used", [(0, 3), (5, 5)])
def test_experts_without_tokens_have_gradients_of_zero(
    activation: str, dtype: torch.dtype, bias: bool, used: tuple[int, int], device: str
) -> None:
    layer, x, weights = layer_of(activation, dtype, bias, device)
    index = torch.tensor(used, device=device).expand(TOKENS, 2).contiguous()
    index[7] = EXPERTS  # a token that nobody here serves
    y, found = gradients(layer, x, index, weights)
    assert torch.equal(without_gradients(layer, x, index, weights), y)
    assert all(g.isfinite().all() for g in (y, *found.values()))
    idle = [e for e in range(EXPERTS) if e not in used]
    for name, gradient in found.items():
        if name in ("x", "weights"):
            assert not gradient[7].any()
            assert gradient.any()
        else:
            assert not gradient[idle].any()
            assert all(gradient[e].any() for e in used)
    assert not y[7].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("activation", "dtype", "bias"), VARIANTS)
def test_a_nan_stays_with_its_token_and_its_experts(
    activation: str, dtype: torch.dtype, bias: bool, device: str
) -> None:
    layer, x, weights = layer_of(activation, dtype, bias, device)
    index = torch.rand(TOKENS, EXPERTS - 1, device=device).topk(2).indices
    index[11] = torch.tensor([0, 1], device=device)
    clean, found = gradients(layer, x, index, weights)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter[EXPERTS - 1] = torch.nan  # of an expert that serves nobody
    x[11] = torch.nan
    dirty, after = gradients(layer, x, index, weights)
    assert torch.equal(without_gradients(layer, x, index, weights).nan_to_num(), dirty.nan_to_num())
    others = torch.arange(TOKENS, device=device) != 11
    assert dirty[11].isnan().all()
    assert torch.equal(dirty[others], clean[others])
    for name in ("x", "weights"):
        assert torch.equal(after[name][others], found[name][others])
    for name, _ in layer.named_parameters():
        assert torch.equal(after[name][2:], found[name][2:])
        assert not after[name][EXPERTS - 1].any()


# --- on a GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((8, 2, 512, 256), torch.bfloat16), ((128, 8, 256, 128), torch.bfloat16), ((5, 3, 70, 34), torch.float32)],
)
def test_a_bound_layer_has_the_bits_of_its_steps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    experts, top_k, hidden, inner = shape
    torch.manual_seed(0)
    for nets in networks(experts, hidden, inner, dtype, "cuda"):
        for tokens in (1, 300):
            x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
            index = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
            index[tokens // 2, -1] = experts  # a pair of nobody's
            weights = torch.rand(tokens, top_k, device="cuda")
            with torch.no_grad():
                want = [in_steps(x, index, weights, nets) for _ in range(2)][1]
                assert layer_call.call(x, index, weights, nets) is None  # once in steps, which choose
                for _ in range(4):
                    got = layer_call.call(x, index, weights, nets)
                    assert got is not None
                    assert torch.equal(got, want)
                index.copy_(index.flip(0))
                x.mul_(2)
                got, want = layer_call.call(x, index, weights, nets), in_steps(x, index, weights, nets)
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
    bound: Any = layer_call.call
    met: list[bool] = []

    def counted(*args: Any) -> Tensor | None:
        y: Tensor | None = bound(*args)
        met.append(y is not None)
        return y

    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(layer_call, "call", lambda *_: None)
            want = [layer(x, index, weights) for _ in range(2)][1]
        monkeypatch.setattr(layer_call, "call", counted)
        assert all(torch.equal(layer(x, index, weights), want) for _ in range(4))
    assert met == [False, True, True, True], "the first call at some addresses runs in steps"
