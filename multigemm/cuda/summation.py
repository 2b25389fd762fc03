"""How a kernel sums along K. This decides the bits of an element, besides its row of A, its column of B and K.

Every kernel keeps one accumulator per element and adds to it from k = 0 on. What differs is the instruction: how many
products it adds at once, and how it rounds. A backend declares the `Summation` of each config; for a batch-invariant
problem it uses configs of one `Summation` alone, whatever the sizes.

* Tensor cores align the `step` products of one instruction and the sum so far, add them in an order that does not
  matter, and truncate once. mma.sync and wgmma of the same step do so alike on the GPUs in `ALIKE`; the shape of the
  instruction, its operands' places (rows on its m or on its n side) and padding with zeros change nothing.
* Fused multiply-add rounds after each product; tensor cores for float64 do the same. A kernel that takes `step` k at a
  time in another order than the ascending one differs from all others. Padding K with zeros turns a sum
  of -0, which only underflow makes, into +0: so kernels that pad K to different multiples (`padded`) are told apart.
* Sums of integers are exact, or wrap: any order gives the same bits.
* Two kernels whose epilogues are compiled from other code may fuse alpha * sum + beta * C the one way or the other:
  `epilogue` tells them apart.
* Operands of more bits than the tensor cores read are rounded before or `truncated` there.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Summation(NamedTuple):
    """How one element is summed. `parts`: K is split into a number of parts that depends on the sizes, and their sums
    are added."""

    unit: Literal["mma.sync", "wgmma", "fused multiply-add", "integers"]
    step: int = 1
    padded: int = 0
    parts: bool = False
    epilogue: str = ""
    truncated: bool = False

    def __str__(self) -> str:
        if self.unit == "integers":
            return "exact sums of integers"
        by = f"{self.step} products at once"
        if self.unit == "fused multiply-add":
            by = "each product rounded" + (f", {self.step} k in another order" if self.step > 1 else "")
        cut = ", in parts whose number depends on the sizes" if self.parts else ""
        operands = ", operands truncated" if self.truncated else ""
        return f"one accumulator, ascending k, {self.unit}, {by}{cut}{operands}"


INTEGERS = Summation("integers")
ALIKE = frozenset({(9, 0)})
"""Compute capabilities on which mma.sync and wgmma of the same step give the same bits."""


def same_bits(one: Summation, other: Summation, capability: tuple[int, int]) -> bool:
    """Whether two kernels give an element the same bits on GPUs of this compute capability."""
    tensor_cores = {one.unit, other.unit} <= {"mma.sync", "wgmma"}
    if tensor_cores and capability in ALIKE:
        alike = one.step == other.step and one.truncated == other.truncated
        return alike and not one.parts and not other.parts
    return one == other and not one.parts


def difference(found: Summation, wanted: Summation, capability: tuple[int, int]) -> str:
    """Why a config cannot run a batch-invariant problem; "" if it can."""
    if same_bits(found, wanted, capability):
        return ""
    return f"batch_invariant=True takes kernels that sum alike ({wanted}), and this one does not ({found})"
