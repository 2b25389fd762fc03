"""A process that has imported torch once and forks for each program that a test runs in a Python of its own.

It reads a JSON list from each line of its input, forks a child for each of the list's objects, and prints their exit
codes. A child is as `python WORDS` would be, with nothing imported but torch; it ends by an alarm at the latest, and
nobody tidies up what it imported.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import signal
import sys
import threading
import traceback
import types
from typing import Any

import torch  # noqa: F401  (what takes long to import)

OWN_PATH = 2
"""Entries of sys.path before those of the installation: this script's folder, and the one of PYTHONPATH."""


def become(asked: dict[str, Any]) -> None:
    """Takes a program's environment, folder, files and time limit."""
    signal.alarm(asked["limit_s"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    multiprocessing.process.ORIGINAL_DIR = asked["cwd"]  # type: ignore[attr-defined]
    written = os.O_WRONLY | os.O_CREAT
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, "out", written), (2, "err", written)):
        opened = os.open(os.path.join(asked["folder"], name), flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.path[:OWN_PATH] = ["", *asked["environment"]["PYTHONPATH"].split(os.pathsep)]
    importlib.invalidate_caches()


def run(words: list[str]) -> None:
    """What `python WORDS` does."""
    first, *rest = words
    if first == "-c":
        code, *arguments = rest
        sys.argv = [first, *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    elif first == "-m":
        name, *arguments = rest
        sys.argv, sys.path[0] = [name, *arguments], os.getcwd()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


def code_of(words: list[str]) -> int:
    """Runs a program to its end; its exit code."""
    try:
        run(words)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def finish(code: int) -> None:
    """Ends this process after its threads and its functions that are to run at the end."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    gc.freeze()
    for line in sys.stdin:
        children = []
        for asked in json.loads(line):
            children.append(os.fork())
            if not children[-1]:
                become(asked)
                finish(code_of(asked["words"]))
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
