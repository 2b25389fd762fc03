"""The HTML report in a real browser: no console errors, no requests, and filters that filter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from multigemm.bench import page
from multigemm.bench.results import Report
from tests.bench_reports import made_up_report
from tests.browser import Browser, find

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
    assert browser.js("document.querySelectorAll('#bars .bar').length") == len({r.entry for r in report.rows})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("field", ["suite", "dtype", "distribution"])
def test_a_filter_hides_its_rows_and_brings_them_back(
    browser: Browser, written: Path, report: Report, size: str, field: str
) -> None:
    browser.open(written, *SIZES[size])
    value = getattr(report.rows[0], field)
    press(browser, field, value)
    assert count(browser) == len({r.case for r in report.rows if getattr(r, field) != value})
    press(browser, field, value)
    assert count(browser) == len(report.cases())
    assert browser.errors == []


def test_an_entry_can_be_hidden(browser: Browser, written: Path) -> None:
    browser.open(written, *SIZES["desktop"])
    heads = "[...document.querySelectorAll('#table th')].map(h => h.textContent)"
    before = browser.js(heads)
    press(browser, "entry", "triton")
    assert browser.js(heads) == [head for head in before if head != "triton"]
    assert "triton" not in browser.js("document.getElementById('bars').textContent")


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
