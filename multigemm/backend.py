"""The interface of a backend (`Backend`, five members) and of what it returns (`Recipe`, ready to bind).

A backend refuses a problem by `not_supported_reasons`, never by raising. Each reason holds the value seen, the limit
and the remedy. A backend supports a problem exactly if the list of reasons is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import metadata
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from multigemm.cuda.launch import Launch as Launch
from multigemm.errors import InvalidSetting
from multigemm.planning.operands import Operands
from multigemm.problem.arrays import dtype_name
from multigemm.problem.spec import ProblemSpec

Bind = Callable[[Operands], Launch]
"""Fixes addresses, sizes and launch arguments of one problem; allocates its workspace, if any."""


Tell = Callable[[Operands], str]
"""Says in words what `bind` would run for these sizes. Reads no memory of the device and waits for nothing."""


class WithSizes(Protocol):
    """A launch for any sizes on the host. `offsets` (int32, groups + 1) are written before each call: the first and the
    last one lie within the extent."""

    offsets: memoryview

    def __call__(self, a: Tensor, b: Tensor) -> Tensor | None:
        """Computes a call on the current stream; returns the result, or None if an offset falls."""

    def workspace_bytes(self) -> int:
        """The device memory that it owns."""


BindSizes = Callable[[Operands], WithSizes | None]
"""Makes what serves all calls that differ from these operands in addresses, tokens and sizes on the host alone."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can run on this machine; if it cannot, the reason and the command that installs what is
    missing."""

    ok: bool
    reason: str = ""
    install: str = ""
    version: str = ""
    emulated: bool = False

    @property
    def why_not(self) -> str:
        """The reason, and the command that installs what is missing."""
        return f"{self.reason}; install with: {self.install}" if self.install else self.reason


@dataclass(frozen=True, slots=True)
class Recipe:
    """What `Backend.plan` returns: a compiled way to solve every problem of one spec.

    `bind` is called for each problem that has result elements. The launch that it returns writes every owned element of
    `ops.out`, and zeroes the unowned ones if `spec.zero_unowned`. It must launch on the current stream, see operands
    that are changed in place, and share no state with other bound problems. It need not keep operands alive: the caller
    of `bind` keeps them until the last launch.

    - `syncs`: binding or launching reads sizes back from the device.
    - `tell`: for a recipe that decides at bind, by sizes that no spec holds. A backend whose plans cost nothing may
      have an attribute `decides_at_bind`; `multigemm tune` then measures it with the sizes on the host and on the
      device.
    - `bind_sizes`: for a recipe that launches anew for other sizes on the host. A warm call then passes its sizes on,
      where it would have to `bind`; None where operands do not allow it. It keeps no operand alive, serves one thread
      and one stream, and gives the bits that a `bind` gives.
    - `sums_sizes`: launches read `ops.sizes` if there are any, so that nothing has to write `ops.ends` before.
    """

    kernel: str
    config: Any
    bind: Bind
    why: str = ""
    syncs: bool = False
    tell: Tell | None = None
    bind_sizes: BindSizes | None = None
    sums_sizes: bool = False


def installed_version(package: str) -> str:
    """The version of an installed package, which is not imported; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


QUANTISED_TEXT = {
    "float8": "float8 operands",
    "weights": "quantised weights",
}

NOT_BATCH_INVARIANT = (
    "it does not promise that a row's bits are independent of its neighbours: leave batch_invariant=True out, or name "
    "a backend that does (cupy, triton, numba, cpu)"
)


def quantised_reasons(spec: ProblemSpec, takes: Collection[str] = ()) -> list[str]:
    """The reasons to refuse a spec's quantised operands, for a backend that takes the classes `takes` of
    `ProblemSpec.quantised`.

    Every backend's `not_supported_reasons` calls this first. An empty `takes` refuses all quantised operands.
    """
    found = spec.quantised
    if not found or found in takes:
        return []
    held = spec.b.packed or dtype_name(spec.b.dtype if found == "weights" else spec.a.dtype)
    return [
        f"{QUANTISED_TEXT[found]} ({held}): use backend='triton', 'cupy', 'numba' or 'cpu', or dequantise with "
        "multigemm.quantize.dequantize"
    ]


def fused_reasons(spec: ProblemSpec, takes: Collection[str] = ()) -> list[str]:
    """The reasons to refuse a spec's fused keywords, for a backend that takes the keywords `takes` of
    `FusedSpec.keywords`.

    Every backend's `not_supported_reasons` calls this after `quantised_reasons`. An empty `takes` refuses all fused
    keywords.
    """
    asked = [] if spec.fused is None else [name for name in spec.fused.keywords if name not in takes]
    if not asked:
        return []
    names = ", ".join(f"activation={spec.activation!r}" if name == "gate" else name for name in asked)
    others = "'cpu'" if spec.quantised else "'triton', 'cupy' or 'cpu'"
    quantised = " beside quantised operands" if spec.quantised else ""
    return [
        f"{names}{quantised}: this backend has no kernel for it: use backend={others}, or take these steps in torch "
        "around the product"
    ]


@runtime_checkable
class Backend(Protocol):
    """The five members of a backend. Another package registers an instance under the entry-point group
    `multigemm.backends`.

    Three optional attributes of a backend widen what it is offered; without them such problems are refused for it:

    - `batch_invariant = True`: all configs that are valid for a spec give an element the same bits, which depend on its
      row of A, its column of B, K, the dtypes and the epilogue alone, in every form and layout. What the backend cannot
      promise it refuses by `not_supported_reasons`.
    - `takes_quantised = True`: `not_supported_reasons` handles quantised operands.
    - `takes_fused = True`: `not_supported_reasons` handles `spec.fused`.
    """

    @property
    def name(self) -> str:
        """The name by which `backend=` selects it."""
        ...

    def availability(self) -> Availability:
        """Whether the backend can run on this machine."""
        ...

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        """Why the backend cannot solve problems of this spec: value seen, limit, remedy. Empty if it can."""
        ...

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        """The configs that are valid for this spec, as frozen dataclasses, the best guess first."""
        ...

    def plan(self, spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        """Compiles a recipe, once per spec and config. The recipe is then bound to problems."""
        ...


@dataclass(frozen=True)
class BuiltinBackend:
    """A `Backend` made of functions, which the `__init__` of each built-in backend's package names. It makes the
    promises of all three optional attributes."""

    batch_invariant: ClassVar[bool] = True
    takes_quantised: ClassVar[bool] = True
    takes_fused: ClassVar[bool] = True

    name: str
    availability: Callable[[], Availability]
    not_supported_reasons: Callable[[ProblemSpec, torch.device], list[str]]
    configs: Callable[[ProblemSpec, torch.device], Sequence[Any]]
    plan: Callable[[ProblemSpec, Any, torch.device], Recipe]
    decides_at_bind: bool = False


def refusals(backend: Backend, spec: ProblemSpec, device: torch.device) -> list[str]:
    """Why a backend is not used for a spec: what it does not declare by its optional attributes, and its own
    reasons."""
    for declares, reasons_against in (("takes_quantised", quantised_reasons), ("takes_fused", fused_reasons)):
        if not getattr(backend, declares, False) and (undeclared := reasons_against(spec)):
            return undeclared
    unkept = spec.batch_invariant and not getattr(backend, "batch_invariant", False)
    return [*([NOT_BATCH_INVARIANT] if unkept else []), *backend.not_supported_reasons(spec, device)]


def as_dict(config: Any) -> dict[str, Any]:
    """The fields of a config dataclass as a dictionary."""
    return {f.name: getattr(config, f.name) for f in fields(config)}


def completed(given: Any, valid: Sequence[Any]) -> Any:
    """The config to run. `valid` are the backend's own configs, the best guess first.

    A mapping replaces fields of the best guess. A config object is checked by the backend. Raises InvalidSetting for
    anything else.
    """
    if not valid or not is_dataclass(valid[0]):
        return given
    kind: Any = type(valid[0])
    known = as_dict(valid[0])
    if isinstance(given, Mapping):
        if wrong := set(given) - set(known):
            raise InvalidSetting(
                f"config has no field {min(wrong, key=str)!r}; {kind.__name__} has {', '.join(sorted(known)) or 'none'}"
            )
        given = kind(**{**known, **given})
    elif (
        not is_dataclass(given)
        or isinstance(given, type)
        or _package(type(given)) not in {_package(type(config)) for config in valid}
    ):
        raise InvalidSetting(
            f"config={given!r} is no config of this backend: pass its {kind.__name__}, or a mapping of some of its "
            f"fields ({', '.join(sorted(known)) or 'none'})"
        )
    if type(given) is kind:
        _check_types(as_dict(given), known)
    return given


def cannot_run(config: Any, reason: str) -> InvalidSetting:
    """The error for a config, which a user gave, that cannot run a problem. `reason` may be unknown."""
    text = f"{config} cannot run this problem{reason and ': '}{reason}"
    return InvalidSetting(f"{text}; leave config out for the backend's own choice")


def _package(kind: type) -> str:
    """The package of a config's class. A backend may define several config classes in neighbouring modules."""
    return kind.__module__.rpartition(".")[0]


def _check_types(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuses a config whose values have other types than those of the valid configs, which would fail later or compute
    nonsense.

    A field that is None in a valid config may hold any type.
    """
    for name, value in given.items():
        wanted = type(known[name]).__name__
        if type(value) is not type(known[name]) and known[name] is not None:
            raise InvalidSetting(f"config has {name}={value!r}, a {type(value).__name__}; it must be of type {wanted}")
