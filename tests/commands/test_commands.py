"""The command line as a user meets it: output, exit codes, one clear line for an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.__main__ import COMMANDS, main
from multigemm.api import BackendInfo
from multigemm.select import table as tuning
from multigemm.select.table import SCHEMA, Entry, Measured

HERE = str(Path(__file__).parent)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    assert f"multigemm {name}" in capsys.readouterr().out


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert {b["name"] for b in state["backends"]} >= {"cpu", "null", "triton", "cupy", "numba", "cublas"}
    assert main(["info"]) == 0
    assert "MULTIGEMM_EMULATE" in capsys.readouterr().out


def test_info_tells_missing_from_unusable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is installed and finds no GPU is not missing."""
    backends = [
        BackendInfo("gone", False, "", "the package gone is not installed", "pip install gone", False),
        BackendInfo("idle", False, "", "installed, but torch sees no CUDA GPU", "", False),
    ]
    monkeypatch.setattr("multigemm.commands.info.list_backends", lambda: backends)
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  gone     missing   the package gone is not installed  [pip install gone]" in lines
    assert "  idle     unusable  installed, but torch sees no CUDA GPU" in lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("name", ["cupy", "triton", "numba"])
def test_what_is_installed_is_not_reported_as_missing(name: str) -> None:
    with pytest.raises(mg.BackendUnavailable, match="installed, but torch sees no CUDA GPU"):
        mg.grouped_gemm(torch.ones(1, 2), torch.ones(1, 2, 2), sizes=[1], backend=name)


SHAPES = {
    "jagged_m": "sizes=4+0+9,N=24,K=16",
    "jagged_n": "form=jagged_n,sizes=4+0+9,M=8,K=16",
    "jagged_k": "form=jagged_k,sizes=4+0+9,M=8,N=24",
    "batched": "form=batched,G=3,M=9,N=24,K=16",
    "masked": "form=masked,sizes=4+0+9,M=16,N=24,K=16",
    "per_group": "4x24x16+0x24x16+9x24x16",
}


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "tf32"])
def test_explain(form: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--shape", SHAPES[form], "--dtype", dtype, "--device", "cpu"]) == 0
    words, _, table, *lines = capsys.readouterr().out.splitlines()
    assert "cpu runs them, with the kernel" in words and "because: the only one that can" in words
    assert table.startswith(f"{form}: 3 groups") and "None" not in table
    assert lines[-1].startswith("chosen: cpu")


def test_explain_takes_several_dtypes_and_an_activation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--dtypes", "bf16,fp32", "--activation", "relu", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert told.count("4 groups") == told.count("ieee+epilogue") == 2 and "torch.float32" in told


def test_explain_says_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--backend", "cublas"]) == 1
    told = capsys.readouterr().out
    assert "No backend that was asked for runs them here." in told and "cublas" in told


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["explain", "--shape", "sizes=x,N=8,K=8"], "cannot be read"),
        (["explain", "--shape", "sizes=3+-1,N=8,K=8"], "a size is -1: 0 or more"),
        (["explain", "--shape", "sizes=3+1,T=9,N=8,K=8"], "T beside sizes"),
        (["explain", "--shape", "form=batched,sizes=3+1,M=3,N=8,K=8"], "batched has no T"),
        (["explain", "--shape", "sizes=99999999999999,N=8,K=8"], "cannot be made on cpu: "),
        (["explain", "--shape", "sizes=3,N=8,K=99999999999999999999"], "cannot be made on cpu: "),
        (["explain", "--activation", "nope"], "'nope'"),
        (["explain", "--dtypes", "quint8"], "--dtypes 'quint8'"),
        (["explain", "--device", "mps"], "--device 'mps'"),
        (["explain", "--device", "cuda:99"], "CUDA devices here"),
        (["cache", "export", "no-such-folder/x.json"], "no-such-folder"),
        (["cache", "export", "."], "directory"),
        (["explain", "--shape", "1,2"], "cannot be read"),
        (["explain", "--shape", "2,4,8,8", "--dtype", "half9"], "--dtypes 'half9'"),
        (["explain", "--shape", "4,64,256,256000000000"], "cannot be made on cpu: "),
        (["explain", "--device", "nowhere"], "--device 'nowhere'"),
        (["explain", "--device", "cpu:3"], "--device 'cpu:3'"),
        (["explain", "--backend", "cpuu"], "did you mean 'cpu'"),
        (["cache", "export"], "needs a file"),
        (["cache", "import", "no-such-file.json"], "cannot be read as an exported cache"),
        (["cache", "clear", "--what", "nothing-like-it"], "the cache holds"),
        (["cache", "clear", "tuning"], "takes no file, but 'tuning' was given; to clear a part, --what tuning"),
        (["cache", "show", "x.json"], "takes no file"),
        (["cache", "show", "--what", "cpu"], "--what goes with clear"),
        (["tune", "--shape", "1,2,3,4", "--device", "cpu", "--out", HERE], f"--out {HERE} is a folder: name a file"),
        (["tune", "--shape", "1,2,3,4", "--device", "cpu", "--out", f"{__file__}/x"], __file__),
        (["fuzz", "--device", "nowhere"], "--device 'nowhere' is not a device: use cpu or cuda"),
        (["fuzz", "--device", "cuda:99", "--backends", "cpu"], "--device cuda:99, but there are"),
        (["fuzz", "--emulate", "--device", "cuda"], "--device cuda beside --emulate"),
        (["fuzz", "--replay", "no-such-file.json"], "no-such-file.json is no stored problem"),
        (["fuzz", "--replay", HERE], f"{HERE} holds no stored problem"),
        (["fuzz", "--json", HERE, "--examples", "1"], "is a folder: name a file"),
        (["fuzz", "--json", f"{__file__}/x.json", "--examples", "1"], f"--json {__file__}/x.json: "),
        (["fuzz", "--corpus", __file__, "--examples", "1"], f"--corpus {__file__}: "),
        (["fuzz", "--forms", "ragged"], "unknown form 'ragged': use per_group"),
        (["fuzz", "--backends", "cpuu"], "unknown backend 'cpuu'"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(words: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--device", "cpu"] if words[0] == "explain" and "--device" not in words else []
    assert main([*words, *extra]) == 2
    text = capsys.readouterr().err
    assert match in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "--host", "nope"], ["info", "--jsonn"], ["--nope"], ["explain", "x"], ["fuzz", "--examples", "0"],
        ["fuzz", "--seconds", "nan"],
    ],
)  # fmt: skip
def test_words_that_no_option_takes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "entry",
    [
        {"us": "fast"},
        {"us": float("nan")},
        {"key": "jagged_m gx m* n48 k96 t128 float32/row float32/row float32/row ieee host-sizes"},
        {"key": 3},
        {"config": []},
        {"schema": 99},
        {"more": 1},
    ],
)
def test_measurements_that_are_none_are_not_imported(
    entry: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"backend": "cpu", "config": {}, "us": 3.0, "device": "cpu", "key": "jagged_m g2"}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"schema": SCHEMA, "entries": [{**good, **entry}]}))
    assert main(["cache", "import", str(path)]) == 2
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ([], "is no exported cache"),
        ({"schema": SCHEMA}, "is no exported cache"),
        ({"schema": 99, "entries": []}, "has schema 99"),
    ],
)
def test_other_files_are_not_imported(raw: Any, match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(json.dumps(raw))
    assert main(["cache", "import", str(tmp_path / "x.json")]) == 2
    assert match in capsys.readouterr().err


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["frobnicate"])
    assert done.value.code == 2
    assert "unknown command 'frobnicate'" in capsys.readouterr().err


def test_demo_checks_and_times_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu", "--dtypes", "float32,int8"]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("cpu ")]
    assert len(lines) == 2 and all("ok" in line and "us" in line for line in lines)


def test_verify_checks_a_problem_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["import torch, multigemm as mg", "out, a, b = torch.ones(2, 3), torch.ones(2, 4), torch.ones(4, 3)"]
    lines += ["problem = mg.GroupedGemmProblem(a, b, c=out, beta=1.0, out=out)"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    assert main(["verify", str(tmp_path / "mine.py"), "--backends", "cpu"]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("cpu "))
    assert " ok " in line
    assert main(["verify", str(tmp_path / "mine.py"), "--backends", "cublas"]) == 1
    assert main(["verify", str(tmp_path / "none.py")]) == 2


def test_verify_takes_quantised_operands_with_a_result_of_the_users(tmp_path: Path) -> None:
    """It once refused them, as a benchmark does."""
    (tmp_path / "mine.py").write_text(
        "import torch, multigemm as mg\n"
        "a, b = (torch.ones(*shape).to(torch.float8_e4m3fn) for shape in ((6, 64), (2, 64, 16)))\n"
        "out, one = torch.empty(6, 16, dtype=torch.bfloat16), torch.ones(())\n"
        "problem = mg.GroupedGemmProblem(a, b, sizes=[2, 4], scale_a=one, scale_b=one, out=out)\n"
    )
    assert main(["verify", str(tmp_path / "mine.py"), "--backends", "cpu"]) == 0


@pytest.mark.parametrize("command", ["demo", "verify"])
def test_a_backend_that_does_not_exist_is_refused_beside_one_that_does(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("import torch, multigemm as mg\nx = torch.ones(2, 2)\n")
    with (tmp_path / "mine.py").open("a") as file:
        file.write("problem = mg.GroupedGemmProblem(x, x)\n")
    words = {"demo": ["--device", "cpu"], "verify": [str(tmp_path / "mine.py")]}[command]
    assert main([command, *words, "--backends", "cpu,nope"]) == 2
    told = capsys.readouterr()
    assert "unknown backend 'nope'" in told.err and not told.out


@pytest.mark.parametrize("command", [["verify"], ["bench", "--problem"]], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import torch\ntorch.ones(3) @ torch.ones(4)", "mine.py, line 2: RuntimeError: "),
        ("x = 1\ndef problem(:", "mine.py, line 2: SyntaxError: invalid syntax"),
        ("def problem():\n    return missing", "mine.py, line 2: NameError: name 'missing' is not defined"),
    ],
    ids=["raises", "cannot be parsed", "function raises"],
)
def test_a_fault_in_the_file_of_a_problem_is_one_line_with_its_place(
    command: list[str], text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert main([*command, str(tmp_path / "mine.py")]) == 2
    said = capsys.readouterr().err
    assert told in said and len(said.splitlines()) == 1


def test_cache_export_import_and_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: Callable[..., None]
) -> None:
    setting(MULTIGEMM_CACHE_DIR=tmp_path / "one")
    key = "jagged_m g2 m* n8 k16 t1024 float32/row float32/row float32/row ieee host-sizes"
    tuning.table().keep([Entry("cpu", key, {"cpu": Measured(3.0, {"kernel": "blas"})})])
    tuning.table().keep_choice(Entry("cpu", key, {"one": Measured(3.0), "two": Measured(9.0)}, "one", "2026-01-02"))
    assert main(["cache", "export", str(tmp_path / "x.json")]) == 0
    assert main(["cache", "show"]) == 0
    told = capsys.readouterr().out
    assert f"tuned: cpu | {key} | cpu: 3.00 us {{'kernel': 'blas'}}" in told
    assert f"chosen by auto: cpu | {key} | one (one 3.00 us, two 9.00 us; 2026-01-02)" in told
    assert main(["cache", "clear"]) == 0
    assert tuning.TuningTable().own.entries() == tuning.TuningTable().choices.entries() == []
    assert main(["cache", "import", str(tmp_path / "x.json")]) == 0
    assert [entry.backends["cpu"].us for entry in tuning.TuningTable().own.entries()] == [3.0]
    assert main(["cache", "show"]) == 0
    told = capsys.readouterr().out
    assert key in told and "cannot be written" not in told
    setting(MULTIGEMM_CACHE=0)
    assert main(["cache", "import", str(tmp_path / "x.json")]) == 2
    assert "not kept: the cache is off" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("out", [False, True])
def test_what_the_cache_does_not_take_was_not_recorded(
    out: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: Callable[..., None]
) -> None:
    (tmp_path / "file").touch()
    setting(MULTIGEMM_CACHE_DIR=tmp_path / "file" / "cache")
    tune = ["tune", "--shape", "2,4,8,8", "--backend", "cpu", "--configs", "1", "--device", "cpu", "--quiet"]
    assert main([*tune, "--out", str(tmp_path / "x.json")] if out else tune) == (0 if out else 1)
    told = capsys.readouterr().out
    assert f"not recorded: {tmp_path / 'file' / 'cache'} cannot be written" in told
    assert (tmp_path / "x.json").exists() == out
    assert main(["cache"]) == 0
    assert "(cannot be written: nothing is kept)" in capsys.readouterr().out


def test_cache_clear_leaves_other_folders_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: Callable[..., None]
) -> None:
    letter = tmp_path / "letters" / "a.txt"
    letter.parent.mkdir()
    letter.write_text("mine")
    setting(MULTIGEMM_CACHE_DIR=tmp_path)
    assert main(["cache", "show"]) == 0
    assert "letters" not in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert letter.read_text() == "mine"
