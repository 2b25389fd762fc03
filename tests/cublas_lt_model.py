"""cuBLASLt on host memory, for tests: descriptions are kept as they are set, and a call computes what they say."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from multigemm.backends.cublas import lt
from tests.cublas_model import NUMPY, _matrix

BY_SIZE: dict[int, Any] = {4: ctypes.c_int32, 8: ctypes.c_int64}


class ModelLt:
    """The entry points that `lt` uses. `asked` are the extents that the heuristic was asked for; `refused` says
    which numbers of rows an algorithm made for others does not run; `none`: the heuristic has no answer."""

    def __init__(self) -> None:
        self.made: dict[int, dict[int, Any]] = {}
        self.alive: set[int] = set()
        self.asked: list[tuple[int, int, int]] = []
        self.calls: list[int] = []
        self.none, self.refused = False, set[int]()

    def __getattr__(self, name: str) -> Callable[..., int]:
        for verb in ("Create", "SetAttribute", "Destroy"):
            if name.endswith(verb):
                return getattr(self, f"_{verb}")  # type: ignore[no-any-return]
        raise AttributeError(name)

    def _Create(self, to: Any, *arguments: Any) -> int:
        to._obj.value = len(self.made) + 1
        self.made[to._obj.value] = {-i: argument.value for i, argument in enumerate(arguments, 1)}
        self.alive.add(to._obj.value)
        return 0

    def _SetAttribute(self, what: Any, attribute: int, value: Any, size: Any) -> int:
        assert ctypes.sizeof(value._obj) == size.value
        self.made[what.value][attribute] = value._obj.value
        return 0

    def _Destroy(self, what: Any) -> int:
        self.alive.remove(what.value)
        return 0

    def _extents(self, described: Any, first: Any, out: Any) -> tuple[int, int, int]:
        operand, result = self.made[first.value], self.made[out.value]
        k = operand[-2] if self.made[described.value][lt.FIRST_TRANSPOSED] else operand[-3]
        return result[-2], result[-3], k

    def cublasLtMatmulAlgoGetHeuristic(self, blas: Any, described: Any, *rest: Any) -> int:
        first, _, c, out, preference, wanted, answer, count = rest
        assert c.value == out.value
        assert wanted == 1
        assert self.made[preference.value][lt.REDUCTIONS] == lt.IN_COMPUTE_TYPE
        extents = self._extents(described, first, out)
        self.asked.append(extents)
        answer._obj.algorithm[0], answer._obj.workspace, count._obj.value = extents[1], 64, int(not self.none)
        return 0

    def cublasLtMatmulAlgoCheck(self, blas: Any, described: Any, *rest: Any) -> int:
        first, _, _, out, _algorithm, checked = rest
        checked._obj.workspace = 32
        return 15 if self._extents(described, first, out)[1] in self.refused else 0

    def cublasLtMatmul(self, blas: Any, described: Any, *rest: Any) -> int:
        alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, _algorithm, _space, size, _stream = rest
        assert beta._obj.value == 0
        assert (c.value, of_c.value) == (d.value, of_d.value)
        assert size.value in (32, 64)
        assert all(what.value in self.alive for what in (described, of_a, of_b, of_d))
        told = self.made[described.value]
        count = self.made[of_d.value].get(lt.BATCH, 1)
        self.calls.append(count)
        for i in range(count):
            first, second, out = (self._member(x.value, of, i) for x, of in ((a, of_a), (b, of_b), (d, of_d)))
            first = first.T if told[lt.FIRST_TRANSPOSED] else first
            second = second.T if told[lt.SECOND_TRANSPOSED] else second
            with np.errstate(all="ignore"):
                wide = alpha._obj.value * (first.astype(np.float64) @ second.astype(np.float64)).astype(np.float32)
                out[...] = self._finished(told, wide, i).astype(out.dtype)
        return 0

    def _member(self, address: int, of: Any, i: int) -> npt.NDArray[Any]:
        told = self.made[of.value]
        step = told.get(lt.BATCH_STEP, 0) * np.dtype(NUMPY[told[-1]]).itemsize
        return _matrix(address + i * step, told[-1], told[-2], told[-3], told[-4])

    def _finished(self, told: dict[int, Any], wide: Any, i: int) -> Any:
        if told[lt.EPILOGUE] & lt.ADD_BIAS:
            kind = told[lt.BIAS_TYPE]
            at = told[lt.BIAS] + i * told[lt.BIAS_STEP] * np.dtype(NUMPY[kind]).itemsize
            assert at % lt.ALIGNMENT == 0
            wide = wide + _matrix(at, kind, wide.shape[0], 1, wide.shape[0]).astype(np.float32)
        return np.where(wide < 0, 0, wide) if told[lt.EPILOGUE] & lt.RELU else wide
