"""From a config to machine code: compiled once by Numba and the linker, then kept on disk.

The key of an entry holds a fingerprint of this folder's sources and of the compilers' versions. A
process that finds its kernels on disk never imports Numba at all, which is most of a cold start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from multigemm.backend import installed_version
from multigemm.backends.numba.config import (
    Config,
    Float8Config,
    HopperConfig,
    MmaConfig,
    QuantisedConfig,
    QuantisedSignature,
)
from multigemm.backends.numba.config import Signature as PlainSignature
from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.errors import CompileError
from multigemm.settings import dump, settings

Capability = tuple[int, int]
Signature = PlainSignature | QuantisedSignature
OVERLAP_MINIMUM = (9, 0)
"""Where a kernel can be started before the one in front of it has ended, and wait for it by itself."""
COMPILERS = ("numba-cuda", "llvmlite", "nvidia-nvjitlink", "cuda-bindings")
compilations: list[tuple[Config, Signature]] = []
"""What this process has compiled, in order; tests count it."""


@dataclass(frozen=True, slots=True)
class Image:
    """One kernel as machine code. `log` is the assembler's report of registers and spills."""

    entry: str
    cubin: bytes
    log: str = ""


@cache
def sources() -> str:
    """A hash of everything from which this backend's machine code is made."""
    folder = Path(__file__).parent
    texts = [path.read_bytes() for path in sorted(folder.rglob("*.py"))]
    return fingerprint(*texts, *(f"{name} {installed_version(name)}" for name in COMPILERS))


def target(capability: Capability) -> str:
    """The architecture, with the suffix "a" for Hopper's own instructions."""
    major, minor = capability
    return f"sm_{major}{minor}a" if major == 9 else f"sm_{major}{minor}"


def image(config: Config, signature: Signature, capability: Capability) -> Image:
    """The machine code of a kernel, from disk or compiled now."""
    store = DiskCache("numba")
    key = fingerprint(sources(), config.kernel, config, signature, target(capability), settings().lineinfo)
    found = None if settings().dump else store.get_code(key)
    if found is not None:
        return Image(cubin=found[1], **found[0])
    compilations.append((config, signature))
    made = assemble(to_ltoir(config, signature, capability), capability)
    store.put_code(key, {"entry": made.entry, "log": made.log}, made.cubin)
    if settings().dump is not None:
        name = f"numba-{config.kernel}-{fingerprint(config, signature)[:8]}"
        text = f"{config}\n{signature}\n{made.log}\n"
        dump(name, text, to_ptx(config, signature, capability), made.cubin)
    return made


def kernel_function(config: Config, signature: Signature, capability: Capability) -> Callable[..., Any]:
    """The Python function of a kernel; imports Numba."""
    if isinstance(config, Float8Config):
        from multigemm.backends.numba.kernels import hopper_float8

        return hopper_float8.make_kernel(config, signature)  # type: ignore[no-any-return]
    if isinstance(config, HopperConfig):
        from multigemm.backends.numba.kernels import hopper

        return hopper.make_kernel(config, signature)  # type: ignore[no-any-return]
    if isinstance(config, MmaConfig):
        from multigemm.backends.numba.kernels import mma

        return mma.make_kernel(config, signature, capability >= OVERLAP_MINIMUM)  # type: ignore[no-any-return]
    from multigemm.backends.numba.kernels import plain_cores

    return plain_cores.make_kernel(config, signature)  # type: ignore[no-any-return]


def to_ptx(config: Config, signature: Signature, capability: Capability) -> str:
    """Compiles Python to PTX by Numba, for reading."""
    return str(_compile(config, signature, capability, "ptx"))


def to_ltoir(config: Config, signature: Signature, capability: Capability) -> bytes:
    """Compiles Python to the linker's intermediate code by Numba.

    PTX will not do: the linker treats it as one part of a larger program and then ignores `setmaxnreg`.
    """
    return bytes(_compile(config, signature, capability, "ltoir"))


def _compile(config: Config, signature: Signature, capability: Capability, output: str) -> Any:
    from multigemm.backends.numba.arguments import Call, Grids
    from multigemm.backends.numba.kernels.runtime import cuda, numpy_names, types

    words = types.NamedUniTuple(types.int64, len(Call._fields), Call)
    scaled = isinstance(config, QuantisedConfig | Float8Config)
    scales = (types.NamedUniTuple(types.int64, len(Grids._fields), Grids),) if scaled else ()
    more = (types.int64,) * 3 if isinstance(config, HopperConfig) else ()
    arguments = types.void(words, *scales, types.float64, types.float64, *more)
    major, minor = capability
    cc = (major, minor, "a") if major == 9 else (major, minor)
    with numpy_names(), _compiling_for(cc):
        function = kernel_function(config, signature, capability)
        text, _ = cuda.compile(
            function, arguments, device=False, abi="numba", cc=cc, output=output,
            launch_bounds=(config.threads, 1), lineinfo=settings().lineinfo,
        )  # fmt: skip
    return text


@contextmanager
def _compiling_for(capability: tuple[Any, ...]) -> Iterator[None]:
    """A context in which Numba compiles device functions for a named target.

    Its dispatcher asks the current GPU for the target of every device function, also when the kernel
    is compiled for an explicit one; without this, nothing could be compiled where there is no GPU.
    """
    import numba.cuda.dispatcher

    dispatcher: Any = numba.cuda.dispatcher
    saved = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = saved


def assemble(code: bytes, capability: Capability) -> Image:
    """Links intermediate code to machine code."""
    from cuda.bindings import nvjitlink

    options = [f"-arch={target(capability)}", "-lto", "-Xptxas=-v", "-O3"]
    if settings().lineinfo:
        options.append("-lineinfo")
    handle = nvjitlink.create(len(options), options)
    try:
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, code, len(code), "kernel.ltoir")
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError as error:
            log = _log(nvjitlink.get_error_log_size, nvjitlink.get_error_log, handle)
            raise CompileError(f"nvJitLink {options}: {error}\n{log}") from error
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        log = _log(nvjitlink.get_info_log_size, nvjitlink.get_info_log, handle)
    finally:
        nvjitlink.destroy(handle)
    return Image(_entry(bytes(cubin)), bytes(cubin), log)


def _entry(cubin: bytes) -> str:
    """The name of the only kernel, which is the only function with a constant bank for arguments."""
    found = re.search(rb"\.nv\.constant0\.([^\0]+)\0", cubin)
    if found is None:
        raise CompileError("the linker made a cubin without a kernel")
    return found.group(1).decode()


def _log(size: Callable[[int], int], read: Callable[[int, bytearray], None], handle: int) -> str:
    text = bytearray(size(handle))
    if text:
        read(handle, text)
    return bytes(text).rstrip(b"\0").decode(errors="replace")
