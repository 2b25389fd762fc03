"""The contract of a launch, checked where buffers can be guarded and poisoned; one JSON line for each check.

Run in the simulator by `test_simulator.py` and on a GPU by `test_gpu.py`.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from multigemm.problem.spec import Form
from multigemm.testing import Case, DeviceCase, Layout, Subject, check
from multigemm.testing.deep_oracles import Oracle, changed_sizes, lying_sizes, other_contents, run_oracles
from multigemm.testing.strategies import legal

Check = tuple[str, bool, str]
FORMS: tuple[Form, ...] = ("jagged_m", "jagged_n", "jagged_k", "batched", "masked")
ONE, TWO = np.float32(1), np.float32(2)
NAMED = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


def case_of(form: Form, dtype: str, scale: int) -> Case:
    """Uneven groups, one of them empty, whose result is the caller's; `scale` multiplies the other extents."""
    groups: dict[str, Any] = {"lengths": (5, 0, 9, 1), "head": 2, "tail": 3}
    if not form.startswith("jagged"):
        groups = {"lengths": (6 * scale, 0, 1, 5) if form == "masked" else (0, 0, 0)}
    extents: dict[str, Any] = {"m": 6 * scale, "n": 11 * scale, "k": 13 * scale}
    by_columns = Layout("col") if form == "jagged_k" else Layout()
    return legal(Case(form=form, dtype=dtype, mode="normal", given=True, a=by_columns, **extents, **groups))


def checks(device: str, dtypes: Any, scale: int = 1) -> Iterator[tuple[str, Check]]:
    """Values, guard bands and repeats; and the same where alpha is 0, where c is the result, and where sizes lie or
    operands have changed."""
    subject = Subject("numba")
    for dtype, form in itertools.product(dtypes, FORMS):
        case = case_of(form, dtype, scale)
        in_place = replace(case, beta=1.0, c_dtype=dtype, alias=True)
        asked: tuple[tuple[str, Case, tuple[Oracle, ...]], ...] = (
            ("values and guards", case, ()),
            ("no operands read", replace(case, alpha=0.0), ()),
            ("in place", in_place, ()),
            ("sizes that lie", case, (lying_sizes,)),
            ("rebinding", case, (other_contents, changed_sizes)),
        )
        for what, posed, oracles in asked:
            device_case = DeviceCase.from_case(posed, torch.device(device))
            outcome = check(device_case, subject)
            if outcome.ok:
                run_oracles(oracles, device_case, subject, outcome, seed=3)
            yield f"{form} {dtype}", (what, outcome.ran and outcome.ok, "; ".join(map(str, outcome.findings)))


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
