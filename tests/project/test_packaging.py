"""The wheel holds what the checkout holds, and works outside of it."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.python_process import run_python

ROOT = Path(__file__).parents[2]
FOLDERS = {"multigemm": "multigemm", "backends": "multigemm.backends", "reference": "multigemm.reference"}


def packages_on_disk() -> set[str]:
    found = set()
    for folder, name in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            if folder != "multigemm" or not parts or parts[0] not in ("backends", "reference"):
                found.add(".".join([name, *parts]))
    return found


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == packages_on_disk()
    assert len(listed) == len(set(listed))


def recipe() -> dict[str, list[str]]:
    """The lists of the conda recipe, by their keys; jinja's lines and single values are left out."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "recipe" / "meta.yaml").read_text().splitlines():
        if key := re.fullmatch(r" +(\w+):", line):
            found[key[1]] = []
        elif item := re.fullmatch(r" +- (.+)", line):
            found[list(found)[-1]].append(item[1])
    return found


CONDA_NAMES = {"torch": "pytorch", "cupy-cuda13x": "cupy", "cupy-cuda12x": "cupy", "matplotlib": "matplotlib-base"}
WITHIN_CONDA = {"nvidia-cuda-nvrtc", "nvidia-nvvm", "nvidia-nvjitlink"}
"""Come with cupy and numba-cuda there."""


def test_the_conda_recipe_agrees_with_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text, lists = (ROOT / "recipe" / "meta.yaml").read_text(), recipe()
    assert f'{{% set version = "{project["project"]["version"]}" %}}' in text
    python = f"python {project['project']['requires-python']}"
    needed = [re.sub(r"(>=)", r" \1", x) for x in project["project"]["dependencies"]]
    renamed = [" ".join([CONDA_NAMES.get(x.split()[0], x.split()[0]), *x.split()[1:]]) for x in needed]
    assert lists["run"] == [python, *renamed]
    assert lists["host"][0] == python
    assert lists["host"][2] == project["build-system"]["requires"][0].replace(">=", " >=")
    scripts = [f"{name} = {where}" for name, where in project["project"]["scripts"].items()]
    assert lists["entry_points"] == scripts
    least: dict[str, set[str]] = {}
    for name, extra in project["project"]["optional-dependencies"].items():
        for requirement in extra if name not in ("all", "dev", "docs") else ():
            package, _, version = requirement.partition(">=")
            if package not in WITHIN_CONDA:
                least.setdefault(CONDA_NAMES.get(package, package), set()).add(version)
    constrained = dict(x.split(" >=") for x in lists["run_constrained"])
    assert constrained.keys() == least.keys()
    assert all(version in least[name] for name, version in constrained.items())
    assert project["project"]["urls"]["Homepage"] in text


def check_archives(sdist: Path, wheel: Path) -> None:
    """The sdist holds what the repository holds, the wheel all of the packages; its links work on PyPI."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    assert sorted(tracked - inside) == []
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in shipped if name.endswith("/METADATA"))
    for folder in FOLDERS:
        files = [x for x in (ROOT / folder).rglob("*") if x.is_file() and "__pycache__" not in x.parts]
        under = "" if folder == "multigemm" else "multigemm/"
        names = {f"{under}{x.relative_to(ROOT)}" for x in files if not x.is_relative_to(ROOT / "multigemm/backends")}
        assert sorted(names - shipped) == []
    message = email.message_from_string(metadata)
    links = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", str(message.get_payload()))
    assert len(links) > 20
    assert [x or y for x, y in links if not (x or y).startswith(("https://", "#"))] == []
    assert {x.partition(", ")[0] for x in message.get_all("Project-URL", [])} >= {"Homepage", "Documentation", "Issues"}


def test_the_links_are_relative_and_lead_home() -> None:
    for name in ("backends", "reference"):
        link = ROOT / "multigemm" / name
        assert os.readlink(link) == f"../{name}"


USER_SCRIPT = """\
import multigemm as mg
import torch

def run(a: torch.Tensor, b: torch.Tensor, c: object) -> None:
    reveal_type(mg.plan(a, b, backend="cpu"))
    reveal_type(mg.explain(a, b, activation="relu").chosen)
    reveal_type(mg.grouped_gemm(a, b, activation="relu"))
    reveal_type(mg.grouped_gemm([a], [b]))
    reveal_type(mg.grouped_gemm(c, c))
    mg.grouped_gemm(a, b, activaton="relu")
    mg.plan(a, b, activaton="relu")
    mg.GroupedGemmProblem(a, b, activaton="relu")
"""
REVEALED = ("multigemm.planning.plan.Plan", "str | None", "torch._tensor.Tensor", "list[torch._tensor.Tensor]", "Any")


def test_the_extra_all_takes_what_was_tested_and_nothing_newer() -> None:
    requirements = pytest.importorskip("packaging.requirements")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bounds = {(r := requirements.Requirement(text)).name: r.specifier for text in extras["all"]}
    tested = {"torch": ("2.11.0", "2.13.0"), "triton": ("3.6.0", "3.9.0")}
    pins = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name, version in pins:
        assert name not in bounds or bounds[name].contains(version), f"CI tests {name} {version}"
    for name, versions in tested.items():
        assert all(map(bounds[name].contains, versions))
    assert not bounds["torch"].contains("2.15.0") and not bounds["triton"].contains("3.10.0")


def check_what_a_user_sees(wheel: Path, folder: Path, known: Path) -> None:
    """The types that mypy reveals to a user who installed a wheel, and the misspelled keywords that it finds, beside a
    torch of its tensor alone: all of torch takes mypy ten seconds. `known` keeps what mypy has read."""
    pytest.importorskip("mypy")
    folder.mkdir()
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "torch").mkdir()
    (site / "torch" / "py.typed").touch()
    (site / "torch" / "__init__.pyi").write_text("from torch._tensor import Tensor as Tensor\n")
    (site / "torch" / "_tensor.pyi").write_text("class Tensor: ...\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (folder / "user.py").write_text(USER_SCRIPT)
    options = ["--strict", "--python-executable", str(folder / "venv/bin/python"), "--cache-dir", str(known)]
    outside = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "user.py"], cwd=folder, capture_output=True, text=True, env=outside
    )
    assert not done.stderr, done.stderr
    found = [line.split(":", 3) for line in done.stdout.splitlines() if line.startswith("user.py:")]
    revealed = [text for _, _, _, text in found if "Revealed type" in text]
    for want, text in zip(REVEALED, revealed, strict=True):
        assert f'"{want}"' in text, revealed
    wrong = sorted({int(number) for _, number, kind, _ in found if kind.strip() == "error"})
    assert wrong == [10, 11, 12], "a misspelled keyword is an error, and nothing else is"


def editable_wheel(folder: Path) -> Path:
    """An import hook, which setuptools takes by default, is followed by no type checker."""
    code = f"import setuptools.build_meta as build; build.build_editable({str(folder)!r})"
    run_python("-c", code)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_wheel_sdist_and_editable_install_work_and_show_their_types(tmp_path: Path) -> None:
    run_python("-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    check_archives(sdist, wheel)
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    data = [p.relative_to(ROOT) for p in (ROOT / "backends").rglob("*.cu*")]
    data += [p.relative_to(ROOT / "multigemm") for p in (ROOT / "multigemm" / "cuda").glob("*.cu*")]
    data += [p.relative_to(ROOT / "multigemm") for p in (ROOT / "multigemm" / "planning").glob("*.cu*")]
    assert len(data) > 20 and all((site / "multigemm" / name).exists() for name in data)
    assert (site / "multigemm" / "py.typed").exists()
    code = (
        "import multigemm, torch; from multigemm.backends.registry import names;"
        f"assert multigemm.__file__.startswith({str(site)!r});"
        "p = multigemm.GroupedGemmProblem(torch.ones(4, 3), torch.ones(2, 3, 5), offsets=[0, 1, 4]);"
        "assert multigemm.verify(p, multigemm.solve(p)).ok; print(len(multigemm.list_backends()))"
    )
    assert run_python("-c", code, cwd=tmp_path, environment={"PYTHONPATH": str(site)}).stdout.strip() == "6"
    check_what_a_user_sees(wheel, tmp_path / "user", tmp_path / "known")
    (tmp_path / "editable").mkdir()
    check_what_a_user_sees(editable_wheel(tmp_path / "editable"), tmp_path / "developer", tmp_path / "known")
