"""Work on other threads and in forked children, for tests: what fails there fails the test, and what hangs does too."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest


def on_new_threads(*works: Callable[[], object], seconds: float = 60.0) -> None:
    """Runs all at once, each on a thread of its own, and raises what one of them raises."""
    raised: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # handed to the test's own thread
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if raised:
        raise raised[0]
    assert not any(thread.is_alive() for thread in threads), f"a thread still waits after {seconds:.0f} s"


@contextmanager
def held_by_another_thread(*locks: Any) -> Iterator[None]:
    """Locks that another thread holds meanwhile."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            release.wait(120)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(60)
    try:
        yield
    finally:
        release.set()
        thread.join()


def in_a_forked_child(work: Callable[[], bool]) -> bool:
    """What a forked child finds, False if it dies; fails where it waits, for a lock that no thread of its own holds."""
    child = os.fork()
    if child == 0:
        try:
            code = 0 if work() else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        os._exit(code)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child waits for a lock of its parent")
