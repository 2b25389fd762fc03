"""The contract of a launch, checked where buffers can be guarded and poisoned; one JSON line for each check.

Run in the simulator by `test_simulator.py` and on a GPU by `test_gpu.py`.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.numba import BACKEND
from multigemm.planning.staging import stage, staged_spec
from tests.support.numba_cases import DTYPES, Maker, guarded, operands

Check = tuple[str, bool, str]
NAN = float("nan")
ONE, TWO = np.float32(1), np.float32(2)
NAMED = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


def both(device: str, dtype: str, form: str, scale: int, config: Any) -> Iterator[Check]:
    """Guards stay, owned elements are right, and the others are untouched when the caller owns `out`."""
    make = Maker(7, DTYPES[dtype], device, "row")
    a, b, grouping = operands(form, make, scale)
    shape = mg.GroupedGemmProblem(a, b, **grouping).out_shape
    storage, view = guarded(shape, make.dtype, device)
    before = storage.clone()
    problem = mg.GroupedGemmProblem(a, b, **grouping, out=view)
    mg.solve(problem, backend="numba", config=config)
    yield "owned", *verdict(problem, view)
    size = view.numel()
    outside = torch.cat([storage[: (storage.numel() - size) // 2], storage[(storage.numel() + size) // 2 :]])
    same = torch.cat([before[: (storage.numel() - size) // 2], before[(storage.numel() + size) // 2 :]])
    clean = torch.equal(outside.view(torch.uint8), same.view(torch.uint8))
    yield "guards", clean, "" if clean else "a guard band was overwritten"


def verdict(problem: mg.GroupedGemmProblem, out: Any) -> tuple[bool, str]:
    found = mg.verify(problem, out)
    return bool(found), str(found)


def lies(device: str, dtype: str, scale: int, config: Any) -> Iterator[Check]:
    """Offsets that are not monotone or point past the end write nothing outside `out`."""
    make = Maker(3, DTYPES[dtype], device, "row")
    for values in ([9, 4, 30, -5], [-7, 100, 2, 2], [2**30, -(2**30), 5, 1]):
        ends = torch.tensor(values, dtype=torch.int32, device=device)
        a, b = make.matrix(12 * scale, 8 * scale), make.matrix(4, 8 * scale, 16 * scale)
        storage, view = guarded((12 * scale, 16 * scale), make.dtype, device)
        before = storage.clone()
        honest = torch.tensor([3, 5, 9, 12], dtype=torch.int32, device=device) * scale
        problem = mg.GroupedGemmProblem(a, b, ends=honest, out=view)
        spec = staged_spec(problem)
        ops = stage(problem, spec, view).ops
        ops.ends, ops.head = ends, False
        chosen = config or BACKEND.configs(spec, view.device)[0]
        BACKEND.plan(spec, chosen, view.device).bind(ops)()
        guard = (storage.numel() - view.numel()) // 2
        clean = all(
            torch.equal(storage[s].view(torch.uint8), before[s].view(torch.uint8))
            for s in (slice(0, guard), slice(-guard, None))
        )
        yield "offsets that lie", clean, "" if clean else f"ends {values} reached outside out"


def alpha_zero(device: str, dtype: str, form: str, scale: int, config: Any) -> Iterator[Check]:
    """alpha = 0 reads neither A nor B: NaN in them must not show."""
    make = Maker(5, DTYPES[dtype], device, "row")
    a, b, grouping = operands(form, make, scale)
    a = [x * NAN for x in a] if isinstance(a, list) else a * NAN
    out = mg.solve(mg.GroupedGemmProblem(a, b, **grouping, alpha=0.0), backend="numba", config=config)
    clean = all(bool((x == 0).all()) for x in (out if isinstance(out, list) else [out]))
    yield "no operands read", clean, "" if clean else "NaN of an operand that must not be read"


def in_place(device: str, dtype: str, scale: int, config: Any) -> Iterator[Check]:
    """The same buffer as c and out."""
    make = Maker(9, DTYPES[dtype], device, "row")
    a, b, grouping = operands("jagged_m", make, scale)
    shape = mg.GroupedGemmProblem(a, b, **grouping).out_shape
    c = make.values(*shape)
    problem = mg.GroupedGemmProblem(a, b, **grouping, c=c.clone(), beta=1.0)
    wanted = mg.solve(problem, backend="numba", config=config)
    mg.solve(mg.GroupedGemmProblem(a, b, **grouping, c=c, out=c, beta=1.0), backend="numba", config=config)
    start, end = int(grouping["offsets"][0]), int(grouping["offsets"][-1])
    same = torch.equal(c[start:end], wanted[start:end])
    yield "in place", same, "" if same else "c is out differs from c apart from out"


def rebinding(device: str, dtype: str, scale: int, config: Any) -> Iterator[Check]:
    """A plan sees operands that changed in place, and repeats its bits."""
    make = Maker(11, DTYPES[dtype], device, "row")
    a, b, grouping = operands("jagged_m", make, scale)
    problem = mg.GroupedGemmProblem(a, b, **grouping)
    plan = mg.plan(problem, backend="numba", config=config)
    first: Tensor = plan().clone()
    same = torch.equal(plan(), first)
    yield "rebinding", same, "" if same else "two runs of one plan differ"
    a.copy_(make.matrix(*a.shape))
    yield "rebinding", *verdict(problem, plan())


def checks(device: str, dtypes: Any, scale: int = 1, config: Any = None) -> Iterator[tuple[str, Check]]:
    for dtype in dtypes:
        for form in ("jagged_m", "jagged_n", "jagged_k", "batched", "masked"):
            for check in both(device, dtype, form, scale, config):
                yield f"{form} {dtype}", check
            if dtype != "int8":
                for check in alpha_zero(device, dtype, form, scale, config):
                    yield f"{form} {dtype}", check
        for several in (lies, in_place, rebinding):
            for check in several(device, dtype, scale, config):
                yield f"{several.__name__} {dtype}", check


def epilogues() -> Iterator[tuple[str, Check]]:
    """The epilogue that is decided at run time, of the tensor-core kernels, against the compiled-in one."""
    from multigemm.backends.numba.arguments import KIND
    from multigemm.backends.numba.kernels.epilogue import make_any_finish, make_any_store, make_finish
    from multigemm.backends.numba.kernels.memory import loader, storer
    from multigemm.cuda.arguments import ACTIVATION_CODES

    memory = torch.randn(16, dtype=torch.float64)
    kinds: tuple[str | None, ...] = (None, "f16", "bf16", "f32", "f64")
    for activation, c, bias in itertools.product(ACTIVATION_CODES, kinds, kinds[:4]):
        arrays = [memory.to(NAMED[name or "f32"]) for name in (c, bias)]
        addresses = [x.data_ptr() for x in arrays]
        fixed, chosen = make_finish("f32", activation, c, bias), make_any_finish("f32")
        same = True
        for i, value in enumerate(np.array((0.5, -3.0, 40.0), np.float32)):
            want = fixed(value, TWO, -ONE, addresses[0], i, addresses[1], i + 1)
            number = ACTIVATION_CODES[activation]
            codes = KIND[c] if c else 0, KIND[bias] if bias else 0
            got = chosen(value, TWO, -ONE, number, codes[0], addresses[0], i, codes[1], addresses[1], i + 1)
            same = same and float(want) == float(got)
        yield f"{activation} {c} {bias}", ("epilogue", same, "" if same else "differs")
    for name in kinds[1:]:
        assert name
        one, two = (torch.zeros(4, dtype=NAMED[name]) for _ in range(2))
        storer(name, "f32")(one.data_ptr(), 2, 1.2345678)
        make_any_store("f32")(two.data_ptr(), 2, 1.2345678, KIND[name])
        same = torch.equal(one, two) and float(loader(name)(one.data_ptr(), 2)) != 0
        yield f"store {name}", ("epilogue", same, "" if same else "differs")


def main() -> None:
    for title, (what, ok, text) in epilogues():
        print(json.dumps({"what": what, "title": title, "ok": ok, "text": text}))
    for title, (what, ok, text) in checks("cpu", ("float32", "bfloat16")):
        print(json.dumps({"what": what, "title": title, "ok": ok, "text": text}))


if __name__ == "__main__":
    assert os.environ.get("MULTIGEMM_EMULATE") == "1"
    main()
