"""The API reference: what it lists exists and says what it takes and returns, its examples run, it is complete."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm import errors, nn, testing
from multigemm.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"
LISTED = sorted(
    {path for page in API.glob("*.md") for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)}
)
STARTS_THE_LIBRARY = {"multigemm.benchmark"}
"""An example that times for seconds."""


def found(path: str) -> Any:
    """The object of a dotted path."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            value = getattr(value, name)
        return value
    raise AssertionError(f"{path} does not exist")


FUNCTIONS = [path for path in LISTED if inspect.isfunction(found(path))]


@pytest.mark.parametrize("path", FUNCTIONS)
def test_a_function_says_what_it_takes_and_returns(path: str) -> None:
    function = found(path)
    text, signature = inspect.getdoc(function) or "", inspect.signature(function)
    wanted = ["Example"] + ["Args"] * bool(signature.parameters)
    wanted += ["Returns"] * (signature.return_annotation not in (None, "None"))
    returned = re.search(r"^Returns:\n(.*)", text, re.MULTILINE)
    assert not returned or ":" not in returned[1], "what stands before a colon would show as the result's type"
    assert [name for name in wanted if not re.search(rf"^{name}:$", text, re.MULTILINE)] == []


@pytest.mark.parametrize("path", [path for path in LISTED if path not in STARTS_THE_LIBRARY])
def test_the_examples_run(path: str) -> None:
    value = found(path)
    if inspect.ismodule(value):
        return
    torch.manual_seed(0)
    home = importlib.import_module(value.__module__)
    for test in doctest.DocTestFinder(recurse=False).find(value, path, home, globs=dict(vars(home))):
        said: list[str] = []
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
        assert said == []


def test_every_public_name_is_in_the_reference() -> None:
    listed = {path.rpartition(".")[2] for path in LISTED}
    listed |= {name for name in vars(errors) if inspect.isclass(vars(errors)[name])} | {"quantize", "__version__"}
    assert sorted(set(mg.__all__) - listed) == []
    assert sorted({*nn.__all__, *testing.__all__} - listed - {"EMULATED", "Stand", "World"}) == [], (
        "limits, and two names of 0.1"
    )


def test_every_error_is_on_its_page() -> None:
    (shown,) = re.findall(r"members: \[(.*?)\]", (API / "errors.md").read_text())
    raised = [n for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, errors.MultigemmError)]
    assert shown.split(", ") == raised


def test_every_setting_is_on_its_page_in_its_words() -> None:
    page = (API / "settings.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", page, re.MULTILINE))
    assert rows == {PREFIX + f.name.upper(): f.metadata["doc"] for f in fields(Settings)}
