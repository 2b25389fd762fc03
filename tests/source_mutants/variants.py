"""Which variants a mutant meets: those that hold the changed line, found by a survey of the unchanged sources.

The survey compiles a sample of a backend's variants, spread over all traits, or traces a pool of problems in
emulation. It is kept in the disk cache.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Set
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from importlib import import_module
from itertools import islice, zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.testing.campaigns import versions
from multigemm.testing.case import Case
from multigemm.testing.oracles import short_text
from multigemm.testing.placed_case import spec_of
from multigemm.testing.strategies import most_new_first
from multigemm.testing.subject import Subject
from tests.source_mutants import emulated
from tests.source_mutants.compiled import Variant, codes_of, lines_held, traits
from tests.source_mutants.hunt import TRIED, Hunt, take_backend
from tests.source_mutants.mutations import COPIES, EMULATED, Mutation, device_code, kernels_by_file, kernels_of
from tests.source_mutants.problems import compiled_cases, rare_cases

COMPILERS = ("triton", "numba-cuda", "cupy-cuda13x")
PER_KERNEL = {"triton": 26, "cupy": 24, "numba": 16}
"""Variants of each kernel: what depends on the form, or on the epilogue, has more."""
RARE = 14
"""Variants of each Triton kernel for problems that the others have few of."""
TRACED_TOGETHER = 3
"""Problems that one process traces in emulation. A variant for a GPU has a process of its own, so that all that is
compiled there is its own. Each part is kept: a survey that is cut off goes on where it was."""
IDLE = 2
"""Variants that multiply nothing (alpha = 0), of those that a mutant is compiled for: the last ones."""
WEIGHTS = {"form": 8, "dtype": 4}
"""What a trait weighs where not 1: a form may leave a line without effect, and widths are often decided on at run
time."""


def survey(hunt: Hunt, root: Path, jobs: int) -> list[Variant]:
    """The backend's variants with the lines that they hold or reach, found now or known from the disk cache. What does
    not compile is left out, and said."""
    store, folder = DiskCache("mutants"), str(root / "backends")
    with ProcessPoolExecutor(jobs, mp_context=get_context("forkserver"), max_tasks_per_child=1) as pool:
        offered = emulated.pool_variants(hunt.backend) if hunt.emulated else pool.submit(sampled, hunt, folder).result()
        keys = _keys(hunt, root, offered)
        known = {key: Variant(**json.loads(text)) for key in keys if (text := store.get(key, ".json")) is not None}
        rest = [(key, variant) for key, variant in zip(keys, offered, strict=True) if key not in known]
        size = TRACED_TOGETHER if hunt.emulated else 1
        parts = [rest[at : at + size] for at in range(0, len(rest), size)]
        waiting = {pool.submit(examine, hunt, folder, [variant for _, variant in part]): part for part in parts}
        for done in as_completed(waiting):
            part = waiting[done]
            if error := done.exception():
                print(f"left out: {', '.join(str(v.to_dict()) for _, v in part)}: {short_text(error)}", flush=True)
                continue
            for (key, _), variant in zip(part, done.result(), strict=True):
                known[key] = variant
                store.put(key, json.dumps(variant.to_dict()).encode(), ".json")
    return [known[key] for key in keys if key in known]


def _keys(hunt: Hunt, root: Path, variants: list[Variant]) -> list[str]:
    """What each variant's lines depend on: the sources of its kernel, the compilers, the problem and its config."""
    compilers = [(name, version) for name, version in versions().items() if name in COMPILERS]
    if hunt.backend == "cupy":
        compilers.append(("nvrtc", str(import_module("cupy.cuda").nvrtc.getVersion())))
    texts = {kernel: _texts(hunt.backend, root, kernel) for kernel in {variant.kernel for variant in variants}}
    return [fingerprint(hunt.emulated, compilers, *texts[v.kernel], json.dumps(v.to_dict())) for v in variants]


def _texts(backend: str, root: Path, kernel: str) -> list[bytes]:
    """The source files of a variant's kernel; of one that runs another behind a copy, that one's too."""
    parts = {kernel, "hopper"} if kernel in COPIES else set(EMULATED) if kernel == "emulated" else {kernel}
    files = {name for name, kernels in kernels_by_file(backend, root).items() if parts & set(kernels)}
    return [path.read_bytes() for path in sorted(device_code(backend, root).iterdir()) if path.name in files]


def sampled(hunt: Hunt, folder: str) -> list[Variant]:
    """In a process of its own: a sample of what the backend's kernels are compiled for, spread over all traits."""
    take_backend(hunt, folder)
    subject, device = Subject(hunt.backend), torch.device(hunt.device)

    def of_each_kernel(cases: list[Case], count: int) -> list[Variant]:
        found: dict[str, list[tuple[Variant, Set[Any]]]] = {}
        for case in cases:
            spec = spec_of(case)
            for config in subject.offered(spec, device):
                variant = Variant(case.to_dict(), config.kernel, str(config))
                found.setdefault(config.kernel, []).append((variant, traits(hunt.backend, case, spec, config)))
        chosen = (most_new_first(every, lambda pair: pair[1], again=False) for every in found.values())
        return [variant for ordered in chosen for variant, _ in islice(ordered, count)]

    rare = of_each_kernel(rare_cases(), RARE) if hunt.backend == "triton" else []
    return [*of_each_kernel(compiled_cases(), PER_KERNEL[hunt.backend]), *rare]


def examine(hunt: Hunt, folder: str, variants: list[Variant]) -> list[Variant]:
    """In a process of its own: the variants with the lines that they hold, or that they reach."""
    take_backend(hunt, folder)
    device = torch.device(hunt.device)
    if hunt.emulated:
        return emulated.trace(hunt.backend, variants, device)
    return [compile_variant(hunt.backend, variant, device) for variant in variants]


def compile_variant(backend: str, variant: Variant, device: torch.device) -> Variant:
    """A variant with the lines that it holds, and digests of its machine code."""
    spec = spec_of(Case.from_dict(variant.case))
    shipped = Subject(backend).shipped(spec, device)
    config = next(config for config in shipped if str(config) == variant.config)
    return replace(variant, lines=lines_held(backend, spec, config), codes=codes_of(backend, spec, config))


def reached(mutation: Mutation, backend: str, variants: list[Variant]) -> list[Variant]:
    """Variants of the kernels that the change can reach, each kernel in turn: first those that hold its line, then
    those that hold lines near it. In emulation, the problems that reach it."""
    name = Path(mutation.file).name
    if variants and variants[0].kernel == "emulated":
        return emulated.reaching(variants, name, mutation.line)
    shuffled = list(variants)
    random.Random(zlib.crc32(str(mutation).encode())).shuffle(shuffled)
    distances = {id(variant): variant.distance(name, mutation.line) for variant in shuffled}

    def queue(kernel: str) -> list[Variant]:
        own = sorted((v for v in shuffled if v.kernel == kernel), key=lambda v: distances[id(v)])
        return various([v for v in own if not distances[id(v)]]) + various([v for v in own if distances[id(v)]])

    queues = [queue(kernel) for kernel in kernels_of(mutation, backend)]
    taken = [each for rank in zip_longest(*queues) for each in rank if each is not None]
    ordered = sorted(taken, key=lambda v: (distances[id(v)] > 0, idle(v)))
    late = [variant for variant in ordered[TRIED:] if idle(variant)][:IDLE]
    return ordered[: TRIED - len(late)] + late


def idle(variant: Variant) -> bool:
    """Whether a variant's problem multiplies nothing."""
    return variant.case.get("alpha") == 0


def various(variants: list[Variant]) -> list[Variant]:
    """The same variants, those first that show forms, dtypes, layouts, epilogues and configs that none before them
    shows; 16-bit floats first among equals."""

    def shown(variant: Variant) -> set[tuple[str, str]]:
        case = variant.case
        orders = {name: str(case.get(name, {}).get("order", "row")) for name in ("a", "b", "out")}
        words = {name: str(case.get(name, "")) for name in ("form", "dtype", "activation", "bias", "alias", "given")}
        return set({**orders, **words, "c": str(bool(case.get("c_dtype"))), "config": variant.config}.items())

    def worth(variant: Variant, new: Set[tuple[str, str]]) -> tuple[int, bool]:
        return sum(WEIGHTS.get(name, 1) for name, _ in new), str(variant.case.get("dtype", "")).endswith("float16")

    return list(most_new_first(variants, shown, worth))
