"""`torch.ops.multigemm.grouped_gemm`: the grouped GEMM as a torch operator.

With it come autograd, torch.compile without graph breaks, torch.export, autocast and CUDA graphs.
The operator takes the keywords of `multigemm.grouped_gemm`, as tensors and plain values; it always
returns new memory. `backend` is a name, several joined by commas, or "auto"; the gradients are
problems of their own and choose by `grad_backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multigemm.errors import InvalidProblem, UnknownKeyword, unknown_keyword_text
from multigemm.integrations.gradients import NAMES, Call, differentiated, fused_rows, gradients, stacked
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.planning.launch_key import NO_SCALES, PLAIN_LENGTH, Key, key_of, one_cut
from multigemm.planning.launch_key import Call as LaunchCall
from multigemm.problem import epilogue, forms, scales
from multigemm.problem.forms import Result
from multigemm.problem.fused import Fused, Gate, Index, fused_shapes, picked_like, refuse_in_operator
from multigemm.problem.problem import SCALES, GroupedGemmProblem
from multigemm.problem.spec import FLOAT8, GATES, PRECISIONS
from multigemm.select.choose import choose
from multigemm.torch_internals import (
    SPECIAL,
    any_requires_grad,
    differentiable,
    dispatch_keys,
    grad_enabled,
    in_transform,
    is_watched,
    take_calls,
    without_autocast,
)

SCHEMA = (
    "grouped_gemm(Tensor a, Tensor b, Tensor? offsets=None, Tensor? sizes=None, Tensor? ends=None, "
    "Tensor? valid_rows=None, Tensor? c=None, Tensor? bias=None, Tensor? scale_a=None, Tensor? scale_b=None, "
    "Tensor? zero_b=None, Tensor? a_rows=None, Tensor? b_rows=None, Tensor? row_scale=None, Tensor? combine=None, "
    "Tensor? combine_weights=None, Tensor? out_rows=None, *, str jagged='m', float alpha=1.0, float? beta=None, "
    "str? activation=None, ScalarType? out_dtype=None, str precision='ieee', "
    "bool deterministic=True, bool? batch_invariant=None, str backend='auto', str grad_backend='auto', "
    "str? b_format=None, str accumulate='promoted', str glu_layout='halves', float glu_alpha=1.0, "
    "float glu_beta=0.0, float? glu_limit=None, SymInt? rows=None) -> Tensor"
)
FUSED = ("a_rows", "b_rows", "row_scale", "combine", "combine_weights", "out_rows")
NOT_FUSED = (None,) * len(FUSED)
GLU = ("glu_layout", "glu_alpha", "glu_beta", "glu_limit")
CUTS = ("offsets", "sizes", "ends", "valid_rows")
_library: Any = torch.library.Library("multigemm", "DEF")  # type: ignore[no-untyped-call]
_library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
packet: Any = torch.ops.multigemm.grouped_gemm
overload: Any = packet.default
TENSORS = tuple(x.name for x in overload._schema.arguments if not x.kwarg_only)
DEFAULTS = {x.name: x.default_value for x in overload._schema.arguments if x.kwarg_only}


def grouped_gemm(a: Tensor, b: Tensor, **keywords: Any) -> Tensor:
    """The operator as a function, with the keywords of `multigemm.grouped_gemm` that a graph can hold.

    Args:
        a, b: packed tensors; lists are not taken.
        keywords: those of `multigemm.grouped_gemm`, as tensors and plain values, without `out`, `config`, `check` and
            `preact_out`.
            `backend` is one text, names joined by commas; `grad_backend` is the same for the backward pass.

    Returns:
        The result, always in new memory; differentiable.

    Raises:
        InvalidProblem: an argument that the operator does not take, with the remedy.

    Example:
        >>> import torch
        >>> from multigemm.integrations import grouped_gemm
        >>> grouped_gemm(torch.ones(6, 4), torch.ones(3, 4, 2), ends=torch.tensor([1, 1, 6])).shape
        torch.Size([6, 2])
    """
    if isinstance(combine := keywords.get("combine"), tuple | list):
        keywords["combine"], keywords["combine_weights"] = combine
    return packet(a, b, **keywords)  # type: ignore[no-any-return]


def _refuse_arguments(*tensors: Any, **keywords: Any) -> None:
    """Refuses what the schema cannot hold: keywords, lists for tensors, lists of backends."""
    given = {**dict(zip(TENSORS, tensors, strict=False)), **keywords}
    kinds = {x.name: str(x.type) for x in overload._schema.arguments}
    refuse_in_operator(given)
    for name, x in given.items():
        if name not in kinds:
            raise UnknownKeyword(unknown_keyword_text("multigemm::grouped_gemm", name, tuple(kinds))) from None
        if "Tensor" in kinds[name] and not isinstance(x, Tensor | None):
            remedy = f"pass torch.as_tensor({name}, device=a.device)"
            if name in ("a", "b"):
                remedy = "pass tensors"
            raise InvalidProblem(
                f"{name} is a {type(x).__name__}, and the torch operator takes a tensor: {remedy}, or call "
                "multigemm.grouped_gemm, which takes lists and other libraries' arrays"
            ) from None
        if name in ("backend", "grad_backend") and not isinstance(x, str):
            raise InvalidProblem(f"{name}={x!r}: the torch operator takes one text: join the names by commas") from None


# --- real tensors: the launch cache first, else the whole way ---------------------------------------


def names(backend: str) -> Any:
    """A backend argument as the text in the operator's schema: "auto", one name, or names joined by commas."""
    return backend.split(",") if "," in backend else backend


Missed = Callable[[tuple[Key | None, Key | None], tuple[Any, ...], dict[str, Any]], Any]
"""Handles a call that the launch cache does not serve, given its keys, the keyword that cuts its groups, tensors and
options."""


def remembered(missed: Missed, watched: Callable[[], bool]) -> Callable[..., Any]:
    """The operator on real tensors: runs the launch of a call like an earlier one, else calls `missed`. It calls
    `missed` at once if the call is `watched`."""

    def run(
        a: Tensor, b: Tensor, offsets: Tensor | None = None, sizes: Tensor | None = None, ends: Tensor | None = None,
        valid_rows: Tensor | None = None, c: Tensor | None = None, bias: Tensor | None = None,
        scale_a: Tensor | None = None, scale_b: Tensor | None = None, zero_b: Tensor | None = None,
        a_rows: Tensor | None = None, b_rows: Tensor | None = None, row_scale: Tensor | None = None,
        combine: Tensor | None = None, combine_weights: Tensor | None = None, out_rows: Tensor | None = None, *,
        jagged: str = "m", alpha: float = 1.0, beta: float | None = None, activation: str | None = None,
        out_dtype: torch.dtype | None = None, precision: str = "ieee", deterministic: bool = True,
        batch_invariant: bool | None = None, backend: str = "auto", grad_backend: str = "auto",
        b_format: str | None = None, accumulate: str = "promoted", glu_layout: str = "halves", glu_alpha: float = 1.0,
        glu_beta: float = 0.0, glu_limit: float | None = None, rows: int | None = None, **unknown: Any,
    ) -> Any:  # fmt: skip
        kind, cut, several = one_cut(offsets, sizes, ends)
        keys: tuple[Key | None, Key | None] = None, None
        picks = a_rows, b_rows, row_scale, combine, combine_weights, out_rows
        fuses = activation in GATES or picks != NOT_FUSED
        if not several and not unknown and not watched():
            key_options: Key = (
                "operator", jagged, alpha, type(alpha), beta, type(beta), activation, out_dtype, precision,
                deterministic, type(deterministic), batch_invariant, type(batch_invariant), backend,
            )  # fmt: skip  # without grad_backend: where a gradient is wanted, there is no key
            call: LaunchCall = (jagged, a, b, kind, cut, valid_rows, c, bias, None)
            if not (scale_a is scale_b is zero_b is None and b_format is None and accumulate == "promoted"):
                key_options, call = (*key_options, b_format, accumulate), (*call, scale_a, scale_b, zero_b)
            if fuses:
                index = combine if out_rows is None else out_rows
                tensors = (*NO_SCALES, a_rows, b_rows, None, row_scale, index, combine_weights)
                call = (*call, *tensors[len(call) - PLAIN_LENGTH :])
                key_options = (*key_options, glu_layout, glu_alpha, glu_beta, glu_limit, combine is None, rows)
                several = combine is not None and out_rows is not None
            key = None if several else key_of(call, key_options)
            if key is not None:
                found, class_key = LAUNCHES.recall(key, call)
                if found is not None:
                    return found
                keys = key, class_key
        given = (a, b, offsets, sizes, ends, valid_rows, c, bias, scale_a, scale_b, zero_b, *picks)
        options = {
            "jagged": jagged, "alpha": alpha, "beta": beta, "activation": activation, "out_dtype": out_dtype,
            "precision": precision, "deterministic": deterministic, "batch_invariant": batch_invariant,
            "backend": backend, "grad_backend": grad_backend, "b_format": b_format, "accumulate": accumulate,
            "glu_layout": glu_layout, "glu_alpha": glu_alpha, "glu_beta": glu_beta, "glu_limit": glu_limit,
            "rows": rows, **unknown,
        }  # fmt: skip
        return missed(keys, given, options)

    run.__qualname__ = "multigemm::grouped_gemm"  # what Python says of a call that does not fit
    return run


def _handed_over(keys: Any, tensors: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Calls the operator through torch's dispatcher, which reaches `_for_autograd` or `_solved`."""
    try:
        return _dispatcher(*tensors, **options)  # type: ignore[no-any-return]
    except (TypeError, RuntimeError):  # of a call that the schema does not hold, or of the launch
        _refuse_arguments(*tensors, **options)
        raise


def _for_autograd(keys: Any, tensors: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """The kernel of the autograd dispatch key. Takes torch's general way if gradients are wanted, or if a dispatch key
    below autograd (a mode, a transform, a wrapper) has work to do."""
    _refuse_missing(*tensors[:2])
    dispatched, wanted = dispatch_keys(*tensors), grad_enabled() and any_requires_grad(*tensors)
    if wanted:
        for name, x in zip(TENSORS, tensors, strict=True):
            if name in ("a", "b", *SCALES) and x is not None:
                scales.refuse_gradient(name, x)
    if dispatched.raw_repr() & SPECIAL or wanted:
        return _general(dispatched, *tensors, **options)  # type: ignore[no-any-return]
    return _solved(keys, tensors, options)


def _solved(keys: Any, tensors: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Validates, chooses, binds and launches. Keeps the launch for later calls."""
    _refuse_missing(*tensors[:2])
    asked = {name: value for name, value in options.items() if name not in ("backend", "grad_backend")}
    given: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
    weights = given.pop("combine_weights")
    if given["combine"] is not None:
        given["combine"] = given["combine"], weights
    problem = GroupedGemmProblem(**given, **asked)
    choice = choose(problem, names(options["backend"]), eager=True)
    return LAUNCHES.run(keys, choice, problem)  # type: ignore[no-any-return]


def _refuse_missing(a: Tensor | None, b: Tensor | None) -> None:
    """Refuses None for a required tensor, which torch lets through."""
    for name, x in (("a", a), ("b", b)):
        if x is None:
            raise InvalidProblem(f"{name} is None: pass a tensor")


# --- shapes without data ----------------------------------------------------------------------------


def result_like(
    a: Tensor, b: Tensor, offsets: Tensor | None = None, sizes: Tensor | None = None, ends: Tensor | None = None,
    valid_rows: Tensor | None = None, c: Tensor | None = None, bias: Tensor | None = None,
    scale_a: Tensor | None = None, scale_b: Tensor | None = None, zero_b: Tensor | None = None,
    a_rows: Tensor | None = None, b_rows: Tensor | None = None, row_scale: Tensor | None = None,
    combine: Tensor | None = None, combine_weights: Tensor | None = None, out_rows: Tensor | None = None, *,
    jagged: str = "m", alpha: float = 1.0, beta: float | None = None, activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str = "ieee", b_format: str | None = None, accumulate: str = "promoted", rows: int | None = None,
    **_: Any,
) -> Tensor:  # fmt: skip
    """An empty tensor of the result's shape and dtype; refuses what the operator would refuse."""
    cuts = [x for x in (offsets, sizes, ends) if x is not None]
    if len(cuts) > 1:
        raise InvalidProblem("more than one of offsets, sizes and ends was given: pass exactly one of them")
    scales.check_words(b_format, accumulate)
    packed, dtypes = scales.format_of(b.dtype, b_format), (a.dtype, b.dtype)
    squeezed = not cuts and valid_rows is None and a.dim() == 2 and b.dim() == 2
    if squeezed:
        a, b = a.unsqueeze(0), b.unsqueeze(0)
    if packed:
        b = scales.unpacked_shape(a, b)
    a, b = picked_like(a, a_rows, "a_rows", jagged), picked_like(b, b_rows, "b_rows", jagged)
    masked = valid_rows is not None
    extents = forms.infer(a, b, jagged=jagged, grouped=bool(cuts), masked=masked, squeezed=squeezed)
    groups = _count(extents.groups, cuts, offsets is not None)
    product = Result(extents.form, groups, extents.result_shape(groups), squeezed)
    result = fused_shapes(product, activation, combine, out_rows, rows)
    given = scales.Given(scale_a, scale_b, zero_b, accumulate)
    quantised = scales.is_quantised(*dtypes, packed, given)
    if quantised:
        operands = scales.Operands(extents.form, groups, *dtypes, a.shape, b.shape, squeezed, in_memory=False)
        scales.read(lambda x, _: x, operands, given, packed)
    compute = dtypes[0] if quantised else epilogue.compute_dtype(*dtypes)
    dtype = epilogue.result_dtype(out_dtype, None, compute, quantised)
    epilogue.check_activation(activation, compute)
    epilogue.one_of(precision, "precision", PRECISIONS)
    for name, x in (("alpha", alpha), ("beta", beta)):
        if isinstance(x, float):  # a number that is traced has no value yet
            epilogue.scalar(x, name, compute)
    if c is not None:
        result.fit(c, "c")
    elif beta is not None and beta != 0:
        raise InvalidProblem(f"beta={beta} needs c: pass it, or leave beta out")
    if bias is not None:
        product.fit_bias(bias)
    return a.new_empty(result.shape[squeezed:], dtype=dtype)


def _count(groups: int | None, cuts: list[Tensor], head: bool) -> int:
    """The number of groups: that of a stacked operand, else from the length of the cut."""
    if not cuts:
        assert groups is not None
        return groups
    count = cuts[0].shape[0] - int(head)  # torch 2.11 has no SymInt minus bool
    if groups is not None and count != groups:
        raise InvalidProblem(
            f"the operands have {groups} groups and the offsets make {count}: the numbers must be equal"
        )
    return count


# --- gradients --------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], given: dict[str, Any], output: Tensor) -> None:
    """Saves what the backward pass reads: the operands, and the result of relu. Without fused keywords C and bias are
    saved only to recompute a pre-activation."""
    kept, options = dict(zip(TENSORS, inputs, strict=True)), DEFAULTS | given  # the dispatcher drops defaults
    options["beta"] = epilogue.default_beta(options["beta"], kept["c"])
    ctx.fused = any(kept[name] is not None for name in FUSED) or options["activation"] in GATES
    relu, ctx.like = options["activation"] == "relu", {}
    if not ctx.fused and (relu or options["activation"] is None):
        extras = {name: kept[name] for name in ("c", "bias") if kept[name] is not None}
        ctx.like = {name: torch.empty_like(x, device="meta") for name, x in extras.items()}
        kept |= dict.fromkeys(extras)
    ctx.save_for_backward(*kept.values(), output if relu and not ctx.fused else None)
    ctx.options = options


def _backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    *inputs, out = ctx.saved_tensors
    needs = ctx.needs_input_grad[2:]
    if ctx.fused:
        return tuple(differentiated(inputs, needs, lambda given: [_fused_result(given, ctx.options, grad)], [grad]))
    call, squeezed = _call_of(dict(zip(TENSORS, inputs, strict=True)) | ctx.like, ctx.options)
    if squeezed:
        grad, out = grad.unsqueeze(0), None if out is None else out.unsqueeze(0)
    named = dict(zip(TENSORS, needs, strict=True))
    da, db, dc, dbias = gradients(call, grad, out, tuple(named[name] for name in NAMES))
    if squeezed:
        da, db, dc = (None if x is None else x[0] for x in (da, db, dc))
    found = {"a": da, "b": db, "c": dc, "bias": dbias}
    return tuple(found.get(name) for name in TENSORS)


def _call_of(given: dict[str, Any], o: dict[str, Any]) -> tuple[Call, bool]:
    """A call of the operator, and whether its two matrices became stacks of one."""
    a, b, c, scales_given = given["a"], given["b"], given["c"], {name: given[name] for name in SCALES}
    cut = {name: given[name] for name in CUTS if given[name] is not None}
    squeezed = not cut and a.dim() == 2 and b.dim() == 2
    if squeezed:
        a, b, c = (None if x is None else x.unsqueeze(0) for x in (a, b, c))
        scales_given = {name: stacked(x) for name, x in scales_given.items()}
    form: Any = "masked" if "valid_rows" in cut else f"jagged_{o['jagged']}" if cut else "batched"
    if form.startswith("jagged"):
        cut["jagged"] = o["jagged"]
    options = {name: o[name] for name in ("precision", "deterministic", "batch_invariant", "grad_backend")}
    narrow = a.dtype in FLOAT8 or b.dtype in (*FLOAT8, torch.uint8, scales.FLOAT4)
    quantised = narrow or given["scale_b"] is not None or o["b_format"] is not None
    words = {"b_format": o["b_format"], "accumulate": o["accumulate"]}
    call = Call(
        form=form, gemm=grouped_gemm, a=a, b=b, c=c, bias=given["bias"], cut=cut,
        options={**options, "backend": o["grad_backend"]}, alpha=o["alpha"], beta=o["beta"], activation=o["activation"],
        quantised={**scales_given, **words} if quantised else {},
    )  # fmt: skip
    return call, squeezed


def _fused_result(inputs: list[Any], o: dict[str, Any], like: Tensor) -> Tensor:
    """The result as differentiable operations: rows picked, product, gate, row_scale, sums."""
    given: dict[str, Any] = dict(zip(TENSORS, inputs, strict=True))
    call, squeezed = _call_of(given, o)
    gate = Gate(o["activation"], *(o[name] for name in GLU)) if o["activation"] in GATES else None
    indices = ("a_rows", "b_rows", "combine", "out_rows")
    at: dict[str, Any] = {name: Index(given[name], True) for name in indices if given[name] is not None}
    fused = Fused(gate, **at, rows=o["rows"] if given["combine"] is None else given["combine"].shape[0])
    out = fused_rows(call, fused, given["row_scale"], given["combine_weights"]).to(like.dtype)
    return out[0] if squeezed else out


_general = differentiable(overload, _backward, _keep)


# --- autocast and vmap ------------------------------------------------------------------------------


def _autocast(keyset: Any, a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Any:
    """Casts a and b to autocast's dtype, as torch does for a matmul. float32 operands of the epilogue stay."""
    _refuse_missing(a, b)
    dtype = torch.get_autocast_dtype(a.device.type)
    cuts, extras, others = rest[:4], rest[4:6], rest[6:]
    extras = tuple(x if x is None or x.dtype is torch.float32 else _lower(x, dtype) for x in extras)
    with without_autocast():
        return overload(_lower(a, dtype), _lower(b, dtype), *cuts, *extras, *others, **options)


def _lower(x: Tensor, dtype: torch.dtype) -> Tensor:
    lowered = x.is_floating_point() and x.dtype is not torch.float64 and x.dtype.itemsize > 1
    return x.to(dtype) if lowered else x


def _vmap(info: Any, in_dims: Any, *args: Any, **options: Any) -> Any:
    raise InvalidProblem(
        "torch.vmap over multigemm.grouped_gemm has no meaning of its own: put the mapped dimension into the groups "
        "(a [G, M, K] and b [G, K, N]), or loop"
    )


_dispatcher = take_calls(packet, remembered(_handed_over, is_watched))
_library.impl("grouped_gemm", remembered(_for_autograd, in_transform), "Autograd")
_library.impl("grouped_gemm", remembered(_solved, in_transform), "CPU")
_library.impl("grouped_gemm", remembered(_solved, in_transform), "CUDA")
_library.impl("grouped_gemm", _autocast, "AutocastCPU", with_keyset=True)
_library.impl("grouped_gemm", _autocast, "AutocastCUDA", with_keyset=True)
torch.library.register_fake("multigemm::grouped_gemm", result_like, lib=_library)
torch.library.register_vmap("multigemm::grouped_gemm", _vmap, lib=_library)
