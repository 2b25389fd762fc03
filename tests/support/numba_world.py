"""The numba backend bound and launched as far as the driver's door, on CPU tensors: no GPU, no Numba."""

from __future__ import annotations

from typing import Any

import pytest

from multigemm.backends.numba import build, launch, support
from multigemm.backends.numba.build import Image
from multigemm.backends.numba.config import Config
from multigemm.backends.numba.support import compiler_obstacle
from multigemm.planning.operands import Operands
from multigemm.settings import settings
from tests.support import cuda_driver
from tests.support.compiled_before import compiled_before, files_of
from tests.support.cuda_driver import FakeDriver

COMPILED = "backends/numba", "multigemm"
"""What a kernel may be made of."""

OBSTACLE = "Numba runs as a simulator here" if settings().emulate else compiler_obstacle()
"""Why nothing is compiled in this process, or ""."""
compiles = pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The fake driver as a Hopper GPU, for which kernels compile to their names."""
    fake = cuda_driver.install(monkeypatch)
    launch.kernel_of.cache_clear()
    monkeypatch.setattr(launch, "image", lambda config, *rest: Image(config.kernel, b"cubin"))
    for module in (launch, support):
        monkeypatch.setattr(module, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(launch, "processors", lambda index: 132)
    return fake


def assembled(config: Config, signature: Any, capability: tuple[int, int]) -> Image:
    """The machine code of a kernel, and what the assembler says of it."""
    given = config, signature, capability
    return compiled_before(
        lambda: build.assemble(build.to_ltoir(*given), capability), files_of(*COMPILED), given, settings().lineinfo
    )


def ptx_of(config: Config, signature: Any, capability: tuple[int, int]) -> str:
    """The PTX of a kernel."""
    given = config, signature, capability
    return compiled_before(lambda: build.to_ptx(*given), files_of(*COMPILED), "ptx", given, settings().lineinfo)


def bound(config: Config, ops: Operands) -> Any:
    """A launch of the kernel of a config."""
    return launch.bind_for(config, ops.spec, 0)(ops)
