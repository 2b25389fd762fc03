"""Numbers in NumPy: what stored ones mean, quantised ones too, and the rounding function of the reference.

Why not the libraries' own casts: torch's float64 -> bfloat16 and float64 -> float16 and ml_dtypes'
float64 -> bfloat16 go through float32 and so round twice (1 + 2^-8 + 2^-40 becomes 1.0, not
1.0078125). Here a value is first rounded *to odd* to float32, which keeps in its last bit whether
anything was cut off; rounding that to a format of at most 22 significant bits is then the same as
rounding the exact value once (Boldo and Melquiond, 2008).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack

Array = npt.NDArray[Any]

_NUMPY: dict[torch.dtype, npt.DTypeLike] = {
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int8: np.int8,
    torch.int32: np.int32,
    torch.int64: np.int64,
}
SIGNIFICAND = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
"""Significant bits, the hidden one included."""
_MIN_EXPONENT = {torch.float16: -14, torch.bfloat16: -126, torch.float32: -126, torch.float64: -1022}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The NumPy dtype of a torch dtype (ml_dtypes' for bfloat16)."""
    return np.dtype(_NUMPY[dtype])


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff u: half the distance from 1 to the next number; 0 for integers."""
    return 2.0 ** -SIGNIFICAND[dtype] if dtype in SIGNIFICAND else 0.0


def largest(dtype: torch.dtype) -> float:
    """The largest finite number."""
    return float(torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max)


def to_numpy(value: Any) -> Array:
    """A contiguous NumPy copy or view of a torch tensor on any device, or of a NumPy, CuPy or DLPack array."""
    if isinstance(value, np.ndarray):
        return value
    tensor = value if isinstance(value, torch.Tensor) else from_dlpack(value)
    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if not hasattr(ml_dtypes, name):
        return tensor.numpy()
    bits = torch.uint8 if tensor.itemsize == 1 else torch.int16
    return tensor.view(bits).numpy().view(getattr(ml_dtypes, name))


def widen(value: Any) -> Array:
    """The exact values, contiguous: float64 for floats, int64 for integers."""
    array = to_numpy(value)
    whole = array.dtype.kind in "iu"
    return np.ascontiguousarray(array.astype(np.int64 if whole else np.float64))


def round_to_odd(values: Array) -> npt.NDArray[np.float32]:
    """Rounds to float32 toward zero and sets the last bit wherever the value was not exact."""
    with np.errstate(over="ignore", under="ignore"):
        near = values.astype(np.float32)
    inexact = (near != values) & ~np.isnan(values)
    bits = near.view(np.uint32).copy()
    bits -= inexact & (np.abs(near) > np.abs(values))  # magnitude grows with the bits: one step toward zero
    bits |= inexact
    return bits.view(np.float32)


def round_once(values: Array, dtype: torch.dtype) -> Array:
    """float64 or longdouble values to `dtype`, rounded once, to nearest, ties to even; integers wrap."""
    if values.dtype.kind in "iu":
        return values.astype(numpy_dtype(dtype))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype in (torch.float32, torch.float64):
            return values.astype(numpy_dtype(dtype))
        return round_to_odd(values).astype(numpy_dtype(dtype))


def ulp(values: Array, dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """The distance between the neighbours in `dtype` at each |value|; its smallest one below the normals."""
    wide = np.abs(values.astype(np.float64))
    exponent = np.where(wide == 0, _MIN_EXPONENT[dtype], np.frexp(wide)[1] - 1)
    exponent = np.maximum(exponent, _MIN_EXPONENT[dtype])
    return np.asarray(np.ldexp(1.0, exponent - (SIGNIFICAND[dtype] - 1)))


# --- quantised operands -------------------------------------------------------------------------------


def decode(x: Any, packed: str = "") -> Array:
    """The exact elements in float64; of packed bytes two along the second last direction, the low four bits first."""
    array = to_numpy(x)
    if not packed:
        return np.asarray(array.astype(np.float64))
    codes = array.view(np.uint8)
    found = np.empty((*codes.shape[:-2], 2 * codes.shape[-2], codes.shape[-1]), np.uint8)
    found[..., 0::2, :], found[..., 1::2, :] = codes & 15, codes >> 4
    if packed == "e2m1":
        return np.asarray(found.view(ml_dtypes.float4_e2m1fn).astype(np.float64))
    whole = found.astype(np.float64)
    return np.asarray(np.where(whole > 7, whole - 16, whole) if packed == "int4" else whole)


def decode_scale(x: Any) -> Array:
    """The exact scales in float64: code c of e8m0 is 2^(c - 127), also for c = 0; 255 is NaN."""
    array = to_numpy(x)
    if array.dtype != np.dtype(ml_dtypes.float8_e8m0fnu):
        return array.astype(np.float64)
    codes = array.view(np.uint8).astype(np.int64)
    return np.asarray(np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127)))
