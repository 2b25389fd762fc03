"""The modules compute what a loop over torch.nn.Linear computes, and hold their weights the way users know."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multigemm as mg
from multigemm.integrations.expert_network import combine, dispatch, route
from multigemm.integrations.layer_ops import geglu, swiglu
from multigemm.nn import Experts, GroupedLinear, MoE
from tests.support.layer_cases import EXPERTS, TOKENS, VARIANTS, layer_of


def test_grouped_linear_is_a_stack_of_linears() -> None:
    layers = [nn.Linear(5, 4) for _ in range(3)]
    grouped = GroupedLinear(3, 5, 4)
    assert {k: tuple(v.shape) for k, v in grouped.state_dict().items()} == {"weight": (3, 4, 5), "bias": (3, 4)}
    stacked = {name: torch.stack([x.state_dict()[name] for x in layers]) for name in ("weight", "bias")}
    grouped.load_state_dict(stacked)
    x = torch.randn(9, 5, requires_grad=True)
    parts = torch.split(x, [2, 0, 7])
    want = torch.cat([layer(part) for layer, part in zip(layers, parts, strict=True)])
    for cut in ({"sizes": [2, 0, 7]}, {"ends": [2, 2, 9]}, {"offsets": [0, 2, 2, 9]}):
        torch.testing.assert_close(grouped(x, **cut), want)
        got = grouped(x, **{k: torch.tensor(v) for k, v in cut.items()})
        torch.testing.assert_close(got, want)
    assert grouped.bias is not None
    got_grads = torch.autograd.grad(got.square().sum(), (x, grouped.weight, grouped.bias))
    want_grads = torch.autograd.grad(want.square().sum(), (x, *(p for y in layers for p in y.parameters())))
    torch.testing.assert_close(got_grads[0], want_grads[0])
    torch.testing.assert_close(got_grads[1], torch.stack(want_grads[1::2]))
    torch.testing.assert_close(got_grads[2], torch.stack(want_grads[2::2]))
    assert grouped(torch.randn(3, 6, 5)).shape == (3, 6, 4)


def test_repr_init_and_refusals() -> None:
    layer = GroupedLinear(3, 16, 4, bias=False, activation="gelu", backend="cpu", dtype=torch.bfloat16)
    assert "groups=3, in_features=16, out_features=4, bias=False, activation='gelu', backend='cpu'" in repr(layer)
    assert layer.weight.dtype is torch.bfloat16
    assert list(layer.state_dict()) == ["weight"]
    assert 0.2 < layer.weight.abs().max() <= 0.25  # 1 / sqrt(16), as torch.nn.Linear
    with pytest.raises(mg.InvalidProblem, match="did you mean 'gelu'"):
        GroupedLinear(3, 5, 4, activation="gelo")
    for arguments, words in (
        ((-1, 16, 4), "groups=-1; it must be a whole number"), ((3, 1.5, 4), "in_features=1.5; it must"),
        ((3, 16, "4"), "out_features='4'; it must"),
    ):  # fmt: skip
        with pytest.raises(mg.InvalidProblem, match=words):
            GroupedLinear(*arguments)
    with pytest.raises(mg.InvalidProblem, match=r"dtype=torch.int32; weights that learn are one of .*torch.bfloat16"):
        GroupedLinear(3, 16, 4, dtype=torch.int32)
    for make in (lambda **more: GroupedLinear(3, 5, 4, **more), lambda **more: MoE(8, 6, 4, **more)):
        assert make(backend="triton,cpu") is not None
        with pytest.raises(mg.UnknownBackend, match="unknown backend 'cpuu': did you mean 'cpu'"):
            make(backend="triton,cpuu")
    for sizes, words in (((8, -6, 4), "intermediate_size=-6"), ((8.0, 6, 4), "hidden_size=8.0"), ((8, 6, "4"), "'4'")):
        with pytest.raises(mg.InvalidProblem, match=words):
            MoE(*sizes)
    with pytest.raises(mg.InvalidProblem, match="top_k='2'; it must"):
        MoE(8, 6, 4, top_k="2")  # type: ignore[arg-type]
    with pytest.raises(mg.InvalidProblem, match="did you mean 'swiglu'"):
        Experts(4, 8, 6, activation="swigl")
    assert "num_experts=4, hidden_size=8, intermediate_size=6, activation='swiglu'" in repr(MoE(8, 6, 4))
    meta = MoE(8, 6, 4, device="meta")
    assert all(p.device.type == "meta" for p in meta.parameters())


def test_cuts_on_the_host_are_checked_and_may_be_empty() -> None:
    assert GroupedLinear(0, 4, 4)(torch.randn(3, 4), sizes=[]).eq(0).all()
    layer, x = GroupedLinear(2, 4, 4), torch.randn(5, 4)
    for cut, words in (
        ({"sizes": [2, 999]}, "sizes add up to 1001"), ({"ends": [3, 2]}, "must not fall"),
        ({"offsets": [0, 2, 6]}, "past the jagged extent 5"), ({"sizes": [1.5, 2]}, "sizes holds 1.5"),
        ({"sizes": [1, 2, 2]}, "2 groups"),
    ):  # fmt: skip
        with pytest.raises(mg.InvalidProblem, match=words):
            layer(x, **cut)
        with pytest.raises(mg.InvalidProblem, match=words):
            layer.to("meta")(x.to("meta"), **cut)  # another device than that of the cut
        layer.to_empty(device="cpu")
    with pytest.raises(mg.InvalidProblem, match=r"a has shape \(1, 5, 4\)"):
        layer(x[None], sizes=[2, 3])


@pytest.mark.parametrize(
    ("index", "weights", "words"),
    [
        (torch.zeros(6, 2), None, "torch.float32; expert numbers are integers"),
        (torch.zeros(6, 2, dtype=torch.bool), None, "torch.bool; expert numbers are integers"),
        (torch.zeros(6, dtype=torch.int64), torch.ones(6), r"index \(6,\), weights \(6,\): .* must be \[tokens, k\]"),
        (torch.zeros(7, 2, dtype=torch.int64), torch.ones(7, 2), r"x \(6, 4\), index \(7, 2\)"),
        (None, torch.ones(6, 1), r"index \(6, 2\), weights \(6, 1\)"),
        (None, torch.ones(2, 6), r"index \(6, 2\), weights \(2, 6\)"),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_experts_refuse_what_is_no_routing(
    index: Tensor | None, weights: Tensor | None, words: str, fused: bool
) -> None:
    layer, right = Experts(3, 4, 5, fused=fused), torch.zeros(6, 2, dtype=torch.int64)
    given = (right if index is None else index, torch.ones(6, 2) if weights is None else weights)
    with pytest.raises(mg.InvalidProblem, match=words):
        layer(torch.randn(6, 4), *given)


def test_a_mixture_needs_an_expert_and_takes_no_more_than_there_are() -> None:
    with pytest.raises(mg.InvalidProblem, match="top_k=5"):
        MoE(8, 6, 4, 5)
    with pytest.raises(mg.InvalidProblem, match="num_experts=0; it must be 1 or more"):
        MoE(8, 6, 0)


def loop(moe: MoE, x: Tensor) -> Tensor:
    """The same layer as a loop over experts."""
    e: Any = moe.experts
    _, index, weights = moe.route(x)
    y = torch.zeros_like(x)
    act: Any = {"swiglu": F.silu, "geglu": F.gelu, "gelu": F.gelu, "relu": F.relu, "silu": F.silu}[e.activation]
    for g in range(e.num_experts):
        token, k = torch.where(index == g)
        bias = getattr(e, f"{e.first}_bias")
        hidden = F.linear(x[token], getattr(e, e.first)[g], None if bias is None else bias[g])
        if e.activation in ("swiglu", "geglu"):
            gate, up = hidden.chunk(2, -1)
            hidden = act(gate) * up
        else:
            hidden = act(hidden)
        out = F.linear(hidden, e.down_proj[g], None if e.down_proj_bias is None else e.down_proj_bias[g])
        y = y.index_add(0, token, out * weights[token, k, None].to(out.dtype))
    return y


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu", "relu", "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_moe_is_the_loop_over_experts(activation: str, bias: bool) -> None:
    torch.manual_seed(0)
    moe = MoE(8, 6, 5, 2, activation=activation, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        moe.gate.weight[3] -= 100  # nobody asks the fourth expert
    x = torch.rand(7, 8, dtype=torch.float64, requires_grad=True)
    got, want = moe(x), loop(moe, x)
    torch.testing.assert_close(got, want)
    inputs = [x, *moe.parameters()]
    grads = [torch.autograd.grad(y.square().sum(), inputs) for y in (got, want)]
    for g, w in zip(*grads, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)  # the router works in float32
    assert torch.equal(grads[0][-1][3], torch.zeros_like(grads[0][-1][3]))


def test_moe_keeps_shapes_returns_logits_and_repeats_its_bits() -> None:
    moe = MoE(8, 6, 4, 3, normalize=False)
    x = torch.randn(2, 5, 8)
    y, logits = moe(x, return_logits=True)
    assert y.shape == x.shape
    assert logits.shape == (10, 4)
    assert all(torch.equal(moe(x), y) for _ in range(3))
    assert moe(torch.randn(0, 8)).shape == (0, 8)
    assert copy.deepcopy(moe)(x).equal(y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moe.experts(x.view(-1, 8), *moe.route(x.view(-1, 8))[1:]).dtype is torch.bfloat16


def test_routing_undoes_itself() -> None:
    index = torch.tensor([[2, 0], [2, 9], [0, 2], [1, -1]])  # 9 and -1: nobody's here
    routing = route(index, 4)
    assert routing.ends.tolist() == [2, 3, 6, 6]
    assert route(index, 1 << 16).ends[[0, 9, -1]].tolist() == [2, 7, 7]
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    rows = dispatch(x, routing)
    assert torch.equal(rows[:2], x[[0, 2]])
    assert torch.equal(rows[2], x[3])
    torch.testing.assert_close(combine(rows, weights, routing), x * weights.sum(1, keepdim=True))
    assert torch.autograd.gradcheck(lambda x, w: combine(dispatch(x, routing) ** 2, w, routing), (x, weights))
    assert torch.autograd.gradgradcheck(lambda x, w: combine(dispatch(x, routing) ** 2, w, routing), (x, weights))


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "plain"), [(swiglu, F.silu), (geglu, F.gelu)])
def test_gates(gate: Any, plain: Any) -> None:
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(gate(x), plain(x[:, :3]) * x[:, 3:])
    assert torch.autograd.gradcheck(gate, x)
    assert torch.autograd.gradgradcheck(gate, x)
    torch.library.opcheck(torch.ops.multigemm.gated.default, (x.float().detach().requires_grad_(), gate is geglu))
    half = torch.randn(50, 64, dtype=torch.bfloat16)
    exact = plain(half[:, :32].double()) * half[:, 32:].double()
    assert torch.equal(gate(half), exact.to(torch.bfloat16)) or (gate(half) - exact).abs().max() < 0.05


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
