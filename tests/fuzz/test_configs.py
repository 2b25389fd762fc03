"""Which configs a campaign runs: all that a backend ships, also those that it would keep for larger problems."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigemm.backend import Recipe
from multigemm.backends import registry
from multigemm.errors import InvalidSetting
from multigemm.fuzz import worker as workers
from multigemm.fuzz.plan import GATE_FROM, Batch, Options, Summary, Tally
from multigemm.fuzz.report import failed, idle, to_dict, to_text
from multigemm.fuzz.worker import Position, Worker, with_required
from multigemm.problem.spec import ProblemSpec
from multigemm.testing import Case, Limits, Subject, check_case
from multigemm.testing.corpus import snippet
from multigemm.testing.oracles import Finding, Outcome
from multigemm.testing.placed_case import spec_of
from multigemm.testing.strategies import kinds
from multigemm.testing.subject import _added, assigned, kind_of, offered
from tests.model_mutants.faults import planted
from tests.model_mutants.kernel import Kernel, ModelBackend, Tile

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LARGE, SMALL = Tile(32, 32, 16), Tile(8, 8, 8)

SMALL_WORK = Limits(work=3000)


class Choosy(ModelBackend):
    """Large tiles for large problems only, and another one that only bfloat16 has."""

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        more = [Tile(16, 8, 8)] if spec.compute == torch.bfloat16 else []
        return [*([LARGE] if spec.total > 2000 else []), SMALL, *more]

    def plan(self, spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        if config == Tile(16, 8, 8) and spec.compute != torch.bfloat16:
            raise InvalidSetting(f"{config} is for bfloat16")
        return super().plan(spec, config, device)


def test_small_problems_know_the_configs_of_large_ones() -> None:
    subject = Subject(Choosy("choosy"))
    spec = spec_of(Case(form="jagged_m", n=4, k=4, lengths=(3, 2)))
    assert list(subject.configs(spec, CPU)) == [SMALL]
    assert subject.shipped(spec, CPU) == [SMALL, LARGE]
    assert subject.shipped(spec_of(Case(form="jagged_m", n=4, k=4, lengths=())), CPU) == [SMALL]


def test_sizes_are_no_part_of_a_kind() -> None:
    one, two, empty = (spec_of(Case(n=n, k=7, lengths=(5, 6))) for n in (4, 12, 0))
    assert kind_of(one) == kind_of(two) != kind_of(empty)


def test_every_config_is_assigned_and_evenly() -> None:
    found = assigned(kinds(Limits(work=4000), 16), Subject(Choosy("choosy")), CPU, 1)
    used = Counter(config for configs in found for config in configs)
    assert set(used) == {LARGE, SMALL, Tile(16, 8, 8)}
    assert max(used.values()) - min(used.values()) <= 8


def test_a_pinned_config_runs_where_it_is_valid_and_another_elsewhere() -> None:
    subject = Subject(Choosy("choosy"))
    subject.pin(Tile(16, 8, 8))
    narrow = spec_of(Case(dtype="bfloat16", n=4, k=4, lengths=(3,)))
    assert subject.recipe(narrow, CPU).config == Tile(16, 8, 8)
    assert subject.recipe(spec_of(Case(dtype="float32", n=4, k=4, lengths=(3,))), CPU).config == SMALL


def test_a_config_is_found_again_by_its_text() -> None:
    case = Case(form="jagged_m", n=4, k=4, lengths=(3, 2))
    faulty = Choosy("choosy", planted("no N mask on the store"))
    outcome = check_case(case, faulty, config=str(LARGE))
    assert outcome.config == LARGE and not outcome.ok
    assert f"config={str(LARGE)!r}" in snippet(case, "choosy", "cpu", str(LARGE))
    found = check_case(case, faulty, config="Tile(bm=1)").findings
    assert any(InvalidSetting.__name__ in str(finding) for finding in found)


def told_by(total: Tally) -> Any:
    """A worker's end of a pipe whose other end adds up."""
    return SimpleNamespace(send=total.add)


def test_a_campaign_counts_every_config_and_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "get", lambda name: Choosy(name))
    options = Options(("choosy",), kinds=4, burst=1, turns=2, configs="pinned", limits=SMALL_WORK, examples=12, deep=50)
    total = Tally()
    worker = Worker(options, told_by(total), Position())
    worker.announce()
    worker.run(Batch(0, 12), 1e18)
    assert not total.failures
    assert sum(total.configs.values()) == total.checks["choosy"] == 12
    assert {text for name, text in total.configs} >= {str(LARGE), str(SMALL)}
    assert [options.config_of(number) for number in (0, 4, 8)] == [0, 1, 0]
    assert all(total.configs["choosy", text] for text in total.assigned.values())


@pytest.mark.parametrize("oracle", ["edge of memory", "lying sizes", "other contents", "relation: split", "value"])
@pytest.mark.parametrize("faulty", [False, True], ids=["right when it runs again", "wrong again"])
def test_only_what_a_plain_run_repeats_is_made_smaller(
    oracle: str, faulty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only a costlier oracle saw was searched for in vain, and called small when the time was over."""
    searched: list[Case] = []

    def noted(case: Case, *_: object) -> Case:
        searched.append(case)
        return case

    monkeypatch.setattr(workers, "shrink", noted)
    worker = Worker(Options(("model",)), told_by(Tally()), Position())
    kernel = planted("no M mask on the store") if faulty else Kernel
    worker.subjects["model", 0] = Subject(ModelBackend("model", kernel))
    case = Case(n=5, k=4, lengths=(3, 2), head=1)
    worker.report(case, "model", 0, 7, Outcome("model", findings=[Finding(oracle, "text")]), "")
    [failure] = worker.tally.failures
    assert (searched, failure.shrunk) == (([case], case.to_dict()) if faulty else ([], None))


class Rare(ModelBackend):
    """More configs than turns, for problems that few kinds are like."""

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        rare = spec.form == "masked" and spec.compute == torch.float64
        return [SMALL, *(Tile(rows, 8, 8) for rows in (1, 2, 3, 4, 5) if rare)]


def test_kinds_are_added_for_configs_that_no_kind_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "get", lambda name: Rare(name))
    narrow = Options(("rare",), kinds=4, burst=1, turns=2, configs="pinned", limits=SMALL_WORK, deep=1000)
    options = with_required(narrow)
    assert options.kinds == 4 + len(options.carriers) and len(options.carriers) > 1
    total = Tally()
    worker = Worker(options, told_by(total), Position())
    worker.announce()
    worker.run(Batch(0, options.slots), 1e18)
    counts = {text: count for (_, text), count in total.configs.items()}
    assert counts.keys() >= {str(Tile(rows, 8, 8)) for rows in (1, 2, 3, 4, 5)} and all(counts.values())
    assert to_dict(Summary(options, total, 1.0))["shipped_configs"]["rare"]["least"] > 0
    assert with_required(replace(narrow, configs="first")).carriers == ()


def test_a_kind_is_repeated_for_what_all_that_offer_it_have_no_turn_for() -> None:
    one, two = [["a", "b", "common"], ["c", "common"], []], [["x"], [], ["y"]]
    assert _added([one, two], 3, turns=1) == [0, 0]
    assert _added([one, two], 3, turns=3) == []
    assert _added([[*one, ["new", "a"]], [*two, []]], 3, turns=3) == [3], "what no kind offers"


class Uneven(ModelBackend):
    """For each class of problems another few of many configs."""

    salt = 0

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        draw = random.Random(f"{spec.form} {spec.compute} {spec.c is None} {spec.activation} {self.salt}")
        return [SMALL, *(Tile(rows, 8, 8) for rows in sorted(draw.sample(range(1, 33), draw.choice((1, 2, 3, 9)))))]


@pytest.mark.parametrize("salt", [1, 2])
def test_every_config_that_is_offered_is_assigned(salt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that many kinds offer, all of which have rarer ones to run."""
    monkeypatch.setattr(Uneven, "salt", salt)
    monkeypatch.setattr(registry, "get", lambda name: Uneven(name))
    options = with_required(Options(("uneven",), kinds=12, turns=2, configs="pinned", limits=SMALL_WORK))
    every, subject = workers._kinds(options), Subject("uneven")
    shipped = {config for configs in offered(every, subject, CPU) for config in configs}
    assert shipped == {config for configs in assigned(every, subject, CPU, 2) for config in configs}
    assert len(shipped) > 20


def test_a_config_that_never_ran_fails_the_campaign() -> None:
    tally = Tally(problems=GATE_FROM)
    tally.configs.update({("choosy", "LARGE"): 0, ("choosy", "SMALL"): 7})
    summary = Summary(Options(("choosy",), limits=Limits(forms=("masked",))), tally, 1.0)
    assert idle(summary) == ["choosy LARGE"] and failed(summary)
    assert "NEVER RUN: choosy LARGE" in to_text(summary)
    tally.problems = 10
    assert not idle(summary)
