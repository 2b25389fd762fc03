"""`GroupedGemmProblem`: the validated arguments of one call. The only place that rejects bad input.

Nothing is computed or written here. After the constructor has returned, every operand is a tensor over the caller's
memory, every extent fits, and `spec` says all that a backend may choose by. Methods that return sizes or groups on the
host wait for the device if the sizes or operands are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from multigemm.errors import InvalidProblem, UnknownKeyword, unknown_keyword_text
from multigemm.problem import epilogue, forms, overlap, rebuild, scales
from multigemm.problem.arrays import Kind, Operand, OperandReader, Step, common_dtype, is_list
from multigemm.problem.forms import Extents, Result
from multigemm.problem.fused import Fused, FusedKeywords, FusedReader, reader_of
from multigemm.problem.grouping import Grouping, make_grouping, make_valid_rows
from multigemm.problem.scales import Given, Quantisation
from multigemm.problem.spec import HALVES, PRECISIONS, Form, ProblemSpec, specify
from multigemm.settings import settings
from multigemm.torch_internals import no_dynamo

CHECKS = ("host", "full", "complete")
SCALES = ("scale_a", "scale_b", "zero_b")


class Keywords(FusedKeywords, total=False):
    """The keywords of a problem, for signatures that pass them on."""

    offsets: Any
    sizes: Any
    ends: Any
    jagged: str
    valid_rows: Any
    c: Any
    alpha: float
    beta: float | None
    bias: Any
    activation: str | None
    out: Any
    out_dtype: Any
    precision: str
    deterministic: bool
    batch_invariant: bool | None
    check: str
    scale_a: Any
    scale_b: Any
    zero_b: Any
    b_format: str | None
    accumulate: str


@dataclass(frozen=True, slots=True)
class GroupView:
    """One product on the host: C = act(alpha * a @ b + beta * c + bias).

    `where` indexes this group's block in the result: a tuple of slices and integers for packed
    forms, the position in the list for per_group. Scales and zero points of quantised operands broadcast
    against `a`, and against the elements of `b`, of which a packed `b` holds two in a byte.
    """

    index: int
    m: int
    n: int
    k: int
    a: Tensor
    b: Tensor
    c: Tensor | None
    bias: Tensor | None
    where: Any
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    zero_b: Tensor | None = None


class GroupedGemmProblem:
    """Many matrix products of different shapes, as one problem.

    `C_g = act(alpha * A_g @ B_g + beta * C_g + bias_g)` for every group g. The forms:

    | form      | a                  | b                   | groups           | result    |
    |-----------|--------------------|---------------------|------------------|-----------|
    | per_group | list of [M_g, K_g] | list of [K_g, N_g]  |                  | list      |
    | jagged m  | [T, K]             | [G, K, N] or [K, N] | rows of a        | [T, N]    |
    | jagged n  | [M, K] or [G, M, K]| [K, T]              | columns of b     | [M, T]    |
    | jagged k  | [M, T]             | [T, N]              | columns of a     | [G, M, N] |
    | batched   | [G, M, K]          | [G, K, N]           |                  | [G, M, N] |
    | masked    | [G, M, K]          | [G, K, N]           | `valid_rows` [G] | [G, M, N] |

    The groups are cut by one of `offsets` [G+1], `sizes` [G] or `ends` [G]; two matrices without a cut are one product.

    The problem refers to the caller's arrays and copies none of them, except sizes that are given on the host. Its
    attributes are not meant to be changed: make another problem. A deep copy or a pickle of it holds copies of those
    arrays. torch.autocast changes nothing here: a problem means what its operands say. The torch operator obeys it
    (`multigemm.integrations.grouped_gemm`).

    Args:
        a, b: the operands: torch tensors, NumPy, CuPy or Numba arrays, what has DLPack, or lists of these; any strides.
            float8 multiplies float8; bfloat16 and float16 also multiply weights in float8, int8 (with scale_b) and four
            bits.
        offsets, sizes, ends: int32 or int64: on the host (checked and copied) or a tensor on the operands' device
            (followed in place, never read back, clamped by the kernels).
        jagged: "m", "n" or "k": the direction that they cut. Two matrices fit all three, and "m" is the default: weight
            gradients (a [M, T], b [T, N]) need jagged="k".
        valid_rows: [G]: the number of rows of each matrix of a that count.
        c: a matrix of the result's shape that is added, times beta; may be `out` itself.
        alpha, beta: beta is 1 by default where c is given, 0 elsewhere, and with beta=0 c is not read; the numbers are
            finite, and normal ones of float32 where sums are formed in it.
        bias: a value per column: [N] or [G, N]; jagged n: [T]; lists: these, or a list of [N_g].
        activation: "relu", "gelu" (by erf), "gelu_tanh" or "silu"; or a gate: "swiglu", "geglu" (by erf), "geglu_tanh",
            "reglu" or "glu" (by sigmoid). With a gate b has 2 I columns, of g and of u, and the result has I:
            act(min(g, glu_limit)) * (u' + glu_beta), where u' is u within -glu_limit..glu_limit and swiglu is
            g * sigmoid(glu_alpha * g). In jagged m, batched, masked and lists; c and beta need combine or out_rows
            beside it.
        out: receives the result, and keeps what no group owns; without it those rows are 0.
        out_dtype: of the result; that of the operands by default, int32 for int8. Operands of two float dtypes are
            multiplied in torch.promote_types of them: bfloat16 x float16 in float32.
        precision: of float32 products: "ieee" is true float32, "tf32" rounds or truncates the operands to 11 bits.
        deterministic: the same call gives the same bits; False permits faster kernels that do not promise this.
        batch_invariant: a row of the result has the same bits in any batch: they depend on its row of a, its columns of
            b, K, the dtypes, the epilogue and the backend alone, in every form. None: the setting
            MULTIGEMM_BATCH_INVARIANT decides.
        check: "host" (default) checks sizes on the host only; "full" also reads back and checks sizes on the device;
            "complete" is "full", and refuses sizes that add up to less than T (otherwise no group owns the rest).
        scale_a, scale_b: quantised operands: what an element is multiplied by. A number, a vector for the groups, or a
            grid: along K one entry, or one for each 32, 64 or 128; along the other axis one entry, or one for each line
            (or, with 128 along K, for each 128). float32 or float8_e8m0fnu.
        zero_b: integer weights: what is subtracted before the scale; uint8 or int8, laid out as scale_b.
        b_format: what bytes of b hold, two of K in each: "int4", "uint4" or "e2m1".
        accumulate: float8 x float8: "promoted" sums at most 128 of K in the tensor core, "fast" may sum all.
        glu_layout: where g and u are in b and in bias: "halves" (g first), "halves_up_first" or "interleaved".
        glu_alpha, glu_beta, glu_limit: 1, 0 and None (no limit) by default.
        preact_out: [T, N], with an activation: receives what the activation is applied to, before the limit.
        a_rows, b_rows: [T] row numbers: a token is a's row a_rows[s] (jagged k: a's column, b's row b_rows[s]; jagged
            n: b's column), and the groups cut the T tokens. Row numbers are int32 or int64. Those on the operands'
            device are followed in place, never read back (but by check="full"); one below 0 or past the end means no
            row: zeros in a and b, nothing in a sum, as does a row that no group owns. On the host such a number is an
            error.
        row_scale: jagged m [T], masked [G, M]: each row times its number, after the activation.
        combine: (index [R, k], weights [R, k] or None), jagged m: the result is [R, N], row r the sum over j of
            weights[r, j] times row index[r, j] of what it would be without, j ascending.
        out_rows, rows: [T] and R, or `out`: the result is [R, N], row r the sum of the rows s with out_rows[s] = r.

    Raises:
        InvalidProblem: anything without a meaning; the text names the value seen, the limit and the remedy.
        UnknownKeyword: there is no such keyword; the text names what was probably meant.

    Example:
        >>> import torch, multigemm as mg
        >>> problem = mg.GroupedGemmProblem(torch.ones(6, 4), torch.ones(3, 4, 2), sizes=[1, 0, 5])
        >>> problem.form, problem.flops, problem.sizes()
        ('jagged_m', 96, [(1, 2, 4), (0, 2, 4), (5, 2, 4)])
    """

    __slots__ = (
        "a", "activation", "alpha", "b", "batch_invariant", "beta", "bias", "c", "deterministic", "device", "extents",
        "form", "fused", "given_out", "grouping", "kind", "out", "out_dtype", "out_shape", "precision", "quantisation",
        "refreshes", "scale_a", "scale_b", "spec", "squeezed", "valid_rows", "zero_b",
    )  # fmt: skip
    a: Operand
    b: Operand
    c: Operand | None
    bias: Operand | None
    out: Operand | None
    form: Form
    extents: Extents | None
    grouping: Grouping | None
    valid_rows: Grouping | None
    fused: Fused | None
    alpha: float
    beta: float
    activation: Any
    precision: Any
    deterministic: bool
    batch_invariant: bool
    device: torch.device
    kind: Kind
    given_out: Any
    out_dtype: torch.dtype
    out_shape: Any
    quantisation: Quantisation | None
    refreshes: list[Step]
    scale_a: Operand | None
    scale_b: Operand | None
    zero_b: Operand | None
    spec: ProblemSpec
    squeezed: bool

    @no_dynamo
    def __init__(
        self,
        a: Any,
        b: Any,
        *,
        offsets: Any = None,
        sizes: Any = None,
        ends: Any = None,
        jagged: str = "m",
        valid_rows: Any = None,
        c: Any = None,
        alpha: float = 1.0,
        beta: float | None = None,
        bias: Any = None,
        activation: str | None = None,
        out: Any = None,
        out_dtype: Any = None,
        precision: str = "ieee",
        deterministic: bool = True,
        batch_invariant: bool | None = None,
        check: str = "host",
        scale_a: Any = None,
        scale_b: Any = None,
        zero_b: Any = None,
        b_format: str | None = None,
        accumulate: str = "promoted",
        **fused: Unpack[FusedKeywords],
    ) -> None:
        for name in fused.keys() - FusedKeywords.__annotations__.keys():
            raise UnknownKeyword(unknown_keyword_text("GroupedGemmProblem", name, tuple(Keywords.__annotations__)))
        epilogue.one_of(check, "check", CHECKS)
        epilogue.one_of(precision, "precision", PRECISIONS)
        scales.check_words(b_format, accumulate)
        if not isinstance(deterministic, bool):
            raise InvalidProblem(f"deterministic={deterministic!r} must be True or False")
        self.activation, self.precision, self.deterministic = activation, precision, deterministic
        self.batch_invariant = _switch(batch_invariant)
        self.c = self.bias = self.out = self.extents = self.grouping = self.valid_rows = None
        self.squeezed, self.given_out = False, out
        self.quantisation = self.fused = self.scale_a = self.scale_b = self.zero_b = None
        fused_reader = reader_of(fused, activation, check != "host")

        reader = OperandReader()
        grouped = offsets is not None or sizes is not None or ends is not None
        if is_list(a) or is_list(b):
            groups, packed = self._take_lists(
                reader, a, b, jagged, grouped or valid_rows is not None, b_format, fused_reader
            )
        else:
            extents, packed = self._take_tensors(
                reader, a, b, jagged, grouped, valid_rows is not None, b_format, fused_reader
            )
            groups = self._take_groups(extents, (offsets, sizes, ends), valid_rows, check)
        self.kind, self.device = reader.kind, reader.device
        inputs = self._input_dtypes(out_dtype)
        compute = self._take_scales(
            reader, groups, inputs, Given(scale_a, scale_b, zero_b, accumulate), packed, fused_reader
        )
        self.alpha = epilogue.scalar(alpha, "alpha", compute)
        self.beta = epilogue.scalar(epilogue.default_beta(beta, c), "beta", compute)
        epilogue.check_activation(activation, compute)
        self._take_result(reader, groups, out, out_dtype, c, bias, (*inputs, compute), fused_reader)
        self.refreshes = reader.refreshes() if reader.mirrors else []
        if out is not None or self.fused is not None:
            self._refuse_shared_memory(reader)
        self.spec = specify(self, groups, compute)

    # --- operands -------------------------------------------------------------------------------

    def _take_tensors(
        self, reader: OperandReader, a: Any, b: Any, jagged: str, grouped: bool, masked: bool, b_format: str | None,
        fused_reader: FusedReader | None,
    ) -> tuple[Extents, str]:  # fmt: skip
        x, y = reader.first(a, "a"), reader.operand(b, "b")
        packed = scales.format_of(y.dtype, b_format)
        if packed:
            y = scales.as_bytes(y)
        if not grouped and not masked and x.dim() == 2 and y.dim() == 2:
            self.squeezed, x, y = True, x.unsqueeze(0), y.unsqueeze(0)
        self.a, self.b, self.device = x, y, reader.device
        if packed:
            y = scales.unpacked_shape(x, y)
        if fused_reader is not None:
            x, y = fused_reader.pick(x, y, jagged, grouped, reader.device)
        self.extents = forms.infer(
            x, y, jagged=jagged, grouped=grouped, masked=masked, squeezed=self.squeezed, kind=reader.kind
        )
        self.form = self.extents.form
        return self.extents, packed

    def _take_groups(self, extents: Extents, cuts: Sequence[Any], valid: Any, check: str) -> int:
        full, complete = check != "host", check == "complete"
        if self.form.startswith("jagged"):
            total = extents.along(self.form[-1])
            self.grouping = make_grouping(
                *cuts, groups=extents.groups, total=total, device=self.device, full=full, complete=complete,
                others=extents.other_cuts(),
            )  # fmt: skip
            return self.grouping.groups
        assert extents.groups is not None
        if valid is not None:
            rows = extents.m
            self.valid_rows = make_valid_rows(valid, groups=extents.groups, rows=rows, device=self.device, full=full)
        return extents.groups

    def _take_lists(
        self, reader: OperandReader, a: Any, b: Any, jagged: str, grouped: bool, b_format: str | None,
        fused_reader: FusedReader | None,
    ) -> tuple[int, str]:  # fmt: skip
        if not (is_list(a) and is_list(b)):
            one, x, other = ("b", b, "a") if is_list(a) else ("a", a, "b")
            remedy = f"pass [{one}] * G to share one matrix, or list({one}) for several"
            if grouped:
                remedy = f"stack {other} where sizes cut {one}, or split {one} into a list and leave the sizes out"
            raise InvalidProblem(f"{one} is a {type(x).__name__} and {other} is a list: {remedy}")
        if grouped:
            raise InvalidProblem("offsets, sizes, ends or valid_rows with lists: a list is cut already, leave them out")
        if jagged != "m":
            raise InvalidProblem(f"jagged={jagged!r} with lists: they may differ in every extent, leave it out")
        if fused_reader is not None:
            fused_reader.refuse_picks("with lists")
        forms.check_counts(a, b)
        self.form = "per_group"
        first = [reader.first(a[0], "a[0]")] if a else []
        self.a = [*first, *(reader.operand(x, f"a[{g}]") for g, x in enumerate(a) if g)]
        self.b = matrices = [reader.operand(x, f"b[{g}]") for g, x in enumerate(b)]
        packed = scales.format_of(common_dtype(self.b, "b"), b_format) if b else ""
        if packed:
            self.b = [scales.as_bytes(x) for x in matrices]
            pairs = enumerate(zip(self.a, self.b, strict=True))
            matrices = [scales.unpacked_shape(x, y, (f"a[{g}]", f"b[{g}]")) for g, (x, y) in pairs]
        forms.check_lists(self.a, matrices)
        return len(self.a), packed

    def _take_scales(
        self, reader: OperandReader, groups: int, inputs: tuple[torch.dtype, torch.dtype], given: Given, packed: str,
        fused_reader: FusedReader | None,
    ) -> torch.dtype:  # fmt: skip
        """Reads scales and zero points of quantised operands. Returns the dtype in which products are formed."""
        has_dtypes = self.extents is not None or groups > 0  # lists of no matrices say no dtypes
        if not (has_dtypes and scales.is_quantised(*inputs, packed, given)):
            return epilogue.compute_dtype(*inputs)
        for name in ("a", "b") if torch.is_grad_enabled() else ():
            for x in self.each(name):
                scales.refuse_gradient(name, x)
        if fused_reader is not None and self.form == "jagged_k":
            fused_reader.refuse_quantised_picks()
        a, b = self.each("a"), self.each("b")
        shapes = [tuple(x.shape) for x in a], [_elements(y, packed) for y in b]
        if self.extents is not None:
            (a_shape,), (b_shape,) = shapes
            operands = scales.Operands(self.form, groups, *inputs, a_shape, b_shape, self.squeezed)
        else:
            operands = scales.Operands(self.form, groups, *inputs, *shapes)
        self.quantisation = scales.read(reader.extra, operands, given, packed)
        for name, scale in self.quantisation.each():
            setattr(self, name, scale.given)
        return inputs[0]

    def _input_dtypes(self, out_dtype: Any) -> tuple[torch.dtype, torch.dtype]:
        if self.each("a"):
            return common_dtype(self.a, "a"), common_dtype(self.b, "b")
        return (epilogue.inputs_for(out_dtype),) * 2

    # --- result and epilogue --------------------------------------------------------------------

    def _result_shape(self, groups: int) -> Any:
        if self.extents is None:
            return [(x.shape[0], y.shape[1]) for x, y in zip(self.a, self.b, strict=True)]
        return self.extents.result_shape(groups)

    def _take_result(
        self, reader: OperandReader, groups: int, out: Any, out_dtype: Any, c: Any, bias: Any,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], fused_reader: FusedReader | None,
    ) -> None:  # fmt: skip
        """Reads `out`, c, bias and the fused keywords. `dtypes` are those of a, of b and of the products."""
        compute = dtypes[2]
        extras: tuple[torch.dtype, ...] = dtypes  # that c and bias may have beside the result's
        if self.quantisation is not None:
            extras = (compute,) if compute in HALVES else ()
        result = product = Result(self.form, groups, self._result_shape(groups), self.squeezed)
        if fused_reader is not None:
            result = fused_reader.result(product, compute, self.device, out, self.beta, c)
        self.out_shape = result.shape
        self._take_out(reader, out, out_dtype, result, compute)
        self._take_c(reader, c, result, extras)
        self._take_bias(reader, bias, product, extras)
        if fused_reader is not None:
            self.fused = fused_reader.fused(reader, product, self.out_dtype, extras)

    def _take_out(self, reader: OperandReader, out: Any, out_dtype: Any, result: Result, compute: torch.dtype) -> None:
        given = None
        if out is not None:
            self.out = result.take(reader.result, out, "out")
            given = common_dtype(self.out, "out") if len(self.each("out")) else None
        self.out_dtype = epilogue.result_dtype(out_dtype, given, compute, self.quantisation is not None)

    def _take_c(self, reader: OperandReader, c: Any, result: Result, inputs: Sequence[torch.dtype]) -> None:
        if c is None:
            if self.beta != 0:
                raise InvalidProblem(f"beta={self.beta} needs c: pass it, or leave beta out")
            return
        given = result.take(reader.extra, c, "c")
        if not is_list(given) or given:
            epilogue.check_extra_dtype(common_dtype(given, "c"), "c", inputs, self.out_dtype)
        if self.beta != 0:
            self.c = given
        else:
            reader.forget("c")

    def _take_bias(self, reader: OperandReader, bias: Any, result: Result, inputs: Sequence[torch.dtype]) -> None:
        if bias is None:
            return
        self.bias = result.take_bias(reader.extra, bias)
        if self.each("bias"):
            epilogue.check_extra_dtype(common_dtype(self.bias, "bias"), "bias", inputs, self.out_dtype)

    def _refuse_shared_memory(self, reader: OperandReader) -> None:
        """Raises if a launch would read memory that it writes, or write memory twice."""
        outs, preacts = self.each("out"), [] if self.fused is None else self.fused.preacts()
        if outs:
            overlap.refuse_shared_memory(outs, self._read(reader), self._at)
        if preacts:
            read = [*self._read(reader), *((f"out{self._at(g)}", x) for g, x in enumerate(outs))]
            overlap.refuse_shared_memory(preacts, read, self._at, "preact_out")

    def _read(self, reader: OperandReader) -> list[tuple[str, Any]]:
        """Every tensor that a launch reads, by name."""
        read: list[tuple[str, Any]] = []
        for name in ("a", "b", "bias", "c", *(() if self.quantisation is None else SCALES)):
            listed = is_list(getattr(self, name))
            read += [(f"{name}[{g}]" if listed else name, x) for g, x in enumerate(self.each(name))]
        read += [(name, mirror.given) for name, mirror in reader.mirrors.items()]
        if (cut := self.cut) is not None and cut.live is not None:
            read.append((cut.kind if cut is self.grouping else "valid_rows", cut.live))
        return read if self.fused is None else read + self.fused.read()

    def _at(self, g: int) -> str:
        return f"[{g}]" if self.form == "per_group" else ""

    # --- what may be asked of it -----------------------------------------------------------------

    def each(self, name: str) -> list[Tensor]:
        """The tensors of one operand: none if it is absent, one if it is packed."""
        x: Operand | None = getattr(self, name)
        if x is None:
            return []
        return [x] if isinstance(x, Tensor) else x

    @property
    def cut(self) -> Grouping | None:
        """The tensor that gives the groups' boundaries or `valid_rows`; None if the shapes alone give them."""
        return self.grouping or self.valid_rows

    @property
    def zero_unowned(self) -> bool:
        """Whether rows that no group owns are zeroed (in a fresh result) or left untouched (in the caller's `out`)."""
        return self.out is None

    @property
    def requires_grad(self) -> bool:
        """Whether any input requires a gradient."""
        if any(x.requires_grad for name in ("a", "b", "c", "bias") for x in self.each(name)):
            return True
        return self.fused is not None and any(x.requires_grad for x in self.fused.numbers.values())

    @no_dynamo
    def sizes(self) -> list[tuple[int, int, int]]:
        """(m, n, k) of every group. Waits for the device if the sizes are there."""
        if self.extents is None:
            pairs = zip(self.each("a"), self.each("b"), strict=True)
            return [(x.shape[0], y.shape[1], x.shape[1]) for x, y in pairs]
        _, _, m, n, k = self.extents
        if self.valid_rows is not None:
            return [(min(max(rows, 0), m), n, k) for rows in np.diff(self.valid_rows.read()).tolist()]
        if self.grouping is None:
            return [(m, n, k)] * self.spec.groups
        lengths = [end - start for start, end in self._bounds(self.grouping, self.extents)]
        jagged = self.form[-1]
        return [tuple(length if d == jagged else e for d, e in zip("mnk", (m, n, k))) for length in lengths]  # type: ignore[misc]

    @no_dynamo
    def groups(self, on_host: bool = True) -> Iterator[GroupView]:
        """Views of every product, in order: of copies on the host, or with `on_host=False` of the operands where they
        lie, which fused problems do not have. Waits for the device if operands or sizes are there."""
        for refresh in self.refreshes:
            refresh()
        place = _on_host if on_host else _detached
        a, b, c, bias = (None if x is None else place(x) for x in (self.a, self.b, self.c, self.bias))
        q = self.quantisation
        if self.fused is not None:
            q = None if q is None else self.fused.gather_scales(q, a, b)
            a, b = self.fused.gather(self.form, a, b)
            c = None if self.fused.scatters else c
        cuts = [(0, 0)] * self.spec.groups
        if self.grouping is not None and self.extents is not None:
            cuts = self._bounds(self.grouping, self.extents)
        for g, (m, n, k) in enumerate(self.sizes()):
            spans = {d: slice(0, extent) for d, extent in zip("mnk", (m, n, k))}
            if self.spec.jagged:
                spans[self.spec.jagged] = slice(*cuts[g])
            where = _where(self.form, g, spans["m"], spans["n"])
            x, y = _pick(a, g)[spans["m"], spans["k"]], _pick(b, g)[spans["k"], spans["n"]]
            old, row = None if c is None else c[where], _bias(bias, g, spans["n"])
            scales = [None if scale is None else place(scale) for scale in self._group_scales(q, g, spans)]
            yield GroupView(g, m, n, k, x, y, old, row, where, *scales)

    def _group_scales(self, q: Quantisation | None, g: int, spans: dict[str, slice]) -> list[Tensor | None]:
        """scale_a, scale_b and zero_b of one group."""
        if q is None:
            return []
        jagged_k = self.form == "jagged_k"
        parts = [(q.a, "m", "a"), (q.b, "n", "b"), (q.zero, "n", "b")]
        return [
            None if scale is None else scale.of_group(g, spans[rows], spans["k"], side, jagged_k)
            for scale, rows, side in parts
        ]

    def _bounds(self, grouping: Grouping, extents: Extents) -> list[tuple[int, int]]:
        """(start, end) of every group along the jagged direction, clamped as the kernels clamp."""
        total = extents.along(self.form[-1])
        offsets = grouping.read().tolist()
        starts = [min(max(s, 0), total) for s in offsets[:-1]]
        return [(s, min(max(e, s), total)) for s, e in zip(starts, offsets[1:], strict=True)]

    @property
    def flops(self) -> int:
        """`2 * m * n * k` summed over the groups. Waits for the device if the sizes are there."""
        return sum(2 * m * n * k for m, n, k in self.sizes())

    @property
    def bytes(self) -> int:
        """Bytes that must move at least once: operands of non-empty groups, C if it is read, the result."""
        used = [s for s in self.sizes() if s[0] and s[1]]
        if not used:
            return 0
        spec = self.spec
        a = [m * k * spec.a.dtype.itemsize for m, _, k in used]
        b = [k * n * spec.b.dtype.itemsize // (2 if spec.b.packed else 1) for _, n, k in used]
        c_size = spec.c.dtype.itemsize if spec.c is not None else 0
        elements = sum(m * n for m, n, _ in used) if self.fused is None else self.fused.result_elements(used)
        results = elements * (self.out_dtype.itemsize + c_size)
        results += sum(x.nbytes for name in SCALES for x in self.each(name))
        return results + (a[0] if spec.a.shared else sum(a)) + (b[0] if spec.b.shared else sum(b))

    def __repr__(self) -> str:
        return rebuild.problem_text(self)

    def __reduce__(self) -> tuple[Any, ...]:
        a, b, keywords = rebuild.arguments(self)
        return _rebuilt, (rebuild.as_bits(a), rebuild.as_bits(b), {n: rebuild.as_bits(x) for n, x in keywords.items()})


def _switch(batch_invariant: Any) -> bool:
    """The value of the keyword; that of the setting if the keyword is None."""
    if batch_invariant is None:
        return settings().batch_invariant
    if not isinstance(batch_invariant, bool):
        raise InvalidProblem(f"batch_invariant={batch_invariant!r} must be True, False or None (as the setting says)")
    return batch_invariant


def _where(form: str, g: int, rows: slice, cols: slice) -> Any:
    if form == "per_group":
        return g
    return (rows, cols) if form in ("jagged_m", "jagged_n") else (g, rows, cols)


def _pick(x: Any, g: int) -> Any:
    return x if isinstance(x, Tensor) and x.dim() == 2 else x[g]


def _bias(bias: Any, g: int, cols: slice) -> Any:
    if bias is None:
        return None
    return bias[cols] if isinstance(bias, Tensor) and bias.dim() == 1 else bias[g]


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else [t.detach() for t in x]


def _on_host(x: Any) -> Any:
    return x.detach().cpu() if isinstance(x, Tensor) else [t.detach().cpu() for t in x]


def _elements(b: Tensor, packed: str) -> tuple[int, ...]:
    """The shape of b counted in elements, not bytes."""
    return (*b.shape[:-2], 2 * b.shape[-2], b.shape[-1]) if packed else tuple(b.shape)


def _rebuilt(a: Any, b: Any, keywords: Keywords) -> GroupedGemmProblem:
    a, b = rebuild.from_bits(a), rebuild.from_bits(b)
    return GroupedGemmProblem(a, b, **{name: rebuild.from_bits(x) for name, x in keywords.items()})


def checked(problem: Any) -> GroupedGemmProblem:
    """Returns the argument if it is a GroupedGemmProblem, else raises."""
    if not isinstance(problem, GroupedGemmProblem):
        raise InvalidProblem(f"problem is a {type(problem).__name__}: pass GroupedGemmProblem(a, b, ...)")
    return problem
