"""What prove.sh runs: parts, each in a process of its own, whose results are on disk as soon as they are known.

    python -m tests.gpu.prove [--dry] [PART...]

A card that one part leaves broken (an illegal access, memory that is not given back) is whole again for the next.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = {"machine": 45, "twins": 120, "quickstart": 150, "eight_b": 220, "offloads": 150, "peers": 120}
"""Seconds that each may take at most, in order of worth: a module here each, whose `results` yields rows."""
LEAST_SECONDS = 15
"""Left under which no part begins."""


@dataclass(frozen=True)
class Setting:
    """What a part needs to know."""

    dry: bool
    """small, on a CPU"""
    end: float
    """time.time() after which nothing should begin"""
    scratch: Path
    """shared by the parts, gone afterwards"""

    @property
    def device(self):
        import torch

        return torch.device("cpu") if self.dry else torch.device("cuda", torch.cuda.current_device())

    @property
    def seconds_left(self) -> float:
        return self.end - time.time()


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--part"]:
        _run_part(words[1], Setting(words[2] == "dry", float(words[3]), Path(words[4])))
        return
    dry, chosen = "--dry" in words, [word for word in words if word != "--dry"] or list(PARTS)
    unknown = [word for word in chosen if word not in PARTS]
    if unknown:
        sys.exit(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    end = time.time() + float(os.environ.get("PROVE_SECONDS", "525"))
    scratch = Path(tempfile.mkdtemp())
    try:
        for part in chosen:
            _start_part(part, dry, end, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(_verdict())


def _start_part(part: str, dry: bool, end: float, scratch: Path) -> None:
    """Runs a part as long as it may; what it noted stays, whatever becomes of it."""
    left = min(PARTS[part], end - time.time())
    if left < LEAST_SECONDS:
        note(part, {"left_out": "no time left"})
        return
    command = [sys.executable, "-m", "tests.gpu.prove", "--part", part, "dry" if dry else "card",
               str(time.time() + left - 5), str(scratch)]  # fmt: skip
    log = _folder() / f"{part}.log"
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=left).returncode
        except subprocess.TimeoutExpired:
            note(part, {"left_out": f"stopped after {left:.0f} s"})
            return
    if code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["said nothing"]
        note(part, {"failed": f"code {code}: {lines[-1][:300]}"})


def _run_part(part: str, setting: Setting) -> None:
    results = importlib.import_module(f"tests.gpu.{part}").results
    for row in results(setting):
        note(part, row)


def attempt(what: dict[str, Any], result) -> dict[str, Any]:
    """The row of one measurement; a failure is a row too, and what comes after it still runs."""
    try:
        return {**what, **result()}
    except Exception as error:
        said = (str(error).strip() or "no message").splitlines()[0]
        return {**what, "failed": f"{type(error).__name__}: {said[:300]}"}


def note(part: str, row: dict[str, Any]) -> None:
    """Writes a row, to disk at once and to the screen."""
    line = json.dumps({"part": part, **row})
    with (_folder() / "prove.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    print(line, file=sys.__stdout__, flush=True)


def rows() -> Iterator[dict[str, Any]]:
    file = _folder() / "prove.jsonl"
    if file.exists():
        yield from map(json.loads, file.read_text(encoding="utf-8").splitlines())


def _verdict() -> str | int:
    bad = [row for row in rows() if "failed" in row or row.get("equal") is False]
    where = _folder() / "prove.jsonl"
    return f"{len(bad)} results failed or differ: {where}" if bad else 0


def _folder() -> Path:
    return Path(os.environ["OUT"])


if __name__ == "__main__":
    main()
