"""Binding: turns a backend's choice and a problem into a launch, and provides the memory for results."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from multigemm.backend import Launch, Recipe
from multigemm.cuda.device import capturing
from multigemm.cuda.launch import NOTHING, in_turn
from multigemm.errors import InvalidProblem, NotCapturable
from multigemm.planning.operands import Operands, reach_bytes
from multigemm.planning.staging import allocate, shape_only_operands, stage
from multigemm.problem.arrays import Operand, cupy_stream, give_back
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ProblemSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend, recipe and config that solve every problem of one spec, and the reason for them."""

    backend: str
    recipe: Recipe
    spec: ProblemSpec
    why: str


def reasons(choice: Choice, problem: GroupedGemmProblem) -> str:
    """The text of `why`: why this backend, why this config, and what a recipe that decides at bind runs for these
    sizes."""
    return "; ".join(filter(None, (choice.why, choice.recipe.why, told(choice, problem))))


def told(choice: Choice, problem: GroupedGemmProblem) -> str:
    """What a recipe that decides at bind would run for this problem; "" for other recipes."""
    tell = choice.recipe.tell
    return "" if tell is None else tell(shape_only_operands(problem, choice.spec))


class Bound(NamedTuple):
    """A launch and its operands, which must stay alive until the last call of the launch."""

    launch: Launch
    ops: Operands
    steps: list[Launch]
    """The parts of the launch: the steps before the backend's launch, and that launch."""


def bind(choice: Choice, problem: GroupedGemmProblem, out: Operand) -> Bound:
    """Binds a recipe, and puts the steps that must run before each launch in front of it."""
    if choice.recipe.syncs and captured(problem):
        raise NotCapturable(
            f"backend {choice.backend!r} ({choice.recipe.kernel}) reads the sizes back from the device and "
            "cannot be captured: give the sizes on the host, or choose another backend"
        )
    staged = stage(problem, choice.spec, out, choice.recipe.sums_sizes)
    steps = [*staged.before, launch_of(choice.recipe, staged.ops)]
    launch = steps[0] if len(steps) == 1 else in_turn(steps)
    if problem.kind == "cupy":
        launch = partial(_on_stream_of_cupy, problem.device, launch)
    return Bound(launch, staged.ops, steps)


def launch_of(recipe: Recipe, ops: Operands) -> Launch:
    """The launch of a recipe, or no launch for a result without elements: its operands may have no memory, and a kernel
    that copies even zero bytes from there destroys the context. `preact_out` may have elements where the result has
    none."""
    out = ops.out
    has_elements = any(x.numel() for x in out) if isinstance(out, list) else out.numel()
    if ops.fused is not None:
        has_elements = has_elements or any(x.numel() for x in ops.fused.preacts())
    return recipe.bind(ops) if has_elements else NOTHING


def _on_stream_of_cupy(device: torch.device, launch: Launch) -> None:
    """Launches on the stream that CuPy works on at that moment, which torch need not share."""
    with _stream_of_cupy(device):
        launch()


def _stream_of_cupy(device: torch.device) -> AbstractContextManager[Any]:
    stream = cupy_stream(device)
    if stream is None:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))  # type: ignore[no-untyped-call]


def callers_stream(problem: GroupedGemmProblem) -> AbstractContextManager[Any]:
    """A context in which torch's current stream is the one on which a call of this problem launches."""
    return _stream_of_cupy(problem.device) if problem.kind == "cupy" else nullcontext()


def captured(problem: GroupedGemmProblem) -> bool:
    """Whether a call of this problem would be recorded into a CUDA graph instead of run."""
    with callers_stream(problem):
        return capturing(problem.device)


def caller_result(problem: GroupedGemmProblem, out: Operand) -> Any:
    """What the caller receives: the given `out`, or the fresh result as the caller's kind of array."""
    if problem.given_out is not None:
        return problem.given_out
    if not isinstance(out, torch.Tensor):
        return [give_back(x, problem.kind) for x in out]
    return give_back(out[0] if problem.squeezed else out, problem.kind)


def refuse_gradients(problem: GroupedGemmProblem) -> None:
    """Refuses a plan of inputs that require a gradient: a plan only writes into memory."""
    if torch.is_grad_enabled() and problem.requires_grad:
        raise InvalidProblem(
            "an input requires grad, and a plan has no gradient: call grouped_gemm or solve, use torch.no_grad(), or "
            ".detach() the input"
        )


def scratch(problem: GroupedGemmProblem) -> Operand:
    """Memory for a discarded result, laid out like the problem's `out` or a plan's result."""
    out = allocate(problem, together=True)
    if problem.out is None:
        return out
    return _twin(out) if isinstance(out, torch.Tensor) else [_twin(x) for x in out]


def scratch_bytes(problem: GroupedGemmProblem) -> tuple[int, int]:
    """The bytes that `scratch` allocates, and the bytes of the result in them."""
    shapes = problem.out_shape if problem.form == "per_group" else [problem.out_shape]
    size = sum(map(math.prod, shapes)) * problem.out_dtype.itemsize
    return size if problem.out is None else sum(map(reach_bytes, problem.each("out"))), size


def _twin(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
