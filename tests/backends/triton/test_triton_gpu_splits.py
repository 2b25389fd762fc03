"""Tiles that several programs share along K, on a GPU, where sizes on the device lie."""

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import Config

pytestmark = pytest.mark.gpu


def test_sizes_that_lie_with_tiles_shared_out_along_k() -> None:
    """More tiles than honest sizes can have find no place for their parts: they must not look for one."""
    ends = torch.arange(1, 131, dtype=torch.int32, device="cuda") * 3
    a = torch.randn(390, 512, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(130, 512, 24, device="cuda", dtype=torch.bfloat16)
    config = Config(block_m=16, block_n=32, block_k=64, warps=4, stages=3, programs=0, splits=4)
    plan = mg.plan(given := mg.GroupedGemmProblem(a, b, ends=ends), backend="triton", config=config)
    right = plan().clone()
    assert mg.verify(given, right)
    honest = ends.clone()
    ends.copy_(torch.arange(130, device="cuda") % 2 * 390)
    plan()
    ends.copy_(honest)
    assert torch.equal(plan(), right)
