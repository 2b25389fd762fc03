"""Draws the kernels of one expert-parallel step, one lane for the exchanges and one for everything else.

    python benchmarks/timeline.py ep_timeline.json --layer qwen3-30b --out docs/expert-parallel.svg

The input is what `benchmarks/expert_parallel.py --timeline` wrote. Time runs to the right; an exchange below a
product is hidden behind it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

WIDTH, LEFT, LANE, GAP = 1000, 90, 34, 12
LANES = {"product": (0, "#2a6fb0"), "other": (0, "#a9bdd0"), "exchange": (1, "#d9822b")}
LABELS = ("compute", "exchange")


def picture(kernels: list[dict[str, Any]], title: str) -> str:
    """The timeline as SVG."""
    whole = max(k["start"] + k["us"] for k in kernels)
    scale = (WIDTH - LEFT - 10) / whole
    height = 40 + len(LABELS) * (LANE + GAP) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="22">{title}</text>',
    ]
    for lane, label in enumerate(LABELS):
        parts.append(f'<text x="8" y="{40 + lane * (LANE + GAP) + LANE * 0.62:.0f}">{label}</text>')
    for kernel in kernels:
        lane, colour = LANES[kernel["kind"]]
        x, wide = LEFT + kernel["start"] * scale, max(0.4, kernel["us"] * scale)
        y = 40 + lane * (LANE + GAP)
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{LANE}" fill="{colour}"/>')
    parts += [_tick(LEFT + ms * 1000 * scale, ms, height) for ms in range(int(whole / 1000) + 1)]
    return "\n".join([*parts, "</svg>\n"])


def _tick(x: float, ms: int, height: int) -> str:
    return f'<text x="{x:.1f}" y="{height - 8}" fill="#666" font-size="11">{ms} ms</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timeline", type=Path)
    parser.add_argument("--layer", default="qwen3-30b")
    parser.add_argument("--title", default=None)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    kernels = json.loads(args.timeline.read_text())[args.layer]
    args.out.write_text(picture(kernels, args.title or f"{args.layer}: one step, forward and backward, on one rank"))


if __name__ == "__main__":
    main()
