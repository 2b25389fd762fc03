"""`GroupedGemmProblem`: what a user builds. Validated once, and the only place that rejects bad input.

Nothing is computed or written here. After the constructor has returned, every operand is a tensor
over the caller's memory, every extent fits, and `spec` says all that a backend may choose by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from multigemm import epilogue, forms, overlap
from multigemm.arrays import Adopted, Kind, Step, adopt, read_only
from multigemm.classify import bucket, classify, classify_fresh, classify_list
from multigemm.errors import InvalidProblem
from multigemm.forms import Extents
from multigemm.grouping import Grouping, make_grouping, make_valid_rows
from multigemm.spec import ACTIVATIONS, PRECISIONS, Form, OperandSpec, ProblemSpec

Operand = Tensor | list[Tensor]


@dataclass(frozen=True, slots=True)
class GroupView:
    """One product on the host: C = act(alpha * a @ b + beta * c + bias).

    `where` indexes this group's block in the result: a tuple of slices and integers for packed
    forms, the position in the list for per_group.
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


def _is_list(x: Any) -> bool:
    return isinstance(x, list | tuple)


class GroupedGemmProblem:
    """Many matrix products of different shapes, as one problem. See the README for the forms.

    Raises InvalidProblem, with the value seen, the limit and the remedy, for anything without a
    meaning. The problem refers to the caller's arrays; it copies none of them (host offsets excepted).
    """

    __slots__ = (
        "_given_out", "_squeeze", "a", "activation", "alpha", "b", "beta", "bias", "c", "device",
        "deterministic", "extents", "form", "grouping", "kind", "out", "out_dtype", "out_shape", "precision",
        "refreshes", "spec", "valid_rows",
    )  # fmt: skip

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
        beta: float = 0.0,
        bias: Any = None,
        activation: str | None = None,
        out: Any = None,
        out_dtype: Any = None,
        precision: str = "ieee",
        deterministic: bool = True,
        check: str = "host",
    ) -> None:
        if check != "host":
            epilogue.one_of(check, "check", ("host", "full"))
        if not isinstance(deterministic, bool):
            raise InvalidProblem(f"deterministic={deterministic!r} must be True or False")
        if activation is not None:
            epilogue.one_of(activation, "activation", ACTIVATIONS)
        if precision != "ieee":
            epilogue.one_of(precision, "precision", PRECISIONS)
        self.refreshes: list[Step] = []
        self._given_out = out
        self.activation, self.precision, self.deterministic = activation, precision, deterministic
        grouped = offsets is not None or sizes is not None or ends is not None
        if _is_list(a) or _is_list(b):
            self._take_lists(a, b, jagged, grouped or valid_rows is not None)
            groups = len(self.a)
        else:
            groups = self._take_tensors(a, b, jagged, offsets, sizes, ends, grouped, valid_rows, check == "full")
        a_dtype, b_dtype = self._dtype_of(self.a, "a"), self._dtype_of(self.b, "b")
        compute = epilogue.compute_dtype(a_dtype, b_dtype)
        self.alpha, self.beta = epilogue.scalar(alpha, "alpha", compute), epilogue.scalar(beta, "beta", compute)
        if activation is not None:
            epilogue.check_activation(activation, compute)
        self._take_out(out, out_dtype, compute, groups)
        inputs = (a_dtype, b_dtype, compute)
        self._take_c(c, inputs, compute)
        self._take_bias(bias, inputs, compute, groups)
        if out is not None:
            self._check_overlap()
        self.spec = self._make_spec(groups, a_dtype, b_dtype, compute)

    # --- operands -------------------------------------------------------------------------------

    def _adopt(self, x: Any, name: str, *, like_a: bool = False) -> Tensor:
        """One array as a tensor on the problem's device; remembers how to refresh a mirror."""
        if type(x) is Tensor and x.layout is torch.strided and x.device == self.device:
            if like_a and self.kind != "torch":
                raise InvalidProblem(f"{name} is a torch array and a is a {self.kind} array: pass one kind of array")
            return x
        got = adopt(x, name)
        self._join(got, name, like_a)
        return got.tensor

    def _join(self, got: Adopted, name: str, like_a: bool) -> None:
        if got.tensor.device != self.device:
            raise InvalidProblem(f"{name} is on {got.tensor.device} and a is on {self.device}: move it to one device")
        if like_a and got.kind != self.kind:
            raise InvalidProblem(f"{name} is a {got.kind} array and a is a {self.kind} array: pass one kind of array")
        if got.refresh is not None:
            self.refreshes.append(got.refresh)

    def _take_first(self, a: Any, name: str) -> Tensor:
        got = adopt(a, name)
        self.kind: Kind = got.kind
        self.device = got.tensor.device
        if got.refresh is not None:
            self.refreshes.append(got.refresh)
        return got.tensor

    def _take_tensors(
        self, a: Any, b: Any, jagged: str, offsets: Any, sizes: Any, ends: Any, grouped: bool, valid: Any, full: bool
    ) -> int:
        self.a = self._take_first(a, "a")
        self.b = self._adopt(b, "b", like_a=True)
        self._squeeze = not grouped and valid is None and self.a.dim() == 2 and self.b.dim() == 2
        if self._squeeze:
            self.a, self.b = self.a.unsqueeze(0), self.b.unsqueeze(0)
        ext = self.extents = forms.infer(self.a, self.b, jagged=jagged, grouped=grouped, masked=valid is not None)
        self.form: Form = ext.form
        self.grouping: Grouping | None = None
        self.valid_rows: Grouping | None = None
        if grouped:
            total = {"m": ext.m, "n": ext.n, "k": ext.k}[jagged]
            self.grouping = make_grouping(
                offsets, sizes, ends, groups=ext.groups, total=total, device=self.device, full=full
            )
            return self.grouping.count
        assert ext.groups is not None
        if valid is not None:
            self.valid_rows = make_valid_rows(valid, groups=ext.groups, rows=ext.m, device=self.device, full=full)
        return ext.groups

    def _take_lists(self, a: Any, b: Any, jagged: str, grouped: bool) -> None:
        if not (_is_list(a) and _is_list(b)):
            one = "b" if _is_list(a) else "a"
            raise InvalidProblem(f"{one} is no list but the other operand is: pass [{one}] * G to share one matrix")
        if grouped:
            raise InvalidProblem("offsets, sizes, ends and valid_rows cut a packed operand; a list is cut already: leave them out")
        if jagged != "m":
            raise InvalidProblem(f"jagged={jagged!r} with lists: lists differ in all extents; leave it out")
        self.form, self.extents, self.grouping, self.valid_rows, self._squeeze = "per_group", None, None, None, False
        self.kind, self.device = "torch", torch.device("cpu")
        first = self._take_first(a[0], "a[0]") if a else None
        self.a = [] if first is None else [first, *(self._adopt(x, f"a[{g}]", like_a=True) for g, x in enumerate(a) if g)]
        self.b = [self._adopt(x, f"b[{g}]", like_a=True) for g, x in enumerate(b)]
        forms.check_lists(self.a, self.b)

    @staticmethod
    def _dtype_of(x: Operand, name: str) -> torch.dtype:
        if isinstance(x, Tensor):
            return x.dtype
        dtypes = {t.dtype for t in x}
        if len(dtypes) > 1:
            raise InvalidProblem(f"{name} mixes {', '.join(sorted(map(str, dtypes)))}: convert the list to one dtype")
        return dtypes.pop() if dtypes else torch.float32

    # --- result and epilogue --------------------------------------------------------------------

    def _shapes(self) -> list[tuple[int, ...]]:
        return [(x.shape[0], y.shape[1]) for x, y in zip(self.a, self.b, strict=True)]

    def _take_full(self, x: Any, name: str) -> Operand:
        """`c` or `out`: an array of the result's shape, or a list of them."""
        if self.form != "per_group":
            if _is_list(x):
                raise InvalidProblem(f"{name} is a list; a {self.form} problem has one result of shape {self.out_shape}")
            return self._shaped(self._adopt(x, name), cast("tuple[int, ...]", self.out_shape), name)
        shapes = cast("list[tuple[int, ...]]", self.out_shape)
        if not _is_list(x) or len(x) != len(shapes):
            seen = f"a list of {len(x)}" if _is_list(x) else f"a {type(x).__name__}"
            raise InvalidProblem(f"{name} is {seen}; a list problem needs a list of {len(shapes)} matrices")
        return [self._shaped(self._adopt(t, f"{name}[{g}]"), shapes[g], f"{name}[{g}]") for g, t in enumerate(x)]

    def _shaped(self, x: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
        if self._squeeze and x.dim() == 2:
            x = x.unsqueeze(0)
        if x.shape != shape:
            raise InvalidProblem(f"{name} has shape {tuple(x.shape)}; it must be {shape}, the shape of the result")
        return x

    def _take_out(self, out: Any, out_dtype: Any, compute: torch.dtype, groups: int) -> None:
        if self.extents is None:
            self.out_shape: Any = self._shapes()
        else:
            self.out_shape = self.extents.result_shape(groups)
        self.out: Operand | None = None
        if out is None:
            self.out_dtype = epilogue.result_dtype(out_dtype, None, compute)
            return
        for g, x in enumerate(out if _is_list(out) else [out]):
            if read_only(x):
                raise InvalidProblem(f"out{f'[{g}]' if _is_list(out) else ''} is read-only: pass an array that may be written")
        before = len(self.refreshes)
        self.out = self._take_full(out, "out")
        if len(self.refreshes) > before:
            raise InvalidProblem("out has a negative stride, which no kernel writes through: pass a view with positive strides")
        dtype = self._dtype_of(self.out, "out") if len(self.out) or isinstance(self.out, Tensor) else None
        self.out_dtype = epilogue.result_dtype(out_dtype, dtype, compute)

    def _take_c(self, c: Any, inputs: Sequence[torch.dtype], compute: torch.dtype) -> None:
        self.c: Operand | None = None
        if c is None:
            if self.beta != 0:
                raise InvalidProblem(f"beta={self.beta} needs c: pass it, or leave beta at 0")
            return
        given = self._take_full(c, "c")
        if len(given):
            epilogue.check_extra_dtype(self._dtype_of(given, "c"), "c", inputs, self.out_dtype, compute)
        self.c = given if self.beta != 0 else None

    def _take_bias(self, bias: Any, inputs: Sequence[torch.dtype], compute: torch.dtype, groups: int) -> None:
        self.bias: Operand | None = None
        if bias is None:
            return
        self.bias = self._list_bias(bias) if self.form == "per_group" else self._packed_bias(bias, groups)
        if len(self.bias) or isinstance(self.bias, Tensor):
            epilogue.check_extra_dtype(self._dtype_of(self.bias, "bias"), "bias", inputs, self.out_dtype, compute)

    def _packed_bias(self, bias: Any, groups: int) -> Tensor:
        if _is_list(bias):
            raise InvalidProblem(f"bias is a list; a {self.form} problem takes one array of [N] or [G, N]")
        vector, n = self._adopt(bias, "bias"), self.extents.n
        epilogue.check_bias_shape(vector, [(n,)] if self.form == "jagged_n" else [(n,), (groups, n)])
        return vector

    def _list_bias(self, bias: Any) -> list[Tensor]:
        widths = [shape[1] for shape in self.out_shape]
        if not _is_list(bias):
            shared = self._adopt(bias, "bias")
            bias = list(shared.unbind(0)) if shared.dim() == 2 else [shared] * len(widths)
        if len(bias) != len(widths):
            raise InvalidProblem(f"bias has {len(bias)} entries; the problem has {len(widths)} groups")
        vectors = [self._adopt(x, f"bias[{g}]") for g, x in enumerate(bias)]
        for vector, n in zip(vectors, widths, strict=True):
            epilogue.check_bias_shape(vector, [(n,)])
        return vectors

    def _check_overlap(self) -> None:
        """The output must not meet itself, an input or the bias; being the very `c` is allowed."""
        outs = self._each("out")
        for g, x in enumerate(outs):
            if overlap.overlaps_itself(x):
                raise InvalidProblem(f"out{self._at(g)} overlaps itself (strides {x.stride()}): pass one without shared elements")
        if pair := overlap.first_shared_pair(outs):
            raise InvalidProblem(f"out[{pair[0]}] and out[{pair[1]}] share an element: each result needs memory of its own")
        for name in ("a", "b", "bias", "c"):
            for i, x in enumerate(self._each(name)):
                for g, y in enumerate(outs):
                    if name == "c" and g == i and overlap.same_view(x, y):
                        continue
                    if overlap.share_memory(x, y):
                        raise InvalidProblem(f"out{self._at(g)} shares memory with {name}{self._at(i)}: pass another out")

    def _at(self, g: int) -> str:
        return f"[{g}]" if self.form == "per_group" else ""

    def _each(self, name: str) -> list[Tensor]:
        x = getattr(self, name)
        return [] if x is None else [x] if isinstance(x, Tensor) else x

    # --- spec -----------------------------------------------------------------------------------

    def _make_spec(self, groups: int, a_dtype: torch.dtype, b_dtype: torch.dtype, compute: torch.dtype) -> ProblemSpec:
        alpha = "one" if self.alpha == 1 else "zero" if self.alpha == 0 else "any"
        bias = None if self.bias is None else self._dtype_of(self.bias, "bias")
        source = self.grouping or self.valid_rows
        rest = (
            bias, compute, alpha, self.activation, self.precision, self.deterministic,
            None if source is None else source.index, source is not None and source.live is not None and self.device.type != "cpu",
            self.out is None,
        )  # fmt: skip
        if self.extents is None:
            return ProblemSpec("per_group", groups, *self._list_extents(), *self._list_operands(a_dtype, b_dtype), *rest)  # type: ignore[arg-type]
        form, _, m, n, k = self.extents
        jagged = form[-1] if form.startswith("jagged") else ""
        total = {"m": m, "n": n, "k": k}.get(jagged, groups * m)
        return ProblemSpec(
            form, groups, None if jagged == "m" else m, None if jagged == "n" else n, None if jagged == "k" else k,
            bucket(total), 0 if jagged else bucket(m),
            classify(self.a, form == "jagged_n" and self.a.dim() == 2), classify(self.b, form == "jagged_m" and self.b.dim() == 2),
            classify_fresh(self.out_dtype, [self.out_shape]) if self.out is None else classify(self.out),
            None if self.c is None else classify(self.c),
            *rest,
        )  # type: ignore[arg-type]  # fmt: skip

    def _list_extents(self) -> tuple[int | None, int | None, int | None, int, int]:
        ms, ks = [x.shape[0] for x in self.a], [x.shape[1] for x in self.a]
        ns = [y.shape[1] for y in self.b]
        m, n, k = (v[0] if v and min(v) == max(v) else None for v in (ms, ns, ks))
        return m, n, k, bucket(sum(ms)), bucket(max(ms, default=0))

    def _list_operands(self, a: torch.dtype, b: torch.dtype) -> tuple[OperandSpec, OperandSpec, OperandSpec, OperandSpec | None]:
        dtype = self.out_dtype
        out = classify_fresh(dtype, self.out_shape) if self.out is None else classify_list(self.out, dtype)
        c = None if self.c is None else classify_list(self.c, dtype)
        return classify_list(self.a, a), classify_list(self.b, b), out, c

    # --- what a user may ask --------------------------------------------------------------------

    @property
    def zero_unowned(self) -> bool:
        """Whether rows that no group owns become zero (multigemm allocates) or stay (the caller's `out`)."""
        return self.out is None

    @property
    def given_out(self) -> Any:
        """The caller's own `out` object, or None."""
        return self._given_out

    @property
    def requires_grad(self) -> bool:
        """Whether any input asks for a gradient."""
        return any(x.requires_grad for name in ("a", "b", "c", "bias") for x in self._each(name))

    @property
    def squeezed(self) -> bool:
        """Whether this is one product of two matrices, whose result is a matrix."""
        return self._squeeze

    def sizes(self) -> list[tuple[int, int, int]]:
        """(m, n, k) of every group; waits for the device if the sizes live there."""
        if self.extents is None:
            return [(x.shape[0], y.shape[1], x.shape[1]) for x, y in zip(self.a, self.b, strict=True)]
        _, _, m, n, k = self.extents
        if self.valid_rows is not None:
            rows = self.valid_rows.read()
            return [(min(max(r, 0), m), n, k) for r in np.diff(rows).tolist()]
        if self.grouping is None:
            return [(m, n, k)] * self.spec.groups
        lengths = [end - start for start, end in self.bounds()]
        at = "mnk".index(self.form[-1])
        return [(*(m, n, k)[:at], length, *(m, n, k)[at + 1 :]) for length in lengths]  # type: ignore[misc]

    def bounds(self) -> list[tuple[int, int]]:
        """(start, end) of every group along the jagged direction, clamped as the kernels clamp."""
        assert self.grouping is not None and self.extents is not None
        total = {"m": self.extents.m, "n": self.extents.n, "k": self.extents.k}[self.form[-1]]
        offsets = self.grouping.read().tolist()
        starts = [min(max(s, 0), total) for s in offsets[:-1]]
        return [(s, min(max(e, s), total)) for s, e in zip(starts, offsets[1:], strict=True)]

    def groups(self) -> Iterator[GroupView]:
        """Every product as views on the host, one after the other; waits for the device."""
        a, b, c, bias = (self._on_host(x) for x in (self.a, self.b, self.c, self.bias))
        cuts = self.bounds() if self.grouping is not None else [(0, 0)] * self.spec.groups
        for g, (m, n, k) in enumerate(self.sizes()):
            yield self._view(g, m, n, k, cuts[g], a, b, c, bias)

    def _view(self, g: int, m: int, n: int, k: int, cut: tuple[int, int], a: Any, b: Any, c: Any, bias: Any) -> GroupView:
        rows, cols, inner = slice(0, m), slice(0, n), slice(0, k)
        along = slice(*cut)
        if self.form == "jagged_m":
            rows = along
        elif self.form == "jagged_n":
            cols = along
        elif self.form == "jagged_k":
            inner = along
        if self.form == "per_group":
            where: Any = g
        elif self.form in ("jagged_m", "jagged_n"):
            where = (rows, cols)
        else:
            where = (g, rows, cols)
        x = a[g] if self.form == "per_group" or a.dim() == 3 else a
        y = b[g] if self.form == "per_group" or b.dim() == 3 else b
        vector = None if bias is None else bias[g] if self.form == "per_group" or bias.dim() == 2 else bias[cols]
        return GroupView(g, m, n, k, x[rows, inner], y[inner, cols], None if c is None else c[where], vector, where)

    @staticmethod
    def _on_host(x: Operand | None) -> Any:
        if x is None:
            return None
        return x.detach().cpu() if isinstance(x, Tensor) else [t.detach().cpu() for t in x]

    @property
    def flops(self) -> int:
        """2*m*n*k summed over the groups; waits for the device if the sizes live there."""
        return sum(2 * m * n * k for m, n, k in self.sizes())

    @property
    def bytes(self) -> int:
        """Bytes that must move at least once: A, B of the non-empty groups, C read if beta != 0, the result."""
        a, b = self._each("a"), self._each("b")
        a_size, b_size = (x[0].element_size() if x else 0 for x in (a, b))
        sizes = [s for s in self.sizes() if s[0] and s[1]]
        c_size = 0 if self.c is None else self._each("c")[0].element_size()
        total = sum(m * n * (self.out_dtype.itemsize + c_size) for m, n, _ in sizes)
        a_bytes, b_bytes = (sum(m * k for m, _, k in sizes) * a_size, sum(k * n for _, n, k in sizes) * b_size)
        if self.spec.b.shared and sizes:
            b_bytes = sizes[0][1] * sizes[0][2] * b_size
        if self.spec.a.shared and sizes:
            a_bytes = sizes[0][0] * sizes[0][2] * a_size
        return total + a_bytes + b_bytes

    def __repr__(self) -> str:
        from multigemm.text import problem_text

        return problem_text(self)
