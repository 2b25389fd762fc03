"""Joules of a call, out of a counter that stands for NVML's; where there is none, no number."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigemm.bench import machine, reports, table
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


class Gpu:
    """Runs what is queued, one after the other, at 700 W and else at none; its counter knows every 100 ms."""

    def __init__(self, nvml: Nvml, monkeypatch: pytest.MonkeyPatch, look_s: float = 0.0) -> None:
        self.now, self.work, self._nvml, self._look_s = 0.0, list[tuple[float, float]](), nvml, look_s
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=self.record))
        monkeypatch.setattr(machine.EnergyMeter, "joules", self.look)

    def queue(self, seconds: float) -> None:
        begin = max(self.now, self.work[-1][1] if self.work else 0.0)
        self.work.append((begin, begin + seconds))

    def record(self) -> SimpleNamespace:
        end = self.work[-1][1]

        def synchronize() -> None:
            self.now = max(self.now, end)

        return SimpleNamespace(synchronize=synchronize)

    def look(self, meter: object = None) -> float:
        step = self.now // 0.1 * 0.1
        self.now += self._look_s
        return 700 * math.fsum(max(0.0, min(end, step) - begin) for begin, end in self.work)


@pytest.mark.parametrize("look_s", [0.0, 0.004])
def test_whole_steps_of_the_counter_count(nvml: Nvml, monkeypatch: pytest.MonkeyPatch, look_s: float) -> None:
    """A call of 2 ms back to back, whatever a look at the counter takes: between looks the device had been idle."""
    gpu = Gpu(nvml, monkeypatch, look_s)
    joules, us = machine.EnergyMeter(torch.device("cuda")).of_call(lambda: gpu.queue(0.002), us=2e3)
    assert us == pytest.approx(2e3, rel=0.01) and joules == pytest.approx(1.4, rel=0.02)
    assert 0.5 <= gpu.now <= 0.8


def test_the_counter_has_millijoules(nvml: Nvml) -> None:
    nvml.millijoules = 4_970
    assert machine.EnergyMeter(torch.device("cuda")).joules() == 4.97


def test_a_counter_that_stands_still_is_no_energy(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(nvml, monkeypatch)
    monkeypatch.setattr(machine.EnergyMeter, "joules", lambda meter: 1.0)
    with pytest.raises(LibraryError, match="did not move for 5 s"):
        machine.EnergyMeter(torch.device("cuda")).of_call(lambda: gpu.queue(0.5), us=5e5)


@pytest.mark.parametrize("broken", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"])
def test_a_gpu_that_counts_nothing_is_said(nvml: Nvml, broken: str) -> None:
    nvml.broken = broken
    with pytest.raises(LibraryError, match=f"{broken} returned status 3: this GPU's energy cannot be read"):
        machine.EnergyMeter(torch.device("cuda"))


def test_without_a_counter_rows_have_no_joules_and_the_report_says_why() -> None:
    options = Options(reps=4, budget_ms=4.0, rates=RATES, energy=True)
    report = new_report(CPU, {"bf16"}, FAST, {})
    Runner(lambda case: ENTRIES[:1], CPU, options, report).run([CASE])
    assert report.absent["energy"] == "energy is counted on GPUs alone, and this is a cpu: leave --energy out"
    assert [row.joules for row in report.timed()] == [None]


def test_with_a_counter_each_entry_that_was_timed_has_its_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = SimpleNamespace(of_call=lambda call, us: (0.12345678, 2.00049))
    monkeypatch.setattr("multigemm.bench.machine.EnergyMeter", lambda device: meter)
    options = Options(reps=4, budget_ms=4.0, rates=RATES, energy=True)
    report = Runner(lambda case: ENTRIES[:2], CPU, options, new_report(CPU, {"bf16"}, FAST, {})).run([CASE])
    assert {row.entry: row.joules for row in report.rows} == {"right": 0.1235, "wrong": None}
    right = report.rows[0]
    assert right.loaded_us == 2.0
    for text in ("| W under load |", f"| {reports.digits(right.flops / 0.1235e12)} |"):
        assert text in table.page(report)


def test_the_energy_of_a_token_is_that_of_both_products() -> None:
    report = made_up_report(suites="layer-products")
    assert table.energy(report) == [["layer, tokens"]] and "millijoules" not in table.text(report)
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
