"""Layers and their steps, to compare bound layers with; run as a script, it compares them without a GPU.

    TRITON_INTERPRET=1 python -m tests.support.layer_cases

The kernels then run in Triton's interpreter, and what asks the GPU is replaced: everything else is what runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from multigemm.integrations import grouped_gemm, layer_call
from multigemm.integrations.fused_experts import experts_forward
from multigemm.integrations.layer_call import Networks
from multigemm.integrations.layer_ops import geglu, swiglu
from multigemm.integrations.routing import combine, dispatch, route
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


def in_steps(x: Tensor, index: Tensor, weights: Tensor, nets: Networks) -> Tensor:
    routing = route(index, nets.up.shape[0])
    up, down = (w if nets.stacked else w.transpose(1, 2) for w in (nets.up, nets.down))
    options: Any = {} if nets.activation is None else {"activation": nets.activation}
    hidden = grouped_gemm(dispatch(x, routing), up, ends=routing.ends, bias=nets.up_bias, **options)
    if nets.gelu is not None:
        hidden = (geglu if nets.gelu else swiglu)(hidden)
    rows = grouped_gemm(hidden, down, ends=routing.ends, bias=nets.down_bias)
    return combine(rows, weights, routing)


def networks(experts: int, hidden: int, inner: int, dtype: torch.dtype, device: str) -> Iterator[Networks]:
    for gelu, activation, bias, stacked in (
        (False, None, False, False),
        (True, None, True, True),
        (None, "gelu", True, False),
    ):
        width = inner if gelu is None else 2 * inner
        made: list[Any] = []
        for out, deep in ((width, hidden), (hidden, inner)):
            made.append(torch.randn(experts, *((deep, out) if stacked else (out, deep)), device=device, dtype=dtype))
        vectors = [torch.randn(experts, n, device=device, dtype=dtype) if bias else None for n in (width, hidden)]
        yield Networks(made[0], made[1], vectors[0], vectors[1], stacked=stacked, gelu=gelu, activation=activation)


def _interpreted(device: int, kernel: Any, grid: tuple[int, ...], warps: int, values: Any) -> Callable[[], None]:
    """What `bound` makes, as a call of the interpreter."""
    assert set(kernel.arg_names) == set(values)
    return lambda: kernel[grid](**values)


def _without_a_gpu() -> None:
    stand_ins: Any = layer_call
    stand_ins.bound = _interpreted
    stand_ins._bindable = lambda x: True
    stand_ins.current_raw_stream = lambda device: 0
    stand_ins.empty_cuda = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)


def main() -> None:
    _without_a_gpu()
    torch.manual_seed(0)
    experts, top_k, hidden, inner = 5, 2, 22, 14
    for nets in networks(experts, hidden, inner, torch.float32, "cpu"):
        for tokens in (1, 9) if nets.stacked else (129,):
            x, weights = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
            index = torch.rand(tokens, experts).topk(top_k).indices
            index[tokens // 2, -1] = experts  # a pair of nobody's
            with torch.no_grad():
                want = [in_steps(x, index, weights, nets) for _ in range(2)][1]
                assert layer_call.call(x, index, weights, nets) is None  # once in steps, which choose
                for _ in range(3 if tokens < 9 else 2):
                    got = layer_call.call(x, index, weights, nets)
                    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
            print(tokens)
    for nets in networks(experts, hidden, inner, torch.float32, "cpu"):
        fused_as_in_steps(nets, 129 if nets.stacked else 9)


def fused_as_in_steps(nets: Networks, tokens: int) -> None:
    """A layer by fused products, whose launches come again, beside the same in steps."""
    experts, hidden, top_k = nets.up.shape[0], nets.down.shape[2 if nets.stacked else 1], 2
    kind = nets.activation or ("geglu" if nets.gelu else "swiglu")
    x, weights = torch.empty(tokens, hidden), torch.rand(tokens, top_k)
    index = torch.empty(tokens, top_k, dtype=torch.int64)
    served = []
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            x.copy_(torch.randn(tokens, hidden))
            index.copy_(torch.rand(tokens, experts + 1).topk(top_k).indices)
            got = experts_forward(
                x, index, weights, nets.up, nets.down, nets.up_bias, nets.down_bias, activation=kind,
                stacked=nets.stacked,
            )  # fmt: skip
            want = in_steps(x, index, weights, nets)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
            served.append(len(LAUNCHES))
    assert served[1] > served[0], "the second call binds"
    print("fused", tokens)


if __name__ == "__main__":
    main()
