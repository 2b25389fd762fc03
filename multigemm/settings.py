"""The MULTIGEMM_* environment variables: types, defaults, descriptions, validation. `multigemm info` prints them.

They are read once, at first use; `settings.cache_clear()` reads them again (for tests). An unknown MULTIGEMM_* variable
is an error that names the nearest known one, so that a misspelt name is never ignored.
"""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from multigemm.errors import InvalidSetting

PREFIX = "MULTIGEMM_"
SWITCHES = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def _default_cache_dir() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multigemm"
    except RuntimeError:  # a user without a home, as in some containers: nothing can be kept, and nothing is
        return Path(os.devnull) / "multigemm"


def _doc(text: str, default: Any) -> Any:
    if callable(default):
        return field(default_factory=default, metadata={"doc": text})
    return field(default=default, metadata={"doc": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One field per variable: its name in lower case without the prefix MULTIGEMM_."""

    backend: tuple[str, ...] = _doc(
        "backends among which backend='auto' chooses, in order of preference; empty: all available", ()
    )
    emulate: bool = _doc("let the triton and numba backends run on CPU tensors in their emulators", False)
    cache: bool = _doc("read and write the on-disk cache of tunings and compiled kernels", True)
    cache_dir: Path = _doc("the folder of that cache", _default_cache_dir)
    dump: Path | None = _doc("a folder that receives the PTX, SASS and source of each compiled kernel", None)
    print_config: bool = _doc(
        "print each choice of backend, kernel and config with its reason, and what auto measures", False
    )
    batch_invariant: bool = _doc(
        "default of the keyword batch_invariant: a row has the same bits whatever its neighbours", False
    )
    measure: bool = _doc(
        "let backend='auto' time the backends once for each class of problems that is in no table", True
    )
    bind_layers: bool = _doc("bind all launches of a MoE layer on a GPU together in calls without gradients", True)
    lineinfo: bool = _doc("keep source lines in compiled kernels, for profilers and sanitizers", False)


def _parse(name: str, kind: str, text: str) -> Any:
    if "bool" in kind:
        if text.lower() not in SWITCHES:
            raise InvalidSetting(f"{name}={text!r} is not a switch: use 1 or 0")
        return SWITCHES[text.lower()]
    if "tuple" in kind:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InvalidSetting(f"{name}={text!r} has no such home directory: write the path in full") from error


def parse(environ: Mapping[str, str]) -> Settings:
    """Reads settings from an environment. Raises InvalidSetting for an unknown name or a bad value."""
    known = {PREFIX + f.name.upper(): f for f in fields(Settings)}
    values = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            near = difflib.get_close_matches(name.removeprefix(PREFIX), [f.name.upper() for f in known.values()], n=1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else f"; known: {', '.join(known)}"
            raise InvalidSetting(f"unknown setting {name}{hint}")
        if text.strip():
            values[known[name].name] = _parse(name, str(known[name].type), text.strip())
    return Settings(**values)


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process."""
    return parse(os.environ)


def report(text: str) -> None:
    """Prints what was chosen or measured to stderr, if MULTIGEMM_PRINT_CONFIG asks for it."""
    if settings().print_config:
        print(f"multigemm: {text}", file=sys.stderr)


def dump(stem: str, source: str, ptx: str, cubin: bytes) -> None:
    """Writes a compiled kernel into the folder that MULTIGEMM_DUMP names, with its SASS where nvdisasm is there."""
    folder = settings().dump
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.txt").write_text(source)
    (folder / f"{stem}.ptx").write_text(ptx)
    (folder / f"{stem}.cubin").write_bytes(cubin)
    if disassembler := shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin"):
        with (folder / f"{stem}.sass").open("w") as sass:
            subprocess.run([disassembler, str(folder / f"{stem}.cubin")], stdout=sass, check=False)
