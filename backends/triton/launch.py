"""Plans a spec with a config: in the interpreter for operands on a CPU, else by the kernel's own module."""

from __future__ import annotations

from dataclasses import replace

import torch

from multigemm.backend import Recipe, cannot_run
from multigemm.backends.triton import config as configs
from multigemm.backends.triton import generic, hopper, hopper_float8, lists, quantised
from multigemm.backends.triton.config import Config
from multigemm.backends.triton.pointer_choice import pointer_candidates
from multigemm.backends.triton.quantised_choice import portable_quantised
from multigemm.backends.triton.sum_rows import SumPlan
from multigemm.cuda.device import index_of
from multigemm.errors import InvalidSetting
from multigemm.planning.fused import kernel_text, products_spec
from multigemm.planning.fused_steps import plan_in_steps, product_spec
from multigemm.problem.spec import ProblemSpec


def plan(spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
    """Compiles (or loads) the kernels of a spec; binding a problem then only lays out arguments."""
    if problem := configs.problem_with(config, spec):
        raise cannot_run(config, problem)
    why = f"batch invariant: {configs.summation_of(config, spec)}" if spec.batch_invariant else ""
    if device.type == "cpu":
        return _emulated(spec, config, why)
    return _loaded(spec, config, index_of(device), why)


def _emulated(spec: ProblemSpec, config: Config, why: str) -> Recipe:
    if config.kernel == "hopper" or config.pack:
        raise InvalidSetting(
            f"{config} runs on a GPU, and operands are on the CPU: use kernel='pointer', pack=() there"
        )
    from multigemm.backends.triton.emulate import bind_emulated

    name, sums = kernel_text(f"{config.kernel} (interpreted)", spec), generic.sums_sizes(spec)
    return Recipe(name, config, lambda ops: bind_emulated(ops, config), why, sums_sizes=sums)


def _fused(spec: ProblemSpec, config: Config, index: int, why: str) -> Recipe:
    """Products and their fused work in one kernel, or in steps round the warp-specialised one; sums of rows behind."""
    products = products_spec(spec)
    if products.fused is not None and config.kernel == "hopper":
        return plan_in_steps(spec, _loaded(product_spec(spec), config, index, why), index)
    plan_products = _loaded if products.fused is None else generic.plan_generic
    inner = plan_products(products, config, index, why)
    bind = inner.bind if products is spec else SumPlan(spec, inner, index).bind
    return replace(inner, kernel=kernel_text(inner.kernel, spec), bind=bind)


def _loaded(spec: ProblemSpec, config: Config, index: int, why: str) -> Recipe:
    if spec.fused is not None:
        return _fused(spec, config, index, why)
    if spec.quantised and config.kernel == "hopper":
        return hopper_float8.plan_float8(
            spec, config, index, why,
            lambda: quantised.plan_quantised(spec, portable_quantised(spec)[0], index, why),
        )  # fmt: skip
    if spec.quantised:
        return quantised.plan_quantised(spec, config, index, why)
    plan_generic = lists.plan_generic_list if spec.form == "per_group" else generic.plan_generic
    if config.kernel != "hopper":
        return plan_generic(spec, config, index, why)
    plan_hopper = lists.plan_hopper_list if spec.form == "per_group" else hopper.plan_hopper
    return plan_hopper(spec, config, index, why, lambda: plan_generic(spec, pointer_candidates(spec)[0], index, why))
