"""A campaign's outcome as text, as a table and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

from multigemm.fuzz.plan import GATE_FROM, Summary, Tally
from multigemm.testing.campaigns import versions
from multigemm.testing.case import Case
from multigemm.testing.corpus import snippet
from multigemm.testing.strategies import required, show_every_class

RHO = "rho: the error of an element over half an ulp plus sqrt(K) u |A||B|; a healthy kernel stays at a few"


def missing(summary: Summary) -> list[str]:
    """Required classes that the campaign did not meet; empty if its options narrowed it."""
    options, tally = summary.options, summary.tally
    if not options.is_whole or tally.problems < GATE_FROM:
        return []
    if options.kinds and not show_every_class(options.limits, options.kinds - len(options.carriers), options.seed):
        return []
    return sorted(required(options.limits) - set(tally.classes))


def idle(summary: Summary) -> list[str]:
    """Configs that were assigned to a kind and never ran, in a campaign long enough to reach them."""
    if summary.tally.problems < GATE_FROM:
        return []
    return sorted(f"{name} {config}" for (name, config), count in summary.tally.configs.items() if not count)


def unchecked(summary: Summary) -> list[str]:
    """Backends on which no problem was checked."""
    return [name for name in summary.options.backends if not summary.tally.checks[name]]


def failed(summary: Summary) -> bool:
    """Whether a campaign found a fault, or proves nothing: classes or configs that never came, or no check."""
    nothing = len(unchecked(summary)) == len(summary.options.backends)
    return bool(summary.tally.failures or missing(summary) or idle(summary) or nothing)


def progress_line(tally: Tally, seconds: float) -> str:
    """One line for a terminal."""
    checks = sum(tally.checks.values())
    rate = checks / seconds if seconds else 0.0
    per = ", ".join(f"{name} {count}" for name, count in sorted(tally.checks.items()))
    return f"{seconds:5.0f} s  {tally.problems} problems, {rate:.0f} checks/s ({per}); {len(tally.failures)} failures"


def _rms(squares: float, count: int) -> float:
    return math.sqrt(squares / max(count, 1))


def to_dict(summary: Summary) -> dict[str, Any]:
    """The whole summary as data for a file."""
    options, tally = summary.options, summary.tally
    checks = sum(tally.checks.values())
    return {
        "schema": "multigemm-fuzz-1",
        "versions": versions(),
        "options": {name: getattr(options, name) for name in options.__slots__ if name != "limits"}
        | asdict(options.limits)
        | {name: [case.to_dict() for case in getattr(options, name)] for name in ("carriers", "begin_with")},
        "seconds": round(summary.seconds, 1),
        "problems": tally.problems,
        "checks": dict(sorted(tally.checks.items())),
        "quantised_checks": dict(sorted(tally.quantised_checks.items())),
        "fused_checks": dict(sorted(tally.fused_checks.items())),
        "checks_per_second": round(checks / max(summary.seconds, 1e-9), 1),
        "disagreements": len(tally.failures),
        "guard_hits": sum(f.oracle == "guard" for f in tally.failures),
        "crashes": summary.crashes,
        "deep": dict(sorted(tally.deep.items())),
        "classes": dict(sorted(tally.classes.items())),
        "missing_classes": missing(summary),
        "refusals": [{"backend": b, "reason": r, "count": n} for (b, r), n in tally.refusals.most_common()],
        "kernels": [{"backend": b, "kernel": k, "count": n} for (b, k), n in tally.kernels.most_common()],
        "configs": [{"backend": b, "config": c, "count": n} for (b, c), n in sorted(tally.configs.items())],
        "shipped_configs": {
            name: {"configs": len(counts), "least": min(counts)}
            for name in options.backends
            if (counts := [n for (b, _), n in tally.configs.items() if b == name])
        },
        "idle_configs": idle(summary),
        "rho": [
            {"backend": b, "dtype": d, "max": round(peak, 3), "rms": round(_rms(squares, n), 4), "problems": n}
            for (b, d), (peak, squares, n) in sorted(tally.rho.items())
        ],
        "failures": [f.to_dict() for f in tally.failures],
        "notes": summary.notes,
        "interrupted": summary.interrupted,
        "seconds_by_step": {name: round(s, 2) for name, s in tally.spent.most_common()},
    }  # fmt: skip


def _failure_text(summary: Summary) -> list[str]:
    lines = []
    for failure in summary.tally.failures[:10]:
        case = Case.from_dict(failure.shrunk or failure.case)
        lines += ["", f"{failure.backend}: [{failure.oracle}] {failure.text[:400]}"]
        if failure.file:
            lines.append(f"  stored as {failure.file}")
        code = snippet(case, failure.backend, summary.options.device, failure.repeat)
        seen_again = failure.shrunk is not None  # else only a costlier oracle saw it, or it was not run again
        lines.append("  to repeat it:" if seen_again else "  its problem, which a plain run may not repeat:")
        lines += [f"    {line}" for line in code.splitlines()]
    if len(summary.tally.failures) > 10:
        lines.append(f"... and {len(summary.tally.failures) - 10} more in the JSON summary")
    return lines


def to_text(summary: Summary) -> str:
    """The table that is printed at the end."""
    tally = summary.tally
    lines = [progress_line(tally, summary.seconds), ""]
    lines.append(f"{'backend':10} {'checks':>8} {'refused':>8} {'failed':>7} {'rho max':>8} {'rho rms':>8}")
    for name in summary.options.backends:
        refused = sum(n for (b, _), n in tally.refusals.items() if b == name)
        bad = sum(f.backend == name for f in tally.failures)
        rhos = [v for (b, _), v in tally.rho.items() if b == name]
        peak = max((v[0] for v in rhos), default=0.0)
        rms = _rms(sum(v[1] for v in rhos), sum(v[2] for v in rhos))
        lines.append(f"{name:10} {tally.checks[name]:8} {refused:8} {bad:7} {peak:8.2f} {rms:8.3f}")
    lines.append(RHO)
    groups = ("form:", "dtype:", "mode:", "format:")
    shown = [(name, n) for name, n in sorted(tally.classes.items()) if name.startswith(groups)]
    lines += ["", "classes: " + ", ".join(f"{name} {n}" for name, n in shown)]
    if count := tally.classes["quantised"]:
        checked = ", ".join(f"{name} {tally.quantised_checks[name]}" for name in summary.options.backends)
        lines.append(f"quantised operands in {count} problems; checked on {checked}")
    if count := tally.classes["fused"]:
        checked = ", ".join(f"{name} {tally.fused_checks[name]}" for name in summary.options.backends)
        lines.append(f"picked rows, gates and sums of rows in {count} problems; checked on {checked}")
    if tally.deep:
        lines.append("other oracles: " + ", ".join(f"{name} {n}" for name, n in sorted(tally.deep.items())))
    for name in summary.options.backends:
        ran = Counter({kernel: n for (b, kernel), n in tally.kernels.items() if b == name})
        count = sum(1 for (b, _), n in tally.configs.items() if b == name and n)
        kernels = ", ".join(f"{kernel} {n}" for kernel, n in ran.most_common())
        lines.append(f"{name} under {count} configs: {kernels}")
    for (backend, reason), count in tally.refusals.most_common(12):
        lines.append(f"refused {count} x {backend}: {reason[:160]}")
    if gaps := missing(summary):
        lines.append(f"NOT COVERED: {', '.join(gaps)}")
    if names := unchecked(summary):
        lines.append(f"NOTHING CHECKED on {', '.join(names)}: allow more --seconds or --examples, or see the refusals")
    if unused := idle(summary):
        lines.append(f"NEVER RUN: {', '.join(unused)}")
    return "\n".join(lines + summary.notes + _failure_text(summary))
