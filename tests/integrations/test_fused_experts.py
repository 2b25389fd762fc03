"""Experts by fused products: the same results and gradients as in steps, less kept for backward."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.flop_counter
from torch import Tensor

import multigemm as mg
from multigemm.integrations import expert_network, fused_experts
from multigemm.integrations.expert_network import Network
from multigemm.integrations.gradients import gate_by_torch
from multigemm.nn import Experts, MoE, experts_forward, moe
from tests.support.row_copies import note_row_copies

NETWORKS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "geglu with biases": {"activation": "geglu", "bias": True},
    "gpt-oss": {
        "glu_layout": "interleaved", "glu_alpha": 1.702, "glu_beta": 1.0, "glu_limit": 0.7, "stacked": True,
        "bias": True,
    },
    "up first": {"activation": "reglu", "glu_layout": "halves_up_first", "glu_limit": 0.5},
    "plain": {"activation": "silu", "bias": True},
    "plain stacked": {"activation": "gelu_tanh", "stacked": True},
    "recompute": {"recompute": True},
}  # fmt: skip
HERE, TOKENS, TOP_K, HIDDEN, INNER = 5, 11, 2, 8, 6
EXAMPLE = Path(__file__).parents[2] / "examples" / "moe_language_model.py"
STEPS = 40


def layer(dtype: torch.dtype = torch.float64, **options: Any) -> Experts:
    return Experts(HERE, HIDDEN, INNER, fused=True, backend="cpu", dtype=dtype, **options)


def drawn(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """x, experts of which number 5 is elsewhere, and weights."""
    x = torch.randn(tokens, HIDDEN, dtype=dtype, requires_grad=True)
    index = torch.rand(tokens, HERE + 1).argsort(1)[:, :TOP_K]
    return x, index, torch.rand(tokens, TOP_K, dtype=dtype, requires_grad=True)


def in_steps(experts: Experts, *given: Tensor) -> Tensor:
    experts.fused = False
    y: Tensor = experts(*given)
    experts.fused = True
    return y


@pytest.mark.parametrize("name", NETWORKS)
def test_results_and_gradients_are_those_of_the_steps(name: str) -> None:
    torch.manual_seed(1)
    experts, given = layer(**NETWORKS[name]), drawn()
    got, want = experts(*given), in_steps(experts, *given)
    torch.testing.assert_close(got, want)
    inputs, flow = (given[0], given[2], *experts.parameters()), torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad(got, inputs, flow), torch.autograd.grad(want, inputs, flow), strict=True
    ):  # fmt: skip
        assert a.shape == b.shape
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ("all", 2),
        ("x", 0),
        ("weights", 0),
        ("up_proj", 1),
        ("up_proj_bias", 0),
        ("down_proj", 1),
        ("down_proj_bias", 1),
    ],
)
def test_rows_are_copied_for_gradients_of_weights_alone(
    wanted: str, count: int, recompute: bool, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy at a time, of the layer's input for up and of the gradient for down and its bias."""
    torch.manual_seed(3)
    experts, (x, index, weights) = layer(bias=True, recompute=recompute, stacked=stacked), drawn()
    inputs = {"x": x, "weights": weights, **{name.replace("gate_", ""): p for name, p in experts.named_parameters()}}
    for name, t in inputs.items():
        t.requires_grad_(wanted in ("all", name))
    asked = [t for t in inputs.values() if t.requires_grad]
    want = in_steps(experts, x, index, weights)
    flow = torch.randn_like(want)
    copies = note_row_copies(monkeypatch, fused_experts)
    got = torch.autograd.grad(experts(x, index, weights), asked, flow)
    assert len(copies) == count
    torch.testing.assert_close(got, torch.autograd.grad(want, asked, flow))


def test_copies_of_tokens_are_gone_before_the_gate_behind_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the copies, the gate's input and its result would exist at a time."""
    experts, (x, index, weights) = layer(), drawn()
    want, copies = in_steps(experts, x, index, weights), note_row_copies(monkeypatch, fused_experts)

    class Kernels:
        @staticmethod
        def gated_rows(gate: Any, preact: Tensor) -> Tensor:
            assert len(copies) == 1 and copies[0]() is None
            return gate_by_torch(preact, experts.network.activation, gate)

    monkeypatch.setattr(fused_experts, "copies_rows", lambda *given: True)
    monkeypatch.setattr(fused_experts, "kernels_for", lambda *given: Kernels)
    torch.testing.assert_close(experts(x.requires_grad_(), index, weights), want)
    assert len(copies) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "plain"])
def test_second_derivatives(name: str) -> None:
    torch.manual_seed(2)
    experts, (x, index, weights) = layer(**NETWORKS[name]), drawn(tokens=3)

    def of(x: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = experts(x, index, weights)
        return y

    assert torch.autograd.gradcheck(of, (x, weights))
    assert torch.autograd.gradgradcheck(of, (x, weights))


def kept(run: Any) -> tuple[int, Any]:
    """Bytes that a forward pass keeps, but for its leaves, and its result."""
    found: dict[tuple[int, int], int] = {}

    def note(x: Tensor) -> Tensor:
        if not (x.is_leaf and x.requires_grad):
            found[x.data_ptr(), x.numel()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        result = run()
    return sum(found.values()), result


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_kept_for_backward(recompute: bool, fused: bool | None) -> None:
    """4 k I bytes of bf16 for each token, and 16 k of indices; with recompute the indices alone."""
    tokens, hidden, inner = 64, 96, 80
    experts = Experts(HERE, hidden, inner, fused=fused, dtype=torch.bfloat16, recompute=recompute)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    index = torch.randint(0, HERE, (tokens, TOP_K), dtype=torch.int32)
    weights = torch.rand(tokens, TOP_K, requires_grad=True)
    size, y = kept(lambda: experts(x, index, weights))
    by_gate = 0 if recompute else 4 * TOP_K * inner
    assert size <= tokens * (1.0 * by_gate + 16 * TOP_K) + 4 * HERE
    assert y.grad_fn is not None
    experts.fused = False
    assert kept(lambda: experts(x, index, weights))[0] > 1.8 * size


def test_experts_elsewhere_contribute_nothing_whatever_their_weights() -> None:
    torch.manual_seed(3)
    experts, (x, index, weights) = layer(bias=True), drawn()
    elsewhere = index == HERE
    assert elsewhere.any()
    flows = []
    for filler in (0.0, torch.nan):
        given = torch.where(elsewhere, filler, weights.detach()).requires_grad_()
        y = experts(x, index, given)
        flows.append((y, *torch.autograd.grad(y.sum(), (x, given, *experts.parameters()))))
    for zero, nan in zip(*flows, strict=True):
        assert torch.equal(zero, nan)
    assert (flows[1][2][elsewhere] == 0).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_and_one(tokens: int) -> None:
    experts, given = layer(bias=True), drawn(tokens=tokens)
    torch.testing.assert_close(experts(*given), in_steps(experts, *given))
    grads = torch.autograd.grad(experts(*given).sum(), [*experts.parameters()])
    assert all(x.isfinite().all() for x in grads)


def test_tokens_without_experts_get_zeros() -> None:
    x, index, weights = drawn()
    y = Experts(HERE, HIDDEN, INNER, dtype=torch.float64)(x, index[:, :0], weights[:, :0])
    assert torch.equal(y, torch.zeros_like(x))


def test_weights_in_float32_beside_bfloat16_are_never_rounded() -> None:
    experts = layer(torch.bfloat16, bias=True)
    x, index, _ = drawn(torch.bfloat16)
    weights = torch.rand(TOKENS, TOP_K, requires_grad=True)
    y = experts(x, index, weights)
    y.float().square().sum().backward()
    assert weights.grad is not None and weights.grad.dtype is torch.float32
    bias = experts.down_proj_bias
    assert isinstance(bias, Tensor) and bias.grad is not None
    want = torch.zeros(HERE, HIDDEN, dtype=torch.float64)
    for t in range(TOKENS):
        for j, expert in enumerate(index[t].tolist()):
            if expert < HERE:
                want[expert] += weights[t, j].double() * (2 * y[t].float()).bfloat16().double()
    torch.testing.assert_close(bias.grad.double(), want, rtol=2**-8, atol=1e-6)


def test_a_change_in_place_before_backward_is_an_error() -> None:
    experts, (x, index, weights) = layer(), drawn()
    y = experts(x, index, weights)
    index.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_autocast_multiplies_in_its_dtype() -> None:
    experts, (x, index, weights) = layer(torch.float32), drawn(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert experts(x, index, weights).dtype is torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_compiled_layer_is_one_operator(name: str) -> None:
    """With the same bits and gradients, and one graph for all token counts and routings."""
    torch.manual_seed(6)
    graphs: list[Any] = []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if "multigemm" in str(node.target)])
        return graph.forward

    experts = layer(**NETWORKS[name])
    compiled = torch.compile(experts, backend=counted, fullgraph=True, dynamic=True)
    for tokens in (11, 7, 30):
        x, index, weights = drawn(tokens=tokens)
        leaves = [x, weights, *experts.parameters()]
        got, want = compiled(x, index, weights), experts(x, index, weights)
        assert torch.equal(got, want)
        flow = torch.randn_like(want)
        found = zip(torch.autograd.grad(got, leaves, flow), torch.autograd.grad(want, leaves, flow), strict=True)
        assert all(torch.equal(g, w) for g, w in found)
    assert [[str(target) for target in graph] for graph in graphs] == [["multigemm.experts"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swiglu", "gpt-oss", "recompute"])
def test_opcheck(name: str) -> None:
    experts, (x, index, weights) = layer(**NETWORKS[name]), drawn()
    held: Any = experts._parameters
    here = index.clamp(max=HERE - 1)  # what is kept of a pair that is elsewhere is anything
    tensors = (x, here, weights, held["gate_up_proj"], held["down_proj"])
    biases = held["gate_up_proj_bias"], held["down_proj_bias"]
    options = {**experts.network._asdict(), "keep": name != "recompute"}
    torch.library.opcheck(torch.ops.multigemm.experts.default, (*tensors, *biases), options)


def test_gradients_through_autograd_of_a_graph() -> None:
    """Forward and backward are traced whole: what backward keeps is what an eager layer keeps."""
    torch._dynamo.reset()  # other tests compile layers, too, and there is a limit to recompilations
    torch.manual_seed(6)
    experts, (x, index, weights) = layer(), drawn()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    kept: dict[str, int] = {}
    for label, run in (("graph", compiled), ("eager", experts)):
        sizes: dict[int, int] = {}

        def keep(t: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = run(x, index, weights)
        kept[label] = sum(sizes.values())
        (found,) = torch.autograd.grad(y.sum(), x)
        assert found.shape == x.shape
    assert kept["graph"] <= kept["eager"] + 64


def test_refusals() -> None:
    with pytest.raises(mg.InvalidProblem, match="glu_limit without a gate"):
        layer(activation="gelu", glu_limit=2.0)
    with pytest.raises(mg.InvalidProblem, match="only swiglu has it"):
        layer(activation="geglu", glu_alpha=1.702)
    with pytest.raises(mg.InvalidProblem, match="glu_layout"):
        layer(glu_layout="thirds")
    x, index, weights = drawn()
    up, down = torch.ones(HERE, 2 * INNER, HIDDEN), torch.ones(HERE, HIDDEN, INNER)
    with pytest.raises(mg.InvalidProblem, match="index and weights must be"):
        experts_forward(x, index, weights[:, :1], up, down)


def test_nothing_is_kept_where_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters ask for gradients always: what counts is whether autograd records."""
    asked: list[bool] = []
    original = fused_experts.first_product

    def noted(*given: Any) -> Any:
        asked.append(given[5])
        return original(*given)

    monkeypatch.setattr(fused_experts, "first_product", noted)
    experts, given = layer(), drawn()
    with torch.no_grad():
        want = experts(*given)
    assert torch.equal(experts(*given), want)
    assert asked == [False, True]


def test_a_layer_that_was_not_told_is_fused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by other backends, with weights of another dtype, quantised ones, or under a transform."""
    asked: list[str] = []

    def fused(net: Network, x: Tensor, *rest: Tensor) -> Tensor:
        asked.append(net.backend)
        return torch.zeros_like(x)

    monkeypatch.setattr(moe, "run_experts", fused)
    x, index, weights = (t.detach() for t in drawn(torch.bfloat16))
    index = index.clamp(max=HERE - 1)

    def runs_fused(of_x: torch.dtype = torch.bfloat16, **options: Any) -> bool:
        del asked[:]
        kept: dict[str, Any] = {"backend": "cpu", "dtype": torch.bfloat16} | options
        Experts(HERE, HIDDEN, INNER, **kept)(x.to(of_x), index, weights)
        return bool(asked)

    for options in NETWORKS.values():
        assert runs_fused(**options)
    assert runs_fused(backend="auto", batch_invariant=True) and runs_fused(torch.float32, dtype=torch.float32)
    with torch.no_grad():
        assert runs_fused()
    assert not runs_fused(fused=False)
    assert not runs_fused(backend="cpu,null")
    assert not runs_fused(torch.float32)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not runs_fused()
    quantised = Experts(HERE, 32, 32, activation="reglu", backend="cpu", dtype=torch.bfloat16).quantize_("int8", "row")
    del asked[:]
    quantised(torch.zeros(TOKENS, 32, dtype=torch.bfloat16), index, weights)
    assert not asked


def test_recompute_runs_fused_or_is_refused() -> None:
    for fused in (None, True):
        assert Experts(HERE, HIDDEN, INNER, fused=fused, recompute=True).fused
    for make in (Experts, MoE):
        with pytest.raises(mg.InvalidProblem, match="only fused experts recompute: leave fused out"):
            make(HERE, HIDDEN, INNER, fused=False, recompute=True)
    with pytest.raises(mg.InvalidProblem, match="recompute=True takes no quantised weights yet"):
        Experts(HERE, 32, 32, recompute=True).quantize_("int8", "row")


class OnGpu:
    """What the choice of a way reads of tokens."""

    is_cpu, is_cuda, dtype = False, True, torch.bfloat16

    def get_device(self) -> int:
        return 0


def test_where_fused_products_are_the_faster_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = OnGpu()
    has_fast_fused_products = expert_network.has_fast_fused_products
    monkeypatch.setattr(expert_network, "_capability", lambda index: (9, 0))
    assert has_fast_fused_products(x, "auto") and has_fast_fused_products(x, "triton,cupy")
    assert not has_fast_fused_products(x, "numba") and not has_fast_fused_products(x, "auto,cublas")
    assert not has_fast_fused_products(torch.zeros(1, dtype=torch.bfloat16), "auto")
    monkeypatch.setattr(expert_network, "_capability", lambda index: (8, 0))
    assert not has_fast_fused_products(x, "auto")
    monkeypatch.setattr(OnGpu, "dtype", torch.float32)
    assert not has_fast_fused_products(x, "auto")


def test_which_layers_are_fused_on_a_gpu_that_were_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """For memory if gradients are wanted; in 16 bits on Hopper GPUs by what was measured."""
    x: Any = OnGpu()

    def fuses(gradients: bool, own_gate: bool = False, **options: Any) -> bool:
        return expert_network.fuses_unless_told(Network(**options), own_gate, x, gradients)

    monkeypatch.setattr(expert_network, "_capability", lambda index: (9, 0))
    assert not fuses(True) and fuses(True, own_gate=True) and fuses(False, own_gate=True)
    assert not fuses(True, own_gate=True, batch_invariant=True)
    assert not fuses(True, own_gate=True, backend="numba")
    monkeypatch.setattr(expert_network, "_capability", lambda index: (8, 0))
    assert fuses(True) and fuses(True, own_gate=True) and not fuses(False) and not fuses(False, own_gate=True)
    assert not fuses(True, batch_invariant=True) and not fuses(True, backend="numba")
    monkeypatch.setattr(expert_network, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(OnGpu, "dtype", torch.float32)
    assert fuses(True) and not fuses(False)
    monkeypatch.setattr(OnGpu, "dtype", torch.float64)
    assert not fuses(True)
    monkeypatch.setattr(OnGpu, "dtype", torch.float32)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert not fuses(True)


# --- a language model learns what it learns with a plain loop over the experts -------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    """The example as a module."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


@pytest.fixture(scope="module")
def plain(model: Any) -> Any:
    """Loss curves of the plain layer, of two seeds."""
    return [model.curve(model.PlainMoE, STEPS, seed) for seed in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
def test_the_loss_curve_is_that_of_a_plain_layer(options: dict[str, Any], model: Any, plain: Any) -> None:
    fused, (same, other) = model.curve(MoE, STEPS, fused=True, **options), plain
    assert fused[-1] < 0.6 * fused[0]
    assert model.apart(fused, same) < 0.01 * model.apart(other, same), "within the noise of two seeds, by far"


@pytest.mark.slow
def test_a_lost_gradient_is_seen(model: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distance of two seeds is no blind measure: routers that do not learn give another curve."""
    whole = fused_experts.gate_backward

    def without(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        dpreact, weighted, dweights = whole(*given)
        return dpreact, weighted, torch.zeros_like(dweights)

    monkeypatch.setattr(fused_experts, "gate_backward", without)
    wrong = model.curve(MoE, STEPS, fused=True)
    assert model.apart(wrong, plain[0]) > 0.01 * model.apart(plain[1], plain[0])


@pytest.mark.gpu
def test_the_loss_curve_on_a_gpu(model: Any) -> None:
    asked = {"device": "cuda", "width": 128, "experts": 16}
    fused, same = model.curve(MoE, STEPS, fused=True, **asked), model.curve(model.PlainMoE, STEPS, **asked)
    assert model.apart(fused, same) < 0.2 * model.apart(model.curve(model.PlainMoE, STEPS, seed=1, **asked), same)
