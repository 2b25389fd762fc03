"""Which configs to try for a spec, the best guess first: what measurements on an H100 and an H200 support.

Each kernel has its own rules (`pointer_choice`, `hopper_choice`, `quantised_choice`); here they meet. Nothing depends
on a token count beyond the buckets that a spec carries; docs/notes/triton-tuning.md has the measurements, and their
commands.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from multigemm.backends.triton.config import (
    INVARIANT,
    SHARED_LIMIT,
    Config,
    is_tf32,
    problem_with,
    shared_memory,
    variance,
)
from multigemm.backends.triton.estimates import hopper_us, pointer_us, tiles_in, typical_rows
from multigemm.backends.triton.hopper_choice import hopper_candidates, maps_first
from multigemm.backends.triton.pointer_choice import heavy, pointer_candidates
from multigemm.backends.triton.quantised_choice import emulated_quantised, quantised_candidates
from multigemm.cuda.device import first_gpu_processors
from multigemm.planning.fused import products_spec
from multigemm.planning.fused_steps import product_spec, steps_reasons
from multigemm.problem.spec import FusedSpec, ProblemSpec

FEW_ROWS_OF_A_GATE = 16
"""Rows per group up to which a gate's tile is as low as tiles are."""


def candidates(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """Valid configs for a spec on a device, the best guess first; for sums of rows, those of the products."""
    spec = products_spec(spec)
    if device.type == "cpu" and spec.quantised:
        fixed = spec.batch_invariant
        return quantised_candidates(spec) if fixed else [emulated_quantised(spec)]
    if device.type == "cpu":
        short = INVARIANT.block_k
        return [replace(config, block_k=short) if variance(config, spec) else config for config in emulated()]
    properties = torch.cuda.get_device_properties(device)
    limit = getattr(properties, "shared_memory_per_block_optin", SHARED_LIMIT)
    return fitting(spec, torch.cuda.get_device_capability(device), limit)


def fitting(spec: ProblemSpec, capability: tuple[int, int], limit: int) -> list[Config]:
    """The configs of `candidates_of` that run within `limit` bytes of shared memory for each program."""
    found = candidates_of(spec, capability)
    return [config for config in found if shared_memory(config, spec, capability) <= limit]


def candidates_of(spec: ProblemSpec, capability: tuple[int, int]) -> list[Config]:
    """Valid configs for a spec on devices of a compute capability, the best guess first."""
    spec = products_spec(spec)
    if spec.quantised:
        return quantised_candidates(spec, capability)
    if spec.fused is not None:
        return fused_candidates(spec, capability)
    plain = pointer_candidates(spec, capability)
    fast = hopper_candidates(spec) if capability[0] == 9 else []
    if not fast:
        return plain
    if spec.form == "per_group":
        return [*fast, *plain] if maps_first(spec, fast[0]) else [*plain, *fast]
    # what is known of both in tf32 is how large tiles compare
    fitted = max(plain, key=lambda x: x.block_m * x.block_n) if is_tf32(spec) else plain[0]
    if hopper_us(fast[0], spec) < pointer_us(fitted, spec):
        return [*fast, *plain]
    return [*plain, fast[0]]


def fused_candidates(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> list[Config]:
    """Valid configs of the fused kernel, and of a plain product among steps, the best guess first.

    Measured on an H200 (us, layers of Qwen3-30B and Mixtral, 4096 tokens, bfloat16):
    * Many rows: the warp-specialised kernel makes up for the steps round it. Rows picked in front of a plain product:
      255 and 1234, in the fused kernel 301 and 1920; gradients of weights: 427 and 2518, fused 1836 and 9834. A gate
      that leaves registers for 128 x 256 products is the exception: 450 fused at K = 2048, 439 as three calls.
    * Few rows: tiles of 16 rows and 64 columns, of which a gate makes 32: 203 for Qwen3's 64 tokens, of 32 x 32: 271.
    """
    plain = pointer_candidates(spec, capability)
    if cast(FusedSpec, spec.fused).layout and typical_rows(spec) <= FEW_ROWS_OF_A_GATE:
        plain.sort(key=lambda x: (x.block_n < 64, x.block_m))
    # addresses of picked rows leave no registers for steps of 128 that bring 64 columns
    plain = [replace(x, block_k=64, stages=6) if x.block_k > 64 and x.block_n > 32 else x for x in plain]
    many = spec.jagged == "k" or typical_rows(spec) > 96
    steps = hopper_candidates(product_spec(spec))[:4] if capability[0] == 9 and not steps_reasons(spec) else []
    plain = [*steps, *plain] if many else [*plain, *steps[:1]]
    if spec.compute.itemsize == 2 and capability[0] == 9 and typical_rows(spec) > 96 and _roomy(spec):
        large = Config(block_m=128, block_n=256, block_k=64, warps=8, stages=3, programs=1)
        plain = [large, *plain] if tiles_in(large, spec) >= first_gpu_processors() else [*plain, large]
    return [config for config in dict.fromkeys(plain) if not problem_with(config, spec)]


def _roomy(spec: ProblemSpec) -> bool:
    """Whether a gate leaves registers for 128 x 256 products: half as many results, and no other operand in the
    epilogue."""
    fused = spec.fused
    assert fused is not None
    more = fused.preact is not None or fused.row_scale is not None or spec.bias is not None
    light = spec.activation in ("swiglu", "reglu", "glu") and not (fused.alpha or fused.beta or fused.limit)
    return bool(fused.layout) and light and not more and not heavy(spec)


def emulated() -> list[Config]:
    """The configs for the interpreter, whose cost is the number of operations, not of elements."""
    return [Config(block_m=64, block_n=64, block_k=64, warps=4, stages=1, width=2, programs=3)]
