"""The pytest plugin: the fixture `grouped_gemm_problem`, a random problem for testing one's own kernel.

Pytest loads this module wherever multigemm is installed, so it imports nothing but pytest until a test asks for the
fixture. `multigemm.testing.own_kernels` describes the fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from multigemm.problem.problem import GroupedGemmProblem

MARKER = "grouped_gemm(count=20, form, dtype, device, work): which problems the fixture grouped_gemm_problem draws"
COUNT = 20
TAKES = ("count", "form", "dtype", "device", "work")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "grouped_gemm_problem" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("grouped_gemm")
        if marker and marker.args:
            raise pytest.UsageError(f"pytest.mark.grouped_gemm got {marker.args!r} without a name: write count=...")
        for word in marker.kwargs if marker else ():
            if word not in TAKES:
                raise pytest.UsageError(f"pytest.mark.grouped_gemm takes no {word}=: it takes {', '.join(TAKES)}")
        words: dict[str, Any] = {"count": COUNT, **(marker.kwargs if marker else {})}
        seeds = range(words.pop("count"))
        drawn = [{"seed": seed, **words} for seed in seeds]
        metafunc.parametrize("grouped_gemm_problem", drawn, indirect=True, ids=[f"seed{seed}" for seed in seeds])


@pytest.fixture
def grouped_gemm_problem(request: pytest.FixtureRequest) -> GroupedGemmProblem:
    """A random problem: uneven and odd extents, empty groups, operands in row-major order, offsets on the device."""
    from multigemm.testing.own_kernels import random_problem

    return random_problem(**request.param)
