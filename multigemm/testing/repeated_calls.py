"""Calls of `multigemm.grouped_gemm` as a program makes them: again and again, with something changed in between.

A fuzzer of problems makes every problem anew. Here calls come back: with the same operands, with new contents, with new
memory, with memory that was freed and taken again under other strides, with other sizes, on another stream. So launches
that were kept from earlier calls serve later ones, and each result is compared with an exact answer. Values are small
whole numbers: sums are exact in float32, the result is rounded once, and one wrong bit is a wrong result.

    python -m multigemm.testing.repeated_calls --backends cupy,triton --calls 50000
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from multigemm.api import grouped_gemm
from multigemm.errors import BackendUnsupported
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.testing.campaigns import add_up, side_by_side

FORMS = ("jagged_m", "jagged_m", "jagged_m", "shared", "jagged_n", "jagged_k", "batched", "masked")
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
POISON = 77.0


@dataclass
class Style:
    """What a run of calls has in common."""

    form: str
    dtype: torch.dtype
    groups: int
    extent: int
    m: int
    n: int
    k: int
    layouts: tuple[int, int]
    sizes_as: str
    index: torch.dtype
    on_host: bool
    bias: bool
    relu: bool
    into: bool
    added: bool

    @classmethod
    def draw(cls, chance: random.Random) -> Style:
        """A style of small extents, odd ones and multiples of 8."""
        form = chance.choice(FORMS)
        m, n, k = (chance.choice((8, 16, 24, 40, 64, chance.randrange(1, 70))) for _ in range(3))
        jagged = form in ("jagged_m", "shared", "jagged_n", "jagged_k")
        return cls(
            form, chance.choice(DTYPES), chance.choice((1, 2, 3, 4, 8, 17)), chance.choice((16, 64, 96, 133)), m, n, k,
            (chance.randrange(5), chance.randrange(5)), chance.choice(("offsets", "sizes", "ends")),
            chance.choice((torch.int32, torch.int64)), jagged and chance.random() < 0.35, chance.random() < 0.3,
            chance.random() < 0.2, chance.random() < 0.15, chance.random() < 0.1,
        )  # fmt: skip


@dataclass
class Outcome:
    """How many calls were made, served by the cache, refused, and wrong; and processes that gave no answer."""

    backend: str
    calls: int = 0
    hits: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    forms: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def matrix(chance: random.Random, layout: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Small whole numbers in one of five layouts: dense, transposed, at a pitch, at an odd address, every other one."""
    *stack, columns = shape
    values = torch.randint(-2, 3, shape, device=device).to(dtype)
    if layout == 0:
        return values
    if layout == 1:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == 2:
        room = torch.full((*stack, columns + 8), POISON, dtype=dtype, device=device)
        made = room[..., :columns]
    elif layout == 3:
        room = torch.full((values.numel() + 3,), POISON, dtype=dtype, device=device)
        made = room[3:].view(shape)
    else:
        room = torch.full((*stack, 2 * columns), POISON, dtype=dtype, device=device)
        made = room[..., ::2]
    made.copy_(values)
    return made


def draw_offsets(chance: random.Random, groups: int, extent: int, start: int) -> list[int]:
    """Offsets of groups, some of them empty, that need not reach the end."""
    return sorted([start, *(chance.randrange(start, extent + 1) for _ in range(groups))])


def exact(style: Style, given: dict[str, Any], a: Tensor, b: Tensor, offsets: list[int]) -> tuple[Tensor, Tensor]:
    """The answer in float64, and which elements some group owns."""
    x, y, groups = a.double(), b.double(), style.groups
    bias, shape = given.get("bias"), result_shape(style, a, b)
    out = torch.zeros(shape, dtype=torch.float64, device=a.device)
    owned = torch.zeros(shape, dtype=torch.bool, device=a.device)
    for g in range(groups):
        span = slice(offsets[g], offsets[g + 1]) if len(offsets) > groups else slice(None)
        if style.form in ("jagged_m", "shared"):
            where: Any = (span, slice(None))
            product = x[span] @ (y if style.form == "shared" else y[g])
        elif style.form == "jagged_n":
            where, product = (slice(None), span), x[g] @ y[:, span]
        elif style.form == "jagged_k":
            where, product = (g,), x[:, span] @ y[span]
        else:
            rows = slice(0, int(offsets[g])) if style.form == "masked" else slice(None)
            where, product = (g, rows), x[g, rows] @ y[g]
        if given.get("beta"):
            product = product + given["c"].double()[where]
        if bias is not None:
            product = product + (bias.double()[span] if style.form == "jagged_n" else bias.double()[g])
        out[where] = product.clamp(min=0) if style.relu else product
        owned[where] = True
    return out, owned


def result_shape(style: Style, a: Tensor, b: Tensor) -> tuple[int, ...]:
    if style.form in ("jagged_m", "shared"):
        return (a.shape[0], b.shape[-1])
    if style.form == "jagged_n":
        return (a.shape[1], b.shape[1])
    return (style.groups, a.shape[-2], b.shape[-1])


class _Calls:
    """Calls of one style, each with something changed."""

    a: Tensor
    b: Tensor

    def __init__(self, chance: random.Random, style: Style, backend: str, device: str) -> None:
        self.chance, self.style, self.backend, self.device = chance, style, backend, device
        self.extent = style.extent
        self.live: Tensor | None = None
        self._new("a")
        self._new("b")
        self._extras()
        self._sizes()

    def _shape(self, name: str) -> tuple[int, ...]:
        s, t = self.style, self.extent
        a = {"jagged_m": (t, s.k), "shared": (t, s.k), "jagged_k": (s.m, t)}.get(s.form, (s.groups, s.m, s.k))
        b = {"shared": (s.k, s.n), "jagged_n": (s.k, t), "jagged_k": (t, s.n)}.get(s.form, (s.groups, s.k, s.n))
        return a if name == "a" else b

    def _new(self, name: str, layout: int | None = None) -> None:
        layout = self.style.layouts[name == "b"] if layout is None else layout
        setattr(self, name, None)  # the old memory is free before the new is taken
        setattr(self, name, matrix(self.chance, layout, self._shape(name), self.style.dtype, self.device))

    def _extras(self) -> None:
        s, shape = self.style, result_shape(self.style, self.a, self.b)
        width = (self.extent,) if s.form == "jagged_n" else (s.groups, s.n)
        self.bias = matrix(self.chance, 0, width, s.dtype, self.device) if s.bias else None
        self.c = matrix(self.chance, 0, shape, s.dtype, self.device) if s.added else None

    def _sizes(self) -> None:
        s = self.style
        if s.form == "batched":
            self.offsets: list[int] = []
        elif s.form == "masked":
            self.offsets = [self.chance.randrange(s.m + 1) for _ in range(s.groups)]
        else:
            start = self.chance.randrange(3) if s.sizes_as == "offsets" else 0
            self.offsets = draw_offsets(self.chance, s.groups, self.extent, start)
        values = torch.tensor(self._as_given(), dtype=s.index)
        if self.live is not None and self.chance.random() < 0.7:
            self.live.copy_(values)
        else:
            self.live = values.to(self.device)

    def _as_given(self) -> list[int]:
        s, o = self.style, self.offsets
        if s.form in ("batched", "masked") or s.sizes_as == "offsets":
            return o
        return o[1:] if s.sizes_as == "ends" else [end - start for start, end in pairwise(o)]

    def change(self) -> None:
        """Something that a program changes between two calls; often nothing."""
        what = self.chance.randrange(12)
        if what < 3:
            (self.a if what else self.b).copy_(torch.randint(-2, 3, (self.a if what else self.b).shape))
        elif what < 5:
            self._new("a" if what == 3 else "b")
        elif what == 5:
            self._new(self.chance.choice("ab"), self.chance.randrange(5))  # the freed memory, under other strides
        elif what == 6 and self.style.form not in ("batched", "masked"):
            self.extent = self.chance.choice((self.style.extent, self.style.extent + 1, self.style.extent // 2))
            self._new("a")
            self._new("b")
            self._extras()
            self._sizes()
        elif what < 9:
            self._sizes()

    def given(self) -> dict[str, Any]:
        """The keywords of the next call."""
        s = self.style
        keywords: dict[str, Any] = {"backend": self.backend}
        if s.form == "masked":
            keywords["valid_rows"] = self.live
        elif s.form != "batched":
            keywords["jagged"] = s.form[-1] if s.form.startswith("jagged") else "m"
            values = self._as_given()
            keywords[s.sizes_as] = self.live if not s.on_host else values if s.bias else tuple(values)
        if self.bias is not None:
            keywords["bias"] = self.bias
        if self.c is not None:
            keywords |= {"c": self.c, "beta": 1.0}
        if s.relu:
            keywords["activation"] = "relu"
        if s.into:
            shape = result_shape(s, self.a, self.b)
            keywords["out"] = torch.full(shape, POISON, dtype=s.dtype, device=self.device)
        return keywords


def run(backend: str, calls: int, seed: int, device: str, seconds: float = 1e9) -> Outcome:
    """So many calls through the front door, in runs of one style."""
    chance, outcome, until = random.Random(seed), Outcome(backend), time.monotonic() + seconds
    torch.manual_seed(seed)
    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []  # type: ignore[no-untyped-call]
    while outcome.calls < calls and time.monotonic() < until:
        style = Style.draw(chance)
        series = _Calls(chance, style, backend, device)
        for _ in range(chance.choice((3, 20, 60)) if device == "cpu" else chance.choice((20, 60, 200))):
            stream = chance.choice(streams) if streams and chance.random() < 0.15 else None
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                again = _one(series, outcome)
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
            if not again:
                break
            series.change()
    return outcome


def _one(series: _Calls, outcome: Outcome) -> bool:
    """Makes one call and compares its result; false where the backend refuses such problems."""
    given = series.given()
    served = LAUNCHES.served
    try:
        got = grouped_gemm(series.a, series.b, **given)
    except BackendUnsupported:
        outcome.refused += 1
        return False
    outcome.calls += 1
    outcome.hits += LAUNCHES.served - served
    outcome.forms[series.style.form] += 1
    want, owned = exact(series.style, given, series.a, series.b, series.offsets)
    rounded = want.to(got.dtype)
    if series.style.into:
        rounded = torch.where(owned, rounded, torch.full_like(rounded, POISON))
    if not torch.equal(got, rounded):
        worst = (got.double() - rounded.double()).abs().max().item()
        outcome.wrong.append(f"call {outcome.calls}: {series.style}, off by {worst}")
    return True


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 where a result was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--backends", default="cpu", help="names, joined by commas")
    parser.add_argument("--calls", type=int, default=2000, help="calls for each backend")
    parser.add_argument("--seconds", type=float, default=1e9, help="no longer than this for each backend")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the calls, each with its own seed")
    parser.add_argument("--json", help="where to write the outcome")
    options = parser.parse_args(arguments)
    found = []
    for name in options.backends.split(","):
        start = time.monotonic()
        share = -(-options.calls // options.jobs)
        calls = [
            (name, share, options.seed + 1000 * job, options.device, options.seconds) for job in range(options.jobs)
        ]
        outcome = Outcome(name)
        parts, outcome.failures = side_by_side(run, calls) if options.jobs > 1 else ([run(*calls[0])], [])
        for part in parts:
            add_up(outcome, part)
        found.append(outcome)
        print(
            f"{name}: {outcome.calls} calls, {outcome.hits} served by the cache, {outcome.refused} styles refused, "
            f"{len(outcome.wrong)} wrong, {time.monotonic() - start:.0f} s"
        )
        for line in [*outcome.wrong[:5], *outcome.failures[:2]]:
            print(f"  {line}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([vars(x) for x in found], file, indent=1)
    return int(any(x.wrong or x.failures for x in found))


if __name__ == "__main__":
    sys.exit(main())
