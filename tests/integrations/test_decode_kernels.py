"""Layers for one token or a few: two kernels without a sort, right for every gate, and who runs by them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._dynamo.testing import CompileCounter

import multigemm as mg
from multigemm.integrations import expert_network, fused_experts, layer_ops
from multigemm.integrations.bound_layer import run_bound
from multigemm.integrations.expert_network import Network, takes_few_tokens
from multigemm.integrations.fused_experts import run_experts
from multigemm.nn import Experts, moe
from tests.support.decode_cases import LIMITS, NETWORKS, by_pairs, parameters_of

pytest.importorskip("triton")
EXPERTS, TOP_K, HIDDEN, INNER = 32, 4, 64, 48


def layer(tokens: int = 1, **changed: Any) -> tuple[Any, ...]:
    """x, index, weights, up, down and their biases."""
    given: dict[str, Any] = {
        "x": torch.ones(tokens, HIDDEN), "index": torch.zeros(tokens, TOP_K, dtype=torch.int64),
        "weights": torch.ones(tokens, TOP_K), "up": torch.ones(EXPERTS, 2 * INNER, HIDDEN),
        "down": torch.ones(EXPERTS, HIDDEN, INNER), "up_bias": None, "down_bias": torch.ones(EXPERTS, HIDDEN),
    }  # fmt: skip
    return tuple((given | changed).values())


LEFT_TO_PRODUCTS: dict[str, tuple[Network, tuple[Any, ...]]] = {
    "pairs that share experts": (Network(), layer(3)),
    "no tokens": (Network(), layer(0)),
    "no gate": (Network("silu"), layer()),
    "stacked weights": (Network(stacked=True), layer()),
    "bits that other tokens must not change": (Network(batch_invariant=True), layer()),
    "another backend": (Network(backend="cupy"), layer()),
    "two dtypes": (Network(), layer(down=torch.ones(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16))),
    "weights of a third dtype": (Network(), layer(weights=torch.ones(1, TOP_K, dtype=torch.float64))),
    "lines with gaps": (Network(), layer(up=torch.ones(EXPERTS, 2 * INNER, 2 * HIDDEN)[..., ::2])),
    "a bias with gaps": (Network(), layer(down_bias=torch.ones(EXPERTS, 2 * HIDDEN)[:, ::2])),
    "more columns than a grid has blocks": (
        Network(),
        layer(x=torch.ones(1, 1 << 17), up=torch.ones(1).expand(EXPERTS, 96, 1 << 17),
              down=torch.ones(1).expand(EXPERTS, 1 << 17, 48), down_bias=None),
    ),
    "x of another width": (Network(), layer(x=torch.ones(1, HIDDEN - 16))),
    "up of an odd width": (Network(), layer(up=torch.ones(EXPERTS, 2 * INNER - 1, HIDDEN))),
    "up of another width": (Network(), layer(up=torch.ones(EXPERTS, 2 * INNER - 2, HIDDEN))),
    "down of fewer experts": (Network(), layer(down=torch.ones(EXPERTS - 1, HIDDEN, INNER))),
    "a short bias": (Network(), layer(up_bias=torch.ones(EXPERTS, INNER))),
    "an index that is no integer": (Network(), layer(index=torch.zeros(1, TOP_K))),
    "an index of one row": (Network(), layer(index=torch.zeros(TOP_K, dtype=torch.int64))),
    "a single number as an index": (Network(), layer(index=torch.tensor(0))),
    "weights of another shape": (Network(), layer(weights=torch.ones(1, TOP_K - 1))),
    "no experts for a token": (Network(), layer(index=torch.zeros(1, 0, dtype=torch.int64), weights=torch.ones(1, 0))),
    "very many experts for a token": (
        Network(), layer(index=torch.zeros(1, 1025, dtype=torch.int64), weights=torch.ones(1, 1025))
    ),
    "no width": (
        Network(),
        layer(x=torch.ones(1, 0), up=torch.ones(EXPERTS, 96, 0), down=torch.ones(EXPERTS, 0, 48), down_bias=None),
    ),
    "float8": (Network(), tuple(
        t.to(torch.float8_e4m3fn) if t is not None and t.is_floating_point() else t for t in layer(down_bias=None)
    )),
    "a negated view": (Network(), layer(x=torch._neg_view(torch.ones(1, HIDDEN)))),
    "another device": (Network(), layer(up=torch.ones(EXPERTS, 2 * INNER, HIDDEN, device="meta"))),
}  # fmt: skip
WITHOUT_MEANING: dict[str, Any] = {"glu_limit": -1.0, "glu_layout": "nonsense", "glu_beta": float("nan")}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_network, "kernels_for", lambda x, kernels: kernels())


@pytest.mark.parametrize("case", LEFT_TO_PRODUCTS)
def test_layers_that_are_left_to_products(case: str, as_on_a_gpu: None) -> None:
    assert takes_few_tokens(Network(), *layer())
    assert takes_few_tokens(Network(backend="triton"), *layer(2))
    net, given = LEFT_TO_PRODUCTS[case]
    assert not takes_few_tokens(net, *given)


def test_gates_without_a_meaning_are_refused(as_on_a_gpu: None) -> None:
    for name, value in WITHOUT_MEANING.items():
        for _ in range(2):
            with pytest.raises(mg.InvalidProblem):
                takes_few_tokens(Network(**{name: value}), *layer())


def test_calls_that_others_look_at_are_left_to_products(as_on_a_gpu: None) -> None:
    """Gradients, tangents and transforms; autocast has cast the operands before."""
    x, *rest = layer()
    assert not takes_few_tokens(Network(), x.clone().requires_grad_(), *rest)
    with torch.no_grad():
        assert takes_few_tokens(Network(), x.clone().requires_grad_(), *rest)
    with forward_ad.dual_level():
        dual: torch.Tensor = forward_ad.make_dual(x, torch.ones_like(x))  # type: ignore[no-untyped-call]
        assert not takes_few_tokens(Network(), dual, *rest)
    asked: list[bool] = []

    def one(x: torch.Tensor) -> torch.Tensor:
        asked.append(takes_few_tokens(Network(), x, *rest))
        return x

    torch.func.vmap(one)(x.expand(3, 1, HIDDEN))
    assert asked == [False]


def test_a_graph_does_not_depend_on_the_number_of_tokens() -> None:
    experts, compiled = Experts(EXPERTS, HIDDEN, INNER, backend="cpu"), CompileCounter()
    step = torch.compile(experts, backend=compiled, dynamic=True)
    with torch.no_grad():
        for tokens in (8, 40, 7, 2):
            step(*layer(tokens)[:3])
    assert compiled.frame_count == 1


def test_without_a_gpu_products_run() -> None:
    assert not takes_few_tokens(Network(), *layer())


def test_layers_whose_way_is_not_told_use_them(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    monkeypatch.setattr(fused_experts, "has_fast_fused_products", lambda x, backend: True)
    monkeypatch.setattr(moe, "fuses_unless_told", lambda *given: False)  # as on a GPU for these gates

    def noted(net: Network, x: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        if takes_few_tokens(net, x, *rest):
            ran.append(len(x))
            return torch.zeros_like(x)
        return None

    monkeypatch.setattr(fused_experts, "result_of_few_tokens", noted)

    def uses(tokens: int, *, gradients: bool = False, **options: Any) -> bool:
        del ran[:]
        x, index, weights, *_ = layer(tokens)
        with torch.set_grad_enabled(gradients):
            Experts(EXPERTS, HIDDEN, INNER, backend=options.pop("backend", "auto"), **options)(x, index, weights)
        return ran == [tokens]

    assert uses(1) and uses(2) and uses(1, activation="geglu", bias=True)
    assert not uses(3) and not uses(1, fused=False) and not uses(1, gradients=True)
    assert not uses(1, batch_invariant=True) and not uses(1, activation="silu") and not uses(1, backend="cpu")
    monkeypatch.setattr(fused_experts, "has_fast_fused_products", lambda x, backend: False)
    assert not uses(1)


def test_weights_are_read_in_words_of_16_bytes() -> None:
    """By both kernels, compiled for an H100; the second one reads ahead, and waits for the first by itself."""
    kernels = layer_ops.decode_kernels()
    compiler, target = pytest.importorskip("triton.compiler"), pytest.importorskip("triton.backends.compiler")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("another test's interpreter has replaced the compiler in this process")
    like = {torch.bfloat16: "*bf16", torch.int64: "*i64"}
    long: dict[str, Any] = {
        "x": torch.ones(1, 2048),
        "up": torch.ones(1, 2 * INNER, 2048),
        "down": torch.ones(1, 2048, INNER),
    }
    made = layer(**long, down_bias=None)
    given: list[Any] = [None if t is None else t.bfloat16() if t.is_floating_point() else t for t in made]
    hidden = torch.ones(TOP_K, INNER, dtype=torch.bfloat16)
    steps = kernels.decode_steps(Network(), *given, hidden, torch.empty_like(given[0]))
    for step, waits in zip(steps, (False, True), strict=True):
        values: dict[str, Any] = {**step.values, "EARLY": True}
        names = step.kernel.arg_names
        constants = {name: value for name, value in values.items() if name.isupper()}
        types = {
            name: "constexpr" if name in constants
            else like[values[name].dtype] if isinstance(values[name], torch.Tensor) else "i32" for name in names
        }  # fmt: skip
        aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name not in constants}
        constexprs = {(names.index(name),): value for name, value in constants.items()}
        source = compiler.ASTSource(step.kernel, types, constexprs, aligned)
        ptx = compiler.compile(source, target=target.GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert ("cp.async.cg.shared.global" if waits else "ld.global.L1::evict_first.L2::cache_hint.v4.b32") in ptx
        assert ("griddepcontrol.wait" in ptx) == waits


# --- on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "tokens", "dtype"),
    [
        ((8, 2048, 1024), 1, torch.bfloat16), ((128, 2048, 768), 3, torch.bfloat16), ((64, 70, 34), 2, torch.float32),
        ((40, 4096, 33), 2, torch.float16), ((16, 130, 520), 1, torch.float64),
    ],
)  # fmt: skip
def test_a_layer_for_few_tokens_is_the_loop_over_pairs(
    sizes: tuple[int, int, int], tokens: int, dtype: torch.dtype
) -> None:
    """Eagerly, bound, and in a graph whose routing changes, with the same bits; lying experts count nothing."""
    torch.manual_seed(0)
    experts, hidden, _ = sizes
    for net, bias in NETWORKS:
        parameters = parameters_of(bias, dtype, "cuda", sizes)
        x = torch.randn(tokens, hidden, device="cuda").to(dtype)
        index, weights = torch.zeros(tokens, 4, dtype=torch.int64, device="cuda"), torch.rand(tokens, 4, device="cuda")
        with torch.no_grad():
            assert takes_few_tokens(net, x, index, weights, *parameters)
            graph = torch.cuda.CUDAGraph()
            run_experts(net, x, index, weights, *parameters)
            with torch.cuda.graph(graph):
                captured = run_experts(net, x, index, weights, *parameters)
            for step in range(3):
                index.copy_(torch.randint(0, experts, index.shape))
                index[-1, -1] = (experts, -1, 2**40)[step]
                got = run_experts(net, x, index, weights, *parameters)
                want = by_pairs(net, x, index, weights, *parameters)
                assert (got.double() - want).norm() <= LIMITS[dtype] * want.norm()
                graph.replay()
                bound = run_bound(net, True, x, index, weights, *parameters)
                assert torch.equal(captured, got)
                assert bound is not None and torch.equal(bound, got)
