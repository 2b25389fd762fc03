"""Modules that multiply by many matrices at once: a grouped linear layer, experts, a mixture of experts."""

from multigemm.nn.linear import GroupedLinear
from multigemm.nn.moe import Experts, MoE

__all__ = ["Experts", "GroupedLinear", "MoE"]
