"""Draws problems with quantised operands: form, granularity, formats, layout; tails and odd starts are the rule.

A problem is drawn from a seed alone. Kinds of values take turns: whole numbers with scales that are powers of two,
which are judged to the last bit and find a wrong entry of a scale; positive ones over a long K, for narrow sums;
ordinary ones; and codes at the edges of the formats (the largest, subnormal, -0) with scales at theirs. The entries of
scales between the ranges of groups hold NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Backend
from multigemm.planning.binding import Choice, bind, caller_result
from multigemm.planning.staging import allocate
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import BYTE_FORMATS, FORMS
from multigemm.reference.verify import answer, judge

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
FLOAT8 = (E4M3, E5M2)
WEIGHTS = ("float8_e4m3fn", "float8_e5m2", "int8", "int4", "uint4", "e2m1")
GRAINS = ("none", "tensor", "group", "row", "1x32", "1x64", "1x128", "128x128")
KINDS = ("whole", "positive", "normal", "edges")
EDGES = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 257)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A problem, and what it stands for."""

    problem: GroupedGemmProblem
    traits: frozenset[str]


class _Draw:
    """The choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.kind: str = self.pick(KINDS)
        self.traits: set[str] = {f"values:{self.kind}"}

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def extent(self) -> int:
        return int(self.pick(EDGES)) if self.rng.integers(2) else int(self.rng.integers(0, 160))

    # --- values -----------------------------------------------------------------------------------

    def elements(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Stored numbers of float8, int8 or 16 bits."""
        if self.kind == "edges" and dtype.itemsize == 1:
            codes = torch.from_numpy(self.rng.choice(self._codes(dtype), shape).astype(np.uint8))
            return codes.view(dtype)
        if self.kind in ("whole", "positive", "edges") or dtype is torch.int8:
            low = 1 if self.kind == "positive" else -7
            return torch.from_numpy(self.rng.integers(low, 8, shape).astype(np.float32)).to(dtype)
        return torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32)).to(dtype)

    def _codes(self, dtype: torch.dtype) -> list[int]:
        if dtype is torch.int8:
            return [0x80, 0x7F, 0xFF, 0, 1]
        return [0x00, 0x80, 0x01, 0x81, 0x07, 0x08, 0x7E if dtype is E4M3 else 0x7B, 0x38, 0xB8]

    def scales(self, shape: tuple[int, ...], dtype: torch.dtype, side: str, weights: bool) -> Tensor:
        """Numbers above 0; at the edges, those of a are tiny and those of b make up for it."""
        power = np.asarray(self.rng.integers(-3, 4, shape))
        if self.kind == "edges":
            ends = (-127, -126, -120) if side == "a" else (-127, -20, 0, 20) if weights else (100, 110, 119)
            power = np.asarray(self.rng.choice(ends, shape))
        if dtype is E8M0:
            return torch.from_numpy(np.asarray(power + 127, np.uint8)).view(E8M0)
        found = np.asarray(np.ldexp(1.0, power), np.float32)
        if self.kind == "normal":
            found = np.asarray(found * (0.5 + self.rng.random(shape)), np.float32)
        return torch.from_numpy(found).to(dtype)

    # --- layouts ----------------------------------------------------------------------------------

    def laid_out(self, x: Tensor, axes: tuple[int, int] = (-2, -1)) -> Tensor:
        """The same numbers, transposed in memory, with a gap behind each line, or as they are."""
        how = self.pick(("row", "col", "gap", "shifted"))
        self.traits.add(f"layout:{how}")
        if how == "row" or x.dim() < 2:
            return x
        if how == "col":
            return x.transpose(*axes).contiguous().transpose(*axes)
        bits = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])
        shift = int(how == "shifted")
        memory = torch.full((*x.shape[:-1], x.shape[-1] + 3), 0x7F, dtype=bits.dtype)
        memory[..., shift : shift + x.shape[-1]] = bits
        return memory.view(x.dtype)[..., shift : shift + x.shape[-1]]


def _grid(draw: _Draw, grain: str, side: str, form: str, shape: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """The shape of a grid over an operand [.., lines, K] (of b: [.., K, lines])."""
    lines, k = (shape[-2], shape[-1]) if side == "a" else (shape[-1], shape[-2])
    if grain in ("tensor", "group"):
        return () if grain == "tensor" else (groups,)
    tall = -(-lines // 128) if grain == "128x128" else lines
    if draw.rng.integers(8) == 0 and grain != "128x128":
        tall = 1
    q = 0 if grain == "row" else int(grain.partition("x")[2])
    wide = 1 if not q else k // q + groups if form == "jagged_k" else -(-k // q)
    if grain == "row" and form == "jagged_k" and draw.rng.integers(2):
        wide = groups
    found = (tall, wide) if side == "a" else (wide, tall)
    return found if len(shape) == 2 else (shape[0], *found)


def _spoil_unused(scale: Tensor, side: str, q: int, sizes: list[int], head: int) -> None:
    """NaN in the entries of a jagged K that no block has."""
    used, start = set(), head
    for g, size in enumerate(sizes):
        used |= {start // q + g + j for j in range(-(-size // q))}
        start += size
    axis = scale.dim() - 1 if side == "a" else scale.dim() - 2
    unused = [entry for entry in range(scale.shape[axis]) if entry not in used]
    if unused:
        spoiled = scale.view(torch.uint8) if scale.dtype is E8M0 else scale
        spoiled.index_fill_(axis, torch.tensor(unused), 0xFF if scale.dtype is E8M0 else torch.nan)


@dataclass(frozen=True, slots=True)
class _Formats:
    """The formats of the operands. `weights`: that of b under 16-bit activations; "" where both are float8."""

    weights: str
    a: torch.dtype
    b: torch.dtype

    @property
    def packed(self) -> str:
        """The format of b where a byte holds two numbers, else ""."""
        return self.weights if self.weights in BYTE_FORMATS else ""


@dataclass(frozen=True, slots=True)
class _Extents:
    """The shapes of the operands. A jagged extent begins with `head` elements of no group; then come the groups."""

    groups: int
    head: int
    sizes: list[int]
    a: tuple[int, ...]
    b: tuple[int, ...]


def _draw_formats(draw: _Draw, form: str) -> _Formats:
    weights = draw.pick(WEIGHTS) if draw.rng.integers(2) else ""
    if form == "jagged_k" and weights in BYTE_FORMATS:
        weights = "int8"
    a = draw.pick((torch.bfloat16, torch.float16)) if weights else draw.pick(FLOAT8)
    if weights in BYTE_FORMATS:
        return _Formats(weights, a, torch.uint8)
    return _Formats(weights, a, getattr(torch, weights) if weights else draw.pick(FLOAT8))


def _draw_extents(draw: _Draw, form: str, even_k: bool) -> _Extents:
    groups, m, n, k = int(draw.rng.integers(1, 5)), draw.extent(), draw.extent(), draw.extent()
    if draw.kind == "positive":
        k, m, n = int(draw.rng.integers(1000, 3000)), min(m, 9), min(n, 9)
    k += k % 2 if even_k else 0
    head = int(draw.pick((0, 0, 1, 3, 37)))
    deep = draw.kind == "positive" and form == "jagged_k"
    sizes = [int(draw.rng.integers(1000, 2000)) if deep else draw.extent() for _ in range(groups)]
    total = head + sum(sizes) + int(draw.pick((0, 0, 2)))
    shared = form in ("jagged_m", "jagged_n") and draw.rng.integers(4) == 0
    stack = () if shared else (groups,)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "jagged_m": ((total, k), (*stack, k, n)),
        "jagged_n": ((*stack, m, k), (k, total)),
        "jagged_k": ((m, total), (total, n)),
    }
    return _Extents(groups, head, sizes, *shapes.get(form, ((groups, m, k), (groups, k, n))))


def _draw_scales(draw: _Draw, form: str, formats: _Formats, extents: _Extents, side: str) -> dict[str, Tensor]:
    """The keywords of one operand's scales and zero points; none where its numbers stand for themselves."""
    weights, shape = formats.weights, extents.a if side == "a" else extents.b
    grain = draw.pick(GRAINS[1:] if weights == "int8" else GRAINS)
    if grain == "128x128" and form == ("jagged_m" if side == "a" else "jagged_n"):
        grain = "1x128"
    draw.traits.add(f"{side}:{grain}")
    if grain == "none":
        return {}
    choices = (torch.float32, E8M0, formats.a) if weights and draw.kind != "edges" else (torch.float32, E8M0)
    dtype = draw.pick(choices)
    scale = draw.scales(_grid(draw, grain, side, form, shape, extents.groups), dtype, side, bool(weights))
    if form == "jagged_k" and grain.startswith("1"):
        _spoil_unused(scale, side, int(grain.partition("x")[2]), extents.sizes, extents.head)
    draw.traits.add(f"scale:{str(dtype).removeprefix('torch.')}")
    found = {f"scale_{side}": draw.laid_out(scale)}
    if side == "b" and weights in ("int8", "int4", "uint4") and draw.rng.integers(2):
        zero = torch.from_numpy(np.asarray(draw.rng.integers(0, 16, tuple(scale.shape)), np.uint8))
        found["zero_b"] = draw.laid_out(zero)
        draw.traits.add("zero")
    return found


def random_problem(seed: int, device: torch.device | str = "cpu") -> Drawn:
    """The problem of a seed.

    Args:
        seed: another seed, another problem; the same seed, the same numbers on every device.
        device: where the operands lie.

    Returns:
        The problem with its traits, such as "form:jagged_k", "a:1x32", "format:int4".

    Example:
        >>> random_problem(3).problem.spec == random_problem(3).problem.spec
        True
    """
    draw = _Draw(seed)
    form = draw.pick(FORMS)
    formats = _draw_formats(draw, form)
    extents = _draw_extents(draw, form, even_k=bool(formats.packed))
    draw.traits |= {f"form:{form}", f"format:{formats.weights or 'float8'}"}
    options: dict[str, Any] = {"out_dtype": draw.pick((torch.float32, torch.float32, torch.bfloat16))}
    if form.startswith("jagged"):
        options |= {"offsets": np.cumsum([extents.head, *extents.sizes]).tolist(), "jagged": form[-1]}
    if form == "masked":
        options["valid_rows"] = [int(draw.rng.integers(0, extents.a[1] + 1)) for _ in range(extents.groups)]
    a, b = _operands(draw, formats, extents)
    for side in "b" if formats.weights else "ab":
        options |= _draw_scales(draw, form, formats, extents, side)
    if formats.packed:
        options["b_format"] = formats.packed
    if not formats.weights and draw.rng.integers(4) == 0:
        options["accumulate"] = "fast"
        draw.traits.add("fast")
    if form == "per_group":
        a, b, options = _as_lists(a, b, options)
    moved = {name: _moved(x, device) if name[:5] in ("scale", "zero_") else x for name, x in options.items()}
    return Drawn(GroupedGemmProblem(_moved(a, device), _moved(b, device), **moved), frozenset(draw.traits))


def _operands(draw: _Draw, formats: _Formats, extents: _Extents) -> tuple[Tensor, Tensor]:
    a = draw.laid_out(draw.elements(extents.a, formats.a))
    if not formats.packed:
        return a, draw.laid_out(draw.elements(extents.b, formats.b))
    *stack, k, n = extents.b
    pairs = draw.rng.integers(0, 256, (*stack, k // 2, n)).astype(np.uint8)
    return a, draw.laid_out(torch.from_numpy(pairs))


def _as_lists(a: Tensor, b: Tensor, options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """A stack as a list of its matrices."""
    scales = {n: x for n, x in options.items() if n[:5] in ("scale", "zero_")}
    return list(a), list(b), options | {n: list(x) if x.dim() == 3 else x for n, x in scales.items()}


def _moved(x: Any, device: torch.device | str) -> Any:
    if isinstance(x, list):
        return [_moved(t, device) for t in x]
    if x.device == torch.device(device):
        return x
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return moved.copy_(x)


def run(backend: Backend, problem: GroupedGemmProblem) -> Any:
    """The result of a problem by a backend that need not be registered."""
    recipe = backend.plan(problem.spec, backend.configs(problem.spec, problem.device)[0], problem.device)
    out = allocate(problem)
    bind(Choice(backend.name, recipe, problem.spec, ""), problem, out).launch()
    return caller_result(problem, out)


def findings(backend: Backend, problems: int, device: torch.device | str = "cpu", first: int = 0) -> Iterator[str]:
    """What is wrong in the results of a backend for so many problems; those that it refuses are skipped.

    Args:
        backend: the one under test.
        problems: how many seeds.
        device: where the operands lie.
        first: the first seed.

    Yields:
        The seed, the problem and the verdict.

    Example:
        >>> from multigemm.select import registry
        >>> list(findings(registry.get("cpu"), 3))
        []
    """
    for seed in range(first, first + problems):
        problem = random_problem(seed, device).problem
        if backend.not_supported_reasons(problem.spec, problem.device):
            continue
        verdict = judge(answer(problem), run(backend, problem), suspicion=False)
        if not verdict:
            yield f"random_problem({seed}): {problem}: {verdict.text}"
