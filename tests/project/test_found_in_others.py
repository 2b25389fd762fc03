"""The programs of docs/notes/found-in-others.md show what it says; one whose component has changed is skipped."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.support.python_process import run_python

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "notes" / "found-in-others.md"
COMPONENT = re.compile(r"\b(torch|triton|numpy|numba-cuda) (\d+(?:\.\d+)+)")
CPU, GPU = "# runs on a CPU\n", "# needs a GPU\n"


@dataclass(frozen=True)
class Section:
    """One fault: its program, what that prints, and the versions it was seen with."""

    title: str
    program: str
    printed: str
    versions: dict[str, str]


def sections() -> list[Section]:
    found = []
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        program = re.search(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
        printed = re.search(r"^```text\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
        if program:
            told = body.partition("**Versions:**")[2].partition("\n\n")[0]
            found.append(Section(title, program[1], printed[1] if printed else "", dict(COMPONENT.findall(told))))
    return found


SECTIONS = sections()
ON_CPU = [s for s in SECTIONS if s.program.startswith(CPU)]
ON_GPU = [s for s in SECTIONS if s.program.startswith(GPU)]


def installed(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return ""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"  # Triton reads its kernels' source
    path.write_text(program)
    return run_python(path, cwd=folder, code=None)


def test_each_section_is_complete_and_names_files_that_exist() -> None:
    assert len(ON_CPU) >= 10 and len(ON_GPU) >= 7 and len(ON_CPU) + len(ON_GPU) == len(SECTIONS)
    for section in SECTIONS:
        ast.parse(section.program)
        assert bool(section.printed) == (section in ON_CPU), section.title
    assert all(section.versions for section in ON_CPU)
    text = PAGE.read_text()
    assert text.count("**Versions:**") == text.count("**Instead:**") == len(SECTIONS)
    named = set(re.findall(r"`((?:backends|multigemm|reference|tests)/[\w/.]+\.\w+)`", text))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.slow
@pytest.mark.parametrize("section", ON_CPU, ids=lambda s: s.title)
def test_a_fault_shows_or_was_mended_since(section: Section, tmp_path: Path) -> None:
    here = {name: installed(name) for name in section.versions}
    if missing := [name for name, found in here.items() if not found]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    done = run(section.program, tmp_path)
    if done.stdout == section.printed and done.returncode == 0:
        return
    if here != section.versions:
        pytest.skip(f"seen with {section.versions}; with {here} it prints {done.stdout!r}")
    raise AssertionError(f"printed {done.stdout!r}, not {section.printed!r}\n{done.stderr[-2000:]}")


@pytest.mark.gpu
@pytest.mark.parametrize("section", ON_GPU, ids=lambda s: s.title)
def test_a_fault_of_a_gpu_shows_or_was_mended_since(section: Section, tmp_path: Path) -> None:
    """A process each: some end its CUDA context."""
    done = run(section.program, tmp_path)
    if "OutOfMemoryError" in done.stderr or "not enough memory" in done.stderr:
        pytest.skip("needs more free GPU memory")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() in ("as described", "not here"), done.stdout
    if done.stdout.strip() == "not here":
        pytest.skip("this GPU and these versions do not show it")
