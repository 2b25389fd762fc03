"""Draws problems with picked rows, gates, weights and sums of rows, in guarded memory; and judges a backend by them.

    python -m multigemm.testing.fused_problems --backend NAME --problems 100000 --device cuda

A problem is drawn from a seed alone. Kinds of values take turns: whole numbers, judged to the last bit through reglu,
whole limits and sums; ordinary ones; and ones with NaN and infinities among them. Indices are honest, or lie: -1, one
past the end, 2^31 - 1, 2^31, 2^32 and -2^63 stand among them, and mean no row. Every operand, index, weight and output
has a band of NaN, or of indices that lie, on both sides. Rows that no group owns, weights of absent rows and outputs
hold NaN before a launch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Backend
from multigemm.planning.binding import Choice, bind
from multigemm.planning.staging import allocate, staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ACTIVATIONS, GATES, GLU_LAYOUTS
from multigemm.reference.verify import answer, judge
from multigemm.select import registry
from multigemm.testing.case import Case
from multigemm.testing.oracles import Finding, Outcome, short_text
from multigemm.testing.placed_case import bits
from multigemm.testing.subject import Subject

FORMS = ("jagged_m", "jagged_m", "jagged_m", "jagged_m", "jagged_k", "jagged_n", "batched", "masked", "per_group")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("whole", "normal", "special")
LIES = (-1, 2**31 - 1, 2**31, 2**32, -(2**63), 2**63 - 1)
BAND = 64
"""Elements of poison on each side of every tensor."""


class Memory:
    """Tensors between bands of poison, and what they held when they were made."""

    def __init__(self, rng: np.random.Generator, device: torch.device) -> None:
        self._rng, self._device = rng, device
        self._blocks: list[tuple[str, Tensor, Tensor, Tensor | None]] = []

    def place(self, name: str, x: Tensor, written: bool = False) -> Tensor:
        """The same numbers between bands, on the device: as they are, transposed, or with gaps."""
        steps = 2 if x.dim() and self._rng.integers(3) == 0 else 1
        turned = x.dim() == 2 and self._rng.integers(3) == 0 and name not in ("out", "preact_out")
        source = x.t() if turned else x
        poison = torch.nan if x.is_floating_point() else 77 if x.dtype is torch.int8 else 2**31 - 1
        held = torch.full((2 * BAND + source.numel() * steps,), poison, dtype=x.dtype)
        strides = [steps * s for s in torch.empty(source.shape, device="meta").stride()]
        held.as_strided(source.shape, strides, BAND).copy_(source)
        held = held.to(self._device)
        found = held.as_strided(source.shape, strides, BAND)
        self._blocks.append((name, held, held.clone(), found if written else None))
        return found.t() if turned else found

    def changed(self) -> list[str]:
        """The names of tensors whose memory was written where it must not be."""
        names = []
        for name, held, before, written in self._blocks:
            after = held.clone()
            if written is not None:
                inside = after.as_strided(written.shape, written.stride(), BAND)
                inside.copy_(before.as_strided(written.shape, written.stride(), BAND))
            if not torch.equal(bits(after), bits(before)):
                names.append(name)
        return names


@dataclass(slots=True)
class Drawn:
    """A problem, what it stands for, and the arguments that it was made of."""

    problem: GroupedGemmProblem
    traits: frozenset[str]
    memory: Memory
    a: Any
    b: Any
    keywords: dict[str, Any] = field(default_factory=dict)


class _Draw:
    """The choices of one seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.rng = np.random.default_rng(seed)
        self.device, self.memory = device, Memory(self.rng, device)
        self.form, self.dtype, self.kind = self.pick(FORMS), self.pick(DTYPES), self.pick(KINDS)
        self.traits = {f"form:{self.form}", f"dtype:{self.dtype}", f"values:{self.kind}"}
        self.keywords: dict[str, Any] = {}

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, one_in: int) -> bool:
        return int(self.rng.integers(one_in)) == 0

    def numbers(self, shape: tuple[int, ...], dtype: torch.dtype | None = None, positive: bool = False) -> Tensor:
        """Small whole numbers, or ordinary ones, now and then a NaN or an infinity."""
        if self.kind == "whole":
            found = self.rng.integers(0 if positive else -2, 3, shape).astype(np.float64)
        else:
            found = self.rng.standard_normal(shape) if not positive else self.rng.random(shape)
        if self.kind == "special" and found.size and self.chance(2):
            at = self.rng.integers(0, found.size, 1 + found.size // 97)
            found.flat[at] = self.rng.choice((np.nan, np.inf, -np.inf, 0.0, -0.0), at.size)
        return torch.from_numpy(np.asarray(found)).to(dtype or self.dtype)

    def put(self, name: str, x: Tensor, written: bool = False) -> Any:
        """A tensor in guarded memory as the keyword of this name."""
        self.keywords[name] = self.memory.place(name, x, written)
        return self.keywords[name]

    def index(self, name: str, shape: tuple[int, ...], extent: int) -> Any:
        """Numbers of rows below `extent`: honest ones may be told by the host."""
        lies = self.chance(2) or not extent
        dtype = self.pick((torch.int32, torch.int64))
        values = self.rng.integers(0, max(extent, 1), shape)
        if lies and values.size:
            wrong = [x for x in (*LIES, extent, extent + 1) if dtype is torch.int64 or -(2**31) <= x < 2**31]
            at = self.rng.integers(0, values.size, 1 + values.size // 3)
            values.flat[at] = self.rng.choice(wrong, at.size)
            if not extent:
                values[...] = self.rng.choice(wrong, shape)
        self.traits |= {f"{name}:{'lies' if lies and values.size else 'honest'}", f"index:{dtype}"}
        if not lies and self.chance(3):
            self.traits.add("index:host")
            return values.tolist() if self.chance(2) and values.size else values
        return self.memory.place(name, torch.from_numpy(np.asarray(values)).to(dtype))


def _draw_operands(draw: _Draw) -> tuple[Any, Any, list[int], dict[str, int]]:
    """a, b, the lengths of groups, and how many tokens and columns the products have."""
    form, rng = draw.form, draw.rng
    groups, n, k = int(rng.integers(0, 6)), 2 * int(rng.integers(0, 21)), int(draw.pick((0, 1, 3, 17, 33, 64)))
    m = int(rng.integers(0, 20))
    lengths = [int(draw.pick((0, 0, 1, 3, 16, 17, 33))) for _ in range(groups)]
    head, tail = (int(draw.pick((0, 0, 2))) for _ in "ht")
    tokens = head + sum(lengths) + tail
    if form.startswith("jagged"):
        draw.keywords |= {"jagged": form[-1]}
        cut = np.cumsum([head, *lengths])
        live = draw.chance(2)
        draw.keywords["offsets"] = torch.from_numpy(cut).to(draw.device) if live else cut.tolist()
    rows = {name: int(rng.integers(0, 30)) for name in ("a_rows", "b_rows")}
    picks = {"jagged_m": ("a_rows",), "jagged_n": ("b_rows",), "jagged_k": ("a_rows", "b_rows")}.get(form, ())
    extents = dict.fromkeys(("a_rows", "b_rows"), tokens)
    for name in picks:
        if draw.chance(2):
            draw.traits.add(name)
            extents[name] = rows[name]
            draw.keywords[name] = draw.index(name, (tokens,), rows[name])
    shapes = {
        "jagged_m": ((extents["a_rows"], k), (groups, k, n)),
        "jagged_n": ((groups, m, k), (k, extents["b_rows"])),
        "jagged_k": ((m, extents["a_rows"]), (extents["b_rows"], n)),
    }
    a, b = (draw.numbers(shape) for shape in shapes.get(form, ((groups, m, k), (groups, k, n))))
    if form == "jagged_m" and "a_rows" not in draw.keywords:
        a[:head], a[tokens - tail :] = torch.nan, torch.nan
    if form == "masked":
        lengths = [int(rng.integers(0, m + 1)) for _ in range(groups)]
        draw.keywords["valid_rows"] = torch.tensor(lengths, dtype=torch.int64, device=draw.device)
        for g, length in enumerate(lengths):
            a[g, length:] = torch.nan
    if form == "per_group":
        return [draw.memory.place("a", x) for x in a], [draw.memory.place("b", x) for x in b], lengths, {
            "m": m, "n": n, "tokens": tokens, "groups": groups,
        }  # fmt: skip
    placed = draw.memory.place("a", a), draw.memory.place("b", b)
    return *placed, lengths, {"m": m, "n": n, "tokens": tokens, "groups": groups}


def _draw_gate(draw: _Draw) -> None:
    """An activation, or a gate with its numbers."""
    if draw.form in ("jagged_n", "jagged_k") or draw.chance(3):
        act = draw.pick((None, *ACTIVATIONS))
        draw.keywords["activation"] = act
        draw.traits.add(f"act:{act}")
        return
    gate = draw.pick((*GATES, "reglu")) if draw.kind != "whole" else draw.pick((*GATES, *["reglu"] * 5))
    layout = draw.pick(GLU_LAYOUTS)
    draw.traits |= {f"gate:{gate}", f"layout:{layout}"}
    draw.keywords |= {"activation": gate, "glu_layout": layout}
    whole = draw.kind == "whole"
    if draw.chance(2):
        draw.keywords["glu_beta"] = draw.pick((1.0, -1.0) if whole else (1.0, 0.3))
        draw.traits.add("glu_beta")
    if draw.chance(2):
        draw.keywords["glu_limit"] = draw.pick((2.0, 7.0, 0.0) if whole else (0.7, 2.0, 0.1))
        draw.traits.add("glu_limit")
    if gate == "swiglu" and draw.chance(2):
        draw.keywords["glu_alpha"] = draw.pick((1.702, -0.5, 0.25))
        draw.traits.add("glu_alpha")


def _draw_rest(draw: _Draw, sizes: dict[str, int]) -> None:
    """Bias, weights and sums of rows, C, outputs."""
    form, m, n, tokens, groups = draw.form, *(sizes[name] for name in ("m", "n", "tokens", "groups"))
    gated = draw.keywords.get("activation") in GATES
    if form != "per_group" and draw.chance(2):
        wide = (groups, n) if form != "jagged_n" and draw.chance(2) else (tokens if form == "jagged_n" else n,)
        draw.put("bias", draw.numbers(wide, draw.pick((draw.dtype, torch.float32))))
    if form in ("jagged_m", "masked") and draw.chance(2):
        draw.traits.add("row_scale")
        lines = (tokens,) if form == "jagged_m" else (groups, m)
        draw.put("row_scale", draw.numbers(lines, draw.pick((draw.dtype, torch.float32))))
    product: tuple[int, ...] = {"jagged_m": (tokens, n), "jagged_n": (m, tokens)}.get(form, (groups, m, n))
    shape: tuple[int, ...] = (*product[:-1], product[-1] // 2) if gated else product
    scatters = _draw_sums(draw, tokens) if form == "jagged_m" else 0
    if scatters:
        shape = (scatters - 1, shape[1])
    if (scatters or not gated) and form != "per_group" and draw.chance(2):
        draw.put("c", draw.numbers(shape))
        draw.keywords["beta"] = draw.pick((1.0, -1.0, 0.0) if draw.kind == "whole" else (1.0, 0.5, 0.0))
        draw.traits.add("c")
    if draw.chance(3):
        draw.keywords["alpha"] = draw.pick((2.0, -1.0, 0.0) if draw.kind == "whole" else (0.3, -1.0, 0.0))
    draw.keywords["out_dtype"] = draw.pick((draw.dtype, torch.float32, torch.bfloat16))
    _draw_outputs(draw, shape, product)


def _draw_sums(draw: _Draw, tokens: int) -> int:
    """`combine` or `out_rows`, now and then; the number of rows that result, and 1, or 0."""
    how, rows = draw.pick(("", "combine", "combine", "out_rows")), int(draw.rng.integers(0, 25))
    if not how:
        return 0
    draw.traits.add(how)
    if how == "out_rows":
        draw.keywords |= {"out_rows": draw.index("out_rows", (tokens,), rows), "rows": rows}
        return rows + 1
    terms = int(draw.pick((0, 1, 2, 3, 8)))
    index = draw.index("combine", (rows, terms), tokens)
    if draw.chance(4):
        draw.keywords["combine"] = (index, None)
        return rows + 1
    weights = draw.numbers((rows, terms), draw.pick((draw.dtype, torch.float32, torch.float32)))
    if draw.chance(3):
        weights[torch.from_numpy(draw.rng.random((rows, terms)) < 0.3)] = 0
    if isinstance(index, Tensor):
        at = index.cpu()
        weights[(at < 0) | (at >= tokens)] = torch.nan
    draw.traits.add("weights")
    draw.keywords["combine"] = (index, draw.memory.place("weights", weights))
    return rows + 1


def _draw_outputs(draw: _Draw, shape: tuple[int, ...], product: tuple[int, ...]) -> None:
    """`out` and `preact_out`, which hold NaN."""
    dtype, listed = draw.keywords["out_dtype"], draw.form == "per_group"

    def place(name: str, wanted: tuple[int, ...]) -> Any:
        full = torch.full(wanted, torch.nan, dtype=dtype)
        return [draw.memory.place(name, x, True) for x in full] if listed else draw.memory.place(name, full, True)

    if draw.chance(2):
        draw.traits.add("out")
        draw.keywords["out"] = place("out", shape)
    if draw.keywords.get("activation") and draw.chance(2):
        draw.traits.add("preact_out")
        draw.keywords["preact_out"] = place("preact_out", product)


LEFT_OUT = (
    "alpha", "batch_invariant", "bias", "c", "glu_alpha", "glu_beta", "glu_limit", "out", "preact_out", "row_scale",
    "weights",
)  # fmt: skip
"""What a problem may do without, and keep its shapes."""


def _leave_out(keywords: dict[str, Any], names: Collection[str]) -> None:
    for name in names:
        keywords.pop(name, None)
    if "c" in names:
        keywords.pop("beta", None)
    if "weights" in names and "combine" in keywords:
        keywords["combine"] = (keywords["combine"][0], None)


def simpler_than(case: Case) -> Iterator[Case]:
    """The fused problem of a case without one more of the keywords that it has."""
    keywords = random_problem(case.fused, without=case.without).keywords
    held = {*keywords, *(["weights"] if keywords.get("combine", (None, None))[1] is not None else [])}
    yield from (replace(case, without=(*case.without, name)) for name in LEFT_OUT if name in held)


def random_problem(seed: int, device: torch.device | str = "cpu", without: Collection[str] = ()) -> Drawn:
    """The problem of a seed.

    Args:
        seed: another seed, another problem; the same seed, the same numbers on every device.
        device: where the operands lie.
        without: keywords that are left out, of `LEFT_OUT`.

    Returns:
        The problem with its traits, such as "gate:swiglu", "combine:lies", "form:jagged_k".

    Example:
        >>> random_problem(3).problem.spec == random_problem(3).problem.spec
        True
    """
    draw = _Draw(seed, torch.device(device))
    a, b, lengths, sizes = _draw_operands(draw)
    if not lengths:
        draw.traits.add("no groups")
    if 0 in lengths:
        draw.traits.add("empty groups")
    _draw_gate(draw)
    _draw_rest(draw, sizes)
    if draw.chance(6):
        draw.keywords["batch_invariant"] = True
        draw.traits.add("batch invariant")
    _leave_out(draw.keywords, without)
    problem = GroupedGemmProblem(a, b, **draw.keywords)
    return Drawn(problem, frozenset(draw.traits), draw.memory, a, b, draw.keywords)


# --- judging ------------------------------------------------------------------------------------------


def _config(backend: Backend, problem: GroupedGemmProblem, config: Any) -> Any:
    """A config, or the one at a position."""
    return backend.configs(staged_spec(problem), problem.device)[config] if type(config) is int else config


def run(backend: Backend, problem: GroupedGemmProblem, config: Any = 0) -> Any:
    """The result of a problem by a backend that need not be registered, in memory that held NaN."""
    spec = staged_spec(problem)
    recipe = backend.plan(spec, _config(backend, problem, config), problem.device)
    out = allocate(problem)
    if problem.out is None:
        for x in out if isinstance(out, list) else [out]:
            x.fill_(torch.nan)
    bound = bind(
        Choice(backend.name, recipe, spec, ""), problem, out
    )  # holds the ends that it made of sizes on the host
    bound.launch()
    return out


def check(drawn: Drawn, backend: Backend, config: Any = 0) -> list[str]:
    """What is wrong in a backend's result for a problem that was drawn: values, bands, relations to other problems."""
    problem, found = drawn.problem, []
    right = answer(problem)
    for block in right.blocks if problem.out is not None else ():
        block.free |= ~block.owned
    got = run(backend, problem, config)
    verdict = judge(right, _on_host(got), suspicion=False)
    if not verdict:
        found.append(verdict.text)
    if right.preact is not None and problem.fused is not None:
        preact = judge(right.preact, _on_host(problem.fused.preact), suspicion=False)
        found += [] if preact else [f"preact_out: {preact.text}"]
    found += [f"{name}: memory beside it, or of an input, was written" for name in drawn.memory.changed()]
    if not found:
        found = _same_with_every_row(drawn, backend, config, got)
    return found


def _same_with_every_row(drawn: Drawn, backend: Backend, config: Any, got: Any) -> list[str]:
    """Indices that name every row in order change no bit, under the same config."""
    fused, form = drawn.problem.fused, drawn.problem.form
    if form not in ("jagged_m", "jagged_k") or (fused is not None and fused.indices.keys() & {"a_rows", "b_rows"}):
        return []
    tokens = drawn.a.shape[0 if form == "jagged_m" else 1]
    rows = torch.arange(tokens, dtype=torch.int32, device=drawn.a.device)
    keywords = {name: x for name, x in drawn.keywords.items() if name != "out"}
    if fused is not None and fused.preact is not None:
        keywords["preact_out"] = torch.empty_like(cast(Tensor, fused.preact))
    problem = GroupedGemmProblem(drawn.a, drawn.b, a_rows=rows, **keywords)
    spec = staged_spec(problem)
    if backend.not_supported_reasons(spec, problem.device):
        return []
    wanted = _config(backend, drawn.problem, config)
    configs = list(backend.configs(spec, problem.device))
    if wanted not in configs:
        return []
    again, owned = run(backend, problem, configs.index(wanted)), answer(problem).blocks[0].owned
    same = (bits(again) == bits(got)) | (again.isnan() & got.isnan())
    return [] if (same.cpu().numpy() | ~owned).all() else ["a_rows = 0, 1, 2, ... changes the bits of the result"]


def _on_host(x: Any) -> Any:
    return [t.cpu() for t in x] if isinstance(x, list) else x.cpu()


def examine(case: Case, subject: Subject, device: torch.device) -> Outcome:
    """What comes of the fused problem of a case, run by a subject."""
    drawn = random_problem(case.fused, device, case.without)
    spec, outcome = staged_spec(drawn.problem), Outcome(subject.name)
    outcome.refusals = subject.refusals(spec, device)
    if not outcome.ran:
        return outcome
    try:
        recipe = subject.recipe(spec, device)
        outcome.kernel, outcome.config = recipe.kernel, recipe.config
        outcome.findings = [Finding("fused", text) for text in check(drawn, subject.backend, recipe.config)]
    except Exception as error:  # whatever a backend raises is a finding, never the end of a campaign
        outcome.findings.append(Finding("exception", short_text(error)))
    return outcome


def findings(backend: Backend, problems: int, device: torch.device | str = "cpu", first: int = 0) -> Iterator[str]:
    """What is wrong in the results of a backend for so many problems; those that it refuses are skipped.

        Args:
            backend: the one under test.
            problems: how many seeds.
            device: where the operands lie.
            first: the first seed.

        Yields:
            The seed, the problem and what is wrong.

        Example:
            >>> from multigemm.select import registry
    from multigemm.testing.placed_case import bits
            >>> list(findings(registry.get("cpu"), 3))
            []
    """
    for seed in range(first, first + problems):
        drawn = random_problem(seed, device)
        spec = staged_spec(drawn.problem)
        if backend.not_supported_reasons(spec, drawn.problem.device):
            continue
        for config in range(len(backend.configs(spec, drawn.problem.device))):
            drawn = random_problem(seed, device)
            for text in check(drawn, backend, config):
                yield f"random_problem({seed}), config {config}: {drawn.problem}: {text}"


def main(arguments: list[str]) -> int:
    """Prints what is wrong in the results of a backend, and how many problems it took."""
    parser = argparse.ArgumentParser(description="random problems with picked rows, gates and sums of rows")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--problems", type=int, default=1000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    backend, device, found = registry.get(options.backend), torch.device(options.device), 0
    for text in findings(backend, options.problems, device, options.first):
        print(text, flush=True)
        found += 1
    seeds = range(options.first, options.first + options.problems)
    specs = (staged_spec(random_problem(seed, device).problem) for seed in seeds[:1000])
    taken = sum(not backend.not_supported_reasons(spec, device) for spec in specs)
    print(f"{options.backend}: {found} findings; it takes {taken} of the first {len(seeds[:1000])} problems")
    return int(found > 0 or not taken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
