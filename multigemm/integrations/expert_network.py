"""The networks of a layer's experts: two products with a gate or an activation between them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigemm.integrations.gradients import gate_by_torch
from multigemm.integrations.layer_ops import geglu, swiglu
from multigemm.integrations.torch_op import grouped_gemm
from multigemm.problem.fused import Gate
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import GATES


class Network(NamedTuple):
    """The activation and layout of an expert's two products, without their weights: `up` [E, W, H] and `down`
    [E, H, I], or `stacked` [E, H, W] and [E, I, H]. W is 2 I with a gate, else I."""

    activation: str = "swiglu"
    glu_layout: str = "halves"
    glu_alpha: float = 1.0
    glu_beta: float = 0.0
    glu_limit: float | None = None
    stacked: bool = False
    recompute: bool = False
    backend: str = "auto"
    batch_invariant: bool | None = None

    @property
    def gate(self) -> Gate | None:
        """The gate; None if the activation is no gate."""
        if self.activation not in GATES:
            return None
        kind: Any = self.activation
        layout: Any = self.glu_layout
        return Gate(kind, layout, self.glu_alpha, self.glu_beta, self.glu_limit)

    @property
    def usual_gate(self) -> bool:
        """Whether the gate is SwiGLU or GEGLU of halves, for which a layer in steps has kernels."""
        return self.gate is not None and self.gate in (Gate("swiglu"), Gate("geglu"))

    def check(self) -> None:
        """Refuses gate numbers that no problem takes."""
        names = ("activation", "glu_layout", "glu_alpha", "glu_beta", "glu_limit")
        x, given = np.zeros((1, 2)), {name: getattr(self, name) for name in names}
        GroupedGemmProblem(x, x.repeat(2, 0), **given)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the first product, which has the gate inside."""
        if self.gate is None:
            return {"activation": self.activation}
        _, layout, alpha, beta, limit = self.gate
        numbers = {"glu_layout": layout, "glu_alpha": alpha, "glu_beta": beta, "glu_limit": limit}
        return {"activation": self.activation, **numbers}

    def activate(self, x: Tensor) -> Tensor:
        """Applies the activation or gate to results of the first product by torch functions; rounds once."""
        if self.usual_gate:
            return (swiglu if self.activation == "swiglu" else geglu)(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return gate_by_torch(wide, self.activation, self.gate).to(x.dtype)

    def in_steps(
        self, rows: Tensor, ends: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
        up_scales: dict[str, Any] | None = None, down_scales: dict[str, Any] | None = None,
    ) -> Tensor:  # fmt: skip
        """Runs the networks on rows [S, H] that are sorted by expert and cut by `ends` [E], by operators that have
        gradients of every order. `up_scales` and `down_scales`: the keywords of quantised weights."""
        gated = self.gate is not None
        hidden = self._linear(rows, ends, up, up_bias, None if gated else self.activation, up_scales)
        return self._linear(self.activate(hidden) if gated else hidden, ends, down, down_bias, None, down_scales)

    def _linear(
        self, rows: Tensor, ends: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, scales: Any
    ) -> Tensor:
        return grouped_gemm(
            rows, by_rows(weight, self.stacked), ends=ends, bias=bias, activation=activation, backend=self.backend,
            batch_invariant=self.batch_invariant, **(scales or {}),
        )  # fmt: skip


def by_rows(weight: Tensor, stacked: bool) -> Tensor:
    """The weights as the second operand of rows @ weight."""
    return weight if stacked else weight.transpose(1, 2)
