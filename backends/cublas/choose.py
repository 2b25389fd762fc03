"""Which variant runs a problem whose sizes are known; measured on an H100, see the table of each rule."""

from __future__ import annotations

import torch

from multigemm.backends.cublas.config import Variant, grouped_mm_reasons, grouped_reasons
from multigemm.backends.cublas.products import Product, merged
from multigemm.spec import ProblemSpec


def choose(spec: ProblemSpec, products: list[Product], device: torch.device) -> Variant:
    """The variant expected to be fastest for these products."""
    if len(products) < 2:
        return "loop"
    if len(merged(products)) == 1:
        return "batched"
    if not grouped_mm_reasons(spec, device):
        return "grouped_mm"
    return "batched" if grouped_reasons(spec) else "grouped"
