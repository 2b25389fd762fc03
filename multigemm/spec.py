"""The public name of `multigemm.problem.spec`: what backends of other packages import."""

from multigemm.problem.spec import OperandSpec as OperandSpec
from multigemm.problem.spec import ProblemSpec as ProblemSpec
