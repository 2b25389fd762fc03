"""In which order several streams get their calls, and what the handle looks like afterwards; no GPU needed."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from multigemm.backends.cublas import run
from multigemm.backends.cublas.library import EXACT_MATH, Batch
from multigemm.cuda.launch import Kernel
from multigemm.errors import LibraryError
from tests.support import cuda_driver
from tests.support.cublas_fake import CURRENT, TORCHS_MODE, TORCHS_SPACE, Fake, install, streamed


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return install(monkeypatch)


def as_torch_left_it(fake: Fake) -> bool:
    return (fake.stream, fake.mode, fake.space) == (CURRENT, TORCHS_MODE, TORCHS_SPACE)


def test_the_mode_of_the_handle_is_lent_and_returned(fake: Fake) -> None:
    library: Any = fake
    run.Calls(library, Batch([fake.named("a"), fake.named("b")]))(CURRENT)
    assert fake.log == [("call", name, CURRENT, EXACT_MATH) for name in "ab"]
    assert as_torch_left_it(fake)


def test_a_status_is_an_error_and_the_mode_comes_back(fake: Fake) -> None:
    library: Any = fake
    with pytest.raises(LibraryError, match=r"a returned NOT_SUPPORTED \(15\)"):
        run.Calls(library, Batch([fake.named("a", 15), fake.named("b")]))(CURRENT)
    assert fake.log == [("call", "a", CURRENT, EXACT_MATH)]
    assert as_torch_left_it(fake)


def test_a_graph_may_hold_other_calls(fake: Fake) -> None:
    library: Any = fake
    calls = run.Calls(library, Batch([fake.named("eager")]), Batch([fake.named("a"), fake.named("b")]))
    calls(CURRENT)
    fake.capture_of[CURRENT] = 5
    calls(CURRENT)
    assert [entry[1] for entry in fake.log] == ["eager", "a", "b"]


def test_the_largest_products_go_to_streams_of_their_own() -> None:
    assert run.shares([40, 30, 20, 10], 3) == [[0], [1], [2, 3]]
    assert run.shares([5], 4) == [[0]]
    work = [5, 9, 1, 7, 3]
    split = run.shares(work, 2)
    assert sorted(i for share in split for i in share) == [0, 1, 2, 3, 4]
    assert max(sum(work[i] for i in share) for share in split) == 13


def test_side_streams_fork_and_join(fake: Fake) -> None:
    streamed(fake)(CURRENT)
    kinds = [entry[:2] if entry[0] == "call" else entry[0] for entry in fake.log]
    assert kinds[:2] == ["record", ("call", "a")]
    assert fake.log[0][2] == CURRENT
    fork = fake.log[0][1]
    of = fake.called()
    assert {of["b"], of["c"]} == {101, 102}
    assert of["c"] == of["d"]
    for name, stream in ((name, of[name]) for name in "bcd"):
        at = fake.log.index(("call", name, stream, EXACT_MATH))
        assert fake.log.index(("wait", fork, stream)) < at
        ended = next(i for i, entry in enumerate(fake.log) if entry[0] == "record" and entry[2] == stream)
        assert at < ended
        assert fake.log.index(("wait", fake.log[ended][1], CURRENT)) > ended
    assert ("call", "a", CURRENT, EXACT_MATH) in fake.log
    assert as_torch_left_it(fake)


def test_a_failed_call_leaves_the_handle_as_it_was(fake: Fake) -> None:
    with pytest.raises(LibraryError, match="d returned NOT_SUPPORTED"):
        streamed(fake, status=15)(CURRENT)
    assert as_torch_left_it(fake)


@pytest.mark.parametrize(
    ("config", "size"), [("", 32 << 20), (":4096:8", 32 << 20), (":16:8", 128 << 10), (":4096:2:16:8", 8320 << 10)]
)
def test_the_workspace_is_sized_as_torchs(monkeypatch: pytest.MonkeyPatch, config: str, size: int) -> None:
    """Another size would let the library choose other kernels, and the first run other bits than the next."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    run.workspace_bytes.cache_clear()
    assert run.workspace_bytes() == size
    run.workspace_bytes.cache_clear()


def test_many_short_products_take_one_stream(fake: Fake) -> None:
    """Their calls take the host longer than the device; only a graph runs them beside each other."""
    streamed(fake, size=8)(CURRENT)
    assert fake.streams == 100
    assert [entry[:3] for entry in fake.log] == [("call", name, CURRENT) for name in "abcd"]


def test_as_few_short_products_as_streams_run_at_once(fake: Fake) -> None:
    """What events cost the host is less than what the device would wait for one after the other."""
    streamed(fake, size=8, count=4)(CURRENT)
    assert len(set(fake.called().values())) == 4


def test_short_products_do_without_sides_where_there_is_no_memory(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for a workspace")

    late = streamed(fake, size=8, count=4)
    monkeypatch.setattr(run, "borrow", full)
    for launch in (late, streamed(fake, size=8, count=4)):
        fake.log.clear()
        launch(CURRENT)
        assert [entry[:3] for entry in fake.log] == [("call", name, CURRENT) for name in "abcd"]
    with pytest.raises(torch.OutOfMemoryError, match="workspace"):
        streamed(fake)


def test_sides_are_lent_for_a_launch(fake: Fake) -> None:
    """However many launches are bound, there are as many sides as one of them uses; each has a workspace."""
    launches = [streamed(fake) for _ in range(3)]
    for launch in launches:
        launch(CURRENT)
    assert fake.streams == 102


def test_every_side_works_in_memory_of_its_own(fake: Fake) -> None:
    """In one workspace for several streams the split sums of two products would mix."""
    used: dict[str, tuple[int, int]] = {}
    launch = streamed(fake)

    def note(name: str) -> Any:
        return [fake.named(name, also=lambda: used.update({name: (fake.stream, fake.space)}))]

    launch._here, *launch._shares = map(note, "abc")
    launch(CURRENT)
    assert used["a"] == (CURRENT, TORCHS_SPACE)
    assert len({stream for stream, _ in used.values()}) == len({space for _, space in used.values()}) == 3
    assert 0 not in {space for _, space in used.values()}
    assert as_torch_left_it(fake)


def test_a_failed_call_gives_its_sides_back(fake: Fake) -> None:
    with pytest.raises(LibraryError):
        streamed(fake, status=15)(CURRENT)
    streamed(fake)(CURRENT)
    assert fake.streams == 102


def test_sides_belong_to_the_stream_they_fork_from(fake: Fake) -> None:
    """Else launches of two streams would wait for each other."""
    launch = streamed(fake)
    launch(CURRENT)
    first = set(fake.called().values())
    fake.log.clear()
    launch(CURRENT + 1)
    assert first & set(fake.called().values()) == {CURRENT}  # where torch's handle is


def test_a_capture_keeps_the_sides_that_it_uses_and_works_in_other_memory(fake: Fake) -> None:
    launch, other = streamed(fake, size=8), streamed(fake)
    eager = {TORCHS_SPACE} | {side.space.data_ptr() for kit in run._kits[0, CURRENT] for side in kit.sides}
    spaces: list[int] = []
    fake.capture_of = dict.fromkeys((CURRENT, 101, 102), 5)
    note = fake.named("noted", also=lambda: spaces.append(fake.space))
    launch._here, launch._shares = [note], [[note], [note]]
    launch(CURRENT)
    launch(CURRENT)
    assert fake.streams == 102
    assert len(set(spaces)) == 3
    assert not set(spaces) & eager
    assert spaces[:3] == spaces[3:]
    assert as_torch_left_it(fake)
    del fake.capture_of[CURRENT]  # goes on elsewhere
    other(CURRENT)
    assert set(fake.called().values()) >= {103, 104}
    fake.capture_of.clear()
    other(CURRENT)
    other(CURRENT)
    assert fake.streams == 104


# --- kernels of our own ---------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_kernel_runs_on_the_stream_of_each_call_and_on_any_thread(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """A thread without a context gets one."""
    driver = cuda_driver.install(monkeypatch)
    step = Kernel(b"cubin", "name", 0).step(5, 64, [ctypes.c_int(1)], None, overlap=overlap)
    for stream, context in ((7, cuda_driver.CONTEXT), (0, 0), (7, 0), (9, 0)):
        driver.make_current(context)
        step(stream)
    assert [(x.kernel, x.stream, x.grid) for x in driver.launched] == [("name", s, (5, 1, 1)) for s in (7, 0, 7, 9)]
    assert {x.early for x in driver.launched} == {overlap}


def test_a_launch_that_fails_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = cuda_driver.install(monkeypatch)
    monkeypatch.setattr(driver, "_cuLaunchKernelEx", lambda *rest: 700)
    with pytest.raises(LibraryError, match="cuLaunchKernelEx of name returned 700"):
        Kernel(b"cubin", "name", 0).step(1, 32, [], None)(7)
