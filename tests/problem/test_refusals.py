"""Every refusal: what is wrong is named with the value seen, no traceback comes from below, nothing is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import multigemm as mg
from multigemm.backends.cpu.config import Config as CpuConfig
from multigemm.backends.cupy.config import Config as CuPyConfig
from tests.support.fake_backends import Fake, Tile
from tests.support.problem_cases import CUT, A, B, refuse, refuse_problem


@pytest.mark.parametrize("x", [None, "text", 3.5, {"a": 1}, object()])
def test_things_that_are_no_arrays(x: Any) -> None:
    refuse_problem("a is a", x, B, offsets=CUT)
    refuse_problem("b is a", A, x, offsets=CUT)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"offsets": [0, 2, 5]}, "offsets has length 3; the operands have 3 groups"),
        ({"offsets": []}, "offsets has length 0"),
        ({"offsets": [0, 5, 2, 10]}, r"offsets\[2\] is 2, less than offsets\[1\] = 5"),
        ({"offsets": [0, 2, 5, 11]}, r"offsets\[3\] is 11, past the jagged extent 10"),
        ({"offsets": [-1, 2, 5, 10]}, r"offsets\[0\] is -1"),
        ({"offsets": [0.0, 2, 5, 10]}, "offsets holds 0.0"),
        ({"offsets": [True, 2, 5, 10]}, "offsets holds True"),
        ({"offsets": [0, 2, 5, 2**70]}, "fit in 64 bits"),
        ({"offsets": "0,2,5"}, "offsets='0,2,5' is text: pass a list, an int32 or int64 array"),
        ({"sizes": 10}, "sizes is of type int; it must be a vector of integers: a list, an int32 or int64 array"),
        ({"sizes": iter([2, 3, 5])}, "sizes is of type list_iterator; it must be a vector of integers: a list"),
        ({"sizes": {2, 3, 5}}, "sizes is of type set; it must be a vector of integers: a list"),
        ({"sizes": list(torch.tensor([2, 3, 5], device="meta"))}, "sizes holds a tensor on meta.*: pass torch.stack"),
        ({"offsets": torch.tensor([0, 2, 5, 10], dtype=torch.int16)}, "dtype torch.int16; it must be int32 or int64"),
        ({"offsets": torch.tensor([0.0, 2, 5, 10])}, "dtype torch.float32"),
        ({"offsets": torch.tensor([[0, 2, 5, 10]])}, "2 dimensions"),
        ({"offsets": 5}, "offsets is of type int"),
        ({"sizes": [2, -1, 3]}, r"sizes\[1\] is -1"),
        ({"sizes": [2, 3, 6]}, "add up to 11, the jagged extent is 10"),
        ({"sizes": [2, 3]}, "sizes has length 2"),
        ({"ends": [2, 1, 10]}, r"ends\[1\] is 1, less than"),
        ({"ends": [2, 5, 12]}, "past the jagged extent"),
        ({"offsets": CUT, "sizes": [2, 3, 5]}, "offsets and sizes were given together"),
        ({"offsets": CUT, "ends": [2, 5, 10]}, "offsets and ends were given together"),
        ({"offsets": CUT, "valid_rows": [1, 1, 1]}, "valid_rows and offsets, sizes or ends were given together"),
        ({"offsets": CUT, "jagged": "x"}, "jagged='x'"),
        ({"offsets": CUT, "activation": "swish"}, "did you mean 'silu'"),
        ({"offsets": CUT, "activation": "gelu_pytorch_tanh"}, "did you mean 'gelu_tanh'"),
        ({"offsets": CUT, "activation": "rellu"}, "use one of 'relu', .*'silu', .*'glu'; did you mean 'relu'"),
        ({"offsets": CUT, "precision": "fp32"}, "use one of 'ieee', 'tf32'"),
        ({"offsets": CUT, "check": "ful"}, "did you mean 'full'"),
        ({"offsets": CUT, "deterministic": 1}, "deterministic=1"),
        ({"offsets": CUT, "alpha": "1"}, "alpha='1'"),
        ({"offsets": CUT, "alpha": 1j}, "alpha"),
        ({"offsets": CUT, "beta": 1.0}, "beta=1.0 needs c"),
        ({"offsets": CUT, "c": torch.ones(10, 4)}, r"c has shape \(10, 4\); it must be \(10, 5\)"),
        ({"offsets": CUT, "c": torch.ones(10, 5, dtype=torch.float64), "beta": 1.0}, "c has dtype torch.float64"),
        ({"offsets": CUT, "c": [torch.ones(10, 5)]}, "c is a list"),
        ({"offsets": CUT, "bias": torch.ones(4)}, r"bias has shape \(4,\)"),
        ({"offsets": CUT, "bias": torch.ones(2, 5)}, r"bias has shape \(2, 5\)"),
        ({"offsets": CUT, "bias": [torch.ones(5)] * 3}, "bias is a list"),
        ({"offsets": CUT, "bias": torch.ones(5, dtype=torch.int32)}, "bias has dtype torch.int32"),
        ({"offsets": CUT, "out": torch.ones(10, 4)}, r"out has shape \(10, 4\)"),
        (
            {"offsets": CUT, "out": torch.ones(10, 5, dtype=torch.int32)},
            "out has dtype torch.int32; the result of torch.float32 products cannot be torch.int32: pass out as "
            "bfloat16, float16, float32, float64",
        ),
        ({"offsets": CUT, "out": torch.ones(10, 5), "out_dtype": torch.float16}, "pass one of them"),
        ({"offsets": CUT, "out": torch.ones(1, 5).expand(10, 5)}, "overlaps itself"),
        ({"offsets": CUT, "out_dtype": "floaty"}, "not a dtype"),
        ({"offsets": CUT, "out_dtype": torch.int8}, "out_dtype is torch.int8; .* cannot be torch.int8: use bfloat16"),
        ({}, "the form batched takes"),
    ],
)
def test_bad_keywords(kwargs: dict[str, Any], match: str) -> None:
    refuse_problem(match, A, B, **kwargs)


@pytest.mark.parametrize(
    ("a", "b", "kwargs", "match"),
    [
        (torch.ones(10, 3), B, {"offsets": CUT}, "the last extent of a, 3, must equal"),
        (torch.ones(10, 3), torch.ones(4, 5), {}, r"a has shape \(10, 3\) and b \(4, 5\): the last extent of a, 3"),
        (torch.ones(10), B, {"offsets": CUT}, r"a has shape \(10,\)"),
        (torch.ones(2, 10, 4), B, {"offsets": CUT}, "the form jagged_m takes"),
        (torch.ones(2, 10, 4), B, {}, "a has 2 groups and b has 3"),
        (A.int(), B, {"offsets": CUT}, "a has dtype torch.int32; supported"),
        (A.to(torch.int8), B, {"offsets": CUT}, "int8 multiplies int8 only"),
        (A.to_sparse(), B, {"offsets": CUT}, r"call .to_dense\(\)"),
        (A.to("meta"), B, {"offsets": CUT}, "a is on meta"),
        (A.numpy(), B, {"offsets": CUT}, "b is a torch array and a is a numpy array"),
        ([A], A, {}, r"b is a Tensor and a is a list: pass \[b\] \* G"),
        ([A], torch.nn.ParameterList([B[0]]), {}, r"b is a ParameterList and a is a list: pass .* or list\(b\)"),
        (A, list(B), {"offsets": CUT}, "a is a Tensor and b is a list: stack b where sizes cut a, or split a"),
        ([A], [A.T, A.T], {}, "a has 1 matrices and b has 2"),
        ([A], [A], {}, "inner extents 4 and 10"),
        ([A[None]], [A], {}, "both must be matrices"),
        ([A, A.half()], [A.T, A.T], {}, "a mixes"),
        ([A], [A.T], {"offsets": [0, 10]}, "a list is cut already"),
        ([A], [A.T], {"jagged": "k"}, "leave it out"),
        ([A], [A.T], {"out": torch.ones(10, 10)}, "needs a list of 1 matrices"),
        ([A, A], [A.T, A.T], {"out": [torch.ones(10, 10)] * 2}, r"out\[0\] and out\[1\] share an element"),
        ([A], [A.T], {"bias": [torch.ones(10)] * 2}, "bias has 2 entries"),
        ([[1.0]], [[1.0]], {}, r"a\[0\] is a list"),
        (torch.ones(3, 2, 4), B, {"valid_rows": [0, 1, 3]}, r"valid_rows\[2\] is 3; it must lie in 0..2"),
        (torch.ones(3, 2, 4), B, {"valid_rows": [0, 1]}, "valid_rows has length 2"),
        (A, torch.ones(4, 5), {"offsets": []}, "offsets is empty"),
    ],
)
def test_bad_operands(a: Any, b: Any, kwargs: dict[str, Any], match: str) -> None:
    refuse_problem(match, a, b, **kwargs)


@pytest.mark.parametrize("b", [[B[0].numpy()], [B[0], B[1].numpy()], [1.0]])
def test_lists_of_two_lengths_are_counted_before_they_are_read(b: list[Any]) -> None:
    """Where a has no matrix, none of b can be unlike it."""
    refuse_problem(f"a has 0 matrices and b has {len(b)}: a list problem needs as many of each", [], b)
    refuse_problem(f"a has {len(b)} matrices and b has 0", b, [])


@pytest.mark.gpu
def test_lists_without_a_matrix_have_no_device() -> None:
    refuse_problem("a has 0 matrices and b has 1: a list problem needs as many of each", [], [B[0].cuda()])
    assert mg.grouped_gemm([], [], bias=torch.ones(5, device="cuda")) == []
    x = torch.ones(2, 2)
    refuse_problem("bias is on cuda:0 and a is on cpu", [x], [x], bias=torch.ones(2, device="cuda"))


def test_the_dtype_of_a_list_of_outputs() -> None:
    refuse_problem("out has dtype torch.int64; the result of torch.float64", [A.double()], [A.T.double()],
           out=[torch.ones(10, 10, dtype=torch.int64)])  # fmt: skip


def test_int8_rules() -> None:
    a, b = A.to(torch.int8), B.to(torch.int8)
    refuse_problem("alpha=0.5 with int8", a, b, offsets=CUT, alpha=0.5)
    refuse_problem("alpha=nan with int8", a, b, offsets=CUT, alpha=float("nan"))
    refuse_problem("only 'relu'", a, b, offsets=CUT, activation="gelu")
    refuse_problem("float32; it must be int32 beside int8 operands: convert it", a, b, offsets=CUT, bias=torch.ones(5))
    refuse_problem("cannot be torch.float32: use int32", a, b, offsets=CUT, out_dtype=torch.float32)
    refuse_problem("out has dtype torch.float32; .* pass out as int32", a, b, offsets=CUT, out=torch.ones(10, 5))


def test_read_only_and_negative_outputs() -> None:
    out = np.ones((10, 5), np.float32)
    refuse_problem("negative", A.numpy(), B.numpy(), offsets=CUT, out=out[::-1])
    out.flags.writeable = False
    refuse_problem("read-only", A.numpy(), B.numpy(), offsets=CUT, out=out)


def test_foreign_byte_order() -> None:
    refuse_problem("foreign byte order", np.ones((2, 3), ">f4"), np.ones((3, 2), np.float32))


def test_gradients_are_not_lost_silently() -> None:
    a = A.clone().requires_grad_()
    with torch.no_grad():
        assert mg.grouped_gemm(a, B, offsets=CUT).shape == (10, 5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf")])
def test_a_factor_that_is_no_number_is_refused(value: float) -> None:
    """Its product with an empty sum, which must be zero, would be NaN."""
    match = f"{float(value)}; it must be finite"
    refuse_problem(f"alpha={match}", A, B, offsets=CUT, alpha=value)
    refuse_problem(f"beta={match}", A, B, offsets=CUT, beta=value, c=torch.ones(10, 5))
    refuse_problem(f"alpha={match}", A.double(), B.double(), offsets=CUT, alpha=value)
    refuse_problem(f"alpha={match}", [], [], alpha=value)
    refuse_problem(f"alpha={match}", A[:, :0], B[:, :0], offsets=CUT, alpha=value)


def test_a_factor_that_float32_would_lose_is_refused() -> None:
    """float32 keeps few digits of 1e-40 and none of 1e-46, and a sum may well be 1e38."""
    for value in (1e-40, -1e-46, 5e-324):
        refuse_problem(f"alpha={value} multiplies in float32", A, B, offsets=CUT, alpha=value)
        refuse_problem(f"beta={value} multiplies in float32", A, B, offsets=CUT, beta=value, c=torch.ones(10, 5))
        assert mg.GroupedGemmProblem(A.double(), B.double(), offsets=CUT, alpha=value).alpha == value
    smallest = torch.finfo(torch.float32).tiny
    assert mg.GroupedGemmProblem(A, B, offsets=CUT, alpha=-smallest).alpha == -smallest
    problem = mg.GroupedGemmProblem(torch.full((4, 3), 1e19), torch.full((1, 3, 2), 1e19), sizes=[4], alpha=smallest)
    assert mg.verify(problem, mg.solve(problem)).ok


def test_unknown_backend_names_the_nearest() -> None:
    problem = mg.GroupedGemmProblem(A, B, offsets=CUT)
    with pytest.raises(mg.InvalidSetting, match="did you mean 'triton'"):
        mg.solve(problem, backend="tritton")
    with pytest.raises(mg.InvalidSetting, match="names no backend"):
        mg.solve(problem, backend=[])
    with pytest.raises(mg.UnknownBackend, match="unknown backend 'cpuu': did you mean 'cpu'"):
        mg.solve(problem, backend=["cpu", "cpuu"])  # also where a name before it would do
    with pytest.raises(mg.UnknownBackend, match="did you mean 'cpu'"):
        mg.solve(problem, backend="CPU")
    with pytest.raises(mg.UnknownBackend, match=r"pass several names as a list, \['triton', 'cpu'\]"):
        mg.solve(problem, backend="triton,cpu")
    with pytest.raises(mg.UnknownBackend, match="'auto' chooses among all: name nothing else"):
        mg.plan(problem, backend=["cpu", "auto"])
    with pytest.raises(mg.InvalidSetting, match="config has kernel=None, a NoneType; it must be of type str"):
        mg.solve(problem, backend="cpu", config={"kernel": None})
    for wrong in ("fast", 3, (1,), CuPyConfig(), CpuConfig):
        with pytest.raises(
            mg.InvalidSetting, match="is no config of this backend: pass its Config, or a mapping of some"
        ):
            mg.solve(mg.GroupedGemmProblem(A, B, offsets=CUT), backend="cpu", config=wrong)
    with pytest.raises(mg.InvalidSetting, match="config has no field 'tile'"):
        mg.solve(problem, backend="cpu", config={"tile": 3})


UNTYPED: Any = CpuConfig
UNTYPED_TILE: Any = Tile


class Foreign:
    """An array of a library whose interface fails."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)


class FailingDlpack:
    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("it is read-only")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _on_no_device() -> Foreign:
    return Foreign(__cuda_array_interface__={"shape": (10, 4), "typestr": "<f4", "data": (4096, False), "version": 3})


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (FailingDlpack(), "BufferError: it is read-only"),
        (Foreign(__dlpack__=None), "whose __dlpack__ torch cannot take"),
        (torch.Tensor, "not an array"),
        (np.ma.masked_array(A.numpy(), mask=True), "masked array"),
        (np.zeros((10, 4), "V0"), "torch cannot hold"),
    ],
)
def test_arrays_that_are_none_for_a_product(x: Any, match: str) -> None:
    refuse(match, lambda: mg.GroupedGemmProblem(x, B, offsets=CUT))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([A, A], layout=layout)
    refuse("a is a nested tensor: pass its matrices as a list", lambda: mg.grouped_gemm(nested, B, offsets=CUT))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_a_device_array_without_a_device() -> None:
    refuse("torch sees no CUDA device here", lambda: mg.GroupedGemmProblem(_on_no_device(), B, offsets=CUT))


def test_tensors_without_memory() -> None:
    with FakeTensorMode():
        fake = torch.empty(10, 4)
    refuse("FakeTensor without memory", lambda: mg.grouped_gemm(fake, B, offsets=CUT))
    refuse("under vmap", lambda: torch.vmap(lambda x: mg.grouped_gemm(x, B, offsets=CUT))(A.expand(2, 10, 4)))


@pytest.mark.parametrize("first", [0, 1])
def test_tensors_whose_memory_was_freed(first: int) -> None:
    """As sharded training does with the weights that a layer does not need now."""
    whole = torch.ones(41)
    freed, row, none = whole[first:][:40].view(10, 4), whole[first:][:5], whole[first:][:0].view(0, 4)
    whole.untyped_storage().resize_(0)
    refuse("a has 40 elements and its memory was freed", lambda: mg.grouped_gemm(freed, B, offsets=CUT))
    refuse("bias has 5 elements", lambda: mg.grouped_gemm(A, B, offsets=CUT, bias=row))
    refuse(r"b\[0\] has 40 elements", lambda: mg.grouped_gemm([A.T], [freed]))
    assert mg.grouped_gemm(none, B, sizes=[0, 0, 0]).shape == (0, 5)


def test_forward_mode_tangents_are_not_lost_silently() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(B, torch.ones_like(B))  # type: ignore[no-untyped-call]
        refuse("b carries a forward-mode tangent", lambda: mg.grouped_gemm(A, dual, offsets=CUT))
        refuse(r"a\[0\] carries", lambda: mg.plan(mg.GroupedGemmProblem([dual[0]], [A.T])))
        assert mg.grouped_gemm(A, B, offsets=CUT).shape == (10, 5)


@pytest.mark.parametrize("alpha", [10**400, Fraction(10**400)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_numbers_beyond_float64(alpha: Any, dtype: torch.dtype) -> None:
    refuse(
        "alpha is a .* beyond the range", lambda: mg.grouped_gemm(A.to(dtype), B.to(dtype), offsets=CUT, alpha=alpha)
    )


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("x", [3.5e38, -1e300, 10**39])
def test_numbers_beyond_the_accumulator(name: str, x: float) -> None:
    """In float32 they would be infinite, and 0 times them NaN."""
    a, c = torch.zeros(10, 4), torch.zeros(10, 5)
    keywords: Any = {name: x}
    refuse(f"{name}=.* multiplies in float32", lambda: mg.grouped_gemm(a, B, offsets=CUT, c=c, **keywords))
    exact = mg.grouped_gemm(a.double(), B.double(), offsets=CUT, c=c.double(), **keywords)
    assert (exact == 0).all()


@pytest.mark.parametrize("word", ["activation", "precision", "check", "jagged"])
@pytest.mark.parametrize("x", [np.array([1, 2]), ["m"], {}, 3, b"relu"])
def test_words_that_are_no_text(word: str, x: Any) -> None:
    keywords: Any = {word: x}
    refuse(f"{word}=", lambda: mg.GroupedGemmProblem(A, B, offsets=CUT, **keywords))


def test_a_direction_needs_a_cut() -> None:
    refuse("jagged='k' without a cut", lambda: mg.grouped_gemm(A, torch.ones(4, 5), jagged="k"))
    refuse("jagged='n' without", lambda: mg.grouped_gemm(B, B.mT, jagged="n", valid_rows=[1, 1, 1]))


@pytest.mark.parametrize(
    ("offsets", "match"),
    [
        (memoryview(bytes(32)).cast("q", [2, 2]), "2 dimensions"),
        (bytearray(CUT), "is text"),
        ([torch.tensor(False), 2, 5, 10], r"holds tensor\(False\)"),
        (np.ma.masked_array(np.array(CUT), mask=False), "masked array"),
    ],
)
def test_offsets_of_other_kinds(offsets: Any, match: str) -> None:
    refuse(match, lambda: mg.GroupedGemmProblem(A, B, offsets=offsets))


@pytest.mark.parametrize("x", [torch.ones(1), {}, ("f4", (2,)), object])
def test_out_dtypes_that_are_none(x: Any) -> None:
    refuse("is not a dtype", lambda: mg.GroupedGemmProblem(A, B, offsets=CUT, out_dtype=x))


def test_out_that_requires_grad_is_refused() -> None:
    out = torch.zeros(10, 5, requires_grad=True)
    refuse("out requires grad", lambda: mg.grouped_gemm(A, B, offsets=CUT, out=out))
    assert not out.any()
    with torch.no_grad():
        assert mg.grouped_gemm(A, B, offsets=CUT, out=out) is out
    assert out.eq(4).all()


@pytest.mark.parametrize("call", [mg.solve, mg.plan, mg.explain, mg.expected, lambda x: mg.verify(x, A)])
@pytest.mark.parametrize("x", [None, A, "text"])
def test_what_is_no_problem(call: Any, x: Any) -> None:
    refuse("problem is a", lambda: call(x))
    refuse("problem is a", lambda: mg.plan(mg.GroupedGemmProblem(A, B, offsets=CUT)).run(x))


@pytest.mark.parametrize(
    "name", [None, 5, [], [1], [["cpu"]], b"cpu", "cpuu", "", ["nope", "cpu"], {"cpu"}, torch.ones(1)]
)
def test_backends_that_do_not_exist_are_bad_input_and_bad_settings(name: Any) -> None:
    with pytest.raises(mg.UnknownBackend) as caught:
        mg.grouped_gemm(A, B, offsets=CUT, backend=name)
    assert isinstance(caught.value, mg.InvalidProblem)
    assert isinstance(caught.value, mg.InvalidSetting)


@pytest.mark.parametrize(
    "config",
    [
        [1], {"kernel": ["x"]}, {1: 2, "a": 3}, 3, "x", {"kernel": "nonsense"}, {"kernel": 5}, UNTYPED(5),
        {"size": "2"}, {"size": 2.0}, {"size": True}, UNTYPED_TILE("2"), UNTYPED_TILE(2.5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["cpu", "fake"])
def test_configs_of_a_wrong_kind(backend: str, config: Any, install: Callable[..., None]) -> None:
    if backend == "fake":
        install(Fake("fake"))
    with pytest.raises(mg.InvalidSetting, match=r"config|Config"):
        mg.grouped_gemm(A, B, offsets=CUT, backend=backend, config=config)
