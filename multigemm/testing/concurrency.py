"""When a launch happens, and beside what: streams, graphs, threads, and sizes that change or lie.

These oracles take an outcome that `check` has found right, so its result is the yardstick: whatever the
circumstances, the same launch must give the same bits.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from multigemm.testing.case import Case
from multigemm.testing.memory import foreign_writes
from multigemm.testing.oracles import Finding, Outcome, bind, differing, fetch, inspect
from multigemm.testing.subject import Subject
from multigemm.testing.world import Stand, World, index_values


def _compare(stand: Stand, got: torch.Tensor, name: str, outcome: Outcome) -> None:
    assert outcome.result is not None
    bad = differing(outcome.result, got, stand.world.writable)
    if bad:
        outcome.findings.append(Finding(name, f"{bad} bytes differ from the same launch on its own"))


def side_stream(stand: Stand, subject: Subject, outcome: Outcome) -> None:
    """On a busy stream of its own, with inputs that arrive late: a launch elsewhere would read poison."""
    launch, _ = bind(stand, subject)
    stand.prefill(1)
    stand.inputs.fill_(0x7F)
    torch.cuda.synchronize(stand.device)
    stream = torch.cuda.Stream(stand.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000)  # type: ignore[no-untyped-call]
        stand.inputs.copy_(stand.pristine)
        launch()
        late = stand.outputs.clone()
    stream.synchronize()
    _compare(stand, late.cpu(), "side stream", outcome)


def recut(case: Case, seed: int) -> Case | None:
    """The same extents cut into groups of other sizes; None where nothing can change."""
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


def changed_sizes(stand: Stand, subject: Subject, outcome: Outcome, seed: int, *, captured: bool) -> bool:
    """The same bound launch after the contents of operands and sizes have changed in place.

    With `captured` the launch is replayed from a CUDA graph. False where the case has no live sizes.
    """
    case = stand.world.case
    other_case = recut(case, seed) if stand.world.place.index is not None and case.where == "device" else None
    if other_case is None or case.mode == "onehot":
        return False
    launch, recipe = bind(stand, subject)
    stand.prefill(1)
    launch()
    replay: Any = launch
    if captured:
        if recipe.syncs:
            return False
        replay = _capture(launch, stand.device)
    other = World.build(other_case, stand.world.values)
    for number in (0, 1):
        stand.inputs.copy_(other.inputs)
        stand.outputs.copy_(other.prefills[number])
        replay()
        inspect(other, fetch(stand), other.prefills[number], outcome, "after a change of sizes in place: ")
    stand.inputs.copy_(stand.pristine)
    stand.prefill(0)
    replay()
    _compare(stand, fetch(stand), "graph replay" if captured else "second launch", outcome)
    return True


def _capture(launch: Any, device: torch.device) -> Any:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.device(device), torch.cuda.graph(graph):
        launch()
    return graph.replay


def graph(stand: Stand, subject: Subject, outcome: Outcome) -> None:
    """Captured once, replayed twice over other old contents."""
    launch, recipe = bind(stand, subject)
    stand.prefill(1)
    launch()
    if recipe.syncs:
        return
    replay = _capture(launch, stand.device)
    for number in (0, 1):
        stand.prefill(number)
        replay()
        _compare(stand, fetch(stand), "graph replay", outcome)


def other_contents(stand: Stand, subject: Subject, outcome: Outcome) -> None:
    """A bound launch leaves nothing behind for its next one: between two that agree, one met other contents."""
    launch, _ = bind(stand, subject)
    index = stand.world.place.index
    stand.inputs.fill_(0x7F)
    if index is not None:
        index.view(stand.inputs).copy_(index.view(stand.pristine))
    stand.prefill(0)
    launch()
    stand.inputs.copy_(stand.pristine)
    stand.prefill(1)
    launch()
    _compare(stand, fetch(stand), "launch after one on other contents", outcome)


def lie(stand: Stand, seed: int) -> torch.Tensor:
    """Contents for the device's sizes that run backwards, below zero and past the end."""
    case, index = stand.world.case, stand.world.place.index
    assert index is not None
    reach = max(case.total, case.m, 1)
    wild = [-(2**31), -1, 0, 1, reach, reach + 1, 2 * reach, 2**31 - 1, *index_values(case)]
    return torch.tensor(np.random.default_rng(seed).choice(wild, index.shape[0]), dtype=index.dtype)


def strays(stand: Stand, outcome: Outcome) -> None:
    """Nothing outside the result may have been written since the first prefill, whatever is in it."""
    got = fetch(stand)
    everything = torch.zeros(got.shape, dtype=torch.uint8)
    place = stand.world.place.out
    for region in place if isinstance(place, list) else [place]:
        region.bits(everything).fill_(-1)
    stray = foreign_writes(got.numpy(), stand.world.prefills[0].numpy(), everything.numpy())
    if stray:
        outcome.findings.append(Finding("lying sizes", f"{stray} bytes were written outside the result"))


def lies(stand: Stand, subject: Subject, outcome: Outcome, seed: int) -> bool:
    """Offsets that run backwards, below zero and past the end: nothing outside the result may be written."""
    case, index = stand.world.case, stand.world.place.index
    if index is None or case.where != "device" or not index.shape[0]:
        return False
    launch, _ = bind(stand, subject)
    index.view(stand.inputs).copy_(lie(stand, seed))
    stand.prefill(0)
    launch()
    strays(stand, outcome)
    stand.inputs.copy_(stand.pristine)
    return True


def threads(
    world: World, subject: Subject, outcome: Outcome, device: torch.device, count: int = 4, times: int = 5
) -> None:
    """Several threads, each with operands and a stream of its own, from the first call on."""
    problems: list[str] = []

    def work() -> None:
        try:
            mine = Outcome(subject.name)
            stand = Stand.build(world, device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the stand was built on another stream than the thread's
                with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                    _repeat(stand, mine)
            else:
                _repeat(stand, mine)
            problems.extend(str(f) for f in mine.findings)
        except Exception as error:  # a thread's failure is the finding
            problems.append(f"{type(error).__name__}: {error}")

    def _repeat(stand: Stand, mine: Outcome) -> None:
        launch, _ = bind(stand, subject)
        for number in range(times):
            stand.prefill(number % 2)
            launch()
            inspect(world, fetch(stand), world.prefills[number % 2], mine)

    crew = [threading.Thread(target=work) for _ in range(count)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for each in crew:
        each.start()
    for each in crew:
        each.join()
    outcome.findings += [Finding("threads", text) for text in problems[:3]]
