"""Fused problems in the cache of bound launches: whatever changes between two calls, a hit gives what a miss would."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backend import Recipe
from multigemm.planning import launch_cache
from multigemm.planning.binding import Choice
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.planning.staging import allocate, stage, staged_spec

TOKENS, PAIRS, GROUPS, HIDDEN, INNER = 6, 12, 3, 4, 5


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    launch_cache.clear()
    yield
    launch_cache.clear()


def new(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def routing() -> dict[str, Any]:
    """Pairs by expert, of which some indices lie."""
    return {
        "ends": torch.tensor([3, 3, 10], dtype=torch.int32),  # on the host: part of the key
        "rows": torch.randint(-2, TOKENS + 2, (PAIRS,)),
        "place": torch.randint(-2, PAIRS + 2, (TOKENS, 2), dtype=torch.int32),
        "weights": new(TOKENS, 2),
    }


def gathered(r: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return new(TOKENS, HIDDEN), new(GROUPS, HIDDEN, 2 * INNER), {"ends": r["ends"], "a_rows": r["rows"], **more}


def posed(draw: random.Random) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """One of a few problems, in new memory; `preact_out` and `out` receive what they did not hold."""
    r = routing()
    kind = draw.choice(("gate", "preact", "combine", "scatter", "scale", "wgrad"))
    if kind == "gate":
        limit = draw.choice((None, 0.5, 1, 1.0))
        return gathered(r, activation="swiglu", glu_limit=limit, glu_layout=draw.choice(("halves", "interleaved")))
    if kind == "preact":
        return gathered(r, activation=draw.choice(("swiglu", "reglu")), preact_out=new(PAIRS, 2 * INNER))
    if kind == "scale":
        return gathered(r, row_scale=new(PAIRS), out=new(PAIRS, 2 * INNER))
    if kind == "wgrad":
        b = new(PAIRS, INNER)
        return new(TOKENS, HIDDEN).T, b, {"ends": r["ends"], "a_rows": r["rows"], "jagged": "k"}
    h, down = new(PAIRS, INNER), new(GROUPS, INNER, HIDDEN)
    if kind == "scatter":
        return h, down, {"ends": r["ends"], "out_rows": r["rows"], "rows": draw.choice((TOKENS, TOKENS + 1))}
    weights = draw.choice((r["weights"], None))
    given = {"ends": r["ends"], "combine": (r["place"], weights)}
    return h, down, given | draw.choice(({}, {"c": new(TOKENS, HIDDEN), "beta": 0.5}))


def copies(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}


@pytest.mark.parametrize("seed", range(4))
def test_a_hit_gives_what_a_miss_would(seed: int) -> None:
    draw, served = random.Random(seed), LAUNCHES.served
    torch.manual_seed(seed)
    for _ in range(150):
        a, b, given = posed(draw)
        other = copies(given)
        got = mg.grouped_gemm(a, b, backend="cpu", **given)
        kept, launch_cache.LAUNCHES._entries = LAUNCHES._entries, {}
        want = mg.solve(mg.GroupedGemmProblem(a, b, **other), "cpu")
        LAUNCHES._entries = kept
        assert torch.equal(got, want), given
        if "preact_out" in given:
            assert torch.equal(given["preact_out"], other["preact_out"])
    assert LAUNCHES.served - served > 40


def warm(a: Tensor, b: Tensor, **given: Any) -> Tensor:
    for _ in range(3):
        out = mg.grouped_gemm(a, b, backend="cpu", **given)
    return out  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"glu_limit": True}, "glu_limit"),
        ({"glu_limit": -1.0}, "negative"),
        ({"glu_beta": False}, "glu_beta"),
        ({"a_rows": torch.zeros(PAIRS, 1, dtype=torch.int64)}, "dimensions"),
        ({"a_rows": np.full(PAIRS, TOKENS)}, "must lie in"),
        ({"a_rows": torch.zeros(PAIRS, dtype=torch.int16)}, "int32 or int64"),
        ({"rows": 3}, "without out_rows"),
    ],
)
def test_what_was_not_accepted_before_is_refused(given: dict[str, Any], message: str) -> None:
    x, up, known = gathered(routing(), activation="swiglu", glu_limit=1, glu_beta=0)
    warm(x, up, **known)
    with pytest.raises(mg.InvalidProblem, match=message):
        mg.grouped_gemm(x, up, backend="cpu", **{**known, **given})


def test_indices_on_the_host_are_read_at_every_call() -> None:
    x, up, known = gathered(routing())
    warm(x, up, **known)
    for rows in ([1] * PAIRS, [2] * PAIRS):
        for _ in range(3):
            got = mg.grouped_gemm(x, up, ends=known["ends"], a_rows=rows, backend="cpu")
        want = mg.grouped_gemm(x[rows].clone(), up, ends=known["ends"], backend="cpu")
        assert torch.equal(got, want)


def test_memory_that_is_written_is_read_by_nobody() -> None:
    memory = new(4 * PAIRS * INNER)
    preact, h = (
        memory[: 2 * PAIRS * INNER].view(PAIRS, -1),
        memory[2 * PAIRS * INNER :][: PAIRS * INNER].view(PAIRS, -1),
    )
    scale = memory[3 * PAIRS * INNER :][:PAIRS]
    x, up, known = gathered(routing(), activation="swiglu", preact_out=preact, out=h, row_scale=scale)
    warm(x, up, **known)
    for wrong in (
        {"preact_out": memory[PAIRS * INNER :][: 2 * PAIRS * INNER].view(PAIRS, -1)},
        {"row_scale": memory[INNER:][:PAIRS]},
        {"out": memory[: PAIRS * INNER].view(PAIRS, -1)},
    ):
        with pytest.raises(mg.InvalidProblem, match="memory"):
            mg.grouped_gemm(x, up, backend="cpu", **{**known, **wrong})


def test_an_entry_that_waits_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows between two launches are as many bytes as a layer keeps for backward, and more."""
    events: list[str] = []

    class Launch:
        work_bytes = 1 << 20

        def drop_lent(self) -> None:
            events.append("dropped")

        def __getattr__(self, name: str) -> Any:
            return lambda *_: 0

    r = routing()
    h, down, sums = new(PAIRS, INNER), new(GROUPS, INNER, HIDDEN), (r["place"], r["weights"])
    problem = mg.GroupedGemmProblem(h, down, ends=r["ends"], combine=sums)
    spec = staged_spec(problem)
    choice = Choice("cpu", Recipe("none", None, lambda ops: lambda: None), spec, "")
    entry = launch_cache._MovingEntry(problem, stage(problem, spec, allocate(problem)).ops, choice, Launch(), "ends")
    assert events == ["dropped"] and entry.workspace < 1 << 20


def test_gradients_are_not_served_by_the_cache() -> None:
    r = routing()
    h, down, sums = new(PAIRS, INNER), new(GROUPS, INNER, HIDDEN), (r["place"], r["weights"])
    warm(h, down, ends=r["ends"], combine=sums)
    weights = r["weights"].clone().requires_grad_()
    assert warm(h, down, ends=r["ends"], combine=(r["place"], weights)).requires_grad


def test_indices_with_gaps_are_followed() -> None:
    r, served = routing(), LAUNCHES.served
    x, up, known = gathered(r)
    spread = torch.stack([r["rows"], r["rows"] + 1], 1)[:, 0]
    assert torch.equal(warm(x, up, ends=known["ends"], a_rows=spread), warm(x, up, **known))
    assert LAUNCHES.served == served + 1, "what has gaps is copied before each launch"
