"""The quickstart on the card, end to end: paged 8-bit AdamW, the probe, a snapshot, SIGINT, resume, an answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu.prove import Setting, attempt

STOPPED = 130
"""Exit code after SIGINT."""


def results(setting: Setting) -> Iterator[dict[str, Any]]:
    """Two whole runs tell how far runs are apart; a stopped and resumed one must be no farther, and with
    train.deterministic exactly where the whole one is."""
    steps = 6 if setting.dry else 44
    words = ["recipe=quickstart", "optim=paged_adamw_8bit", f"device={'cpu' if setting.dry else 'cuda'}",
             f"train.max_steps={steps}", "train.log_every=1", "train.save_every=3", "memory.probe=always"]  # fmt: skip
    folder = setting.scratch
    yield attempt({"run": "whole"}, lambda: _whole([*words, "memory.snapshot=2"], folder / "first"))
    yield attempt({"run": "again"}, lambda: _whole(words, folder / "again"))
    apart = _apart(folder / "first", folder / "again")
    yield {"what": "two whole runs", "largest_loss_difference": apart}

    def resumed(name: str, whole: str, more: list[str], allowed: float) -> dict[str, Any]:
        _stop_and_resume([*words, *more], folder / name)
        difference = _apart(folder / whole, folder / name)
        return {"largest_loss_difference": difference, "allowed": allowed, "equal": difference <= allowed}

    yield attempt({"run": "stopped and resumed"}, lambda: resumed("resumed", "first", [], max(4 * apart, 1e-3)))
    exact = ["train.deterministic=true"]
    yield attempt({"run": "whole, deterministic"}, lambda: _whole([*words, *exact], folder / "exact"))
    yield attempt(
        {"run": "stopped and resumed, deterministic"}, lambda: resumed("exact_resumed", "exact", exact, allowed=0.0)
    )
    question = "Order: Ben needs two red cups on Friday."
    yield attempt(
        {"run": "generate"},
        lambda: {"answer": _trainer("generate", f"run={folder / 'first'}", f'prompt="{question}"').strip()[-200:]},
    )


def _whole(words: list[str], run_dir: Path) -> dict[str, Any]:
    _trainer(*words, f"output_dir={run_dir}")
    summary = json.loads((run_dir / "summary.json").read_text())
    wanted = "status final_loss eval_loss tokens_per_second peak_memory_gib predicted_peak_memory_gib stages".split()
    row = {key: summary[key] for key in [*wanted, "memory_stages_gib", "seconds_to_first_step", "wall_seconds"]}
    return {**row, "snapshot": sorted(file.name for file in run_dir.glob("memory_*"))}


def _stop_and_resume(words: list[str], run_dir: Path) -> None:
    """SIGINT once the first step is in the metrics; what is left by `resume`."""
    process = subprocess.Popen([*PROGRAM, *words, f"output_dir={run_dir}"])
    while process.poll() is None and not _losses(run_dir):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code = process.wait()
    if code != STOPPED:
        raise AssertionError(f"exit code {code} after SIGINT, not {STOPPED}")
    _trainer("resume", f"run={run_dir}")


def _losses(run_dir: Path) -> dict[int, float]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row["loss"] for row in found if row["event"] == "train"}


def _apart(left: Path, right: Path) -> float:
    """Largest difference of the losses of any step."""
    a, b = _losses(left), _losses(right)
    if not a or a.keys() != b.keys():
        return float("inf")
    return max(abs(a[step] - b[step]) for step in a)


PROGRAM = [sys.executable, "-m", "trainer"]


def _trainer(*words: str) -> str:
    done = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise AssertionError(f"code {done.returncode}: {said[-1]}")
    return done.stdout
