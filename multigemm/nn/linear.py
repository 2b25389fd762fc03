"""`GroupedLinear`: G linear layers in one call, each on its own rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from multigemm.backends import registry
from multigemm.errors import InvalidProblem
from multigemm.integrations.torch_op import grouped_gemm
from multigemm.problem import epilogue
from multigemm.problem.grouping import Kind, make_grouping
from multigemm.problem.spec import ACTIVATIONS, FLOAT_DTYPES

Cut = Tensor | Sequence[int] | None


def check_layer(backend: str, dtype: torch.dtype | None, **extents: Any) -> None:
    """Refuses extents, dtypes or names of which no layer can be made, and backends that do not exist."""
    for name, value in extents.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
            raise InvalidProblem(f"{name}={value!r}; it must be a whole number, 0 or more")
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise InvalidProblem(f"dtype={dtype}; weights that learn are one of {', '.join(map(str, FLOAT_DTYPES))}")
    if backend != "auto":
        for name in backend.split(","):
            registry.check(name)


def init_linear_(weight: Tensor, bias: Tensor | None = None) -> None:
    """Initialises every matrix [out, in] of a stack as torch.nn.Linear does: uniform in +-1/sqrt(in)."""
    bound = 1 / math.sqrt(weight.shape[-1]) if weight.shape[-1] else 0.0
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)


def _on(x: Tensor, kind: Kind, cut: Cut, groups: int) -> Tensor | None:
    """A cut as a tensor on the device of `x`. A cut from elsewhere is checked, because it is read anyway."""
    if cut is None or (isinstance(cut, Tensor) and cut.device == x.device):
        return cut
    if torch.compiler.is_compiling():
        return torch.as_tensor(cut, device=x.device)
    if x.dim() == 2:  # any other has no rows to cut, and is refused as a whole
        given: dict[str, Any] = {"offsets": None, "sizes": None, "ends": None, kind: cut}
        make_grouping(**given, groups=groups, total=x.shape[0], device=x.device, full=False)
    return torch.as_tensor(cut, dtype=None if isinstance(cut, Tensor) else torch.int64, device=x.device)


class GroupedLinear(nn.Module):
    """`y[rows of g] = act(x[rows of g] @ weight[g].T + bias[g])`, all groups in one call.

    `weight` is [groups, out_features, in_features] and `bias` [groups, out_features]: a stack of what
    `groups` modules of torch.nn.Linear hold. The rows of x are cut by one of `offsets` [groups + 1],
    `sizes` [groups] and `ends` [groups]; rows that no group owns give zeros. Cuts that lie on the host
    are checked. An x of shape [groups, rows, in_features] needs no cut.

    Args:
        groups: how many layers there are.
        in_features, out_features: of each layer.
        bias: whether the layers have biases.
        activation: None, "relu", "gelu", "gelu_tanh" or "silu"; it is fused.
        backend: a name, names joined by commas, or "auto".
        batch_invariant: as in a problem.
        device, dtype: of the weights.

    Raises:
        InvalidProblem: an extent or a name has no meaning.

    Example:
        >>> import torch
        >>> layer = GroupedLinear(groups=3, in_features=4, out_features=2)
        >>> layer(torch.ones(6, 4), sizes=[1, 0, 5]).shape
        torch.Size([6, 2])
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str | None = None,
        backend: str = "auto",
        batch_invariant: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        epilogue.one_of(activation, "activation", ACTIVATIONS, optional=True)
        check_layer(backend, dtype, groups=groups, in_features=in_features, out_features=out_features)
        self.groups, self.in_features, self.out_features = groups, in_features, out_features
        self.activation, self.backend, self.batch_invariant = activation, backend, batch_invariant
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.empty(groups, out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh weights, distributed like those of torch.nn.Linear."""
        init_linear_(self.weight, self.bias)

    def forward(self, x: Tensor, offsets: Cut = None, *, sizes: Cut = None, ends: Cut = None) -> Tensor:
        """All layers on their rows.

        Args:
            x: [T, in_features], or [groups, rows, in_features] without a cut.
            offsets, sizes, ends: one of them cuts the rows; on the host or on the device of x.

        Returns:
            [T, out_features], or [groups, rows, out_features].
        """
        return grouped_gemm(
            x,
            self.weight.transpose(1, 2),
            offsets=_on(x, "offsets", offsets, self.groups),
            sizes=_on(x, "sizes", sizes, self.groups),
            ends=_on(x, "ends", ends, self.groups),
            bias=self.bias,
            activation=self.activation,
            backend=self.backend,
            batch_invariant=self.batch_invariant,
        )

    def extra_repr(self) -> str:
        parts = [
            f"groups={self.groups}, in_features={self.in_features}, out_features={self.out_features}",
            f"bias={self.bias is not None}",
        ]
        if self.activation:
            parts.append(f"activation={self.activation!r}")
        if self.backend != "auto":
            parts.append(f"backend={self.backend!r}")
        if self.batch_invariant is not None:
            parts.append(f"batch_invariant={self.batch_invariant}")
        return ", ".join(parts)
