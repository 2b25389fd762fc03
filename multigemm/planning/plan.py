"""`Plan`: a problem that is compiled and bound. Calling it only launches.

A plan owns its output (or writes into the problem's `out`), sees operands and sizes that are changed in place, and
shares no state with other plans. A CUDA graph can capture it unless `syncs` is True.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Never, NoReturn

from multigemm.backend import Launch
from multigemm.errors import InvalidProblem, MultigemmError
from multigemm.planning import launch_cache
from multigemm.planning.binding import Choice, bind, caller_result, captured, reasons, refuse_gradients, told
from multigemm.planning.staging import allocate
from multigemm.problem.problem import GroupedGemmProblem, checked
from multigemm.problem.spec import ProblemSpec
from multigemm.torch_internals import no_dynamo


def _in_a_capture(launch: Launch, problem: GroupedGemmProblem) -> None:
    """Refuses a launch that was bound in a capture: the initialisation of its workspaces was recorded and has not
    run."""
    if not captured(problem):
        raise InvalidProblem(
            "this plan was made while a CUDA graph was captured, and is called outside of a capture, where its "
            "workspaces hold nothing: make the plan before the capture, or another one for calls outside"
        )
    launch()


class Plan:
    """`plan()` writes into its own output and returns it; `plan.run(other)` solves another problem of the same spec.

    A call launches on the current stream. Output and workspaces are made on the stream that is current when the plan is
    made: a first call on another stream has to wait for that one, as for any tensor of torch. Since a plan has one
    output, its calls must not overlap. A plan that is made inside a CUDA graph's capture can be called in captures
    only. A call allocates nothing, except where `why` says so: torch's grouped_mm, which cublas may call, allocates
    inside.

    Example:
        >>> import torch, multigemm as mg
        >>> a, b = torch.ones(6, 4), torch.ones(3, 4, 2)
        >>> plan = mg.plan(a, b, sizes=[1, 0, 5], backend="cpu")
        >>> plan()[0, 0].item()
        4.0
        >>> _ = a.fill_(2.0)
        >>> plan()[0, 0].item()
        8.0
    """

    __slots__ = ("_choice", "_launch", "_ops", "_out", "_result", "problem")

    @no_dynamo
    def __init__(self, choice: Choice, problem: GroupedGemmProblem) -> None:
        self.problem = problem
        self._choice = choice
        self._out = allocate(problem, together=True)
        bound = bind(choice, problem, self._out)
        self._launch = partial(_in_a_capture, bound.launch, problem) if captured(problem) else bound.launch
        self._ops = bound.ops  # a launch keeps no operand alive
        self._result = caller_result(problem, self._out)

    @no_dynamo
    def __call__(self, *operands: Never, **keywords: Never) -> Any:
        if operands or keywords:
            raise InvalidProblem(
                "a plan is called without arguments and reads the operands that it was made with: write new values "
                "into them, or solve another problem of the same spec by plan.run(GroupedGemmProblem(a, b, ...))"
            )
        self._launch()
        return self._result

    @no_dynamo
    def run(self, problem: GroupedGemmProblem) -> Any:
        """Solves another problem of the same spec on the same device, with an output of its own.

        Args:
            problem: the other problem.

        Returns:
            Its result, in new memory or in its `out`.

        Raises:
            InvalidProblem: the problem is of another spec or on another device; the text says how they differ.
        """
        if checked(problem).device != self.problem.device:
            raise InvalidProblem(
                f"this plan is for {self.problem.device} and the problem is on {problem.device}: make a plan for it"
            )
        if problem.spec != self.problem.spec:
            seen = _difference(problem.spec, self.problem.spec)
            raise InvalidProblem(f"this plan is for another spec: {seen}; make a plan for this problem")
        refuse_gradients(problem)
        return launch_cache.solve(self._choice, problem)

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return self._choice.backend

    @property
    def kernel(self) -> str:
        """The name of the kernel or library call."""
        return self._choice.recipe.kernel

    @property
    def config(self) -> Any:
        """The backend's config."""
        return self._choice.recipe.config

    @property
    def spec(self) -> ProblemSpec:
        """The spec for which the plan was made."""
        return self.problem.spec

    @property
    def syncs(self) -> bool:
        """Whether a run reads sizes back from the device. If so, it cannot be captured."""
        return self._choice.recipe.syncs

    @property
    def told(self) -> str:
        """What a recipe that decides at bind runs for these sizes; "" for other recipes."""
        return told(self._choice, self.problem)

    @property
    def why(self) -> str:
        """Why this backend and this config, and what is run for these sizes."""
        return reasons(self._choice, self.problem)

    def __reduce__(self) -> NoReturn:
        raise MultigemmError("a plan is bound to memory and cannot be copied: make another by plan(problem)")

    def __repr__(self) -> str:
        syncs = ", syncs" if self.syncs else ""
        return f"Plan({self.backend}: {self.kernel}, {self.config}{syncs}; {self.why})"


def _difference(new: ProblemSpec, old: ProblemSpec) -> str:
    names = [n for n in ProblemSpec.__slots__ if getattr(new, n) != getattr(old, n)]
    return ", ".join(f"{n} is {getattr(new, n)} instead of {getattr(old, n)}" for n in names)
