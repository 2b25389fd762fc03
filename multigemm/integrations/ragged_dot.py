"""`jax.lax.ragged_dot` for any array with DLPack: JAX, NumPy, CuPy or torch. The result is of the same kind.

    from multigemm.integrations.ragged_dot import ragged_dot

Rows past the last group are zero, which JAX leaves to the device. There is no gradient for JAX
tracers: this runs outside of jit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.dlpack

from multigemm import api
from multigemm.errors import InvalidProblem

KNOWN = ("numpy", "cupy", "torch", "numba")


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: Any = None,
    *,
    batch_invariant: bool | None = None,
) -> Any:
    """Multiplies row i of lhs by the matrix of its group. Parameters and their order are JAX's.

    Args:
        lhs: [m, k].
        rhs: [g, k, n].
        group_sizes: [g], rows of each group.
        precision: every one is honoured, since none is looser than what runs.
        preferred_element_type: of the result; that of the operands by default, int32 for int8.
        group_offset, out_sharding: must be None.
        batch_invariant: as in `multigemm.grouped_gemm`; a keyword beyond JAX's.

    Returns:
        [m, n], as the caller's kind of array; rows past the last group are zero.

    Raises:
        InvalidProblem: `group_offset` or `out_sharding` is given, or the operands have no meaning.

    Example:
        >>> import numpy as np
        >>> ragged_dot(np.ones((6, 4)), np.ones((3, 4, 2)), np.array([1, 0, 5])).shape
        (6, 2)
    """
    if group_offset is not None:
        raise InvalidProblem("group_offset is not supported: slice group_sizes, rhs and lhs instead")
    if out_sharding is not None:
        raise InvalidProblem(
            f"out_sharding={out_sharding!r} is not supported: the result lies on one device; leave it at None, and "
            "call jax.device_put on the result"
        )
    sizes = _index(group_sizes)
    result = api.grouped_gemm(lhs, rhs, sizes=sizes, out_dtype=preferred_element_type, batch_invariant=batch_invariant)
    return _give_back(result, lhs)


def _index(sizes: Any) -> Any:
    """Group sizes as an array that `grouped_gemm` reads. Integer types other than int32 and int64 are converted."""
    if not hasattr(sizes, "__dlpack__"):
        return sizes  # integers, or for the core to refuse
    tensor = sizes if isinstance(sizes, torch.Tensor) else torch.utils.dlpack.from_dlpack(sizes)
    if tensor.is_floating_point() or tensor.dtype is torch.bool:
        raise InvalidProblem(f"group_sizes has dtype {tensor.dtype}; it must hold integers")
    return tensor if tensor.dtype in (torch.int32, torch.int64) else tensor.to(torch.int64)


def _give_back(result: Any, like: Any) -> Any:
    """A torch result as an array of the library of `like`, by the array-API standard, without a copy."""
    if type(like).__module__.partition(".")[0] in KNOWN or not isinstance(result, torch.Tensor):
        return result
    namespace = getattr(like, "__array_namespace__", None)
    return result if namespace is None else namespace().from_dlpack(result)
