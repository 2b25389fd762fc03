"""The HTML report: what it says, that nothing in it can run or ask for anything, and that it opens and sorts."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from multigemm.bench import page, table
from multigemm.bench.reports import Report, digits, duels
from tests.support.bench_reports import made_up_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
PROBE = """<pre id="probe"></pre><script>
const said = (...words) => { document.getElementById("probe").append(words.join(" ") + "\\n"); };
window.addEventListener("error", (event) => said("error", event.message));
document.addEventListener("securitypolicyviolation", (event) => said("error", event.violatedDirective));
const table = document.querySelector("details[open] table"), head = table.tHead.rows[0].cells[1];
const column = () => [...table.tBodies[0].rows].map((row) => row.cells[1].textContent).join(" ");
said("width", document.documentElement.scrollWidth, innerWidth);
head.click(); said("up", column());
head.click(); said("down", column());
said("requests", performance.getEntriesByType("resource").filter((e) => !e.name.startsWith("data:")).length);
said("background", getComputedStyle(table.tHead.rows[0].cells[0]).backgroundColor);
</script>"""


@pytest.fixture(scope="module")
def report() -> Report:
    return made_up_report()


def text_of(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "\n", html))


def test_every_time_reason_and_verdict_is_in_the_page(report: Report) -> None:
    told = text_of(page.render(report)).split("\n")
    for row in report.timed():
        assert digits(row.us or 0) in told and row.case in told
    found = duels(report)
    assert {duel.won for duel in found} == {True, False}
    assert table.won_and_lost(report) in told
    assert all(digits(duel.ratio) in told for duel in found)
    assert any("K % 8" in line for line in told) and any("not installed" in line for line in told)
    assert any("checked against a float32 reference" in line for line in told)
    assert all(any(line.startswith(f"{part}: ") for line in told) for part in ("moe, bf16", "small, bf16", "l2, fp16"))


def test_the_choices_of_auto_are_judged(report: Report) -> None:
    assert 'id="auto"' not in page.render(report)
    mine = [row for row in report.timed() if row.entry == "cupy"]
    rows = [replace(row, entry="auto", us=(row.us or 0) * (1.2 if row is mine[3] else 0.5)) for row in mine]
    told = text_of(page.render(replace(report, rows=[*report.rows, *rows])))
    assert f"of {len(mine)} choices 1 are above 1.03" in told


def test_text_from_a_report_is_no_markup() -> None:
    report = made_up_report()
    report.rows[0].reason = report.rows[0].case = hostile = "</script><script>alert(1)</script><b>x"
    report.rows[0].us = None
    html = page.render(report)
    assert html.count("<script") == 1 and "<b>x" not in html and hostile in text_of(html)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 520])
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser_it_fits_sorts_and_asks_for_nothing(
    report: Report, width: int, dark: bool, tmp_path: Path
) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    path = tmp_path / "report.html"
    path.write_text(page.render(report).replace("</body>", f"{PROBE}</body>"))
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--window-size={width},900"]
    words += [f"--user-data-dir={tmp_path}/profile", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
    done = subprocess.run([browser, *words, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    lines = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert lines is not None, done.stderr[-2000:]
    said = dict(line.split(" ", 1) for line in lines[1].strip().splitlines())
    assert "error" not in said and said["requests"] == "0"
    needed, shown = map(int, said["width"].split())
    assert needed <= shown
    up, down = ([float(cell) for cell in said[way].split()] for way in ("up", "down"))
    assert up == sorted(up) and down == sorted(up, reverse=True) and up != down
    bright = sum(int(part) for part in re.findall(r"\d+", said["background"])[:3]) > 382
    assert bright != dark
