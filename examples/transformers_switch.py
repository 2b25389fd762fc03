"""A transformers model, switched to multigemm by one line.

    pip install transformers
    python examples/transformers_switch.py

Builds a small random Qwen3-MoE (no download), runs it with transformers' own experts and with
multigemm's, compares logits, gradients and generated tokens, and times both.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import multigemm.integrations.transformers  # noqa: F401  (registers the name "multigemm")


def build() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=4,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=500,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def run(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """(logits, the gradient of the first layer's experts, generated tokens, seconds of a training step)."""
    for _ in range(2):
        start = time.perf_counter()
        model.zero_grad()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        seconds = time.perf_counter() - start
    gradient = model.model.layers[0].mlp.experts.gate_up_proj.grad.clone()
    return out.logits.detach(), gradient, model.generate(ids[:, :8], max_new_tokens=8, do_sample=False), seconds


def main() -> None:
    model = build()
    ids = torch.randint(3, 500, (4, 64), device=model.device)
    model.set_experts_implementation("eager")
    theirs = run(model, ids)

    model.set_experts_implementation("multigemm")  # the one line
    ours = run(model, ids)

    for name, x, y in zip(("logits", "gradient"), theirs, ours, strict=False):
        worst = ((x - y).abs().max() / x.abs().max()).item()
        print(f"{name}: largest difference {worst:.1e} of the largest value")
        assert worst < 1e-4
    print(f"generated tokens equal: {torch.equal(theirs[2], ours[2])}")
    print(f"one training step: eager {theirs[3] * 1e3:.0f} ms, multigemm {ours[3] * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
