"""What runs when the torch operator is called on real tensors: the launch cache first, else the whole way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.planning.launch_cache import LAUNCHES, key_of, one_cut
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select.choose import choose
from multigemm.torch_internals import any_requires_grad, grad_enabled


def names(backend: str) -> Any:
    """The operator's schema holds text only: "auto", one name, or names joined by commas."""
    return backend.split(",") if "," in backend else backend


def entry(special: int, general: Callable[..., Any]) -> Callable[..., Tensor]:
    """The operator on real tensors, as a kernel of torch's dispatcher.

    `special` holds the dispatch keys, as bits, that have work to do below autograd. With one of them, or where
    gradients are wanted, the call goes to `general`, torch's own way.
    """

    def run(
        keyset: Any, a: Tensor, b: Tensor, offsets: Tensor | None = None, sizes: Tensor | None = None,
        ends: Tensor | None = None, valid_rows: Tensor | None = None, c: Tensor | None = None,
        bias: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        if special and (keyset.raw_repr() & special or (grad_enabled() and any_requires_grad(a, b, c, bias))):
            return general(keyset, a, b, offsets, sizes, ends, valid_rows, c, bias, **options)  # type: ignore[no-any-return]
        kind, cut, several = one_cut(offsets, sizes, ends)
        call = (options.get("jagged", "m"), a, b, kind, cut, valid_rows, c, bias, None)
        key = None if several else key_of(call, ("operator", *options.items()))
        found, class_key = (None, None) if key is None else LAUNCHES.recall(key, call)
        if found is not None:
            return found
        if a is None or b is None:  # torch lets it through
            raise InvalidProblem("a or b is None; both must be tensors")
        asked = {name: value for name, value in options.items() if name not in ("backend", "grad_backend")}
        problem = GroupedGemmProblem(
            a, b, offsets=offsets, sizes=sizes, ends=ends, valid_rows=valid_rows, c=c, bias=bias, **asked
        )
        choice = choose(problem, names(options.get("backend", "auto")))
        return LAUNCHES.run((key, class_key), kind, choice, problem)  # type: ignore[no-any-return]

    return run
