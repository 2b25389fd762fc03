"""The command line: `multigemm` and `python -m multigemm`.

Only the asked command's module is imported, so that `--help` answers at once. What a user did wrong
is one line on standard error and exit code 2, never a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from multigemm import __version__, interrupts
from multigemm.errors import MultigemmError

COMMANDS = {
    "info": ("show backends, versions and devices, and how to install what is missing", "commands.info"),
    "explain": (
        "show which backend solves a problem and why, and why others cannot",
        "commands.explain",
    ),
    "demo": ("run one jagged problem on every available backend, check and time it", "commands.demo"),
    "verify": ("run a problem of your own on every available backend, and check each result", "commands.verify"),
    "fuzz": ("cross-check backends against the reference on generated problems", "fuzz.cli"),
    "bench": ("compare backends and peers on named workloads", "bench.cli"),
    "tune": ("measure configs for a workload and keep the best", "bench.tune"),
    "cache": ("show, clear, export or import what is cached on disk", "commands.cache"),
}


FORMER_OPTIONS = {"--backend": "--backends", "--dtype": "--dtypes", "--time-budget": "--seconds"}
"""Former spellings, which every command still takes."""
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line without the usage text, and accepts option names in full only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _overview() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:8} {text}" for name, (text, _) in COMMANDS.items())
    parser = Parser(
        prog="multigemm",
        usage="multigemm COMMAND [options]",
        description="Grouped GEMM on CUDA: one problem, interchangeable backends, one verified answer.",
        epilog=f"commands:\n{lines}\n\n`multigemm COMMAND --help` tells the options of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"multigemm {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    overview = _overview()
    if not words or words[0].startswith("-"):
        overview.parse_args(words or ["--help"])
        return 0
    name, *rest = words
    if name not in COMMANDS:
        overview.error(f"unknown command {name!r}: use one of {', '.join(COMMANDS)}")
    try:
        return _run(name, [_as_spelled_now(word) for word in rest])
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except (MultigemmError, OSError) as error:  # OSError: a file that the user named, or the folder of the cache
        print(f"multigemm {name}: {str(error).replace(chr(10), ';')}", file=sys.stderr)
        return 2


def _run(name: str, words: list[str]) -> int:
    """Runs one command. After Ctrl-C it calls `interrupted(args)` of the command's module, if there is one, to report
    what was kept."""
    text, where = COMMANDS[name]
    module: Any = None
    args: Any = None
    try:
        with interrupts.held():  # an import that is cut short fails in many ways
            module = importlib.import_module(f"multigemm.{where}")
            parser = Parser(prog=f"multigemm {name}", description=text)
            module.add_arguments(parser)
            args = parser.parse_args(words)
            args.words = words  # for commands that start themselves again in child processes
        code: int = module.main(args)
    except KeyboardInterrupt:
        if not hasattr(module, "interrupted"):
            raise
        with interrupts.held():
            module.interrupted(args)
        return INTERRUPTED
    return code


def _as_spelled_now(word: str) -> str:
    option, joined, value = word.partition("=")
    return FORMER_OPTIONS.get(option, option) + joined + value


if __name__ == "__main__":
    sys.exit(main())
