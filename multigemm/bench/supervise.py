"""Runs work in a child process and survives its hangs and crashes.

A kernel may hang, crash its process or destroy its CUDA context. A benchmark of many kernels must report that as one
row and go on. So on a GPU the work runs in a child process, which writes the next step into a small file before doing
it. If the child dies, or writes nothing for too long, the parent kills it, puts the culprit into the report, and starts
a child that continues after it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from multigemm import interrupts
from multigemm.bench import reports
from multigemm.errors import MultigemmError

CONTEXT_LOST = 75
RAISED = 76
FINAL_CODES = (0, 1, 2, 130)
RESTARTS = 40
PROGRAM = (sys.executable, "-m", "multigemm")
POLL_S = 0.2
NEWS_S = 1.0
START_S = 60.0
"""What importing and finding the devices may take on a busy machine, before the first word."""
FAREWELL_S = 10.0
"""What a child that was interrupted may take to write what it has."""


class Marker:
    """The file in which the child writes its current step. Without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._last: tuple[float, str] = (0.0, "")

    def say(self, stage: str, **what: Any) -> None:
        """Writes the stage; the same stage again at most once a second."""
        if self.path is None:
            return
        text = json.dumps({"stage": stage, **what})
        now = time.monotonic()
        if text == self._last[1] and now - self._last[0] < NEWS_S:
            return
        self._last = (now, text)
        interrupts.write_whole(self.path, text)


def read(path: Path) -> dict[str, Any]:
    """The last step that was written; empty if there is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def supervise(
    words: Sequence[str],
    marker: Path,
    report: Path,
    stall_s: float,
    total_s: float = float("inf"),
    program: Sequence[str] = PROGRAM,
) -> int:
    """Runs `multigemm WORDS --marker MARKER` to its end, restarting it with --resume; its exit code.

    Args:
        words: the command and its options.
        marker: the file in which the child says what it does.
        report: the file that the child writes; whoever ended the child gets a row there.
        stall_s: seconds without news after which the child hangs.
        total_s: seconds for all children together.
        program: what runs `multigemm`.
    """
    started = time.monotonic()
    marker.parent.mkdir(parents=True, exist_ok=True)
    command = [*program, *words, "--marker", str(marker)]
    for attempt in range(RESTARTS):
        left = total_s - (time.monotonic() - started)
        more = [*(["--resume"] if attempt else []), *(["--seconds", f"{left:.1f}"] if total_s < 1e9 else [])]
        marker.unlink(missing_ok=True)
        try:
            reason = _run([*command, *more], marker, stall_s)
            said = read(marker)
        finally:
            marker.unlink(missing_ok=True)
        if isinstance(reason, int) and reason in FINAL_CODES:
            return reason
        if reason != CONTEXT_LOST and not _blame(said, _words(reason), report):
            return 1
        print(f"going on in a fresh process after: {_words(reason)}", file=sys.stderr, flush=True)
    return 1


def _blame(said: dict[str, Any], reason: str, path: Path) -> bool:
    """Adds the child's current step to its report as failures. False if there is no step."""
    rows = [reports.row(raw) for raw in said.get("rows", ())]
    if not path.exists() or not rows:
        print(f"the benchmark ended at {said.get('stage', 'its start')}: {reason}", file=sys.stderr)
        return False
    report = reports.read(path)
    for row in rows:
        row.status, row.us, row.reason = "failed", None, f"{reason} ({said['stage']})"
        row.notes += [reports.KILLED] if len(rows) == 1 else []
    report.rows += rows
    reports.write(path, report)
    return True


def as_child(work: Callable[[], int], marker: Path | None) -> int:
    """Runs the work. In a supervised child an unexpected exception ends with an exit code of its own."""
    if marker is None:
        return work()
    try:
        return work()
    except MultigemmError:
        raise
    except Exception:
        traceback.print_exc()
        return RAISED


def _words(reason: int | str) -> str:
    if isinstance(reason, str):
        return reason
    if reason == CONTEXT_LOST:
        return "a CUDA error that no later call survives"
    if reason == RAISED:
        return "an exception that was not foreseen"
    if reason < 0:
        return f"the process died of {signal.Signals(-reason).name}"
    return f"the process ended with code {reason}"


def _run(command: list[str], marker: Path, stall_s: float) -> int | str:
    """Runs one child. Returns its exit code, or why it was killed."""
    with interrupts.left_to_this_process():
        child = subprocess.Popen(command)
    heard = time.monotonic()
    last = 0
    try:
        while child.poll() is None:
            time.sleep(POLL_S)
            try:
                stamp = marker.stat().st_mtime_ns
            except FileNotFoundError:
                stamp = 0
            if stamp != last:
                last, heard = stamp, time.monotonic()
            patience = stall_s if last else max(stall_s, START_S)
            if time.monotonic() - heard > patience:
                child.kill()
                child.wait()
                return f"no answer within {patience:g} s"
    except BaseException:
        end(child)
        raise
    return child.returncode


def end(child: subprocess.Popen[bytes]) -> None:
    """Asks a child to write its results and exit; kills it if it does not answer."""
    with interrupts.held():
        child.terminate()
        try:
            child.wait(FAREWELL_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
