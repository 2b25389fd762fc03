"""Layers: a grouped linear layer, experts, a mixture of experts.

`multigemm.nn.parallel` spreads experts over the ranks of a mesh; it needs torch.distributed.
"""

from multigemm.integrations.fused_experts import experts_forward
from multigemm.nn.float8 import float8_grouped_mm
from multigemm.nn.linear import GroupedLinear
from multigemm.nn.moe import Experts, MoE

__all__ = ["Experts", "GroupedLinear", "MoE", "experts_forward", "float8_grouped_mm"]
