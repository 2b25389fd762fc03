"""Stand-ins for torch's scaled_grouped_mm and DeepGEMM's grouped float8 products."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import multigemm as mg
from multigemm.integrations import deep_gemm
from multigemm.integrations.torch_grouped_mm import scaled_grouped_mm, unswizzle
from multigemm.quantize import Quantized, quantize

T, K, N, G = 300, 256, 192, 3
SIZES = torch.tensor([130, 0, 170])
OFFS = SIZES.cumsum(0).to(torch.int32)
E8M0 = torch.float8_e8m0fnu
ScalingType: Any = getattr(F, "ScalingType", None)
recipes = pytest.mark.skipif(ScalingType is None, reason="this torch has no ScalingType")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def swizzled(scale: Tensor) -> Tensor:
    """[rows, columns] as tensor cores read it: what torchao calls to_blocked."""
    rows, columns = (-(-n // step) * step for n, step in zip(scale.shape, (128, 4), strict=True))
    whole = torch.zeros(rows, columns, dtype=torch.uint8)
    whole[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
    blocks = whole.view(rows // 128, 128, columns // 4, 4).permute(0, 2, 1, 3)
    return blocks.reshape(-1, 4, 32, 4).transpose(1, 2).reshape(-1).view(scale.dtype)


# --- torch ------------------------------------------------------------------------------------------


def test_the_parameters_are_torchs() -> None:
    found = getattr(F, "scaled_grouped_mm", None)
    if found is None:
        pytest.skip("this torch has no scaled_grouped_mm")
    ours = inspect.signature(scaled_grouped_mm).parameters
    names = list(inspect.signature(found).parameters)
    assert list(ours)[: len(names)] == names
    assert [ours[n].default for n in names[5:] if n != "contraction_dim"] == [
        p.default for n, p in list(inspect.signature(found).parameters.items())[5:] if n != "contraction_dim"
    ]


FORMS = {"m": (2, 3), "n": (3, 2), "k": (2, 2), "batched": (3, 3)}


def operands(form: str, scale_a: Any, scale_b: Any, **options: Any) -> tuple[Quantized, Quantized, dict[str, Any]]:
    ranks = FORMS[form]
    rows, columns = (T if form == "m" else 40), (T if form == "n" else N)
    k = T if form == "k" else K
    x = torch.randn(*((G,) if ranks[0] == 3 else ()), rows, k)
    w = torch.randn(*((G,) if ranks[1] == 3 else ()), columns, k).mT
    cut: dict[str, Any] = {} if form == "batched" else {"ends": OFFS, "jagged": form}
    a = quantize(x, "e4m3", scale_a, **options, **cut)
    b = quantize(w, "e5m2", scale_b, side="b", **options, **cut)
    return a, b, cut


@recipes
@pytest.mark.parametrize("form", FORMS)
def test_row_scales_in_every_mode(form: str) -> None:
    a, b, cut = operands(form, "row", "row")
    want = mg.grouped_gemm(a.data, b.data, scale_a=a.scale, scale_b=b.scale, **cut)
    if form == "k":
        flat = a.scale.t().reshape(-1), b.scale.reshape(-1)
    else:
        flat = a.scale.squeeze(-1), b.scale.squeeze(-2)
    rows = ScalingType.RowWise
    offs = cut.get("ends")
    assert torch.equal(scaled_grouped_mm(a.data, b.data, flat[0], rows, flat[1], rows, offs=offs), want)
    found = scaled_grouped_mm(a.data, b.data, [flat[0]], [rows], [flat[1]], [rows], None, None, None, offs)
    assert torch.equal(found, want)
    assert found.dtype is torch.bfloat16
    with pytest.raises(mg.InvalidProblem, match="for RowWise: it must be"):
        scaled_grouped_mm(a.data, b.data, flat[0][..., :-1], rows, flat[1], rows, offs=offs)


@recipes
@pytest.mark.parametrize("scale", ["tensor", "1x128", "128x128"])
def test_scales_for_which_torch_has_no_grouped_kernel(scale: str) -> None:
    a, b, cut = operands("m", "1x128" if scale == "128x128" else scale, scale)
    names = {"tensor": "TensorWise", "1x128": "BlockWise1x128", "128x128": "BlockWise128x128"}
    recipe = getattr(ScalingType, names[scale])
    recipe_a = ScalingType.BlockWise1x128 if scale == "128x128" else recipe
    turned = b.scale.mT if b.scale.dim() > 1 else b.scale.reshape(1)
    bias = torch.randn(N)
    want = mg.grouped_gemm(
        a.data, b.data, scale_a=a.scale, scale_b=b.scale, bias=bias, accumulate="fast", out_dtype="float32", **cut
    )
    found = scaled_grouped_mm(
        a.data, b.data, a.scale, recipe_a, turned, recipe, bias=bias, offs=OFFS, output_dtype=torch.float32,
        contraction_dim=(-1, -2), use_fast_accum=True,
    )  # fmt: skip
    assert torch.equal(found, want)


class JoinsNoE8m0(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """On a GPU torch joins no tensors of float8_e8m0fnu."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        joins = func in (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
        assert not (joins and args[0][0].dtype is E8M0), func
        return func(*args, **(kwargs or {}))


@recipes
@pytest.mark.parametrize("swizzle", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_mx_scales(form: str, swizzle: bool) -> None:
    a, b, cut = operands(form, "1x32", "1x32", scale_dtype=E8M0)
    want = mg.grouped_gemm(a.data, b.data, scale_a=a.scale, scale_b=b.scale, **cut)
    mx, given = ScalingType.BlockWise1x32, [a.scale, b.scale.mT]
    order = F.SwizzleType.SWIZZLE_32_4_4 if swizzle else F.SwizzleType.NO_SWIZZLE

    def call() -> Tensor:
        return scaled_grouped_mm(a.data, b.data, given[0], mx, given[1], mx, order, order, offs=cut.get("ends"))

    if swizzle and form == "k":
        with pytest.raises(mg.InvalidProblem, match="swizzle_a=SWIZZLE_32_4_4: it belongs to BlockWise1x32"):
            call()
        return
    if swizzle:
        for i, scale in enumerate(given):
            if scale.dim() == 3:
                given[i] = torch.stack([swizzled(one) for one in scale])
            else:  # rows of each group, padded by themselves
                given[i] = torch.cat([swizzled(one) for one in scale.split(SIZES.tolist())])
    with JoinsNoE8m0():  # type: ignore[no-untyped-call]
        found = call()
    assert torch.equal(found, want)


def test_unswizzle_undoes_the_order() -> None:
    scale = torch.arange(130 * 7).to(torch.uint8).view(130, 7)
    assert torch.equal(unswizzle(swizzled(scale), 130, 7), scale)
    with pytest.raises(mg.InvalidProblem, match="a swizzled scale of 130 x 7 holds 2048 numbers"):
        unswizzle(scale, 130, 7)


@recipes
def test_refusals_of_scaled_grouped_mm() -> None:
    a, b, _ = operands("m", "row", "row")
    rows = ScalingType.RowWise
    given = a.scale[:, 0], rows, b.scale[:, 0], rows
    with pytest.raises(mg.InvalidProblem, match="scale_recipe_a=BlockWise1x16"):
        scaled_grouped_mm(a.data, b.data, given[0], ScalingType.BlockWise1x16, *given[2:], offs=OFFS)
    with pytest.raises(mg.InvalidProblem, match="scale_a is a list of 2"):
        scaled_grouped_mm(a.data, b.data, [given[0]] * 2, *given[1:], offs=OFFS)
    with pytest.raises(mg.InvalidProblem, match="contraction_dim"):
        scaled_grouped_mm(a.data, b.data, *given, offs=OFFS, contraction_dim=(-2, -1))
    with pytest.raises(mg.InvalidProblem, match="pass offs"):
        scaled_grouped_mm(a.data, b.data, *given)
    with pytest.raises(mg.InvalidProblem, match="it must have 0 or 1"):
        scaled_grouped_mm(a.data, b.data, a.scale, ScalingType.TensorWise, *given[2:], offs=OFFS)
    with pytest.raises(mg.InvalidProblem, match=r"scale_b has shape \(3, 192\) .* it must be \(3, 192, 2\)"):
        scaled_grouped_mm(a.data, b.data, *given[:2], given[2], ScalingType.BlockWise1x128, offs=OFFS)


@recipes
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", ["1x32", "1x128", "128x128"])
def test_a_block_scale_of_another_shape_is_named_as_it_was_given(block: str, form: str) -> None:
    """In the layout of the call, not in that of a problem."""
    if block == "128x128" and form in "nk":
        return
    a, b, cut = operands(form, "1x32" if block == "1x32" else "1x128", block)
    of_b, scale = getattr(ScalingType, f"BlockWise{block}"), b.scale.mT
    of_a = of_b if block == "1x32" else ScalingType.BlockWise1x128
    want = mg.grouped_gemm(a.data, b.data, scale_a=a.scale, scale_b=b.scale, **cut)
    assert torch.equal(scaled_grouped_mm(a.data, b.data, a.scale, of_a, scale, of_b, offs=cut.get("ends")), want)
    other = scale[..., :-1]
    with pytest.raises(mg.InvalidProblem) as raised:
        scaled_grouped_mm(a.data, b.data, a.scale, of_a, other, of_b, offs=cut.get("ends"))
    assert f"scale_b has shape {tuple(other.shape)} for BlockWise{block} of b with" in str(raised.value)
    assert f"it must be {tuple(scale.shape)}, columns before K" in str(raised.value)


@recipes
def test_blocks_of_rows_that_offs_cuts_are_refused() -> None:
    a, b, _ = operands("m", "1x128", "128x128")
    square = ScalingType.BlockWise128x128
    with pytest.raises(mg.InvalidProblem, match="and offs cuts its rows: use BlockWise1x128"):
        scaled_grouped_mm(a.data, b.data, torch.ones(3, 2), square, b.scale.mT, square, offs=OFFS)


# --- DeepGEMM ---------------------------------------------------------------------------------------


def padded(sizes: list[int], step: int) -> Tensor:
    """The group of each row, groups padded to a multiple of `step` rows."""
    parts = [torch.cat([torch.full((m,), g), torch.full((-m % step,), -1)]) for g, m in enumerate(sizes)]
    return torch.cat(parts).to(torch.int32)


def weights() -> Quantized:
    """[G, K, N], contiguous along K."""
    return quantize(torch.randn(G, K, N), "e4m3", "128x128", side="b")


@pytest.mark.parametrize("packed", [False, True], ids=["float32", "int32"])
@pytest.mark.parametrize(("sizes", "step"), [([130, 0, 40], 128), ([0, 5, 7], 1), ([3, 9, 0], 16), ([0, 0, 0], 16)])
def test_contiguous_groups(sizes: list[int], step: int, packed: bool) -> None:
    layout, b = padded(sizes, step), weights()
    x = torch.randn(len(layout), K)
    x[layout < 0] = torch.nan
    a = quantize(x, "e4m3", "1x128", scale_dtype=E8M0 if packed else torch.float32)
    scale = a.scale
    if packed:
        held = torch.zeros(len(layout), 4, dtype=torch.uint8)
        held[:, :2] = a.scale.view(torch.uint8)
        scale = held.view(torch.int32)
    rows = layout >= 0
    want = mg.grouped_gemm(a.data[rows], b.data, sizes=sizes, scale_a=a.scale[rows], scale_b=b.scale, backend="cpu")
    d = torch.full((len(layout), N), 7.0, dtype=torch.bfloat16)
    call = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    call((a.data, scale), (b.data.mT, b.scale.mT), d, layout, recipe=(1, 128, 128), backend="cpu")
    assert torch.equal(d[rows], want)
    behind = rows.flip(0).cummax(0).values.flip(0)
    assert bool((d[~behind] == 7).all())
    if packed:
        return
    again = torch.empty_like(d)
    deep_gemm.m_grouped_fp8_gemm_nn_contiguous((a.data, scale), (b.data, b.scale), again, layout, backend="cpu")
    assert torch.equal(again[rows], want)


def test_masked_groups() -> None:
    b, valid = weights(), torch.tensor([3, 0, 8], dtype=torch.int32)
    a = quantize(torch.randn(G, 8, K), "e4m3", "1x128")
    want = mg.grouped_gemm(a.data, b.data, valid_rows=valid, scale_a=a.scale, scale_b=b.scale, backend="cpu")
    d = torch.full((G, 8, N), 7.0, dtype=torch.bfloat16)
    call = deep_gemm.m_grouped_fp8_gemm_nt_masked
    call((a.data, a.scale), (b.data.mT, b.scale.mT), d, valid, 4, backend="cpu")
    for g, rows in enumerate(valid.tolist()):
        assert torch.equal(d[g, :rows], want[g, :rows])
        assert bool((d[g, rows:] == 7).all())


@pytest.mark.parametrize("e8m0", [False, True])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("ks", [[128, 0, 256], [100, 3, 70]])
def test_weight_gradients(ks: list[int], block: int, e8m0: bool) -> None:
    """K of a group need not be a multiple of anything."""
    total, m, n = sum(ks), 48, 40
    cut: Any = {"sizes": ks, "jagged": "k", "scale_dtype": E8M0 if e8m0 else torch.float32}
    a = quantize(torch.randn(total, m).mT, "e4m3", f"1x{block}", **cut)
    b = quantize(torch.randn(total, n), "e4m3", f"1x{block}", side="b", **cut)
    c = torch.randn(G, m, n)
    want = mg.grouped_gemm(
        a.data, b.data, sizes=ks, jagged="k", scale_a=a.scale, scale_b=b.scale, c=c, backend="cpu", out_dtype="float32"
    )
    starts = [sum(ks[:g]) for g in range(G)]
    used = [s // block + g + j for g, (s, k) in enumerate(zip(starts, ks, strict=True)) for j in range(-(-k // block))]
    sfa, sfb = a.scale.view(torch.uint8 if e8m0 else torch.float32)[:, used].mT, b.scale[used]
    sfa = sfa.contiguous().view(a.scale.dtype)
    layout, d = torch.tensor(ks, dtype=torch.int32), c.clone()
    for ks_cpu in (ks, None):
        d = c.clone()
        deep_gemm.k_grouped_fp8_gemm_tn_contiguous(
            (a.data.mT, sfa), (b.data, sfb), d, ks_cpu, layout, d, (1, 1, block), backend="cpu"
        )
        assert torch.equal(d, want)
    flat = [torch.cat([x.reshape(-1) for x in t.view(torch.uint8).split(ks, 1)]).view(a.data.dtype)
            for t in (a.data, b.data.mT)]  # fmt: skip
    d = torch.empty(G, m, n)
    call = deep_gemm.k_grouped_fp8_gemm_nt_contiguous
    call((flat[0], sfa.mT), (flat[1], sfb.mT), d, ks, layout, c, (1, 1, block), backend="cpu")
    torch.testing.assert_close(d, want, rtol=1e-5, atol=1e-4)


def test_refusals_of_deep_gemm() -> None:
    b = weights()
    a = quantize(torch.randn(4, K), "e4m3", "1x128")
    pairs, d = ((a.data, a.scale), (b.data.mT, b.scale.mT)), torch.empty(4, N, dtype=torch.bfloat16)
    call = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    for layout, text in (
        ([0, 2, 1, -1], "must ascend from 0 to at most 2"),
        ([0, 1, 2, 3], "must ascend from 0 to at most 2"),
        ([0, 1], "must hold the group of each of the 4 rows"),
    ):
        with pytest.raises(mg.InvalidProblem, match=text):
            call(*pairs, d, torch.tensor(layout))
    with pytest.raises(mg.InvalidProblem, match="use_psum_layout"):
        call(*pairs, d, torch.tensor([2, 3, 4]), use_psum_layout=True)
    with pytest.raises(mg.InvalidProblem, match="fits no block of 128, 64 or 32"):
        call((a.data, torch.zeros(4, 5, dtype=torch.int32)), pairs[1], d, torch.tensor([0, 0, 1, 2]))
    wide = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(mg.InvalidProblem, match="packed by group"):
        deep_gemm.k_grouped_fp8_gemm_tn_contiguous((a.data, wide), (a.data, wide), d, [2, 2], torch.tensor([2, 2]))
