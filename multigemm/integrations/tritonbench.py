"""Entries for TritonBench's grouped_gemm operator, one for each backend.

    python run.py --op grouped_gemm --plugin multigemm.integrations.tritonbench.register

or, in a script of your own, before the operator is made:

    from multigemm.integrations import tritonbench
    tritonbench.register()                       # entries multigemm_auto, multigemm_cupy, ...

`register` takes TritonBench from July 2025 on. `ADAPTERS` holds the entries alone, `(operator, group_A, group_B, ...)`
-> function; what `register` does for each of them by TritonBench's own decorator is

    mark = register_benchmark(operator_name="grouped_gemm", func_name="multigemm_cupy", fwd_only=True)
    setattr(Operator, "multigemm_cupy", mark(ADAPTERS["cupy"]))

Joining rows and planning happen when the entry is called, as for the operator's own preprocessed entries; the function
that it returns only launches. Each call of it writes into the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from multigemm import api
from multigemm.backends import registry
from multigemm.problem.problem import GroupedGemmProblem

Result = Tensor | list[Tensor]
Adapter = Callable[..., Callable[[], Result]]


def run_with(backend: str, group_a: Sequence[Tensor], group_b: Sequence[Tensor]) -> Callable[[], Result]:
    """Returns a function that launches and returns what the operator's baseline returns.

    Operators since September 2025 pass one B for all groups and compare the rows of all groups in one matrix; older
    ones pass one B per group and compare lists.
    """
    first = group_b[0]
    shared = all(b.data_ptr() == first.data_ptr() and b.stride() == first.stride() for b in group_b)
    with torch.no_grad():
        if shared:
            sizes = torch.tensor([a.shape[0] for a in group_a], device=first.device)
            plan = api.plan(GroupedGemmProblem(torch.cat(list(group_a)), first, sizes=sizes), backend)
        else:
            plan = api.plan(GroupedGemmProblem(list(group_a), list(group_b)), backend)

    def launch() -> Result:  # a function, since the harness gives it an attribute
        result: Result = plan()
        return result

    return launch


def adapter(backend: str) -> Adapter:
    """The entry of one backend, or of "auto"."""

    def adapted(
        tb_op: Any, group_A: Sequence[Tensor], group_B: Sequence[Tensor], w: Any = None, split: Any = None
    ) -> Callable[[], Result]:
        """`w` and `split` are operands of other entries: the baseline multiplies group_A by group_B."""
        return run_with(backend, group_A, group_B)

    adapted.__name__ = adapted.__qualname__ = f"multigemm_{backend}"
    return adapted


ADAPTERS: dict[str, Adapter] = {name: adapter(name) for name in ("auto", *registry.names())}


def register() -> None:
    """Add an entry `multigemm_<backend>` for each adapter to TritonBench's grouped_gemm operator.

    Enabled, which is to say run unless `--only` or `--skip` says otherwise, are "auto" and the backends that compute on
    this machine: those of the GPU, or "cpu" where there is none.

    Raises:
        ImportError: TritonBench is not installed.

    Example:
        python run.py --op grouped_gemm --plugin multigemm.integrations.tritonbench.register
    """
    from tritonbench.operators.grouped_gemm import Operator
    from tritonbench.utils.triton_op import register_benchmark

    enabled = _enabled()
    for backend, entry in ADAPTERS.items():
        name = f"multigemm_{backend}"
        mark = register_benchmark(
            operator_name="grouped_gemm", func_name=name, enabled=backend in enabled, fwd_only=True
        )
        setattr(Operator, name, mark(entry))


def _enabled() -> set[str]:
    gpu = torch.cuda.is_available()
    here = {x.name for x in api.list_backends() if x.available and not x.emulated and (x.name != "cpu") == gpu}
    return {"auto", *here} - {"null"}
