"""`ExpertParallel`: experts spread over the ranks of a mesh, the way `parallelize_module` applies styles.

    parallelize_module(model, mesh["ep"], {"layers.0.moe.experts": ExpertParallel(chunks=2)})

The weights become DTensors, sharded by expert, so optimizers and checkpoints see what they know. Each
rank passes its own tokens. Weights outside of the experts stay as they are: where ranks hold different
tokens, their gradients are to be averaged by data parallelism, as without experts.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from multigemm.errors import InvalidProblem
from multigemm.integrations.expert_parallel import experts_here, group_of
from multigemm.nn.moe import Experts, MoE


class ExpertParallel(ParallelStyle):
    """Spreads an `Experts` (or the experts of a `MoE`) over a one-dimensional mesh.

    `chunks` cuts each rank's tokens in pieces whose rows travel while others are multiplied.
    """

    def __init__(self, *, chunks: int = 1) -> None:
        super().__init__()
        if chunks < 1:
            raise InvalidProblem(f"chunks={chunks} must be 1 or more")
        self.chunks = chunks

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        experts = module.experts if isinstance(module, MoE) else module
        if not isinstance(experts, Experts):
            raise InvalidProblem(
                f"ExpertParallel was applied to {type(module).__name__}; it spreads multigemm.nn.Experts and MoE"
            )
        experts_here(experts.num_experts, group_of(device_mesh))
        for name, parameter in list(experts.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                spread = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
                experts.register_parameter(name, nn.Parameter(spread, parameter.requires_grad))
        experts.mesh, experts.chunks = device_mesh, self.chunks
        return module
