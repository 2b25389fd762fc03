"""What the triton backend hands to the driver: arguments that follow the operands, calls with a context."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.triton import BACKEND, Config, generic, hopper
from multigemm.backends.triton import build as compiled
from multigemm.backends.triton.config import problem_with
from multigemm.backends.triton.hopper import canonical, canonical_shape, map_of_a, map_of_b
from multigemm.backends.triton.hopper_choice import hopper_candidates
from multigemm.backends.triton.pointer_choice import pointer_candidates
from multigemm.backends.triton.quantised_choice import quantised_candidates
from multigemm.cuda import driver, launch
from multigemm.cuda.arguments import OPERANDS
from multigemm.errors import InvalidSetting
from multigemm.planning.binding import Bound, Choice, bind
from multigemm.planning.launch_cache import _entry_of
from multigemm.planning.operands import Operands, packed
from multigemm.planning.staging import stage, staged_spec
from tests.support.cuda_driver import FakeDriver
from tests.support.triton_world import GPU, block_of, kernels_of, world

__all__ = ["world"]
BF16 = torch.bfloat16
TWO_WIDTHS = Config("hopper", block_m=256, block_n=128, stages=4, warps=4, wide_tails=True)
GENERIC, RING = Config(block_m=32, block_n=32, block_k=64, warps=4), Config("hopper", block_n=128, stages=4, warps=4)
MEMORY = torch.from_numpy(np.zeros(1 << 27, np.uint8))
"""Where all operands lie; pages that no test writes are none."""
DISTANCE = 1 << 25
"""Bytes from one set of operands to the next."""


class Memory:
    """Operands one behind the other, each from a multiple of 256 bytes on, `shift` elements behind it."""

    def __init__(self, start: int) -> None:
        self._at = start - MEMORY.data_ptr() % 256 + 256

    def __call__(self, *shape: int, dtype: torch.dtype = BF16, shift: int = 0) -> Tensor:
        line = shape[-1] + shift
        count = torch.Size((*shape[:-1], line)).numel()
        first = self._at + shift * dtype.itemsize
        self._at += -(-(count + shift) * dtype.itemsize // 256) * 256 + 256 * 3
        made = MEMORY[first : first + count * dtype.itemsize].view(dtype).view(*shape[:-1], line)
        return made[..., : shape[-1]]


def problem(form: str, start: int, *, dtype: torch.dtype = BF16, groups: int = 6, m: int = 256, n: int = 256,
            k: int = 512, shift: int = 0, bias: bool = False, c: bool = False, kind: str = "ends",
            covers: int | None = None, **options: Any) -> mg.GroupedGemmProblem:  # fmt: skip
    """A problem whose operands lie from `start` on; sizes are all on the device, given as `kind`. `covers`: float8 with
    scales for so much of K in a line, or (0) for all of it."""
    new = Memory(start)
    operand: dict[str, Any] = {"dtype": dtype if covers is None else torch.float8_e4m3fn, "shift": shift}
    if form == "jagged_k":
        a, b, out = new(k, m, **operand).T, new(k, n, **operand), new(groups, m, n, dtype=dtype)
    elif form == "jagged_n":
        a, b, out = new(groups, m, k, **operand), new(n, k, **operand).T, new(n, m, dtype=dtype).T
    else:
        rows = (m,) if form == "jagged_m" else (groups, m)
        a, b, out = new(*rows, k, **operand), new(groups, k, n, **operand), new(*rows, n, dtype=dtype)
    sizes = new(groups, dtype=torch.int32)
    options |= {"batched": {}, "masked": {"valid_rows": sizes}}.get(form, {kind: sizes, "jagged": form[-1]})
    if covers is not None:
        blocks = 1 if not covers else k // covers + groups * (form == "jagged_k")
        stack_a, stack_b = ((groups,) * (x.dim() - 2) for x in (a, b))
        options["scale_a"] = new(*stack_a, m, blocks, dtype=torch.float32)
        options["scale_b"] = new(*stack_b, blocks, n, dtype=torch.float32)
    options |= {"bias": new(*((n,) if form == "jagged_n" else (groups, n)), dtype=dtype)} if bias else {}
    options |= {"c": new(*out.shape, dtype=dtype), "beta": 0.5} if c else {}
    return mg.GroupedGemmProblem(a, b, out=out, **options)


def operands(given: mg.GroupedGemmProblem, zeroed: bool = False) -> Operands:
    """`zeroed`: what no group owns becomes zero, as in results that the caller did not give."""
    assert given.out is not None
    return stage(given, replace(staged_spec(given), zero_unowned=zeroed), given.out).ops


def addresses(ops: Operands) -> tuple[int, ...]:
    """What the front door hands to `move`."""
    found = [getattr(ops, name, None) for name in OPERANDS]
    return tuple(x.data_ptr() if isinstance(x, Tensor) else 0 for x in found)


FORMS = ("jagged_m", "jagged_k", "jagged_n", "masked", "batched")
PROBLEMS: dict[str, dict[str, Any]] = {
    **{form: {"form": form} for form in FORMS},
    **{f"{form}, odd": {"form": form, "shift": 1} for form in FORMS},
    **{f"{form}, c": {"form": form, "c": True} for form in FORMS},
    **{f"{form}, bias": {"form": form, "bias": True} for form in ("jagged_m", "jagged_k", "masked", "batched")},
    **{f"{form}, sizes": {"form": form, "kind": "sizes"} for form in ("jagged_m", "jagged_k", "jagged_n")},
    "many sizes": {"form": "jagged_m", "groups": 300, "m": 900, "n": 64, "k": 64, "kind": "sizes"},
    "many": {"form": "jagged_m", "groups": 300, "m": 900, "n": 64, "k": 64},
    "many odd": {"form": "jagged_m", "groups": 300, "m": 900, "n": 64, "k": 64, "shift": 1},
    "many n": {"form": "jagged_n", "groups": 300, "n": 900, "m": 64, "k": 64},
    "many masked": {"form": "masked", "groups": 300, "m": 9, "n": 64, "k": 64},
    "deep": {"form": "jagged_m", "m": 64, "k": 4096},
    "float64": {"form": "jagged_m", "dtype": torch.float64},
    "tf32": {"form": "jagged_m", "dtype": torch.float32, "precision": "tf32", "alpha": 0.5},
    **{f"{form}, scales": {"form": form, "covers": 128} for form in FORMS},
    "scales of rows": {"form": "jagged_m", "covers": 0, "shift": 1, "bias": True, "c": True, "kind": "sizes"},
    "scales of many": {"form": "jagged_m", "covers": 0, "groups": 300, "m": 900, "n": 64, "k": 64},
}


def configs(ops: Operands) -> list[Config]:
    """The shipped ones, and each also with tiles dealt out or shared."""
    if ops.spec.quantised:
        return quantised_candidates(ops.spec)
    shipped = [*hopper_candidates(ops.spec), *pointer_candidates(ops.spec)[:2]]
    more = [replace(x, order="drawn") if x.kernel == "hopper" else replace(x, splits=4, programs=0) for x in shipped]
    dealt = [replace(x, order="dealt") if x.kernel == "hopper" else replace(x, programs=0) for x in shipped]
    return [x for x in dict.fromkeys([*shipped, *more, *dealt]) if not problem_with(x, ops.spec)]


@pytest.fixture
def same_workspaces(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Workspaces of a bind lie where those of the last one lay, after each call of this."""
    made, asked, empty = list[Tensor](), [0], torch.empty

    def workspace(*shape: Any, **options: Any) -> Tensor:
        if asked[0] == len(made):
            made.append(empty(*shape, **options))
        asked[0] += 1
        found = made[asked[0] - 1]
        assert found.shape == empty(*shape, device="meta").shape
        return found

    monkeypatch.setattr(torch, "empty", workspace)

    def again(fresh: bool = False) -> None:
        asked[0] = 0
        if fresh:
            made.clear()

    return again


def test_every_address_follows_its_operand(world: FakeDriver, same_workspaces: Callable[..., None]) -> None:
    """What is moved to other operands is what would be bound to them, byte for byte; and back."""
    seen, operand_memory = set[str](), [(MEMORY.data_ptr(), MEMORY.data_ptr() + len(MEMORY))]
    for name, given in PROBLEMS.items():
        here, there = (operands(problem(start=start, **given), name in FORMS) for start in (0, DISTANCE))
        if here.sizes is not None:  # memory of the library's own, which no call moves
            there.ends = here.ends
        assert all((x - y) % 256 == 0 for x, y in zip(addresses(here), addresses(there), strict=True))
        for config in configs(here):
            bound_to = BACKEND.plan(here.spec, config, GPU).bind
            same_workspaces(fresh=True)
            moved: Any = bound_to(here)
            before = [block_of(kernel) for kernel in kernels_of(moved)]
            same_workspaces()
            after = [block_of(kernel) for kernel in kernels_of(bound_to(there))]
            assert not moved.stays_behind(operand_memory), (name, config)
            moved.move(addresses(there))
            assert [block_of(kernel) for kernel in kernels_of(moved)] == after != before, (name, config)
            moved.move(addresses(here))
            assert [block_of(kernel) for kernel in kernels_of(moved)] == before, (name, config)
            seen |= {kernel._kernel.name for kernel in kernels_of(moved)}
    packed_forms = {"pointer_kernel", "write_prefix", "hopper_kernel", "shift_b_kernel", "write_records", "pack_kernel"}
    assert seen == {*packed_forms, "quantised_kernel", "float8_kernel", "pack_groups_kernel"}


def bound_plan(given: mg.GroupedGemmProblem, config: Config, zeroed: bool = False) -> Bound:
    """A problem, bound as a plan binds it."""
    assert given.out is not None
    spec = replace(staged_spec(given), zero_unowned=zeroed)
    return bind(Choice("triton", BACKEND.plan(spec, config, GPU), spec, ""), given, given.out)


TALL = replace(RING, block_m=192, block_n=256, stages=3)


@pytest.mark.parametrize("kind", ["ends", "sizes"])
@pytest.mark.parametrize(
    "config", [RING, TALL, replace(RING, shift_b=True), TWO_WIDTHS], ids=["two", "three", "shifted", "two widths"]
)
@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k"])
def test_sizes_and_zeros_take_no_launch_of_their_own(form: str, config: Config, kind: str, world: FakeDriver) -> None:
    """The kernel sums up sizes on the device, and zeroes what no group owns, as long as one warp holds all groups."""
    limit = 128 if config is TALL else 256
    for groups, launched in ((limit, []), (limit + 1, ["write_records"] if form != "jagged_k" else [])):
        given = problem(form, 0, groups=groups, kind=kind, m=64, n=64, k=64)
        if problem_with(config, staged_spec(given)):
            continue
        made = bound_plan(given, config, zeroed=True)
        own = "shift_b_kernel" if config.shift_b else "hopper_kernel"
        assert [kernel._kernel.name for kernel in kernels_of(made.steps[-1])] == [*launched, own]
        assert len(made.steps) == 1 + (kind == "sizes" and groups > limit)
        assert (made.ops.sizes is not None) == (kind == "sizes")


@pytest.mark.parametrize("config", [RING, GENERIC], ids=["hopper", "generic"])
def test_a_kept_launch_follows_sizes_that_it_sums_up(config: Config, world: FakeDriver) -> None:
    given, later = (problem("jagged_m", start, kind="sizes") for start in (0, DISTANCE))
    spec = staged_spec(given)
    choice = Choice("triton", BACKEND.plan(spec, config, GPU), spec, "")
    entry: Any = _entry_of(given, bound_plan(given, config), choice, "sizes", counted=False)
    [kernel] = kernels_of(entry._launch)
    assert later.grouping is not None and later.grouping.live is not None
    sizes = later.grouping.live
    call: Any = ("m", later.a, later.b, "sizes", sizes, None, None, None, later.out)
    assert entry.run(call) is later.out
    assert world.calls.count("cuLaunchKernelEx") == 1
    assert sizes.data_ptr() in memoryview(block_of(kernel)).cast("Q")


@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k"])
def test_the_generic_kernel_sums_up_as_many_sizes_as_it_counts_at_once(form: str, world: FakeDriver) -> None:
    for groups in (32, 256, 257):
        given = problem(form, 0, groups=groups, kind="sizes", m=64, n=64, k=64)
        assert len(bound_plan(given, GENERIC).steps) == 1 + (groups > 256)


def test_strides_that_no_map_expresses_and_sizes_on_the_device(world: FakeDriver) -> None:
    """The generic kernel sums them up in place of the one that would."""
    given: Any = problem("jagged_k", 0, groups=2, kind="sizes")
    out = MEMORY[DISTANCE:][: 2 * 264 * 256 * 2].view(BF16).as_strided((2, 256, 256), (256 * 256 + 8, 256, 1))
    other = mg.GroupedGemmProblem(given.a, given.b, sizes=given.grouping.live, jagged="k", out=out)
    made = bound_plan(other, RING)
    assert [kernel._kernel.name for step in made.steps for kernel in kernels_of(step)] == ["pointer_kernel"]


def listed(groups: int, rows: int = 256) -> Operands:
    outs = [torch.zeros(rows, 128, dtype=BF16) for _ in range(groups)]
    a, b = [torch.zeros(rows, 128, dtype=BF16)] * groups, [torch.zeros(128, 128, dtype=BF16)] * groups
    return operands(mg.GroupedGemmProblem(a, b, out=outs))


def scaled_list(groups: int) -> Operands:
    outs = [torch.zeros(64, 32, dtype=BF16) for _ in range(groups)]
    a, b = ([torch.zeros(*shape).to(torch.float8_e4m3fn)] * groups for shape in ((64, 128), (128, 32)))
    return operands(mg.GroupedGemmProblem(a, b, out=outs, scale_a=[torch.ones(64, 1)] * groups))


LISTS: dict[str, tuple[Callable[[], Operands], Config, list[str]]] = {
    "few": (lambda: listed(3), replace(GENERIC, programs=0), ["few_kernel"]),
    "tiles in a table": (lambda: listed(3, rows=257), GENERIC, ["pointer_kernel"]),
    "groups in a table": (lambda: listed(200), GENERIC, ["pointer_kernel"]),
    "counted": (lambda: listed(300), GENERIC, ["write_prefix", "pointer_kernel"]),
    "maps": (lambda: listed(5), replace(RING, stages=6, width=4), ["list_kernel"]),
    "scales": (lambda: scaled_list(3), Config("quantised", stages=1), ["quantised_kernel"]),
    "many with scales": (lambda: scaled_list(300), Config("quantised", stages=1), ["write_prefix", "quantised_kernel"]),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_stay_where_they_were_bound(kind: str, world: FakeDriver) -> None:
    """Their addresses are those of many matrices, in a table or as arguments, and no `move` would reach them."""
    make, config, kernels = LISTS[kind]
    ops = make()
    bound = BACKEND.plan(ops.spec, config, GPU).bind(ops)
    assert not hasattr(bound, "move")
    assert [kernel._kernel.name for kernel in kernels_of(bound)] == kernels
    bound()
    assert world.calls.count("cuLaunchKernelEx") == len(kernels)


def test_strides_that_no_map_expresses_are_the_generic_kernels(world: FakeDriver) -> None:
    """Matrices of a stack that do not lie a whole number of rows apart; the generic recipe is made once."""
    given: Any = problem("masked", 0, groups=2)
    a = MEMORY[: 2 * 264 * 512 * 2].view(BF16).as_strided((2, 256, 512), (256 * 512 + 8, 512, 1))
    ops = operands(mg.GroupedGemmProblem(a, given.b, valid_rows=given.valid_rows.live, out=given.out))
    recipe = BACKEND.plan(ops.spec, RING, GPU)
    before = world.calls.count("cuModuleLoadData")
    for _ in range(2):
        moved = recipe.bind(ops)
        assert [kernel._kernel.name for kernel in kernels_of(moved)] == ["pointer_kernel"]
        assert hasattr(moved, "move")
    assert world.calls.count("cuModuleLoadData") == before + 1


def test_the_ring_runs_on_a_gpu_only() -> None:
    ops = operands(problem("jagged_m", 0))
    with pytest.raises(InvalidSetting, match="kernel='pointer'"):
        BACKEND.plan(ops.spec, RING, torch.device("cpu"))


@pytest.mark.parametrize("config", [GENERIC, replace(GENERIC, splits=4, programs=0), RING], ids=str)
def test_a_thread_without_a_context_plans_binds_and_launches(config: Config, world: FakeDriver) -> None:
    """Autograd runs backward on such a thread. Kernels of more shared memory than usual ask for it there."""
    ops = operands(problem("jagged_m", 0, shift=0, groups=300, m=900, n=64, k=64))
    lists = listed(5)
    caught = list[BaseException]()

    def work() -> None:
        try:
            BACKEND.plan(ops.spec, config, GPU).bind(ops)()
            BACKEND.plan(lists.spec, config if config is GENERIC else LISTS["maps"][1], GPU).bind(lists)()
        except BaseException as error:
            caught.append(error)

    world.make_current(0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not caught, caught
    assert "cuModuleLoadData" in world.calls and "cuLaunchKernelEx" in world.calls
    assert ("cuFuncSetAttribute" in world.calls) is (config is not GENERIC)
    assert not world.current, "this thread is left alone"


def test_another_library_s_context_is_given_back(world: FakeDriver) -> None:
    world.make_current(7)
    ops = operands(problem("jagged_m", 0))
    BACKEND.plan(ops.spec, RING, GPU).bind(ops)
    assert world.mapped
    assert world.current == 7


def test_captures_pin_what_launches_count_in(world: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = list[str]()
    for module in (generic, hopper):
        monkeypatch.setattr(module.Words, "pin", staticmethod(partial(pinned.append, "once")))
    ops = operands(problem("jagged_m", 0))
    for config in (replace(GENERIC, splits=4, programs=0), RING, GENERIC, replace(RING, order="dealt")):
        bound = BACKEND.plan(ops.spec, config, GPU).bind(ops)
        bound()
        assert not pinned
        with monkeypatch.context() as capture:
            capture.setattr(launch, "is_capturing", lambda: True)
            bound()
        assert len(pinned) == (config.splits > 1 or (config.kernel, config.order) == ("hopper", "drawn"))
        pinned.clear()


def test_triton_s_own_parameters_follow_the_kernel_s(world: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory for each program, aligned, and then a pointer that stays 0."""
    made = list[Tensor]()
    empty = torch.empty

    def noted(*shape: Any, **options: Any) -> Tensor:
        made.append(empty(*shape, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(torch, "empty", noted)
    kernel = compiled.TritonKernel(compiled.Cubin(b"", "name", 128, 0, 96, 256, 4), 0)
    bound = kernel.bound([5, 6], 3)
    assert made[0].numel() == 3 * 96 + 256
    first, second, scratch, profile = memoryview(block_of(bound)).cast("Q")
    assert (first, second, profile) == (5, 6, 0)
    assert scratch % 256 == 0
    assert made[0].data_ptr() <= scratch <= made[0].data_ptr() + 256


@pytest.mark.parametrize("groups", [0, 2])
def test_weights_of_no_group_are_not_copied(groups: int, world: FakeDriver) -> None:
    """Weights of no group count as one group at address 0, which a copy would read."""
    a, b = torch.randn(9, 8).bfloat16(), torch.randn(groups, 8, 5).bfloat16()
    given = mg.GroupedGemmProblem(a, b, ends=torch.tensor([4, 9][:groups], dtype=torch.int32))
    ops = stage(given, staged_spec(given), torch.empty(9, 5, dtype=torch.bfloat16)).ops
    config = Config("hopper", block_m=128, block_n=128, warps=4, stages=4, pack=("b",))
    bound = BACKEND.plan(ops.spec, config, GPU).bind(ops)
    launched = [kernel._kernel.name for kernel in kernels_of(bound)]
    assert launched == ["pack_kernel"] * (groups > 0) + ["hopper_kernel"]


@pytest.mark.parametrize("shift", [0, 7])
@pytest.mark.parametrize("jagged", ["k", "m"])
def test_maps_of_operands_without_elements_lie_where_a_map_may(
    jagged: Literal["m", "k"], shift: int, world: FakeDriver
) -> None:
    """They borrow the result's address, which may be any; a map wants a multiple of 16 bytes, and reads nothing."""
    groups, rows, total = (2, 48, 0) if jagged == "k" else (0, 9, 9)
    if jagged == "k":  # no element of K in any group
        a, b = torch.empty(total, rows, dtype=torch.bfloat16).T, torch.empty(total, 16, dtype=torch.bfloat16)
    else:  # no group
        a, b = torch.empty(total, 48, dtype=torch.bfloat16), torch.empty(groups, 48, 16, dtype=torch.bfloat16)
    shape = (groups, rows, 16) if jagged == "k" else (rows, 16)
    out = torch.empty(shift + 2 * 48 * 16, dtype=torch.bfloat16)[shift:][: torch.Size(shape).numel()].view(shape)
    given = mg.GroupedGemmProblem(a, b, ends=torch.zeros(groups, dtype=torch.int32), jagged=jagged, out=out)
    ops = stage(given, staged_spec(given), out).ops
    spec, seen, box = canonical(ops.spec), canonical_shape(packed(ops)), ((64, 64, 1, 1),)
    with driver.on_device(0):
        maps = [map_of_a(spec, seen, box), map_of_b(spec, seen, box)]
    assert all(address and address % 16 == 0 for address in world.mapped)
    borrowed = [slot for encoded in maps for slot in encoded.slots if slot.operand == OPERANDS.index("out")]
    assert len(borrowed) == (2 if jagged == "k" else 1)
    assert all(slot.distance == -(out.data_ptr() % 16) for slot in borrowed), "they follow the result"


ROWS, PLACE = torch.tensor([3, -1, 1, 0, 2, 2], dtype=torch.int32), torch.tensor([[0, 5], [2, 9]])
FUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gather and gate": ({"a_rows": ROWS, "activation": "swiglu"}, ["pointer_kernel"]),
    "combine": ({"combine": (PLACE, torch.rand(2, 2))}, ["pointer_kernel", "sum_rows_kernel"]),
    "gather, gate and combine": (
        {"a_rows": ROWS, "activation": "glu", "combine": (PLACE, None)},
        ["pointer_kernel", "sum_rows_kernel"],
    ),
    "scatter": ({"out_rows": ROWS, "rows": 5}, ["pointer_kernel", "sum_rows_kernel"]),
    "many groups": ({"a_rows": ROWS, "activation": "relu"}, ["write_prefix", "pointer_kernel"]),
}


KERNELS = ("write_prefix", "pointer_kernel", "sum_rows_kernel")


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("kind", ["sizes", "ends"])
def test_launches_of_fused_problems(name: str, kind: str, world: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernels run, in which order, with as many arguments as each has."""
    options, wanted = FUSED[name]
    groups = 300 if name == "many groups" else 2
    counts: list[tuple[int, int]] = []
    whole = compiled.TritonKernel.bound

    def counted(self: Any, values: Any, *more: Any, **rest: Any) -> Any:
        counts.append((len(values), self.code.params - 2))
        return whole(self, values, *more, **rest)

    monkeypatch.setattr(compiled.TritonKernel, "bound", counted)
    cut = torch.full((groups,), 6 if kind == "ends" else 0, dtype=torch.int32)
    x, b = torch.randn(4 if "a_rows" in options else 6, 16).bfloat16(), torch.randn(groups, 16, 32).bfloat16()
    keywords: dict[str, Any] = {kind: cut, **options}
    given = mg.GroupedGemmProblem(x, b, **keywords)
    spec = staged_spec(given)
    recipe = BACKEND.plan(spec, GENERIC, GPU)
    bound = bind(Choice("triton", recipe, spec, ""), given, torch.empty(given.out_shape, dtype=torch.bfloat16))
    bound.launch()
    assert [launched.kernel for launched in world.launched if launched.kernel in KERNELS] == wanted
    assert counts and all(found == expected for found, expected in counts)
    assert recipe.sums_sizes == (kind == "sizes" and groups <= 256)
