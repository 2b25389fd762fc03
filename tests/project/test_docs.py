"""Files, folders and links that documentation and docstrings name exist; the site leaves no page out."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from multigemm.bench import plots, reports
from multigemm.bench.workloads import geomean

ROOT = Path(__file__).parents[2]
FOLDERS = (".github", "backends", "benchmarks", "docs", "examples", "multigemm", "reference", "tests")
FILES = sorted(
    [x for x in ROOT.iterdir() if x.is_file()]
    + [x for folder in FOLDERS for x in (ROOT / folder).rglob("*") if x.is_file() and "__pycache__" not in x.parts]
)
PATHS = [f"/{x.relative_to(ROOT)}" for x in FILES]
PAGES = [x for x in FILES if x.suffix == ".md" and x.name != "CHANGELOG.md"]  # which tells of files that are gone
SOURCES = [x for x in FILES if x.suffix in {".py", ".cu", ".cuh"} and x != Path(__file__)]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"([\w.*/-]*\w\.(?:py|cuh?|md|json|toml|svg|yml))(?::\d+)?")
FOLDER = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/")
WRITTEN = {"multigemm-bench/", "report.md", "site/"}
"""What a command writes."""


def exists(path: str) -> bool:
    """Whether files of the repository end in a path, in which * stands for anything, or lie in it if it is a folder."""
    pattern = f"*/{path}*" if path.endswith("/") else f"*/{path}"
    return path in WRITTEN or any(fnmatch(known, pattern) for known in PATHS)


def paths_in(text: str) -> list[str]:
    """What looks like a file or a folder between backticks; of a line in a file, the file."""
    files = [found[1] for x in QUOTED.findall(text) if (found := FILE.fullmatch(x))]
    return files + [x for x in QUOTED.findall(text) if FOLDER.fullmatch(x)]


def test_a_file_that_is_gone_is_found() -> None:
    text = "`backends/*/support.py` `config.py:12` `docs/` `spec.k` `gone.py:3` `docs/gone/` `cupy/kernels/gone.cu`"
    assert [x for x in paths_in(text) if not exists(x)] == ["gone.py", "cupy/kernels/gone.cu", "docs/gone/"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_and_link_to_what_exists(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    links = [x.partition("#")[0] for x in LINK.findall(text) if "://" not in x]
    assert [x for x in links if x and not (page.parent / x).exists()] == []
    assert [x for x in paths_in(text) if not exists(x)] == []


def test_sources_name_what_exists() -> None:
    named = ((x, path) for x in SOURCES for path in paths_in(x.read_text()))
    assert [f"{x.relative_to(ROOT)}: {path}" for x, path in named if not exists(path)] == []


SITE = sorted((ROOT / "docs").rglob("*.md"))
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
NAVIGATION = re.findall(r"^ +- (?:[^:\n]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def test_the_navigation_holds_every_page_once() -> None:
    assert sorted(NAVIGATION) == sorted(str(page.relative_to(ROOT / "docs")) for page in SITE)


@pytest.mark.parametrize("page", SITE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_leads_on(page: Path) -> None:
    """Read on GitHub, where there is no navigation, it links to another page; the site has breadcrumbs and a menu."""
    links = [x.partition("#")[0] for x in LINK.findall(FENCE.sub("", page.read_text())) if "://" not in x]
    assert [x for x in links if x.endswith(".md") and (page.parent / x).resolve() != page]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown's `toc` and GitHub make them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_and_addresses_of_the_repository_exist(page: Path) -> None:
    links = LINK.findall(FENCE.sub("", page.read_text()))
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if anchor and "://" not in link and target.suffix == ".md":
            assert anchor in anchors(target), link
    ours = [x for x in links if x.startswith(URLS["Homepage"])]
    inside = [found[1] for x in ours if (found := re.fullmatch(r".*/(?:blob|tree)/main/([^#]+)", x))]
    assert [x for x in inside if not (ROOT / x).exists()] == []
    addresses = re.findall(r"https://[\w./-]*multigemm[\w./-]*", page.read_text())
    assert [x for x in addresses if not x.startswith((URLS["Homepage"], URLS["Documentation"].rstrip("/")))] == []


REPORT = ROOT / "benchmarks" / "results" / "h200" / "rested.json"


def test_the_chart_is_drawn_from_the_kept_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for drawn in plots.charts(reports.read(REPORT), tmp_path / "moe"):
        kept = ROOT / "docs" / "assets" / drawn.name
        words, marks = (
            [re.findall(what, x.read_text()) for x in (drawn, kept)] for what in (">([^<>]+)</text>", "<use ")
        )
        command = "multigemm bench render benchmarks/results/h200/rested.json --chart docs/assets/moe"
        assert words[0] == words[1] and "0.942" in words[0] and len(marks[0]) == len(marks[1]), f"run: {command}"


def test_the_numbers_of_the_readme_are_those_of_the_kept_files() -> None:
    text = (ROOT / "README.md").read_text()
    shares = {entry: geomean(values) for entry, values in plots.shares(reports.read(REPORT), "moe").items()}
    host = json.loads((ROOT / "benchmarks" / "results" / "h200" / "host-time.json").read_text())["us"]
    ours, peers = ("cupy", "triton", "numba"), ("quack", "triton_kernels", "deep_gemm", "torch_grouped")
    device_row = [f"{shares[entry]:.3f}" for entry in (*ours, *peers)]
    torch_times = sorted(times["torch"] for times in host.values())
    host_row = [f"{host[entry]['offsets']:.1f}" for entry in ours]
    assert f"| {' | '.join(device_row)} |" in text
    assert f"| {' | '.join(host_row)} | | | | {torch_times[0]:.1f} to {torch_times[-1]:.1f} |" in text
    names = {
        "cupy": "**multigemm**",
        "quack": "QuACK",
        "triton_kernels": "triton_kernels",
        "deep_gemm": "DeepGEMM",
        "torch_grouped": "torch `grouped_mm`",
    }
    for entry, name in names.items():
        assert re.search(rf"^\| {re.escape(name)} \|.* {shares[entry]:.3f} \|$", text, re.MULTILINE), entry
    picture = text[text.index("<picture>") : text.index("</picture>")]
    assert [entry for entry in (*ours, *peers) if f"{shares[entry]:.3f}" not in picture] == [], "the picture's text"


def test_make_docs_installs_what_the_extra_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [requirement.partition(">=")[0] for requirement in project["optional-dependencies"]["docs"]]
    assert f"-c constraints.txt {' '.join(named)}\n" in (ROOT / "Makefile").read_text()
    pinned = (ROOT / "constraints.txt").read_text().lower()
    assert all(f"\n{name}==" in pinned for name in named)


def test_the_site_asks_no_other_host() -> None:
    """The build fetches nothing, and neither does a reader's browser."""
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert "strict: true" in settings
    assert "repo_url" not in settings, "the theme would ask api.github.com for stars"
    addresses = re.findall(r"https?://[^\s\"'}]+", settings)
    assert addresses == [URLS["Documentation"], URLS["Homepage"]], "a link in the footer"
    for asset in (ROOT / "docs" / "assets").rglob("*.*"):
        assert "http" not in asset.read_text().replace("http://www.w3.org/2000/svg", ""), asset


def test_the_page_of_quantised_operands_names_the_backends_that_take_them() -> None:
    """Of each built-in backend, by what its `support.py` tells `quantised_reasons`."""
    rows = re.findall(
        r"^\| (`[^|]+) \| (.+) \|$", (ROOT / "docs/how-to/quantised-operands.md").read_text(), re.MULTILINE
    )
    told = {name: not text.startswith("refused") for names, text in rows[:8] for name in re.findall(r"`(\w+)`", names)}
    for name in ("cpu", "cublas", "cupy", "numba", "triton"):
        source = (ROOT / "backends" / name / "support.py").read_text()
        assert told[name] == ("quantised_reasons(spec, takes=" in source), name
