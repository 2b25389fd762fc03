"""Shared parts of campaigns: options, versions for kept results, several processes, sums of counts."""

from __future__ import annotations

import argparse
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from multigemm.backend import installed_version

PACKAGES = ("multigemm", "torch", "triton", "numba-cuda", "cupy-cuda13x", "numpy")


def versions() -> dict[str, str]:
    """The versions of installed packages, and the GPU if there is one."""
    found = {name: installed_version(name) for name in PACKAGES}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    return {"python": platform.python_version()} | {name: text for name, text in found.items() if text}


def parser_of(doc: str, backends: str, seconds: float) -> argparse.ArgumentParser:
    """The options that programs for several backends have in common; `seconds` infinite means no limit."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    add, cuda = parser.add_argument, torch.cuda.is_available()
    add("--backends", default=backends, help=f"backends, separated by commas (default: {backends})")
    add("--seconds", type=float, default=seconds, help=f"limit of a run in seconds (default: {seconds:g})")
    add("--jobs", type=int, default=1, help="number of processes, each with its own seed (default: 1)")
    add("--seed", type=int, default=0, help="seed of what is drawn (default: 0)")
    add("--device", default="cuda" if cuda else "cpu", help="cpu or cuda (default: cuda if there is one)")
    add("--json", type=Path, help="write the counts to this file")
    return parser


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


def side_by_side(work: Callable[..., Any], calls: Sequence[tuple[Any, ...]], total: Any) -> list[str]:
    """Runs each call in a process of its own, so that a crash loses no other result, and adds up results.

    Args:
        work: A function of a module, so that another process finds it.
        calls: The arguments of each call.
        total: The dataclass that receives the results, as `add_up` does.

    Returns:
        What became of the calls that gave no result.
    """
    begin, one = torch.set_num_threads, (1,)  # more threads than processors wait for each other
    pools = [ProcessPoolExecutor(1, get_context("spawn"), begin, one) for _ in calls]
    waiting = [pool.submit(work, *given) for pool, given in zip(pools, calls, strict=True)]
    failures = []
    for future in waiting:
        error = future.exception()
        if error is None:
            add_up(total, future.result())
        else:
            failures.append(f"{type(error).__name__}: {error}"[-3000:])
    for pool in pools:
        pool.shutdown()
    return failures
