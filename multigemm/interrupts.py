"""Ctrl-C at any moment: what must be whole is finished first, and child processes leave it to their parent."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def held() -> Iterator[None]:
    """Holds Ctrl-C back, and raises KeyboardInterrupt at the end: for an import, or a file that is being written."""
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
    """Writes a file through another one beside it: whoever is stopped meanwhile leaves the former file as it was."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


@contextmanager
def of_termination() -> Iterator[None]:
    """A SIGTERM, as schedulers and parents send it, raises KeyboardInterrupt: what was measured is kept."""

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
    """Processes that are started inside never see Ctrl-C, which a terminal sends to all: this one ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
