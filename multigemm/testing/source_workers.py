"""The processes of a campaign over source mutants: one for each mutant, and those that look around first.

All are forked from a server that has imported everything but the backend, so that each can take the
backend from a changed copy. A mutant that hangs, or that ends its process, is killed by its parent.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Semaphore
from typing import Any

from multigemm.testing.source_chase import hunt_on_gpu
from multigemm.testing.source_equivalents import excuse
from multigemm.testing.source_fates import Fate
from multigemm.testing.source_hunt import Hunt, hunt_emulated
from multigemm.testing.source_live import OTHERS, PER_KERNEL, Variant, codes_of, lines_held, remember, spread, traits
from multigemm.testing.source_sites import Site, plant
from multigemm.testing.source_trace import offered, trace

PATIENCE, STALL, SLOW = 100.0, 15.0, 90.0
"""Seconds without a word after which a mutant counts as hanging: while it compiles, and while a problem runs on a
GPU, or in an emulator."""
HANGS = 1000
"""Instead of an exit code."""
PRELOADED = ("torch", "numpy", "multigemm.testing.mutants", "multigemm.testing.choice", "multigemm.testing.corpus",
             "multigemm.testing.source_chase", "multigemm.testing.source_live", "multigemm.testing.edges",
             "multigemm.testing.kinds", "multigemm.testing.source_trace")  # fmt: skip
LIBRARIES = {"triton": ("triton", "triton.language"), "cupy": ("cupy",), "numba": ("numba", "numba.cuda")}
KINDS, POOL, WORK = 60, 300, 1 << 16
PARTICULAR = 14
"""Variants of each kernel for problems that the pool has few of."""
_once_more = Semaphore(4)
"""Of those that seem to hang, so many are tried again side by side."""


def prepare(hunt: Hunt) -> None:
    """Sets the process from which all others are forked: all that is slow to import, no GPU yet, and no disk
    cache, which is no place for mutants."""
    os.environ |= {"MULTIGEMM_CACHE": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    libraries = () if hunt.emulated else LIBRARIES[hunt.backend]
    mp.get_context("forkserver").set_forkserver_preload([*PRELOADED, *libraries])


def run_one(site: Site, hunt: Hunt, root: Path, variants: Sequence[Variant] = ()) -> Fate:
    """Plants one mutant and hunts it in a process of its own, on a GPU in these variants."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        plant(site, Path(name), root)
        data, code = _attempt(hunt, name, variants)
        if code == HANGS or (data and data["oracle"] == "hang"):
            with _once_more:  # with few others that may hang: they share a device, or cores
                data, code = _attempt(hunt, name, variants)
    spent = time.monotonic() - begin
    if data is None:
        if code == 1:  # an exception outside the hunt: nothing was learnt
            return Fate(site, "failed", "", spent)
        return Fate(site, "killed", "hang" if code == HANGS else "crash", spent, f"exit code {code}")
    steps = data.get("spent", {})
    if data["state"] in ("survived", "same") and (reason := excuse(site, emulated=hunt.emulated)):
        return Fate(site, "equivalent", "", spent, reason, spent=steps)
    return Fate(site, data["state"], data["oracle"], spent, data["text"], spent=steps)


def _attempt(hunt: Hunt, folder: str, variants: Sequence[Variant]) -> tuple[dict[str, Any] | None, int]:
    """What one process finds, and its exit code; no answer if it ends before, or HANGS."""
    context = mp.get_context("forkserver")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_inside, args=(hunt, folder, list(variants), theirs), daemon=True)
    process.start()
    theirs.close()
    data, hangs = _answer(mine, hunt)
    if not hangs:
        process.join(5)
    process.kill()
    process.join()
    return data, HANGS if hangs else int(process.exitcode or 0)


def _answer(pipe: Any, hunt: Hunt) -> tuple[dict[str, Any] | None, bool]:
    """What a mutant's process finds, and whether it hangs. On the way it says whether it compiles or runs."""
    stall = SLOW if hunt.emulated else STALL
    said: Any = ""
    try:
        while pipe.poll(stall if said == "runs" else PATIENCE):
            said = pipe.recv()
            if isinstance(said, dict):
                return said, False
    except (EOFError, OSError):
        return None, False
    return None, True


def _take(backend: str, folder: str) -> None:
    """Makes this process import a backend from a copy."""
    import torch

    import multigemm.backends

    torch.set_num_threads(1)
    own = f"multigemm.backends.{backend}"
    for name in [name for name in sys.modules if name == own or name.startswith(f"{own}.")]:
        del sys.modules[name]
    multigemm.backends.__path__ = [folder, *multigemm.backends.__path__]


def _take_compiler(hunt: Hunt, folder: str) -> None:
    """The same for a GPU: only what is asked for is compiled, and that once."""
    from multigemm.testing.choice import compile_singly

    _take(hunt.backend, folder)
    if not hunt.emulated:
        remember(hunt.backend)
    if hunt.backend == "cupy":
        compile_singly()


def _inside(hunt: Hunt, folder: str, variants: list[Variant], pipe: Any) -> None:
    """The mutant's own process: takes the backend from the changed copy, hunts, tells."""
    import torch

    from multigemm.testing.oracles import short_text

    _take_compiler(hunt, folder)
    place = torch.device(hunt.device)
    try:
        found = (
            hunt_emulated(hunt, place, variants, pipe.send)
            if hunt.emulated
            else hunt_on_gpu(hunt, place, variants, pipe.send)
        )
    except Exception as error:  # a lost device shows wherever the host waits for it next; all else is our own fault
        text = short_text(error)
        found = {"state": "killed" if "CUDA" in text else "failed", "oracle": "exception", "text": text[:300]}
    pipe.send(found)
    pipe.close()
    os._exit(0)  # a mutant may have left a context in which an ordinary end waits for ever


def _ask(target: Any, *arguments: Any) -> Any:
    """The answer of a function in a process of its own; raises if it gives none."""
    context = mp.get_context("forkserver")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        return mine.recv()
    finally:
        process.join()


def variants_of(hunt: Hunt, root: Path) -> list[Variant]:
    """A sample of what the backend's kernels are compiled for, spread over all traits; in emulation, problems."""
    if hunt.emulated:
        return offered(hunt.backend)
    return list(_ask(_offer, hunt, str(root / "backends")))


def _offer(hunt: Hunt, folder: str, pipe: Any) -> None:
    import torch

    from multigemm.testing.choice import spec_of
    from multigemm.testing.subject import Subject

    _take_compiler(hunt, folder)
    subject, place = Subject(hunt.backend), torch.device(hunt.device)

    def sampled(cases: list[Any], count: int) -> list[Variant]:
        found: dict[str, list[Any]] = {}
        for case in cases:
            spec = spec_of(case)
            for config in [] if subject.refusals(spec, place) else subject.shipped(spec, place):
                pair = (case.to_dict(), config.kernel, str(config))
                found.setdefault(config.kernel, []).append((traits(hunt.backend, case, spec, config), pair))
        return [Variant(*pair) for pairs in found.values() for pair in spread(pairs, count)]

    more = sampled(particular(), PARTICULAR) if hunt.backend == "triton" else []
    pipe.send([*sampled(pool(), PER_KERNEL.get(hunt.backend, OTHERS)), *more])


def particular() -> list[Any]:
    """Problems that the pool has few of: with more groups than a kernel searches by itself, which another one lists
    first, and with weights in lines of odd length."""
    from multigemm.testing.case import Layout
    from multigemm.testing.kinds import plain_kinds
    from multigemm.testing.strategies import Limits, legal

    kinds = [kind for kind in plain_kinds(Limits()) if kind.form in ("jagged_m", "jagged_n", "masked")]
    many = [legal(replace(kind, m=16, n=64, k=64, lengths=(1,) * 304)) for kind in kinds]
    rows = [case for case in many if case.form == "jagged_m"]
    odd = [replace(case, n=63, b=Layout(), aligned=False) for case in rows]
    odd += [replace(case, k=63, a=Layout(pad=-16), b=Layout("col"), aligned=False) for case in rows]
    few = [replace(case, lengths=(300, 5)) for case in odd]
    return [*many, *few, *odd, *(replace(case, a=Layout("col")) for case in rows)]


def pool() -> list[Any]:
    """Kinds of problems to choose variants from: plain ones, varied ones, and some whose K fills whole blocks."""
    from multigemm.testing.kinds import kinds
    from multigemm.testing.strategies import Limits, random_case

    limits = Limits(work=WORK, groups=64)
    rest = [random_case(seed, limits) for seed in range(POOL)]
    rich = [
        replace(case, bias="n", bias_dtype=case.dtype)
        for case in rest[1::3]
        if not (case.bias or case.dtype_b or case.dtype == "int8")
    ]
    deep = [replace(case, k=128) for case in rest[::3] if case.form not in ("jagged_k", "per_group") and case.k]
    return [*kinds(limits, KINDS), *rest, *rich, *deep]


def survey(hunt: Hunt, root: Path, variants: list[Variant]) -> list[Variant]:
    """The variants with the lines that they hold, or that they reach, in the unchanged sources."""
    return list(_ask(_survey, hunt, str(root / "backends"), variants))


def _survey(hunt: Hunt, folder: str, variants: list[Variant], pipe: Any) -> None:
    import torch

    _take_compiler(hunt, folder)
    if hunt.emulated:
        pipe.send(trace(hunt.backend, variants, torch.device(hunt.device)))
    else:
        pipe.send([looked_at(hunt, variant) for variant in variants])


def looked_at(hunt: Hunt, variant: Variant) -> Variant:
    """A variant with the lines that it holds, and what its machine code is."""
    import torch

    from multigemm.testing.case import Case
    from multigemm.testing.choice import spec_of
    from multigemm.testing.subject import Subject

    spec = spec_of(Case.from_dict(variant.case))
    shipped = Subject(hunt.backend).shipped(spec, torch.device(hunt.device))
    config = next(config for config in shipped if str(config) == variant.config)
    lines = lines_held(hunt.backend, spec, config)
    return replace(variant, lines=lines, codes=codes_of(hunt.backend, spec, config))
