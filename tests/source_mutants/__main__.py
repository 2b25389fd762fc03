"""Plants small changes in the real kernels' sources and says whether the oracles see them.

    python -m tests.source_mutants --backend triton --emulate --count 40 --jobs 2
    python -m tests.source_mutants --backend cupy --device cuda --count 60 --jobs 12

For a GPU, variants of the unchanged kernels are compiled first, so that each mutant meets those that hold its line and
whose machine code it changes. A mutant that does not compile, or that changes no variant's machine code, is counted
apart. The unchanged kernels are hunted as well: if they are accused, the hunt proves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from multigemm.backends import registry
from multigemm.settings import settings
from multigemm.testing.campaigns import versions
from tests.source_mutants.equivalents import excuse
from tests.source_mutants.hunt import Hunt, Result, prepare_processes, run_one
from tests.source_mutants.mutations import FILES, Mutation, mutations_of, snapshot
from tests.source_mutants.variants import reached, survey

EXCUSED_SECONDS = 4.0
"""For a change that is said to be none."""
UNCHANGED = "unchanged"
"""The operator of a mutation that changes nothing."""
EMULATORS = ("triton", "numba")
CONTROL = 25
"""Mutants after which the unchanged sources are hunted again, in the next one's variants."""
STATES = ("survived", "killed", "equivalent", "stillborn", "same", "failed")


def sample(mutations: list[Mutation], seed: int) -> list[Mutation]:
    """The mutations in an order of the seed's, which edits elsewhere do not disturb."""

    def rank(mutation: Mutation) -> tuple[int, int]:
        words = (Path(mutation.file).name, mutation.operator, mutation.before.strip(), mutation.after.strip())
        return zlib.crc32(" ".join((str(seed), *words)).encode()), mutation.line

    return sorted(mutations, key=rank)


def with_controls(mutations: list[Mutation]) -> Iterator[Mutation]:
    """The mutations, with a change of nothing before each CONTROL of them."""
    for at, mutation in enumerate(mutations):
        if at % CONTROL == 0:
            yield replace(mutation, operator=UNCHANGED, after=mutation.before)
        yield mutation


def campaign(args: argparse.Namespace) -> list[Result]:
    """Hunts a sample of a backend's mutants; prints each result, and keeps all of them in the file of --json."""
    hunt, begin = Hunt(args.backend, args.device, args.seconds), time.monotonic()
    settings()  # as they are now, for this process: the cache is switched off for the others only
    prepare_processes(hunt)
    results, control = list[Result](), Counter[str](hunted=0, accused=0)
    with tempfile.TemporaryDirectory() as name:
        root = snapshot(Path(name))
        places = [x for x in mutations_of(hunt.backend, root, emulated=hunt.emulated) if args.only in str(x)]
        variants = survey(hunt, root, args.jobs)
        print(f"{len(places)} places, {len(variants)} variants after {time.monotonic() - begin:.0f} s", flush=True)
        head = {"backend": hunt.backend, "device": hunt.device, "versions": versions(), "seed": args.seed,
                "asked": args.count, "places": len(places)}  # fmt: skip

        def hunt_one(mutation: Mutation) -> Result | None:
            if args.limit and time.monotonic() - begin > args.limit:
                return None
            chosen = reached(mutation, hunt.backend, variants)
            if mutation.operator == UNCHANGED:  # as if the machine code were unknown, so that it runs
                return run_one(mutation, hunt, root, [replace(variant, codes=[]) for variant in chosen])
            excused = excuse(mutation, emulated=hunt.emulated)
            seconds = min(hunt.seconds, EXCUSED_SECONDS) if excused else hunt.seconds
            return run_one(mutation, replace(hunt, seconds=seconds), root, chosen)

        with ThreadPoolExecutor(args.jobs) as pool:
            hunted = with_controls(sample(places, args.seed)[: args.count])
            for done in as_completed([pool.submit(hunt_one, mutation) for mutation in hunted]):
                if (result := done.result()) is None:
                    continue
                print(result, flush=True)
                if result.mutation.operator == UNCHANGED:
                    control.update(hunted=1, accused=result.state != "survived")
                else:
                    results.append(result)
                if args.json:
                    write(results, args.json, head | {"unchanged": dict(control)})
    if control["accused"]:
        raise SystemExit("the unchanged kernels are accused: the hunt proves nothing")
    return results


def write(results: list[Result], target: str, head: dict[str, Any]) -> None:
    """Keeps the results so far, so that a campaign that is cut off leaves them behind; those without blame last."""
    ordered = sorted(results, key=lambda result: (STATES.index(result.state), str(result.mutation)))
    data = head | {"counts": counts(results), "rate": round(rate(results), 3), "fates": list(map(asdict, ordered))}
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
    parser.add_argument("--json", default="")
    args = parser.parse_args(arguments)
    if why := refusal(args.backend, args.device, args.emulate):
        parser.error(why)
    if args.emulate:
        os.environ["MULTIGEMM_EMULATE"] = "1"
    results = campaign(args)
    print(summary(args.backend, results))
    return 1 if any(result.state == "survived" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
