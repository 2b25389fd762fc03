"""Spec and config to a launch: reads the sizes, forms the products, finishes and stores them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.cpu.config import Config
from multigemm.backends.cpu.epilogue import finish, store
from multigemm.backends.cpu.groups import Spans, bare, is_inference, valid_rows, walk, zero_unowned
from multigemm.backends.cpu.products import product
from multigemm.layouts import Operands
from multigemm.spec import ProblemSpec


def jagged_extent(ops: Operands) -> int:
    """T: the extent of the operands along the jagged direction."""
    assert isinstance(ops.a, Tensor) and isinstance(ops.b, Tensor)
    extent = {"jagged_m": ops.a.shape[0], "jagged_n": ops.b.shape[-1], "jagged_k": ops.a.shape[-1]}
    return extent[ops.spec.form]


def bind_loop(ops: Operands) -> Launch:
    """One product after another; right for every strided, empty or overlapping corner."""
    spec = ops.spec
    ops = replace(ops, a=bare(ops.a), b=bare(ops.b), out=bare(ops.out), c=bare(ops.c), bias=bare(ops.bias))
    spans = Spans(ops, jagged_extent(ops)) if spec.jagged else None

    def launch() -> None:
        start, end = spans.read() if spans else (None, None)
        if spec.form == "masked":
            assert isinstance(ops.a, Tensor)
            end = valid_rows(ops, ops.a.shape[1])
        if spec.zero_unowned:
            zero_unowned(ops, start, end)
        for group in walk(ops, start, end):
            a, b = (group.a[:, :0], group.b[:0]) if spec.alpha == "zero" else (group.a, group.b)
            acc = product(a, b, spec.acc)
            store(finish(acc, spec, ops.alpha, ops.beta, group.c, group.bias), group.out)

    return launch


def guarded(bind: object, ops: Operands) -> Launch:
    """A launch that records no gradients and may write tensors made in inference mode."""
    run = bind(ops)  # type: ignore[operator]
    if not is_inference(ops):
        return run  # type: ignore[no-any-return]

    def launch() -> None:
        with torch.inference_mode():
            run()

    return launch


def recipe(spec: ProblemSpec, config: Config) -> Recipe:
    """The recipe of one config."""
    return Recipe(kernel=config.kernel, config=config, bind=lambda ops: guarded(bind_loop, ops))
