"""One campaign on many GPUs and hosts: other problems on each rank, one summary.

Within a process, workers take the devices in turn. Ranks draw from seeds that lie far apart, so that no
problem is run twice; a failure holds its problem, and so repeats anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from multigemm import fleet
from multigemm.fuzz import campaign
from multigemm.fuzz.plan import Options, Summary, Tally

SEEDS_PER_RANK = 1 << 32


def of_rank(options: Options, place: fleet.Place) -> Options:
    """This rank's part of a campaign."""
    devices = options.devices or place.devices(options.device)
    share = [len(range(options.examples)[place.rank :: place.ranks])] if options.examples else [0]
    return replace(
        options, devices=devices, device=devices[0], jobs=max(options.jobs, len(devices)), examples=share[0],
        seed=options.seed + place.rank * SEEDS_PER_RANK,
    )  # fmt: skip


def merge(options: Options, parts: Sequence[Summary]) -> Summary:
    """The sum of what the ranks found."""
    total = Tally()
    for part in parts:
        total.add(part.tally)
    notes = [f"rank {rank}: {note}" for rank, part in enumerate(parts) for note in part.notes]
    if len(parts) > 1:
        notes += [f"rank {rank} ran {p.tally.problems} problems from seed {p.options.seed} on "
                  f"{', '.join(p.options.devices)}" for rank, p in enumerate(parts)]  # fmt: skip
    devices = tuple(dict.fromkeys(device for part in parts for device in part.options.devices))
    whole = replace(options, devices=devices, jobs=sum(p.options.jobs for p in parts))
    return Summary(whole, total, max(p.seconds for p in parts), sum(p.crashes for p in parts), notes)


def run(options: Options, place: fleet.Place, progress: Callable[[Tally, float], None] | None = None) -> Summary | None:
    """This rank's part; on rank 0 the whole campaign's summary, on the others None."""
    with fleet.joined(place):
        parts = fleet.gather(place, campaign.run(of_rank(options, place), progress))
    if place.rank:
        return None
    return parts[0] if len(parts) == 1 else merge(options, parts)
