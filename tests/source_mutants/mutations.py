"""Where one small change of a kernel's source is possible: the sites, and copies of a backend with one change in it.

A change is, for example, a comparison widened, an off-by-one, a dropped conjunct of a mask, a row stride in place of
a column stride, a lost K step.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "triton": {
        "generic.py": ("pointer", "hopper", "quantised", "fused"),
        "schedule.py": ("pointer", "hopper", "quantised", "fused"),
        "epilogue.py": ("pointer", "hopper", "quantised", "fused"), "quantised.py": ("quantised",),
        "hopper.py": ("hopper",), "hopper_tiles.py": ("hopper",), "hopper_shift_b.py": ("hopper",),
        "hopper_float8.py": ("hopper",),
        "lists.py": ("pointer", "hopper"), "sum_rows.py": ("fused",),
    },
    "cupy": {},
    "numba": {
        "plain_cores.py": ("generic", "quantised"),
        "schedule.py": ("generic", "quantised", "mma", "hopper", "hopper_float8"),
        "epilogue.py": ("generic", "quantised", "mma"), "memory.py": ("generic", "quantised"),
        "mma.py": ("mma",), "mma_fragments.py": ("mma",), "tensor_epilogue.py": ("hopper", "mma", "hopper_float8"),
        "hopper.py": ("hopper", "hopper_float8"), "hopper_float8.py": ("hopper_float8",),
        "hopper_load.py": ("hopper", "hopper_float8"), "hopper_tiles.py": ("hopper", "hopper_float8"),
    },
}  # fmt: skip
"""By backend: the source files of kernels, and the kernels that each file is part of. Those of cupy follow from
#include."""

COPIES = ("packed", "hopper_shift_b")
"""Kernels that may run behind a copy of an operand."""

EMULATED = ("pointer", "quantised", "generic", "fused")
"""Kernels that run without a GPU."""

EMULATED_ONLY = ("fused",)
"""Kernels that are hunted without a GPU only: on a GPU, a variant meets many problems that need what is compiled for
it, and hardly two random fused problems need the same. The interpreter runs the same source."""

DEVICE_CODE_AFTER = {"memory.py": "else:"}
"""Files whose device code begins behind such a line; before it stands the version for emulation."""

GPU_ONLY = (
    "group_rows", "weight_class", "write_records", "pack_kernel", "make_any_finish", "make_running_sum",
    "make_run_of", "owner_of", "make_warp_schedule", "wide_strips", "tiles_of_two_widths", "place_of_two_widths",
)  # fmt: skip
"""Functions of these files that an emulator never calls; it does not call Gluon functions either."""

GLUON = re.compile(r"^@gluon\.\w+\ndef (\w+)\(", re.MULTILINE)

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


UNCHANGED_LINES = (
    "#", "//", "*", "/*", "import", "from", "@", "def ", "assert", "static_assert", "__global__", "template",
)  # fmt: skip
"""How lines begin that are never changed."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change: the file, the line (from 1), what it was and what it becomes."""

    file: str
    line: int
    operator: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} {self.operator}: {self.before.strip()}  ->  {self.after.strip()}"


def code_lines(path: Path, skip: tuple[str, ...] = ()) -> Iterator[tuple[int, str]]:
    """Lines that may be changed: no comments, docstrings, imports, signatures or compile-time constants, and
    nothing in the functions named by `skip`."""
    in_docstring, function = False, ""
    begun = path.name not in DEVICE_CODE_AFTER
    for number, line in enumerate(path.read_text().splitlines(), 1):
        begun = begun or line == DEVICE_CODE_AFTER[path.name]
        if not begun:
            continue
        if header := re.match(r"def (\w+)\(", line):
            function = header.group(1)
        if function in skip:
            continue
        quotes = line.count('"""')
        if quotes == 1:
            in_docstring = not in_docstring
        text = line.strip()
        if in_docstring or quotes or not text or text.startswith(UNCHANGED_LINES) or "constexpr" in text:
            continue
        yield number, re.split(r"  #|\s*//(?!=)", line, maxsplit=1)[0] if path.suffix != ".py" else line.split("  #")[0]


def snapshot(folder: Path) -> Path:
    """A copy of the backends, so that edits made meanwhile cannot mix with the mutants."""
    ignore = shutil.ignore_patterns("__pycache__", "*.json")
    shutil.copytree(ROOT / "backends", folder / "backends", ignore=ignore)
    return folder


def device_code(backend: str, root: Path = ROOT) -> Path:
    """The folder of a backend's device code: `kernels`, beside whose files host code may have the same names."""
    folder = root / "backends" / backend
    return folder / "kernels" if (folder / "kernels").is_dir() else folder


def kernels_by_file(backend: str, root: Path = ROOT) -> dict[str, tuple[str, ...]]:
    """The kernels that a file is part of, by file name."""
    return FILES[backend] or _cuda_kernels(device_code(backend, root))


@lru_cache(maxsize=8)
def _cuda_kernels(folder: Path) -> dict[str, tuple[str, ...]]:
    """A CUDA source is a kernel; a header is part of those that include it, directly or not."""
    included = {path.name: re.findall(r'#include "([^"]+)"', path.read_text()) for path in folder.glob("*.cu*")}
    found: dict[str, tuple[str, ...]] = {}
    for source in sorted(name for name in included if name.endswith(".cu")):
        kernels, open_files, seen = COPIES if source == "pack.cu" else (Path(source).stem,), [source], set[str]()
        while open_files:
            name = open_files.pop()
            if name in included and name not in seen:
                seen.add(name)
                open_files += included[name]
        for name in seen:
            found[name] = (*found.get(name, ()), *(kernel for kernel in kernels if kernel not in found.get(name, ())))
    return found


def kernels_of(mutation: Mutation, backend: str) -> tuple[str, ...]:
    """The kernels that a change can reach."""
    return kernels_by_file(backend)[Path(mutation.file).name]


def mutations_of(backend: str, root: Path = ROOT, *, emulated: bool = False) -> list[Mutation]:
    """Every change that the operators offer for a backend's kernels; `emulated`: that runs without a GPU. A file of
    EMULATED_ONLY kernels has none for a GPU."""
    found: list[Mutation] = []
    for path in sorted(device_code(backend, root).iterdir()):
        kernels = set(kernels_by_file(backend, root).get(path.name, ()))
        if not (kernels & set(EMULATED) if emulated else kernels - set(EMULATED_ONLY)):
            continue
        if emulated and path.name in DEVICE_CODE_AFTER:
            continue
        never_called = (*GPU_ONLY, *GLUON.findall(path.read_text())) if emulated else ()
        for number, line in code_lines(path, never_called):
            found += _changes(str(path.relative_to(root)), number, line)
    return found


def _changes(file: str, number: int, line: str) -> Iterator[Mutation]:
    for name, pattern, new in OPERATORS:
        for match in re.finditer(pattern, line):
            text = match.expand(new)
            if text == "max_of":
                text = match.group(0).replace("min", "max")
            after = line[: match.start()] + text + line[match.end() :]
            if after != line:
                yield Mutation(file, number, name, line, after)


def plant(mutation: Mutation, folder: Path, root: Path) -> None:
    """A copy of one backend with the change in it, as `folder/<backend>`."""
    backend = Path(mutation.file).parts[1]
    shutil.copytree(root / "backends" / backend, folder / backend)
    target = folder / Path(*Path(mutation.file).parts[1:])
    lines = target.read_text().splitlines()
    lines[mutation.line - 1] = mutation.after
    target.write_text("\n".join(lines) + "\n")
