"""What a bind and a launch cost the host, in Python calls; and the way into torch's grouped_mm; no GPU needed."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import multigemm as mg
from multigemm import torch_internals
from multigemm.backends.cublas import calls, epilogue, grouped_mm, launch
from multigemm.backends.cublas.config import Config
from multigemm.backends.cublas.library import COMPUTE_32F
from multigemm.cuda import nvrtc
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate, stage
from tests.support.cublas_fake import CUDA, Fake, install

SIZES = [10, 20, 16, 16, 30, 4, 1, 31]
ROOT = Path(__file__).resolve().parents[3]
PRODUCT = tuple(f"{ROOT / folder}/" for folder in ("multigemm", "backends", "reference"))


def _kernel(source: str, name: str, defines: tuple[str, ...], device: int) -> nvrtc.Kernel:
    """A kernel that is bound and launched as on a GPU, but does nothing: `cut` has its answer beforehand."""
    kernel = nvrtc.Kernel.__new__(nvrtc.Kernel)
    kernel.name, kernel._device = name, 0
    kernel._function, kernel._launch = ctypes.c_void_p(1), lambda *_: 0
    return kernel


def multiplied(keys: Any, a: Tensor, b: Tensor, ends: Tensor, bias: None, dtype: None) -> Tensor:
    """What torch's operation does: it asks for memory, and fills it."""
    shape = (a.shape[0], b.shape[2])
    out, start = torch.empty_strided(shape, (shape[1], 1), dtype=a.dtype), 0
    with _disable_current_modes():
        for g, end in enumerate(ends.tolist()):
            out[start:end] = a[start:end] @ b[g]
            start = end
    return out


def redispatch_by(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    """Puts `call` in the place of torch's operation."""
    known = torch_internals.redispatched_grouped_mm
    assert known is not None
    monkeypatch.setattr(grouped_mm, "redispatched_grouped_mm", (call, *known[1:]))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr(nvrtc, "kernel", _kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    redispatch_by(monkeypatch, multiplied)
    return install(monkeypatch)


def _operands(**grouping: Any) -> Operands:
    """Operands that count as a GPU's."""
    a, b = torch.randn(sum(SIZES), 64).bfloat16(), torch.randn(len(SIZES), 64, 32).bfloat16()
    problem = mg.GroupedGemmProblem(a, b, **grouping)
    ops = stage(problem, problem.spec, allocate(problem)).ops
    return replace(ops, spec=replace(ops.spec, device_sizes=ops.host_offsets is None), device=torch.device("cuda", 0))


def _python_calls(config: Config, ops: Operands) -> Counter[str]:
    """The Python functions of the product and of torch that a warm bind and launch enter."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: object) -> None:
        code, caller = frame.f_code, frame.f_back
        ours = caller is not None and str(Path(caller.f_code.co_filename).resolve()).startswith(PRODUCT)
        outside = "tests/" in code.co_filename or "tests/" in caller.f_code.co_filename
        if event == "call" and ours and not outside:
            found[f"{code.co_filename}:{code.co_name}"] += 1

    bind = launch.plan(ops.spec, config, CUDA).bind
    for _ in range(2):
        bind(ops)()
    sys.setprofile(note)
    try:
        bind(ops)()
    finally:
        sys.setprofile(None)
    return found


OFFSETS = torch.tensor([0, 10, 30, 46, 62, 92, 96, 97, 128])


@pytest.mark.parametrize(
    ("config", "grouping", "bar"),
    [
        (Config("auto"), {"ends": OFFSETS[1:].int()}, 20),
        (Config("auto"), {"offsets": OFFSETS}, 25),
        (Config("grouped_mm"), {"sizes": SIZES}, 20),
        (Config("loop"), {"sizes": SIZES}, 55),
        (Config("streams", 4), {"sizes": SIZES}, 65),
        (Config("batched"), {"sizes": [16] * 8}, 65),
    ],
    ids=lambda value: value.variant if isinstance(value, Config) else None,
)
def test_a_warm_bind_and_launch_enter_few_functions(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, config: Config, grouping: Any, bar: int
) -> None:
    for entry in ("gemm", "strided"):
        monkeypatch.setattr(fake, entry, lambda *_: 0)
    found = _python_calls(config, _operands(**grouping))
    assert found.total() <= bar, found.most_common()


def test_arguments_that_calls_share_are_made_once() -> None:
    doubled = calls.types(torch.bfloat16, COMPUTE_32F, torch.bfloat16, 2.0, 0.0)
    assert calls.types(torch.bfloat16, COMPUTE_32F, torch.bfloat16, 2.0, 0.0) is doubled
    assert calls.types(torch.bfloat16, COMPUTE_32F, torch.bfloat16, 1.0, 0.0) is not doubled


# --- torch's grouped_mm ---------------------------------------------------------------------------


def _want(ops: Any) -> Tensor:
    return torch.cat([a @ b for a, b in zip(ops.a.split(SIZES), ops.b, strict=True)])


def test_grouped_mm_writes_into_the_given_memory(fake: Fake) -> None:
    ops = _operands(sizes=SIZES)
    where, before = ops.out.data_ptr(), torch.empty_strided  # type: ignore[union-attr]
    launch.plan(ops.spec, Config("grouped_mm"), CUDA).bind(ops)()
    assert ops.out.data_ptr() == where  # type: ignore[union-attr]
    assert torch.equal(ops.out, _want(ops))  # type: ignore[arg-type]
    assert before((128, 32), (32, 1)).data_ptr() != where  # the mode is gone


def test_only_memory_of_the_results_shape_is_answered_with_the_result(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def two(*arguments: Any) -> Tensor:
        asked.append(torch.empty_strided((32, 128), (128, 1), dtype=torch.bfloat16).data_ptr())
        return multiplied(*arguments)

    redispatch_by(monkeypatch, two)
    ops = _operands(sizes=SIZES)
    launch.plan(ops.spec, Config("grouped_mm"), CUDA).bind(ops)()
    assert asked[0] != ops.out.data_ptr()  # type: ignore[union-attr]
    assert torch.equal(ops.out, _want(ops))  # type: ignore[arg-type]


def test_a_torch_that_allocates_elsewhere_is_copied_from(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(*arguments: Any) -> Tensor:
        with _disable_current_modes():
            return multiplied(*arguments)

    redispatch_by(monkeypatch, elsewhere)
    ops = _operands(sizes=SIZES)
    launch.plan(ops.spec, Config("grouped_mm"), CUDA).bind(ops)()
    assert torch.equal(ops.out, _want(ops))  # type: ignore[arg-type]


def test_without_torchs_private_names_the_public_function_is_called(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_mm, "redispatched_grouped_mm", None)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda a, b, offs: multiplied(None, a, b, offs, None, None))
    ops = _operands(sizes=SIZES)
    ops.out.fill_(7)  # type: ignore[union-attr]
    launch.plan(ops.spec, Config("grouped_mm"), CUDA).bind(ops)()
    assert torch.equal(ops.out, _want(ops))  # type: ignore[arg-type]


def test_the_mode_is_gone_after_an_error(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Tensor:
        raise RuntimeError("Can't process more than 1024 groups")

    redispatch_by(monkeypatch, fails)
    ops = _operands(sizes=SIZES)
    with pytest.raises(RuntimeError, match="1024 groups"):
        launch.plan(ops.spec, Config("grouped_mm"), CUDA).bind(ops)()
    assert torch.empty_strided((128, 32), (32, 1)).data_ptr() != ops.out.data_ptr()  # type: ignore[union-attr]


def test_offsets_on_the_device_become_ends_and_zeros(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cut` before the call, and behind it only where a start is on the device too."""
    launched: list[tuple[int, int, int]] = []

    def bound(self: nvrtc.Kernel, blocks: int, threads: int, values: Any, keep: object) -> Any:
        return lambda stream: launched.append((blocks, values[0].head, values[0].after))

    monkeypatch.setattr(nvrtc.Kernel, "bound", bound)
    many = 1 + epilogue.ZEROING_BLOCKS
    for grouping, want in (
        ({"ends": OFFSETS[1:]}, [(many, 0, 0)]),
        ({"offsets": OFFSETS}, [(many, 1, 0), (epilogue.ZEROING_BLOCKS, 1, 1)]),
    ):
        launched.clear()
        ops = _operands(**grouping)
        launch.plan(ops.spec, Config("auto"), CUDA).bind(ops)()
        assert launched == want
