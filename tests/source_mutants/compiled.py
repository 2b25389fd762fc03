"""What compilers make of a backend's kernels: the source lines that a variant holds, and its machine code.

A backend's kernels are compiled in many variants (dtypes, layouts, epilogue, tile), and most lines are part of some of
them only. The line table of a variant says which lines it holds; a digest of its machine code says whether a changed
source makes any difference to it. Neither needs a GPU.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from types import CodeType
from typing import Any

from multigemm.testing.case import Case

FAR = 50
"""Lines from which on one that is not in the line table counts as unrelated to those that are."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compile a backend's kernel: a kind of problem and the text of a config. `lines` are those
    that its machine code comes from, by file name, and `codes` digests of that code.

    In emulation, a problem: `config` is the position of its subject, `lines` are those that it executes, in
    `seconds`."""

    case: dict[str, Any]
    kernel: str
    config: str
    lines: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    codes: list[str] = field(default_factory=list)

    def distance(self, file: str, line: int) -> int:
        """How far the nearest line with code of its own is; FAR for a file that the line table does not know."""
        return min((abs(line - each) for each in self.lines.get(file, ())), default=FAR)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def traits(backend: str, case: Case, spec: Any, config: Any) -> frozenset[tuple[str, str]]:
    """What decides on the code that is compiled and on the way through it: pairs of the fields of the compiler's key
    and of the form with the layouts."""
    key = {name: str(value) for name, value in compiler_key(backend, spec, config).items()}
    sides = f"{case.form} {spec.a.order} {spec.b.order}"
    plain = f"{case.form} {bool(case.c_dtype or case.bias or case.activation)}"
    rest = f"{case.form} zeroed {spec.zero_unowned}"
    beside = f"kernels {sorted(_triton_sources(spec, config))}" if backend == "triton" else ""
    fields = sorted(
        {*(f"{name}={value}" for name, value in key.items()), f"config={config}", sides, plain, rest, beside}
    )
    return frozenset((x, y) for i, x in enumerate(fields) for y in fields[i:])


def compiler_key(backend: str, spec: Any, config: Any) -> dict[str, Any]:
    """What a backend hands to its compiler for a spec and a config, without compiling."""
    if backend == "cupy":
        return dict(_cuda_sources(spec, config)[1][0].defines)
    if backend == "numba":
        return asdict(_numba_signature(spec, config))
    made = next(iter(_triton_sources(spec, config).values()))
    kinds = {name: kind for name, kind in made.signature if kind.startswith("*")}
    return dict(made.constants) | kinds


def lines_of(ptx: str) -> dict[str, list[int]]:
    """The source lines in a line table, by file name."""
    files = dict(re.findall(r'\.file\s+(\d+) "([^"]+)"', ptx))
    found: dict[str, set[int]] = {}
    for number, line in set(re.findall(r"\.loc\s+(\d+) (\d+)", ptx)):
        found.setdefault(files.get(number, "").rsplit("/", 1)[-1], set()).add(int(line))
    return {name: sorted(lines) for name, lines in found.items() if name}


def _bare(ptx: str) -> bytes:
    """PTX without its line table: what the machine is told to do."""
    kept = (
        line for line in ptx.split(".section\t.debug")[0].splitlines() if not re.match(r"\s*(\.loc|\.file|//)", line)
    )
    return "\n".join(re.sub(r"\s*//.*", "", line) for line in kept).encode()


def machine_code(cubin: bytes) -> bytes:
    """What the machine executes: the code sections of an ELF file, without names and tables."""
    table, size, count, names = struct.unpack_from("<40xQ10xHHH", cubin)
    sections = [struct.unpack_from("<II16xQQ", cubin, table + i * size) for i in range(count)]  # name, type, at, length
    strings = sections[names][2]
    kept = []
    for name, _, at, length in sections:
        text = cubin[strings + name : cubin.index(b"\0", strings + name)]
        if text.startswith((b".text", b".nv.constant", b".rodata")) and not text.startswith(b".nv.constant0"):
            kept.append(cubin[at : at + length])
    return b"".join(kept)


def compile_once(backend: str) -> None:
    """From here on, in this process, the slow compilers compile nothing twice."""
    for name in {"cupy": ("compile_source",), "numba": ("to_ltoir", "assemble")}.get(backend, ()):
        build = import_module(f"multigemm.backends.{backend}.build")
        setattr(build, name, cache(getattr(build, name)))


def codes_of(backend: str, spec: Any, config: Any) -> list[str]:
    """Digests of the machine code of all kernels that a spec and a config need on Hopper; needs no GPU."""
    made = {"cupy": _cuda_codes, "numba": _numba_codes, "triton": _triton_codes}[backend](spec, config)
    return sorted({hashlib.sha256(code).hexdigest()[:16] for code in made})


def lines_held(backend: str, spec: Any, config: Any) -> dict[str, list[int]]:
    """The source lines of the same kernels, by file: those that code comes from; for Numba, whose line tables know the
    kernel's own lines only, those of all functions that it compiles."""
    texts = {"cupy": _cuda_tables, "numba": _numba_tables, "triton": _triton_tables}[backend](spec, config)
    found: dict[str, set[int]] = {}
    for text in texts:
        for name, lines in lines_of(text).items():
            found.setdefault(name, set()).update(lines)
    return {name: sorted(lines) for name, lines in found.items()}


def _cuda_sources(spec: Any, config: Any) -> tuple[Any, list[Any]]:
    launch, build = (import_module(f"multigemm.backends.cupy.{name}") for name in ("launch", "build"))
    return build, list(launch.KERNELS[config.kernel].sources(spec, config))


def _cuda_codes(spec: Any, config: Any) -> list[bytes]:
    build, sources = _cuda_sources(spec, config)
    return [machine_code(build.compile_source(source, build.architecture((9, 0)))[0]) for source in sources]


def _cuda_tables(spec: Any, config: Any) -> list[str]:
    from cupy.cuda import nvrtc

    build, sources = _cuda_sources(spec, config)
    names = [[part.encode() for part in column] for column in zip(*build.headers(), strict=True)]
    found = []
    for source in [*sources[:1], *sources[1:][-2:]]:  # of one that is compiled for many heights, the extreme ones
        program = nvrtc.createProgram((build.SOURCES / source.file).read_text(), source.file, names[1], names[0])
        try:
            nvrtc.compileProgram(program, [*source.options("compute_90a"), "-lineinfo"])
            ptx = nvrtc.getPTX(program)
        finally:
            nvrtc.destroyProgram(program)
        found.append(ptx.decode() if isinstance(ptx, bytes) else str(ptx))
    return found


def _numba_signature(spec: Any, config: Any) -> Any:
    return import_module("multigemm.backends.numba.launch").kernel_signature(config, spec)


def _numba_arguments(spec: Any, config: Any) -> tuple[Any, tuple[Any, Any, tuple[int, int]]]:
    return import_module("multigemm.backends.numba.build"), (config, _numba_signature(spec, config), (9, 0))


def _numba_codes(spec: Any, config: Any) -> list[bytes]:
    build, arguments = _numba_arguments(spec, config)
    return [machine_code(build.assemble(build.to_ltoir(*arguments), arguments[2]).cubin)]


def _numba_tables(spec: Any, config: Any) -> list[str]:
    build, arguments = _numba_arguments(spec, config)
    with _functions_compiled() as codes:
        build.to_ltoir(*arguments)
        codes.append(build.kernel_function(*arguments).__code__)
    return [_table_of(code) for code in codes]


def _table_of(code: CodeType) -> str:
    """The lines of a function, in the words of a line table."""
    lines = sorted({line for *_, line in code.co_lines() if line})
    return "\n".join([f'.file 1 "{code.co_filename}"', *(f".loc 1 {line}" for line in lines)])


@contextmanager
def _functions_compiled() -> Iterator[list[CodeType]]:
    """Collects the device functions that Numba compiles."""
    dispatcher: Any = import_module("numba.cuda.dispatcher").CUDADispatcher
    compile_device, found = dispatcher.compile_device, list[CodeType]()

    def compile_and_note(self: Any, *arguments: Any, **more: Any) -> Any:
        found.append(self.py_func.__code__)
        return compile_device(self, *arguments, **more)

    dispatcher.compile_device = compile_and_note
    try:
        yield found
    finally:
        dispatcher.compile_device = compile_device


def _triton_codes(spec: Any, config: Any) -> list[bytes]:
    return [_bare(text) for text in _triton_tables(spec, config)]


def _triton_tables(spec: Any, config: Any) -> list[str]:
    compiler = import_module("multigemm.backends.triton.build")
    return [compiler.build(source, 90).asm["ptx"] for source in _triton_sources(spec, config).values()]


def _triton_sources(spec: Any, config: Any) -> dict[str, Any]:
    return dict(import_module("tests.support.triton_kernels").sources_of(spec, config))
