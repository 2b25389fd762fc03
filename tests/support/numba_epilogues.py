"""The epilogue that the tensor-core kernels decide at run time, against the compiled-in one, bit for bit; run as a
program in Numba's simulator, it prints how many pairs it compared."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from multigemm.backends.numba.arguments import KIND
from multigemm.backends.numba.kernels.epilogue import make_any_finish, make_any_store, make_finish
from multigemm.backends.numba.kernels.memory import loader, storer
from multigemm.cuda.arguments import ACTIVATION_CODES

NAMED = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
ALPHA, BETA = np.float32(2), np.float32(-1)


def finishes() -> int:
    """Every activation, with C and bias of every type and without."""
    memory, count, kinds = torch.randn(16, dtype=torch.float64), 0, (None, *NAMED)
    for activation, c, bias in itertools.product(ACTIVATION_CODES, kinds, kinds[:4]):
        arrays = [memory.to(NAMED[name or "f32"]) for name in (c, bias)]
        at_c, at_bias = (x.data_ptr() for x in arrays)
        codes = KIND[c] if c else 0, KIND[bias] if bias else 0
        compiled, chosen = make_finish("f32", activation, c, bias), make_any_finish("f32")
        for i, value in enumerate(np.array((0.5, -3.0, 40.0), np.float32)):
            want = compiled(value, ALPHA, BETA, at_c, i, at_bias, i + 1)
            got = chosen(
                value, ALPHA, BETA, ACTIVATION_CODES[activation], codes[0], at_c, i, codes[1], at_bias, i + 1
            )  # fmt: skip
            assert float(want) == float(got), (activation, c, bias, value)
            count += 1
    return count


def stores() -> int:
    """Every type of result."""
    for name, dtype in NAMED.items():
        one, two = (torch.zeros(4, dtype=dtype) for _ in range(2))
        storer(name, "f32")(one.data_ptr(), 2, 1.2345678)
        make_any_store("f32")(two.data_ptr(), 2, 1.2345678, KIND[name])
        assert torch.equal(one, two) and float(loader(name)(one.data_ptr(), 2)) != 0, name
    return len(NAMED)


if __name__ == "__main__":
    print(finishes() + stores())
