"""The processes of a run: a supervised child, one part on each of many devices, and compilation ahead.

A kernel may hang, crash its process or destroy its CUDA context. A benchmark of many kernels must report that as one
row and go on. So on a GPU the work runs in a child process, which writes the next step into a small file before doing
it. If the child dies, or writes nothing for too long, the parent kills it, puts the culprit into the report, and starts
a child that continues after it.

On many GPUs and hosts each device times every n-th workload alone, and one report holds all. Ceilings are measured on
each device (unless --floor names them), so that rows are fractions of what their own device reaches. What is timed at
the same moment on neighbouring GPUs shares the host: use --device for one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from multigemm import fleet, interrupts
from multigemm.bench import reports
from multigemm.bench.entries import Refused, backend_entry
from multigemm.bench.operands import make
from multigemm.bench.reports import Report
from multigemm.bench.workloads import Workload
from multigemm.errors import InvalidSetting, MultigemmError
from multigemm.select.timing import describe

# --- a supervised child --------------------------------------------------------------------------------

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


def read_marker(path: Path) -> dict[str, Any]:
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
        report: the file that the child writes; the entry that ended the child gets a row there.
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
            reason = _watch([*command, *more], marker, stall_s)
            said = read_marker(marker)
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


def _watch(command: list[str], marker: Path, stall_s: float) -> int | str:
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
        end_child(child)
        raise
    return child.returncode


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Asks a child to write its results and exit; kills it if it does not answer."""
    with interrupts.held():
        child.terminate()
        try:
            child.wait(FAREWELL_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


# --- one part on each device ----------------------------------------------------------------------------


def devices_of_run(args: argparse.Namespace, place: fleet.Place) -> tuple[str, ...]:
    """The devices over which a run is spread; empty for a run on one device, or for a part of a run."""
    if args.share or args.marker is not None:
        return ()
    devices = place.devices(args.device)
    return devices if len(devices) * place.ranks > 1 else ()


def part(text: str) -> slice:
    """Selects the workloads of `--share i/n`: every n-th from the i-th on."""
    try:
        first, step = (int(word) for word in text.split("/")) if text else (0, 1)
    except ValueError:
        first, step = -1, 0
    if not 0 <= first < step:
        raise InvalidSetting(f"--share {text!r}: write i/n with i from 0 to n-1, as in 0/2")
    return slice(first, None, step)


def run_on_devices(
    words: Sequence[str], command: str, out: Path, cases: Sequence[str], devices: Sequence[str], place: fleet.Place
) -> Report | None:
    """Starts a part on each device of this rank and waits for them.

    Returns:
        On rank 0 the whole report, which `out` holds as well; None where there is none, and on the other ranks.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once the parts have written what they measured and rank 0 the whole of it.
    """
    parts = len(devices) * place.ranks
    mine = [index for index in range(place.rank * len(devices), (place.rank + 1) * len(devices)) if index < len(cases)]
    stopped = False
    with fleet.joined(place):
        running = {index: _start(words, out, devices[index % len(devices)], f"{index}/{parts}") for index in mine}
        for index, process in running.items():
            try:
                code = process.wait()
            except KeyboardInterrupt:
                stopped = True
                for each in running.values():
                    end_child(each)
                code = process.returncode
            if code and not stopped:
                print(f"the part on {devices[index % len(devices)]} ended with code {code}", file=sys.stderr)
        paths = [_folder(out, f"{index}/{parts}") / "report.json" for index in mine]
        found = fleet.gather(place, [reports.read(path) for path in paths if path.exists()])
    every = [report for of_rank in found for report in of_rank]
    whole = merge(every, cases) if every else None
    if whole is not None:
        whole.method["command"] = command
        reports.write(out / "report.json", whole)
    if stopped:
        raise KeyboardInterrupt
    return whole


def merge(found: Sequence[Report], cases: Sequence[str]) -> Report:
    """Merges reports: the head of the first one, and all rows in the order of the workloads."""
    whole = found[0]
    places = {case: index for index, case in enumerate(cases)}
    whole.rows = sorted((row for report in found for row in report.rows), key=lambda row: places[row.case])
    whole.unfinished = [case for report in found for case in report.unfinished]
    whole.machine["devices"] = [report.machine["device"] for report in found]
    return whole


def _folder(out: Path, share: str) -> Path:
    return out / f"part-{share.replace('/', '-of-')}"


def _start(words: Sequence[str], out: Path, device: str, share: str) -> subprocess.Popen[bytes]:
    command = [*PROGRAM, "bench", *words, "--device", device, "--share", share, "--out", str(_folder(out, share))]
    alone = {name: value for name, value in os.environ.items() if name not in fleet.VARIABLES}
    with interrupts.left_to_this_process():
        return subprocess.Popen([*command, "--json-only", "--quiet"], env=alone, stdout=subprocess.DEVNULL)


# --- compilation ahead --------------------------------------------------------------------------------


def compile_ahead(
    cases: Sequence[Workload], names: Sequence[str], device: torch.device, workers: int, seconds: float, marker: Marker
) -> None:
    """Plans every backend for every workload in parallel processes, which leaves the kernels in the cache on disk.
    Stops after `seconds`. `marker` tells a supervisor of each plan, so that many of them are no hang."""
    deadline = time.monotonic() + seconds
    tasks = [(case, name, str(device)) for case in cases for name in names]
    with interrupts.left_to_this_process():
        pool = multiprocessing.get_context("spawn").Pool(workers)
    with pool:  # ends the processes, whatever they still do
        done = pool.imap_unordered(_compile, tasks)
        for number in range(len(tasks)):
            try:
                failed = done.next(max(0.0, min(deadline - time.monotonic(), 1e6)))
            except multiprocessing.TimeoutError:
                print(f"compiled ahead: {number} of {len(tasks)}, then the time was over", file=sys.stderr)
                return
            if failed:
                print(f"compiling ahead failed: {failed}", file=sys.stderr)
            marker.say("compiling ahead", done=number + 1)


def _compile(task: tuple[Workload, str, str]) -> str:
    """Plans one backend for one workload. Returns the error; "" if it was planned or refused."""
    case, name, device = task
    try:
        tensors = make(case, device, drawn=False)
        for host_sizes in (False, True) if tensors.host_offsets is not None else (False,):
            backend_entry(name, host_sizes=host_sizes).prepare(tensors)
    except Refused:
        return ""
    except Exception as error:  # whatever a backend raises, the run will tell
        return f"{name} on {case.key}: {describe(error)}"
    return ""
