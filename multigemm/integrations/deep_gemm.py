"""Stand-ins for DeepGEMM's grouped float8 products, on every backend that takes float8, without alignment or
padding.

    from multigemm.integrations import deep_gemm

    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, scale_a), (b, scale_b), d, m_indices)

The names and parameters are DeepGEMM's. Scales are float32, float8_e8m0fnu, or four bytes of e8m0 in an int32; their
shapes say what they cover, so that `recipe`, `recipe_a` and `recipe_b` are not looked at, nor are `compiled_dims`,
`disable_ue8m0_cast`, `ensure_zero_padding` and the expected sizes. Results are written into `d`, of any dtype that
`grouped_gemm` writes.

What DeepGEMM asks for, its rows padded to an alignment, may stay, and need not: groups may have any number of rows, and
K of any group any extent. `use_psum_layout` is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multigemm import api
from multigemm.errors import InvalidProblem
from multigemm.quantize import turned

Pair = tuple[Tensor, Tensor]
PACKED = 4
"""Scales in e8m0 that an int32 holds, the first in the lowest byte."""


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    *,
    backend: Any = "auto",
) -> None:
    """`d[rows of g] = a[rows of g] @ b[g].T`: groups of rows that lie one after the other.

    Args:
        a: [T, K] and its scale [T, ceil(K / 128)] (or any that `grouped_gemm` takes).
        b: [G, N, K] and its scale [G, ceil(N / 128), ceil(K / 128)] or [G, N, ceil(K / 128)].
        d: [T, N], which is written.
        grouped_layout: [T], the group of each row, ascending; -1 marks padding. Rows of padding between groups get
            numbers of no meaning, those behind the last group are left as they are. Checked where it lies on the host.
        backend: as in `multigemm.grouped_gemm`; a keyword beyond DeepGEMM's.

    Raises:
        InvalidProblem: shapes, scales or the layout do not go together.

    Example:
        >>> import torch
        >>> from multigemm.quantize import quantize
        >>> a = quantize(torch.ones(4, 128), "e4m3", "1x128")
        >>> b = quantize(torch.ones(2, 128, 8), "e4m3", "128x128", side="b")
        >>> d, layout = torch.zeros(4, 8, dtype=torch.bfloat16), torch.tensor([0, 0, 1, -1])
        >>> m_grouped_fp8_gemm_nt_contiguous((a.data, a.scale), (b.data.mT, b.scale.mT), d, layout)
        >>> d[:, 0].tolist()
        [128.0, 128.0, 128.0, 0.0]
    """
    _refuse_psum(use_psum_layout)
    groups = b[0].shape[0]
    if grouped_layout.dim() != 1 or grouped_layout.shape[0] != a[0].shape[0]:
        raise InvalidProblem(
            f"grouped_layout has shape {tuple(grouped_layout.shape)}: it must hold the group of each of the "
            f"{a[0].shape[0]} rows of a"
        )
    scale_a, scale_b = _scale(a[1], a[0].shape[1]), _scale(b[1], b[0].shape[2])
    offsets = _offsets(grouped_layout, groups)
    api.grouped_gemm(a[0], b[0].mT, offsets=offsets, scale_a=scale_a, scale_b=turned(scale_b), out=d, backend=backend)


def m_grouped_fp8_gemm_nn_contiguous(
    a: Pair, b: Pair, d: Tensor, grouped_layout: Tensor, *others: Any, **keywords: Any
) -> None:
    """`d[rows of g] = a[rows of g] @ b[g]`, with b [G, K, N] and its scale [G, ceil(K / 128), ceil(N / 128)].

    Args:
        a, b, d, grouped_layout, others, keywords: as in `m_grouped_fp8_gemm_nt_contiguous`.

    Raises:
        InvalidProblem: shapes, scales or the layout do not go together.

    Example:
        >>> import torch
        >>> ones = torch.ones(2, 16, 8).to(torch.float8_e4m3fn)
        >>> d, layout, one = torch.zeros(2, 8), torch.tensor([0, 1]), torch.tensor(1.0)
        >>> m_grouped_fp8_gemm_nn_contiguous((ones[:, :, 0], one), (ones, one), d, layout)
        >>> d.unique()
        tensor([16.])
    """
    m_grouped_fp8_gemm_nt_contiguous(a, (b[0].mT, turned(b[1])), d, grouped_layout, *others, **keywords)


def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int = 0,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    *,
    backend: Any = "auto",
) -> None:
    """`d[g, :masked_m[g]] = a[g, :masked_m[g]] @ b[g].T`; the other rows of d are left as they are.

    Args:
        a: [G, M, K] and its scale [G, M, ceil(K / 128)].
        b: [G, N, K] and its scale [G, ceil(N / 128), ceil(K / 128)] or [G, N, ceil(K / 128)].
        d: [G, M, N], which is written.
        masked_m: [G], rows of each group that count.
        backend: as in `multigemm.grouped_gemm`; a keyword beyond DeepGEMM's.

    Raises:
        InvalidProblem: shapes or scales do not go together.

    Example:
        >>> import torch
        >>> ones, one = torch.ones(2, 4, 16).to(torch.float8_e4m3fn), torch.tensor(1.0)
        >>> d = torch.zeros(2, 4, 4)
        >>> m_grouped_fp8_gemm_nt_masked((ones, one), (ones, one), d, torch.tensor([1, 3]), 2)
        >>> d.sum(dim=(1, 2)) / 64
        tensor([1., 3.])
    """
    scale_a, scale_b = _scale(a[1], a[0].shape[2]), _scale(b[1], b[0].shape[2])
    api.grouped_gemm(
        a[0], b[0].mT, valid_rows=masked_m, scale_a=scale_a, scale_b=turned(scale_b), out=d, backend=backend
    )


def k_grouped_fp8_gemm_tn_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    ks_cpu: Sequence[int] | None,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 128),
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
    *,
    backend: Any = "auto",
) -> None:
    """`d[g] = a[tokens of g].T @ b[tokens of g] (+ c[g])`: weight gradients.

    Args:
        a: [T, M] and its scale [sum of ceil(K_g / block), M].
        b: [T, N] and its scale [sum of ceil(K_g / block), N].
        d: [G, M, N], which is written; it may be c.
        ks_cpu: tokens of each group; None: `grouped_layout` says them.
        grouped_layout: [G], the same on the device.
        c: what is added; None: nothing.
        recipe: its last number is the block, of 32 or 128 tokens.
        backend: as in `multigemm.grouped_gemm`; a keyword beyond DeepGEMM's.

    Raises:
        InvalidProblem: shapes or scales do not go together.

    Example:
        >>> import torch
        >>> ones, scale = torch.ones(256, 4).to(torch.float8_e4m3fn), torch.ones(2, 4)
        >>> d, ks = torch.zeros(2, 4, 4), [128, 128]
        >>> k_grouped_fp8_gemm_tn_contiguous((ones, scale), (ones, scale), d, ks, torch.tensor(ks))
        >>> d.unique()
        tensor([128.])
    """
    _refuse_psum(use_psum_layout)
    _refuse_packed(a[1], b[1])
    block, sizes = recipe[2], grouped_layout if ks_cpu is None else list(ks_cpu)
    lengths = grouped_layout if ks_cpu is None else torch.tensor(sizes, device=a[0].device)
    spread = [_spread(scale, lengths, x.shape[0], block) for x, scale in (a, b)]
    api.grouped_gemm(
        a[0].mT, b[0], sizes=sizes, jagged="k", scale_a=spread[0].mT, scale_b=spread[1], c=c, out=d, backend=backend
    )


def k_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    ks_cpu: Sequence[int],
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 128),
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
    *,
    backend: Any = "auto",
) -> None:
    """`d[g] = a_g @ b_g.T (+ c[g])`: weight gradients from transposed operands [M, K_g] and [N, K_g], flattened one
    after the other.

    Args:
        a: M * T elements, and its scale [M, sum of ceil(K_g / block)].
        b: N * T elements, and its scale [N, sum of ceil(K_g / block)].
        d, ks_cpu, grouped_layout, c, recipe, backend: as in `k_grouped_fp8_gemm_tn_contiguous`; `ks_cpu` is needed.

    Raises:
        InvalidProblem: shapes or scales do not go together.

    Example:
        >>> import torch
        >>> ones, scale = torch.ones(4 * 256).to(torch.float8_e4m3fn), torch.ones(4, 2)
        >>> d, ks = torch.zeros(2, 4, 4), [128, 128]
        >>> k_grouped_fp8_gemm_nt_contiguous((ones, scale), (ones, scale), d, ks, torch.tensor(ks))
        >>> d.unique()
        tensor([128.])
    """
    _refuse_psum(use_psum_layout)
    _refuse_packed(a[1], b[1])
    ks, (_, m, n) = list(ks_cpu), d.shape
    blocks = [-(-k // recipe[2]) for k in ks]
    sides = []
    for (x, scale), rows in ((a, m), (b, n)):
        if x.numel() != rows * sum(ks):
            raise InvalidProblem(f"an operand holds {x.numel()} elements; {rows} x {sum(ks)} are needed")
        parts = torch.split(x.view(-1), [rows * k for k in ks])
        matrices = [one.view(rows, k) for one, k in zip(parts, ks, strict=True)]
        sides.append((matrices, list(torch.split(scale, blocks, dim=1))))
    (left, scale_a), (right, scale_b) = sides
    old = None if c is None else list(c)
    api.grouped_gemm(
        left, [y.mT for y in right], scale_a=scale_a, scale_b=[s.mT for s in scale_b], c=old, out=list(d),
        backend=backend,
    )  # fmt: skip


# --- layouts and scales -----------------------------------------------------------------------------


def _refuse_psum(use_psum_layout: bool) -> None:
    if use_psum_layout:
        raise InvalidProblem(
            "use_psum_layout: groups that begin at aligned rows leave gaps, which offsets do not say: pass the group "
            "of each row, or call multigemm.grouped_gemm with rows that are not padded"
        )


def _refuse_packed(*scales: Tensor) -> None:
    if any(x.dtype is torch.int32 for x in scales):
        raise InvalidProblem("scales of a jagged K in int32 are packed by group: pass float32 or float8_e8m0fnu")


def _offsets(layout: Tensor, groups: int) -> Tensor:
    """Offsets [G+1] from the group of each row. Padding between two groups counts as rows of the group before it."""
    if not layout.is_cuda:
        owned = layout[layout >= 0]
        if len(owned) and (bool((owned.diff() < 0).any()) or int(owned[-1]) >= groups):
            raise InvalidProblem(f"grouped_layout must ascend from 0 to at most {groups - 1}, with -1 for padding")
    if not len(layout):
        return torch.zeros(groups + 1, dtype=torch.int64, device=layout.device)
    each = torch.arange(1, len(layout) + 1, device=layout.device)
    last = torch.where(layout >= 0, each, 0).amax()
    filled = layout.to(torch.int64).cummax(0).values
    starts = torch.searchsorted(filled, torch.arange(groups + 1, device=layout.device))
    return torch.minimum(starts, last)


def _scale(scale: Tensor, k: int) -> Tensor:
    """A scale [.., lines, blocks of K]. Bytes packed in int32 become e8m0."""
    if scale.dtype is not torch.int32:
        return scale
    codes = scale.contiguous().view(torch.uint8)
    return codes[..., : _blocks_in(codes.shape[-1], k)].view(torch.float8_e8m0fnu)


def _blocks_in(held: int, k: int) -> int:
    """How many scales of a row count; packed scales are padded to a multiple of four."""
    for block in (128, 64, 32):
        count = -(-k // block)
        if -(-count // PACKED) * PACKED == held:
            return count
    raise InvalidProblem(f"a scale holds {held} bytes for each row, which fits no block of 128, 64 or 32 of K = {k}")


def _spread(scale: Tensor, lengths: Tensor, total: int, block: int) -> Tensor:
    """Moves scales from [sum of ceil(K_g / block), lines] to [total // block + G, lines]: block j of g goes to
    starts[g] // block + g + j."""
    groups, lengths = len(lengths), lengths.to(torch.int64)
    starts = lengths.cumsum(0) - lengths
    counts = (lengths + block - 1) // block
    ends = counts.cumsum(0)
    at = torch.arange(scale.shape[0], device=scale.device)
    group = torch.searchsorted(ends, at, right=True)
    owned = group.clamp(max=max(groups - 1, 0))
    entry = starts[owned] // block + owned + at - (ends - counts)[owned]
    unused = total // block + groups
    whole = scale.new_ones(unused + 1, scale.shape[1], dtype=torch.float32).to(scale.dtype)
    entry = torch.where(group < groups, entry, unused).clamp(max=unused)
    codes = whole.view(torch.uint8) if scale.dtype is torch.float8_e8m0fnu else whole
    codes.index_copy_(0, entry, scale.view(codes.dtype))
    return whole[:unused]
