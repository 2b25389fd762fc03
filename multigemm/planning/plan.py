"""`Plan`: a problem that is ready to run. Calling it launches, and nothing else.

A plan owns its output (or writes into the problem's `out`), sees operands and sizes that are changed
in place, shares no state with any other plan, and can be captured in a CUDA graph unless it says
that it `syncs`.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from multigemm.backend import Launch, Recipe
from multigemm.cuda.device import capturing
from multigemm.errors import InvalidProblem, MultigemmError, NotCapturable
from multigemm.planning.staging import allocate, outline, stage
from multigemm.problem.arrays import cupy_stream, give_back
from multigemm.problem.no_dynamo import no_dynamo
from multigemm.problem.operand_reader import Operand
from multigemm.problem.problem import GroupedGemmProblem, checked
from multigemm.problem.spec import ProblemSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend solves every problem of one spec, how, and why."""

    backend: str
    recipe: Recipe
    spec: ProblemSpec
    why: str


def reasons(choice: Choice, problem: GroupedGemmProblem) -> str:
    """Why this backend, why this config, and what it comes to for the sizes of this problem."""
    return "; ".join(filter(None, (choice.why, choice.recipe.why, told(choice, problem))))


def told(choice: Choice, problem: GroupedGemmProblem) -> str:
    """What a recipe that decides at bind would run for this problem; "" for any other."""
    tell = choice.recipe.tell
    return "" if tell is None else tell(outline(problem, choice.spec))


def launcher(choice: Choice, problem: GroupedGemmProblem, out: Operand) -> Launch:
    """Binds, and joins the steps that must run before each launch to the launch."""
    if choice.recipe.syncs and captured(problem):
        raise NotCapturable(
            f"backend {choice.backend!r} ({choice.recipe.kernel}) reads sizes on the host and cannot be captured: "
            "give the sizes on the host, or choose another backend"
        )
    staged = stage(problem, choice.spec, out)
    launch = choice.recipe.bind(staged.ops)
    if staged.before:
        launch = _Sequence([*staged.before, launch])
    return launch if problem.kind != "cupy" else _OnCallerStream(launch, problem.device)


def _external(stream: int, device: torch.device) -> torch.cuda.ExternalStream:
    return torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]


class _Sequence:
    """Several launches, one after the other."""

    __slots__ = ("_steps",)

    def __init__(self, steps: list[Launch]) -> None:
        self._steps = steps

    def __call__(self) -> None:
        for step in self._steps:
            step()


class _OnCallerStream:
    """A launch on the stream that CuPy works on at that moment, which torch need not share."""

    __slots__ = ("_device", "_launch")

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self._launch, self._device = launch, device

    def __call__(self) -> None:
        with _stream_of_cupy(self._device):
            self._launch()


def _stream_of_cupy(device: torch.device) -> AbstractContextManager[Any]:
    stream = cupy_stream(device)
    return nullcontext() if stream is None else torch.cuda.stream(_external(stream, device))


def callers_stream(problem: GroupedGemmProblem) -> AbstractContextManager[Any]:
    """The stream that a call of this problem launches on, as torch's current one."""
    return _stream_of_cupy(problem.device) if problem.kind == "cupy" else nullcontext()


def captured(problem: GroupedGemmProblem) -> bool:
    """Whether a call of this problem would be recorded into a CUDA graph instead of run."""
    with callers_stream(problem):
        return capturing(problem.device)


def _result(problem: GroupedGemmProblem, out: Operand) -> Any:
    """What the caller gets: the `out` that they gave, or the fresh result as their kind of array."""
    if problem.given_out is not None:
        return problem.given_out
    if not isinstance(out, torch.Tensor):
        return [give_back(x, problem.kind) for x in out]
    return give_back(out[0] if problem.squeezed else out, problem.kind)


def refuse_gradients(problem: GroupedGemmProblem) -> None:
    """A plan writes into memory and nothing else: what would need a gradient is not for it."""
    if torch.is_grad_enabled() and problem.requires_grad:
        raise InvalidProblem(
            "an input requires grad, and a plan has no gradient: call grouped_gemm or solve, use torch.no_grad(), or "
            ".detach() the input"
        )


def run(choice: Choice, problem: GroupedGemmProblem) -> Any:
    """One call: allocate, bind, launch."""
    out = allocate(problem)
    launcher(choice, problem, out)()
    return _result(problem, out)


def scratch(problem: GroupedGemmProblem) -> Operand:
    """Memory for a result that nobody needs, laid out as the problem's `out`."""
    out = allocate(problem)
    if problem.out is None:
        return out
    return _twin(out) if isinstance(out, torch.Tensor) else [_twin(x) for x in out]


def scratch_elements(problem: GroupedGemmProblem) -> tuple[int, int]:
    """What `scratch` takes, in elements, and how many of them the result has."""
    shapes = problem.out_shape if problem.form == "per_group" else [problem.out_shape]
    elements = sum(map(math.prod, shapes))
    if problem.out is None:
        return elements, elements
    outs = [problem.out] if isinstance(problem.out, torch.Tensor) else problem.out
    return sum(_span(x) for x in outs), elements


def _span(x: torch.Tensor) -> int:
    """From the first element to the last."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def _twin(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _in_a_capture(launch: Launch, problem: GroupedGemmProblem) -> None:
    """A launch that was bound in a capture: what fills its workspaces was recorded, and has not run by itself."""
    if not captured(problem):
        raise InvalidProblem(
            "this plan was made while a CUDA graph was captured, and is called outside of a capture, where its "
            "workspaces hold nothing: make the plan before the capture, or another one for calls outside"
        )
    launch()


class Plan:
    """`plan()` writes into its own output and returns it; `plan.run(other)` solves another problem of the spec.

    It launches on the stream that is current at the call. Its output and workspaces are made on the stream that is
    current when it is: a first call on another one has to wait for that, as for any tensor of torch. Since it has one
    output, its calls must not overlap. What is made inside a CUDA graph's capture can be called in captures only.
    A call allocates nothing, except where `why` says so: torch's grouped_mm, which cublas may call, allocates inside.
    """

    __slots__ = ("_choice", "_launch", "_out", "_result", "problem")

    @no_dynamo
    def __init__(self, choice: Choice, problem: GroupedGemmProblem) -> None:
        self.problem = problem
        self._choice = choice
        self._out = allocate(problem, together=True)
        launch = launcher(choice, problem, self._out)
        self._launch = partial(_in_a_capture, launch, problem) if captured(problem) else launch
        self._result = _result(problem, self._out)

    @no_dynamo
    def __call__(self) -> Any:
        self._launch()
        return self._result

    @no_dynamo
    def run(self, problem: GroupedGemmProblem) -> Any:
        """Solves another problem of the same spec on the same device, with an output of its own."""
        if checked(problem).device != self.problem.device:
            raise InvalidProblem(
                f"this plan is for {self.problem.device} and the problem is on {problem.device}: make a plan for it"
            )
        if problem.spec != self.problem.spec:
            seen = _difference(problem.spec, self.problem.spec)
            raise InvalidProblem(f"this plan is for another spec: {seen}; make a plan for this problem")
        refuse_gradients(problem)
        return run(self._choice, problem)

    @property
    def backend(self) -> str:
        """The name of the backend that runs it."""
        return self._choice.backend

    @property
    def kernel(self) -> str:
        """The kernel (or library call) that runs it."""
        return self._choice.recipe.kernel

    @property
    def config(self) -> Any:
        """The backend's own parameters."""
        return self._choice.recipe.config

    @property
    def spec(self) -> ProblemSpec:
        """What the plan was made for."""
        return self.problem.spec

    @property
    def syncs(self) -> bool:
        """Whether running it reads sizes back from the device (and so cannot be captured)."""
        return self._choice.recipe.syncs

    @property
    def told(self) -> str:
        """What it runs for these sizes, where only they decide; else ""."""
        return told(self._choice, self.problem)

    @property
    def why(self) -> str:
        """Why this backend and this config, and what it runs for these sizes."""
        return reasons(self._choice, self.problem)

    def __reduce__(self) -> NoReturn:
        raise MultigemmError("a plan is bound to memory and cannot be copied: make another by plan(problem)")

    def __repr__(self) -> str:
        syncs = ", syncs" if self.syncs else ""
        return f"Plan({self.backend}: {self.kernel}, {self.config}{syncs}; {self.why})"


def _difference(new: ProblemSpec, old: ProblemSpec) -> str:
    names = [n for n in ProblemSpec.__slots__ if getattr(new, n) != getattr(old, n)]
    return ", ".join(f"{n} is {getattr(new, n)} instead of {getattr(old, n)}" for n in names)
