"""Plants small changes in the real kernels' sources and says whether the oracles see them.

    python -m tests.source_mutants --backend triton --emulate --count 40 --jobs 2
    python -m tests.source_mutants --backend cupy --device cuda --count 60 --jobs 12

For a GPU, variants of the unchanged kernels are compiled first, so that each mutant meets those that hold its line and
whose machine code it changes. A mutant that does not compile, or that changes no variant's machine code, is counted
apart.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from multigemm.cuda.disk_cache import DiskCache
from multigemm.select import registry
from multigemm.settings import settings
from multigemm.testing.campaigns import versions
from tests.source_mutants.compiled import Variant
from tests.source_mutants.equivalents import excuse
from tests.source_mutants.hunt import Hunt, Result, prepare_processes, run_one
from tests.source_mutants.plan import reached, survey
from tests.source_mutants.sites import FILES, Site, identity, possible_changes, snapshot

EXCUSED_SECONDS = 4.0
"""For a change that is said to be none."""
UNCHANGED = "nothing"
EMULATORS = ("triton", "numba")
CONTROL = 25
"""Mutants after which the unchanged sources are hunted again, in the next one's variants."""
STATES = ("survived", "killed", "equivalent", "stillborn", "same", "failed")
DONE = ("killed", "stillborn", "same")


def sample(places: list[Site], seed: int) -> list[Site]:
    """The places in an order of the seed's, which edits elsewhere do not disturb."""

    def rank(site: Site) -> tuple[int, int]:
        text = f"{seed} {Path(site.file).name} {site.operator} {site.before.strip()} {site.after.strip()}"
        return zlib.crc32(text.encode()), site.line

    return sorted(places, key=rank)


def with_controls(places: list[Site]) -> Iterator[Site]:
    """The places, with a change of nothing before each CONTROL of them."""
    for at, site in enumerate(places):
        if at % CONTROL == 0:
            yield replace(site, operator=UNCHANGED, after=site.before)
        yield site


class Campaign:
    """A hunt for a sample of a backend's mutants: prints each result, and keeps all in the file `target`. The unchanged
    sources are hunted as well: if they are accused, the hunt proves nothing. No hunt begins after `limit` seconds."""

    def __init__(self, hunt: Hunt, root: Path, target: str, head: dict[str, Any], limit: float) -> None:
        self.hunt, self.root, self.target, self.head, self.limit = hunt, root, target, head, limit
        self.results, self.control = list[Result](), {"hunted": 0, "accused": 0}
        self.variants = list[Variant]()
        self.where = f"{head['commit']} {head['versions'].get('device', 'emulated')}".strip()
        self._lock, self._begin = RLock(), time.monotonic()

    def spent(self) -> float:
        return time.monotonic() - self._begin

    def keep(self, *results: Result) -> None:
        with self._lock:
            self.results += results
            if self.target:
                write(self.results, self.target, self.head | {"unchanged": self.control})

    def hunt_one(self, site: Site) -> None:
        """Hunts one mutant, or the unchanged sources in its stead."""
        if self.spent() > self.limit:
            return
        chosen = reached(site, self.hunt.backend, self.variants)
        if site.operator == UNCHANGED:
            self.check_unchanged(site, chosen)
            return
        excused = excuse(site, emulated=self.hunt.emulated)
        seconds = min(self.hunt.seconds, EXCUSED_SECONDS) if excused else self.hunt.seconds
        result = run_one(site, replace(self.hunt, seconds=seconds), self.root, chosen)
        self.keep(replace(result, source=identity(site, self.root), judged=self.where))
        note = f"  [{result.text[:160]}]" if result.oracle == "exception" or result.state == "survived" else ""
        print(f"{result.state:10} {result.seconds:5.1f} s  {result.oracle:12} {site}{note}", flush=True)

    def check_unchanged(self, site: Site, chosen: list[Variant]) -> None:
        """As if the machine code were unknown, so that it runs."""
        result = run_one(site, self.hunt, self.root, [replace(variant, codes=[]) for variant in chosen])
        print(f"the unchanged kernels: {result.state} {result.oracle} {result.text}", flush=True)
        with self._lock:
            self.control["hunted"] += 1
            self.control["accused"] += result.state != "survived"

    def hunt_all(self, places: list[Site], jobs: int, known: Mapping[str, Result]) -> None:
        """Hunts the places but for those whose result is known."""
        before = {site: result for site in places if (result := known.get(identity(site, self.root)))}
        self.keep(*(replace(result, site=site) for site, result in before.items()))
        hunted = list(with_controls([site for site in places if site not in before]))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(self.hunt_one, hunted or list(with_controls(places[:1]))[:1]))


def campaign(
    hunt: Hunt, count: int, jobs: int, seed: int, limit: float = 1e9, only: str = "", target: str = "",
    known: Mapping[str, Result] | None = None, commit: str = "",
) -> list[Result]:  # fmt: skip
    """Hunts a sample of a backend's mutants, but for those whose result is `known`."""
    settings()  # as they are now, for this process: the cache is switched off for the others only
    store = DiskCache("mutants")
    prepare_processes(hunt)
    with tempfile.TemporaryDirectory() as name:
        root = snapshot(Path(name))
        places = [site for site in possible_changes(hunt.backend, root, emulated=hunt.emulated) if only in str(site)]
        head = {"backend": hunt.backend, "device": hunt.device, "versions": versions(), "seed": seed,
                "commit": commit, "asked": count, "places": len(places)}  # fmt: skip
        made = Campaign(hunt, root, target, head, limit)
        made.variants = survey(hunt, root, jobs, store)
        print(f"{len(places)} places, {len(made.variants)} variants after {made.spent():.0f} s", flush=True)
        made.hunt_all(sample(places, seed)[:count], jobs, known or {})
    if made.control["accused"]:
        raise SystemExit("the unchanged kernels are accused: the hunt proves nothing")
    return made.results


def judged_before(files: Sequence[str]) -> dict[str, Result]:
    """The mutants that earlier campaigns did away with, by identity: such a mutant need not be hunted again.
    Survivors are, for the oracles may have learnt."""
    results = [
        Result(**entry | {"site": Site(**entry["site"])})
        for name in files
        for entry in json.loads(Path(name).read_text())["fates"]
    ]
    return {result.source: result for result in results if result.state in DONE and result.source}


def write(results: list[Result], target: str, head: dict[str, Any]) -> None:
    """Keeps the results so far, so that a campaign that is cut off leaves them behind; those without blame last."""
    ordered = sorted(results, key=lambda result: (STATES.index(result.state), str(result.site)))
    data = head | {
        "counts": counts(results),
        "rate": round(rate(results), 3),
        "fates": [asdict(result) for result in ordered],
    }
    Path(target).write_text(json.dumps(data, indent=1) + "\n")


def counts(results: list[Result]) -> dict[str, int]:
    return {state: sum(result.state == state for result in results) for state in STATES}


def rate(results: list[Result]) -> float:
    """Killed among those that could be: what compiles, changes machine code, and has no excuse."""
    count = counts(results)
    return count["killed"] / max(count["killed"] + count["survived"], 1)


def summary(backend: str, results: list[Result]) -> str:
    count = counts(results)
    rest = f"{count['equivalent']} are equivalent, {count['stillborn']} did not compile"
    rest += f", {count['same']} change no machine code" if count["same"] else ""
    rest += f", {count['failed']} were not hunted" if count["failed"] else ""
    alive = count["killed"] + count["survived"]
    return f"{backend}: {count['killed']} of {alive} killed ({100 * rate(results):.0f} %), {rest}"


def refusal(backend: str, device: str, emulate: bool) -> str:
    """Why no kernel of a backend can run there: then every mutant would survive, and that would mean nothing."""
    if emulate:
        return "" if backend in EMULATORS else f"--emulate runs {' and '.join(EMULATORS)}, not {backend}: use a GPU"
    try:
        asked = torch.device(device)
    except RuntimeError:
        return f"--device {device!r} is not a device: use cuda"
    if asked.type != "cuda":
        return f"--device {device}: the kernels run on a GPU, or those of {' and '.join(EMULATORS)} with --emulate"
    if (asked.index or 0) >= torch.cuda.device_count():
        return f"--device {device}, but there are {torch.cuda.device_count()} CUDA devices here"
    state = registry.get(backend).availability()
    return "" if state.ok else f"backend {backend!r} is not available: {state.reason}"


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="hunts small faults planted in the real kernels' sources")
    parser.add_argument("--backend", choices=sorted(FILES), required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only changes whose description contains this")
    parser.add_argument("--limit", type=float, default=0.0, help="begin no hunt after so many seconds")
    parser.add_argument("--known", action="append", default=[], metavar="FILE", help="a --json of an earlier campaign: "
                        "what it did away with is not hunted again while the function is unchanged")  # fmt: skip
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="", help="what to call the code, for the --json")
    args = parser.parse_args(arguments)
    if why := refusal(args.backend, args.device, args.emulate):
        parser.error(why)
    if args.emulate:
        os.environ["MULTIGEMM_EMULATE"] = "1"
    hunt = Hunt(args.backend, args.device, args.seconds)
    try:
        known = judged_before(args.known)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--known {' '.join(args.known)}: no file of an earlier --json: {type(error).__name__}: {error}")
    results = campaign(
        hunt, args.count, args.jobs, args.seed, args.limit or 1e9, args.only, args.json, known, args.commit
    )
    print(summary(args.backend, results))
    return 1 if any(result.state == "survived" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
