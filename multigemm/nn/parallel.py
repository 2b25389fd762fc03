"""`ExpertParallel`: experts spread over the ranks of a mesh, the way `parallelize_module` applies styles.

    parallelize_module(model, mesh["ep"], {"layers.0.moe": ExpertParallel(chunks=2)})
    parallelize_module(model, mesh["ep", "tp"], {"layers.0.moe": ExpertParallel()})

The weights become DTensors, sharded by expert, so optimizers and checkpoints see what they know; the last ranks hold
fewer experts or none where they do not divide. On a mesh of two dimensions the second slices each expert's intermediate
features. Each rank passes its own tokens, ranks along the second dimension the same ones. Weights outside of the
experts stay as they are: where ranks hold different tokens, their gradients are to be averaged by data parallelism.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from multigemm.errors import InvalidProblem
from multigemm.integrations.expert_parallel import groups_of
from multigemm.integrations.rank_agreement import same_on_all_ranks
from multigemm.nn.moe import GATED, Experts, MoE


class ExpertParallel(ParallelStyle):
    """Spreads an `Experts` (or the experts of a `MoE`) over a mesh of one or two dimensions.

    Args:
        chunks: each rank's tokens are cut in so many pieces, whose rows travel while others are multiplied. Fused
            experts multiply a rank's own tokens beside the others' in any case.

    Raises:
        InvalidProblem: `chunks` is below 1; or, when it is applied, the module is none of these, ranks differ in what
            they apply it to, or intermediate features do not divide by the ranks that slice them.

    Example:
        parallelize_module(model, mesh["ep"], {"layers.0.moe": ExpertParallel(chunks=2)})
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
        group, slices = groups_of(device_mesh)
        shapes = {name: (tuple(p.shape), str(p.dtype)) for name, p in experts.named_parameters(recurse=False)}
        same_on_all_ranks("the experts", {**shapes, "chunks": self.chunks, "fused": experts.fused}, group)
        if slices is not None and experts.intermediate_size % slices.size():
            raise InvalidProblem(
                f"{experts.intermediate_size} intermediate features cannot be sliced evenly over {slices.size()} "
                "ranks: choose a mesh dimension that divides them"
            )
        for name, parameter in list(experts.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                places = [Shard(0), _slice(experts, name)][: device_mesh.ndim]
                spread = distribute_tensor(parameter.detach(), device_mesh, places)
                experts.register_parameter(name, nn.Parameter(spread, parameter.requires_grad))
        experts.mesh, experts.chunks = device_mesh, self.chunks
        return module


def _slice(experts: Experts, name: str) -> Any:
    """How the second mesh dimension slices a weight: along the intermediate features.

    A gated weight holds them twice, as two halves or interleaved; each rank needs the same slice of both.
    """
    bias, stacked, layout = name.endswith("_bias"), experts.network.stacked, experts.network.glu_layout
    if name.startswith("down_proj"):
        return Replicate() if bias else Shard(1 if stacked else 2)
    axis = 2 if stacked and not bias else 1
    halves = experts.activation in GATED and layout != "interleaved"
    return _StridedShard(axis, split_factor=2) if halves else Shard(axis)
