"""Campaigns and benchmarks over several devices and ranks: nothing twice, nothing lost, one result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm import fleet
from multigemm.bench.processes import part
from multigemm.errors import InvalidSetting
from multigemm.fuzz import campaign
from multigemm.fuzz.campaign import SEEDS_PER_RANK, merge, of_rank
from multigemm.fuzz.plan import Options, Summary, Tally
from tests.support.python_process import run_ranks


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
def test_a_process_alone_takes_all_gpus_and_ranks_share_them() -> None:
    assert fleet.Place().devices("") == fleet.Place().devices("cuda") == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert fleet.Place().devices("cuda:2") == ("cuda:2",)
    assert fleet.Place().devices("cpu") == ("cpu",)
    shares = [fleet.Place(r, 4, r % 2, 2).devices("") for r in range(4)]
    assert shares == [("cuda:0", "cuda:2"), ("cuda:1", "cuda:3")] * 2
    assert [fleet.Place(r, 6, r, 6).devices("") for r in (3, 4, 5)] == [("cuda:3",), ("cuda:0",), ("cuda:1",)]


@pytest.mark.usefixtures("four_gpus")
def test_workers_of_a_campaign_take_the_gpus_in_turn() -> None:
    options = of_rank(Options(("cublas",), "cuda", jobs=6, examples=100, seed=7), fleet.Place())
    devices = [options.at(worker).device for worker in range(options.jobs)]
    assert devices == ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:0", "cuda:1"]
    few = of_rank(Options(("cublas",), "cuda", jobs=1), fleet.Place())
    assert few.jobs == 4, "a GPU would be idle"


def test_ranks_draw_from_seeds_of_their_own_and_all_examples_are_run() -> None:
    parts = [of_rank(Options(("cpu",), examples=101, seed=5), fleet.Place(r, 3)) for r in range(3)]
    assert sum(p.examples for p in parts) == 101
    assert len({p.seed for p in parts}) == 3
    assert parts[0].seed == 5


def test_a_stopped_campaign_names_a_seed_that_no_rank_has_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(options: Options) -> Options:
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "with_required", stop)
    assert campaign.run(Options(("cpu",), seed=5)).next_seed == 5, "before the first problem"
    parts = [Summary(Options(("cpu",)), Tally(), 1.0, next_seed=r * SEEDS_PER_RANK + 10 + r) for r in range(3)]
    assert merge(Options(("cpu",), seed=5), parts).next_seed == 12


def test_a_place_that_is_told_in_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in fleet.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert fleet.here() == fleet.Place()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InvalidSetting, match="WORLD_SIZE='' is no number"):
        fleet.here()
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "5"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidSetting, match=r"a rank has to be below the number of ranks: .*'RANK': '5'"):
        fleet.here()
    monkeypatch.setenv("RANK", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidSetting, match=r"2 ranks cannot meet: .*MASTER_ADDR"), fleet.joined(fleet.here()):
        pass


@pytest.mark.parametrize("text", ["2/2", "a/b", "1", "-1/2", "0/0"])
def test_shares_that_are_none(text: str) -> None:
    with pytest.raises(InvalidSetting, match="write i/n"):
        part(text)
    assert list(range(7))[part("1/3")] == [1, 4]


@pytest.mark.slow
def test_a_campaign_under_torchrun_ends_in_one_summary(tmp_path: Path) -> None:
    words = "fuzz --backends cpu --device cpu --examples 21 --json all.json"
    said = run_ranks("-m", "multigemm", *words.split(), cwd=tmp_path)
    found: dict[str, Any] = json.loads((tmp_path / "all.json").read_text())
    assert found["problems"] == found["checks"]["cpu"] == 21
    assert [note.split(" from ")[0] for note in found["notes"]] == ["rank 0 ran 11 problems", "rank 1 ran 10 problems"]
    assert said.count("rho max") == 1, "one table, of rank 0"


@pytest.mark.slow
def test_a_benchmark_under_torchrun_ends_in_one_report(tmp_path: Path) -> None:
    words = "bench --suite small --only small_cube_64,small_cube_128,small_g16 --backend cpu --peers none --device cpu"
    method = "--floor 1,0.01 --budget-ms 20 --json-only --out all"
    run_ranks("-m", "multigemm", *words.split(), *method.split(), cwd=tmp_path)
    report: dict[str, Any] = json.loads((tmp_path / "all" / "report.json").read_text())
    cases = [row["case"] for row in report["rows"] if row["entry"] == "cpu"]
    assert cases == ["small_cube_64/list/bf16", "small_cube_128/list/bf16", "small_g16/uniform/bf16"]
    assert {row["status"] for row in report["rows"]} == {"ok"}
    assert len(report["machine"]["devices"]) == 2
    assert "--share" not in report["method"]["command"]
