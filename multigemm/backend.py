"""What a backend is: five members. And what it gives back: a `Recipe`, ready to bind.

A backend never raises to say no: `not_supported_reasons` says it beforehand, in words that hold the
value seen, the limit and the remedy. `supports` is `not reasons`, so there is one truth.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec

Launch = Callable[[], object]
"""Does the work of one bound problem on the device's current stream, and may be called again."""

Bind = Callable[[Operands], Launch]
"""Fixes addresses, sizes and launch arguments of one problem; allocates its workspace, if any."""


Tell = Callable[[Operands], str]
"""Says in words what `bind` would run for these sizes. Reads no memory of the device and waits for nothing."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can run on this machine; if not, why, and the command that installs it."""

    ok: bool
    reason: str = ""
    install: str = ""
    version: str = ""
    emulated: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """What `Backend.plan` returns: a compiled way to solve every problem of one spec.

    `bind` is called for each problem; the launch that it returns writes every owned element of
    `ops.out`, and zeroes the unowned ones if `spec.zero_unowned`. It must not keep state that two
    bound problems share, must launch on the current stream, and must see operands changed in place. It need not keep
    operands alive: whoever binds keeps them until the last launch. It is not called for a result without elements.
    `syncs` says that binding or launching reads sizes back from the device. `tell` is for a recipe
    that decides at bind, by sizes that no spec holds; a backend whose plans cost nothing may say so by an
    attribute `decides_at_bind`, and `multigemm tune` then measures it with the sizes in either place.
    `sums_sizes` says that launches read `ops.sizes` where there are any: nothing has to write `ops.ends` before.
    """

    kernel: str
    config: Any
    bind: Bind
    why: str = ""
    syncs: bool = False
    tell: Tell | None = None
    sums_sizes: bool = False


QUANTISED_TEXT = {
    "float8": "float8 operands",
    "weights": "quantised weights",
}


def quantised_reasons(spec: ProblemSpec, takes: Collection[str] = ()) -> list[str]:
    """Why a backend that takes these classes of quantised operands (`ProblemSpec.quantised`) cannot take a spec's.

    Every backend's `not_supported_reasons` asks this first: with nothing in `takes` it refuses all of them.
    """
    found = spec.quantised
    if not found or found in takes:
        return []
    held = spec.b.packed or str(spec.b.dtype if found == "weights" else spec.a.dtype).removeprefix("torch.")
    return [f"{QUANTISED_TEXT[found]} ({held}): use backend='cpu', or dequantise with multigemm.quantize.dequantize"]


@runtime_checkable
class Backend(Protocol):
    """The five members. A third party's instance under the entry-point group `multigemm.backends` is one.

    A backend that keeps `spec.batch_invariant` says so by an attribute `batch_invariant = True`; without it such
    problems are refused for it. It then promises that all of its configs that are valid for such a spec give an element
    the same bits, which depend on its row of A, its column of B, K, the dtypes and the epilogue alone, in every form
    and layout. What it cannot promise it refuses by `not_supported_reasons`. A third party's backend says by an
    attribute `takes_quantised = True` that its `not_supported_reasons` knows of quantised operands; else it gets none.
    """

    @property
    def name(self) -> str: ...

    def availability(self) -> Availability: ...

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]: ...

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        """Frozen dataclasses that are valid for this spec, the best guess first."""
        ...

    def plan(self, spec: ProblemSpec, config: Any, device: torch.device) -> Recipe: ...


@dataclass(frozen=True)
class BuiltinBackend:
    """A `Backend` of functions. The `__init__` of each built-in one's package names them; all are batch-invariant."""

    batch_invariant: ClassVar[bool] = True

    name: str
    availability: Callable[[], Availability]
    not_supported_reasons: Callable[[ProblemSpec, torch.device], list[str]]
    configs: Callable[[ProblemSpec, torch.device], Sequence[Any]]
    plan: Callable[[ProblemSpec, Any, torch.device], Recipe]
    decides_at_bind: bool = False
