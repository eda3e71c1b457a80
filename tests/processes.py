"""Children of the test's own process: killed for real, without the seconds that importing torch again would take."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from trainer.errors import TrainerError
from trainer.training.watch import Watch


def in_child(work: Callable[[], object]) -> int:
    """Runs `work` in a forked child; returns its exit code, or minus the signal that ended it.

    A TrainerError gives its own exit code, as in the program.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        work()
        code = 0
    except TrainerError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def kill_after_step(step: int, signum: int = signal.SIGKILL) -> None:
    """From now on this process gets the signal as soon as everything due after `step` is done."""
    real = Watch.after_step

    def after_step(self, state, grad_norm):
        real(self, state, grad_norm)
        if state.step == step:
            os.kill(os.getpid(), signum)

    Watch.after_step = after_step


def kill_at(owner: object, name: str, call: int = 1) -> None:
    """From now on this process ends by SIGKILL when `owner.name` is called for the `call`th time."""
    real = getattr(owner, name)
    calls = 0

    def killing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, name, killing)
