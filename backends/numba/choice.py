"""Which configs are valid for a spec on a device, the best guess first, and why."""

from __future__ import annotations

import torch

from multigemm.backends.numba.config import SIMT, SIMT_EMULATED, SIMT_LARGE, Config, signature_of
from multigemm.spec import ProblemSpec

FEW_ROWS = 64


def candidates(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """Configs that are right for this spec; the first is the heuristic's choice."""
    if device.type != "cuda":
        return [SIMT_EMULATED]
    return _simt(spec)


def _simt(spec: ProblemSpec) -> list[Config]:
    """Large tiles need a plain epilogue: others push their sums out of the registers."""
    if not signature_of(spec).plain or spec.compute == torch.float64:
        return [SIMT]
    rows = spec.largest or spec.total // max(spec.groups, 1)
    return [SIMT, SIMT_LARGE] if rows <= FEW_ROWS else [SIMT_LARGE, SIMT]


def why(config: Config, spec: ProblemSpec) -> str:
    """A sentence for a plan's repr."""
    return f"{config.kernel}: {spec.compute} on plain cores, {config.bm} x {config.bn} tiles"
