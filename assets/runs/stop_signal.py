"""What ends a feed's step from outside, where steps of several feeds run in threads, which no signal reaches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stop:
    """Asked from one thread, obeyed by another: at its next stage, or at once where it waits for the engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancels: list[Callable[[], None]] = []
        self.why: BaseException | None = None

    def ask(self, why: BaseException) -> None:
        """End with that error. Any thread may call it; the first reason holds."""
        with self._lock:
            self.why = self.why or why
            cancels = tuple(self._cancels)
        for cancel in cancels:
            cancel()

    def check(self) -> None:
        """Raise the reason if somebody asked."""
        if self.why is not None:
            raise self.why

    @contextmanager
    def canceling(self, cancel: Callable[[], None]) -> Iterator[None]:
        """While the block runs, `cancel` is called when somebody asks."""
        with self._lock:
            self._cancels.append(cancel)
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._cancels.remove(cancel)
