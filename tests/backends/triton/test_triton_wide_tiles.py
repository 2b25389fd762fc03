"""Which tiles the pointer kernel takes for products of 32 and 64 bits. No GPU, no Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multigemm.backends.triton.choice import candidates, pointer_candidates
from multigemm.backends.triton.config import Config
from multigemm.backends.triton.shipped import specs
from multigemm.problem.spec import Order, ProblemSpec, bucket

SPECS = dict(specs())


def rows(name: str, groups: int, total: int, n: int, k: int, order: Order = "row") -> ProblemSpec:
    spec = SPECS[f"jagged_m {name}"]
    return replace(spec, groups=groups, total=bucket(total), n=n, k=k, b=replace(spec.b, order=order))


def tile(config: Config) -> tuple[int, int]:
    return config.block_m, config.block_n


@pytest.mark.parametrize("order", ["row", "col"])
def test_few_tiles_of_tf32_are_small(order: Order) -> None:
    """Measured, nn: 31 us by 32x32 and 127 by 128x128; 28 by 32x64 and 87; nt: 31 by 64x64 and 47; 26 and 36."""
    low = {"row": [(32, 32), (32, 64)], "col": [(64, 64), (64, 64)]}[order]
    shapes = (rows("tf32", 8, 1704, 192, 2240, order), rows("tf32", 16, 1168, 256, 1408, order))
    assert [tile(candidates(spec, (9, 0))[0]) for spec in shapes] == low


def test_many_tiles_of_tf32_are_large_and_on_the_ring() -> None:
    many = rows("tf32", 8, 2**16, 4096, 2048, "col")
    assert tile(pointer_candidates(many)[0]) == (128, 128)
    assert candidates(many, (9, 0))[0].kernel == "hopper"


def test_single_elements_keep_large_tiles_of_tf32() -> None:
    spec = rows("tf32", 8, 1704, 192, 2240)
    for changed in (
        replace(spec, a=replace(spec.a, align=4)),
        replace(spec, form="jagged_n", n=None, m=192),
        replace(spec, form="jagged_k", k=None, m=192),
    ):
        assert tile(pointer_candidates(changed)[0]) == (128, 128)


@pytest.mark.parametrize(
    ("shape", "best"),
    [
        ((32, 320, 1088, 3456), (16, 64)),
        ((48, 3408, 768, 1024), (32, 128)),
        ((256, 110848, 272, 200), (64, 64)),
        ((8, 2944, 5056, 128), (64, 64)),
        ((1, 4, 1536, 896), (32, 32)),
    ],
)
def test_tiles_of_float64_follow_rows_per_group(shape: tuple[int, int, int, int], best: tuple[int, int]) -> None:
    """Measured, nt: 353 us by 16x64 and 606 by 64x64 of 8 warps; 169 by 32x128 and 320; 389 by 64x64 and 576."""
    for order in ("row", "col"):
        found = candidates(rows("torch.float64", *shape, order), (9, 0))
        assert tile(found[0]) == best
        assert all(config.warps <= 4 for config in found)


def test_what_takes_registers_in_float64_gets_more_warps() -> None:
    """C and gelu spilled 350 bytes with four."""
    spec = rows("torch.float64", 256, 110848, 272, 200)
    assert pointer_candidates(spec)[0].warps == 4
    for changed in (
        replace(spec, c=spec.out),
        replace(spec, activation="gelu"),
        replace(spec, b=replace(spec.b, order="strided")),
        replace(spec, a=replace(spec.a, align=8)),
        replace(spec, form="jagged_n", n=None, m=272),
    ):
        assert all(config.warps >= 4 for config in pointer_candidates(changed))
        assert pointer_candidates(changed)[0].warps == 8
    assert pointer_candidates(replace(spec, activation="relu"))[0].warps == 4


def test_tiles_of_float64_share_a_long_k() -> None:
    best = pointer_candidates(rows("torch.float64", 3, 4, 512, 5120))[0]
    assert (tile(best), best.splits) == ((16, 64), 4)


@pytest.mark.parametrize(
    ("shape", "best", "splits"),
    [
        ((1, 3, 192, 1920), (16, 32), 8),
        ((12, 12, 64, 1024), (16, 32), 4),
        ((8, 144, 5312, 6144), (64, 64), 1),
        ((8, 224, 2624, 6976), (64, 64), 1),
        ((32, 864, 960, 576), (64, 64), 1),
        ((64, 384, 384, 3136), (16, 32), 1),
        ((12, 500, 192, 4224), (64, 64), 4),
        ((8, 8192, 1024, 1024), (64, 64), 1),
    ],
)
def test_float32_of_few_rows_and_weights_along_k(
    shape: tuple[int, int, int, int], best: tuple[int, int], splits: int
) -> None:
    """Measured: 196 us by 64x64, 16 by 16x32 shared by 8; 108 and 16; 772 and 779."""
    found = candidates(rows("torch.float32", *shape, "col"), (9, 0))[0]
    assert (tile(found), found.splits) == (best, splits)


def test_float32_across_keeps_its_tiles() -> None:
    for shape in ((1, 3, 192, 1920), (64, 384, 384, 3136)):
        found = candidates(rows("torch.float32", *shape), (9, 0))
        assert [tile(config) for config in found] == [(64, 64), (32, 32)]
