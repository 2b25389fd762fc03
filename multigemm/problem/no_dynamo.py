"""Keeps torch.compile out of code that no graph can hold.

Problems, plans and the reference look at addresses, call libraries by address and compute in NumPy. Dynamo
would trace all of it, and either fail far from the caller's line or put its own NumPy in the place of the
real one. A function marked `no_dynamo` ends the graph before its call, and runs as it is, with everything
that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from multigemm.torch_internals import keep_out_of_dynamo

Function = TypeVar("Function", bound=Callable[..., Any])
WHY = "it looks at addresses, which a graph has not: in a whole graph, use multigemm.grouped_gemm with packed tensors"


def no_dynamo(function: Function) -> Function:
    """Marks a function; calling it costs what it did before."""
    keep_out_of_dynamo(function, WHY)
    return function
