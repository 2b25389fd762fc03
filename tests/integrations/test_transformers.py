"""Models of transformers give the same answers with `experts_implementation="multigemm"`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed: pip install transformers", allow_module_level=True)

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 61,
    "max_position_embeddings": 64, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"intermediate_size": 24, "moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "intermediate_size": 24, "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        },
    ),
    "gpt_oss": ("GptOss", {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    import multigemm.integrations.transformers  # noqa: F401  (registers the name "multigemm")

    kind, extra = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **extra})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():  # expert weights may start as empty memory
        torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


def run(model: Any, implementation: str, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.set_experts_implementation(implementation)
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return output.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def close(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> bool:
    """Equal up to the order of the sums, on the scale of the tensor."""
    scale = y.abs().max().item() + 1e-12
    return (x - y).abs().max().item() <= scale * 256 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_agree_with_eager_and_grouped_mm(name: str) -> None:
    model, ids = build(name, torch.float64), torch.randint(3, 61, (2, 7))
    logits, grads = run(model, "multigemm", ids)
    for other in ("eager", "grouped_mm"):
        if other == "grouped_mm":  # torch's own kernel does not know float64
            model = build(name, torch.float32)
            logits, grads = run(model, "multigemm", ids)
        want, want_grads = run(model, other, ids)
        assert close(logits, want, want.dtype)
        assert want_grads.keys() <= grads.keys()
        assert all(close(grads[n], want_grads[n], want.dtype) for n in want_grads), other


@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_the_tokens_of_eager(name: str) -> None:
    model, ids = build(name).eval(), torch.randint(3, 61, (2, 5))
    produced = []
    for implementation in ("multigemm", "eager"):
        model.set_experts_implementation(implementation)
        produced.append(model.generate(ids, max_new_tokens=4, do_sample=False))
    assert torch.equal(*produced)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_models_on_a_gpu_agree_with_eager(name: str) -> None:
    model, ids = build(name, torch.float64).cuda(), torch.randint(3, 61, (2, 7), device="cuda")
    logits, grads = run(model, "multigemm", ids)
    want, want_grads = run(model, "eager", ids)
    assert close(logits, want, want.dtype)
    assert want_grads.keys() <= grads.keys()
    assert all(close(grads[n], want_grads[n], want.dtype) for n in want_grads)
    produced = []
    for implementation in ("multigemm", "eager"):
        model.eval().set_experts_implementation(implementation)
        produced.append(model.generate(ids, max_new_tokens=6, do_sample=False))
    assert torch.equal(*produced)


def test_a_whole_model_compiles_into_one_graph() -> None:
    model, ids = build("mixtral").eval(), torch.randint(3, 61, (2, 7))
    model.set_experts_implementation("multigemm")
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, want)


def test_bfloat16_is_as_close_to_float32_as_eager_is() -> None:
    ids = torch.randint(3, 61, (2, 7))
    exact = run(build("qwen3_moe"), "eager", ids)[0]
    errors = {
        name: (run(build("qwen3_moe", torch.bfloat16), name, ids)[0].float() - exact).abs().mean().item()
        for name in ("eager", "multigemm")
    }
    assert errors["multigemm"] <= 1.5 * errors["eager"]


def test_pairs_of_other_ranks_are_skipped() -> None:
    """Expert numbers past the end mark pairs that another rank computes; they must not leave a trace."""
    layer = build("mixtral").model.layers[0].mlp.experts
    layer.config._experts_implementation_internal = "multigemm"
    layer._is_expert_parallel = True
    x = torch.randn(5, 32, requires_grad=True)
    index = torch.tensor([[0, 4], [4, 4], [1, 2], [3, 4], [2, 0]])
    weights = torch.rand(5, 2, requires_grad=True)
    y = layer(x, index, weights)
    y.square().sum().backward()
    kept = weights.detach() * (index < 4)
    layer.config._experts_implementation_internal = "eager"
    want = layer(x.detach(), index.clamp(max=3), kept)
    assert torch.allclose(y, want, atol=1e-5)
    assert y[1].abs().max() == 0
    assert x.grad is not None
    assert weights.grad is not None
    assert x.grad[1].abs().max() == 0
    assert torch.isfinite(x.grad).all()
    assert weights.grad[index == 4].abs().max() == 0


def test_the_name_is_registered() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from multigemm.integrations.transformers import experts_forward

    assert ALL_EXPERTS_FUNCTIONS["multigemm"] is experts_forward


# --- gates of a model's own --------------------------------------------------------------------------


def gpt_oss_experts() -> Any:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts: Any = GptOssExperts(GptOssConfig(hidden_size=32, intermediate_size=16, num_local_experts=4))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


def test_the_gate_of_gpt_oss_is_one_of_ours_and_runs_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    import multigemm.integrations.transformers

    module: Any = multigemm.integrations.transformers
    torch.manual_seed(0)
    experts, x = gpt_oss_experts(), torch.randn(10, 32)
    index, weights = torch.rand(10, 4).topk(2).indices, torch.rand(10, 2)
    experts.config._experts_implementation_internal = "eager"
    want = experts(x, index, weights)
    ran: list[Any] = []
    original = module.run_experts

    def noted(net: Any, *given: Any) -> Any:
        ran.append(net)
        return original(net, *given)

    monkeypatch.setattr(module, "run_experts", noted)
    experts.config._experts_implementation_internal = "multigemm"
    torch.testing.assert_close(experts(x, index, weights), want, rtol=1e-4, atol=1e-5)
    assert ran[0].gate == ("swiglu", "interleaved", 1.702, 1.0, 7.0) and ran[0].stacked


@pytest.mark.parametrize("change", ["another slope", "another limit", "a limit of one side", "nothing"])
def test_a_gate_that_differs_a_little_is_never_guessed_at(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigemm.integrations import transformers as module

    experts = gpt_oss_experts()

    def own(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        limit = 7.5 if change == "another limit" else 7.0
        gate = gate.clamp(max=limit)
        up = up.clamp(max=limit) if change == "a limit of one side" else up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(gate * (1.7 if change == "another slope" else 1.702))

    monkeypatch.setattr(experts, "_apply_gate", own)
    assert (module.gate_of(experts) is not None) is (change == "nothing")
    x, index, weights = torch.randn(10, 32), torch.rand(10, 4).topk(2).indices, torch.rand(10, 2)
    experts.config._experts_implementation_internal = "eager"
    want = experts(x, index, weights)
    experts.config._experts_implementation_internal = "multigemm"
    torch.testing.assert_close(experts(x, index, weights), want, rtol=1e-4, atol=1e-5)


def test_a_gate_that_cannot_be_asked_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from multigemm.integrations import transformers as module

    experts = gpt_oss_experts()

    def refuses(gate_up: torch.Tensor) -> torch.Tensor:
        raise ValueError("bfloat16 only")

    monkeypatch.setattr(experts, "_apply_gate", refuses)
    assert module.gate_of(experts) is None
