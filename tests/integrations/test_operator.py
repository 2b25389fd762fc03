"""The torch operator says what the rest of multigemm says, and torch's own checks of operators accept it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.api import traced_grouped_gemm
from multigemm.integrations import grouped_gemm
from multigemm.nn import GroupedLinear
from multigemm.planning import launch_cache
from tests.support.python_process import run_python
from tests.support.torch_op_cases import FORMS, bias_shapes, operands, result_shape

OP = torch.ops.multigemm.grouped_gemm


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_operator_gives_the_bits_of_solve(form: str, activation: str | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a, b, cut = operands(form, dtype)
        bias = torch.linspace(-1, 1, steps=bias_shapes(form)[0][0]).to(dtype)
        c = torch.randn(result_shape(form)).to(dtype)
        options: dict[str, Any] = {"alpha": 0.5, "beta": 2.0, "activation": activation, "out_dtype": torch.float32}
        problem = mg.GroupedGemmProblem(a, b, bias=bias, c=c, **cut, **options)
        want = mg.solve(problem)
        for _ in range(2):  # the whole way, then the remembered one
            assert torch.equal(OP(a, b, bias=bias, c=c, **cut, **options), want)
        assert mg.verify(problem, want).ok


@pytest.mark.parametrize("kind", ["offsets", "sizes", "ends"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_each_way_to_cut(kind: str, index: torch.dtype) -> None:
    a, b, _ = operands("jagged_m")
    values = {"offsets": [0, 2, 2, 6], "sizes": [2, 0, 4], "ends": [2, 2, 6]}[kind]
    cut = {kind: torch.tensor(values, dtype=index)}
    given: dict[str, Any] = {kind: values}
    want = mg.grouped_gemm(a, b, **given)
    assert torch.equal(OP(a, b, **cut), want)
    assert torch.equal(OP(a, b, **cut), want)
    strided = torch.tensor(values, dtype=index).repeat_interleave(3)[::3]
    assert torch.equal(OP(a, b, **{kind: strided}), want)


def test_int8_mixed_dtypes_and_named_backends() -> None:
    a = torch.randint(-5, 5, (6, 4), dtype=torch.int8)
    b = torch.randint(-5, 5, (2, 4, 3), dtype=torch.int8)
    ends = torch.tensor([2, 6])
    assert torch.equal(OP(a, b, ends=ends), mg.grouped_gemm(a, b, ends=ends))
    x, y = torch.randn(6, 4, dtype=torch.float16), torch.randn(2, 4, 3, dtype=torch.bfloat16)
    for _ in range(2):
        assert torch.equal(OP(x, y, ends=ends, backend="cpu"), mg.grouped_gemm(x, y, ends=ends))
    assert torch.equal(OP(x, y, ends=ends, backend="cupy,cpu"), mg.grouped_gemm(x, y, ends=ends))
    with pytest.raises(mg.InvalidSetting, match="did you mean 'cpu'"):
        OP(x, y, ends=ends, backend="cpuu")


def test_a_remembered_call_still_reads_new_values() -> None:
    launch_cache.clear()
    a, b, _ = operands("jagged_m")
    ends = torch.tensor([2, 4, 7])
    for _ in range(3):
        first = OP(a, b, ends=ends)
    ends.copy_(torch.tensor([0, 7, 7]))
    assert torch.equal(OP(a, b, ends=ends), mg.grouped_gemm(a, b, ends=[0, 7, 7]))
    assert torch.equal(first, mg.grouped_gemm(a, b, ends=[2, 4, 7]))
    with pytest.raises(mg.InvalidProblem, match="past the jagged extent"):
        OP(a, b, ends=torch.tensor([0, 7, 8]))
    rows = torch.tensor([4, 0, 2])
    x, y, _ = operands("masked")
    OP(x, y, valid_rows=rows)
    with pytest.raises(mg.InvalidProblem, match="rows of a"):
        OP(x, y, valid_rows=rows + 3)


def warm() -> tuple[Tensor, Tensor, Tensor]:
    """Operands of a call that the launch cache serves."""
    a, b, ends = torch.randn(6, 4), torch.randn(2, 4, 3), torch.tensor([2, 6])
    for _ in range(3):
        OP(a, b, ends=ends, backend="cpu")
    return a, b, ends


def test_a_call_like_an_earlier_one_does_not_cross_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, ends = warm()
    want = mg.grouped_gemm(a, b, ends=ends)
    monkeypatch.setattr(OP, "_op", None)  # torch's entry to the dispatcher
    assert torch.equal(OP(a, b, ends=ends, backend="cpu"), want)
    assert torch.equal(OP(a, b, None, None, ends, alpha=1.0, backend="cpu", grad_backend="auto"), want)
    with pytest.raises(TypeError):
        OP(a, b, ends=torch.tensor([3, 6]), backend="cpu")


def test_who_watches_operators_sees_remembered_calls_too() -> None:
    a, b, ends = warm()

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with Seen():
        OP(a, b, ends=ends, backend="cpu")
    assert any("grouped_gemm" in name for name in names)
    with torch.profiler.profile() as profile:
        OP(a, b, ends=ends, backend="cpu")
    assert any(event.key == "multigemm::grouped_gemm" for event in profile.key_averages())
    traced = torch.jit.trace(lambda x: OP(x, b, ends=ends, backend="cpu"), (a,))  # type: ignore[no-untyped-call]
    assert "multigemm::grouped_gemm" in str(traced.graph)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: OP(x, b, ends=ends, backend="cpu"))(a)
    assert "multigemm.grouped_gemm" in graph.code
    with torch.autocast("cpu", torch.bfloat16):
        assert OP(a, b, ends=ends, backend="cpu").dtype is torch.bfloat16


@pytest.mark.slow
def test_an_import_within_a_transform_leaves_calls_outside_of_it_remembered() -> None:
    text = (
        "import torch\n"
        "def importing(x):\n"
        "    import multigemm.integrations\n"
        "    return x\n"
        "torch.func.vmap(importing)(torch.ones(2))\n"
        "from multigemm.torch_internals import in_transform\n"
        "inside = torch.func.vmap(lambda x: x + in_transform())(torch.zeros(2))\n"
        "with torch.inference_mode():\n"
        "    print(inside.tolist(), in_transform())\n"
        "print(in_transform())\n"
    )
    assert run_python("-c", text).stdout.split("\n") == ["[1.0, 1.0] False", "False", ""]


def test_remembered_calls_refuse_what_others_refuse() -> None:
    a, b, ends = warm()
    slips: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"tokens": 6}, mg.UnknownKeyword),
        ({"backend": ["cpu"]}, mg.InvalidProblem),
        ({"ends": [2, 6]}, mg.InvalidProblem),
        ({"alpha": "1"}, RuntimeError),
    ]
    for wrong, error in slips:
        with pytest.raises(error):
            OP(a, b, **{"ends": ends, "backend": "cpu", **wrong})
    with pytest.raises(TypeError, match=r"multigemm::grouped_gemm\(\) missing 1 required positional argument: 'b'"):
        OP(a)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"jagged": "x", "ends": torch.tensor([1, 2, 3])}, "jagged"),
    ({"ends": torch.tensor([1, 2])}, "groups"),
    ({"ends": torch.tensor([1, 2, 3]), "beta": 1.0}, "needs c"),
    ({"ends": torch.tensor([1, 2, 3]), "c": torch.zeros(2, 2)}, "c has shape"),
    ({"ends": torch.tensor([1, 2, 3]), "bias": torch.zeros(5)}, "bias"),
    ({"ends": torch.tensor([1, 2, 3]), "out_dtype": torch.int32}, "cannot be"),
    ({"ends": torch.tensor([1, 2, 3]), "sizes": torch.tensor([1, 1, 1])}, "exactly one"),
    ({"ends": torch.tensor([1, 2, 3]), "alpha": float("nan")}, "alpha=nan; it must be finite"),
    ({"ends": torch.tensor([1, 2, 3]), "alpha": 1e-46}, "alpha=1e-46 multiplies in float32"),
    ({"ends": torch.tensor([1, 2, 3]), "activation": "swish"}, "activation='swish' is unknown"),
    ({"ends": torch.tensor([1, 2, 3]), "precision": "fp32"}, "precision='fp32' is unknown"),
]


@pytest.mark.parametrize(("keywords", "words"), REFUSED)
def test_bad_calls_are_refused_with_and_without_data(keywords: dict[str, Any], words: str) -> None:
    a, b, _ = operands("jagged_m", torch.float32)
    with pytest.raises(mg.InvalidProblem, match=words):
        OP(a, b, **keywords)
    fake = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in keywords.items()}
    with pytest.raises(mg.InvalidProblem, match=words):
        OP(a.to("meta"), b.to("meta"), **fake)


def test_vmap_is_refused_with_a_remedy() -> None:
    a, b, _ = operands("batched")
    with pytest.raises(mg.InvalidProblem, match="put the mapped dimension into the groups"):
        torch.vmap(grouped_gemm)(a.unsqueeze(1), b.unsqueeze(1))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form: str) -> None:
    a, b, cut = operands(form, torch.float32)
    a, b = a.requires_grad_(), b.requires_grad_()
    bias = torch.randn(bias_shapes(form)[-1], requires_grad=True)
    c = torch.randn(result_shape(form), requires_grad=True)
    cuts = [cut.pop(name, None) for name in ("offsets", "sizes", "ends", "valid_rows")]
    torch.library.opcheck(OP.default, (a, b, *cuts, c, bias), {**cut, "beta": 0.5, "activation": "silu"})


def test_autocast_lowers_the_operands_and_keeps_a_float32_bias() -> None:
    a, b, cut = operands("jagged_m", torch.float32)
    bias = torch.randn(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = OP(a, b, bias=bias, **cut)
        wide = OP(a.double(), b.double(), **cut)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, OP(a.bfloat16(), b.bfloat16(), bias=bias, **cut))
    assert wide.dtype is torch.float64
    weight = b.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        OP(a, weight, **cut).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32


def test_export_keeps_the_token_count_dynamic() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 4, 5))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return grouped_gemm(x, self.weight, ends=ends, activation="relu")

    layer, ends = Layer(), torch.tensor([2, 2, 6])
    tokens = torch.export.Dim("tokens", min=2, max=1000)
    program = torch.export.export(layer, (torch.randn(6, 4), ends), dynamic_shapes=({0: tokens}, None))
    x = torch.randn(17, 4)
    assert torch.equal(program.module()(x, ends), layer(x, ends))


# --- what `grouped_gemm` becomes inside torch.compile, called directly ------------------------------------


@pytest.mark.parametrize("offsets", [[0, 2, 5], torch.tensor([0, 2, 5])])
def test_a_traced_call_is_the_operator(offsets: Any) -> None:
    a, b = torch.randn(5, 4), torch.randn(2, 4, 3)
    want = mg.grouped_gemm(a, b, offsets=[0, 2, 5])
    torch.testing.assert_close(traced_grouped_gemm(a, b, offsets=offsets), want)
    torch.testing.assert_close(traced_grouped_gemm(a, b, offsets=offsets, backend=["cpu"]), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert traced_grouped_gemm(a, b, offsets=offsets).dtype is torch.float32
    assert traced_grouped_gemm(a, b, offsets=offsets, out_dtype="bfloat16").dtype is torch.bfloat16
    torch.testing.assert_close(traced_grouped_gemm(a, b, sizes=range(2, 4)), want)
    assert traced_grouped_gemm(a, b[:0], sizes=[]).shape == (5, 3)


@pytest.mark.parametrize("keywords", [{"out": torch.ones(5, 3)}, {"config": {"kernel": "blas"}}, {"check": "full"}])
def test_what_a_graph_cannot_hold_is_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(mg.InvalidProblem, match="cannot be compiled"):
        traced_grouped_gemm(torch.ones(5, 4), torch.ones(4, 3), **keywords)
    with pytest.raises(mg.InvalidProblem, match="cannot be compiled"):
        traced_grouped_gemm([torch.ones(5, 4)], [torch.ones(4, 3)])


def test_a_freed_operand_is_refused_by_a_warm_operator_and_a_warm_layer() -> None:
    a, b, ends, bias = torch.randn(9, 4), torch.randn(3, 4, 5), torch.tensor([2, 2, 7]), torch.zeros(5)
    layer, freed = GroupedLinear(3, 4, 5, backend="cpu"), a.clone()
    freed.untyped_storage().resize_(0)
    with torch.no_grad():
        for _ in range(3):
            OP(a, b, ends=ends, backend="cpu")
            OP(a, b, ends=ends, bias=bias, backend="cpu")
            layer(a, ends=ends)
        bias.untyped_storage().resize_(0)
        with pytest.raises(mg.InvalidProblem, match="memory was freed"):
            OP(freed, b, ends=ends, backend="cpu")
        with pytest.raises(mg.InvalidProblem, match="memory was freed"):
            OP(a, b, ends=ends, bias=bias, backend="cpu")
        with pytest.raises(mg.InvalidProblem, match="memory was freed"):
            layer(freed, ends=ends)


def test_warm_calls_read_their_own_scales() -> None:
    draw, served = torch.Generator().manual_seed(2), launch_cache.LAUNCHES.served
    for call in range(4):
        a, b = (
            torch.randint(-7, 8, shape, generator=draw).float().to(torch.float8_e4m3fn)
            for shape in ((9, 200), (3, 200, 5))
        )
        scale_a, scale_b = (torch.exp2(torch.randint(-3, 4, shape, generator=draw).float()) for shape in ((9, 2), (3,)))
        sizes = torch.tensor([4, 0, 5])
        scales: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b}
        accumulate = "fast" if call == 3 else "promoted"  # which makes it another call
        result = OP(a, b, sizes=sizes, **scales, backend="cpu", accumulate=accumulate)
        assert mg.verify(mg.GroupedGemmProblem(a, b, sizes=sizes, **scales), result)
    assert launch_cache.LAUNCHES.served == served + 1
