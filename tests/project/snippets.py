"""The programs and command lines that pages show, taken out of Markdown, so that tests can run or check them.

The rules, for whoever writes a page:

- The Python fences of one page run from top to bottom in one namespace, on the CPU: `"cuda"` is replaced by `"cpu"`,
  and a GPU backend's name behind `backend=` by `"cpu"`. Nothing else is changed.
- What a comment `# -> TEXT` behind a `print(...)` says must be part of what the snippet prints.
- `<!-- snippet: gpu -->` or `<!-- snippet: processes -->` on the line above a fence says that it needs a GPU or several
  processes. It is compiled, its imports run, and every name, attribute and keyword in it must exist.
- Lines of shell fences that begin with `multigemm`, `make`, `pip install` or `python` are checked against the
  command line's parsers, the Makefile, the extras and the files.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?:[ ]*<!-- snippet: (?P<mark>\w+) -->\n)?"
    r"(?P<indent>[ ]*)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
MARKS = ("gpu", "processes")
SHELL = ("sh", "bash", "console")
ON_CPU = (
    (re.compile(r'"cuda(:\d)?"'), '"cpu"'),
    (re.compile(r'backend="(cupy|triton|numba|cublas)"'), 'backend="cpu"'),
)
PRINTED = re.compile(r"^\s*print\(.*\) +# -> (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """One fence of a page: the line that it begins in, its mark ("" for none), language and text."""

    page: Path
    line: int
    mark: str
    language: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets(page: Path, *languages: str) -> list[Snippet]:
    """The fences of a page in some languages, in their order."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        if match["language"] in languages:
            line = text.count("\n", 0, match.start("code")) + 1
            code = textwrap.dedent(match["code"])
            found.append(Snippet(page, line, match["mark"] or "", match["language"], code))
    return found


def on_cpu(code: str) -> str:
    """The code with its operands and backends on the CPU."""
    for elsewhere, here in ON_CPU:
        code = elsewhere.sub(here, code)
    return code


def compiled(snippet: Snippet, code: str) -> types.CodeType:
    """Code whose traceback names the page and its line."""
    return compile("\n" * (snippet.line - 1) + code, snippet.place, "exec")


def logical_lines(code: str) -> Iterator[str]:
    """Lines of a shell fence without comments, those that end in a backslash joined to the next."""
    for line in code.replace("\\\n", " ").splitlines():
        command = line.partition("  #")[0].strip().removeprefix("$ ")
        if command and not command.startswith("#"):
            yield command


class _Unknown:
    """A value that only running the snippet would show."""


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class _Instance:
    """A value of which only the class is known."""

    of: type


def keywords_of(function: Any) -> set[str] | None:
    """The keywords that a function takes by its signature or its overloads; None where they cannot be told."""
    names: set[str] = set()
    for form in typing.get_overloads(function) or [function]:
        try:
            taken = inspect.signature(form).parameters.values()
            hints = typing.get_type_hints(form)
        except (TypeError, ValueError, NameError):  # some functions of C libraries have no signature
            return None
        for parameter in taken:
            hint = hints.get(parameter.name)
            if parameter.kind is not parameter.VAR_KEYWORD:
                names.add(parameter.name)
            elif typing.get_origin(hint) is typing.Unpack:
                names |= set(typing.get_args(hint)[0].__annotations__)
            elif hint is not typing.Never:
                return None
    return names


class NameCheck(ast.NodeVisitor):
    """Collects what a snippet names and what does not exist, without running more of it than its imports."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names: dict[str, Any] = dict(names)
        self.wrong: list[str] = []

    def check(self, code: str) -> list[str]:
        tree = ast.parse(code)
        for node in ast.walk(tree):  # functions may use what is assigned further down
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.names.setdefault(node.name, UNKNOWN)
            elif isinstance(node, ast.arg):
                self.names.setdefault(node.arg, UNKNOWN)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.names.setdefault(node.id, UNKNOWN)
        self.visit(tree)
        return self.wrong

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        try:
            exec(compile(ast.Module([node], []), "import", "exec"), self.names)
        except ImportError as error:
            self.wrong.append(str(error))

    visit_Import = visit_ImportFrom = _import

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.names[target.id] = self.value_of(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id not in self.names and not hasattr(builtins, node.id):
            self.wrong.append(f"{node.id} is not defined")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        owner = self.value_of(node.value)
        if owner is not UNKNOWN and self.attribute(owner, node.attr) is None:
            self.wrong.append(f"{ast.unparse(node)} does not exist")

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = self.value_of(node.func)
        if function is UNKNOWN or isinstance(function, _Instance):
            return
        taken = keywords_of(function)
        for keyword in node.keywords:
            if taken is not None and keyword.arg and keyword.arg not in taken:
                self.wrong.append(f"{ast.unparse(node.func)} takes no keyword {keyword.arg}=")

    def value_of(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, getattr(builtins, node.id, UNKNOWN))
        if isinstance(node, ast.Attribute):
            owner = self.value_of(node.value)
            found = UNKNOWN if owner is UNKNOWN else self.attribute(owner, node.attr)
            return UNKNOWN if found is None else found
        if isinstance(node, ast.Call):
            return self.result_of(self.value_of(node.func))
        return UNKNOWN

    @staticmethod
    def attribute(owner: Any, name: str) -> Any:
        """An attribute, UNKNOWN where only the class is known, or None where there is none."""
        if not isinstance(owner, _Instance):
            return getattr(owner, name, None)
        found = getattr(owner.of, name, None)
        if found is None and name in {n for c in owner.of.__mro__ for n in getattr(c, "__annotations__", ())}:
            return UNKNOWN
        return UNKNOWN if found is not None and not inspect.isfunction(found) else found

    @staticmethod
    def result_of(function: Any) -> Any:
        if isinstance(function, type):
            return UNKNOWN if hasattr(function, "__getattr__") else _Instance(function)
        try:
            returned = typing.get_type_hints(function).get("return") if callable(function) else None
        except (NameError, TypeError):
            return UNKNOWN
        return _Instance(returned) if isinstance(returned, type) and returned is not Any else UNKNOWN
