"""Small faults in the real kernels' sources, and whether the oracles see them.

    python -m multigemm.testing.source_mutants --backend triton --emulate --count 40 --jobs 2
    python -m multigemm.testing.source_mutants --backend cupy --device cuda --count 60 --jobs 12

Each mutant is hunted in a process of its own, forked from one that has imported everything but the
backend: on a GPU by problems for the kernels that the fault can reach, in emulation by the stored
failures first and random cases after. A mutant that does not compile is counted apart; one that
hangs or ends its process is killed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from multigemm.testing.source_sites import FILES, ROOT, Site, excuse, kernels_of, plant, sites, snapshot

PATIENCE, STALL = 100.0, 12.0
"""Seconds without a word after which a mutant counts as hanging: while it compiles, and while problems run."""
PRELOADED = ("torch", "numpy", "multigemm.testing.mutants", "multigemm.testing.choice", "multigemm.testing.corpus")
LIBRARIES = {"triton": ("triton", "triton.language"), "cupy": ("cupy",), "numba": ("numba", "numba.cuda")}
BROKEN = ("CompilationError", "CompileError", "SyntaxError", "NameError", "TypingError", "CompileException",
          "IndentationError", "UnsupportedLanguageConstruct", "AttributeError", "LoweringError")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant: "killed", "stillborn" (does not compile), "survived", "equivalent" (it
    survived, and `text` says why no oracle could see it), or "failed" (its process could not hunt)."""

    site: Site
    state: str
    oracle: str = ""
    seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Hunt:
    """How mutants of a backend are hunted: where, and for how long each."""

    backend: str
    device: str = "cpu"
    seconds: float = 45.0

    @property
    def emulated(self) -> bool:
        return self.device == "cpu"


def run_one(site: Site, hunt: Hunt, root: Path) -> Fate:
    """Plants one mutant and hunts it in a process of its own."""
    context = mp.get_context("forkserver")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        plant(site, Path(name), root)
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_inside, args=(site, hunt, name, theirs), daemon=True)
        process.start()
        theirs.close()
        data = _answer(mine, hunt)
        if data is None and process.is_alive():
            process.join(5)
        hung = process.is_alive()
        process.kill()
        process.join()
    spent = time.monotonic() - begin
    if data is None:
        if not hung and process.exitcode == 1:  # an exception outside the hunt: nothing was learnt
            return Fate(site, "failed", "", spent)
        return Fate(site, "killed", "hang" if hung else "crash", spent, f"exit code {process.exitcode}")
    reason = excuse(site) if data["state"] == "survived" else ""
    if reason:
        return Fate(site, "equivalent", "", spent, reason)
    return Fate(site, data["state"], data["oracle"], spent, data["text"])


def _answer(pipe: Any, hunt: Hunt) -> dict[str, str] | None:
    """What the mutant's process finds; None if it ends or hangs before. On the way it says whether it
    compiles or runs."""
    patience = PATIENCE + (hunt.seconds if hunt.emulated else 0)
    said: Any = ""
    try:
        while pipe.poll(STALL if said == "runs" else patience):
            said = pipe.recv()
            if isinstance(said, dict):
                return said
    except (EOFError, OSError):
        pass
    return None


def _inside(site: Site, hunt: Hunt, folder: str, pipe: Any) -> None:
    """The mutant's own process: takes the backend from the changed copy, hunts, tells."""
    import torch

    import multigemm.backends

    torch.set_num_threads(1)
    own = f"multigemm.backends.{hunt.backend}"
    for name in [name for name in sys.modules if name == own or name.startswith(f"{own}.")]:
        del sys.modules[name]
    multigemm.backends.__path__ = [folder, *multigemm.backends.__path__]
    place = torch.device(hunt.device)
    try:
        found = hunt_emulated(hunt, place) if hunt.emulated else hunt_on_gpu(hunt, place, site, pipe.send)
    except Exception as error:  # a lost device shows wherever the host waits for it next
        found = {"state": "killed", "oracle": "exception", "text": f"{type(error).__name__}: {error}"[:300]}
    pipe.send(found)
    pipe.close()
    os._exit(0)  # a mutant may have left a context in which an ordinary end waits for ever


def small_tiles(config: Any) -> Any:
    """The same config with the smallest tiles, so that small problems have several in each direction."""
    names = {"block_m", "block_n", "block_k"} & {f.name for f in fields(config)} if is_dataclass(config) else set()
    return replace(config, **{name: 32 if name == "block_k" else 16 for name in names}) if names else config


def _verdict(outcome: Any) -> dict[str, str]:
    found = outcome.findings[0]
    broken = found.oracle == "exception" and any(word in found.text for word in BROKEN)
    return {"state": "stillborn" if broken else "killed", "oracle": found.oracle, "text": found.text[:200]}


SURVIVED = {"state": "survived", "oracle": "", "text": ""}
STILLBORN = SURVIVED | {"state": "stillborn"}


def hunt_emulated(hunt: Hunt, place: Any) -> dict[str, str]:
    """Stored failures, then random cases, until something is seen."""
    from multigemm.testing import corpus
    from multigemm.testing.mutants import examine
    from multigemm.testing.strategies import EMULATED, random_case
    from multigemm.testing.subject import Subject

    begin, stored = time.monotonic(), ROOT / "tests" / "corpus"
    subjects = [Subject(hunt.backend, adapt=small_tiles), Subject(hunt.backend, 1), Subject(hunt.backend)]
    cases = [e.case for e in corpus.entries(stored)] if stored.is_dir() else []
    random.Random(1).shuffle(cases)
    cases = [c for c in cases if c.work < 20_000 and sum(m * n > 0 for m, n, _ in c.sizes()) < 400]
    number = -len(cases)
    while time.monotonic() - begin < hunt.seconds:
        case = random_case(number, replace(EMULATED, work=1 << 13)) if number >= 0 else cases[number]
        outcome = examine(case, subjects[number % len(subjects)], place, deep=number % 3 == 0, seed=abs(number))
        if outcome.findings:
            return _verdict(outcome)
        number += 1
    return SURVIVED


def hunt_on_gpu(hunt: Hunt, place: Any, site: Site, say: Callable[[str], None]) -> dict[str, str]:
    """Many problems of a few kinds, under configs whose kernels the fault can reach: each kind and config
    has to be compiled, and a problem costs little. Every other problem has the kind's dtypes and layouts
    but a form and an epilogue of its own, which most kernels decide on at run time."""
    from multigemm.staging import staged_spec
    from multigemm.testing import concurrency
    from multigemm.testing.kinds import cousin, redrawn
    from multigemm.testing.oracles import check
    from multigemm.testing.strategies import Limits, RandomChooser
    from multigemm.testing.subject import Subject
    from multigemm.testing.world import Stand, World

    begin, number = time.monotonic(), 0
    for case, config in _reaching(hunt, place, site):
        subject = Subject(hunt.backend)
        subject.pin(config)
        for step in range(BURST):
            number += 1
            limits = Limits(work=1 << (20 if step % 3 == 2 else 16), groups=300)
            draw = cousin if step % 2 and hunt.backend != "triton" else redrawn
            stand = Stand.build(World.build(draw(case, RandomChooser(number), limits)), place)
            spec = staged_spec(stand.problem)
            if subject.refusals(spec, place) or config not in subject.shipped(spec, place):
                continue
            if not _compiles(subject, spec, place):
                return STILLBORN
            say("runs")
            outcome = check(stand, subject)
            if outcome.ok and outcome.ran and step % 6 == 5:
                concurrency.changed_sizes(stand, subject, outcome, number, captured=False)
                concurrency.lies(stand, subject, outcome, number)
            say("compiles")
            if outcome.findings:
                return _verdict(outcome)
            if time.monotonic() - begin > hunt.seconds:
                return SURVIVED
    return SURVIVED


def _compiles(subject: Any, spec: Any, place: Any) -> bool:
    """Whether the changed source can be made into a kernel; anything else that goes wrong shows in the run."""
    try:
        subject.recipe(spec, place)
    except Exception as error:  # whatever a compiler raises
        text = f"{type(error).__name__}: {error}"
        return not any(word in text for word in BROKEN)
    return True


BURST = 24
"""Problems in a row of one kind and config."""


def _reaching(hunt: Hunt, place: Any, site: Site) -> list[tuple[Any, Any]]:
    """Kinds and configs that run the changed code, in an order of the site's own."""
    from multigemm.testing.choice import spec_of
    from multigemm.testing.kinds import kinds
    from multigemm.testing.strategies import Limits
    from multigemm.testing.subject import Subject

    subject, wanted, found = Subject(hunt.backend), kernels_of(site, hunt.backend), []
    for case in kinds(Limits(work=1 << 16), 54):
        spec = spec_of(case, place)
        if not subject.refusals(spec, place):
            configs = [c for c in subject.shipped(spec, place) if getattr(c, "kernel", "") in wanted]
            found += [(case, config) for config in configs]
    random.Random(zlib.crc32(str(site).encode())).shuffle(found)
    return found


def prepare(hunt: Hunt) -> None:
    """Sets the process from which those of the mutants are forked: all that is slow to import, no GPU yet,
    and no disk cache, which is no place for mutants."""
    os.environ |= {"MULTIGEMM_CACHE": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    libraries = () if hunt.emulated else LIBRARIES[hunt.backend]
    mp.get_context("forkserver").set_forkserver_preload([*PRELOADED, *libraries])


def campaign(hunt: Hunt, count: int, jobs: int, seed: int, limit: float = 1e9) -> list[Fate]:
    """Hunts a sample of a backend's mutants; prints each fate as it is known. The unchanged sources come
    first: if they are accused, the hunt proves nothing. No hunt begins after `limit` seconds."""
    fates: list[Fate] = []
    prepare(hunt)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        root = snapshot(Path(name))
        chosen = sites(hunt.backend, root, emulated=hunt.emulated)
        unchanged = replace(chosen[0], operator="nothing", after=chosen[0].before)
        random.Random(seed).shuffle(chosen)

        def one(site: Site) -> None:
            if time.monotonic() - begin > limit:
                return
            fate = run_one(site, hunt, root)
            fates.append(fate)
            print(f"{fate.state:10} {fate.seconds:5.1f} s  {fate.oracle:12} {site}", flush=True)

        baseline = run_one(unchanged, hunt, root)
        if baseline.state != "survived":
            raise SystemExit(f"the unchanged kernels are accused: [{baseline.oracle}] {baseline.text}")
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, chosen[:count]))
    return fates


def summary(backend: str, fates: list[Fate]) -> str:
    states = ("killed", "stillborn", "survived", "equivalent", "failed")
    count = {state: sum(f.state == state for f in fates) for state in states}
    alive = count["killed"] + count["survived"]
    rate = 100 * count["killed"] / alive if alive else 0.0
    rest = f"{count['equivalent']} are equivalent, {count['stillborn']} did not compile"
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
    parser.add_argument("--limit", type=float, default=0.0, help="begin no hunt after so many seconds")
    parser.add_argument("--json", default="")
    args = parser.parse_args(arguments)
    if args.emulate:
        os.environ["MULTIGEMM_EMULATE"] = "1"
    hunt = Hunt(args.backend, args.device, args.seconds)
    fates = campaign(hunt, args.count, args.jobs, args.seed, args.limit or 1e9)
    print(summary(args.backend, fates))
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(f) for f in fates], indent=1) + "\n")
    return 1 if any(f.state == "survived" for f in fates) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
