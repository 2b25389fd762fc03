"""cuBLAS as torch ships it: every way of calling it for groups, behind one name.

If the sizes are on the host, it chooses the call by them, and planning costs nothing: `decides_at_bind`. Float8
operands with scales of rows go to torch's scaled_grouped_mm; other quantised operands are refused.
"""

from __future__ import annotations

from multigemm.backend import BuiltinBackend
from multigemm.backends.cublas import choice, launch, support

BACKEND = BuiltinBackend(
    "cublas", support.availability, support.not_supported_reasons, choice.candidates, launch.plan, decides_at_bind=True
)
