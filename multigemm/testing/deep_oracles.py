"""Oracles that cost more than a run: the same launch under other circumstances.

Each takes an outcome that `check` has found right, and compares with its result. On a side stream, from a CUDA graph,
from threads, after a launch over other contents, after sizes that change in place, and with operands at the edge of
mapped memory, the same launch must give the same bits. With invalid sizes, nothing outside the result may be written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.testing import relations
from multigemm.testing.case import Case
from multigemm.testing.guard_pages import FILL, banded_allocations, guarded_blocks
from multigemm.testing.oracles import Finding, Outcome, bind, differing, fetch, inspect, short_text
from multigemm.testing.placed_case import DeviceCase, PlacedCase, Region, foreign_writes, index_values, make_problem
from multigemm.testing.subject import Subject

BAND_FILLS = (0, FILL)
"""What lies beside memory that the backend takes for itself, in turn."""


def _compare(device_case: DeviceCase, got: torch.Tensor, name: str, outcome: Outcome) -> None:
    assert outcome.result is not None
    bad = differing(outcome.result, got, device_case.placed.writable)
    if bad:
        outcome.findings.append(Finding(name, f"{bad} bytes differ from the same launch on its own"))


def side_stream(device_case: DeviceCase, subject: Subject, outcome: Outcome, seed: int = 0) -> bool:
    """Launches on a busy stream of its own, with inputs that arrive late: a launch on another stream would read
    poison."""
    launch, _ = bind(device_case, subject)
    device_case.prefill(1)
    device_case.inputs.fill_(0x7F)
    torch.cuda.synchronize(device_case.device)
    stream = torch.cuda.Stream(device_case.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000)  # type: ignore[no-untyped-call]
        device_case.inputs.copy_(device_case.pristine)
        launch()
        late = device_case.outputs.clone()
    stream.synchronize()
    _compare(device_case, late.cpu(), "side stream", outcome)
    return True


def regroup(case: Case, seed: int) -> Case | None:
    """The same extents in groups of other sizes; None where nothing can change."""
    rng = np.random.default_rng(seed)
    if case.form == "masked":
        rows = rng.integers(0, case.m, case.groups, endpoint=True)
        return replace(case, lengths=tuple(int(r) for r in rows))
    total = case.total
    cuts = np.sort(rng.integers(0, total, case.groups + 1, endpoint=True)).tolist()
    if case.kind != "offsets":
        cuts[0] = 0
    if not case.jagged or case.groups == 0:
        return None
    return replace(case, lengths=tuple(b - a for a, b in pairwise(cuts)), head=cuts[0], tail=total - cuts[-1])


def changed_sizes(
    device_case: DeviceCase, subject: Subject, outcome: Outcome, seed: int = 0, *, captured: bool = False
) -> bool:
    """The same bound launch after the contents of operands and sizes have changed in place.

    With `captured` the launch is replayed from a CUDA graph. False where the case has no live sizes.
    """
    case = device_case.placed.case
    other_case = regroup(case, seed) if device_case.placed.layout.index is not None and case.where == "device" else None
    if other_case is None or case.mode == "onehot":
        return False
    launch, recipe = bind(device_case, subject)
    device_case.prefill(1)
    launch()
    replay: Any = launch
    if captured:
        if recipe.syncs:
            return False
        replay = _capture(launch, device_case.device)
    other = PlacedCase.build(other_case, device_case.placed.values)
    for number in (0, 1):
        device_case.inputs.copy_(other.inputs)
        device_case.outputs.copy_(other.prefills[number])
        replay()
        inspect(other, fetch(device_case), other.prefills[number], outcome, "after a change of sizes in place: ")
    device_case.inputs.copy_(device_case.pristine)
    device_case.prefill(0)
    replay()
    if captured:
        _judge_replay(device_case, subject, 0, outcome)
    else:
        _compare(device_case, fetch(device_case), "second launch", outcome)
    return True


def _capture(launch: Any, device: torch.device) -> Any:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.device(device), torch.cuda.graph(graph):
        launch()
    return graph.replay


def graph(device_case: DeviceCase, subject: Subject, outcome: Outcome, seed: int = 0) -> bool:
    """Captures the launch once and replays it twice over other old contents."""
    launch, recipe = bind(device_case, subject)
    device_case.prefill(1)
    launch()
    if recipe.syncs:
        return False
    replay = _capture(launch, device_case.device)
    for number in (0, 1):
        device_case.prefill(number)
        replay()
        _judge_replay(device_case, subject, number, outcome)
    return True


def _judge_replay(device_case: DeviceCase, subject: Subject, prefill: int, outcome: Outcome) -> None:
    """Requires the bits of a separate launch for our kernels. A library may be called in another way in a graph (cublas
    runs few unlike products as one call each), so that sums run in another order."""
    got = fetch(device_case)
    if subject.own_kernels:
        _compare(device_case, got, "graph replay", outcome)
    else:
        inspect(device_case.placed, got, device_case.placed.prefills[prefill], outcome, "graph replay: ")


def other_contents(device_case: DeviceCase, subject: Subject, outcome: Outcome, seed: int = 0) -> bool:
    """Two launches must agree that surround a launch over other contents: a launch leaves no state behind."""
    launch, _ = bind(device_case, subject)
    index = device_case.placed.layout.index
    device_case.inputs.fill_(0x7F)
    if index is not None:
        index.view(device_case.inputs).copy_(index.view(device_case.pristine))
    device_case.prefill(0)
    launch()
    device_case.inputs.copy_(device_case.pristine)
    device_case.prefill(1)
    launch()
    _compare(device_case, fetch(device_case), "launch after one on other contents", outcome)
    return True


def lying_sizes_of(device_case: DeviceCase, seed: int) -> torch.Tensor:
    """Invalid contents for sizes on the device: decreasing, below zero and past the end."""
    case, index = device_case.placed.case, device_case.placed.layout.index
    assert index is not None
    reach = max(case.total, case.m, 1)
    wild = [-(2**31), -1, 0, 1, reach, reach + 1, 2 * reach, 2**31 - 1, *index_values(case)]
    return torch.tensor(np.random.default_rng(seed).choice(wild, index.shape[0]), dtype=index.dtype)


def check_foreign_writes(device_case: DeviceCase, outcome: Outcome) -> None:
    """Requires that nothing outside the result was written since the first prefill, whatever the result holds."""
    got = fetch(device_case)
    everything = torch.zeros(got.shape, dtype=torch.uint8)
    for region in device_case.placed.layout.outputs.regions:
        region.bits(everything).fill_(-1)
    stray = foreign_writes(got.numpy(), device_case.placed.prefills[0].numpy(), everything.numpy())
    if stray:
        outcome.findings.append(Finding("lying sizes", f"{stray} bytes were written outside the result"))


def lying_sizes(device_case: DeviceCase, subject: Subject, outcome: Outcome, seed: int = 0) -> bool:
    """Launches with offsets that decrease, lie below zero and past the end: nothing outside the result may be
    written."""
    case, index = device_case.placed.case, device_case.placed.layout.index
    if index is None or case.where != "device" or not index.shape[0]:
        return False
    launch, _ = bind(device_case, subject)
    index.view(device_case.inputs).copy_(lying_sizes_of(device_case, seed))
    device_case.prefill(0)
    launch()
    check_foreign_writes(device_case, outcome)
    device_case.inputs.copy_(device_case.pristine)
    return True


def threads(device_case: DeviceCase, subject: Subject, outcome: Outcome, seed: int = 0, *, times: int = 5) -> bool:
    """Runs four threads, each with its own operands and stream, from the first call on."""
    placed, device = device_case.placed, device_case.device
    problems: list[str] = []

    def work() -> None:
        try:
            own = Outcome(subject.name)
            device_case = DeviceCase.build(placed, device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the copies were made on another stream than the thread's
                with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                    _repeat(device_case, own)
            else:
                _repeat(device_case, own)
            problems.extend(str(f) for f in own.findings)
        except Exception as error:  # a thread's failure is the finding
            problems.append(f"{type(error).__name__}: {error}")

    def _repeat(device_case: DeviceCase, own: Outcome) -> None:
        launch, _ = bind(device_case, subject)
        for number in range(times):
            device_case.prefill(number % 2)
            launch()
            inspect(placed, fetch(device_case), placed.prefills[number % 2], own)

    started = [threading.Thread(target=work) for _ in range(4)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    outcome.findings += [Finding("threads", text) for text in problems[:3]]
    return True


def edge_of_memory(device_case: DeviceCase, subject: Subject, outcome: Outcome, seed: int = 0) -> bool:
    """Launches with operands at the edge of mapped memory, and once more with invalid sizes. The backend's own
    allocations get guard bands.

    `outcome` is a right outcome, which must come out again.
    """
    pool, case, index = guarded_blocks(device_case.device), device_case.placed.case, device_case.placed.layout.index
    pool.clear()
    placed: dict[int, Tensor] = {}

    def at(region: Region, arena: Tensor) -> Tensor:
        if id(region) not in placed:
            placed[id(region)] = pool.place(region, arena, behind=seed % 4 != 3)
        return placed[id(region)]

    problem = make_problem(case, device_case.placed.layout, device_case.inputs, device_case.outputs, at)
    edge = replace(device_case, problem=problem)
    with banded_allocations(BAND_FILLS[seed % 2]) as bands:
        launch, _ = bind(edge, subject)
    edge.prefill(1)
    launch()
    bad = differing(outcome.result, fetch(edge), device_case.placed.writable) if outcome.result is not None else 0
    if bad:
        outcome.findings.append(
            Finding("edge of memory", f"{bad} bytes differ with operands at the edge of mapped memory")
        )
    few = case.groups <= 2000 or device_case.device.type != "cpu"  # each group of lying sizes may be the whole extent
    if index is not None and case.where == "device" and index.shape[0] and few:
        placed[id(index)].copy_(lying_sizes_of(device_case, seed))
        edge.prefill(0)
        launch()
        check_foreign_writes(edge, outcome)
        device_case.inputs.copy_(device_case.pristine)  # where no guarded block was left
    if broken := bands.written():
        outcome.findings.append(Finding("workspace", f"{broken} bytes beside the backend's own memory were written"))
    return True


Oracle = Callable[[DeviceCase, Subject, Outcome, int], int]
"""Adds what it finds to the outcome; 0 where it does not apply to such a case."""
ORACLES: dict[str, Oracle] = {
    "relations": relations.relate,
    "changed sizes": changed_sizes,
    "lying sizes": lying_sizes,
    "edge of memory": edge_of_memory,
    "other contents": other_contents,
}
"""By name, those that run on any device."""
GPU_ORACLES: dict[str, Oracle] = {
    "graph": graph,
    "graph with changed sizes": partial(changed_sizes, captured=True),
    "side stream": side_stream,
}
THREAD_ORACLES: dict[str, Oracle] = {"threads": threads}
"""The oracles that need several threads, which emulators do not support."""


def run_oracles(
    oracles: Iterable[Oracle], device_case: DeviceCase, subject: Subject, outcome: Outcome, seed: int = 0
) -> bool:
    """Runs oracles on a right outcome, until one of them finds something.

    Args:
        oracles: What is run, in this order.
        device_case: The case that was run.
        subject: The backend that ran it.
        outcome: What `check` said; it receives the findings. A launch that fails under an oracle is a finding.
        seed: What an oracle draws from.

    Returns:
        Whether the last oracle that ran applies to such a case.
    """
    applies = False
    for oracle in oracles:
        try:
            applies = bool(oracle(device_case, subject, outcome, seed))
        except Exception as error:  # whatever a backend raises
            outcome.findings.append(Finding("exception", short_text(error)))
            applies = False
        if outcome.findings:
            break
    return applies
