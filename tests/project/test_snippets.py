"""Every program that a page shows runs, or names only what exists; every command line that it shows can be given."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from multigemm.__main__ import COMMANDS, Parser
from tests.project.snippets import (
    MARKS,
    PRINTED,
    ROOT,
    SHELL,
    NameCheck,
    Snippet,
    compiled,
    logical_lines,
    on_cpu,
    snippets,
)

HAS_ITS_OWN_TEST = {"found-in-others.md"}
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
)
WITH_PYTHON = [page for page in PAGES if snippets(page, "python") and page.name not in HAS_ITS_OWN_TEST]
COMMAND_LINES = [(s, line) for page in PAGES for s in snippets(page, *SHELL) for line in logical_lines(s.code)]
NEEDS = {"transformers": "transformers", "jax": "jax", "cupy": "cupy"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(page: Path) -> tuple[int, int]:
    """Runs a page's snippets in one namespace; returns how many were run and how many were only checked."""
    names: dict[str, Any] = {"__name__": "__main__"}
    ran = checked = 0
    for snippet in snippets(page, "python"):
        if snippet.mark:
            assert snippet.mark in MARKS, f"{snippet.place}: unknown mark {snippet.mark}"
            compiled(snippet, snippet.code)
            assert NameCheck(names).check(snippet.code) == [], snippet.place
            checked += 1
            continue
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(compiled(snippet, on_cpu(snippet.code)), names)
        for text in PRINTED.findall(snippet.code):
            assert text in shown.getvalue(), f"{snippet.place}: {text!r} is not in {shown.getvalue()!r}"
        ran += 1
    return ran, checked


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_programs_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module, package in NEEDS.items():
        if re.search(rf"^(from|import) {module}\b", page.read_text(), re.MULTILINE):
            pytest.importorskip(module, reason=f"{package} is not installed")
    torch.manual_seed(0)
    with mock.patch.dict(os.environ):  # a page may set variables
        assert sum(run(page)) > 0


def test_a_wrong_name_or_keyword_in_a_program_that_is_not_run_is_found() -> None:
    code = (
        "import torch\nimport multigemm as mg\nfrom multigemm.nn import MoE, Gone\n"
        "plan = mg.plan(a, torch.ones(2), sizes=[2], fast=True)\nplan.kernel, plan.colonel, mg.solv\n"
        "MoE(8, 16, num_experts=2, topk=1)\ntorch.cuda.CUDAGraph(), torch.cuda.NoGraph()\n"
    )
    wrong = NameCheck({}).check(code)
    for text in ("cannot import name 'Gone'", "a is not defined", "keyword fast=", "plan.colonel", "mg.solv",
                 "keyword topk=", "torch.cuda.NoGraph"):  # fmt: skip
        assert any(text in each for each in wrong), (text, wrong)
    assert not any("plan.kernel" in each or "CUDAGraph" in each for each in wrong), wrong


def test_a_program_that_prints_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)  # -> 3\n```\n")
    monkeypatch.setattr(Snippet, "place", property(lambda self: "page.md"))
    with pytest.raises(AssertionError, match="'3' is not in"):
        run(page)


def parser_of(name: str) -> Parser:
    parser = Parser(prog=name)
    importlib.import_module(f"multigemm.{COMMANDS[name][1]}").add_arguments(parser)
    return parser


def parse(line: str) -> None:
    """Give a command line of multigemm to the parser of its command, which raises SystemExit if it is wrong."""
    name, *rest = shlex.split(line)[1:]
    if name in ("--version", "--help"):
        return
    assert name in COMMANDS, f"there is no command {name}"
    parser_of(name).parse_args(rest)


def check_command(line: str) -> None:
    """A command line names a command, options, targets, files and extras that exist."""
    line = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line).removeprefix(".venv/bin/")
    words = shlex.split(line)
    if words[0] == "multigemm":
        parse(line)
    elif words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), line
    elif words[:2] == ["pip", "install"]:
        for extras in re.findall(r"(?:multigemm|\.)\[([\w,]+)\]", line):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), line
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None, line
        if words[2] == "multigemm":
            parse(" ".join(words[2:]))
    elif words[0] in ("python", "torchrun"):
        scripts = [word for word in words[1:] if word.startswith(("examples/", "benchmarks/"))]
        assert all((ROOT / script).exists() for script in scripts), line
        if "multigemm" in words:
            parse(shlex.join(words[words.index("multigemm") :]))


@pytest.mark.parametrize(
    ("snippet", "line"), COMMAND_LINES, ids=[f"{s.place} {line[:40]}" for s, line in COMMAND_LINES]
)
def test_a_command_line_of_a_page_can_be_given(snippet: Snippet, line: str) -> None:
    check_command(line)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    parsers = [parser_of(name)]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += {id(found): found for found in action.choices.values()}.values()
            elif action.choices is None or action.option_strings:
                assert action.help, f"{parser.prog} {'/'.join(action.option_strings) or action.dest}"


INLINE = [
    (page, text) for page in PAGES for text in re.findall(r"`(multigemm [a-z]+[^`\n]* --[^`\n]*)`", page.read_text())
]


@pytest.mark.parametrize(("page", "text"), INLINE, ids=[f"{page.name} {text[:40]}" for page, text in INLINE])
def test_an_option_that_a_sentence_names_exists(page: Path, text: str) -> None:
    """In a sentence a command may be cut short or hold placeholders, so its options alone are looked up."""
    parser = parser_of(text.split()[1])
    helped = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helped += [found for word, found in action.choices.items() if word in text.split()]
    known = "".join(each.format_help() for each in helped)
    assert [option for option in re.findall(r"--[a-z][a-z-]*", text) if option not in known] == []


@pytest.mark.parametrize(
    "line",
    ["multigemm bench --sweet moe", "multigemm dance", "make coffee", "pip install 'multigemm[gone]'",
     "python -m multigemm.gone", "python examples/gone.py", "MULTIGEMM_MEASURE=0 multigemm tune --shape"],
)  # fmt: skip
def test_a_command_line_that_is_wrong_is_found(line: str) -> None:
    with pytest.raises((SystemExit, AssertionError, ModuleNotFoundError)):
        check_command(line)
