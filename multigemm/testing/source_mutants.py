"""Small faults in the real kernels' sources, and whether the oracles see them.

    python -m multigemm.testing.source_mutants --backend triton --emulate --count 40 --jobs 2
    python -m multigemm.testing.source_mutants --backend cupy --device cuda --count 60 --jobs 12

Each mutant is a copy of the package with one place of one kernel file changed: a comparison widened,
an off-by-one, a dropped conjunct of a mask, a row stride in place of a column stride, a lost K step.
It is hunted in a process of its own, by the stored failures first and random cases after. A mutant
that does not compile is counted apart; one that hangs or ends its process is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    "triton": ("backends/triton/kernels.py", "backends/triton/schedule_device.py", "backends/triton/epilogue.py"),
    "cupy": ("backends/cupy/kernels/*.cu", "backends/cupy/kernels/*.cuh"),
    "numba": (
        "backends/numba/simt.py",
        "backends/numba/schedule.py",
        "backends/numba/epilogue.py",
        "backends/numba/memory.py",
    ),
}

GPU_ONLY = ("group_rows", "weight_class", "write_records", "zero_kernel")
"""Functions of these files that an emulator never calls."""

OPERATORS: tuple[tuple[str, str, str], ...] = (
    ("wider comparison", r"(?<=[\w)\]] )<(?= [\w(])", "<="),
    ("narrower comparison", r"(?<=[\w)\]] )<=(?= [\w(])", "<"),
    ("reversed comparison", r"(?<=[\w)\]] )>(?= [\w(])", "<"),
    ("minus one lost", r"(?<=[\w)\]]) - 1\b", ""),
    ("plus one lost", r"(?<=[\w)\]]) \+ 1\b", ""),
    ("sum made a difference", r"(?<=[\w)\]]) \+ (?=[\w(])", " - "),
    ("difference made a sum", r"(?<=[\w)\]]) - (?=[\w(])", " + "),
    ("product lost", r"(?<=[\w)\]]) \* \w+\b(?!\()", ""),
    ("mask conjunct lost", r" & \([^()]*\)(\[[^\]]*\])?", ""),
    ("condition lost", r"(?<=[\w)\]]) && [^&|();]+(?=[;)])", ""),
    ("row stride for column stride", r"\b(\w+)_row\b", r"\1_col"),
    ("column stride for row stride", r"\b(\w+)_col\b", r"\1_row"),
    ("minimum made maximum", r"\bminimum\b|\bmin\b(?=\()", "max_of"),
    ("rounded down", r" \+ B[MNK] - 1\)", ")"),
    ("accumulation lost", r"(?<=\w) \+= ", " = "),
    ("zero for one", r"\b0\b(?=[,)\]])", "1"),
)


EQUIVALENT: tuple[tuple[str, str, str], ...] = (
    (r"sum|one lost|difference", r"(count|across|down|per_group|rows|columns) = .*(BM|BN|end - start)",
     "more tiles than there are: the extra ones lie outside their group and store nothing"),
    (r"wider", r"[xy] = tl\.load\([ab]_ptrs", "a row or column past the group is loaded, and its result is not stored"),
    (r"zero for one", r"mask=.*other=0", "lanes that the mask leaves out are left out of the result as well"),
    (r"wider|narrower", r"if rows_left > 0", "a tile without rows adds zeros to nothing"),
)  # fmt: skip
"""What a survivor may be without blame: (operator, line before the change, reason)."""


@dataclass(frozen=True, slots=True)
class Site:
    """One change: the file, the line (from 1), what it was and what it becomes."""

    file: str
    line: int
    operator: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} {self.operator}: {self.before.strip()}  ->  {self.after.strip()}"


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant: "killed", "stillborn" (does not compile), "survived", or "equivalent" (it
    survived, and `text` says why no oracle could see it)."""

    site: Site
    state: str
    oracle: str = ""
    seconds: float = 0.0
    text: str = ""


def code_lines(path: Path, skip: tuple[str, ...] = ()) -> Iterator[tuple[int, str]]:
    """Lines that may be changed: no comments, docstrings, imports, signatures or compile-time constants, and
    nothing in the functions named by `skip`."""
    inside, function = False, ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if header := re.match(r"def (\w+)\(", line):
            function = header.group(1)
        if function in skip:
            continue
        quotes = line.count('"""')
        if quotes == 1:
            inside = not inside
        text = line.strip()
        skipped = (
            "#",
            "//",
            "*",
            "/*",
            "import",
            "from",
            "@",
            "def ",
            "assert",
            "static_assert",
            "__global__",
            "template",
        )
        if inside or quotes or not text or text.startswith(skipped) or "constexpr" in text:
            continue
        yield number, line.split("  #")[0]


def snapshot(folder: Path) -> Path:
    """A copy of the package, so that edits made meanwhile cannot mix with the mutants."""
    ignore = shutil.ignore_patterns("__pycache__", "*.json")
    for name in ("multigemm", "backends", "reference"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    return folder


def sites(backend: str, root: Path = ROOT, skip: tuple[str, ...] = ()) -> list[Site]:
    """Every change that the operators offer for a backend's kernels."""
    found = []
    paths = [p for pattern in FILES[backend] for p in sorted(root.glob(pattern))]
    for path in paths:
        for number, line in code_lines(path, skip):
            for name, pattern, new in OPERATORS:
                for match in re.finditer(pattern, line):
                    text = match.expand(new)
                    if text == "max_of":
                        text = match.group(0).replace("min", "max")
                    after = line[: match.start()] + text + line[match.end() :]
                    if after != line:
                        found.append(Site(str(path.relative_to(root)), number, name, line, after))
    return found


def plant(site: Site, folder: Path, root: Path) -> None:
    """A copy of the package with the change in it."""
    for name in ("multigemm", "backends", "reference"):
        shutil.copytree(root / name, folder / name, symlinks=True)
    target = folder / site.file
    lines = target.read_text().splitlines()
    lines[site.line - 1] = site.after
    target.write_text("\n".join(lines) + "\n")


def run_one(site: Site, backend: str, device: str, seconds: float, root: Path) -> Fate:
    """Plants one mutant and hunts it in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(site, folder, root)
        environment = {**os.environ, "PYTHONPATH": name, "MULTIGEMM_CACHE": "0", "TRITON_CACHE_DIR": f"{name}/triton",
                       "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-m", "multigemm.testing.source_mutants", "--hunt", backend, device]
        command += [str(seconds), str(ROOT / "tests" / "corpus")]
        begin = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=name, env=environment, capture_output=True, text=True, timeout=3 * seconds + 60
            )
        except subprocess.TimeoutExpired:
            return Fate(site, "killed", "hang", time.monotonic() - begin)
    spent = time.monotonic() - begin
    if done.returncode != 0:
        return Fate(site, "killed", "crash", spent, done.stderr[-300:])
    data = json.loads(done.stdout.splitlines()[-1])
    reason = excuse(site) if data["state"] == "survived" else ""
    if reason:
        return Fate(site, "equivalent", "", spent, reason)
    return Fate(site, data["state"], data["oracle"], spent, data["text"])


def excuse(site: Site) -> str:
    """Why a survivor is no fault; empty if nobody has said so."""
    for operator, line, reason in EQUIVALENT:
        if re.search(operator, site.operator) and re.search(line, site.before):
            return reason
    return ""


BROKEN = ("CompilationError", "CompileError", "SyntaxError", "NameError", "TypingError", "CompileException",
          "IndentationError", "UnsupportedLanguageConstruct", "AttributeError", "LoweringError")  # fmt: skip


def small_tiles(config: Any) -> Any:
    """The same config with the smallest tiles, so that small problems have several in each direction."""
    names = {"block_m", "block_n", "block_k"} & {f.name for f in fields(config)} if is_dataclass(config) else set()
    return replace(config, **{name: 32 if name == "block_k" else 16 for name in names}) if names else config


def hunt_here(backend: str, device: str, seconds: float, stored: Path) -> dict[str, str]:
    """Runs in the mutant's own process: stored failures, then random cases, until something is seen."""
    import torch

    from multigemm.testing import corpus
    from multigemm.testing.mutants import examine
    from multigemm.testing.strategies import EMULATED, Limits, random_case
    from multigemm.testing.subject import Subject

    torch.set_num_threads(1)
    place, begin = torch.device(device), time.monotonic()
    subjects = [
        Subject(backend, adapt=small_tiles if place.type == "cpu" else None),
        Subject(backend, 1),
        Subject(backend),
    ]
    limits = replace(EMULATED, work=1 << 13) if place.type == "cpu" else Limits(work=1 << 16)
    cases = [e.case for e in corpus.entries(stored)] if stored.is_dir() else []
    random.Random(1).shuffle(cases)
    cases = [c for c in cases if place.type != "cpu" or (c.work < 20_000 and c.groups < 400)]
    number = -len(cases)
    while time.monotonic() - begin < seconds:
        case = random_case(number, limits) if number >= 0 else cases[number]
        outcome = examine(case, subjects[number % len(subjects)], place, deep=number % 3 == 0, seed=abs(number))
        if outcome.findings:
            found = outcome.findings[0]
            broken = found.oracle == "exception" and any(word in found.text for word in BROKEN)
            return {"state": "stillborn" if broken else "killed", "oracle": found.oracle, "text": found.text[:200]}
        number += 1
    return {"state": "survived", "oracle": "", "text": ""}


def campaign(backend: str, device: str, count: int, jobs: int, seconds: float, seed: int) -> list[Fate]:
    """Hunts a sample of a backend's mutants; prints each fate as it is known. The unchanged sources come
    first: if they are accused, the hunt proves nothing."""
    fates: list[Fate] = []
    with tempfile.TemporaryDirectory() as name:
        root = snapshot(Path(name))
        chosen = sites(backend, root, GPU_ONLY if device == "cpu" else ())
        unchanged = replace(chosen[0], operator="nothing", after=chosen[0].before)
        random.Random(seed).shuffle(chosen)

        def one(site: Site) -> None:
            fate = run_one(site, backend, device, seconds, root)
            fates.append(fate)
            print(f"{fate.state:10} {fate.seconds:5.1f} s  {fate.oracle:12} {site}", flush=True)

        baseline = run_one(unchanged, backend, device, seconds, root)
        if baseline.state != "survived":
            raise SystemExit(f"the unchanged kernels are accused: [{baseline.oracle}] {baseline.text}")
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, chosen[:count]))
    return fates


def summary(backend: str, fates: list[Fate]) -> str:
    states = ("killed", "stillborn", "survived", "equivalent")
    count = {state: sum(f.state == state for f in fates) for state in states}
    alive = count["killed"] + count["survived"]
    rate = 100 * count["killed"] / alive if alive else 0.0
    rest = f"{count['equivalent']} are equivalent, {count['stillborn']} did not compile"
    return f"{backend}: {count['killed']} of {alive} killed ({rate:.0f} %), {rest}"


def main(arguments: list[str]) -> int:
    """The command line; with --hunt, the mutant's own process."""
    if arguments[:1] == ["--hunt"]:
        _, backend, device, seconds, stored = arguments
        print(json.dumps(hunt_here(backend, device, float(seconds), Path(stored))))
        return 0
    parser = argparse.ArgumentParser(description="hunts small faults planted in the real kernels' sources")
    parser.add_argument("--backend", choices=sorted(FILES), required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="")
    args = parser.parse_args(arguments)
    if args.emulate:
        os.environ["MULTIGEMM_EMULATE"] = "1"
    fates = campaign(args.backend, args.device, args.count, args.jobs, args.seconds, args.seed)
    print(summary(args.backend, fates))
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(f) for f in fates], indent=1) + "\n")
    return 1 if any(f.state == "survived" for f in fates) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
