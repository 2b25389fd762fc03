"""Workloads by name: form, extents, and how many rows each group has.

A `Workload` has no data. It knows its host sizes, its floating-point operations and the fewest bytes
that any implementation must move; `operands.py` makes tensors of it. Tests, tuning and benchmarks
share these names, so that a number in a report says exactly what was run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from multigemm.errors import InvalidSetting
from multigemm.problem.spec import BYTE_FORMATS, Form

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp64": torch.float64,
    "int8": torch.int8,
}
Sizes = npt.NDArray[np.int64]
Generator = np.random.Generator
E8M0 = torch.float8_e8m0fnu


@dataclass(frozen=True)
class Recipe:
    """Quantised operands, named in the place of a dtype: formats by name ("" for bfloat16), and how much of K and of
    columns one number covers: 0 all, 1 one.

    `block` is that along K, of both sides that have scales; `columns` that of b along its columns.
    """

    a: str
    b: str
    block: int = 0
    columns: int = 1
    scale: torch.dtype = torch.float32

    def bytes(self, extents: tuple[int, int, int]) -> float:
        """The bytes of one group's operands and scales."""
        m, n, k = extents
        deep = -(-k // self.block) if self.block else 1
        moved = float(m * k * (1 if self.a else 2))
        if self.a:
            moved += m * deep * self.scale.itemsize
        moved += k * n * (0.5 if self.b in BYTE_FORMATS else 1)
        return moved + -(-n // self.columns) * deep * self.scale.itemsize


RECIPES = {
    "fp8-rows": Recipe("e4m3", "e4m3"),
    "fp8-blocks": Recipe("e4m3", "e4m3", 128, 128),
    "fp8-1x128": Recipe("e4m3", "e4m3", 128),
    "mxfp8": Recipe("e4m3", "e4m3", 32, scale=E8M0),
    "fp8-weights": Recipe("", "e4m3"),
    "int8-weights": Recipe("", "int8"),
    "int4-weights": Recipe("", "int4", 128),
    "mxfp4-weights": Recipe("", "e2m1", 32, scale=E8M0),
}
"""By the word that a workload's `dtype` has. Results, and activations that are not float8, are bfloat16."""


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
    """How many rows each group has, by a named distribution; they sum to `total` for all but `decode`.

    Seeded, so that every machine and every year measures the same sizes. Published numbers of grouped GEMMs mostly
    use equal groups; real routers do not.
    """
    if name not in DISTRIBUTIONS:
        raise InvalidSetting(f"distribution {name!r} is unknown; known: {', '.join(DISTRIBUTIONS)}")
    if groups == 0:
        return np.zeros(0, np.int64)
    return DISTRIBUTIONS[name](groups, total, np.random.default_rng(seed))


@dataclass(frozen=True)
class Rates:
    """The ceilings of a machine: dense matrix products (TFLOP/s) and memory (TB/s). Defaults: an H100, bf16."""

    tflops: float = 770.0
    tbps: float = 3.0


@dataclass(frozen=True)
class Workload:
    """One case. Packed forms have `groups, m, n, k, total`; lists have `products`, a tuple of (M, N, K).

    `total` is the jagged extent T; for the masked form it is the number of valid rows, of m each. `given` are the sizes
    of the groups where no distribution draws them.
    """

    name: str
    suite: str
    form: Form | Literal["layer"] = "jagged_m"
    groups: int = 1
    m: int = 0
    n: int = 0
    k: int = 0
    total: int = 0
    distribution: str = "balanced"
    dtype: str = "bf16"
    products: tuple[tuple[int, int, int], ...] = ()
    shared_b: bool = False
    trans_a: bool = False
    trans_b: bool = False
    bias: bool = False
    cap: int = 0
    seed: int = 0
    given: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Unique within a report; what `--only` matches."""
        layout = ("t" if self.trans_a else "n") + ("t" if self.trans_b else "n")
        return "/".join([self.name, self.distribution, self.dtype] + ([layout] if layout != "nn" else []))

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of quantised operands, else None."""
        return RECIPES.get(self.dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the operands; for quantised ones, of activations and results."""
        return DTYPES["bf16" if self.recipe else self.dtype]

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.int32 if self.dtype == "int8" else self.torch_dtype

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """[G] rows of each group along the jagged (or masked) direction; the rows of each matrix of a list."""
        if self.products:
            return np.array([m for m, _, _ in self.products], np.int64)
        if self.form == "batched":
            return np.full(self.groups, self.m, np.int64)
        if self.given:
            return np.array(self.given, np.int64)
        sizes = draw(self.distribution, self.groups, self.total, self.seed)
        return np.minimum(sizes, self.cap) if self.cap else sizes

    @cached_property
    def extents(self) -> list[tuple[int, int, int]]:
        """(M, N, K) of each group."""
        if self.products:
            return list(self.products)
        if self.form == "jagged_n":
            return [(self.m, int(size), self.k) for size in self.sizes]
        if self.form == "jagged_k":
            return [(self.m, self.n, int(size)) for size in self.sizes]
        return [(int(size), self.n, self.k) for size in self.sizes]

    @property
    def flops(self) -> int:
        return sum(2 * m * n * k for m, n, k in self.extents)

    @property
    def bytes(self) -> int:
        """The bytes of A and C, and of B of every group that has rows, once each (a shared operand once)."""
        if self.recipe is not None:
            return self._quantised_bytes(self.recipe)
        width, out = self.torch_dtype.itemsize, self.out_dtype.itemsize
        moved = 0
        for index, (m, n, k) in enumerate(self.extents):
            if self.form == "jagged_k":
                moved += k * (m + n) * width + m * n * out
            elif m and n:
                b = 0 if self.shared_b and index else k * n
                moved += (m * k + b) * width + m * n * out
        return moved

    def _quantised_bytes(self, recipe: Recipe) -> int:
        """`bytes` for quantised operands: codes and scales."""
        used = [extents for extents in self.extents if self.form == "jagged_k" or all(extents[:2])]
        results = sum(m * n for m, n, _ in used) * self.out_dtype.itemsize
        return round(sum(recipe.bytes(extents) for extents in used)) + results

    def floor_us(self, rates: Rates | None = None) -> float:
        """max(FLOPs / rate, bytes / bandwidth) in microseconds: a yardstick, not a hard limit."""
        rates = rates or Rates()
        return max(self.flops / (rates.tflops * 1e6), self.bytes / (rates.tbps * 1e6))

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shapes of a, b and the result; not for lists."""
        g, m, n, k, t = self.groups, self.m, self.n, self.k, int(self.sizes.sum())
        weights = (k, n) if self.shared_b else (g, k, n)
        return {
            "jagged_m": ((t, k), weights, (t, n)),
            "jagged_n": ((g, m, k), (k, t), (m, t)),
            "jagged_k": ((m, t), (t, n), (g, m, n)),
        }.get(self.form, ((g, m, k), weights, (g, m, n)))

    @property
    def resident_bytes(self) -> int:
        """The memory of its tensors in bytes, to refuse it before allocating."""
        listed: list[tuple[tuple[int, ...], ...]] = [((m, k), (k, n), (m, n)) for m, n, k in self.products]
        every = listed or [self.shapes]
        a, b, out = (sum(map(math.prod, shapes)) for shapes in zip(*every, strict=True))
        return (a + b) * self.torch_dtype.itemsize + out * self.out_dtype.itemsize

    def for_device(self, device: torch.device) -> Workload:
        """The workload as it is measured on a device. Whole layers are smaller on a CPU."""
        return self

    def describe(self) -> str:
        """The case as text, for tables and error messages."""
        if self.products:
            seen = "x".join(map(str, self.products[0]))
            same = len(set(self.products)) == 1
            shape = (
                f"{len(self.products)} x {seen}" if same else " + ".join("x".join(map(str, p)) for p in self.products)
            )
        else:
            m = f" M={self.m}" if self.form in ("jagged_n", "jagged_k", "batched", "masked") else ""
            shape = f"G={self.groups} T={int(self.sizes.sum())}{m} N={self.n} K={self.k}"
        return f"{self.form} {shape} {self.distribution} {self.dtype}"


@dataclass(frozen=True)
class Layer:
    """A mixture-of-experts layer of a model, for each product of it and for the whole.

    `tokens` are those of one GPU where a layer is spread over several; `shared` the intermediate features of experts
    that every token passes; `options` what `nn.Experts` takes beside the extents.
    """

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    tokens: int
    shared: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def stacked(self) -> bool:
        """Whether weights lie as [E, in, out]."""
        return bool(self.options.get("stacked"))

    @property
    def bias(self) -> bool:
        return bool(self.options.get("bias"))

    def scaled(self, by: int) -> Layer:
        """A layer with smaller extents, in multiples of 16, and at most 32 experts."""
        hidden, inner, shared = (-(-n // by // 16) * 16 for n in (self.hidden, self.inner, self.shared))
        experts, tokens = min(self.experts, 32), max(1, self.tokens // by)
        return replace(self, experts=experts, hidden=hidden, inner=inner, shared=shared, tokens=tokens)

    def gate(self, hidden: Tensor) -> Tensor:
        """Applies the gate to results of the first product, in plain torch."""
        if self.options.get("glu_layout") != "interleaved":
            gate, value = hidden.chunk(2, -1)
            return torch.mul(F.silu(gate), value)
        limit, alpha, beta = (self.options[name] for name in ("glu_limit", "glu_alpha", "glu_beta"))
        gate, value = hidden[..., 0::2].clamp(max=limit), hidden[..., 1::2].clamp(-limit, limit)
        return torch.mul(gate * torch.sigmoid(gate * alpha), value + beta)


GPT_OSS = {"glu_layout": "interleaved", "glu_alpha": 1.702, "glu_beta": 1.0, "glu_limit": 7.0, "bias": True}
LAYERS = {
    layer.name.lower(): layer
    for layer in (
        Layer("Mixtral", 8, 2, 4096, 14336, 8192),
        Layer("Qwen3-30B", 128, 8, 2048, 768, 16384),
        Layer("DeepSeek-V3", 256, 8, 7168, 2048, 8192, shared=2048),
        Layer("gpt-oss-20b", 32, 4, 2880, 2880, 16384, options={**GPT_OSS, "stacked": True}),
    )
}


def parts(text: str) -> list[str]:
    """The items of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def rows_and_weights(shape: str) -> tuple[float, int] | None:
    """Rows per group and N x K, read from the text of `Workload.describe`; None if groups share no N and K."""
    if alike := re.search(r" \d+ x (\d+)x(\d+)x(\d+) ", shape):
        m, n, k = map(int, alike.groups())
        return float(m), n * k
    said = {name: int(value) for name, value in re.findall(r"\b([GTMNK])=(\d+)", shape)}
    if not shape.startswith(("jagged_m", "masked", "batched")) or not said["G"]:
        return None
    return said["T"] / said["G"], said["N"] * said["K"]


def dtype_name(text: str) -> str:
    """The short name of a dtype: "bf16" for "bf16" and "bfloat16"."""
    long = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items() if name != "tf32"}
    if (found := long.get(text, text)) not in DTYPES:
        raise InvalidSetting(f"--dtypes {text!r} is unknown; known: {', '.join(DTYPES)}, or {', '.join(long)}")
    return found


def with_dtype(workload: Workload, dtype: str) -> Workload:
    """The same workload in another dtype. Takes every name that `dtype_name` knows."""
    return replace(workload, dtype=dtype_name(dtype))


def parse_shape(text: str, dtype: str = "bf16") -> Workload:
    """One's own workload.

    "64,2048,3584,1792"                     G, M per group, N, K (as TritonBench writes them), jagged m
    "G=64,T=8192,N=3584,K=1792,dist=zipf"   any field by name; form=, shared=1, ta=1, tb=1, bias=1, M=, seed=
    "sizes=40+0+70,N=3584,K=1792"           the sizes of the groups, in the place of G, T and dist
    "128x128x128+512x128x64"                a list of M x N x K
    """
    try:
        return _parse_shape(text, dtype)
    except (ValueError, KeyError) as error:
        raise InvalidSetting(
            f"--shape {text!r} cannot be read ({error}); write G,M,N,K or G=8,T=4096,N=512,K=512,dist=zipf "
            "or 64x64x64+32x8x16"
        ) from error


def _parse_shape(text: str, dtype: str) -> Workload:
    name = "shape:" + text
    if "x" in text and "=" not in text:
        products = tuple(tuple(int(n) for n in part.split("x")) for part in text.split("+"))
        if any(len(p) != 3 or min(p) < 0 for p in products):
            raise ValueError("each product needs three numbers, 0 or more")
        return Workload(name, "own", "per_group", len(products), dtype=dtype, products=products)  # type: ignore[arg-type]
    if "=" not in text:
        numbers = [int(part) for part in text.split(",")]
        if len(numbers) != 4:
            raise ValueError(f"{len(numbers)} numbers, not 4")
        groups, m, n, k = numbers
        return _sensible(Workload(name, "own", "jagged_m", groups, n=n, k=k, total=groups * m, dtype=dtype), set())
    words = dict(part.split("=", 1) for part in text.split(","))
    names = {
        "g": "groups",
        "t": "total",
        "dist": "distribution",
        "shared": "shared_b",
        "ta": "trans_a",
        "tb": "trans_b",
    }
    plain = {"form", "distribution", "dtype"}
    values: dict[str, object] = {"dtype": dtype}
    if "sizes" in words:
        values["given"] = given = tuple(int(size) for size in words.pop("sizes").split("+"))
        if min(given) < 0:
            raise ValueError(f"a size is {min(given)}: 0 or more")
        values |= {"groups": len(given), "total": sum(given), "distribution": "given"}
    for word, value in words.items():
        field = names.get(word.lower(), word.lower())
        if field in ("name", "suite", "products", "given") or field not in Workload.__dataclass_fields__:
            raise ValueError(f"no field {word}")
        if field in values and field != "dtype":
            raise ValueError(f"{word} beside sizes")
        values[field] = value if field in plain else (int(value) != 0 if field in _FLAGS else int(value))
    own = _sensible(Workload(name, "own", **values), set(values))  # type: ignore[arg-type]
    with_dtype(own, own.dtype)
    if not own.given:
        draw(own.distribution, own.groups, own.total, own.seed)
    return own


EXTENTS = {
    "jagged_m": ("total", "n", "k"),
    "jagged_n": ("m", "total", "k"),
    "jagged_k": ("m", "n", "total"),
    "batched": ("m", "n", "k"),
    "masked": ("m", "n", "k", "total"),
}
"""What a form is cut and multiplied along; `total`, the T of a text, for what the sizes of groups add up to."""


def _sensible(own: Workload, said: set[str]) -> Workload:
    """Refuses an extent that the form would ignore, and a missing one, which would be 0."""
    if own.form not in EXTENTS:
        raise ValueError(f"form {own.form!r} is not one of {', '.join(EXTENTS)}")
    if own.groups < 1:
        raise ValueError(f"{own.groups} groups: at least 1")
    for name in ("total", "m", "n", "k", "cap", "seed"):
        shown, value = "T" if name == "total" else name.upper(), getattr(own, name)
        if value < 0:
            raise ValueError(f"{shown} is {value}: 0 or more")
        if said and name in ("total", "m", "n", "k") and (name in said) != (name in EXTENTS[own.form]):
            raise ValueError(f"{own.form} {'has no' if name in said else 'needs'} {shown}")
    if own.form == "masked" and int(own.sizes.max()) > own.m:
        raise ValueError(f"a group of {int(own.sizes.max())} rows, where M is {own.m}: a larger M, or cap={own.m}")
    return own


_FLAGS = ("shared_b", "trans_a", "trans_b", "bias")


def geomean(values: Iterable[float]) -> float:
    """The geometric mean of the positive, finite values; NaN for none."""
    logs = [math.log(v) for v in values if v > 0 and math.isfinite(v)]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
