"""TRL's and unsloth's QLoRA steps on the very weights that our own steps ran on, where they are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu.prove import Setting

PEERS = ("trl", "unsloth")
LENGTHS = (2048, 8192)


def results(setting: Setting) -> Iterator[dict[str, Any]]:
    for length in (128, 256) if setting.dry else LENGTHS:
        for kind in PEERS:
            yield _peer(kind, setting.scratch / "model", length, "full", setting.seconds_left)


def interpreter() -> str:
    return os.environ.get("TRAINER_PEERS", sys.executable)


def installed(kind: str) -> bool:
    probe = f"import importlib.util as u, sys; sys.exit(u.find_spec('{kind}') is None)"
    return subprocess.run([interpreter(), "-c", probe]).returncode == 0


def _peer(kind: str, folder: Path, length: int, policy: str, seconds_left: float) -> dict[str, Any]:
    """A peer's row, or why there is none."""
    row = {"peer": kind, "tokens": length, "checkpointing": policy}
    if not installed(kind):
        return {**row, "left_out": "not installed"}
    if not folder.exists():
        return {**row, "left_out": "our own steps left no model"}
    command = [interpreter(), "-m", "tests.gpu.peer_steps", kind, str(folder), str(length), policy]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds_left)
    except subprocess.TimeoutExpired:
        return {**row, "left_out": "no time left"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    if done.returncode != 0 or not lines:
        said = done.stderr.strip().splitlines() or ["nothing"]
        return {**row, "failed": said[-1]}
    return json.loads(lines[-1])
