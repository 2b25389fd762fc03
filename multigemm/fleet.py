"""Distributes a command's work over GPUs and hosts, and gathers the results on one process.

A command uses every GPU of its host unless `--device` names one. Under `torchrun` each process is a rank: the ranks of
one host share its GPUs, every rank works on its own part, and rank 0 receives all results over gloo. No common file
system is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from multigemm.errors import InvalidSetting

T = TypeVar("T")
LONGEST = timedelta(days=7)
"""How long rank 0 waits for the slowest rank; torchrun ends all of them when one dies."""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Place:
    """The rank of this process under torchrun, and its host's ranks; the only process without torchrun."""

    rank: int = 0
    ranks: int = 1
    local: int = 0
    locals: int = 1

    def devices(self, asked: str) -> tuple[str, ...]:
        """The devices of this process: the requested one, else its share of the host's GPUs."""
        if asked not in ("", "cuda"):
            return (asked,)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            return (asked or "cpu",)
        mine = range(count)[self.local :: self.locals] or [self.local % count]
        return tuple(f"cuda:{index}" for index in mine)


def here() -> Place:
    """Reads torchrun's environment variables into a `Place`. Raises InvalidSetting if only some of them are set."""
    said = {name: os.environ.get(name, "") for name in VARIABLES}
    if not any(said.values()):
        return Place()
    if missing := [name for name, value in said.items() if not value.isdecimal()]:
        raise InvalidSetting(f"{missing[0]}={said[missing[0]]!r} is no number: start through torchrun, or unset {said}")
    place = Place(*(int(said[name]) for name in VARIABLES))
    if place.rank >= place.ranks or place.local >= place.locals:
        raise InvalidSetting(f"a rank has to be below the number of ranks: start through torchrun, or unset {said}")
    return place


def default_device(text: str = "") -> torch.device:
    """The one device that a command works on. Raises InvalidSetting if the requested device does not exist."""
    name = text or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidSetting(f"--device {name!r} is not a device: use cpu or cuda") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise InvalidSetting(f"--device {name!r} is not a device of multigemm: use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidSetting(f"--device {name}, but there are {torch.cuda.device_count()} CUDA devices here: use cpu")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


@contextmanager
def joined(place: Place) -> Iterator[None]:
    """A context in which the ranks are connected by a gloo process group; does nothing for a single process."""
    if place.ranks == 1:
        yield
        return
    try:
        dist.init_process_group("gloo", timeout=LONGEST)
    except ValueError as error:  # what torch says of a variable that is missing
        raise InvalidSetting(f"{place.ranks} ranks cannot meet: {error}: start through torchrun") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def gather(place: Place, mine: T) -> list[T]:
    """Collects every rank's result on rank 0, in the order of ranks. Other ranks get an empty list."""
    if place.ranks == 1:
        return [mine]
    found: list[T | None] | None = [None] * place.ranks if place.rank == 0 else None
    dist.gather_object(mine, found)
    return [x for x in found or [] if x is not None]
