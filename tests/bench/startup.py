"""Time to the first step, by stage, of the quickstart recipe, and which heavy libraries a run has loaded by then.

    python -m tests.bench startup

Every round is a process of its own. The stages are the run's own record (summary.json): wall seconds, so that the
machine's load is in them; CPU seconds are of the whole process with its one step.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import REPO

ROUNDS = 5
OPTIONAL = ("pandas", "scipy", "sklearn", "matplotlib", "datasets", "wandb", "tensorboard", "sympy", "torch._inductor")


def main() -> None:
    """Prints medians and ranges."""
    rounds, cpu = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            words = ["recipe=quickstart", "train.max_steps=1", f"output_dir={folder}/run", "train.compare_prompts=0"]
            subprocess.run([sys.executable, "-m", "trainer", *words], cwd=REPO, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            rounds.append(json.loads(Path(folder, "run", "summary.json").read_text(encoding="utf-8")))
    stages = {
        name: round(statistics.median(r["stages_to_first_step"][name] for r in rounds), 2)
        for name in rounds[0]["stages_to_first_step"]
    }
    totals = sorted(r["seconds_to_first_step"] for r in rounds)
    asked = f"import sys, trainer.run.train; print([n for n in {OPTIONAL} if n in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", asked], cwd=REPO, capture_output=True, text=True, check=True)
    result = {
        "seconds_to_first_step": statistics.median(totals),
        "range": [totals[0], totals[-1]],
        "stages": stages,
        "cpu_seconds_of_process": statistics.median(cpu),
        "loaded": loaded.stdout.strip(),
        "load": os.getloadavg(),
    }
    print(json.dumps(result))
