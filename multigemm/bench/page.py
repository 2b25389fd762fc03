"""One HTML file that shows a report: no network, no server, no build step.

The report travels inside the page as JSON, and a content security policy forbids every request, so
that the file can be mailed, archived and opened offline on a phone.
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from string import Template

from multigemm.bench.results import Report


def render(report: Report) -> str:
    """The whole page as text."""
    parts = files("multigemm.bench")
    whole = asdict(report)
    whole["rows"] = [{k: v for k, v in row.items() if v is not None} for row in whole["rows"]]
    data = json.dumps(whole, allow_nan=False).replace("<", "\\u003c")
    title = html.escape(f"{report.machine.get('device', '')}, {str(report.machine.get('date', ''))[:10]}")
    return Template(parts.joinpath("page.html").read_text()).substitute(
        title=title, css=parts.joinpath("page.css").read_text(), js=parts.joinpath("page.js").read_text(), data=data
    )


def write(report: Report, path: Path) -> Path:
    path.write_text(render(report))
    return path
