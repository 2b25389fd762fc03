"""Joules of a call, out of a counter that stands for NVML's; where there is none, no number."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigemm.bench import machine, page, reports, table
from multigemm.bench.runner import Options, Runner, new_report
from multigemm.errors import LibraryError
from tests.support.bench_entries import CASE, CPU, ENTRIES, FAST, RATES
from tests.support.bench_reports import made_up_report


class Nvml:
    """Counts `self.millijoules`; refuses what `broken` names."""

    millijoules, broken = 5_000, ""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "nvmlDeviceGetTotalEnergyConsumption":
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules
            return 3 if name == self.broken else 0

        return call


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def test_whole_steps_of_the_counter_count(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes 20 ms and 7 mJ, of which the counter knows every 100 ms; it stands in the middle of a step."""
    clock, used = [0.0], [5_003.0]

    def call() -> None:
        clock[0] += 0.02
        used[0] += 7
        nvml.millijoules = int(used[0]) // 35 * 35

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    nvml.millijoules = 4_970
    joules, us = machine.EnergyMeter(torch.device("cuda")).of_call(call, us=2e4)
    assert joules == pytest.approx(0.007) and us == pytest.approx(2e4)
    assert 0.5 <= clock[0] <= 0.8


def test_a_counter_that_stands_still_is_no_energy(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def call() -> None:
        clock[0] += 0.5

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    with pytest.raises(LibraryError, match="did not move for 5 s"):
        machine.EnergyMeter(torch.device("cuda")).of_call(call, us=5e5)


@pytest.mark.parametrize("broken", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"])
def test_a_gpu_that_counts_nothing_is_said(nvml: Nvml, broken: str) -> None:
    nvml.broken = broken
    with pytest.raises(LibraryError, match=f"{broken} returned status 3: this GPU's energy cannot be read"):
        machine.EnergyMeter(torch.device("cuda"))


def test_without_a_counter_rows_have_no_joules_and_the_report_says_why() -> None:
    options = Options(reps=4, budget_ms=4.0, rates=RATES, energy=True)
    report = new_report(CPU, {"bf16"}, FAST, {})
    Runner(lambda case: ENTRIES[:1], CPU, options, report).run([CASE])
    assert report.absent["energy"] == "energy is counted on GPUs alone, and this is a cpu"
    assert [row.joules for row in report.timed()] == [None]


def test_with_a_counter_each_entry_that_was_timed_has_its_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = SimpleNamespace(of_call=lambda call, us: (0.12345678, 2.00049))
    monkeypatch.setattr("multigemm.bench.machine.EnergyMeter", lambda device: meter)
    options = Options(reps=4, budget_ms=4.0, rates=RATES, energy=True)
    report = Runner(lambda case: ENTRIES[:2], CPU, options, new_report(CPU, {"bf16"}, FAST, {})).run([CASE])
    assert {row.entry: row.joules for row in report.rows} == {"right": 0.1235, "wrong": None}
    right = report.rows[0]
    assert right.loaded_us == 2.0
    for text in ("<th>W under load</th>", f"<td>{reports.digits(right.flops / 0.1235e12)}</td>"):
        assert text in page.render(report)


def test_the_energy_of_a_token_is_that_of_both_products() -> None:
    report = made_up_report(suites="layer-products")
    assert table.energy(report)[0] == ["layer, tokens"] and "millijoules" not in table.text(report)
    for row in report.rows:
        row.entry = "auto" if row.entry == "torch_loop" else row.entry
        row.joules = {"cupy": 1.0, "triton": 2.0, "auto": 0.5}.get(row.entry)
        if row.name == "Mixtral:64:down" and row.entry == "triton":
            row.joules = None
        row.loaded_us = None if row.joules is None else 100 * row.joules
    heads, *rows = table.energy(report)
    cells = {name: dict(zip(heads[1:], cells, strict=True)) for name, *cells in rows}
    assert cells["Mixtral, 4096: mJ"] == {"cupy": "0.488", "triton": "0.977", "auto": "0.244"}
    assert cells["Mixtral, 4096: us"] == {"cupy": "200", "triton": "400", "auto": "100"}
    assert cells["Mixtral, 64: mJ"] == {"cupy": "31.2", "triton": "", "auto": "15.6"}, "half a layer is none"
    assert isinstance(cells["Qwen3-30B, 64: mJ"]["cupy"], table.Best), "auto is one of the others"
    assert "Qwen3-30B, 64: mJ " in table.text(report) and "| **31.2** |" in table.VIEWS["energy"](report)
