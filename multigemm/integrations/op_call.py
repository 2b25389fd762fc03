"""What runs when the torch operator is called on real tensors: the launch cache first, else the whole way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.planning.launch_cache import LAUNCHES, key_of, one_cut
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select.choose import choose
from multigemm.torch_internals import SPECIAL, any_requires_grad, dispatch_keys, grad_enabled, in_transform


def names(backend: str) -> Any:
    """The operator's schema holds text only: "auto", one name, or names joined by commas."""
    return backend.split(",") if "," in backend else backend


def kernel(general: Callable[..., Any] | None = None) -> Callable[..., Tensor]:
    """The operator on real tensors, as a kernel of torch's dispatcher.

    As the kernel for autograd it gets `general`, torch's own way, which takes on what the launch cache does not serve
    and where gradients are wanted or a dispatch key below autograd has work to do: a mode, a transform, a wrapper.
    """

    def run(
        a: Tensor, b: Tensor, offsets: Tensor | None = None, sizes: Tensor | None = None, ends: Tensor | None = None,
        valid_rows: Tensor | None = None, c: Tensor | None = None, bias: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        kind, cut, several = one_cut(offsets, sizes, ends)
        call = (options.get("jagged", "m"), a, b, kind, cut, valid_rows, c, bias, None)
        key = None if several or in_transform() else key_of(call, ("operator", *options.items()))
        found, class_key = (None, None) if key is None else LAUNCHES.recall(key, call)
        if found is not None:
            return found
        if general is not None:
            keys = dispatch_keys(a, b, offsets, sizes, ends, valid_rows, c, bias)
            if keys.raw_repr() & SPECIAL or (grad_enabled() and any_requires_grad(a, b, c, bias)):
                return general(keys, a, b, offsets, sizes, ends, valid_rows, c, bias, **options)  # type: ignore[no-any-return]
        if a is None or b is None:  # torch lets it through
            raise InvalidProblem("a or b is None; both must be tensors")
        asked = {name: value for name, value in options.items() if name not in ("backend", "grad_backend")}
        problem = GroupedGemmProblem(
            a, b, offsets=offsets, sizes=sizes, ends=ends, valid_rows=valid_rows, c=c, bias=bias, **asked
        )
        choice = choose(problem, names(options.get("backend", "auto")), eager=True)
        return LAUNCHES.run((key, class_key), kind, choice, problem)  # type: ignore[no-any-return]

    return run
