"""The cublas backend beside the bare library calls: how fast its choice runs, and what a plan costs the host.

    python benchmarks/cublas.py --json cublas.json            # on a GPU; a minute

Bare calls are torch.mm per group, torch.bmm, torch's grouped_mm on either memory order of the weights, and
cublasGemmGroupedBatchedEx. All work on the plan's own operands and, where they take one, into its own result: other
addresses alone make 3 % of a call of 7 us. The fastest bare call and the plan are each measured under two names, in
the same shuffled rounds with cold caches: how far those differ is how well this clock can tell two calls apart. Where
the plan seems slower, a profiler says whether the same kernels run.

Host times: blocks of 20 calls in turn, the lower quartile. Several streams stand beside torch's own streams and events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import multigemm as mg
from multigemm.backends.cublas.config import Config
from multigemm.backends.cublas.run import shares
from multigemm.bench import operands, peers
from multigemm.bench.entries import Refused
from multigemm.bench.suites import SUITES
from multigemm.bench.workloads import Workload
from multigemm.select.timing import measure

Call = Callable[[], Any]
Row = dict[str, Any]
CUDA = torch.device("cuda")
NAMES = ("moe", "wgrad", "tutorial", "helion-jagged", "l2", "cpu-tile", "small")
BARE = {name: entry for name, entry in peers.PEERS.items() if name.startswith(("torch_", "cublas_"))}
LOOPED, NEAR, SHORT_US, SLOWER = 64, 1.08, 100.0, 0.985
"""Groups that a loop is worth trying for; how near the fastest a call must come to be measured again; what is also
measured in graphs; a ratio that asks for the names of the kernels."""


def _stacked(x: Any, groups: int) -> Tensor:
    """The groups of an operand as one tensor, where they lie."""
    if isinstance(x, Tensor):
        return x if x.dim() == 3 else x.view(groups, -1, x.shape[-1])
    base = x[0]._base
    assert base is not None
    return base.as_strided((groups, *x[0].shape), (base.stride(0), *x[0].stride()))  # type: ignore[no-any-return]


def bare_calls(tensors: operands.Tensors) -> dict[str, Call]:
    """Every bare call that takes the workload."""
    calls: dict[str, Call] = {}
    for name, entry in BARE.items():
        if name == "torch_loop" and tensors.workload.groups > LOOPED:
            continue
        try:
            calls[name] = entry.prepare(tensors).call
        except Refused:
            continue
    if "torch_bmm" in calls:
        a, b, out = (_stacked(x, tensors.workload.groups) for x in (tensors.a, tensors.b, tensors.out))
        calls["torch_bmm"] = lambda: torch.bmm(a, b, out=out)
    return calls


def plan_of(tensors: operands.Tensors) -> mg.Plan:
    keywords: Row = {"out": tensors.out}
    if tensors.host_offsets is not None:
        keywords |= {"offsets": tensors.host_offsets, "jagged": tensors.workload.form[-1]}
    return mg.plan(mg.GroupedGemmProblem(tensors.a, tensors.b, **keywords), backend="cublas")


def compared(calls: dict[str, Any], plan: mg.Plan, again: mg.Plan, mode: Any, budget_ms: float) -> Row:
    """One row: medians in microseconds, and the ratio of the fastest bare call to the plan, each under two names."""
    first = measure(calls, CUDA, mode, reps=5, min_reps=5)
    rough = {name: timing.median for name, timing in first.items() if timing.ok}
    fastest = min(rough, key=lambda name: rough[name])
    near = {name: calls[name] for name in rough if rough[name] < NEAR * rough[fastest]}
    twice: dict[str, Any] = {**near, f"{fastest} again": calls[fastest], "plan": plan, "plan again": again}
    timings = measure(twice, CUDA, mode, reps=400, min_reps=12, budget_ms=budget_ms)
    us = {name: round(timing.median, 2) for name, timing in timings.items()}
    best = min(near, key=lambda name: us[name])
    clones = [us[name] for name in (best, f"{best} again") if name in us]
    plans = us["plan"], us["plan again"]
    return {
        "mode": mode, "bare": best, "us": {**{k: round(v, 2) for k, v in rough.items() if k not in us}, **us},
        "rounds": len(timings["plan"].samples), "ratio": round(statistics.mean(clones) / statistics.mean(plans), 4),
        "clones differ": round(max(max(clones) / min(clones), max(plans) / min(plans)) - 1, 4),
    }  # fmt: skip


def kernels(call: Call) -> list[str]:
    """The kernels that a call runs."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    on_gpu = [e.name for e in seen.events() or () if e.device_type == DeviceType.CUDA]
    return [str(name)[:120] for name in on_gpu if not name.startswith(("Memcpy", "Memset"))]


def rows_of(workload: Workload, budget_ms: float) -> list[Row]:
    tensors = operands.make(workload, CUDA)
    calls, plan, again = bare_calls(tensors), plan_of(tensors), plan_of(tensors)
    head: Row = {"case": workload.key, "chosen": plan.told}
    rows = [head | compared(calls, plan, again, "cold", budget_ms)]
    if float(rows[0]["us"]["plan"]) < SHORT_US:
        captured = {name: call for name, call in calls.items() if name != "cublas_grouped"}
        rows += [head | compared(captured, plan, again, mode, budget_ms / 4) for mode in ("graph", "hot")]
    return rows


def named(workload: Workload, row: Row) -> Row:
    """The kernels of both sides, for a row where the plan seemed slower."""
    tensors = operands.make(workload, CUDA)
    bare, own = kernels(bare_calls(tensors)[row["bare"]]), kernels(plan_of(tensors))
    return row | {"same kernels": bare == own, "bare kernels": bare[:4], "plan kernels": own[:4]}


def show(row: Row) -> None:
    us, same = row["us"], "" if "same kernels" not in row else "  same kernels" if row["same kernels"] else "  others"
    print(
        f"{row['case']:34}{row['mode']:5}{row['ratio']:7.3f}{us[row['bare']]:10.2f} {row['bare']:18}{us['plan']:10.2f}"
        f"  +-{100 * row['clones differ']:.1f} %{row['rounds']:5}  {row['chosen'][7:45]}{same}", flush=True,
    )  # fmt: skip


def device_times(cases: Sequence[Workload], seconds: float, budget_ms: float) -> list[Row]:
    """Rows of as many cases as the time allows."""
    start, rows = time.perf_counter(), list[Row]()
    by_key = {w.key: w for w in cases}
    for workload in cases:
        if time.perf_counter() - start > seconds:
            print(f"time is over before {workload.key}")
            break
        rows += rows_of(workload, budget_ms)
        for row in rows[-3:]:
            if row["case"] == workload.key:
                show(row)
        torch.cuda.empty_cache()
    for i, row in enumerate(rows):
        if row["ratio"] < SLOWER and time.perf_counter() - start < seconds + 5:
            rows[i] = named(by_key[row["case"]], row)
            show(rows[i])
    return rows


def either_way(rows: Sequence[Row]) -> dict[str, float]:
    """For each case the ratio of the better of an eager call and a replay, both cold, on both sides."""
    best: dict[str, tuple[float, float]] = {}
    for row in rows:
        if row["mode"] != "hot":
            both = [[v for k, v in row["us"].items() if k.startswith(side)] for side in (row["bare"], "plan")]
            bare, plan = best.get(row["case"], (float("inf"), float("inf")))
            best[row["case"]] = min(bare, *both[0]), min(plan, *both[1])
    return {case: round(bare / plan, 4) for case, (bare, plan) in best.items()}


# --- the host ---------------------------------------------------------------------------------------


def _block(call: Call, calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / calls * 1e6


def beside(title: str, calls: dict[str, Call], block: int = 20, blocks: int = 40) -> Row:
    """Host microseconds of each call; the first is the bare one."""
    for call in calls.values():
        _block(call, 5)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(blocks):
        for name, call in calls.items():
            found[name].append(_block(call, block))
    us = {name: round(statistics.quantiles(v, n=4)[0], 1) for name, v in found.items()}
    bare = next(iter(us.values()))
    print(f"{title:34}" + "  ".join(f"{k} {v} ({v - bare:+.1f})" for k, v in us.items()), flush=True)
    return {"title": title, "us": us}


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA).bfloat16()


def _plan(*operands_: Any, config: Config | None = None, **keywords: Any) -> mg.Plan:
    return mg.plan(mg.GroupedGemmProblem(*operands_, **keywords), backend="cublas", config=config)


def _loop(a: Sequence[Tensor], b: Sequence[Tensor], out: Sequence[Tensor]) -> Call:
    def call() -> None:
        for x, y, z in zip(a, b, out, strict=True):
            torch.mm(x, y, out=z)

    return call


def _spread(a: Sequence[Tensor], out: Sequence[Tensor], count: int) -> Call:
    """What torch has for it: the same products over so many streams, with the events that make it right."""
    sides: list[Any] = [torch.cuda.Stream() for _ in range(count - 1)]  # type: ignore[no-untyped-call]
    here, *rest = shares([x.shape[0] ** 3 for x in a], count)
    event: Any = torch.cuda.Event
    fork, ends = event(), [event() for _ in sides]

    def call() -> None:
        current = torch.cuda.current_stream()
        fork.record(current)
        for i in here:
            torch.mm(a[i], a[i], out=out[i])
        for side, end, share in zip(sides, ends, rest, strict=True):
            side.wait_event(fork)
            with torch.cuda.stream(side):
                for i in share:
                    torch.mm(a[i], a[i], out=out[i])
            end.record(side)
        for end in ends:
            current.wait_event(end)

    return call


def _by_hand(a: Tensor, b: Tensor, offsets: Tensor) -> Call:
    """`offsets` in torch, with this library's meaning: clamped, and zeros where no group is."""
    rows, last = torch.arange(len(a), device=CUDA)[:, None], len(a)

    def call() -> Tensor:
        out = torch._grouped_mm(a, b, offs=offsets[1:].clamp(0, last).int())
        return out.masked_fill_((rows < offsets[0]) | (rows >= offsets[-1]), 0)

    return call


def host_times() -> list[Row]:
    """plan() beside the bare calls."""
    a, b = _draw(4, 128, 128), _draw(4, 128, 128)
    out, bias = torch.empty_like(a), _draw(4, 128)
    lists = list(a), list(b)
    x, w, given = _draw(256, 128), _draw(4, 128, 128), _draw(256, 128)
    offsets = torch.tensor([0, 64, 128, 192, 256], device=CUDA, dtype=torch.int32)
    ends, wide, grouped = offsets[1:].contiguous(), offsets.long(), Config("grouped_mm")
    large = [_draw(n, n) for n in (4096, 3072, 2048, 4096)]
    into = [torch.empty_like(t) for t in large]
    rows = [
        beside("an empty kernel", {"_sleep(0)": lambda: torch.cuda._sleep(0)}),  # type: ignore[no-untyped-call]
        beside("4 equal products", {"bmm": lambda: torch.bmm(a, b, out=out), "plan": _plan(a, b, out=out)}),
        beside("4 products", {"mm": _loop(*lists, list(out)), "plan": _plan(*lists, config=Config("loop"))}),
        beside("4 products, bias and relu", {
            "baddbmm, relu_": lambda: torch.baddbmm(bias[:, None], a, b, out=out).relu_(),
            "plan": _plan(a, b, bias=bias, activation="relu")}),
        beside("jagged m", {
            "grouped_mm": lambda: torch._grouped_mm(x, w, offs=ends),
            "grouped_mm of offsets[1:]": lambda: torch._grouped_mm(x, w, offs=offsets[1:]),
            "host sizes": _plan(x, w, sizes=[64] * 4, config=grouped), "ends": _plan(x, w, ends=ends),
            "offsets": _plan(x, w, offsets=offsets), "offsets, given out": _plan(x, w, offsets=offsets, out=given)}),
        beside("offsets and what they mean", {
            "in torch, int32": _by_hand(x, w, offsets), "in torch, int64": _by_hand(x, w, wide),
            "int32": _plan(x, w, offsets=offsets), "int64": _plan(x, w, offsets=wide)}, blocks=20),
    ]  # fmt: skip
    plans = {f"{n} streams": _plan(large, large, out=into, config=Config("streams", n)) for n in (2, 3, 4)}
    spread = {f"torch's {n} streams": _spread(large, into, n) for n in (2, 3, 4)}
    loops: dict[str, Call] = {
        "mm": _loop(large, large, into),
        "loop": _plan(large, large, out=into, config=Config("loop")),
    }
    return [*rows, beside("4 large products", {**loops, **plans, **spread}, block=4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default=",".join(NAMES))
    parser.add_argument("--only", default="", help="cases whose keys contain one of these words, separated by commas")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the device times")
    parser.add_argument("--budget", type=float, default=300.0, help="milliseconds for each case")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU, and what is measured here runs on one")
    every = [w for name in args.suites.split(",") for w in SUITES[name]() if not w.bias]
    cases = [w for w in every if any(word in w.key for word in args.only.split(","))]
    host, rows = host_times(), device_times(cases, args.seconds, args.budget)
    ways = {mode: [row["ratio"] for row in rows if row["mode"] == mode] for mode in ("cold", "graph", "hot")}
    for mode, ratios in {**ways, "cold or graph": list(either_way(rows).values())}.items():
        print(f"{mode}: {sum(r >= 0.98 for r in ratios)} of {len(ratios)} at 0.98 or more; least {sorted(ratios)[:4]}")
    if args.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "host": host, "cases": rows}
        args.json.write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
