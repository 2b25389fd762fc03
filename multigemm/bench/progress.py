"""What a person sees while the benchmark runs: a bar where rich and a terminal are, else one line per workload."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any

from multigemm.bench.workloads import Workload


class Progress:
    """`step` fits Runner.on_case. Everything goes to stderr, so that the table can be piped."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        self.total, self.quiet = total, quiet
        self.started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("bench", total=self.total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self.total)
            self._bar.stop()

    def step(self, index: int, total: int, case: Workload) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=index, description=case.key)
        elif not self.quiet:
            spent = time.monotonic() - self.started
            print(f"[{index + 1}/{total}] {spent:6.1f} s  {case.key}", file=sys.stderr, flush=True)
