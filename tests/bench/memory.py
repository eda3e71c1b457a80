"""Predicted against real peak memory of training steps on a CPU.

    python -m tests.bench memory [--write] [WORD ...]        37 configurations of every kind
    python -m tests.bench memory rss [--write]               the real peak itself against anonymous RSS
    python -m tests.bench memory runs [--write] [rows=FILE]  whole runs, every option in one of them
    python -m tests.bench memory model FOLDER [--write]      a real model: policies, auto's budgets, their time
    python -m tests.bench memory tree [--write]              the README's page on levers, from the plan
    python -m tests.bench memory peers [--write]             other predictors on the same configurations

The real peak is torch.profiler's allocator events on top of the bytes of all tensors that were alive when it began.
`--write` puts the tables into tests/bench/RESULTS.md.
"""

from __future__ import annotations

import statistics
import sys
import time

from tests.bench import _memory_model, _memory_peers, _memory_rss, _memory_runs, _memory_tree
from tests.bench._memory_cases import BASE, CONFIGURATIONS
from tests.bench._memory_step import machine, real_step, worst_shape, write_section
from trainer.config.compose import compose
from trainer.memory.predict.planner import Planner


def compare(words: list[str]) -> tuple[float, float]:
    """(predicted, real) peak of a configuration, MiB."""
    config = compose([*BASE, *words]).config
    shape = worst_shape(config)
    predicted = Planner(config, shape=shape).predict().peak
    real, _ = real_step(config, shape)
    return predicted / 2**20, real / 2**20


def main() -> None:
    """The parts that the words name; all that need no model folder by default."""
    words = sys.argv[1:]
    part = words[0] if words and words[0] in PARTS else None
    (PARTS[part] if part else configurations)(words[1:] if part else words)


def configurations(words: list[str]) -> None:
    """The table of predicted and real peaks; words pick rows by what is in their name."""
    rows, errors, started = [], [], time.perf_counter()
    wanted = [word for word in words if not word.startswith("--")]
    for name, changes in CONFIGURATIONS.items():
        if wanted and not any(word in name for word in wanted):
            continue
        predicted, real = compare(changes)
        errors.append(abs(predicted / real - 1))
        rows.append(f"| {name} | {predicted:.2f} | {real:.2f} | {predicted / real - 1:+.1%} |")
        print(rows[-1], flush=True)
    summary = (
        f"{len(errors)} configurations: error mean {statistics.mean(errors):.2%}, max {max(errors):.2%}; "
        f"{time.perf_counter() - started:.0f} s."
    )
    print(summary)
    if "--write" in words:
        head = f"`python -m tests.bench memory --write`. {machine()}. Real: torch.profiler's allocator events "
        table = ["| configuration | predicted | real | error |", "|---|---|---|---|", *rows]
        title = "## Memory: predicted against real peak"
        write_section("memory", [title, "", head + "on top of what was alive. MiB.", "", summary, "", *table])


PARTS = {
    "model": _memory_model.main,
    "rss": _memory_rss.main,
    "runs": _memory_runs.main,
    "peers": _memory_peers.main,
    "tree": _memory_tree.main,
}


if __name__ == "__main__":
    main()
