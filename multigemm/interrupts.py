"""Ctrl-C and SIGTERM: defer them until a file or an import is complete, and keep them from child processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def held() -> Iterator[None]:
    """A context that defers Ctrl-C to its end, for an import or the writing of a file, and raises KeyboardInterrupt
    there."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # held already, or none of Python's own
        yield
        return
    came: list[int] = []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    except ValueError:  # another thread than the main one, which never sees Ctrl-C
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically: into a temporary file beside it, which then replaces it. An interruption leaves the old
    file."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


@contextmanager
def of_termination() -> Iterator[None]:
    """A context in which SIGTERM, as a scheduler or a parent process sends it, raises KeyboardInterrupt, so that
    results are kept."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # another thread than the main one
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def left_to_this_process() -> Iterator[None]:
    """A context in which child processes are started that ignore Ctrl-C. A terminal sends Ctrl-C to the whole group;
    this process ends its children itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
