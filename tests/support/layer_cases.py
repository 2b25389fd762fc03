"""Layers and their steps, to compare bound layers with; run as a script, it compares them without a GPU.

    TRITON_INTERPRET=1 python -m tests.support.layer_cases

The kernels then run in Triton's interpreter, and what asks the GPU is replaced: everything else is what runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from multigemm.integrations import bound_layer, expert_network, fused_experts, layer_ops
from multigemm.integrations.bound_layer import run_bound
from multigemm.integrations.expert_network import Network, through_experts
from multigemm.integrations.fused_experts import run_experts
from multigemm.nn import Experts
from multigemm.planning.launch_cache import LAUNCHES

VARIANTS = [
    ("swiglu", torch.bfloat16, False), ("swiglu", torch.float16, True), ("swiglu", torch.float32, True),
    ("swiglu", torch.float64, False), ("geglu", torch.float16, False), ("geglu", torch.float32, True),
    ("gelu", torch.bfloat16, True), ("gelu_tanh", torch.float16, True), ("relu", torch.float32, False),
    ("silu", torch.float32, True), ("silu", torch.bfloat16, False),
]  # fmt: skip
EXPERTS, TOKENS, HIDDEN, INNER = 6, 40, 48, 32


def layer_of(activation: str, dtype: torch.dtype, bias: bool, device: str) -> tuple[Experts, Tensor, Tensor]:
    """A layer, tokens and weights of two experts each."""
    torch.manual_seed(0)
    layer = Experts(EXPERTS, HIDDEN, INNER, activation=activation, bias=bias, dtype=dtype, device=device)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype, device=device)
    return layer, x, torch.rand(TOKENS, 2, device=device) + 0.1


Parameters = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def in_steps(net: Network, x: Tensor, index: Tensor, weights: Tensor, *parameters: Any) -> Tensor:
    experts = parameters[0].shape[0]
    return through_experts(x, index, weights, experts, lambda rows, ends: net.in_steps(rows, ends, *parameters))


def networks(
    experts: int, hidden: int, inner: int, dtype: torch.dtype, device: str
) -> Iterator[tuple[Network, Parameters]]:
    for net, bias in ((Network(), False), (Network("geglu", stacked=True), True), (Network("gelu"), True)):
        width = 2 * inner if net.gate else inner
        made: list[Any] = []
        for out, deep in ((width, hidden), (hidden, inner)):
            shape = (deep, out) if net.stacked else (out, deep)
            made.append(torch.randn(experts, *shape, device=device, dtype=dtype))
        vectors = [torch.randn(experts, n, device=device, dtype=dtype) if bias else None for n in (width, hidden)]
        yield net, (made[0], made[1], vectors[0], vectors[1])


def _interpreted(
    device: int, kernel: Any, grid: tuple[int, ...], warps: int, values: Any, waits: bool
) -> Callable[[], None]:
    """What `bound` makes, as a call of the interpreter."""
    assert set(kernel.arg_names) == set(values)
    return lambda: kernel[grid](**values)


def _without_a_gpu() -> None:
    from tests.support.triton_interpreted import quicken

    quicken()
    stand_ins: Any = bound_layer
    decode_kernels: Any = layer_ops.decode_kernels()
    stand_ins.bound = _interpreted
    stand_ins._on_current_device = lambda x: True
    stand_ins.current_raw_stream = lambda device: 0
    layers: Any = layer_ops
    copies_rows, layers_kernels = layer_ops.copies_rows, layer_ops.kernels_for

    def as_on_a_gpu(*given: Any) -> bool:
        layers.kernels_for = lambda x: True
        found = copies_rows(*given)
        layers.kernels_for = layers_kernels
        return found

    stand_ins.copies_rows = as_on_a_gpu
    for_few: Any = expert_network
    for_few.kernels_for = lambda x, kernels: kernels()
    decode_kernels.run_steps = lambda x, *steps: [step.kernel[step.grid](**step.values) for step in steps]
    stand_ins.empty_cuda = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)


def main() -> None:
    _without_a_gpu()
    torch.manual_seed(0)
    experts, top_k, hidden, inner = 5, 2, 22, 14
    for net, parameters in networks(experts, hidden, inner, torch.float32, "cpu"):
        for tokens in (1, 9) if net.stacked else (129,):
            x, weights = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
            index = torch.rand(tokens, experts).topk(top_k).indices
            index[tokens // 2, -1] = experts  # a pair of nobody's
            given = (x, index, weights, *parameters)
            with torch.no_grad():
                want = [in_steps(net, *given) for _ in range(2)][1]
                assert run_bound(net, False, *given) is None  # once in steps, which choose
                for _ in range(3 if tokens < 9 else 2):
                    got = run_bound(net, False, *given)
                    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
            print(tokens)
    for net, parameters in networks(experts, hidden, inner, torch.float32, "cpu"):
        fused_as_in_steps(net, parameters, 129 if net.stacked else 9)
        if net.gate is not None and not net.stacked:
            fused_as_in_steps(net, parameters, 1)
            few_as_in_steps(net, parameters)


def fused_as_in_steps(net: Network, parameters: Parameters, tokens: int) -> None:
    """A layer by fused products, whose launches come again, beside the same in steps; many tokens are copied first."""
    experts, hidden, top_k = parameters[0].shape[0], parameters[1].shape[2 if net.stacked else 1], 2
    x, weights = torch.empty(tokens, hidden), torch.rand(tokens, top_k)
    index = torch.empty(tokens, top_k, dtype=torch.int64)
    served = []
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            x.copy_(torch.randn(tokens, hidden))
            index.copy_(torch.rand(tokens, experts + 1).topk(top_k).indices)
            got = run_experts(net, x, index, weights, *parameters)
            want = in_steps(net, x, index, weights, *parameters)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
            served.append(len(LAUNCHES))
    assert served[1] > served[0], "the second call binds"
    parts = bound_layer._parts_of(net, True, bound_layer.Given(x, index, weights, *parameters))
    assert parts is not None and any("rows" in views for views in parts) == (tokens == 129)
    assert (len(parts) == 1) == (tokens == 1), "one token needs no sort"
    print("fused", tokens)


def few_as_in_steps(net: Network, parameters: Parameters) -> None:
    """A layer whose way is not told, with one token: the first two calls look at all operands, later ones at a key."""
    layers: Any = fused_experts
    layers.has_fast_fused_products = lambda x, backend: True
    asked: list[int] = []
    takes = expert_network.takes_few_tokens

    def counted(*given: Any) -> bool:
        asked.append(0)
        return takes(*given)

    for module in (expert_network, bound_layer):
        looked: Any = module
        looked.takes_few_tokens = counted
    x, index, weights = torch.randn(1, parameters[1].shape[1]), torch.tensor([[4, 0]]), torch.rand(1, 2)
    with torch.no_grad():
        want, seen = in_steps(net, x, index, weights, *parameters), list[int]()
        for _ in range(4):
            got = fused_experts.run_few_tokens(net, x, index, weights, *parameters)
            assert got is not None
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
            seen.append(len(asked))
        assert seen[1] > seen[0] > 0 and seen[1:] == [seen[1]] * 3, seen
        told = fused_experts.run_few_tokens(net._replace(stacked=True), x, index, weights, *parameters)
    assert told is None
    print("few")


if __name__ == "__main__":
    main()
