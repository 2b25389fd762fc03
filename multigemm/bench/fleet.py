"""One benchmark on many GPUs and hosts: each device times every n-th workload alone, and one report holds all.

Ceilings are measured on each device (unless --floor names them), so that rows are fractions of what their own
device reaches. What is timed at the same moment on neighbouring GPUs shares the host: use --device for one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from multigemm import fleet, interrupts
from multigemm.bench import reports
from multigemm.bench.supervise import PROGRAM, end
from multigemm.errors import InvalidSetting


def shared(args: argparse.Namespace, place: fleet.Place) -> tuple[str, ...]:
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


def run(
    words: Sequence[str], command: str, out: Path, cases: Sequence[str], devices: Sequence[str], place: fleet.Place
) -> reports.Report | None:
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
                    end(each)
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


def merge(found: Sequence[reports.Report], cases: Sequence[str]) -> reports.Report:
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
