"""The plan of a campaign: options, counts, failures, and the queue of problems for workers.

Options, counts and failures are plain data that travel between processes.

A slot is a kind of problem under one of its configs; a batch is a run of problem numbers of one slot. The first batch
of every slot is handed out first, because it compiles. The rest of a slot is handed out once one of its problems is
done, to an idle worker, preferably one that has run the slot before. So compilers run side by side from the start, none
starts late, and a slow one delays only its own worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from multigemm.problem.spec import FORMS
from multigemm.testing.campaigns import add_up
from multigemm.testing.case import Case
from multigemm.testing.strategies import DTYPES, Limits


@dataclass(frozen=True, slots=True)
class Options:
    """A campaign over problems within `limits`. `configs` is "first", "all" (every config of a spec in turn) or
    "pinned" (in each lap over the kinds one for each, `turns` different ones at most, so that all come up); `deep` runs
    the expensive oracles on one problem in so many. `kinds` draws all problems from so many kinds (form, dtypes,
    layouts, epilogue; 0: without limit), `burst` of one in a row, so that compiled kernels are used more than once;
    `carriers` are those of them that were added for the sake of a config. Without kinds, `begin_with` are the first
    problems, which show every required class. One problem in `large` may have 16 times the work (0: none). Workers take
    `devices` in turn, or all `device` where none is named."""

    backends: tuple[str, ...]
    device: str = "cpu"
    devices: tuple[str, ...] = ()
    seconds: float = 0.0
    examples: int = 0
    seed: int = 0
    jobs: int = 1
    limits: Limits = Limits(work=1 << 18)
    configs: str = "first"
    deep: int = 8
    kinds: int = 0
    turns: int = 1
    burst: int = 25
    large: int = 0
    corpus: str = ""
    shrink_seconds: float = 20.0
    carriers: tuple[Case, ...] = ()
    begin_with: tuple[Case, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every form and dtype is drawn."""
        return set(self.limits.forms) == set(FORMS) and set(self.limits.dtypes) == set(DTYPES)

    def at(self, worker: int) -> Options:
        """The options for one worker, with its device."""
        return replace(self, device=self.devices[worker % len(self.devices)]) if self.devices else self

    def limits_of(self, number: int) -> Limits:
        """The limits of a problem, by its number."""
        large = self.large and number % self.large == self.large - 1
        return replace(self.limits, work=16 * self.limits.work) if large else self.limits

    @property
    def slots(self) -> int:
        """The number of pairs of a kind and a turn; each turn of a kind may have its own config. 0 without kinds."""
        return self.kinds * self.turns

    def slot_of(self, number: int) -> int:
        """The slot of a problem number; the first turns of all kinds come first."""
        return number // self.burst % self.slots if self.slots else 0

    def kind_of(self, number: int) -> int:
        """The kind of a problem number; 0 if kinds are not limited."""
        return self.slot_of(number) % self.kinds if self.kinds else 0

    def config_of(self, number: int) -> int:
        """The position of a problem number's config among the configs of all kinds and turns."""
        return self.kind_of(number) * self.turns + (self.slot_of(number) // self.kinds if self.kinds else 0)


@dataclass(slots=True)
class Failure:
    """One disagreement: the drawn case, and the smallest case that still fails."""

    backend: str
    oracle: str
    text: str
    case: dict[str, Any]
    seed: int
    config: int = 0
    config_text: str = ""
    shrunk: dict[str, Any] | None = None
    file: str = ""

    @property
    def repeat(self) -> int | str:
        """The choice of the config that repeats the failure: its text if known."""
        return self.config_text or self.config

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Tally:
    """Counts that add up over workers. `configs` counts the checks of each backend and config; one that
    is shipped for a kind and never ran keeps its zero. `assigned` names the config of a slot."""

    problems: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    quantised_checks: Counter[str] = field(default_factory=Counter)
    fused_checks: Counter[str] = field(default_factory=Counter)
    deep: Counter[str] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    kernels: Counter[tuple[str, str]] = field(default_factory=Counter)
    configs: Counter[tuple[str, str]] = field(default_factory=Counter)
    assigned: dict[tuple[str, int], str] = field(default_factory=dict)
    rho: dict[tuple[str, str], tuple[float, float, int]] = field(default_factory=dict)
    spent: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        add_up(self, other)
        self.assigned.update(other.assigned)
        for key, (peak, squares, count) in other.rho.items():
            known = self.rho.get(key, (0.0, 0.0, 0))
            self.rho[key] = (max(known[0], peak), known[1] + squares, known[2] + count)

    def note_rho(self, backend: str, dtype: str, peak: float, rms: float) -> None:
        """The largest rho of a problem and its root mean square, for the suspicion table."""
        known = self.rho.get((backend, dtype), (0.0, 0.0, 0))
        self.rho[backend, dtype] = (max(known[0], peak), known[1] + rms * rms, known[2] + 1)


@dataclass(slots=True)
class Summary:
    """The outcome of a campaign. `interrupted`: by Ctrl-C. From `next_seed` on, no problem was drawn."""

    options: Options
    tally: Tally
    seconds: float
    crashes: int = 0
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    next_seed: int = 0


GATE_FROM = 5000
"""From this many problems on, a campaign over everything must meet every required class."""
LEAD = 8
"""Batches by which a slot may be ahead of the others in a process that has loaded its kernels. Loading them takes
another process as long as a batch or more."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Problems `first` up to, not including, `stop`; the first runs one backend at a time from `alone_from`
    on, where that is not -1."""

    first: int
    stop: int
    alone_from: int = -1


class WorkQueue:
    """Hands out batches until `examples` problems are with workers (0: without end)."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.left = options.examples or 1 << 60
        self.compiled: set[int] = set()
        self._laps: Counter[int] = Counter()
        self.handed_out = 0

    @property
    def slots(self) -> int:
        """The number of slots; 0 if every problem is of a kind of its own."""
        return self.options.slots

    def unbegun(self) -> list[int]:
        """The slots of which no problem is done yet."""
        return [slot for slot in range(self.slots) if slot not in self.compiled]

    def must_compile(self, number: int) -> bool:
        """Whether a problem's slot still has to be compiled."""
        return bool(self.slots) and self.options.slot_of(number) not in self.compiled

    def note_done(self, number: int) -> bool:
        """Records a finished problem. Returns whether it was the first of the last slot."""
        before = len(self.compiled)
        if self.slots:
            self.compiled.add(self.options.slot_of(number))
        return before < len(self.compiled) == self.slots

    def add(self, count: int) -> None:
        """Adds problems to hand out again, because their worker is stuck."""
        self.left += count

    def next_batch(self, *, fresh: bool = True, loaded: Collection[int] = ()) -> Batch | None:
        """The next batch; None when enough are out. Not `fresh`: of a slot that is compiled, if there is one.
        A worker that asks has the kernels of `loaded` slots in its process: those go on for some laps."""
        if self.left <= 0:
            return None
        size = min(self.options.burst, self.left)
        self.left -= size
        self.handed_out += size
        slot = self._slot(fresh or not self.compiled, loaded)
        number = (self._laps[slot] * max(self.slots, 1) + slot) * self.options.burst
        self._laps[slot] += 1
        return Batch(number, number + size)

    def _slot(self, fresh: bool, loaded: Collection[int]) -> int:
        """One that nobody has begun; else the compiled one that was handed out least, with a lead for the loaded; else
        any."""
        if not self.slots:
            return 0
        if fresh and (new := [slot for slot in range(self.slots) if slot not in self._laps]):
            return new[0]
        return min(
            sorted(self.compiled) or range(self.slots), key=lambda slot: self._laps[slot] - LEAD * (slot in loaded)
        )
