"""A stand-in for the `grouped_gemm` package that MegaBlocks and Megatron call.

    from multigemm.integrations import gmm as grouped_gemm
    y = grouped_gemm.ops.gmm(x, w, batch_sizes, trans_b=True)

For programs that import the original by name, before they do:

    grouped_gemm.install()

`ops.gmm` has gradients; `backend.gmm` has none, transposes either operand and writes into `c`. Both accept more than
the originals: every dtype, any strides, empty groups, `batch_sizes` on either device and of either integer type, and
rows past the last group (zeros). `ops` and `backend` are modules, as in the original, because programs import them.
"""

from __future__ import annotations

import sys

from multigemm.errors import InvalidSetting
from multigemm.integrations.gmm import backend, ops

__all__ = ["backend", "install", "ops"]
ORIGINAL = "grouped_gemm"


def install() -> None:
    """Make `import grouped_gemm` find this package, in this process.

    Raises:
        InvalidSetting: another `grouped_gemm` was imported already.

    Example:
        >>> from multigemm.integrations import gmm
        >>> gmm.install()
        >>> import grouped_gemm
        >>> grouped_gemm is gmm
        True
    """
    found = sys.modules.get(ORIGINAL)
    if found is not None and found is not sys.modules[__name__]:
        where = getattr(found, "__file__", None) or "memory"
        raise InvalidSetting(f"{ORIGINAL} was imported from {where}: call install() before any program imports it")
    for part in ("", ".ops", ".backend"):
        sys.modules[ORIGINAL + part] = sys.modules[__name__ + part]
