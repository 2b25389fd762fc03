"""Keeps the measured tables of Markdown pages equal to the reports that they come from.

A page holds, on lines of their own,

    <!-- bench PATH/report.json summary moe -->
    <!-- end bench -->

and `python -m multigemm.bench.embed README.md docs/benchmarks.md` fills in what lies between them.
PATH is relative to the page's repository; the suites, comma separated, may be left out. A view of two
reports (`both`) takes two, comma separated. `--check` only says whether it would change anything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from multigemm.bench import markdown, results, table, tutorial
from multigemm.bench.results import Report

BLOCK = re.compile(r"(<!-- bench (\S+) (\w+)(?: (\S+))? -->\n).*?(<!-- end bench -->)", re.DOTALL)


def _where(report: Report) -> str:
    m = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in m["packages"].items() if name != "numpy")
    power = f" ({m['clocks']['power_cap_w']:.0f} W)" if "power_cap_w" in m.get("clocks", {}) else ""
    return f"{m['device']}{power}, {versions}; {m['date'][:10]}, commit {m['commit']}"


def _origin(report: Report) -> str:
    return f"{_where(report)}; `{report.method['command']}`"


VIEWS: dict[str, Callable[[Report], str]] = {
    "summary": lambda report: f"{_origin(report)}\n\n{markdown.summary(report)}",
    "where": _where,
    "command": lambda report: f"```\n{report.method['command']}\n```",
    "short": markdown.short,
    "details": markdown.details,
    "losses": markdown.losses,
    "auto": markdown.auto,
    "tutorial": lambda report: f"```\n{tutorial.table(report)}\n```",
    "header": lambda report: f"```\n{table.header(report)}\n```",
}
PAIRS: dict[str, Callable[[Report, Report], str]] = {"both": markdown.both}


def filled(text: str, root: Path) -> str:
    """The page with every block drawn anew."""

    def draw(match: re.Match[str]) -> str:
        reports = [results.read(root / path) for path in match[2].split(",")]
        for report in reports if match[4] else ():
            report.rows = [row for row in report.rows if row.suite in match[4].split(",")]
        view: Callable[..., str] = (PAIRS if match[3] in PAIRS else VIEWS)[match[3]]
        return f"{match[1]}{view(*reports)}\n{match[5]}"

    return BLOCK.sub(draw, text)


def main(words: list[str]) -> int:
    """Rewrites the named pages; with --check, 1 if one differs from its reports."""
    check = "--check" in words
    stale = []
    for name in (word for word in words if word != "--check"):
        page = Path(name)
        before = page.read_text()
        after = filled(before, Path.cwd())
        if after != before:
            stale.append(name)
            if not check:
                page.write_text(after)
    print("\n".join(f"{'stale' if check else 'rewritten'}: {name}" for name in stale) or "nothing to do")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
