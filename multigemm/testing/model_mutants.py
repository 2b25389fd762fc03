"""Planted faults, and the hunt for them: proof that the suite can fail.

Each mutant is the correct tiled model kernel with one thing wrong, of the kind that real kernels have
shipped with. `hunt` draws cases, runs every oracle on them, and reports the first that sees the fault.
A mutant that survives means that the suite is blind there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from multigemm.reference.dtypes import round_once, ulp
from multigemm.reference.numpy_reference import activate
from multigemm.testing import relations
from multigemm.testing.case import Case
from multigemm.testing.deep_oracles import changed_sizes, lying_sizes, other_contents, run_oracles
from multigemm.testing.model_kernel import Faults, ModelBackend
from multigemm.testing.oracles import Outcome, check
from multigemm.testing.placed_case import DeviceCase
from multigemm.testing.strategies import Limits, random_case
from multigemm.testing.subject import Subject

HUNTING = Limits(work=1 << 14, groups=20, longest=80)
QUANTISED_HUNTING = Limits(work=1 << 15, groups=20, quantised=1)


def _toward_zero(x: Any, dtype: torch.dtype) -> Any:
    near = round_once(x, dtype)
    if not dtype.is_floating_point:
        return near
    wide = near.astype(np.float64)
    with np.errstate(all="ignore"):
        over = np.abs(wide) > np.abs(x.astype(np.float64))
        return np.where(over, wide - np.sign(wide) * ulp(wide, dtype), wide).astype(near.dtype)


def _half_away(x: Any, dtype: torch.dtype) -> Any:
    if x.dtype.kind in "iu":
        return round_once(x, dtype)
    with np.errstate(all="ignore"):
        return round_once(x.astype(np.float64) * (1 + 2.0**-40), dtype)


def _through_bfloat16(x: Any, dtype: torch.dtype) -> Any:
    return round_once(x if x.dtype.kind in "iu" else round_once(x, torch.bfloat16).astype(np.float64), dtype)


def _through_float32(x: Any, dtype: torch.dtype) -> Any:
    twice = x.dtype == np.float64 and dtype.itemsize == 2
    return round_once(round_once(x, torch.float32).astype(np.float64) if twice else x, dtype)


def _saturating(x: Any, dtype: torch.dtype) -> Any:
    if x.dtype.kind in "iu":
        return round_once(np.clip(x, -(2**31) + 1, 2**31 - 2), dtype)
    return round_once(np.clip(x, -1e30, 1e30), dtype)


def _truncate_to_tf32(x: Any) -> Any:
    if x.dtype != np.float32:
        return x
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _round_to_bfloat16(x: Any) -> Any:
    return x if x.dtype.kind == "i" else round_once(x.astype(np.float64), torch.bfloat16).astype(x.dtype)


def _flush(x: Any) -> Any:
    return x if x.dtype.kind == "i" else np.where(np.abs(x) < 2.0**-12, 0, x).astype(x.dtype)


def _flush_results(x: Any, dtype: torch.dtype) -> Any:
    """Subnormal numbers of a 16-bit float are lost, as where a kernel is compiled to flush them."""
    lost = dtype == torch.float16 and x.dtype.kind == "f"
    return round_once(np.where(np.abs(x) < 2.0**-14, 0, x).astype(x.dtype) if lost else x, dtype)


def _accumulator_of(bits: int) -> Callable[[Any], Any]:
    """A float32 accumulator that keeps so many bits of its sums."""

    def truncate(x: Any) -> Any:
        if x.dtype != np.float32:
            return x
        return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFFFFF << (24 - bits) & 0xFFFFFFFF)).view(
            x.dtype
        )

    return truncate


def _factor_bfloat16(x: float) -> float:
    return float(round_once(np.array([x]), torch.bfloat16)[0])


def _relu_without_nan(x: Any, name: str | None) -> Any:
    return np.fmax(x, 0).astype(x.dtype) if name == "relu" else activate(x, name)


def _other_gelu(x: Any, name: str | None) -> Any:
    return activate(x, {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}.get(str(name), name))


_erf: Any = np.frompyfunc(math.erf, 1, 1)


def _gelu_cancels(x: Any, name: str | None) -> Any:
    """torch's formula, whose sum 1 + erf loses the tail of negative x."""
    if name != "gelu":
        return activate(x, name)
    return 0.5 * x * (1 + np.asarray(_erf(x * math.sqrt(0.5))).astype(x.dtype))


def _gelu_tanh_cancels(x: Any, name: str | None) -> Any:
    """Likewise 1 + tanh."""
    if name != "gelu_tanh":
        return activate(x, name)
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _wrap16(index: Any) -> Any:
    return np.where(index >= 64, index - 64, index)


def _swap_first_two(walk: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return walk[1:]


def _without_last(walk: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return walk[:-1] if len(walk) > 1 else walk


def _renumbered(walk: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Tiles of a group numbered on from the group before."""
    return [(g, t + (1 if g and t == 0 and len(walk) > 2 else 0)) for g, t in walk]


MUTANTS: dict[str, Faults] = {
    "K tail lost": Faults(k_steps=lambda steps: max(steps - 1, min(steps, 1))),
    "last K step lost": Faults(k_steps=lambda steps: max(steps - 1, 0)),
    "one K step too many": Faults(k_steps=lambda steps: steps + 1, mask_k_a=False, mask_k_b=False),
    "no K mask": Faults(mask_k_a=False, mask_k_b=False),
    "no K mask on A": Faults(mask_k_a=False),
    "no K mask on B": Faults(mask_k_b=False),
    "no M mask on the store": Faults(mask_m_store=False),
    "no N mask on the store": Faults(mask_n_store=False),
    "no masks on the store": Faults(mask_m_store=False, mask_n_store=False),
    "wrong group's B": Faults(group_of={"b": lambda g, count: max(g - 1, 0)}),
    "B of group 0 for all": Faults(group_of={"b": lambda g, count: 0}),
    "wrong group's A": Faults(group_of={"a": lambda g, count: min(g + 1, count - 1)}),
    "wrong group's C": Faults(group_of={"c": lambda g, count: max(g - 1, 0)}),
    "results of two groups swapped": Faults(group_of={"out": lambda g, count: g ^ 1 if g ^ 1 < count else g}),
    "start one late": Faults(start=lambda value, g: value + (g > 0)),
    "start one early": Faults(start=lambda value, g: value - (g > 0)),
    "end one late": Faults(end=lambda value, g: value + 1),
    "end one early": Faults(end=lambda value, g: value - 1),
    "first offset ignored": Faults(ignore_head=True),
    "offsets not clamped": Faults(clamp=False),
    "rows one short": Faults(extent=lambda name, value: max(value - (name == "m"), 0)),
    "columns one short": Faults(extent=lambda name, value: max(value - (name == "n"), 0)),
    "k one short": Faults(extent=lambda name, value: max(value - (name == "k"), 0)),
    "rows rounded up to 8": Faults(extent=lambda name, value: -(-value // 8) * 8 if name == "m" else value),
    "columns rounded up to 8": Faults(extent=lambda name, value: -(-value // 8) * 8 if name == "n" else value),
    "k rounded down to 8": Faults(extent=lambda name, value: value // 8 * 8 if name == "k" and value > 8 else value),
    "stale accumulator": Faults(stale=True),
    "a tile skipped": Faults(tiles=_without_last),
    "the first tile skipped": Faults(tiles=_swap_first_two),
    "tiles numbered past their group": Faults(tiles=_renumbered),
    "last group left out": Faults(leaves_last_group=True),
    "indices wrap at 64": Faults(index=_wrap16),
    "strides of A swapped": Faults(swap="a"),
    "strides of B swapped": Faults(swap="b"),
    "strides of the result swapped": Faults(swap="out"),
    "strides of C swapped": Faults(swap="c"),
    "A taken for contiguous": Faults(contiguous="a"),
    "B taken for contiguous": Faults(contiguous="b"),
    "result taken for contiguous": Faults(contiguous="out"),
    "C taken for contiguous": Faults(contiguous="c"),
    "tile stored transposed": Faults(transpose_out=True),
    "beta = 0 reads C": Faults(reads_c_at_beta_zero=True),
    "alpha forgotten": Faults(epilogue="no alpha"),
    "beta taken for 1": Faults(epilogue="beta is one"),
    "bias forgotten": Faults(epilogue="no bias"),
    "bias scaled by alpha": Faults(epilogue="bias before alpha"),
    "activation before C and bias": Faults(epilogue="activation first"),
    "activation forgotten": Faults(epilogue="no activation"),
    "rounded before the activation": Faults(epilogue="rounds before activation"),
    "group 0's bias for all": Faults(shared_bias=True),
    "one bias value for all columns": Faults(one_bias_column=True),
    "output rounded toward zero": Faults(round=_toward_zero),
    "ties rounded away": Faults(round=_half_away),
    "output through bfloat16": Faults(round=_through_bfloat16),
    "float64 rounded twice": Faults(round=_through_float32),
    "output saturates": Faults(round=_saturating),
    "bfloat16 accumulation": Faults(accumulate=torch.bfloat16),
    "float16 accumulation": Faults(accumulate=torch.float16),
    "float32 accumulation of float64": Faults(accumulate=torch.float32),
    "halves of K rounded": Faults(split_rounds=True),
    "tf32 for float32": Faults(inputs=_truncate_to_tf32),
    "inputs through bfloat16": Faults(inputs=_round_to_bfloat16),
    "small inputs flushed": Faults(inputs=_flush),
    "head rows not zeroed": Faults(zero_head=False),
    "tail rows not zeroed": Faults(zero_tail=False),
    "the user's other rows zeroed": Faults(zero_when_given=True),
    "valid_rows ignored": Faults(valid_rows_ignored=True),
    "empty K leaves the result unwritten": Faults(skip_empty_k=True),
    "NaN skipped": Faults(skip_nan=True),
    "sizes read when bound": Faults(early_metadata=True),
    "adds to the old result": Faults(adds_to_out=True),
    "subnormal results flushed": Faults(round=_flush_results),
    "an accumulator of 22 bits": Faults(sum=_accumulator_of(22)),
    "an accumulator of 17 bits": Faults(sum=_accumulator_of(17)),
    "factors through bfloat16": Faults(factor=_factor_bfloat16),
    "C through bfloat16": Faults(old=_round_to_bfloat16),
    "bias through bfloat16": Faults(bias=_round_to_bfloat16),
    "integers saturate": Faults(epilogue="integers saturate"),
    "integers through float32": Faults(epilogue="integers through float32"),
    "alpha = 0 multiplies": Faults(alpha_zero_multiplies=True),
    "relu of NaN is 0": Faults(activate=_relu_without_nan),
    "gelu and gelu_tanh exchanged": Faults(activate=_other_gelu),
    "gelu by 1 + erf, which cancels": Faults(activate=_gelu_cancels),
    "gelu_tanh by 1 + tanh, which cancels": Faults(activate=_gelu_tanh_cancels),
    "writes beside an input": Faults(writes_input=True),
    "another answer at the second call": Faults(drift=True),
    "K in parts where rows are many": Faults(parts=lambda rows, groups: 2 if rows > 3 else 1),
    "K in parts where groups are few": Faults(parts=lambda rows, groups: 3 if groups < 3 else 1),
    "K backwards in odd tiles": Faults(backwards=lambda tile: tile % 2 == 1),
}


def _zero_code(x: Any) -> Any:
    """Code 0 of e8m0 as the number 0, which shifting it into the exponent makes of it."""
    wide = x.astype(np.float32)
    return np.where(x.view(np.uint8) == 0, 0, wide).astype(np.float32) if x.dtype.itemsize == 1 else wide


QUANTISED_MUTANTS: dict[str, Faults] = {
    "blocks of a jagged K counted from its start": Faults(
        scale_block=lambda block, start, k, q: block + (np.arange(len(block)) + start % q >= q) if start % q else block
    ),
    "entry of the next group at a group's start": Faults(
        scale_block=lambda block, start, k, q: np.where(block == start // q, block + 1, block)
    ),
    "block index one short in the tail": Faults(
        scale_block=lambda block, start, k, q: np.where(block == (k - 1) // q, np.maximum(block - 1, 0), block)
    ),
    "scale of the group before": Faults(scale_group=lambda g: max(g - 1, 0)),
    "scale of group 0 for all": Faults(scale_group=lambda g: 0),
    "promotion lost": Faults(sum=_accumulator_of(14)),
    "code 0 of e8m0 is zero": Faults(scale=_zero_code),
    "scales through bfloat16": Faults(scale=_round_to_bfloat16),
    "high four bits first": Faults(low_first=False),
}
"""Faults of kernels for quantised operands; they fall to cases within QUANTISED_HUNTING."""

EQUIVALENT: dict[str, tuple[Faults, str]] = {
    "no M mask on the load": (Faults(mask_m_load=False), "rows past the group only reach results that are not stored"),
    "no N mask on the load": (
        Faults(mask_n_load=False),
        "columns past the group only reach results that are not stored",
    ),
}
"""Changes that no oracle may accuse: they cannot change a result, and here no read can trap."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The end of a hunt: which oracle saw the fault on which case; `oracle` is empty for a survivor."""

    name: str
    oracle: str
    tried: int
    seconds: float
    case: Case | None = None
    text: str = ""

    @property
    def killed(self) -> bool:
        return bool(self.oracle)


def examine(case: Case, subject: Subject, device: torch.device, *, deep: bool, seed: int = 0) -> Outcome:
    """All oracles that run anywhere: values and guards always, the others where `deep`."""
    return examine_device_case(DeviceCase.from_case(case, device), subject, deep=deep, seed=seed)


def examine_device_case(device_case: DeviceCase, subject: Subject, *, deep: bool, seed: int = 0) -> Outcome:
    """The same for a case that has been made real."""
    outcome = check(device_case, subject)
    if outcome.findings or not outcome.ran or not deep:
        return outcome
    run_oracles((other_contents, relations.relate, changed_sizes, lying_sizes), device_case, subject, outcome, seed)
    return outcome


MOST_PROBLEMS = 2000
"""Problems that a planted fault has to fall within; the rarest (a result between two 16-bit floats that rounding
through float32 moves) falls to the 567th. A number and no time, so that a busy machine judges as an idle one does."""


def hunt(backend: Any, *, problems: int = MOST_PROBLEMS, limits: Limits = HUNTING) -> Kill:
    """Draws cases until one oracle accuses the backend, so many at most."""
    subject, begin, tried = Subject(backend), time.monotonic(), 0
    device = torch.device("cpu")
    while tried < problems:
        case = random_case(tried, limits)
        outcome = examine(case, subject, device, deep=tried % 4 == 3, seed=tried)
        tried += 1
        if outcome.findings:
            found = outcome.findings[0]
            return Kill(subject.name, found.oracle, tried, time.monotonic() - begin, case, found.text)
    return Kill(subject.name, "", tried, time.monotonic() - begin)


def hunt_mutant(name: str) -> Kill:
    """The hunt for one planted fault, by its name."""
    return hunt(ModelBackend(name, MUTANTS[name]))
