"""Which variants a mutant meets: those that hold its line, found by a look at all of them beforehand.

The survey compiles a sample of variants of the unchanged kernels (multigemm.testing.source_live), or traces a
pool of problems in emulation (multigemm.testing.source_trace), and is kept in the disk cache.
"""

from __future__ import annotations

import json
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import zip_longest
from pathlib import Path

from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.testing.source_chase import TRIED
from multigemm.testing.source_hunt import Hunt
from multigemm.testing.source_live import Variant
from multigemm.testing.source_sites import COPIES, EMULATED, Site, device_code, kernels_of, reach
from multigemm.testing.source_trace import reaching
from multigemm.testing.source_workers import survey, variants_of
from multigemm.testing.versions import versions

COMPILERS = ("triton", "numba-cuda", "cupy-cuda13x")
PART = 3
"""Problems that are traced together in emulation. A variant for a GPU has a process of its own, which hears all that
is compiled for it. Each part is kept: a survey that is cut off goes on where it was."""


def surveyed(hunt: Hunt, root: Path, jobs: int, store: DiskCache) -> list[Variant]:
    """The backend's variants with their lines, found now or known from the disk cache."""
    offered = variants_of(hunt, root)
    texts = {kernel: _texts(hunt.backend, root, kernel) for kernel in {variant.kernel for variant in offered}}
    compilers = [(name, version) for name, version in versions().items() if name in COMPILERS]
    if hunt.backend == "cupy":
        compilers.append(("nvrtc", str(import_module("cupy.cuda").nvrtc.getVersion())))
    if hunt.backend == "numba":
        compilers.append(("lines", "of functions"))  # unlike what was kept when its line tables were believed
    keys = [fingerprint(hunt.emulated, compilers, *texts[v.kernel], json.dumps(v.to_dict())) for v in offered]
    known = {key: Variant(**json.loads(text)) for key in keys if (text := store.get(key, ".json")) is not None}
    size = PART if hunt.emulated else 1
    rest = [(key, variant) for key, variant in zip(keys, offered, strict=True) if key not in known]

    def look(at: int) -> None:
        part = rest[at : at + size]
        try:
            seen = survey(hunt, root, [variant for _, variant in part])
        except EOFError:  # its process says why on stderr
            print(f"not looked at, for it does not compile: {', '.join(str(v.to_dict()) for _, v in part)}", flush=True)
            return
        for variant in seen:
            key = next(key for key, each in part if (each.case, each.config) == (variant.case, variant.config))
            known[key] = variant
            store.put(key, json.dumps(variant.to_dict()).encode(), ".json")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(look, range(0, len(rest), size)))
    return [known[key] for key in keys if key in known]


def _texts(backend: str, root: Path, kernel: str) -> list[bytes]:
    """The source files of a variant's kernel; of one that runs another behind a copy, that one's too."""
    parts = {kernel, "hopper"} if kernel in COPIES else set(EMULATED) if kernel == "emulated" else {kernel}
    files = {name for name, kernels in reach(backend, root).items() if parts & set(kernels)}
    return [path.read_bytes() for path in sorted(device_code(backend, root).iterdir()) if path.name in files]


def reached(site: Site, backend: str, variants: list[Variant]) -> list[Variant]:
    """Variants of the kernels that the fault can reach, each kernel in turn: first those that hold its line, then
    those that hold lines near it. In emulation, the problems that reach it."""
    name = Path(site.file).name
    if variants and variants[0].kernel == "emulated":
        return reaching(variants, name, site.line)
    chosen = list(variants)
    random.Random(zlib.crc32(str(site).encode())).shuffle(chosen)
    holds = {id(variant): variant.distance(name, site.line) == 0 for variant in chosen}

    def queue(kernel: str) -> list[Variant]:
        mine = sorted((v for v in chosen if v.kernel == kernel), key=lambda v: v.distance(name, site.line))
        return various([v for v in mine if holds[id(v)]]) + various([v for v in mine if not holds[id(v)]])

    queues = [queue(kernel) for kernel in kernels_of(site, backend)]
    taken = [each for rank in zip_longest(*queues) for each in rank if each is not None]
    ordered = sorted(taken, key=lambda v: (not holds[id(v)], idle(v)))
    late = [variant for variant in ordered[TRIED:] if idle(variant)][:IDLE]
    return ordered[: TRIED - len(late)] + late


IDLE = 2
"""Variants that multiply nothing (alpha = 0), of those that a mutant is compiled for: the last ones."""


def idle(variant: Variant) -> bool:
    return variant.case.get("alpha") == 0


WEIGHTS = {"form": 8, "dtype": 4}
"""Of what a variant may be the first to show: a form may leave a line without effect, and widths are often decided on
at run time; all else, such as a layout or a config, weighs 1."""


def shown(variant: Variant) -> set[tuple[str, str]]:
    """What a variant shows: form, dtype, layouts, epilogue, config."""
    case = variant.case
    orders = {name: str(case.get(name, {}).get("order", "row")) for name in ("a", "b", "out")}
    words = {name: str(case.get(name, "")) for name in ("form", "dtype", "activation", "bias", "alias", "given")}
    return set({**orders, **words, "c": str(bool(case.get("c_dtype"))), "config": variant.config}.items())


def various(variants: list[Variant]) -> list[Variant]:
    """The same variants, at each step the one that shows most that none before it shows; 16-bit floats first among
    equals."""
    rest, seen, found = list(variants), set[tuple[str, str]](), list[Variant]()
    while rest:
        best = max(rest, key=lambda v: (sum(WEIGHTS.get(name, 1) for name, _ in shown(v) - seen),
                                        str(v.case.get("dtype", "")).endswith("float16")))  # fmt: skip
        rest.remove(best)
        found.append(best)
        seen |= shown(best)
    return found
