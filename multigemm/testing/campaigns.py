"""Shared parts of campaigns: versions for kept results, several processes, sums of counts."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

T = TypeVar("T")
PACKAGES = ("multigemm", "torch", "triton", "numba-cuda", "cupy-cuda13x", "numpy")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """The versions of installed packages, and the GPU if there is one."""
    found = {name: _version(name) for name in PACKAGES}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    return {"python": platform.python_version()} | {name: text for name, text in found.items() if text}


def add_up(total: Any, part: Any) -> None:
    """Adds the numbers, counters and lists of one dataclass to those of another. Other fields keep their values.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Count:
        ...     calls: int = 0
        >>> total = Count(2)
        >>> add_up(total, Count(3))
        >>> total
        Count(calls=5)
    """
    for field in fields(total):
        own, other = getattr(total, field.name), getattr(part, field.name)
        if isinstance(own, Counter):
            own.update(other)
        elif isinstance(own, int | list):
            setattr(total, field.name, own + other)


def side_by_side(work: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> tuple[list[T], list[str]]:
    """Runs each call in a process of its own, so that a crash loses no other result.

    Args:
        work: A function of a module, so that another process finds it.
        calls: The arguments of each call.

    Returns:
        The results of the calls that gave one, and what became of the others.
    """
    pools = [ProcessPoolExecutor(1, mp_context=get_context("spawn")) for _ in calls]
    waiting = [pool.submit(work, *given) for pool, given in zip(pools, calls, strict=True)]
    results, failures = [], []
    for future in waiting:
        error = future.exception()
        if error is None:
            results.append(future.result())
        else:
            failures.append(f"{type(error).__name__}: {error}"[-3000:])
    for pool in pools:
        pool.shutdown()
    return results, failures
