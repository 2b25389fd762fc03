"""Experts with quantised weights: the layer of `multigemm.nn`, and models of transformers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.nn import Experts
from multigemm.quantize import Quantized, dequantize, quantize

E8M0 = torch.float8_e8m0fnu
FORMATS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "float8 blocks": ("e4m3", "128x128", {}),
    "float8 rows": ("e5m2", "row", {}),
    "int8": ("int8", "row", {"scale_dtype": torch.bfloat16}),
    "uint4": ("uint4", "1x32", {}),
    "mxfp4": ("e2m1", "1x32", {"scale_dtype": E8M0}),
}


def meant(weight: Tensor, name: str) -> Tensor:
    """What a quantised stack [E, out, in] stands for."""
    format, scale, more = FORMATS[name]
    q = quantize(weight.mT, format, scale, side="b", zero=format == "uint4", **more)
    found: Tensor = dequantize(q, side="b", format=format).mT
    return found


def layer(activation: str, bias: bool) -> Experts:
    torch.manual_seed(0)
    return Experts(4, 96, 64, activation=activation, bias=bias, dtype=torch.bfloat16)


def routed(tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(tokens, 96, dtype=torch.bfloat16)
    return x, torch.stack([torch.randperm(4)[:2] for _ in range(tokens)]), torch.rand(tokens, 2).bfloat16()


def close(got: Tensor, want: Tensor, part: float = 0.02) -> None:
    got, want = got.detach().double(), want.detach().double()
    assert float((got - want).norm() / want.norm()) < part


@pytest.mark.parametrize(("activation", "bias"), [("swiglu", False), ("geglu", True), ("gelu", True)])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_with_quantised_weights(name: str, activation: str, bias: bool) -> None:
    experts, plain = layer(activation, bias), layer(activation, bias)
    format, scale, more = FORMATS[name]
    with torch.no_grad():
        weights: Any = (getattr(plain, plain.first), plain.down_proj)
        for weight in weights:
            weight.copy_(meant(weight, name))
    assert experts.quantize_(format, scale, **more) is experts
    x, index, weights = routed()
    x.requires_grad_()
    y = experts(x, index, weights)
    dx = torch.autograd.grad(y.float().square().sum(), x)[0]
    want = plain(x, index, weights)
    close(y, want)
    close(dx, torch.autograd.grad(want.float().square().sum(), x)[0], 0.04)
    with torch.no_grad():
        for _ in range(3):  # a layer of plain weights would be bound by now
            assert torch.equal(experts(x, index, weights), y)
    assert f"weight_format='{format}'" in repr(experts)


def test_stacked_weights_and_a_gate_with_numbers() -> None:
    """As gpt-oss has them: [E, in, out], interleaved, limited."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"glu_layout": "interleaved", "glu_alpha": 1.702, "glu_beta": 1.0, "glu_limit": 7.0}
    experts, plain = (Experts(4, 96, 64, stacked=True, dtype=torch.bfloat16, **options) for _ in range(2))
    plain.load_state_dict(experts.state_dict())
    weights: Any = (plain.gate_up_proj, plain.down_proj)
    with torch.no_grad():
        for weight in weights:
            weight.copy_(meant(weight.mT, "mxfp4").mT)
        experts.quantize_("e2m1", "1x32", scale_dtype=E8M0)
        close(experts(*routed()), plain(*routed()))


def test_a_state_dict_keeps_codes_and_scales() -> None:
    experts, other = layer("swiglu", True).quantize_("uint4", "1x32"), layer("swiglu", True)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    other.quantize_("uint4", "1x32")
    state = experts.state_dict()
    assert state["gate_up_proj"].dtype is torch.uint8
    assert state["gate_up_proj"].shape == (4, 128, 48)
    assert state["down_proj_scale"].shape == state["down_proj_zero"].shape == (4, 96, 2)
    other.load_state_dict(state)
    inputs = routed()
    assert torch.equal(other(*inputs), experts(*inputs))


def test_refusals_of_a_layer() -> None:
    experts = layer("swiglu", False).quantize_("e4m3", "row")
    with pytest.raises(mg.InvalidProblem, match="these experts hold e4m3 already"):
        experts.quantize_("int8", "row")
    with pytest.raises(mg.InvalidProblem, match="scale_b scales b, which is bfloat16"):
        experts.to(torch.bfloat16)(*routed())  # casts codes as if they were numbers
    with pytest.raises(mg.InvalidProblem, match="fused=True takes no quantised weights"):
        Experts(4, 96, 64, fused=True).quantize_("e4m3", "row")
    spread = layer("swiglu", False)
    spread.mesh = object()
    with pytest.raises(mg.InvalidProblem, match="spread over a mesh"):
        spread.quantize_("e4m3", "row")


# --- transformers -----------------------------------------------------------------------------------

has_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install transformers")
SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 61,
    "max_position_embeddings": 64, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def model_of(kind: str, **extra: Any) -> Any:
    import transformers

    import multigemm.integrations.transformers  # noqa: F401  (registers the name "multigemm")

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **extra)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.to(torch.bfloat16)


def gpt_oss() -> Any:
    return model_of("GptOss", intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)


def checkpoint(model: Any) -> dict[str, Tensor]:
    """The experts as gpt-oss's checkpoints have them, and the model's own made equal to what they stand for."""
    state: dict[str, Tensor] = {}
    for prefix, experts in model.named_modules():
        if not hasattr(experts, "is_transposed"):
            continue
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, name)  # [E, in, out]
            q: Any = quantize(weight.detach(), "e2m1", "1x32", side="b", scale_dtype=E8M0)
            blocks = q.data.mT.unflatten(-1, (-1, 16))
            state |= {f"{prefix}.{name}_blocks": blocks, f"{prefix}.{name}_scales": q.scale.mT.view(torch.uint8)}
            with torch.no_grad():
                weight.copy_(dequantize(Quantized(q.data, q.scale), side="b", format="e2m1"))
    return state


@pytest.mark.slow
@has_transformers
def test_gpt_oss_runs_on_a_checkpoint_in_mxfp4() -> None:
    from multigemm.integrations.transformers import load_mxfp4_experts_

    plain, model, ids = gpt_oss(), gpt_oss(), torch.randint(3, 61, (2, 7))
    state = checkpoint(plain)
    plain.set_experts_implementation("eager")
    with torch.no_grad():
        want = plain(input_ids=ids).logits
        assert id(load_mxfp4_experts_(model, state)) == id(model)
        model.set_experts_implementation("multigemm")
        close(model(input_ids=ids).logits, want, 0.03)
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 10)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.dtype is torch.uint8
    assert experts.gate_up_proj.shape == (4, 192, 32)
    assert torch.equal(experts.down_proj_scale.view(torch.uint8), state["model.layers.0.mlp.experts.down_proj_scales"])


@pytest.mark.slow
@has_transformers
@pytest.mark.parametrize("name", ["float8 blocks", "uint4", "mxfp4"])
@pytest.mark.parametrize("kind", ["GptOss", "Mixtral"])
def test_experts_of_a_model_quantised_in_place(kind: str, name: str) -> None:
    from multigemm.integrations.transformers import quantize_experts_

    sizes = {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    plain, model, ids = model_of(kind, **sizes), model_of(kind, **sizes), torch.randint(3, 61, (2, 7))
    for experts in (m for m in plain.modules() if hasattr(m, "is_transposed")):
        for each in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, each)
            with torch.no_grad():
                weight.copy_(meant(weight.mT, name).mT if experts.is_transposed else meant(weight, name))
    format, scale, more = FORMATS[name]
    quantize_experts_(model, format, scale, **more)
    for each in (plain, model):
        each.set_experts_implementation("multigemm")
    with torch.no_grad():
        close(model(input_ids=ids).logits, plain(input_ids=ids).logits, 0.03)
    with pytest.raises(mg.InvalidProblem, match="quantised or spread over ranks already"):
        quantize_experts_(model, format, scale, **more)


@pytest.mark.slow
@has_transformers
def test_what_does_not_fit_a_model_is_refused() -> None:
    from multigemm.integrations.transformers import load_mxfp4_experts_, quantize_experts_

    model = gpt_oss()
    state = checkpoint(model)
    name = "model.layers.1.mlp.experts.down_proj"
    with pytest.raises(mg.InvalidProblem, match=f"{name}: the checkpoint has no down_proj_blocks"):
        load_mxfp4_experts_(gpt_oss(), {key: x for key, x in state.items() if not key.startswith(name)})
    with pytest.raises(mg.InvalidProblem, match=r"do not fit 64 x 96"):
        load_mxfp4_experts_(gpt_oss(), state | {f"{name}_scales": state[f"{name}_scales"][:, 1:]})
    calls: list[Any] = [lambda m: load_mxfp4_experts_(m, state), lambda m: quantize_experts_(m, "e4m3", "row")]
    for call in calls:
        with pytest.raises(mg.InvalidProblem, match="no experts that transformers can switch"):
            call(torch.nn.Linear(2, 2))


@pytest.mark.slow
@has_transformers
@pytest.mark.parametrize(("intermediate", "expert_dtype"), [(256, "fp8"), (48, "fp8"), (64, "fp4")])
def test_transformers_own_float8_experts(intermediate: int, expert_dtype: str) -> None:
    """Blocks of 128 x 128, or a number for each half of a narrow gate; or codes of four bits."""
    from transformers import MixtralConfig
    from transformers.integrations import finegrained_fp8
    from transformers.integrations.moe import use_experts_implementation

    import multigemm.integrations.transformers  # noqa: F401

    class Own(finegrained_fp8.FP8Experts):  # type: ignore[misc]
        pass

    torch.manual_seed(0)
    made: Any = use_experts_implementation(
        experts_class=Own, experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    )
    config = MixtralConfig(hidden_size=256, intermediate_size=intermediate, num_local_experts=4)
    config._experts_implementation = "multigemm"
    new: Any = made
    experts = new(config, block_size=(128, 128), expert_dtype=expert_dtype)
    weights = {}
    for name in ("gate_up_proj", "down_proj"):
        held, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        with torch.no_grad():
            scale.copy_(torch.rand(scale.shape) * 0.01 + 0.01)
            if expert_dtype == "fp4":
                held.copy_(torch.randint(-128, 128, held.shape, dtype=torch.int8))
                b: Any = Quantized(held.mT.contiguous(), scale.mT.contiguous())
                weights[name] = dequantize(b, side="b", format="e2m1").mT
                continue
            held.copy_(torch.randn(held.shape).to(held.dtype))
            rows = -(-held.shape[1] // scale.shape[1]) if held.shape[1] <= 128 else 128
            grid = scale.repeat_interleave(rows, 1)[:, : held.shape[1]]
            weights[name] = held.float() * grid.repeat_interleave(128, 2)[..., : held.shape[2]]
    x, index, top = torch.randn(9, 256).bfloat16(), torch.randint(0, 4, (9, 2)), torch.rand(9, 2).bfloat16()
    with torch.no_grad():
        y = experts(x, index, top)
    want = torch.zeros(9, 256)
    for token in range(9):
        for slot in range(2):
            e = int(index[token, slot])
            gate, up = (weights["gate_up_proj"][e] @ x[token].float()).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            want[token] += float(top[token, slot]) * (weights["down_proj"][e] @ hidden)
    close(y, want, 0.06)  # activations in float8
    assert y.dtype is torch.bfloat16
    experts.activation_scheme = "static"
    with pytest.raises(mg.InvalidProblem, match="activation_scheme='static'"):
        experts(x, index, top)
