"""`multigemm.grouped_gemm` inside torch.compile: the graph holds the torch operator, not the package's Python code.

Problems, choices and plans read addresses, which do not exist while torch traces. So a traced call becomes
`torch.ops.multigemm.grouped_gemm` here, and the backend is chosen when the graph runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multigemm.errors import InvalidProblem, unknown_keyword_text
from multigemm.problem.arrays import dtype_of
from multigemm.problem.fused import refuse_in_operator
from multigemm.torch_internals import run_while_tracing


def _register() -> None:
    """Registers the operator. That takes about a second, so calls outside of a graph do not wait for it."""
    from multigemm.integrations import torch_op as torch_op


run_while_tracing(_register)  # Dynamo cannot trace an import
run_while_tracing(unknown_keyword_text)  # nor difflib


def grouped_gemm(
    a: Any, b: Any, *, backend: Any = "auto", config: Any = None, out: Any = None, check: str = "host", **keywords: Any
) -> Tensor:
    """Makes the traced call as an operator. Refuses what a graph cannot hold."""
    if isinstance(a, list | tuple) or isinstance(b, list | tuple) or out is not None or config is not None:
        raise InvalidProblem(
            "lists, out= and config= cannot be compiled: pass packed tensors, or keep the call out of torch.compile"
        )
    if check != "host":
        raise InvalidProblem(
            f"check={check!r} cannot be compiled, since a graph never reads sizes back: leave it at 'host', or keep "
            "the call out of torch.compile"
        )
    refuse_in_operator([name for name, x in keywords.items() if x is not None])
    _register()
    _as_tensors(keywords, a.device)
    if (dtype := keywords.get("out_dtype")) is not None and not isinstance(dtype, torch.dtype):
        keywords["out_dtype"] = dtype_of(dtype, "out_dtype")
    for name in ("offsets", "sizes", "ends", "valid_rows"):
        if isinstance(cut := keywords.get(name), list | tuple | range):
            keywords[name] = torch.tensor(list(cut), device=a.device, dtype=None if cut else torch.int64)
    names = backend if isinstance(backend, str) else ",".join(backend)
    if torch.is_autocast_enabled(a.device.type):  # the operator obeys autocast, a problem means what it says
        with torch.autocast(a.device.type, enabled=False):
            return _operator(a, b, backend=names, **keywords)
    return _operator(a, b, backend=names, **keywords)


def _as_tensors(keywords: dict[str, Any], device: torch.device) -> None:
    """Turns lists of sizes into tensors on the operands' device, and `combine` into two arguments."""
    if (combine := keywords.get("combine")) is not None:
        keywords["combine"], keywords["combine_weights"] = combine
    for name in ("a_rows", "b_rows", "combine", "out_rows"):
        if isinstance(rows := keywords.get(name), list | tuple | range):
            keywords[name] = torch.tensor(list(rows), device=device, dtype=torch.int64)


def _operator(*args: Any, **keywords: Any) -> Tensor:
    result: Tensor = torch.ops.multigemm.grouped_gemm(*args, **keywords)
    return result
