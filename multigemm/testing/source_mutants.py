"""Small faults in the real kernels' sources, and whether the oracles see them.

    python -m multigemm.testing.source_mutants --backend triton --emulate --count 40 --jobs 2
    python -m multigemm.testing.source_mutants --backend cupy --device cuda --count 60 --jobs 12

For a GPU, variants of the unchanged kernels are compiled first, so that each mutant meets those that hold
its line (multigemm.testing.source_live); the survey is kept in the disk cache. A mutant that does not
compile, or that survives and changes no variant's machine code, is counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from threading import Lock
from typing import Any

from multigemm.cache import DiskCache, fingerprint
from multigemm.settings import settings
from multigemm.testing.source_equivalents import excuse
from multigemm.testing.source_hunt import VARIANTS, Hunt
from multigemm.testing.source_live import Variant
from multigemm.testing.source_sites import COPIES, FILES, Site, kernels_of, reach, sites, snapshot
from multigemm.testing.source_trace import reaching
from multigemm.testing.source_workers import Fate, codes_of, prepare, run_one, survey, variants_of
from multigemm.testing.versions import versions

STATES = ("survived", "killed", "equivalent", "stillborn", "same", "failed")
DONE = ("killed", "stillborn", "same")
EXCUSED = 4.0
"""Seconds for a change that is said to be none."""
PART = 3
"""Variants that are surveyed together, and kept: a survey that is cut off goes on where it was."""


def surveyed(hunt: Hunt, root: Path, jobs: int, store: DiskCache) -> list[Variant]:
    """The backend's variants with their lines, found now or known from the disk cache."""
    offered = variants_of(hunt, root)
    texts = {kernel: _texts(hunt.backend, root, kernel) for kernel in {variant.kernel for variant in offered}}
    keys = [fingerprint(hunt.emulated, *texts[v.kernel], json.dumps(v.to_dict())) for v in offered]
    known = {key: Variant(**json.loads(text)) for key in keys if (text := store.get(key, ".json")) is not None}
    rest = [(key, variant) for key, variant in zip(keys, offered, strict=True) if key not in known]

    def look(at: int) -> None:
        part = rest[at : at + PART]
        for variant in survey(hunt, root, [variant for _, variant in part]):
            key = next(key for key, each in part if (each.case, each.config) == (variant.case, variant.config))
            known[key] = variant
            store.put(key, json.dumps(variant.to_dict()).encode(), ".json")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(look, range(0, len(rest), PART)))
    return [known[key] for key in keys if key in known]


def _texts(backend: str, root: Path, kernel: str) -> list[bytes]:
    """The source files of a variant's kernel; of one that runs another behind a copy, that one's too."""
    parts = {kernel, "hopper"} if kernel in COPIES else {kernel}
    files = {name for name, kernels in reach(backend, root).items() if parts & set(kernels) or kernel == "emulated"}
    return [path.read_bytes() for path in sorted((root / "backends" / backend).rglob("*")) if path.name in files]


def reached(site: Site, backend: str, variants: list[Variant]) -> list[Variant]:
    """Variants of the kernels that the fault can reach, each kernel in turn: first those that hold its line,
    otherwise in an order of the site's own. In emulation, the problems that reach it."""
    name = Path(site.file).name
    if variants and variants[0].kernel == "emulated":
        return reaching(variants, name, site.line)
    chosen = list(variants)
    random.Random(zlib.crc32(str(site).encode())).shuffle(chosen)
    queues = [various(sorted((v for v in chosen if v.kernel == kernel), key=lambda v: v.distance(name, site.line)))
              for kernel in kernels_of(site, backend)]  # fmt: skip
    taken = [each for rank in zip_longest(*queues) for each in rank if each is not None]
    return sorted(taken, key=lambda v: v.distance(name, site.line) > 0)[:VARIANTS]


def various(variants: list[Variant]) -> list[Variant]:
    """The same variants, one of each dtype in turn, 16-bit floats first: kernels decide on widths at run time too."""
    seen, ranks = Counter[str](), list[tuple[int, bool]]()
    for dtype in (str(variant.case.get("dtype", "")) for variant in variants):
        ranks.append((seen[dtype], not dtype.endswith("float16")))
        seen[dtype] += 1
    return [variant for _, variant in sorted(zip(ranks, variants, strict=True), key=lambda pair: pair[0])]


def holds(site: Site, variant: Variant) -> bool:
    """Whether a variant's line table names the site's line; always so where there is none for the file."""
    name = Path(site.file).name
    return name not in variant.lines or variant.distance(name, site.line) == 0


class Originals:
    """The machine code of variants of the unchanged sources, each compiled when it is first asked for."""

    def __init__(self, hunt: Hunt, root: Path) -> None:
        self._hunt, self._root, self._lock = hunt, root, Lock()
        self._known: dict[tuple[str, str], list[str]] = {}

    def __call__(self, variant: Variant) -> list[str]:
        key = (str(variant.case), variant.config)
        with self._lock:
            if key not in self._known:
                self._known[key] = codes_of(self._hunt, self._root, variant)
            return self._known[key]


def judged(files: Sequence[str]) -> dict[tuple[str, str], Fate]:
    """The mutants that earlier campaigns did away with, by the change and the text of the file that it changes: such
    a mutant need not be hunted again. Survivors are, for the oracles may have learnt."""
    fates = [
        Fate(**entry | {"site": Site(**entry["site"])})
        for name in files
        for entry in json.loads(Path(name).read_text())["fates"]
    ]
    return {(str(fate.site), fate.source): fate for fate in fates if fate.state in DONE and fate.source}


def campaign(
    hunt: Hunt, count: int, jobs: int, seed: int, limit: float = 1e9, only: str = "", target: str = "",
    known: dict[tuple[str, str], Fate] | None = None,
) -> list[Fate]:  # fmt: skip
    """Hunts a sample of a backend's mutants but for those whose fate is `known`; prints each fate, and keeps all in
    the file `target`. The unchanged sources are hunted as well: if they are accused, the hunt proves nothing. No hunt
    begins after `limit` seconds."""
    fates, control = list[Fate](), {"hunted": 0, "accused": 0}
    begin, store, lock = time.monotonic(), DiskCache("mutants"), Lock()
    head = {"backend": hunt.backend, "device": hunt.device, "versions": versions(), "seed": seed, "asked": count}
    settings()  # as they are now, for this process: the cache is switched off for the others only
    prepare(hunt)
    with tempfile.TemporaryDirectory() as name:
        root = snapshot(Path(name))
        places = [site for site in sites(hunt.backend, root, emulated=hunt.emulated) if only in str(site)]
        random.Random(seed).shuffle(places)
        variants = surveyed(hunt, root, jobs, store)
        original = Originals(hunt, root)
        print(f"{len(places)} places, {len(variants)} variants after {time.monotonic() - begin:.0f} s", flush=True)

        def keep(fate: Fate) -> None:
            with lock:
                fates.append(fate)
                if target:
                    write(fates, target, head | {"unchanged": control})

        def one(site: Site) -> None:
            if time.monotonic() - begin > limit:
                return
            chosen = reached(site, hunt.backend, variants)
            if site.operator == UNCHANGED:  # as if nothing were known, so that it runs
                fate = run_one(site, hunt, root, chosen)
                print(f"the unchanged kernels: {fate.state} {fate.oracle} {fate.text}", flush=True)
                with lock:
                    control["hunted"] += 1
                    control["accused"] += fate.state != "survived"
                return
            seconds = min(hunt.seconds, EXCUSED) if excuse(site) else hunt.seconds
            fate = run_one(site, replace(hunt, seconds=seconds), root, chosen, None if hunt.emulated else original)
            if fate.state == "same" and not any(holds(site, variant) for variant in chosen):
                fate = replace(fate, state="survived", text="no variant holds the line")
            keep(replace(fate, source=sources[site.file]))
            note = f"  [{fate.text[:160]}]" if fate.oracle == "exception" or fate.state == "survived" else ""
            print(f"{fate.state:10} {fate.seconds:5.1f} s  {fate.oracle:12} {site}{note}", flush=True)

        sources = {site.file: fingerprint((root / site.file).read_bytes()) for site in places}
        before = {site: fate for site in places[:count] if (fate := (known or {}).get((str(site), sources[site.file])))}
        fates += before.values()
        hunted = list(with_controls([site for site in places[:count] if site not in before]))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, hunted or list(with_controls(places[:1]))[:1]))
    if control["accused"]:
        raise SystemExit("the unchanged kernels are accused: the hunt proves nothing")
    return fates


UNCHANGED = "nothing"
CONTROL = 25
"""Mutants after which the unchanged sources are hunted again, in the next one's variants."""


def with_controls(places: list[Site]) -> Iterator[Site]:
    """The places, with a change of nothing before each CONTROL of them."""
    for at, site in enumerate(places):
        if at % CONTROL == 0:
            yield replace(site, operator=UNCHANGED, after=site.before)
        yield site


def write(fates: list[Fate], target: str, head: dict[str, Any]) -> None:
    """Keeps the fates so far, so that a campaign that is cut off leaves them behind; those without blame last."""
    ordered = sorted(fates, key=lambda fate: (STATES.index(fate.state), str(fate.site)))
    data = head | {"counts": counts(fates), "rate": round(rate(fates), 3), "fates": [asdict(fate) for fate in ordered]}
    Path(target).write_text(json.dumps(data, indent=1) + "\n")


def counts(fates: list[Fate]) -> dict[str, int]:
    return {state: sum(fate.state == state for fate in fates) for state in STATES}


def rate(fates: list[Fate]) -> float:
    """Killed among those that could be: what compiles, changes machine code, and has no excuse."""
    count = counts(fates)
    return count["killed"] / max(count["killed"] + count["survived"], 1)


def summary(backend: str, fates: list[Fate]) -> str:
    count = counts(fates)
    rest = f"{count['equivalent']} are equivalent, {count['stillborn']} did not compile"
    rest += f", {count['same']} change no machine code" if count["same"] else ""
    rest += f", {count['failed']} were not hunted" if count["failed"] else ""
    alive = count["killed"] + count["survived"]
    return f"{backend}: {count['killed']} of {alive} killed ({100 * rate(fates):.0f} %), {rest}"


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
                        "what it did away with is not hunted again while its file is unchanged")  # fmt: skip
    parser.add_argument("--json", default="")
    args = parser.parse_args(arguments)
    if args.emulate:
        os.environ["MULTIGEMM_EMULATE"] = "1"
    hunt = Hunt(args.backend, args.device, args.seconds)
    known = judged(args.known)
    fates = campaign(hunt, args.count, args.jobs, args.seed, args.limit or 1e9, args.only, args.json, known)
    print(summary(args.backend, fates))
    return 1 if any(f.state == "survived" for f in fates) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
