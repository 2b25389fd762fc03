"""What a problem means: operands, groups, epilogue, spec, refusals. Launches nothing."""

from __future__ import annotations

from multigemm.problem.problem import GroupedGemmProblem as GroupedGemmProblem
