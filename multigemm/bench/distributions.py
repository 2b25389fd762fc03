"""How rows fall to groups. Seeded, so that every machine and every year measures the same sizes.

Published grouped-GEMM numbers mostly use equal groups; real routers do not. Each function takes
(groups, total, generator) and returns [G] int64 sizes, which sum to
`total` exactly for all but `decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from multigemm.errors import InvalidSetting

Sizes = npt.NDArray[np.int64]
Generator = np.random.Generator


def apportion(weights: npt.NDArray[Any], total: int) -> Sizes:
    """`total` split in proportion to the weights; the largest remainders get the rows left over."""
    exact = weights / weights.sum() * total
    sizes: Sizes = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - sizes), kind="stable")
    sizes[order[: total - int(sizes.sum())]] += 1
    return sizes


def balanced(groups: int, total: int, rng: Generator) -> Sizes:
    """T/G rows each."""
    return apportion(np.ones(groups), total)


def uniform(groups: int, total: int, rng: Generator) -> Sizes:
    """Proportional to U(0.7, 1.3), as DeepGEMM and Helion draw them."""
    return apportion(rng.uniform(0.7, 1.3, groups), total)


def multinomial(groups: int, total: int, rng: Generator) -> Sizes:
    """Every row picks a group with equal chance, as Tokamax draws them."""
    return rng.multinomial(total, np.full(groups, 1.0 / groups)).astype(np.int64)


def zipf(groups: int, total: int, rng: Generator) -> Sizes:
    """Proportional to 1/rank, the ranks shuffled over the groups: a few hot experts, a long tail."""
    return apportion(1.0 / (1.0 + rng.permutation(groups)), total)


def empty(groups: int, total: int, rng: Generator) -> Sizes:
    """A quarter of the groups empty, the first and the last among them; the rest as U(0.3, 1.7)."""
    weights = rng.uniform(0.3, 1.7, groups)
    holes = max(2, groups // 4) if groups > 2 else 0
    if holes:
        weights[[0, -1]] = 0.0
        weights[rng.permutation(np.arange(1, groups - 1))[: holes - 2]] = 0.0
    return apportion(weights, total)


def one_hot(groups: int, total: int, rng: Generator) -> Sizes:
    """One expert gets every row."""
    sizes = np.zeros(groups, np.int64)
    sizes[int(rng.integers(groups))] = total
    return sizes


def decode(groups: int, total: int, rng: Generator) -> Sizes:
    """0 to 8 rows per group whatever the total says: one step of token generation."""
    return rng.integers(0, 9, groups).astype(np.int64)


DISTRIBUTIONS: dict[str, Callable[[int, int, Generator], Sizes]] = {
    "balanced": balanced,
    "uniform": uniform,
    "multinomial": multinomial,
    "zipf": zipf,
    "empty": empty,
    "one-hot": one_hot,
    "decode": decode,
}


def draw(name: str, groups: int, total: int, seed: int = 0) -> Sizes:
    """The sizes of a named distribution."""
    if name not in DISTRIBUTIONS:
        raise InvalidSetting(f"distribution {name!r} is unknown; known: {', '.join(DISTRIBUTIONS)}")
    if groups == 0:
        return np.zeros(0, np.int64)
    return DISTRIBUTIONS[name](groups, total, np.random.default_rng(seed))
