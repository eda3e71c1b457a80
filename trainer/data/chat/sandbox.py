"""Templates rendered in a process of their own, which can neither open a file nor run away (jinja_process.py).

The process is begun when the first template is rendered, and once in each process that renders; it costs a tenth of a
second. What goes to it is pickled here and read there; what comes back is text and never more than that.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from trainer.data.chat import jinja_process
from trainer.data.chat.jinja_process import BROKEN, FULL, REFUSED, STOPPED, TEXT

__all__ = ["BrokenTemplate", "Limits", "RanAway", "Sandbox", "TemplateRefuses", "sandbox"]

TEMPLATE_CHARACTERS = 1 << 20

KEPT = ("TZ", "LD_LIBRARY_PATH")
"""Of the environment; the rest, with its secrets, stays here."""


DIED = 0
"""Instead of a reply."""


class RanAway(Exception):
    """A template went over a limit."""


class BrokenTemplate(Exception):
    """A text is no template: begins with what stands between a template's name and what is wrong."""


class TemplateRefuses(Exception):
    """A template raised an error for these values."""


@dataclass(frozen=True)
class Limits:
    """Of one render. The time is that of the CPU, so that a busy machine stops no template."""

    cpu_seconds: float = 5.0
    mean_cpu_seconds: float = 0.05
    """of a template's renders on average, beyond twice cpu_seconds for all"""
    num_bytes: int = 32 << 20
    """of memory, beside times_input bytes for each byte of the values"""
    characters: int = 1 << 24
    """of the text, beside times_input for each byte of the values"""
    times_input: int = 32


class Sandbox:
    """One such process, begun anew where a template ended it."""

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def check(self, template: str, strict: bool = False) -> None:
        """Raises BrokenTemplate, and RanAway for one that cannot even be compiled within the limits."""
        self._answer(template, strict, None)

    def render(self, template: str, values: dict[str, Any], strict: bool = False) -> str:
        """The template's text; `strict`: a missing value is an error.

        Raises BrokenTemplate, TemplateRefuses and RanAway.
        """
        return self._answer(template, strict, values)

    def _answer(self, template: str, strict: bool, values: dict[str, Any] | None) -> str:
        if len(template) > TEMPLATE_CHARACTERS:
            raise BrokenTemplate(f": is {len(template):,} characters long; at most {TEMPLATE_CHARACTERS:,} are allowed")
        try:
            request = pickle.dumps((template, strict, values), protocol=5)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            raise TemplateRefuses(f"the row cannot be given to a template: {error}") from None
        with self._lock:
            used = self._process is not None
            kind, said = self._ask(request)
            if used and kind in (FULL, DIED):  # of what earlier rows left behind, or from outside?
                kind, said = self._ask(request)
        if kind == TEXT:
            return said
        raise {REFUSED: TemplateRefuses, BROKEN: BrokenTemplate}.get(kind, RanAway)(said)

    def _ask(self, request: bytes) -> tuple[int, str]:
        """The kind of the reply, and what it says; a process that went over a limit is gone afterwards."""
        if self._process is None:
            self._process = self._begin()
        requests, replies = self._process.stdin, self._process.stdout
        try:
            requests.write(len(request).to_bytes(8, "little") + request)
            requests.flush()
            head = replies.read(9)
        except BrokenPipeError:
            head = b""
        if len(head) == 9 and head[0] in (TEXT, REFUSED, BROKEN):
            return head[0], self._said(head)
        kind, said = (head[0], self._said(head)) if len(head) == 9 else (DIED, "")
        code, self._process = self._process.wait(), None
        if code == -signal.SIGPROF:
            most, mean = self.limits.cpu_seconds, self.limits.mean_cpu_seconds
            return STOPPED, f"it works for more than {most:g} seconds of CPU on a row, or {mean:g} on average"
        if kind == DIED:
            return DIED, f"the process that rendered it ended with code {code}"
        return kind, said or "it needs too much memory"

    def _said(self, head: bytes) -> str:
        size = int.from_bytes(head[1:], "little")
        return self._process.stdout.read(size).decode("utf-8", "surrogatepass")

    def _begin(self) -> subprocess.Popen:
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-P", jinja_process.__file__, json.dumps(asdict(self.limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # a signal from the terminal is for the trainer
        )
        weakref.finalize(self, _close, process, os.getpid())
        return process


def _close(process: subprocess.Popen, owner: int) -> None:
    if os.getpid() == owner:  # and no fork of it
        process.kill()
        process.communicate()


def sandbox() -> Sandbox:
    """The sandbox of this process; a fork has its own."""
    return _of(os.getpid())


@cache
def _of(pid: int) -> Sandbox:
    return Sandbox()
