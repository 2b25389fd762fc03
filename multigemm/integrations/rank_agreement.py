"""What ranks tell each other before rows travel, so that one that cannot go on ends all of them with one message.

A collective waits for every rank of a group: a rank that raises an error before it leaves the others waiting until the
group's timeout. So each rank reads its input first, and then takes part in the exchange of row counts whatever it
found. What was found travels with the counts: an error, or what the input is. Every rank reads the same answer, so all
go on, or all raise the same error, and nothing has been computed or written. The group stays usable.

A rank that died or hangs cannot say so: the others end with `LibraryError` within the group's timeout.
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
"""What has to be the same on all ranks."""
SPIN_S, PAUSE_S = 0.05, 0.0001
"""A wait for the device asks without a pause at first: the device idles until the host goes on."""
SAFETY = 0.95
"""The part of a group's timeout after which a host gives up: NCCL's watchdog ends the process at the timeout itself."""


class Input(NamedTuple):
    """What a rank brings: `counts` [ranks, parts], what it will send to each, and `unplaced`, how many numbers of
    experts are none (on the device, as the counts are)."""

    dtype: torch.dtype
    features: int
    top_k: int
    counts: Tensor
    unplaced: Tensor
    needs_grad: bool = False


class Agreed(NamedTuple):
    """The counts on the host, [ranks, parts]: what this rank sends to each and gets from each; and the latter on the
    device. `needs_grad`: whether any rank needs a gradient of its tokens."""

    sent: Tensor
    received: Tensor
    arriving: Tensor
    needs_grad: bool


def agree(
    read: Callable[[], Input], parts: int, experts: int, group: dist.ProcessGroup, device: torch.device
) -> Agreed:
    """Exchanges the counts that `read` finds: one collective, and one wait for the device.

    Raises:
        InvalidProblem: on every rank of the group alike, if `read` refused the input of one, numbers of experts lie
            outside of 0..experts-1, or the ranks' inputs do not fit each other.
        LibraryError: a rank does not answer within the group's timeout; or `read` failed on another rank.
    """
    failure: Exception | None = None
    ranks = group.size()
    try:
        mine = read()
        facts = (0, _number_of(mine.dtype), mine.features, mine.top_k, parts, int(mine.needs_grad))
        unplaced = mine.unplaced.view(1, 1).expand(ranks, 1)
        message = torch.cat([_repeated(facts, ranks, device), unplaced, mine.counts], 1)
    except Exception as error:  # whatever it is, the other ranks wait for this one
        failure = error
        message = _repeated((1,) + (0,) * (len(FACTS) - 1 + parts), ranks, device)
    with explained(group):
        arriving = torch.empty_like(message)
        dist.all_to_all_single(arriving, message, group=group)
        sent, received = _on_host(torch.stack([message, arriving]), group)
    facts_of = received[:, : len(FACTS)].tolist()
    if any(facts[0] for facts in facts_of):
        _raise_everywhere(failure, group)
    _compare(facts_of, experts, group)
    needs_grad = any(facts[FACTS.index("needs a gradient")] for facts in facts_of)
    counts = slice(len(FACTS), None)
    return Agreed(sent[:, counts], received[:, counts], arriving[:, counts], needs_grad)


@lru_cache(maxsize=64)
def _repeated(facts: tuple[int, ...], ranks: int, device: torch.device) -> Tensor:
    """The same for each rank; kept, since a copy to a device takes as long as some launches."""
    return torch.tensor([facts] * ranks, dtype=torch.int64, device=device)


def same_on_all_ranks(what: str, facts: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raises InvalidProblem on every rank alike where one of the `facts` about `what` differs between two of them."""
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


def _on_host(x: Tensor, group: dist.ProcessGroup) -> Any:
    """A copy on the host; raises where the device does not get there within the group's timeout."""
    if not x.is_cuda:
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    start, limit = time.monotonic(), SAFETY * group_timeout(group, x.device)
    while not done.query():
        waited = time.monotonic() - start
        if waited > limit:
            raise LibraryError(_silence(group, f"no answer in {waited:.0f} s"))
        time.sleep(PAUSE_S if waited > SPIN_S else 0)  # lets other threads run, in any case
    return host


def _raise_everywhere(failure: Exception | None, group: dist.ProcessGroup) -> None:
    """Tells all ranks what the first failure was, and raises it."""
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
    ranks = _ranks(group)
    for rank, facts in zip(ranks, facts_of, strict=True):
        if wrong := facts[FACTS.index("unplaced")]:
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
    """A collective that fails says what was going on, and whom to look at."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "onnection" in str(error) or "imed out" in str(error):
            raise LibraryError(_silence(group, error)) from error
        raise
