"""Who could solve a problem, who cannot, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from multigemm.backend import Availability
from multigemm.problem.spec import ProblemSpec
from multigemm.select import registry


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's answer to one spec; `us` and `source` where its time for the class is known."""

    name: str
    availability: Availability
    reasons: tuple[str, ...]
    us: float | None = None
    source: str = ""

    @property
    def can(self) -> bool:
        return self.availability.ok and not self.reasons

    @property
    def for_auto(self) -> bool:
        """Whether "auto" may take it."""
        return self.can and not self.availability.emulated and self.name != "null"

    def why_not(self, allowed: Sequence[str]) -> list[str]:
        """Why "auto" did not take it, where `allowed` names what the settings allow."""
        if not self.can:
            return list(self.reasons) or [unavailable_text(self.availability)]
        if not self.for_auto:
            what = "computes nothing" if self.name == "null" else "is emulated here"
            return [f"{what}, and auto passes over it: ask for it by name"]
        return [f"MULTIGEMM_BACKEND allows {', '.join(allowed)} only"]

    def __str__(self) -> str:
        if not self.availability.ok:
            return f"unavailable: {unavailable_text(self.availability)}"
        if self.reasons:
            return f"cannot: {'; '.join(self.reasons)}"
        note = " (computes nothing: only when named)" if self.name == "null" else ""
        note = " (emulated: only when named)" if self.availability.emulated else note
        return f"can{note}" + (f", {self.us:.1f} us ({self.source})" if self.us is not None else "")


def candidates(spec: ProblemSpec, device: torch.device) -> list[Candidate]:
    """Every backend with its reasons, in the registry's order."""
    states = {name: registry.state(name) for name in registry.names()}
    reasons = {name: registry.reasons(name, spec, device) if state.ok else () for name, state in states.items()}
    return [Candidate(name, states[name], reasons[name]) for name in states]


def unavailable_text(state: Availability) -> str:
    return f"{state.reason}; install with: {state.install}" if state.install else state.reason
