"""A launch that follows another number of tokens is, byte for byte, the one that a bind for that number gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.cupy import choice as cupy_choice
from multigemm.backends.cupy import config as cupy_configs
from multigemm.backends.cupy.launch import KERNELS
from multigemm.backends.numba import launch as numba_launch
from multigemm.backends.numba.build import Image
from multigemm.backends.numba.choice import problem_with
from multigemm.backends.numba.config import FMA_TALL, HOPPER, HOPPER_NARROW, MMA
from multigemm.backends.triton import BACKEND as TRITON
from multigemm.backends.triton import build as triton_build
from multigemm.backends.triton import generic as triton_generic
from multigemm.backends.triton import hopper as triton_hopper
from multigemm.backends.triton import quantised as triton_quantised
from multigemm.backends.triton.hopper_choice import hopper_candidates
from multigemm.backends.triton.pointer_choice import pointer_candidates
from multigemm.backends.triton.quantised_choice import quantised_candidates
from multigemm.cuda import arguments, counters, tensor_map
from multigemm.cuda.arguments import Tokens
from multigemm.cuda.launch import BoundKernel
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate, stage, staged_spec
from multigemm.problem.spec import half_octave
from tests.support import cupy_world, triton_world
from tests.support.cuda_driver import addresses_of, steps_of

GPU = torch.device("cuda", 0)
MEMORY = torch.zeros(1 << 26, dtype=torch.uint8)
"""Operands of each number of tokens lie from one of these places on."""


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three backends, as far as the driver's door."""
    cupy_world.install(monkeypatch)
    counter = torch.zeros(1 << 14, dtype=torch.int32)
    monkeypatch.setattr(counters.Words, "_borrow", lambda self, index, size: counter)
    monkeypatch.setattr(arguments, "index_of", lambda device: 0)
    monkeypatch.setattr(arguments, "current_raw_stream", lambda index: 7)
    monkeypatch.setattr(numba_launch, "image", lambda *asked: Image("kernel", b"cubin"))
    monkeypatch.setattr(numba_launch, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(triton_build, "cubin", triton_world.uncompiled)
    for module in (numba_launch, triton_generic, triton_hopper, triton_quantised):
        monkeypatch.setattr(module, "processors", lambda index: 132)
    for kept in (numba_launch.kernel_of, triton_build.load, triton_build.capability_of):
        kept.cache_clear()


def cupy_binds(spec: Any) -> dict[Any, Callable[[Operands], Any]]:
    tried = (*cupy_choice.candidates(spec, GPU), cupy_configs.SMALL_32, cupy_configs.SHIFT_B, cupy_configs.GENERIC)
    valid = {config for config in tried if cupy_configs.is_valid(config, spec, (9, 0))}
    return {config: KERNELS[config.kernel].loaded(spec, config, 0).bind for config in sorted(valid, key=repr)}


def numba_binds(spec: Any) -> dict[Any, Callable[[Operands], Any]]:
    valid = (config for config in (HOPPER, HOPPER_NARROW, MMA, FMA_TALL) if not problem_with(config, spec, GPU))
    return {config: numba_launch.bind_for(config, spec, 0) for config in valid}


def triton_binds(spec: Any) -> dict[Any, Callable[[Operands], Any]]:
    tried = [*hopper_candidates(spec)[:3], *pointer_candidates(spec)[:3]]
    if spec.quantised:
        tried = quantised_candidates(spec)
    return {config: TRITON.plan(spec, config, GPU).bind for config in tried}


def rows_like(drawn: dict[str, Any], tokens: int, start: int) -> Tensor:
    """[tokens, k] of the drawn layout, at the drawn place of a line of the cache."""
    k, line, size = drawn["k"], drawn["k"] + drawn["pad"], drawn["dtype"].itemsize
    first = start - MEMORY.data_ptr() % 256 + drawn["shift"] * size
    if drawn["by_columns"]:
        line = -(-2 * drawn["tokens"][0] // 8) * 8
        return MEMORY[first : first + k * line * size].view(drawn["dtype"]).as_strided((tokens, k), (1, line))
    return MEMORY[first : first + tokens * line * size].view(drawn["dtype"]).as_strided((tokens, k), (line, 1))


def draw_problem(draw: random.Random) -> dict[str, Any]:
    tokens = draw.choice((2, 3, 40, 130, 700))
    others = [t for t in range(2, 2 * tokens) if half_octave(t) == half_octave(tokens)]
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.int8))
    return {
        "dtype": dtype, "tokens": [tokens, *(draw.choice(others) for _ in range(4))],
        "groups": draw.choice((1, 3, 300)), "k": draw.choice((1, 16, 63, 64, 128)),
        "n": draw.choice((1, 8, 72, 130, 256)), "pad": draw.choice((0, 0, 1, 8)),
        "shift": draw.choice((0, 0, 0, 1)), "by_columns": draw.random() < 0.15, "weights": draw.choice(("row", "col")),
        "bias": draw.random() < 0.3, "live": draw.choice(("ends", "offsets", "sizes")),
        "m": draw.choice((1, 16, 63, 64, 128, 130)), "rows_of_a": draw.random() < 0.25,
    }  # fmt: skip


def posed(drawn: dict[str, Any], which: int) -> Operands:
    """The operands of one of the numbers of tokens."""
    groups, k, n, dtype, tokens = drawn["groups"], drawn["k"], drawn["n"], drawn["dtype"], drawn["tokens"][which]
    start = (which + 1) << 22
    weights = torch.zeros(groups, k, n, dtype=dtype)
    if drawn["weights"] == "col":
        weights = torch.zeros(groups, n, k, dtype=dtype).mT
    cut = torch.zeros(groups + (drawn["live"] == "offsets"), dtype=torch.int32)
    bias = torch.zeros(groups, n, dtype=torch.int32 if dtype is torch.int8 else dtype) if drawn["bias"] else None
    given: dict[str, Any] = {drawn["live"]: cut}
    problem = mg.GroupedGemmProblem(rows_like(drawn, tokens, start), weights, bias=bias, **given)
    spec = replace(staged_spec(problem), device_sizes=True)
    return replace(stage(problem, spec, allocate(problem), sums_sizes=True).ops, device=torch.device("cpu"))


def posed_inner(drawn: dict[str, Any], which: int) -> Operands:
    """The operands of one of the numbers of tokens, which are added up."""
    m, n, dtype, tokens = drawn["m"], drawn["n"], drawn["dtype"], drawn["tokens"][which]
    start = ((which + 1) << 22) - MEMORY.data_ptr() % 256
    places = (start + drawn["shift"] * dtype.itemsize, start + (1 << 21))
    a_memory, b_memory = (MEMORY[place : place + (1 << 21)].view(dtype) for place in places)
    line = -(-2 * drawn["tokens"][0] // 8) * 8
    a = a_memory.as_strided((m, tokens), (line, 1) if drawn["rows_of_a"] else (1, m + drawn["pad"]))
    b = b_memory.as_strided((tokens, n), (n + drawn["pad"], 1))
    cut = torch.zeros(drawn["groups"] + (drawn["live"] == "offsets"), dtype=torch.int32)
    given: dict[str, Any] = {drawn["live"]: cut}
    problem = mg.GroupedGemmProblem(a, b, jagged="k", **given)
    spec = replace(staged_spec(problem), device_sizes=True)
    return replace(stage(problem, spec, allocate(problem), sums_sizes=True).ops, device=torch.device("cpu"))


def masked(words: Any, steps: list[BoundKernel]) -> list[int]:
    """The words of a block, without where in workspaces of the launch's own they point."""
    kept = [x for step in steps for x in step._keep if isinstance(x, Tensor)]
    kept += [x for step in steps if step._fields is not None for x in step._fields._copies.values()]
    own = [(x.data_ptr(), x.data_ptr() + max(x.nbytes, 1)) for x in kept]
    found = np.frombuffer(words, np.uint64).tolist()
    return [-1 if any(start <= word < end for start, end in own) else word for word in found]


def described(launch: Any) -> list[Any]:
    """Everything that the kernels of a launch are started with."""
    told, steps = [], steps_of(launch)
    for step in steps:
        fields = [] if step._fields is None else masked(step._fields._content._words, steps)
        record = step._records._record
        shape = step._kernel.name, tuple(record.grid), tuple(record.block), record.shared
        told.append((*shape, masked(step._block._words, steps), fields))
    return told


def workspaces(launch: Any) -> list[int]:
    """Bytes of each piece of memory that the kernels of a launch keep."""
    return [x.nbytes for step in steps_of(launch) for x in step._keep if isinstance(x, Tensor)]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("binds", [cupy_binds, numba_binds, triton_binds])
@pytest.mark.parametrize("pose", [posed, posed_inner], ids=["rows", "inner"])
def test_a_resized_launch_is_the_one_bound_for_that_number(pose: Any, binds: Any, seed: int, worlds: None) -> None:
    draw, inner = random.Random(seed), pose is posed_inner
    drawn = draw_problem(draw)
    ops = [pose(drawn, which) for which in range(5)]
    if len({(x.spec, half_octave(x.a.shape[inner])) for x in ops}) > 1:
        pytest.skip("these numbers of tokens are no class")
    for config, bind in binds(ops[0].spec).items():
        launch, now = bind(ops[0]), drawn["tokens"][0]
        for other in ops[1:]:
            tokens = other.a.shape[inner]
            if not launch.can_resize(now, tokens):
                continue
            launch.resize(now, tokens, not inner)
            launch.move(addresses_of(other))
            fresh = bind(other)
            assert described(launch) == described(fresh), (config, now, tokens)
            assert all(own >= needed for own, needed in zip(workspaces(launch), workspaces(fresh), strict=True)), config
            now = tokens


def posed_with_scales(covers: str, tokens: int, groups: int) -> Operands:
    """float8 operands with scales of a that cover so much, and of b for 128 x 128."""
    a = torch.zeros(tokens, 304, dtype=torch.uint8).view(torch.float8_e4m3fn)
    b = torch.zeros(groups, 72, 304, dtype=torch.uint8).view(torch.float8_e4m3fn).mT
    shape = {"a group": (groups,), "a row": (tokens, 1), "1x128": (tokens, 3), "one line": (1, 3)}[covers]
    cut = torch.zeros(groups, dtype=torch.int32)
    problem = mg.GroupedGemmProblem(a, b, ends=cut, scale_a=torch.zeros(shape), scale_b=torch.zeros(groups, 3, 1))
    spec = replace(staged_spec(problem), device_sizes=True)
    return replace(stage(problem, spec, allocate(problem), sums_sizes=True).ops, device=torch.device("cpu"))


@pytest.mark.parametrize("groups", [3, 300])
@pytest.mark.parametrize("covers", ["a group", "a row", "1x128", "one line"])
@pytest.mark.parametrize("binds", [cupy_binds, triton_binds])
def test_launches_of_quantised_operands_follow_token_counts(binds: Any, covers: str, groups: int, worlds: None) -> None:
    given = [posed_with_scales(covers, tokens, groups) for tokens in (700, 512, 724)]
    for config, bind in binds(given[0].spec).items():
        launch, now = bind(given[0]), 700
        for other in given[1:]:
            tokens = other.a.shape[0]  # type: ignore[union-attr]
            assert launch.can_resize(now, tokens), config
            launch.resize(now, tokens, True)
            launch.move(addresses_of(other))
            assert described(launch) == described(bind(other)), (config, now, tokens)
            now = tokens


@pytest.mark.parametrize("pose", [posed, posed_inner], ids=["rows", "inner"])
def test_the_usual_kernels_of_all_backends_can_be_resized(pose: Any, worlds: None) -> None:
    drawn = {"dtype": torch.bfloat16, "tokens": [700, 710, 720, 730, 740], "groups": 64, "k": 128, "n": 256, "pad": 0,
             "shift": 0, "by_columns": False, "weights": "row", "bias": True, "live": "offsets", "m": 256,
             "rows_of_a": False}  # fmt: skip
    ops = pose(drawn, 0)
    able = {bind(ops).can_resize(700, 710) for binds in (cupy_binds, numba_binds) for bind in binds(ops.spec).values()}
    assert able == {True}
    assert all(bind(ops).can_resize(700, 710) for config, bind in triton_binds(ops.spec).items() if config.splits == 1)


def test_maps_whose_boxes_do_not_change_alike_are_not_resized(worlds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = tuple((64, 8 * (i + 1), 1) for i in range(16))
    made = tensor_map.encode_together(torch.bfloat16, 1 << 40, (512, Tokens(100), 3), (1024, 102400), boxes)
    [(_, counted)] = made.counted
    assert counted.alike(100, 101) and counted.repeats == 16
    original = tensor_map.CountedMaps._encoded

    def mixed(self: Any, count: int, asked: Any) -> Any:
        raw = np.frombuffer(bytes(original(self, count, asked)), np.uint64).reshape(-1, 16).copy()
        raw[:, 5] = raw[:, 3] * (1 + np.arange(len(raw), dtype=np.uint64))
        return memoryview(raw.tobytes())

    monkeypatch.setattr(tensor_map.CountedMaps, "_encoded", mixed)
    assert not counted.alike(100, 102)
