"""The runner of repeated calls: right on the CPU, and it finds a cache that forgets something."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multigemm.planning import launch_cache, launch_key
from multigemm.testing import repeated_calls


@pytest.fixture(autouse=True)
def empty_cache() -> Any:
    """On one thread, as in the campaign's processes: on a busy machine several wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    launch_cache.clear()
    yield
    launch_cache.clear()
    torch.set_num_threads(threads)


def test_repeated_calls_on_the_cpu_are_right_and_some_are_served_by_the_cache() -> None:
    count = repeated_calls.run(["cpu"], 600, 0, "cpu")
    assert count.wrong == []
    assert count.hits["cpu"] > 20
    assert count.misses["cpu"] > 20
    assert count.hits + count.misses == count.calls
    assert len(count.forms) >= 4


@pytest.mark.slow
def test_a_cache_that_forgets_host_sizes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = launch_key._index_key

    def forgetful(cut: Any, phase: int, index: int) -> Any:
        return ("host", len(cut)) if isinstance(cut, list | tuple) else original(cut, phase, index)

    monkeypatch.setattr(launch_key, "_index_key", forgetful)
    assert repeated_calls.run(["cpu"], 1000, 0, "cpu").wrong


def test_an_entry_that_keeps_an_operand_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original, kept = launch_cache._BindingEntry.launch, dict[Any, Any]()

    def stale(entry: Any, call: Any, out: Any) -> bool:
        return original(entry, (call[0], kept.setdefault(entry, call[1]), *call[2:]), out)

    monkeypatch.setattr(launch_cache._BindingEntry, "launch", stale)
    assert repeated_calls.run(["cpu"], 200, 1, "cpu").wrong


@pytest.mark.slow
def test_the_command_tells_what_it_did(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert (
        repeated_calls.main(["--backends", "cpu", "--calls", "40", "--device", "cpu", "--json", f"{tmp_path}/x.json"])
        == 0
    )
    assert "0 wrong" in capsys.readouterr().out
    assert (tmp_path / "x.json").exists()
