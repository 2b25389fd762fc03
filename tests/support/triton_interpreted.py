"""What tests of kernels in Triton's interpreter share: a problem solved and judged, and kernels with a fault."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

import multigemm as mg


@cache
def quicken() -> None:
    """Makes the interpreter give the same in less time: it prepares triton.language anew for each call of a device
    function, builds a table of all types for each value that it makes, and takes element by element what a sort reduces
    by exclusive or."""
    os.environ["TRITON_INTERPRET"] = "1"
    _prepare_language_once()
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    type_of, reduced, known = interpreter._get_np_dtype, interpreter.ReduceOps.apply_impl, dict[str, Any]()

    def known_type_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = type_of(kind)
        return known[name]

    def apply_impl(self: Any, given: Any) -> Any:
        if self.combine_fn is not language.standard._xor_combine:
            return reduced(self, given)
        (x,) = given
        return self.to_tensor(np.bitwise_xor.reduce(x.handle.data, self.axis, keepdims=self.keep_dims), x.dtype)

    interpreter._get_np_dtype, interpreter.ReduceOps.apply_impl = known_type_of, apply_impl


def _prepare_language_once() -> None:
    """Lets device functions find triton.language as the kernel that calls them left it: preparing it again changes
    nothing and takes two fifths of the time."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    nothing_changed, prepare = getattr(interpreter, "_LangPatchScope", None), getattr(interpreter, "_patch_lang", None)
    if nothing_changed is None or prepare is None or signature(nothing_changed).parameters:  # another version of Triton
        return
    modules = (language, language.core)

    @cache
    def modules_of(function: Any) -> list[Any]:
        return [module for module in modules if any(value is module for value in function.__globals__.values())]

    def prepared(function: Any) -> Any:
        raw = any(language.core.is_builtin(module.load) for module in modules_of(function))
        return prepare(function) if raw else nothing_changed()

    interpreter._patch_lang = prepared


def solved(*operands: Any, config: Any = None, **options: Any) -> Any:
    """The result of a problem, which is right."""
    problem = mg.GroupedGemmProblem(*operands, **options)
    out = mg.solve(problem, "triton", config)
    verdict = mg.verify(problem, out)
    assert verdict, verdict.text
    return out


def module_with(source: Path, text: str, instead: str, folder: Path) -> Any:
    """The module of a file with another text in one place, from a file of its own: the interpreter reads sources."""
    whole = source.read_text()
    assert text in whole, "the kernel no longer says so"
    path = folder / "faulty.py"
    path.write_text(whole.replace(text, instead))
    os.environ["TRITON_INTERPRET"] = "1"  # as the backend does when it emulates for the first time
    spec = importlib.util.spec_from_file_location("faulty", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
