"""SIGINT, SIGTERM, SIGHUP: at once where nothing can be lost, else after the running micro-batch, to save the step."""

from __future__ import annotations

import os
import signal
from types import FrameType

from trainer.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Inside `with Interrupts() as interrupts`, a signal raises Interrupted.

    While `interrupts.deferred` is True it is only noted, and raised by the next `check()`.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.requested: int | None = None
        self._previous: dict[int, object] = {}
        self._terminals = [number for number in (1, 2) if os.isatty(number)]

    def __enter__(self) -> Interrupts:
        for signum in SIGNALS:
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # started with nohup
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
        self._leave_closed_terminals()
        if not self.deferred:
            self.check()

    def _leave_closed_terminals(self) -> None:
        """A terminal that was closed refuses every word; none of them may end the run before it is saved."""
        for number in self._terminals:
            if not os.isatty(number):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)
