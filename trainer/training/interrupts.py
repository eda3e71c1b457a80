"""SIGINT and SIGTERM: at once where nothing can be lost, after the running micro-batch where a step can be saved."""

from __future__ import annotations

import signal
from types import FrameType

from trainer.errors import Interrupted


class Interrupts:
    """Inside `with Interrupts() as interrupts`, a signal raises Interrupted.

    While `interrupts.deferred` is True it is only noted, and raised by the next `check()`.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.requested: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._received)
        return self

    def __exit__(self, *error) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def check(self) -> None:
        """Raises Interrupted if a signal came."""
        if self.requested is not None:
            raise Interrupted(self.requested, f"stopped by {signal.Signals(self.requested).name}.")

    def _received(self, signum: int, frame: FrameType | None) -> None:
        self.requested = signum
        if not self.deferred:
            self.check()
