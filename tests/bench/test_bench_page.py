"""The HTML report in a real browser: no console errors, no requests, and filters that filter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from multigemm.bench import page
from multigemm.bench.results import Report
from multigemm.bench.workloads import geomean
from tests.support.bench_reports import made_up_report
from tests.support.browser import Browser, find

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def report() -> Report:
    return made_up_report()


@pytest.fixture(scope="module")
def written(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page.write(report, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = find()
    if executable is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with Browser(executable) as opened:
        yield opened


def count(browser: Browser) -> int:
    found = browser.js("document.querySelectorAll('#table tbody tr').length")
    assert isinstance(found, int)
    return found


def press(browser: Browser, field: str, value: str) -> None:
    browser.js(f"document.querySelector('[data-field={field}] [data-value=\"{value}\"]').click()")


@pytest.mark.parametrize("size", SIZES)
def test_the_page_opens_quietly_and_fits(browser: Browser, written: Path, report: Report, size: str) -> None:
    browser.open(written, *SIZES[size])
    assert count(browser) == len(report.cases())
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in browser.requests if url.startswith("file:")]) == 1
    assert browser.js("document.documentElement.scrollWidth") <= SIZES[size][0]
    entries = {r.entry for r in report.rows if r.kind != "ceiling"}
    assert browser.js("document.querySelectorAll('#bars .bar').length") == len(entries)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("field", ["suite", "dtype", "distribution"])
def test_a_filter_shows_what_was_chosen_and_everything_again(
    browser: Browser, written: Path, report: Report, size: str, field: str
) -> None:
    browser.open(written, *SIZES[size])
    values = list(dict.fromkeys(getattr(row, field) for row in report.rows))

    def shown(*chosen: str) -> int:
        return len({r.case for r in report.rows if getattr(r, field) in chosen})

    press(browser, field, values[0])
    assert count(browser) == shown(values[0])
    press(browser, field, values[1])
    assert count(browser) == shown(*values[:2])
    if len(values) > 2:  # of two, both are all, from which a click shows one alone
        press(browser, field, values[0])
        assert count(browser) == shown(values[1])
        press(browser, field, values[1])
    assert count(browser) == len(report.cases())
    assert browser.errors == []


def test_entries_can_be_chosen_and_reset(browser: Browser, written: Path) -> None:
    browser.open(written, *SIZES["desktop"])
    heads = "[...document.querySelectorAll('#table th')].map(h => h.textContent)"
    before = browser.js(heads)
    press(browser, "entry", "triton")
    assert browser.js(heads) == [*before[:2], "triton"]
    assert "cupy" not in browser.js("document.getElementById('bars').textContent")
    press(browser, "entry", "torch_grouped")
    assert browser.js(heads) == [head for head in before if head in (*before[:2], "triton", "torch_grouped")]
    browser.js("document.getElementById('reset').click()")
    assert browser.js(heads) == before


def test_standings_are_those_of_the_report(browser: Browser, written: Path, report: Report) -> None:
    browser.open(written, *SIZES["desktop"])
    rows = [r for r in report.timed() if r.kind != "ceiling" and not r.entry.startswith("auto")]
    best = {case: min(r.us or 0.0 for r in rows if r.case == case) for case in report.cases()}
    mine = [r for r in rows if r.entry == "cupy"]
    value = geomean(best[r.case] / (r.us or 1.0) for r in mine)
    won = sum(r.us == best[r.case] for r in mine)
    line = "[...document.querySelectorAll('#bars .bar')].find(b => b.textContent.startsWith('cupy')).textContent"
    assert f"won {won} · ran {len(mine)} of {len(report.cases())}" in browser.js(line)
    assert browser.js(line).endswith(f"{value:.3f}")
    browser.js("document.getElementById('by').value = 'distribution'")
    browser.js("document.getElementById('by').dispatchEvent(new Event('change'))")
    kinds = browser.js("[...document.querySelectorAll('#matrix tbody tr')].map(r => r.cells[0].textContent)")
    assert kinds == list(dict.fromkeys(r.distribution for r in report.rows))


def test_the_choices_of_auto_are_judged(browser: Browser, written: Path, tmp_path: Path) -> None:
    browser.open(written, *SIZES["desktop"])
    assert browser.js("document.getElementById('auto-section').hidden")
    report = made_up_report()
    best = {case: min(r.us or 0.0 for r in report.timed() if r.case == case and r.kind == "backend")
            for case in report.cases()}  # fmt: skip
    mine = [r for r in report.timed() if r.entry == "cupy"]
    report.rows += [replace(r, entry="auto", us=best[r.case] * (1.2 if r is mine[3] else 1.0)) for r in mine]
    browser.open(page.write(report, tmp_path / "auto.html"), *SIZES["phone"])
    text = browser.js("document.getElementById('auto').textContent")
    assert text.startswith(f"{len(mine)} choices, ")
    assert "more than 3 % behind: 1, more than 10 %: 1." in text
    assert browser.js("document.querySelector('#auto .duel').textContent").endswith("0.83")
    assert browser.errors == []


def test_all_duels_are_shown_when_asked(browser: Browser, written: Path, report: Report) -> None:
    browser.open(written, *SIZES["phone"])
    lines = "document.querySelectorAll('#duel .duel').length"
    few = browser.js(lines)
    browser.js("document.querySelector('#duel .more').click()")
    assert few < browser.js(lines) <= len(report.cases())


def test_the_table_sorts_by_a_clicked_heading_both_ways(browser: Browser, written: Path) -> None:
    browser.open(written, *SIZES["desktop"])
    column = "[...document.querySelectorAll('#table tbody tr')].map(r => parseFloat(r.cells[1].textContent))"
    click = "document.querySelectorAll('#table th button')[1].click()"
    browser.js(click)
    up = browser.js(column)
    browser.js(click)
    assert up == sorted(up)
    assert browser.js(column) == up[::-1]
    assert up != up[::-1]


def test_losses_are_shown_as_well_as_wins(browser: Browser, written: Path) -> None:
    browser.open(written, *SIZES["desktop"])
    assert browser.js("document.querySelectorAll('#duel .value.loss').length") > 0
    assert browser.js("document.querySelectorAll('#duel .value.win').length") > 0


def test_reasons_method_and_details_are_told(browser: Browser, written: Path) -> None:
    browser.open(written, *SIZES["phone"])
    assert "K % 8" in browser.js("document.getElementById('reasons').textContent")
    assert "not installed" in browser.js("document.getElementById('reasons').textContent")
    assert "checked against a float32 reference" in browser.js("document.getElementById('method').textContent")
    browser.js("document.querySelector('#table tbody tr').click()")
    assert "samples" in browser.js("document.getElementById('detail').textContent")


def test_text_from_a_report_cannot_become_markup(browser: Browser, tmp_path: Path) -> None:
    report = made_up_report()
    report.rows[0].reason = report.rows[0].case = "</script><script>console.error('taken over')</script><b>x"
    report.rows[0].us = None
    browser.open(page.write(report, tmp_path / "hostile.html"), *SIZES["desktop"])
    assert browser.errors == []
    assert browser.js("document.querySelectorAll('main b').length") == 0
