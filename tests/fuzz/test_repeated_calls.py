"""The runner of repeated calls: right on the CPU, and it finds a cache that forgets something."""

from __future__ import annotations

from typing import Any

import pytest

from multigemm.planning import launch_cache, launch_key
from multigemm.testing import repeated_calls


@pytest.fixture(autouse=True)
def empty_cache() -> Any:
    launch_cache.clear()
    yield
    launch_cache.clear()


def test_repeated_calls_on_the_cpu_are_right_and_some_are_served_by_the_cache() -> None:
    count = repeated_calls.run("cpu", 250, 0, "cpu")
    assert count.wrong == []
    assert count.hits > 20
    assert len(count.forms) >= 4


@pytest.mark.slow
def test_a_cache_that_forgets_host_sizes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = launch_key._index_key

    def forgetful(cut: Any, phase: int, index: int) -> Any:
        return ("host", len(cut)) if isinstance(cut, list | tuple) else original(cut, phase, index)

    monkeypatch.setattr(launch_key, "_index_key", forgetful)
    assert repeated_calls.run("cpu", 200, 0, "cpu").wrong


@pytest.mark.slow
def test_the_command_tells_what_it_did(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert (
        repeated_calls.main(["--backends", "cpu", "--calls", "40", "--device", "cpu", "--json", f"{tmp_path}/x.json"])
        == 0
    )
    assert "0 wrong" in capsys.readouterr().out
    assert (tmp_path / "x.json").exists()
