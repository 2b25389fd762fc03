"""The Triton tutorial's table in its own form, ours beside the published figures.

Its benchmark: four cubes of N in fp16, milliseconds, median by do_bench. The published figures come
from its authors' GPU (an A100), so they are a landmark and no contest.
"""

from __future__ import annotations

from multigemm.bench.results import Report

PUBLISHED_MS = {
    128: (0.020480, 0.013312),
    256: (0.023552, 0.018432),
    512: (0.032768, 0.026624),
    1024: (0.071680, 0.087040),
}


def table(report: Report) -> str:
    """ "" unless the report holds the tutorial's cubes."""
    rows = {n: {r.entry: r for r in report.timed() if r.case == f"seed_cube_{n}/list/fp16"} for n in PUBLISHED_MS}
    if not any(rows.values()):
        return ""
    entries = list(dict.fromkeys(name for found in rows.values() for name in found))
    head = ["       N", "published cuBLAS", "published Triton", *entries]
    lines = ["group-gemm-performance (ms):", "  ".join(head)]
    for n, (cublas, triton) in PUBLISHED_MS.items():
        cells = [f"{float(n):8.1f}", f"{cublas:16.6f}", f"{triton:16.6f}"]
        for name in entries:
            row = rows[n].get(name)
            cells.append(f"{_ms(row.us if row else None):>{max(len(name), 8)}}")
        lines.append("  ".join(cells))
    style = report.method.get("style")
    lines.append(f"(measured: {style}, {report.machine.get('device')}; --style do_bench measures as the tutorial does)")
    return "\n".join(lines)


def _ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:.6f}"
