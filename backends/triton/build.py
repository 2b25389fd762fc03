"""Compiles kernels with Triton for an explicit target, keeps cubins on disk, and loads them without Triton.

Triton's own dispatcher inspects every argument of every call and specialises on values. Here the signature and the
hints are given explicitly. So a call's sizes never cause a compilation, a kernel can be compiled for a GPU that is not
present, and a process that finds its cubin on disk does not import Triton.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from multigemm.backend import installed_version
from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.cuda.launch import BoundKernel, Kernel
from multigemm.errors import CompileError
from multigemm.settings import dump, settings

CACHE = DiskCache("triton")
KERNELS = Path(__file__).parent / "kernels"
compilations = 0
"""How many kernels this process compiled (not: loaded from disk). Tests count it."""


Signature = str | tuple["Signature", ...]
"""The type of an argument, or of a tuple of arguments."""


@dataclass(frozen=True)
class KernelSource:
    """Everything on which a compiled kernel depends, except the target.

    `room`: bytes of shared memory after Triton's own, for data that no Triton layout expresses.
    """

    module: str
    name: str
    signature: tuple[tuple[str, Signature], ...]
    constants: tuple[tuple[str, Any], ...]
    divisibility: tuple[tuple[str, int], ...] = ()
    warps: int = 4
    stages: int = 1
    gluon: bool = False
    registers: int | None = None
    room: int = 0


@dataclass(frozen=True)
class Cubin:
    """Machine code and the facts that a launch needs. `room_at` is where `room` begins in shared memory."""

    code: bytes = field(repr=False)
    name: str
    threads: int
    shared: int
    scratch: int
    scratch_align: int
    params: int
    room_at: int = 0


def triton_version() -> str:
    """The installed version of Triton, without importing it; "" if it is not installed."""
    return installed_version("triton")


@cache
def device_code_fingerprint() -> str:
    """Changes with any file of device code: they import one another."""
    return fingerprint(*(path.read_bytes() for path in sorted(KERNELS.glob("*.py"))))


def _ast_source(source: KernelSource) -> Any:
    kernel = getattr(import_module(source.module), source.name)
    if source.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    given = dict(source.signature)
    signature = {name: given.get(name, "constexpr") for name in kernel.arg_names}
    index = {name: i for i, name in enumerate(kernel.arg_names)}
    attrs = {(index[name],): [["tt.divisibility", by]] for name, by in source.divisibility if by > 1}
    return Source(kernel, signature, constexprs=constants_of(source), attrs=attrs)


def constants_of(source: KernelSource) -> dict[str, Any]:
    """Constants as kernels use them: a leading "tl." names a type of Triton."""
    import triton.language as tl

    def value(v: Any) -> Any:
        return getattr(tl, v[3:]) if isinstance(v, str) and v.startswith("tl.") else v

    return {name: value(v) for name, v in source.constants}


def _options(source: KernelSource) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": source.warps, "num_stages": source.stages}
    if source.registers is not None:
        options["maxnreg"] = source.registers
    return options


def build(source: KernelSource, capability: int) -> Any:
    """Triton's CompiledKernel for sm_<capability>. Needs no GPU."""
    global compilations
    import triton
    from triton.backends.compiler import GPUTarget

    compilations += 1
    try:
        return triton.compile(_ast_source(source), target=GPUTarget("cuda", capability, 32), options=_options(source))
    except Exception as error:
        raise CompileError(f"triton could not compile {source.name} for sm_{capability}: {error}") from error


def _pack(compiled: Any, room: int) -> Cubin:
    meta = compiled.metadata
    room_at = -(-meta.shared // 1024) * 1024 if room else 0
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
    if entry is None:
        raise CompileError(f"no entry point in the PTX of {meta.name}")
    return Cubin(
        code=compiled.asm["cubin"],
        name=meta.name,
        threads=32 * meta.num_warps,
        shared=room_at + room if room else meta.shared,
        scratch=getattr(meta, "global_scratch_size", 0) or 0,
        scratch_align=getattr(meta, "global_scratch_align", 1) or 1,
        params=len(re.findall(r"\.param", entry.group(1))),
        room_at=room_at,
    )


@cache
def cubin(source: KernelSource, capability: int) -> Cubin:
    """The kernel's machine code: from this process, from disk, or compiled now."""
    key = fingerprint(triton_version(), device_code_fingerprint(), source, capability)
    stored = CACHE.get_code(key)
    if stored is not None and settings().dump is None:
        return Cubin(code=stored[1], **stored[0])
    compiled = build(source, capability)
    dump(f"triton-{source.name}-{key}", f"{source}\n", compiled.asm["ptx"], compiled.asm["cubin"])
    packed = _pack(compiled, source.room)
    facts = {name: value for name, value in asdict(packed).items() if name != "code"}
    CACHE.put_code(key, facts, packed.code)
    return packed


@cache
def capability_of(index: int) -> int:
    """The compute capability of a device: 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@cache
def starts_early(index: int) -> bool:
    """Whether a kernel that waits for its predecessor itself may be started before that one is over."""
    if capability_of(index) < 90:
        return False
    from triton.language.extra import cuda

    return hasattr(cuda, "gdc_wait") and hasattr(cuda, "gdc_launch_dependents")


class TritonKernel:
    """A compiled kernel that is loaded on one device. `ordered` gives the values of a mapping from its arguments' names
    in their order."""

    __slots__ = ("_kernel", "code", "index", "ordered")

    def __init__(self, code: Cubin, index: int, names: Sequence[str] = ("", "")) -> None:
        self.code, self.index, self.ordered = code, index, itemgetter(*names)
        self._kernel = Kernel(code.code, code.name, index, code.shared)

    def bound(
        self,
        values: Sequence[int | bytes],
        grid: int,
        keep: Sequence[object] = (),
        on_capture: Callable[[], object] | None = None,
        grid_for: Callable[[int], int] | None = None,
        overlap: bool = False,
    ) -> BoundKernel:
        """A launch of `grid` programs with these arguments. `keep`, `grid_for` and `overlap` are those of
        `Kernel.bound`.

        Triton appends two parameters of its own: a scratch buffer in global memory, which is allocated here, and a
        profile buffer.
        """
        code = self.code
        own = [0] * (code.params - len(values))
        if code.scratch:
            size = code.scratch * grid + code.scratch_align
            scratch = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", self.index))
            own[0] = -(-scratch.data_ptr() // code.scratch_align) * code.scratch_align
            keep, grid_for = (*keep, scratch), None  # of more programs the buffer would be larger
        return self._kernel.bound(
            [*values, *own], grid=grid, threads=code.threads, shared=code.shared, keep=keep, on_capture=on_capture,
            grid_for=grid_for, overlap=overlap,
        )  # fmt: skip


@cache
def load(source: KernelSource, index: int) -> TritonKernel:
    """The kernel loaded on a device, once per process."""
    return TritonKernel(cubin(source, capability_of(index)), index, [name for name, _ in source.signature])


def compile_all(sources: Mapping[str, KernelSource], index: int) -> None:
    """Compiles all of them now, so that no later problem waits."""
    for source in sources.values():
        cubin(source, capability_of(index))
