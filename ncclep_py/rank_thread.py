"""A rank program in a thread of its own that takes turns with the others, with a greenlet's interface. Autograd needs it: torch keeps the state of a
backward pass per thread, so that several of them cannot be interleaved in one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["RankThread"]


class RankThread:
    """Runs `body(None)` whenever, and as long as, somebody is in `switch` or `throw`.

    Attributes:
        dead: the body has ended.
        thread: the thread.
    """

    def __init__(self, body: Callable[[Any], Any], state: Any) -> None:
        """`state` has `begin()` and `keep()`, called in the thread: torch's device and stream of the rank."""
        self.dead, self._body, self._state = False, body, state
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._given: tuple[Any, BaseException | None] = (None, None)
        self._made: Any = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self._started = False

    def switch(self, value: Any) -> Any:
        """Let the body go on with `value`; what it waits with next, or its result."""
        return self._resume(value, None)

    def throw(self, error: BaseException) -> Any:
        """Let the body go on with an exception."""
        return self._resume(None, error)

    def _resume(self, value: Any, error: BaseException | None) -> Any:
        self._given = (value, error)
        if self._started:
            self._go.release()
        else:
            self._started = True
            self.thread.start()
        self._back.acquire()
        if self._error is not None:
            raise self._error
        return self._made

    def _run(self) -> None:
        try:
            self._state.begin()
            self._made = self._body(None)
        except BaseException as e:   # noqa: BLE001  (raised where the turn began)
            self._error = e
        self.dead = True
        self._back.release()

    def wait(self, made: Any) -> Any:
        """Called by the body, or by what it called: hand `made` over and wait for the next turn."""
        self._state.keep()
        self._made = made
        self._back.release()
        self._go.acquire()
        value, error = self._given
        if error is not None:
            raise error
        return value
