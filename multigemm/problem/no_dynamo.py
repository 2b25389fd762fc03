"""Keeps torch.compile out of code that no graph can hold.

Problems, plans and the reference look at addresses, call libraries by address and compute in NumPy. Dynamo
would trace all of it, and either fail far from the caller's line or put its own NumPy in the place of the
real one. A function marked `no_dynamo` ends the graph before its call, and runs as it is, with everything
that it calls. `torch.compiler.disable` says the same, but has to load Dynamo for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
WHY = "it looks at addresses, which a graph has not: in a whole graph, use multigemm.grouped_gemm with packed tensors"


def no_dynamo(function: Function) -> Function:
    """Marks a function; calling it costs what it did before."""
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, WHY
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function
