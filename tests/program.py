"""The program as a user runs it: in this process, or in one of its own that tells what it cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support import REPO
from trainer.__main__ import main

HEAVY = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "wandb")
CODE = f"""
import json, os, sys, time
from trainer.__main__ import main
code = main()
report = {{"cpu_seconds": time.process_time(), "heavy": [name for name in {HEAVY} if name in sys.modules]}}
with open(os.environ["REPORT"], "w") as file:
    json.dump(report, file)
sys.exit(code)
"""


def here(*words: str) -> int:
    """`trainer WORDS` in this process; returns its exit code. Leaves signals and arguments as they were."""
    argv, handlers = sys.argv, {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    sys.argv = ["trainer", *words]
    try:
        return main()
    finally:
        sys.argv = argv
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@dataclass(frozen=True)
class Measured:
    """What a process said, returned and cost."""

    code: int
    out: str
    err: str
    cpu_seconds: float
    heavy: list[str]
    """expensive libraries that it imported"""


def measured(folder: Path, *words: str) -> Measured:
    """`trainer WORDS` in a process of its own, in this folder, standard input closed."""
    report = folder / ".report.json"
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPO), "REPORT": str(report)},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    facts = json.loads(report.read_text())
    report.unlink()
    return Measured(done.returncode, done.stdout, done.stderr, facts["cpu_seconds"], facts["heavy"])
