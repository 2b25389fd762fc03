"""Stand-ins for other libraries' functions: the originals' own tests, restated, and what they do better."""

from __future__ import annotations

import inspect
import itertools
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import multigemm as mg
from multigemm.integrations import gmm as grouped_gemm
from multigemm.integrations.ragged_dot import ragged_dot
from multigemm.integrations.torch_grouped_mm import grouped_mm

M, N, K, G = 16, 32, 64, 4


def matrix(rows: int, cols: int, row_major: bool, strided: bool, dtype: torch.dtype) -> Tensor:
    """A matrix in one of the layouts that torch's own tests go through: each order, dense or with gaps."""
    extra = K if strided else 0
    if row_major:
        return torch.randn(rows, cols + extra, dtype=dtype)[:, :cols]
    return torch.randn(cols, rows + extra, dtype=dtype).t()[:rows]


def stack(rows: int, cols: int, row_major: bool, strided: bool, dtype: torch.dtype) -> Tensor:
    step = 2 if strided else 1
    if row_major:
        return torch.randn(G * step, rows, cols * step, dtype=dtype)[::step, :, :cols]
    return torch.randn(G * step, cols * step, rows, dtype=dtype).transpose(1, 2)[::step, :, :cols]


def check_groups(a: Any, b: Any, grads: Any, da: Any, db: Any, out: Any) -> None:
    """Each group against torch.mm and its gradients."""
    for x, y, grad, dx, dy, z in zip(a, b, grads, da, db, out, strict=True):
        x, y = x.detach().clone().requires_grad_(), y.detach().clone().requires_grad_()
        want = torch.mm(x, y.t())
        dx_want, dy_want = torch.autograd.grad(want, (x, y), grad)
        torch.testing.assert_close(z, want)
        torch.testing.assert_close(dx, dx_want)
        torch.testing.assert_close(dy, dy_want)


LAYOUTS = list(itertools.product([False, True], repeat=3))


@pytest.mark.parametrize(("strided", "a_row", "b_row"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_grouped_mm_in_every_mode(strided: bool, a_row: bool, b_row: bool, dtype: torch.dtype) -> None:
    def cuts(step: int) -> tuple[Tensor, list[slice]]:
        return torch.arange(step, G * step + 1, step, dtype=torch.int32), [
            slice(g * step, (g + 1) * step) for g in range(G)
        ]

    for mode in ("2d_3d", "3d_2d", "2d_2d", "3d_3d"):
        stacked_a, stacked_b = mode[0] == "3", mode[3] == "3"
        rows, cols = (M, N) if mode == "2d_2d" else (G * M, G * N)
        inner = G * K if mode == "2d_2d" else K
        a = stack(M, K, a_row, strided, dtype) if stacked_a else matrix(rows, inner, a_row, strided, dtype)
        b = stack(N, K, b_row, strided, dtype) if stacked_b else matrix(cols, inner, b_row, strided, dtype)
        a, b = a.requires_grad_(), b.requires_grad_()
        offs, parts = {"2d_3d": cuts(M), "3d_2d": cuts(N), "2d_2d": cuts(K)}.get(mode, (None, []))
        out = grouped_mm(a, b.transpose(-2, -1), offs=offs, out_dtype=dtype)
        grad = torch.rand_like(out)
        da, db = torch.autograd.grad(out, (a, b), grad)
        if mode == "2d_3d":
            check_groups(*([x[p] for p in parts] if x is not b and x is not db else x
                           for x in (a, b, grad, da, db, out)))  # fmt: skip
        elif mode == "3d_2d":
            check_groups(a, [b[p] for p in parts], [grad[:, p] for p in parts], da, [db[p] for p in parts],
                         [out[:, p] for p in parts])  # fmt: skip
        elif mode == "2d_2d":
            split = [[x[:, p] for p in parts] for x in (a, b, da, db)]
            check_groups(split[0], split[1], grad, split[2], split[3], out)
        else:
            check_groups(a, b, grad, da, db, out)


def test_grouped_mm_agrees_with_torch_where_torch_can() -> None:
    offs = torch.tensor([8, 8, 24, 32], dtype=torch.int32)
    a, b = torch.randn(32, 16, dtype=torch.bfloat16), torch.randn(4, 16, 24, dtype=torch.bfloat16)
    torch.testing.assert_close(grouped_mm(a, b, offs=offs), F.grouped_mm(a, b, offs=offs))
    torch.testing.assert_close(grouped_mm(b.mT, b), F.grouped_mm(b.mT, b))


def test_grouped_mm_takes_its_operands_by_position_and_by_keyword() -> None:
    """`torch._grouped_mm` takes all five by position, `torch.nn.functional.grouped_mm` three by keyword alone."""
    offs = torch.tensor([8, 32], dtype=torch.int32)
    a, b = torch.randn(32, 16, dtype=torch.bfloat16), torch.randn(2, 16, 24, dtype=torch.bfloat16)
    bias = torch.randn(2, 24, dtype=torch.bfloat16)
    assert torch.equal(grouped_mm(a, b, offs), grouped_mm(a, b, offs=offs))
    torch.testing.assert_close(grouped_mm(a, b, offs), torch._grouped_mm(a, b, offs))
    everything = grouped_mm(a, b, offs, bias, torch.float32)
    assert everything.dtype == torch.float32
    assert torch.equal(everything, grouped_mm(a, b, offs=offs, bias=bias, out_dtype=torch.float32))


def test_grouped_mm_has_at_least_the_parameters_of_torch() -> None:
    original = list(inspect.signature(F.grouped_mm).parameters.values())
    every = list(inspect.signature(grouped_mm).parameters.values())
    ours, more = every[: len(original)], every[len(original) :]
    assert [(x.name, x.default) for x in original] == [(x.name, x.default) for x in ours]
    schema = torch.ops.aten._grouped_mm.default._schema
    assert [x.name for x in schema.arguments[2:]] == [x.name for x in ours[2:]]
    assert all(x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for x in ours)
    assert all(x.kind is inspect.Parameter.KEYWORD_ONLY for x in more)


def test_grouped_mm_goes_where_torch_does_not() -> None:
    offs = torch.tensor([1, 1, 4], dtype=torch.int32)
    a, b = torch.randn(7, 5, dtype=torch.float64), torch.randn(3, 5, 3, dtype=torch.float64)
    bias = torch.randn(3, 3, dtype=torch.float64)
    out = grouped_mm(a, b, offs=offs, bias=bias, out_dtype=torch.float32)
    want = torch.cat([a[:1] @ b[0] + bias[0], a[1:4] @ b[2] + bias[2], torch.zeros(3, 3, dtype=torch.float64)])
    torch.testing.assert_close(out, want.float())
    assert grouped_mm(torch.zeros(7, 0), torch.zeros(3, 0, 3), offs=offs).shape == (7, 3)
    with pytest.raises(mg.InvalidProblem, match="pass offs"):
        grouped_mm(a, b)
    with pytest.raises(mg.InvalidProblem, match="leave offs out"):
        grouped_mm(b.mT, b, offs=offs)
    with pytest.raises(mg.InvalidProblem, match="must have 2 or 3"):
        grouped_mm(a[0], b, offs=offs)


def loop(a: Tensor, b: Tensor, sizes: Tensor, trans_b: bool) -> Tensor:
    rows = torch.split(a, sizes.tolist())
    return torch.cat([x @ (y.t() if trans_b else y) for x, y in zip(rows, b, strict=True)])


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(("z", "m", "k", "n"), [(1, 128, 128, 128), (8, 128, 128, 128), (16, 16, 256, 512)])
def test_gmm_with_fixed_and_with_random_sizes(z: int, m: int, k: int, n: int, trans_b: bool) -> None:
    torch.manual_seed(0)
    share = torch.rand(z)
    random = (share / share.sum() * m).to(torch.long)
    random[-1] += m * z - random.sum()
    for sizes in (torch.tensor([m] * z), random):
        a = torch.randn(z * m, k, dtype=torch.bfloat16, requires_grad=True)
        b = torch.randn(z, n, k, dtype=torch.bfloat16) if trans_b else torch.randn(z, k, n, dtype=torch.bfloat16)
        b.requires_grad_()
        out = grouped_gemm.ops.gmm(a, b, sizes, trans_b=trans_b)
        assert torch.equal(out, grouped_gemm.ops.gmm(a, b, sizes, trans_b))  # ops.gmm's fourth parameter
        want = loop(a, b, sizes, trans_b)
        torch.testing.assert_close(out, want)
        got = torch.autograd.grad(out.float().sum(), (a, b))
        torch.testing.assert_close(got, torch.autograd.grad(want.float().sum(), (a, b)), rtol=0.02, atol=0.02)


def test_gmm_backward_of_a_sum_and_of_one_operand() -> None:
    """The original's tests call `out.sum().backward()`, whose incoming gradient is one number for all elements."""
    sizes = torch.tensor([3, 0, 6])
    a, b = torch.randn(9, 4, requires_grad=True), torch.randn(3, 4, 5, requires_grad=True)
    torch.autograd.backward(grouped_gemm.ops.gmm(a, b, sizes).sum())
    wants = torch.autograd.grad(loop(a, b, sizes, False).sum(), (a, b))
    torch.testing.assert_close((a.grad, b.grad), wants)
    for wanted in (0, 1):
        pair = [x.detach().clone().requires_grad_(i == wanted) for i, x in enumerate((a, b))]
        torch.autograd.backward(grouped_gemm.ops.gmm(pair[0], pair[1], sizes).sum())
        torch.testing.assert_close(pair[wanted].grad, wants[wanted])
        assert pair[1 - wanted].grad is None


def test_gmm_with_trans_a_and_with_an_output() -> None:
    a, b, sizes = torch.randn(9, 4), torch.randn(9, 5), torch.tensor([3, 0, 6])
    c = torch.full((3, 4, 5), torch.nan)
    assert grouped_gemm.backend.gmm(a, b, sizes, True, False, c) is c  # the original's order of parameters
    want = torch.stack([x.T @ y for x, y in zip(torch.split(a, [3, 0, 6]), torch.split(b, [3, 0, 6]), strict=True)])
    torch.testing.assert_close(c, want)
    assert c[1].abs().max() == 0
    c.fill_(torch.nan)
    grouped_gemm.ops.backend.gmm(a, b, sizes, trans_a=True, c=c)  # as the original's own tests reach it
    torch.testing.assert_close(c, want)
    torch.testing.assert_close(grouped_gemm.ops.gmm(a, b, [3, 0, 6], trans_a=True), want)
    for wrong, words in ((sizes[None], "sizes has 2 dimensions"), (9, "sizes is of type int")):
        with pytest.raises(mg.InvalidProblem, match=words):
            grouped_gemm.backend.gmm(a, b, wrong, True)


def test_gmm_refuses_operands_that_do_not_fit_the_flags() -> None:
    a, b, stacked, sizes = torch.randn(9, 4), torch.randn(9, 5), torch.randn(3, 4, 5), [3, 0, 6]
    with pytest.raises(mg.InvalidProblem, match="given together"):
        grouped_gemm.backend.gmm(a, b, sizes, True, True)
    with pytest.raises(mg.InvalidProblem, match="with trans_a=False they must have 2 and 3"):
        grouped_gemm.ops.gmm(a, b, sizes)
    with pytest.raises(mg.InvalidProblem, match="with trans_a=False they must have 2 and 3"):
        grouped_gemm.ops.gmm(a, b, sizes, True)
    with pytest.raises(mg.InvalidProblem, match="with trans_a=True they must have 2 and 2"):
        grouped_gemm.backend.gmm(a, stacked, sizes, True)


def test_gmm_of_the_backend_has_no_gradient() -> None:
    """The original's `backend` knows no autograd: blocks that write their own backward pass give it whatever requires
    grad, an output too."""
    a, b, sizes = (
        torch.randn(9, 4, requires_grad=True),
        torch.randn(3, 4, 5, requires_grad=True),
        torch.tensor([3, 0, 6]),
    )
    c = torch.empty(9, 5, requires_grad=True)
    assert not grouped_gemm.backend.gmm(a, b, sizes).requires_grad
    assert grouped_gemm.backend.gmm(a, b, sizes, c=c) is c
    torch.testing.assert_close(c, loop(a, b, sizes, False))
    assert c.grad_fn is None
    left = grouped_gemm.ops.gmm(a, torch.randn(9, 5), sizes, trans_a=True)
    assert left.requires_grad


@pytest.fixture
def no_grouped_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes modules called grouped_gemm away; what the test installs or imports goes when it ends."""
    for part in ("ops", "backend"):
        monkeypatch.setattr(grouped_gemm, part, getattr(grouped_gemm, part))
    for name in ("grouped_gemm", "grouped_gemm.ops", "grouped_gemm.backend"):
        monkeypatch.setitem(sys.modules, name, None)  # so that the end of the test restores what was there
        del sys.modules[name]


IMPORTS = {
    "import grouped_gemm": "grouped_gemm.ops.gmm, grouped_gemm.backend.gmm",
    "import grouped_gemm.ops": "grouped_gemm.ops.gmm, grouped_gemm.ops.backend.gmm",
    "import grouped_gemm.ops as ops": "ops.gmm, ops.backend.gmm",
    "import grouped_gemm.backend": "grouped_gemm.ops.gmm, grouped_gemm.backend.gmm",
    "from grouped_gemm import ops": "ops.gmm, ops.backend.gmm",
    "from grouped_gemm import backend, ops": "ops.gmm, backend.gmm",
    "from grouped_gemm.ops import backend, gmm": "gmm, backend.gmm",
}


@pytest.mark.parametrize("installed", ["by install()", "by hand"])
@pytest.mark.parametrize("line", IMPORTS)
@pytest.mark.usefixtures("no_grouped_gemm")
def test_gmm_installed_under_the_original_name(line: str, installed: str) -> None:
    if installed == "by hand":
        sys.modules["grouped_gemm"] = grouped_gemm
    else:
        grouped_gemm.install()
    names: dict[str, Any] = {}
    exec(f"{line}\nfound = ({IMPORTS[line]})", names)
    differentiable, plain = names["found"]
    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(2, 5, 3)
    sizes = torch.tensor([1, 3])
    torch.testing.assert_close(differentiable(a, b, sizes, True), loop(a, b, sizes, True))
    assert differentiable(a, b, sizes, True).requires_grad
    torch.testing.assert_close(plain(a, b, sizes, False, True), loop(a, b, sizes, True).detach())


@pytest.mark.usefixtures("no_grouped_gemm")
def test_gmm_is_not_installed_over_the_original() -> None:
    grouped_gemm.install()
    grouped_gemm.install()  # twice is once
    for name in ("grouped_gemm", "grouped_gemm.ops", "grouped_gemm.backend"):
        sys.modules.pop(name, None)
    original = ModuleType("grouped_gemm")
    original.__file__ = "/somewhere/grouped_gemm/__init__.py"
    sys.modules["grouped_gemm"] = original
    with pytest.raises(mg.InvalidSetting, match=r"imported from /somewhere/grouped_gemm/__init__.py: call install"):
        grouped_gemm.install()
    assert sys.modules["grouped_gemm"] is original


class Foreign:
    """An array of some other library: it has DLPack and says by what function to come back."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.data.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()

    def __array_namespace__(self) -> type[Foreign]:
        return Foreign

    @staticmethod
    def from_dlpack(x: Any) -> Foreign:
        return Foreign(np.from_dlpack(x))


@pytest.mark.parametrize("index", [np.int32, np.int64, np.uint8])
def test_ragged_dot_keeps_the_kind_of_array(index: Any) -> None:
    lhs, rhs = np.random.randn(7, 4).astype(np.float32), np.random.randn(3, 4, 5).astype(np.float32)
    sizes = np.array([2, 0, 4], dtype=index)
    want = np.zeros((7, 5), np.float32)
    want[:2], want[2:6] = lhs[:2] @ rhs[0], lhs[2:6] @ rhs[2]
    kinds: list[tuple[Any, Any]] = [
        (Foreign, lambda x: x.data),
        (np.asarray, np.asarray),
        (torch.from_numpy, Tensor.numpy),
    ]
    for wrap, unwrap in kinds:
        out = ragged_dot(wrap(lhs), wrap(rhs), wrap(sizes), precision="highest")
        assert type(out) is type(wrap(lhs))
        np.testing.assert_allclose(unwrap(out), want, rtol=1e-5, atol=1e-5)
    wide = ragged_dot(lhs, rhs, [2, 0, 4], preferred_element_type=np.float64)
    assert wide.dtype == np.float64
    with pytest.raises(mg.InvalidProblem, match="group_offset"):
        ragged_dot(lhs, rhs, sizes, group_offset=np.array([1]))
    torch.testing.assert_close(ragged_dot(lhs, rhs, sizes, None, None, None, None), want)  # JAX's order
    assert np.array_equal(ragged_dot(lhs, rhs, sizes, out_sharding=None), ragged_dot(lhs, rhs, sizes))
    with pytest.raises(mg.InvalidProblem, match=r"out_sharding=\('x', None\) is not supported: .* leave it at None"):
        ragged_dot(lhs, rhs, sizes, out_sharding=("x", None))
    with pytest.raises(mg.InvalidProblem, match="must hold integers"):
        ragged_dot(lhs, rhs, sizes.astype(np.float32))
    assert ragged_dot(lhs, rhs, range(3)).shape == (7, 5)
    with pytest.raises(mg.InvalidProblem, match="sizes is of type int"):
        ragged_dot(lhs, rhs, 6)
