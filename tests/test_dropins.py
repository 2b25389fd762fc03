"""Stand-ins for other libraries' functions: the originals' own tests, restated, and what they do better."""

from __future__ import annotations

import itertools
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
from multigemm.integrations.tritonbench import ADAPTERS, adapter

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


def test_gmm_with_trans_a_and_with_an_output() -> None:
    a, b, sizes = torch.randn(9, 4), torch.randn(9, 5), torch.tensor([3, 0, 6])
    c = torch.full((3, 4, 5), torch.nan)
    out = grouped_gemm.backend.gmm(a, b, sizes, True, False, c)
    assert out is c
    want = torch.stack([x.T @ y for x, y in zip(torch.split(a, [3, 0, 6]), torch.split(b, [3, 0, 6]), strict=True)])
    torch.testing.assert_close(c, want)
    assert c[1].abs().max() == 0
    with pytest.raises(mg.InvalidProblem, match="given together"):
        grouped_gemm.ops.gmm(a, b, sizes, True, True)
    with pytest.raises(mg.InvalidProblem, match="dimensions"):
        grouped_gemm.ops.gmm(a, b, sizes)
    torch.testing.assert_close(grouped_gemm.ops.gmm(a, b, [3, 0, 6], True), want)
    for wrong, words in ((sizes[None], "sizes has 2 dimensions"), (9, "sizes is of type int")):
        with pytest.raises(mg.InvalidProblem, match=words):
            grouped_gemm.ops.gmm(a, b, wrong, True)


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
    with pytest.raises(mg.InvalidProblem, match="must hold integers"):
        ragged_dot(lhs, rhs, sizes.astype(np.float32))
    assert ragged_dot(lhs, rhs, range(3)).shape == (7, 5)
    with pytest.raises(mg.InvalidProblem, match="sizes is of type int"):
        ragged_dot(lhs, rhs, 6)


def test_tritonbench_adapters_pack_once_and_return_rows() -> None:
    shared = torch.randn(256, 128, dtype=torch.bfloat16)
    group_a = [torch.randn(m, 256, dtype=torch.bfloat16) for m in (64, 128, 192, 256)]
    call = ADAPTERS["cpu"](None, group_a, [shared] * 4)
    want = torch.cat([a @ shared for a in group_a])
    torch.testing.assert_close(call(), want, rtol=1e-2, atol=1e-2)
    assert call() is call()  # no packing, no allocation
    stacked = [torch.randn(256, 128, dtype=torch.bfloat16) for _ in group_a]
    want = torch.cat([a @ b for a, b in zip(group_a, stacked, strict=True)])
    torch.testing.assert_close(ADAPTERS["auto"](None, group_a, stacked)(), want, rtol=1e-2, atol=1e-2)
    uneven_a = [torch.randn(m, k) for m, k in ((3, 4), (5, 6))]
    uneven_b = [torch.randn(4, 7), torch.randn(6, 7)]
    want = torch.cat([a @ b for a, b in zip(uneven_a, uneven_b, strict=True)])
    torch.testing.assert_close(adapter("cpu")(None, uneven_a, uneven_b)(), want)
    assert {"auto", "cupy", "triton", "numba", "cublas", "cpu"} <= set(ADAPTERS)
    with pytest.raises((mg.BackendUnavailable, mg.BackendUnsupported)):
        ADAPTERS["cupy"](None, group_a, stacked)
