"""Faults planted in the real kernels' sources: how they are made, and that the oracles see them in emulation."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigemm.backends import registry
from multigemm.settings import settings
from multigemm.testing.case import Case, Fused, Layout, RowNumbers, Scale
from multigemm.testing.placed_case import spec_of
from tests.source_mutants import __main__ as command
from tests.source_mutants import compiled, emulated, hunt, mutations, problems
from tests.source_mutants.compiled import Variant
from tests.source_mutants.equivalents import EQUIVALENT, ON_GPU, becomes, excuse
from tests.source_mutants.hunt import Hunt, Result, Verdict
from tests.source_mutants.mutations import Mutation, mutations_of
from tests.source_mutants.variants import compile_variant, various
from tests.source_mutants.variants import reached as reached_variants

PATIENCE_S = 240.0
"""What a hunt for a planted fault may take: 16 s on an idle machine, many times that on a busy one."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Any:
    return mutations.snapshot(tmp_path_factory.mktemp("snapshot"))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--backend", "cupy", "--emulate"], "--emulate runs triton and numba, not cupy"),
        (["--backend", "cupy"], "--device cpu: the kernels run on a GPU"),
        (["--backend", "triton", "--device", "cuda:99"], "--device cuda:99, but there are"),
        (["--backend", "triton", "--device", "abacus"], "'abacus' is not a device"),
    ],
)  # fmt: skip
def test_a_campaign_where_nothing_could_run_is_refused(
    words: list[str], match: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that all mutants survive, or that all of none were killed."""
    monkeypatch.setenv("MULTIGEMM_EMULATE", "")
    with pytest.raises(SystemExit) as done:
        command.main(words)
    assert done.value.code == 2
    assert match in capsys.readouterr().err


DEVICE_CODE = {
    "triton": ("@triton.jit", "@gluon.jit"),
    "cupy": ("__device__",),
    "numba": ("@device", "@kernel", "@synchronising"),
}


@pytest.mark.parametrize("backend", sorted(mutations.FILES))
def test_no_file_of_device_code_is_left_out(backend: str) -> None:
    suffixes = (".cu", ".cuh") if backend == "cupy" else (".py",)
    files = [path for path in (mutations.ROOT / "backends" / backend).rglob("*") if path.suffix in suffixes]
    marked = {path.name for path in files if any(mark in path.read_text() for mark in DEVICE_CODE[backend])}
    hardware = {"ptx.py", "runtime.py"}  # one instruction each, as text
    assert marked - hardware <= set(mutations.kernels_by_file(backend))


def test_a_header_is_part_of_what_includes_it() -> None:
    reached = mutations.kernels_by_file("cupy")
    assert set(reached["common.cuh"]) >= {"generic", "hopper", "hopper_shift_b", "small"}
    assert reached["pack.cu"] == ("packed", "hopper_shift_b") and reached["tile_load.cuh"] == ("generic", "quantised")


@pytest.mark.parametrize("backend", sorted(mutations.FILES))
def test_operators_find_places_in_every_backend(backend: str) -> None:
    found = mutations_of(backend)
    assert len(found) > 50
    assert len({mutation.operator for mutation in found}) >= 8
    assert all(mutation.before != mutation.after for mutation in found)


def test_comments_docstrings_and_signatures_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    head = '"""a < b"""\n# a < b\ndef f(a, b):\n    """\n    a < b\n    """\n'
    file.write_text(head + "    return a < b  # a < b\ndef g(a):\n    return a < 1\n")
    assert list(mutations.code_lines(file)) == [(7, "    return a < b"), (9, "    return a < 1")]
    assert [number for number, _ in mutations.code_lines(file, ("g",))] == [7]


def test_no_fault_is_planted_where_an_emulator_never_comes() -> None:
    """What Gluon compiles runs on a GPU only, also beside kernels that are emulated."""
    found = [mutation for mutation in mutations_of("triton", emulated=True) if mutation.file.endswith("lists.py")]
    every = [mutation for mutation in mutations_of("triton") if mutation.file.endswith("lists.py")]
    lines = (mutations.ROOT / "backends/triton/kernels/lists.py").read_text().splitlines()
    first = next(i for i, line in enumerate(lines, 1) if line.startswith("@gluon"))
    assert found == [x for x in every if x.line < first]
    assert 0 < len(found) < len(every)


def test_one_line_is_changed(root: Path, tmp_path: Path) -> None:
    mutation = next(s for s in mutations_of("triton", root) if s.operator == "wider comparison")
    mutations.plant(mutation, tmp_path, root)
    before = (root / mutation.file).read_text().splitlines()
    after = (tmp_path / Path(mutation.file).relative_to("backends")).read_text().splitlines()
    assert [i + 1 for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y] == [mutation.line]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "cupy"])
def test_what_a_variant_is_compiled_to_is_known_without_a_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba's compiler takes several times as long, and is left out."""
    pytest.importorskip(backend)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace())
    case = Case(form="jagged_m", dtype="float32", n=5, k=4, lengths=(3, 2))
    device, spec = torch.device("cuda", 0), spec_of(case)
    config = registry.get(backend).configs(spec, device)[0]
    assert compiled.traits(backend, case, spec, config)
    variant = compile_variant(backend, Variant(case.to_dict(), config.kernel, str(config)), device)
    assert len(variant.codes) >= 1
    held = {file: lines for file, lines in variant.lines.items() if file in mutations.kernels_by_file(backend)}
    assert len(held) >= 2 and all(len(lines) > 5 for lines in held.values())


ROWS = Case(dtype="float32", n=5, k=37, lengths=(17, 0, 3))
"""K and rows end within a tile."""
PICKED = replace(ROWS, fused=Fused(a_rows=RowNumbers(rows=9, how="lies"), preact=True), activation="relu")
SCALED = Case(dtype="float8_e4m3fn", dtype_b="float8_e4m3fn", n=3, k=300, lengths=(2, 1), mode="uniform",
              b=Layout("col"), scale_a=Scale("1x128", layout=Layout("col")), scale_b=Scale("1x128"))  # fmt: skip
LOST_STRIDE = "at = (i >> line_shift_a) * line_a + (k0 >> k_shift_a)"
CHOSEN = {
    "the K mask of A": ("triton", "generic.py", "mask conjunct lost", "in_a = ", ROWS),
    "the mask of the stored rows": ("triton", "generic.py", "wider comparison", "owned = (i <= rows_left)", ROWS),
    "the last step of K": ("triton", "generic.py", "rounded down", "(gk) // BK", ROWS),
    "the K mask of A, fused": ("triton", "generic.py", "mask conjunct lost", "in_a = ", PICKED),
    "the last step of K, fused": ("triton", "generic.py", "rounded down", "(gk) // BK", PICKED),
    "the row behind the last that may be picked": ("triton", "generic.py", "wider comparison", "<= extent", PICKED),
    "the last row that a group owns": ("triton", "sum_rows.py", "wider comparison", "s <= high", PICKED),
    "a stride of scales along K": ("numba", "plain_cores.py", "product lost", LOST_STRIDE, SCALED),
}
"""Backend, file, operator, a part of the changed line, and a problem that reaches it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_planted_faults_are_seen(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lost stride of scales survived where K was one block, or scales along K lay side by side."""
    backend, file, operator, line, case = CHOSEN[name]
    if find_spec(backend) is None:  # imported here, it would run without an emulator in the tests that follow
        pytest.skip(f"{backend} is not installed")
    monkeypatch.setenv("MULTIGEMM_EMULATE", "1")
    offered = [x for x in mutations_of(backend, root, emulated=True) if Path(x.file).name == file and line in x.after]
    offered = [x for x in offered if x.operator == operator]
    if operator == "mask conjunct lost":
        offered = [x for x in offered if "k_left" in x.before and "k_left" not in x.after]
    assert offered, "the kernel has no such place any more: choose another"
    reaching = [Variant(case.to_dict(), "emulated", "0")]
    fate = hunt.run_one(offered[0], Hunt(backend, seconds=PATIENCE_S), root, reaching)
    assert fate.state == "killed", fate


@pytest.mark.parametrize("name", ["triton", "numba"])
def test_problems_that_reach_a_line_are_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGEMM_EMULATE", "1")
    settings.cache_clear()
    if not registry.get(name).availability().ok:
        pytest.skip(registry.get(name).availability().reason)
    simple = [Case(form=form, n=5, k=4, lengths=(3, 2), m=4) for form in ("jagged_m", "jagged_n")]
    offered = [Variant(case.to_dict(), "emulated", "0") for case in simple]
    traced = emulated.trace(name, offered, torch.device("cpu"))
    file, start = {"triton": ("generic.py", 'elif FORM == "jagged_n":'), "numba": ("plain_cores.py", "acc")}[name]
    text = (mutations.device_code(name) / file).read_text().splitlines()
    reached = {line for variant in traced for line in variant.lines.get(file, ())}
    assert len(reached) > 20 and all(text[line - 1].strip() for line in reached)
    if name == "triton":  # which form takes a branch is known
        branch = next(i for i, line in enumerate(text, 1) if i - 1 in reached and start in line) + 1
        assert [v.case["form"] for v in emulated.reaching(traced, file, branch)] == ["jagged_n"]


def test_hunts_go_on_with_problems_like_those_that_reach_the_line() -> None:
    list_of = Variant(Case(form="per_group", dims=((3, 4, 5),)).to_dict(), "emulated", "3")
    kernels = mutations.kernels_by_file("triton")["generic.py"]
    drawn = [emulated.problem("triton", kernels, [list_of], number) for number in range(1, 40)]
    assert emulated.problem("triton", kernels, [list_of], 0) == (Case(form="per_group", dims=((3, 4, 5),)), 3)
    assert sum(case.form == "per_group" for case, _ in drawn) >= 20
    assert {emulated.UNLISTED, emulated.SHARED} <= {chosen for _, chosen in drawn}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["fused", "quantised"])
def test_a_kernel_of_some_problems_meets_those(kernel: str) -> None:
    """Faults in the kernel of fused products survived whatever was planted, for no problem of the hunt reached it."""
    drawn = [emulated.problem("triton", (kernel,), [], number) for number in range(40)]
    assert all(kernel in emulated.kernels_meeting(case) for case, _ in drawn)
    fused = [each for each in emulated.pool_of("triton", ("fused", "pointer")) if each[0].is_fused]
    assert len(fused) == emulated.FUSED and not any(case.is_fused for case, _ in emulated.pool("numba"))


def test_the_kernel_that_sums_rows_is_hunted_in_emulation_only() -> None:
    files = {on: {Path(s.file).name for s in mutations_of("triton", emulated=on)} for on in (True, False)}
    assert "sum_rows.py" in files[True] and "sum_rows.py" not in files[False]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["epilogue.py", "generic.py"])
def test_the_unchanged_kernel_survives(file: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGEMM_EMULATE", "1")
    mutation = next(s for s in mutations_of("triton", root, emulated=True) if Path(s.file).name == file)
    reaching = [Variant(case.to_dict(), "emulated", "0") for case in (ROWS, PICKED)]
    fate = hunt.run_one(replace(mutation, after=mutation.before), Hunt("triton", seconds=1.2), root, reaching)
    assert fate.state == "survived", fate


def test_the_rate_leaves_out_what_does_not_compile() -> None:
    mutation = Mutation("f", 1, "o", "a", "b")
    results = [Result(mutation, Verdict(state)) for state in ("killed", "killed", "killed", "survived", "stillborn")]
    assert command.summary("triton", results) == "triton: 3 of 4 killed (75 %), 0 are equivalent, 1 did not compile"


def test_survivors_are_excused_only_with_a_reason() -> None:
    before, after = (f"    end = tl.load(ends + g, mask=ok, other={value}).to(tl.int64)" for value in (0, 1))
    assert "not counted" in excuse(Mutation("triton/schedule.py", 1, "zero for one", before, after))
    assert not excuse(Mutation("triton/generic.py", 1, "zero for one", before, after))
    assert not excuse(Mutation("triton/schedule.py", 1, "zero for one", before, after + " + 1"))


@pytest.mark.slow
def test_an_excuse_speaks_of_a_place_that_there_is() -> None:
    offered = [mutation for backend in mutations.FILES for mutation in mutations_of(backend)]
    excused = {(Path(mutation.file).name, excuse(mutation)) for mutation in offered}
    assert {(file, reason) for file, _, _, reason in (*EQUIVALENT, *ON_GPU)} <= excused
    idle = [
        entry[:3] for entry in (*EQUIVALENT, *ON_GPU) if not any(speaks_of(entry, mutation) for mutation in offered)
    ]
    assert not idle, idle


def speaks_of(entry: tuple[str, str, str, str], mutation: Mutation) -> bool:
    return entry[0] == Path(mutation.file).name and becomes(mutation, entry[1], entry[2])


def test_results_are_kept_as_they_come(tmp_path: Path) -> None:
    results = [Result(Mutation("f", line, "o", "a", "b"), Verdict(state)) for line, state in
               ((1, "killed"), (2, "survived"), (3, "stillborn"), (4, "failed"))]  # fmt: skip
    command.write(results, str(tmp_path / "results.json"), {"backend": "triton"})
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["rate"] == 0.5 and kept["fates"][0]["verdict"]["state"] == "survived"


def test_the_unchanged_kernels_are_hunted_among_their_mutants() -> None:
    mutation = Mutation("f", 1, "o", "a", "b")
    hunted = list(command.with_controls([replace(mutation, line=line) for line in range(60)]))
    controls = [at for at, each in enumerate(hunted) if each.operator == command.UNCHANGED]
    assert controls == [0, 26, 52] and all(hunted[at].after == "a" for at in controls) and len(hunted) == 63


def test_a_hang_is_tried_once_more(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = Verdict("killed", "hang")
    answers = [hangs, Verdict("survived")]
    monkeypatch.setattr(hunt, "_attempt", lambda *asked: answers.pop(0))
    mutation = mutations_of("triton", root)[0]
    assert hunt.run_one(replace(mutation, after=mutation.before + " "), Hunt("triton"), root).state == "survived"
    answers += [hangs, hangs]
    assert hunt.run_one(mutation, Hunt("triton"), root).verdict == hangs


class _Compiled:
    """In place of a run on a GPU: `variant.case` says what is compiled and what a burst finds."""

    def __init__(self, hunt: Hunt, variant: Variant, place: Any) -> None:
        self.case = variant.case

    def codes(self) -> list[str] | None:
        return [self.case["code"]] if self.case["code"] else None

    def compiles(self) -> bool:
        return True

    def run_burst(self, first: int, say: Any) -> tuple[int, Verdict | None]:
        return 1, Verdict("killed", "value") if self.case.get("dies") else None


def hunted(monkeypatch: pytest.MonkeyPatch, *cases: dict[str, Any]) -> tuple[Verdict, int]:
    """What a hunt finds, and how often it opened the device."""
    opened: list[Any] = []
    monkeypatch.setattr(hunt, "CompiledVariant", _Compiled)
    monkeypatch.setattr(hunt.GpuHunt, "open_device", lambda search: opened.append(search))
    search = hunt.GpuHunt(Hunt("triton", "cuda", 0.05), torch.device("cuda"), lambda word: None)
    return search.search([Variant(case, "pointer", "", codes=["old"]) for case in cases]), len(opened)


def test_only_variants_whose_machine_code_changes_meet_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, broken = {"code": "old", "dies": True}, {"code": "new"}, {"code": ""}
    said, opened = hunted(monkeypatch, old, old)
    assert said.state == "same" and not opened
    said, opened = hunted(monkeypatch, old, new, new)
    assert said.state == "survived" and "2 variants, 1 others are the same" in said.text and opened == 1
    assert hunted(monkeypatch, old, new | {"dies": True})[0].state == "killed"
    said, opened = hunted(monkeypatch, old, broken)
    assert said.state == "stillborn" and not opened


def test_the_sample_outlives_edits_elsewhere() -> None:
    found = [Mutation("f", line, "o", f"    a{line}", "x") for line in range(40)]
    moved = [replace(mutation, line=mutation.line + 1) for mutation in found[:30]] + found[30:]
    drawn = [[mutation.before for mutation in command.sample(each, 3)] for each in (found, moved[1:])]
    assert [each for each in drawn[0] if each != found[0].before] == drawn[1] != sorted(drawn[1])
    assert [mutation.before for mutation in command.sample(found, 4)] != drawn[0]


def test_problems_of_variants_that_hold_the_line_come_first() -> None:
    mutation = Mutation("backends/triton/hopper_shift_b.py", 7, "o", "a", "b")
    lines: tuple[list[int], ...] = ([1], [7], [], [5, 7])
    variants = [Variant({}, "hopper", str(at), {"hopper_shift_b.py": held}) for at, held in enumerate(lines)]
    assert {v.config for v in reached_variants(mutation, "triton", variants)[:2]} == {"1", "3"}


def test_the_first_variants_show_every_form() -> None:
    """A line may be without effect in some forms: six variants of one form once left a change alive."""
    forms = ("jagged_m", "jagged_n", "batched", "per_group", "masked", "jagged_k")
    layouts = [{"order": order, "pad": pad} for order in ("row", "col") for pad in (0, 8)]
    cases = [{"form": form, "dtype": dtype, "a": a, "b": b} for form in forms for dtype in ("float16", "float32")
             for a in layouts for b in layouts]  # fmt: skip
    found = various([Variant(case, "hopper", "") for case in cases])
    assert {v.case["form"] for v in found[:6]} == set(forms) and len(found) == len(cases)
    assert {v.case["dtype"] for v in found[:2]} == {"float16", "float32"}


def test_bursts_differ_in_more_than_their_numbers() -> None:
    """Each variant meets lists that the host does and does not list, and each burst all classes of numbers."""
    for count in range(1, hunt.VARIANTS + 1):
        modes = {(burst % count, hunt.listing_of(burst * problems.SPAN)) for burst in range(36)}
        assert len(modes) == 2 * count
    first = [hunt.shuffled(burst * problems.SPAN) for burst in range(40)]
    assert all(sorted(numbers) == list(range(numbers[0], numbers[0] + problems.SPAN)) for numbers in first)
    assert {number % 16 for numbers in first[:12] for number in numbers[: 2 * hunt.BURST]} == set(range(16))


def test_the_wheel_does_not_know_the_hunt() -> None:
    files = [
        path for folder in ("multigemm", "backends", "reference") for path in (mutations.ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 100
    assert not [path for path in files if "tests.source_mutants" in path.read_text()]
