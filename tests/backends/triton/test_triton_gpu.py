"""The Triton backend on a GPU: configs forced in turn, epilogues, tiles shared out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import BACKEND, Config
from multigemm.planning.staging import staged_spec
from tests.support.triton_gpu_cases import FORMS, SIZES, draw, problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("extents", [(136, 104), (135, 103)], ids=["aligned", "odd"])
@pytest.mark.parametrize("form", FORMS)
def test_configs_of_every_form(form: str, extents: tuple[int, int]) -> None:
    given = problem(form, *extents)
    spec = staged_spec(given)
    configs = BACKEND.configs(spec, given.device)
    assert configs
    turn = FORMS.index(form)  # the forms take turns through the configs, so that each runs and few compile
    for config in {configs[0], configs[turn % len(configs)], configs[-1]}:
        verdict = mg.verify(given, mg.solve(given, backend="triton", config=config))
        assert verdict, f"{config}: {verdict}"


def test_lists_of_many_tiles() -> None:
    sizes = [(1500, 1400, 40), (700, 33, 96), (3, 2000, 8)] * 2
    given = mg.GroupedGemmProblem([draw(m, k) for m, _, k in sizes], [draw(k, n) for _, n, k in sizes])
    for config in BACKEND.configs(staged_spec(given), given.device):
        small = replace(config, block_m=32, block_n=32, block_k=64, warps=4)  # 8668 tiles: more than the host lists
        for chosen in (config, small):
            assert mg.verify(given, mg.solve(given, backend="triton", config=chosen)), chosen


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_epilogues_of_every_config(activation: str | None) -> None:
    rows = sum(SIZES) + 14
    given = problem("jagged_m", alpha=-0.5, beta=2.0, c=draw(rows, 136), bias=draw(len(SIZES), 136),
                    activation=activation, out_dtype=torch.float32)  # fmt: skip
    for config in BACKEND.configs(staged_spec(given), given.device)[:2]:
        verdict = mg.verify(given, mg.solve(given, backend="triton", config=config))
        assert verdict, f"{config}: {verdict}"


@pytest.mark.parametrize("form", FORMS)
def test_tiles_shared_out_along_k(form: str) -> None:
    given = problem(form, 72, 1100, bias=None)
    config = Config(block_m=32, block_n=64, block_k=64, warps=4, stages=3, programs=0, splits=4)
    plan = mg.plan(given, backend="triton", config=config)
    results = [[out.clone() for out in made] if isinstance(made, list) else made.clone() for made in (plan(), plan())]
    assert mg.verify(given, results[0])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True)), "the same call gives the same bits"
