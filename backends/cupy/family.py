"""All kernels that a layout may ever ask for, compiled together when it first needs one.

The best config depends on token and group counts, which change from call to call. Compiling each
kernel when its first count turns up would stall some later call for seconds; so the first call of a
layout compiles, side by side, whatever the heuristic would choose for any other count.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from multigemm.backends.cupy.config import Config, heuristic
from multigemm.backends.cupy.specs import MAX_GROUPS
from multigemm.problem.spec import ProblemSpec

TOTALS = (0, *(1 << i for i in range(21)))
GROUPS = (*(1 << i for i in range(10)), MAX_GROUPS)


def members(spec: ProblemSpec, capability: tuple[int, int]) -> tuple[Config, ...]:
    """The heuristic's choices for the spec's layouts and extents, whatever the number of tokens and groups."""
    return _members(replace(spec, total=0, groups=1, largest=0), capability)


@lru_cache(maxsize=1024)
def _members(spec: ProblemSpec, capability: tuple[int, int]) -> tuple[Config, ...]:
    seen = {heuristic(replace(spec, total=t, groups=g), capability): None for t in TOTALS for g in GROUPS}
    return tuple(seen)
