"""Finds kernels that loop without an operation: the scheduler never gets its turn back, so another thread has to look."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ncclep_py.simulator.scheduler import Scheduler

__all__ = ["WATCHDOG", "Stuck", "Watchdog", "where"]

SECONDS = 60.0
"""One step is milliseconds; a machine may be busy with other things."""
DEBUGGERS = {"bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy"}


class Stuck(BaseException):   # noqa: N818  (no error of the user's: the scheduler turns it into one; not an Exception, so that kernels do not catch it)
    """Raised by the watchdog inside of the thread that does not advance."""


class Watchdog:
    """A thread that sees to it that running schedulers take steps; started with the first.

    Attributes:
        seconds: how long a step may take.
    """

    def __init__(self) -> None:
        self.seconds = SECONDS
        self._lock = threading.Lock()
        self._running: dict[int, tuple[Scheduler, int]] = {}   # number -> scheduler and its thread
        self._thread: threading.Thread | None = None
        self._next = 0

    def watch(self, scheduler: Scheduler) -> int:
        """Watch a scheduler that now runs in this thread; a number for `release`."""
        with self._lock:
            self._next += 1
            self._running[self._next] = scheduler, threading.get_ident()
            if self._thread is None or not self._thread.is_alive():   # also after a fork
                self._thread = threading.Thread(target=self._look, name="simulator watchdog", daemon=True)
                self._thread.start()
            return self._next

    def release(self, number: int) -> None:
        """It runs no more."""
        with self._lock:
            self._running.pop(number, None)

    def _look(self) -> None:
        seen: dict[int, tuple[int, float]] = {}   # number -> step, and seconds in it: of this thread's, which stops when the process is stopped
        while True:
            tick = min(1.0, self.seconds / 4)
            time.sleep(tick)
            with self._lock:
                seen = {n: (s.step, seen[n][1] + tick if n in seen and seen[n][0] == s.step else 0.0) for n, (s, _) in self._running.items()}
                for number in [n for n, (_, spent) in seen.items() if spent > self.seconds]:
                    thread = self._running[number][1]
                    if not _debugged(thread):
                        del self._running[number]
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stuck))


def _debugged(thread: int) -> bool:
    """Whether a thread stands in a debugger, where somebody may look at it as long as they like."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


WATCHDOG = Watchdog()


def where(error: BaseException) -> str:
    """The line of a kernel at which an exception was raised, in words."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if os.path.dirname(f.filename) != os.path.dirname(__file__)), frames[-1])
    return f"at {last.filename.rsplit('/', 1)[-1]}:{last.lineno}, {last.line!r}"
