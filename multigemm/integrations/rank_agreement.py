"""What ranks tell each other before rows travel, so that an error of one rank is raised on all of them.

A collective waits for every rank of a group: a rank that raises before it would leave the others waiting until the
group's timeout. So each rank reads its input first, and then takes part in the exchange of row counts in any case. The
counts travel together with an error or with the facts of the input. Every rank reads the same answer, so all go on, or
all raise the same error before anything is computed or written. The group stays usable.

A rank that died or hangs cannot answer: the others raise `LibraryError` within the group's timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from multigemm.errors import InvalidProblem, LibraryError, MultigemmError
from multigemm.torch_internals import group_timeout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FACTS = ("failed", "dtype", "features", "experts of each token", "parts", "needs a gradient", "unplaced")
COMPARED = FACTS[1:5]
"""The facts that must be the same on all ranks."""
SPIN_S, PAUSE_S = 0.05, 0.0001
"""A wait for the device asks without a pause at first: the device idles until the host goes on."""
SAFETY = 0.95
"""The fraction of a group's timeout after which a host gives up. At the timeout itself NCCL's watchdog ends the
process."""


class Input(NamedTuple):
    """The input of a rank. `write_counts` writes to a zeroed [ranks, 1 + parts] on the device: the number of invalid
    expert numbers, the same for every rank, then the counts of what each rank will be sent."""

    dtype: torch.dtype
    features: int
    top_k: int
    write_counts: Callable[[Tensor], None]
    needs_grad: bool = False


class Agreed(NamedTuple):
    """The counts on the host, [ranks][parts]: what this rank sends to each rank and receives from each. The received
    counts also on the device. `needs_grad`: whether any rank needs a gradient of its tokens."""

    sent: list[list[int]]
    received: list[list[int]]
    arriving: Tensor
    needs_grad: bool


def agree(
    read: Callable[[], Input],
    parts: int,
    experts: int,
    group: dist.ProcessGroup,
    device: torch.device,
    meanwhile: Callable[[], None] | None = None,
) -> Agreed:
    """Exchanges the counts that `read` finds: one collective, and one wait for the device.

    What `meanwhile` starts runs while the counts travel; it is not called where `read` failed.

    Raises:
        InvalidProblem: on every rank of the group alike, if `read` refused the input of one, numbers of experts lie
            outside of 0..experts-1, or the ranks' inputs do not fit each other.
        LibraryError: a rank does not answer within the group's timeout; or `read` failed on another rank.
    """
    failure: Exception | None = None
    ranks, facts = group.size(), len(FACTS)
    try:
        mine = read()
        known = (0, _number_of(mine.dtype), mine.features, mine.top_k, parts, int(mine.needs_grad))
        both = _message(known, ranks, parts, device)
        mine.write_counts(both[0, :, facts - 1 :])
    except Exception as error:  # whatever it is, the other ranks wait for this one
        failure = error
        both = _message((1, *[0] * (facts - 2)), ranks, parts, device)
    with explained(group):
        dist.all_to_all_single(both[1], both[0], group=group)
        copied = _HostCopy(both)
        if meanwhile is not None and failure is None:
            meanwhile()
        sent, received = copied.wait(group)
    if any(of_rank[0] for of_rank in received):
        _raise_everywhere(failure, group)
    _compare(received, experts, group)
    needs_grad = any(of_rank[FACTS.index("needs a gradient")] for of_rank in received)
    counts = slice(facts, None)
    return Agreed([n[counts] for n in sent], [n[counts] for n in received], both[1, :, counts], needs_grad)


def _message(facts: tuple[int, ...], ranks: int, parts: int, device: torch.device) -> Tensor:
    """The send buffer [2, ranks, facts and counts] with counts still 0, and the receive buffer."""
    both = torch.empty((2, ranks, len(FACTS) + parts), dtype=torch.int64, device=device)
    both[0].copy_(_repeated((*facts, *[0] * (parts + 1)), ranks, device))
    return both


@lru_cache(maxsize=64)
def _repeated(facts: tuple[int, ...], ranks: int, device: torch.device) -> Tensor:
    """The facts repeated for each rank. Cached, because a copy to a device takes as long as some launches."""
    return torch.tensor([facts] * ranks, dtype=torch.int64, device=device)


def same_on_all_ranks(what: str, facts: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raises InvalidProblem on every rank if two ranks differ in one of the `facts` about `what`."""
    found: list[Any] = [None] * group.size()
    with explained(group):
        dist.all_gather_object(found, facts, group=group)
    for name in facts:
        other = next((i for i, theirs in enumerate(found) if theirs[name] != found[0][name]), None)
        if other is not None:
            ranks = _ranks(group)
            raise InvalidProblem(
                f"{what} differ between ranks: {name} is {found[0][name]} on rank {ranks[0]} and {found[other][name]} "
                f"on rank {ranks[other]}"
            )


def _number_of(dtype: torch.dtype) -> int:
    if dtype not in DTYPES:
        raise InvalidProblem(f"tokens of {dtype} cannot travel to experts: use one of {', '.join(map(str, DTYPES))}")
    return DTYPES.index(dtype)


class _HostCopy:
    """A copy of numbers to the host, which is waited for when the numbers are needed."""

    def __init__(self, x: Tensor) -> None:
        self._host, self._device = x, x.device
        self._done: Any = None
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self, group: dist.ProcessGroup) -> Any:
        """The numbers. Raises if the device does not finish within the group's timeout."""
        start = time.monotonic()
        while self._done is not None and not self._done.query():
            waited = time.monotonic() - start
            if waited > SPIN_S and waited > SAFETY * group_timeout(group, self._device):
                raise LibraryError(_silence(group, f"no answer in {waited:.0f} s"))
            time.sleep(PAUSE_S if waited > SPIN_S else 0)  # lets other threads run, in any case
        return self._host.tolist()


def _raise_everywhere(failure: Exception | None, group: dist.ProcessGroup) -> None:
    """Tells all ranks of the first failure, and raises it."""
    told: list[Any] = [None] * group.size()
    mine = None if failure is None else (isinstance(failure, MultigemmError), f"{failure}" or type(failure).__name__)
    with explained(group):
        dist.all_gather_object(told, mine, group=group)
    index, (refused, text) = next((i, found) for i, found in enumerate(told) if found is not None)
    if failure is not None and not isinstance(failure, MultigemmError):
        raise failure
    whole = f"rank {_ranks(group)[index]} of {group.size()}: {text}"
    raise (InvalidProblem(whole) if refused else LibraryError(whole)) from failure


def _compare(facts_of: list[list[int]], experts: int, group: dist.ProcessGroup) -> None:
    compared = slice(FACTS.index(COMPARED[0]), FACTS.index(COMPARED[-1]) + 1)
    unplaced = FACTS.index("unplaced")
    if all(facts[unplaced] == 0 and facts[compared] == facts_of[0][compared] for facts in facts_of):
        return
    ranks = _ranks(group)
    for rank, facts in zip(ranks, facts_of, strict=True):
        if wrong := facts[unplaced]:
            raise InvalidProblem(
                f"rank {rank} of {group.size()}: an expert number lies outside of 0..{experts - 1} ({wrong} of them do)"
            )
    for name in COMPARED:
        values = [facts[FACTS.index(name)] for facts in facts_of]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            first, second = (DTYPES[v] if name == "dtype" else v for v in (values[0], values[other]))
            raise InvalidProblem(
                f"the ranks' tokens do not fit each other: {name} is {first} on rank {ranks[0]} and {second} on rank "
                f"{ranks[other]}"
            )


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _silence(group: dist.ProcessGroup, why: object) -> str:
    return (
        f"rank {dist.get_rank()} could not exchange rows with its group of {group.size()} ranks; one of them "
        f"has probably died or hangs: see their logs ({why})"
    )


@contextmanager
def explained(group: dist.ProcessGroup) -> Iterator[None]:
    """A context that adds to a failing collective's error what was going on, and which rank to look at."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "onnection" in str(error) or "imed out" in str(error):
            raise LibraryError(_silence(group, error)) from error
        raise
