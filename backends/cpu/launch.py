"""Spec and config to a launch: reads the sizes, forms the products, finishes and stores them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.cpu.blas import BlasLaunch
from multigemm.backends.cpu.bmm import BmmLaunch
from multigemm.backends.cpu.config import Config
from multigemm.backends.cpu.epilogue import finish, store
from multigemm.backends.cpu.groups import Group, Sizes, bare, is_inference, unowned, walk
from multigemm.backends.cpu.jit import Tile, entry
from multigemm.backends.cpu.mkl import library
from multigemm.backends.cpu.ordered import finish_in_pieces, make_ordered_product
from multigemm.backends.cpu.products import product
from multigemm.errors import LibraryError
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec


def finish_whole(acc: Tensor, group: Group, ops: Operands) -> None:
    """The epilogue of one product."""
    store(finish(acc, ops.spec, ops.alpha, ops.beta, group.c, group.bias), group.out)


def bind_loop(
    ops: Operands,
    multiply: Callable[[Tensor, Tensor, torch.dtype], Tensor] = product,
    conclude: Callable[[Tensor, Group, Operands], None] = finish_whole,
) -> Launch:
    """One product after another; right for every strided, empty or overlapping corner."""
    spec, sizes = ops.spec, Sizes(ops)

    def launch() -> None:
        sizes.changed()
        start, end = sizes.start, sizes.end
        if spec.zero_unowned:
            for part in unowned(ops, start, end):
                part.zero_()
        for group in walk(ops, start, end):
            a, b = (group.a[:, :0], group.b[:0]) if spec.alpha == "zero" else (group.a, group.b)
            conclude(multiply(a, b, spec.acc), group, ops)

    return launch


def binder(config: Config) -> Callable[[Operands], Launch]:
    """How a config binds a problem; compiles tiles, so that binding does not."""
    if config.kernel == "loop":
        return bind_loop
    if config.kernel == "ordered":
        multiply = make_ordered_product()
        return lambda ops: bind_loop(ops, multiply, finish_in_pieces)
    if config.kernel == "bmm":
        return lambda ops: BmmLaunch(ops, bind_loop(ops))
    tile = None
    if config.kernel == "tiles":
        tile = Tile(config.rows, config.vectors)
        entry(tile.rows, tile.vectors)
    blas = library()
    if blas is None:
        raise LibraryError("torch's batched BLAS cannot be called by address here")
    return lambda ops: BlasLaunch(ops, blas, bind_loop(ops), tile)


def _guarded(bind: Callable[[Operands], Launch], ops: Operands) -> Launch:
    """A launch that records no gradients and may write tensors made in inference mode."""
    run = bind(replace(ops, a=bare(ops.a), b=bare(ops.b), out=bare(ops.out), c=bare(ops.c), bias=bare(ops.bias)))
    if not is_inference(ops):
        return run

    def launch() -> None:
        with torch.inference_mode():
            run()

    return launch


def recipe(spec: ProblemSpec, config: Config) -> Recipe:
    """The recipe of one config."""
    bind = binder(config)
    kernel = f"tiles_{config.rows}x{config.vectors}" if config.kernel == "tiles" else config.kernel
    why = "batch invariant: one accumulator, ascending k" if spec.batch_invariant else ""
    return Recipe(kernel=kernel, config=config, bind=lambda ops: _guarded(bind, ops), why=why)
