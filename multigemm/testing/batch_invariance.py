"""The oracle of batch invariance: a row must have the same bits whatever its neighbours. Counts comparisons.

    python -m multigemm.testing.batch_invariance --backends cupy,triton,numba,cublas --seconds 120 --jobs 12 --json FILE

A kind is what may decide the bits: dtypes, K, the epilogue, as a case of the fuzzer without groups. Of each kind a pool
of rows meets a few weights once, a group alone. Then random batches of these rows are computed, among others, in any
order, alone, in other forms and layouts, with other numbers of groups, columns and tiles; every row is compared with
what it was alone, bit for bit. One comparison is one batch. `--control` leaves `batch_invariant=True` out, to show that
the comparisons can fail.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.api import grouped_gemm
from multigemm.errors import BackendUnavailable, BackendUnsupported, InvalidSetting
from multigemm.planning.staging import staged_spec
from multigemm.problem.arrays import dtype_name
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.testing.campaigns import parser_of, side_by_side
from multigemm.testing.case import Case, Layout, as_dtype
from multigemm.testing.placed_case import bits, strides_for
from multigemm.testing.strategies import Limits, draw_case
from multigemm.testing.subject import Subject

LONG_KS, MOST_N = (2048, 2880, 4096), 512
DTYPES = ("bfloat16", "bfloat16", "bfloat16", "float16", "float16", "float32", "float32", "float32", "float64", "int8")
MODES = ("normal", "normal", "cancel", "special", "tiny", "int")
LIMITS = Limits(work=1 << 40, forms=("jagged_m",), dtypes=DTYPES, modes=MODES, longest=1024)
"""The limits of kinds; sizes of groups do not count."""
FORMS = ("jagged_m", "per_group", "batched", "masked", "jagged_n", "jagged_k")
WEIGHTS, MOST_ELEMENTS, MOST_DOWN, LISTED = 6, 1 << 23, 256, 20
REFUSED_AT_ONCE = 20
"""After this many refusals before the first comparison a kind is left: the backend refuses its dtype."""
AT_ONCE = 100
"""Comparisons that are made before the host waits for the device."""
CONFIGS_OF_A_FORM = 2
"""The number of configs of a form that are drawn for a kind, besides the backend's choices. Compiling takes most of the
time."""
EXAMPLES = 20
ALL = slice(None)


def draw_kind(seed: int, work: int) -> Case:
    """Draws a kind whose products of one row take at most `work` multiply-adds."""
    ch = Random(seed)
    case = draw_case(ch, LIMITS)
    k = ch.choice(LONG_KS) if work >= LONG_KS[-1] and ch.randint(0, 5) == 0 else min(max(case.k, 1), LONG_KS[-1], work)
    return replace(
        case, k=k, n=max(1, min(case.n, MOST_N, work // k)), seed=seed, lengths=(), head=0, tail=0, dtype_b="",
        out_dtype=dtype_name(case.result_dtype), a=replace(case.a, zero=""), b=replace(case.b, zero=""),
    )  # fmt: skip


def keywords_of(kind: Case) -> dict[str, Any]:
    """The keywords of every call of a kind."""
    number = int if kind.compute == torch.int8 else float
    return {
        "alpha": number(kind.alpha), "beta": number(kind.beta), "activation": kind.activation,
        "out_dtype": kind.result_dtype, "precision": kind.precision,
    }  # fmt: skip


class Batch(NamedTuple):
    """A problem, the bits that its parts had alone, and how to take those parts out of its result."""

    form: str
    a: Any
    b: Any
    keywords: dict[str, Any]
    wanted: list[Tensor]
    parts: Callable[[Any], list[Tensor]]


def lay(x: Tensor, layout: Layout) -> Tensor:
    """Copies values into memory with another layout."""
    strides, reach = strides_for(x.shape, layout)
    memory = torch.empty(layout.shift + reach, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, strides, layout.shift).copy_(x)


class Pool:
    """Rows and weights on one device, their results alone, and random batches of them."""

    def __init__(self, kind: Case, rows: int, device: torch.device) -> None:
        self.kind, self.device, self.count, self.most = kind, device, rows, 4 * rows
        self.rng = rng = np.random.default_rng(kind.seed)
        self.rows, self.right = self._values(rows, kind.k), self._values(rows, kind.n)
        self.weights = self._values(WEIGHTS, kind.k, kind.n)
        self.keywords, down = keywords_of(kind), min(kind.k, MOST_DOWN)

        def whole(dtype: str, *shape: int) -> Tensor | None:
            return torch.from_numpy(rng.integers(-8, 9, shape)).to(device, as_dtype(dtype)) if dtype else None

        self.c = whole(kind.c_dtype, rows, kind.n)
        self.c_of_pieces = whole(kind.c_dtype, WEIGHTS, down, kind.n)
        self.bias = whole(kind.bias_dtype, WEIGHTS, kind.n)
        self.left = self.rows[:, :down]
        ends = np.sort(rng.integers(0, rows, (WEIGHTS, 2)), axis=1)
        self.pieces = [slice(int(low), int(high)) for low, high in [(3, 3), (5, 6), *ends[2:]]]
        self.forms = [str(form) for form in rng.choice(FORMS, 3, replace=False)]
        self.layouts = (kind.a, kind.b)
        self.columns = [slice(0, kind.n), slice(*sorted(rng.choice(kind.n + 1, 2, replace=False).tolist()))]
        self.index = torch.int32 if rng.integers(2) else torch.int64
        self._alone: dict[str, Any] = {}

    def _values(self, *shape: int) -> Tensor:
        kind, rng = self.kind, self.rng
        values = rng.integers(-9, 10, shape).astype(np.float64) if kind.mode == "int" else rng.standard_normal(shape)
        if kind.mode == "cancel":
            values *= np.exp2(rng.integers(-12, 13, shape).astype(np.float64))
        if kind.mode == "tiny":
            least = float(torch.finfo(kind.compute).smallest_normal)
            values *= least**0.5 * np.exp2(rng.integers(-14, 4, shape).astype(np.float64))
        if kind.mode == "special":
            odd = rng.choice((np.nan, np.inf, -np.inf, -0.0), shape)
            values = np.where(rng.random(shape) < 0.3 / max(shape[-2:]), odd, values)
        with np.errstate(all="ignore"):
            return torch.from_numpy(values).to(self.device, kind.compute)

    # --- what rows give alone ------------------------------------------------------------------------

    def alone(self, direction: str, solve: Callable[..., Any]) -> Any:
        """The bits of every row with every weight, one group at a time (m, n), or of every piece of rows (k)."""
        if direction not in self._alone:
            make = {"m": self._rows_alone, "n": self._columns_alone, "k": self._pieces_alone}[direction]
            self._alone[direction] = make(solve)
        return self._alone[direction]

    def _rows_alone(self, solve: Callable[..., Any]) -> Tensor:
        each = [slice(e, e + 1) for e in range(WEIGHTS)]
        words = {**self.keywords, "c": self.c, "sizes": [self.count]}
        return bits(torch.stack([solve(self.rows, self.weights[e], bias=_at(self.bias, e), **words) for e in each]))

    def _columns_alone(self, solve: Callable[..., Any]) -> Tensor:
        turned = self.weights.transpose(1, 2)
        words = {**self.keywords, "c": None if self.c is None else self.c.T, "jagged": "n", "sizes": [self.count]}
        return bits(torch.stack([solve(turned[e : e + 1], self.rows.T, **words).T for e in range(WEIGHTS)]))

    def _pieces_alone(self, solve: Callable[..., Any]) -> Tensor:
        found = []
        for p, piece in enumerate(self.pieces):
            one = slice(p, p + 1)
            words = {**self.keywords, "jagged": "k", "sizes": [piece.stop - piece.start]}
            words |= {"bias": _at(self.bias, one), "c": _at(self.c_of_pieces, one)}
            found.append(solve(self.left[piece].T, self.right[piece], **words)[0])
        return bits(torch.stack(found))

    # --- batches --------------------------------------------------------------------------------------

    def draw(self, form: str, solve: Callable[..., Any]) -> Batch:
        """Draws a batch of rows from the pool, in any order and with any neighbours."""
        rng = self.rng
        groups = int(rng.choice([g for g in (1, 2, 5, 17, 64, 300) if g <= self.most]))
        groups = max(1, min(groups, MOST_ELEMENTS // (self.kind.k * self.kind.n)))
        layouts, columns = self.layouts, self.columns[rng.integers(2)]
        experts = rng.integers(0, WEIGHTS, groups)
        if form in ("batched", "masked"):
            return self._stack(form == "masked", experts, columns, layouts, solve)
        if form == "jagged_k":
            return self._pieces(experts, columns, layouts, solve)
        most = int(rng.choice([most for most in (1, 8, 64, 300, 2000) if most <= self.most]))
        if form == "per_group":
            few = min(groups, LISTED)
            return self._list(self._sizes(few, most), experts[:few], layouts, solve)
        sizes = self._sizes(groups, most)
        return self._jagged(form[-1], sizes, experts, columns, layouts, solve)

    def _sizes(self, groups: int, most: int) -> npt.NDArray[np.int64]:
        rng = self.rng
        if rng.integers(3) == 0:
            return np.full(groups, max(1, most // groups))
        cuts = np.sort(rng.integers(0, most + 1, groups - 1))
        return np.diff(np.concatenate(([0], cuts, [most])))

    def _numbers(self, size: Any) -> Tensor:
        return torch.from_numpy(self.rng.integers(0, self.count, size)).to(self.device)

    def _cut(self, sizes: npt.NDArray[np.int64], head: int) -> dict[str, Any]:
        """The keyword argument that cuts the groups, on the host or on the device."""
        offsets = np.concatenate(([head], head + np.cumsum(sizes)))
        if self.rng.integers(2):
            return {"offsets": offsets}
        return {"offsets": torch.from_numpy(offsets).to(self.device, self.index)}

    def _jagged(self, direction: str, sizes: Any, experts: Any, columns: slice, layouts: Any, solve: Any) -> Batch:
        head, total = int(self.rng.integers(0, 3)), int(sizes.sum())
        shared = len(set(experts.tolist())) == 1 and len(sizes) > 1
        rows = self._numbers(head + total)
        expert = torch.from_numpy(np.repeat(experts, sizes)).to(self.device)
        weights = self.weights[experts[0]] if shared else self.weights[torch.from_numpy(experts)]
        weights, cut = weights[..., columns], self._cut(sizes, head)
        wanted = self.alone(direction, solve)[expert, rows[head:]][:, columns]
        c = _at(self.c, rows, columns)
        if direction == "n":
            kw = {**cut, "c": None if c is None else c.T, "jagged": "n"}
            a, b = lay(weights.transpose(-1, -2), layouts[1]), lay(self.rows[rows].T, layouts[0])
            return Batch("jagged_n", a, b, kw, [wanted], lambda y: [y.T[head:]])
        kw = {**cut, "c": c, "bias": _at(self.bias, torch.from_numpy(experts), columns)}
        a, b = lay(self.rows[rows], layouts[0]), lay(weights, layouts[1])
        return Batch("jagged_m", a, b, kw, [wanted], lambda y: [y[head:]])

    def _list(self, sizes: Any, experts: Any, layouts: Any, solve: Any) -> Batch:
        alone = self.alone("m", solve)
        rows = [self._numbers(int(size)) for size in sizes]
        columns = [self.columns[x] for x in self.rng.integers(0, 2, len(sizes))]
        pairs = list(zip(rows, experts.tolist(), columns, strict=True))
        a = [lay(self.rows[r], layouts[0]) for r in rows]
        b = [lay(self.weights[e][:, j], layouts[1]) for _, e, j in pairs]
        c = None if self.c is None else [self.c[r][:, j] for r, _, j in pairs]
        bias = None if self.bias is None else [self.bias[e][j] for _, e, j in pairs]
        return Batch("per_group", a, b, {"c": c, "bias": bias}, [alone[e, r][:, j] for r, e, j in pairs], list)

    def _stack(self, masked: bool, experts: Any, columns: slice, layouts: Any, solve: Any) -> Batch:
        high = int(self.rng.choice([high for high in (1, 2, 7, 33, 64, 130) if high * len(experts) <= 32 * self.most]))
        rows = self._numbers((len(experts), high))
        which = torch.from_numpy(experts).to(self.device)
        wanted = self.alone("m", solve)[which[:, None], rows][..., columns]
        kw = {"c": _at(self.c, rows, columns), "bias": _at(self.bias, which, columns)}
        a, b = lay(self.rows[rows], layouts[0]), lay(self.weights[which][..., columns], layouts[1])
        if not masked:
            return Batch("batched", a, b, kw, [wanted], lambda y: [y])
        valid = torch.from_numpy(self.rng.integers(0, high + 1, len(experts))).to(self.device, self.index)
        owned = torch.arange(high, device=self.device) < valid[:, None]
        return Batch("masked", a, b, {**kw, "valid_rows": valid}, [wanted[owned]], lambda y: [y[owned]])

    def _pieces(self, pieces: Any, columns: slice, layouts: Any, solve: Any) -> Batch:
        pieces = pieces[:40]
        spans = [self.pieces[p] for p in pieces]
        which = torch.from_numpy(pieces).to(self.device)
        a, b = (torch.cat([x[span] for span in spans]) for x in (self.left, self.right[:, columns]))
        kw: dict[str, Any] = {"c": _at(self.c_of_pieces, which, columns), "bias": _at(self.bias, which, columns)}
        kw |= {**self._cut(np.array([s.stop - s.start for s in spans]), 0), "jagged": "k"}
        wanted = self.alone("k", solve)[which][..., columns]
        return Batch("jagged_k", lay(a.T, layouts[0].turned), lay(b, layouts[1]), kw, [wanted], lambda y: [y])


def _at(x: Tensor | None, places: Any, columns: slice = ALL) -> Tensor | None:
    """The entries at some places of the first direction and of the last one; None of nothing."""
    return None if x is None else x[places][..., columns]


@dataclass
class Count:
    """The counts of one backend. `configs` counts the comparisons of each config."""

    comparisons: int = 0
    rows: int = 0
    elements: int = 0
    differing: int = 0
    kinds: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    forms: Counter[str] = field(default_factory=Counter)
    configs: Counter[str] = field(default_factory=Counter)
    at_fault: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)


class _Pending(NamedTuple):
    """A comparison whose number of differing elements is still on the device."""

    differing: Tensor
    batch: Batch
    config: str
    parts: list[Tensor]


class Comparer:
    """Runs batches of one kind on one backend, and counts what differs."""

    def __init__(self, subject: Subject, kind: Case, pool: Pool, count: Count, promise: bool) -> None:
        self.subject, self.kind, self.pool, self.count, self.promise = subject, kind, pool, count, promise
        self._pending: list[_Pending] = []
        self._configs: dict[str, list[Any]] = {}

    def solve(self, a: Any, b: Any, config: Any = None, **keywords: Any) -> Any:
        return grouped_gemm(
            a, b, backend=self.subject.backend.name, config=config, batch_invariant=self.promise, **keywords
        )

    def config_for(self, batch: Batch) -> Any:
        """One of a few configs that are valid whatever the sizes; None, so that the backend chooses."""
        rng = self.pool.rng
        if rng.integers(3) == 0:
            return None
        problem = GroupedGemmProblem(
            batch.a, batch.b, batch_invariant=self.promise, **batch.keywords, **self.pool.keywords
        )
        spec = staged_spec(problem)
        key = f"{spec.form} {spec.a.order}{spec.a.align} {spec.b.order}{spec.b.align}"
        if key not in self._configs:
            shipped = self.subject.shipped(spec, self.pool.device)
            chosen = rng.permutation(len(shipped))[:CONFIGS_OF_A_FORM]
            self._configs[key] = [shipped[i] for i in chosen]
        found = self._configs[key]
        return found[rng.integers(len(found))] if found else None

    def compare(self) -> None:
        """Runs one batch and compares its result on the device."""
        form = str(self.pool.rng.choice(self.pool.forms))
        try:
            batch = self.pool.draw(form, self.solve)
            config = self.config_for(batch)
            try:
                result = self.solve(batch.a, batch.b, config, **batch.keywords, **self.pool.keywords)
            except InvalidSetting:  # not for these very sizes
                config = None
                result = self.solve(batch.a, batch.b, **batch.keywords, **self.pool.keywords)
        except (BackendUnsupported, BackendUnavailable) as error:
            reasons = next(iter(getattr(error, "reasons", {}).values()), [str(error)])
            self.count.refused[f"{form}, {self.kind.dtype}: {reasons[0][:160]}"] += 1
            return
        parts = [bits(part) for part in batch.parts(result)]
        each = [(x != y).sum() for x, y in zip(parts, batch.wanted, strict=True) if x.numel()]
        zero = torch.zeros((), dtype=torch.int64, device=self.pool.device)
        differing = torch.stack(each).sum() if each else zero
        self._pending.append(_Pending(differing, batch, str(config), parts))
        count = self.count
        count.comparisons += 1
        count.rows += sum(part.shape[:-1].numel() for part in parts)
        count.elements += sum(part.numel() for part in parts)
        count.forms[batch.form] += 1
        count.configs[str(config)] += 1
        if len(self._pending) >= AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Waits for the device, and reads the numbers of differing elements."""
        if not self._pending:
            return
        for made, differing in zip(
            self._pending, torch.stack([p.differing for p in self._pending]).tolist(), strict=True
        ):
            if differing:
                self.count.differing += differing
                self.count.at_fault[made.config] += 1
                if len(self.count.examples) < EXAMPLES:
                    self.count.examples.append(self._describe(made, differing))
        self._pending.clear()

    def _describe(self, made: _Pending, differing: int) -> str:
        got, wanted = next((x, y) for x, y in zip(made.parts, made.batch.wanted, strict=True) if bool((x != y).any()))
        at = tuple((got != wanted).nonzero()[0].tolist())
        dtype = self.kind.result_dtype
        values = [float(x[at].cpu().view(dtype)) for x in (got, wanted)]
        words = [hex(int(x[at]) & (1 << 8 * x.element_size()) - 1) for x in (got, wanted)]
        where = f"{made.batch.form}, {made.config}, element {at} of {tuple(got.shape)}"
        return (
            f"{self.kind}: {where}: {values[0]!r} ({words[0]}) and alone {values[1]!r} ({words[1]}); {differing} differ"
        )


def run(backend: str, device: torch.device, seconds: float, seed: int, promise: bool, small: bool) -> Count:
    """Compares for `seconds`, in one process."""
    count, subject, begin, number = Count(), Subject(backend), time.monotonic(), 0
    rows, work, each = (40, 1 << 11, 25) if small else (512, 1 << 20, 2000)
    while time.monotonic() - begin < seconds:
        number += 1
        kind = draw_kind(seed * 100003 + number, work)
        comparer = Comparer(subject, kind, Pool(kind, rows, device), count, promise)
        before = count.comparisons
        for drawn in range(each):
            comparer.compare()
            refused = drawn >= REFUSED_AT_ONCE and count.comparisons == before
            if refused or time.monotonic() - begin > seconds:
                break
        comparer.settle()
        count.kinds += count.comparisons > before
    return count


def main() -> int:
    """Prints a line for each backend. Returns 1 if a bit differed, a process failed or nothing could be compared."""
    parser = parser_of(__doc__ or "", "cupy,triton,numba,cublas", 60.0)
    no_promise = "leave batch_invariant=True out, so that bits may differ"
    parser.add_argument("--control", action="store_true", help=no_promise)
    args = parser.parse_args()
    device, report, bad = torch.device(args.device), dict[str, Any](), 0
    for backend in args.backends.split(","):
        calls = [(backend, device, args.seconds, args.seed * 1000 + job, not args.control, device.type == "cpu")
                 for job in range(args.jobs)]  # fmt: skip
        count = Count()
        failures = side_by_side(run, calls, count)
        refused = sum(count.refused.values())
        size = (
            f"{count.comparisons} comparisons of {count.rows} rows and {count.elements} elements, {count.kinds} kinds"
        )
        print(f"{backend}: {size}: {count.differing} elements differ; {refused} refused", flush=True)
        for text in [*count.examples[:5], *failures[:2]]:
            print("   ", text, flush=True)
        report[backend] = {**vars(count), "examples": count.examples[:EXAMPLES], "failures": failures}
        if not count.comparisons:
            print("    nothing was compared: ", *[reason for reason, _ in count.refused.most_common(1)], flush=True)
        bad += not count.comparisons or bool(count.differing and not args.control) or bool(failures)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
