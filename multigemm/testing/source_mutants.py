"""Small faults in the real kernels' sources, and whether the oracles see them.

    python -m multigemm.testing.source_mutants --backend triton --emulate --count 40 --jobs 2
    python -m multigemm.testing.source_mutants --backend cupy --device cuda --count 60 --jobs 12

On a GPU, variants of the unchanged kernels are compiled first, so that each mutant meets those that hold
its line (multigemm.testing.source_live); the survey is kept in the disk cache. A mutant that does not
compile, or that changes no variant's machine code, is counted apart.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import chain, zip_longest
from pathlib import Path
from threading import Lock

from multigemm.cache import DiskCache, fingerprint
from multigemm.settings import settings
from multigemm.testing.source_equivalents import excuse
from multigemm.testing.source_hunt import Hunt
from multigemm.testing.source_live import Variant
from multigemm.testing.source_sites import FILES, Site, kernels_of, sites, snapshot
from multigemm.testing.source_trace import reaching
from multigemm.testing.source_workers import Fate, prepare, run_one, survey, variants_of

EXCUSED = 4.0
"""Seconds for a change that is said to be none."""
PART = 3
"""Variants that are surveyed together, and kept: one that is cut off begins where it was."""
TRIED = 10
"""Variants that a mutant may be compiled for before it counts as one that changes nothing."""


def surveyed(hunt: Hunt, root: Path, jobs: int, store: DiskCache) -> list[Variant]:
    """The backend's variants with their lines, compiled now or known from the disk cache."""
    files = sorted(path for path in (root / "backends" / hunt.backend).rglob("*") if path.is_file())
    key = fingerprint(hunt.backend, str(hunt.emulated), *(path.read_bytes() for path in files), version("torch"))
    offered = variants_of(hunt, root)
    parts = [offered[at : at + PART] for at in range(0, len(offered), PART)]

    def seen(number: int) -> list[Variant]:
        part = fingerprint(key, *(json.dumps(variant.to_dict()) for variant in parts[number]))
        if (known := store.get(part, ".json")) is not None:
            return [Variant(**entry) for entry in json.loads(known)]
        found = survey(hunt, root, parts[number])
        store.put(part, json.dumps([variant.to_dict() for variant in found]).encode(), ".json")
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return list(chain.from_iterable(pool.map(seen, range(len(parts)))))


def reached(site: Site, backend: str, variants: list[Variant]) -> list[Variant]:
    """Variants of the kernels that the fault can reach, each kernel in turn: first those that hold its line,
    otherwise in an order of the site's own. In emulation, the problems that reach it."""
    name = Path(site.file).name
    if variants and variants[0].kernel == "emulated":
        return reaching(variants, name, site.line)
    chosen = list(variants)
    random.Random(zlib.crc32(str(site).encode())).shuffle(chosen)
    queues = [sorted((v for v in chosen if v.kernel == kernel), key=lambda v: v.distance(name, site.line))
              for kernel in kernels_of(site, backend)]  # fmt: skip
    taken = [each for rank in zip_longest(*queues) for each in rank if each is not None]
    return sorted(taken, key=lambda v: v.distance(name, site.line) > 0)[:TRIED]


def holds(site: Site, variant: Variant) -> bool:
    """Whether a variant's line table names the site's line; always so where there is none for the file."""
    name = Path(site.file).name
    return name not in variant.lines or variant.distance(name, site.line) == 0


def campaign(
    hunt: Hunt, count: int, jobs: int, seed: int, limit: float = 1e9, only: str = "", target: str = ""
) -> list[Fate]:
    """Hunts a sample of a backend's mutants; prints each fate as it is known, and keeps all in the file `target`.
    The unchanged sources are hunted as well: if they are accused, the hunt proves nothing. No hunt begins after
    `limit` seconds."""
    fates: list[Fate] = []
    begin, store, lock = time.monotonic(), DiskCache("mutants"), Lock()
    settings()  # as they are now, for this process: the cache is switched off for the others only
    prepare(hunt)
    with tempfile.TemporaryDirectory() as name:
        root = snapshot(Path(name))
        places = [site for site in sites(hunt.backend, root, emulated=hunt.emulated) if only in str(site)]
        random.Random(seed).shuffle(places)
        variants = surveyed(hunt, root, jobs, store)
        known = frozenset(code for variant in variants for code in variant.codes)
        print(f"{len(places)} places, {len(variants)} variants after {time.monotonic() - begin:.0f} s", flush=True)

        def one(site: Site) -> None:
            if time.monotonic() - begin > limit:
                return
            chosen = reached(site, hunt.backend, variants)
            if site.operator == UNCHANGED:  # as if nothing were known, so that it runs
                fate = run_one(site, hunt, root, chosen)
                print(f"the unchanged kernels: {fate.state} {fate.oracle} {fate.text}", flush=True)
                if fate.state != "survived":
                    raise SystemExit("the unchanged kernels are accused: the hunt proves nothing")
                return
            seconds = min(hunt.seconds, EXCUSED) if excuse(site) else hunt.seconds
            fate = run_one(site, replace(hunt, seconds=seconds), root, chosen, known)
            if fate.state == "same" and not any(holds(site, variant) for variant in chosen):
                fate = replace(fate, state="survived", text="no variant holds the line")
            with lock:
                fates.append(fate)
                if target:
                    write(fates, target)
            note = f"  [{fate.text[:160]}]" if fate.oracle == "exception" or fate.state == "survived" else ""
            print(f"{fate.state:10} {fate.seconds:5.1f} s  {fate.oracle:12} {site}{note}", flush=True)

        unchanged = [replace(site, operator=UNCHANGED, after=site.before) for site in places[:1]]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, [*unchanged, *places[:count]]))
    return fates


UNCHANGED = "nothing"


def write(fates: list[Fate], target: str) -> None:
    """Keeps the fates so far, so that a campaign that is cut off leaves them behind."""
    Path(target).write_text(json.dumps([asdict(fate) for fate in fates], indent=1) + "\n")


def summary(backend: str, fates: list[Fate]) -> str:
    states = ("killed", "stillborn", "survived", "equivalent", "same", "failed")
    count = {state: sum(f.state == state for f in fates) for state in states}
    alive = count["killed"] + count["survived"]
    rate = 100 * count["killed"] / alive if alive else 0.0
    rest = f"{count['equivalent']} are equivalent, {count['stillborn']} did not compile"
    rest += f", {count['same']} change no machine code" if count["same"] else ""
    rest += f", {count['failed']} were not hunted" if count["failed"] else ""
    return f"{backend}: {count['killed']} of {alive} killed ({rate:.0f} %), {rest}"


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
    parser.add_argument("--json", default="")
    args = parser.parse_args(arguments)
    if args.emulate:
        os.environ["MULTIGEMM_EMULATE"] = "1"
    hunt = Hunt(args.backend, args.device, args.seconds)
    fates = campaign(hunt, args.count, args.jobs, args.seed, args.limit or 1e9, args.only, args.json)
    print(summary(args.backend, fates))
    return 1 if any(f.state == "survived" for f in fates) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
