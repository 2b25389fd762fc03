"""DTensor: the sharding strategies with which the operator runs on a mesh.

    import multigemm.integrations.dtensor  # registers the strategies

For each mesh dimension, one of these, and torch redistributes operands that lie otherwise:

* experts: a and b (c, a bias per group, `valid_rows`) sharded by group -> the result too (batched, masked);
* columns: b sharded along N (c and bias too) -> the result along N (all but jagged n);
* rows: a sharded along M (c too) -> the result along M (all but jagged m and masked);
* contraction: a and b sharded along K -> partial sums (all but jagged k; without C, bias, activation,
  which belong to the finished sum);
* everything replicated.

A jagged extent cannot be sharded, because groups do not end where shards do; tokens of a jagged m
problem with experts on other ranks need an exchange: `multigemm.nn.parallel.ExpertParallel`.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from multigemm.integrations.torch_op import overload

TENSORS = ("a", "b", "offsets", "sizes", "ends", "valid_rows", "c", "bias")
STATIC = [
    "jagged", "alpha", "beta", "activation", "out_dtype", "precision", "deterministic", "batch_invariant", "backend",
    "grad_backend",
]  # fmt: skip


def strategies(*args: Any, **options: Any) -> list[tuple[list[Any], list[Any]]]:
    """Lists the strategies of one mesh dimension, each as (placement of the result, placements of the operands)."""
    given = dict(zip(TENSORS, args, strict=False))
    form, bias = _form(given, options), given.get("bias")
    epilogue = bias is not None or given.get("c") is not None or options.get("activation") is not None
    a, b = given["a"].ndim, given["b"].ndim
    everywhere = {name: Replicate() for name in TENSORS}
    found: list[tuple[Any, dict[str, Any]]] = [(Replicate(), everywhere)]
    wide = 1 if form in ("jagged_m", "jagged_n", "one") else 2  # the result's column dimension
    if form in ("batched", "masked"):
        stacked = {name: Shard(0) for name in ("a", "b", "c", "valid_rows")}
        grouped = Shard(0) if bias is not None and bias.ndim == 2 else Replicate()
        found.append((Shard(0), {**everywhere, **stacked, "bias": grouped}))
    if form != "jagged_n":
        column = Shard(bias.ndim - 1) if bias is not None else Replicate()
        found.append((Shard(wide), {**everywhere, "b": Shard(b - 1), "c": Shard(wide), "bias": column}))
    if form not in ("jagged_m", "masked"):
        found.append((Shard(wide - 1), {**everywhere, "a": Shard(a - 2), "c": Shard(wide - 1)}))
    if form != "jagged_k" and not epilogue:
        found.append((Partial(), {**everywhere, "a": Shard(a - 1), "b": Shard(b - 2)}))
    return [([out], [_placed(given, name, places) for name in list(given)]) for out, places in found]


def _placed(given: dict[str, Any], name: str, places: dict[str, Any]) -> Any:
    return None if given[name] is None else places[name]


def _form(given: dict[str, Any], options: dict[str, Any]) -> str:
    if any(given.get(name) is not None for name in ("offsets", "sizes", "ends")):
        return f"jagged_{options.get('jagged', 'm')}"
    if given.get("valid_rows") is not None:
        return "masked"
    return "one" if given["a"].ndim == 2 else "batched"


def _register() -> None:
    register_sharding(overload)(strategies)
    # Decisions are cached by schema; every keyword that decides must be part of the key, and by default none is.
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info[overload]
    propagator.op_to_schema_info[overload] = type(info)(
        static_argnum=len(TENSORS), static_kwargkey=STATIC, needs_pytree=True
    )


_register()
