"""Joules of a call, out of a counter that stands for NVML's; where there is none, no number."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigemm.bench import machine
from multigemm.bench.runner import Options, Runner, new_report
from multigemm.errors import LibraryError
from tests.support.bench_entries import CASE, CPU, ENTRIES, FAST, RATES


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


def test_the_mean_over_a_second_of_calls(nvml: Nvml) -> None:
    def call() -> None:
        nvml.millijoules += 7

    meter = machine.EnergyMeter(torch.device("cuda"))
    assert meter.of_call(call, us=2e4) == pytest.approx(0.007)
    assert nvml.millijoules == 5_000 + 50 * 7


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
    meter = SimpleNamespace(of_call=lambda call, us: 0.12345678)
    monkeypatch.setattr("multigemm.bench.machine.EnergyMeter", lambda device: meter)
    options = Options(reps=4, budget_ms=4.0, rates=RATES, energy=True)
    report = Runner(lambda case: ENTRIES[:2], CPU, options, new_report(CPU, {"bf16"}, FAST, {})).run([CASE])
    assert {row.entry: row.joules for row in report.rows} == {"right": 0.1235, "wrong": None}
