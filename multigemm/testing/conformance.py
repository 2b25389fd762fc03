"""The conformance suite: one set of tests for every backend, built-in or not.

    python -m multigemm.testing.conformance --backend NAME
    python -m pytest -p multigemm.testing.conformance --pyargs multigemm.testing.conformance --backend NAME

A backend that passes gives right answers, or refuses with a reason, on every form, dtype, layout and
epilogue that is drawn here; writes nothing but its result; sees sizes that change; stays inside its
operands when sizes lie; and gives the same bits twice.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.backend import Backend, Recipe
from multigemm.backends import registry
from multigemm.errors import UnknownBackend
from multigemm.planning.staging import staged_spec
from multigemm.problem.spec import ACTIVATIONS, FORMS, Form
from multigemm.testing import corpus
from multigemm.testing.case import Case
from multigemm.testing.deep_oracles import GPU_ORACLES, ORACLES, THREAD_ORACLES
from multigemm.testing.oracles import Outcome, check
from multigemm.testing.placed_case import DeviceCase, PlacedCase
from multigemm.testing.strategies import DTYPES, EMULATED, Limits, random_case
from multigemm.testing.subject import Subject

SIZES: dict[Form, dict[str, Any]] = {
    "per_group": {"dims": ((5, 7, 9), (0, 3, 2), (17, 1, 33), (2, 19, 0))},
    "jagged_m": {"n": 19, "k": 21, "lengths": (7, 0, 18, 1), "head": 2, "tail": 3},
    "jagged_n": {"m": 19, "k": 21, "lengths": (7, 0, 18, 1), "head": 2, "tail": 3},
    "jagged_k": {"m": 19, "n": 11, "lengths": (7, 0, 18, 1), "head": 2, "tail": 3},
    "batched": {"m": 9, "n": 10, "k": 17, "lengths": (0, 0, 0)},
    "masked": {"m": 18, "n": 10, "k": 17, "lengths": (5, 0, 18)},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The suite's options, as it is a plugin of its own."""
    group = parser.getgroup("multigemm", "conformance of a multigemm backend")
    group.addoption("--backend", action="store", default="cpu", help="the backend to examine")
    group.addoption("--device", action="store", default="", help="cuda or cpu; default: cuda where there is one")
    group.addoption(
        "--cases", action="store", type=int, default=40, help="generated problems per form and dtype family"
    )
    group.addoption("--all-configs", action="store_true", help="every config of the backend in turn")


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The backend under examination; the suite is skipped where it cannot run."""
    name = request.config.getoption("--backend")
    backend = registry.get(name)
    state = backend.availability()
    if not state.ok:
        pytest.skip(f"backend {name!r} is not available: {state.reason}")
    return Subject(backend)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest, subject: Subject) -> torch.device:
    asked = request.config.getoption("--device")
    if asked:
        return torch.device(asked)
    on_gpu = torch.cuda.is_available() and not subject.backend.availability().emulated
    if on_gpu and not subject.refusals(
        staged_spec(PlacedCase.build(case_of("jagged_m", "float32")).problem), torch.device("cuda")
    ):
        return torch.device("cuda")
    return torch.device("cpu")


@pytest.fixture(scope="session")
def limits(subject: Subject) -> Limits:
    return EMULATED if subject.backend.availability().emulated else Limits(work=1 << 16, groups=260)


def case_of(form: Form, dtype: str, **more: Any) -> Case:
    """A small fixed problem of a form: uneven sizes, an empty group, rows that no group owns."""
    if form != "per_group" and dtype == "int8":
        more.setdefault("mode", "int")
    return Case(form=form, dtype=dtype, **{**SIZES[form], **more})


def examine(case: Case, subject: Subject, device: torch.device) -> tuple[DeviceCase, Outcome]:
    """Runs a case, and fails the test on any finding."""
    device_case = DeviceCase.from_case(case, device)
    outcome = check(device_case, subject)
    assert not outcome.findings, f"{case!r}\n" + "\n".join(map(str, outcome.findings))
    return device_case, outcome


def _wants_run(examined: tuple[DeviceCase, Outcome]) -> tuple[DeviceCase, Outcome]:
    if not examined[1].ran:
        pytest.skip("refused: " + "; ".join(examined[1].refusals))
    return examined


def test_it_has_the_five_members(subject: Subject) -> None:
    backend = subject.backend
    assert isinstance(backend, Backend)
    assert isinstance(backend.name, str)
    assert backend.name
    state = backend.availability()
    assert state.ok or state.reason


def test_plan_makes_recipes_of_hashable_configs(subject: Subject, device: torch.device) -> None:
    ran = 0
    for form in FORMS:
        spec = staged_spec(DeviceCase.from_case(case_of(form, "float32"), device).problem)
        if subject.refusals(spec, device):
            continue
        configs = subject.configs(spec, device)
        assert len({hash(config) for config in configs}) <= len(configs)
        recipe = subject.recipe(spec, device)
        assert isinstance(recipe, Recipe)
        assert recipe.kernel
        ran += 1
    assert ran, "the backend refuses every form in float32"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_and_dtype(form: Form, dtype: str, subject: Subject, device: torch.device) -> None:
    for mode in ("int", "normal", "onehot") if dtype != "int8" else ("int",):
        for given in (False, True):
            _wants_run(examine(case_of(form, dtype, mode=mode, given=given, seed=3), subject, device))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("form", FORMS)
def test_epilogues(form: Form, activation: str | None, subject: Subject, device: torch.device) -> None:
    extra = {"alpha": 0.5, "beta": -1.5, "c_dtype": "float32", "bias": "n", "bias_dtype": "float32"}
    _wants_run(examine(case_of(form, "float32", mode="normal", activation=activation, **extra), subject, device))


@pytest.mark.parametrize("form", FORMS)
def test_c_may_be_the_output(form: Form, subject: Subject, device: torch.device) -> None:
    case = case_of(form, "float32", beta=1.0, c_dtype="float32", given=True, alias=True)
    _wants_run(examine(case, subject, device))


@pytest.mark.parametrize("form", FORMS)
def test_alpha_zero_reads_neither_operand(form: Form, subject: Subject, device: torch.device) -> None:
    _wants_run(examine(case_of(form, "float32", alpha=0.0, mode="special", seed=5), subject, device))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0), (1,), (1,) * 33, (0,) * 16 + (40,)])
@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k"])
def test_few_many_and_empty_groups(
    form: Form, lengths: tuple[int, ...], subject: Subject, device: torch.device
) -> None:
    examine(case_of(form, "float32", lengths=lengths), subject, device)


@pytest.mark.parametrize("empty", ["m", "n", "k"])
@pytest.mark.parametrize("form", ["batched", "jagged_m", "jagged_n", "jagged_k"])
def test_extents_of_zero(form: Form, empty: str, subject: Subject, device: torch.device) -> None:
    if empty != form[-1] or form == "batched":
        examine(case_of(form, "float32", **{empty: 0}), subject, device)


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("kind", ["offsets", "sizes", "ends"])
@pytest.mark.parametrize("where", ["device", "host", "list"])
def test_ways_to_say_sizes(index: str, kind: str, where: str, subject: Subject, device: torch.device) -> None:
    head = 2 if kind == "offsets" else 0
    examine(case_of("jagged_m", "float32", index=index, kind=kind, where=where, head=head), subject, device)


@pytest.mark.parametrize("oracle", [*ORACLES, *GPU_ORACLES, *THREAD_ORACLES])
@pytest.mark.parametrize("form", FORMS)
def test_other_circumstances(form: Form, oracle: str, subject: Subject, device: torch.device) -> None:
    """Contents and sizes that change or lie, operands at the edge of memory, related problems, streams, threads."""
    if oracle in THREAD_ORACLES and subject.backend.availability().emulated:
        pytest.skip("emulators serve one thread")
    if oracle in GPU_ORACLES and device.type != "cuda":
        pytest.skip("streams and graphs need a CUDA device")
    judge = {**ORACLES, **GPU_ORACLES, **THREAD_ORACLES}[oracle]
    for mode in ("int", "normal") if oracle == "relations" else ("int",):
        device_case, outcome = _wants_run(examine(case_of(form, "float32", mode=mode), subject, device))
        for seed in range(4 if oracle.endswith("sizes") else 1):
            judge(device_case, subject, outcome, seed)
        assert not outcome.findings, "\n".join(map(str, outcome.findings))


@pytest.mark.parametrize("family", ["float32,float64", "bfloat16,float16", "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_generated_problems(
    form: Form, family: str, subject: Subject, device: torch.device, limits: Limits, request: pytest.FixtureRequest
) -> None:
    """Random structure; each failure prints a case that repeats it."""
    narrowed = replace(limits, forms=(form,), dtypes=tuple(family.split(",")))
    count = request.config.getoption("--cases") if not subject.backend.availability().emulated else 8
    everything = request.config.getoption("--all-configs")
    for seed in range(count):
        case = random_case(seed, narrowed)
        device_case, outcome = examine(case, subject, device)
        if not everything or not outcome.ran:
            continue
        for position in range(1, len(subject.configs(staged_spec(device_case.problem), device))):
            examine(case, Subject(subject.backend, position), device)


@pytest.mark.parametrize("form", FORMS)
def test_quantised_operands(form: Form, subject: Subject, device: torch.device, limits: Limits) -> None:
    """Random formats and scales. A backend without quantised operands must refuse them."""
    narrowed = replace(limits, forms=(form,), quantised=1)
    for seed in range(8 if subject.backend.availability().emulated else 25):
        examine(random_case(seed, narrowed), subject, device)


def test_fused_problems(subject: Subject, device: torch.device, limits: Limits, request: pytest.FixtureRequest) -> None:
    """Picked rows, gates, weights and sums of rows. Refused problems are skipped."""
    narrowed = replace(limits, work=min(limits.work, 1 << 13), longest=40, groups=40, fused=1)
    for seed in range(8 if subject.backend.availability().emulated else request.config.getoption("--cases")):
        examine(random_case(seed, narrowed), subject, device)


def test_stored_failures(subject: Subject, device: torch.device) -> None:
    """The stored faults of this library and of peers."""
    folder = Path(__file__).resolve().parents[2] / "tests" / "corpus"
    for entry in corpus.entries(folder) if folder.is_dir() else ():
        examine(entry.case, subject, device)


def main(arguments: list[str]) -> int:
    """Runs the suite with pytest in this process. An unknown backend is one error, not one per test."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--backend", default="cpu")
    try:
        registry.get(parser.parse_known_args(arguments)[0].backend)
    except UnknownBackend as error:
        print(error, file=sys.stderr)
        return 2
    words = ["-p", "multigemm.testing.conformance", "-q", "-p", "no:cacheprovider"]
    return int(pytest.main([__file__, *words, *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
