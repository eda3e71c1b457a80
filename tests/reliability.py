"""`python -m tests.reliability [short]`: runs the attacks and writes tests/RELIABILITY.md with what came of them.

An attack is a test; one that tries many things says how many (its property `attacks`; `failed`, where it goes on after
a failure). `short` leaves out what is marked slow, as CI does. Figures are of this run only.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import yaml

from tests.support import REPO, chat_rows, cli, make_model, train_here, write_jsonl

ATTACKS: dict[str, dict[str, list[str]]] = yaml.safe_load((REPO / "tests/attacks/attacks.yaml").read_text())

MISTAKES = (
    ["model.revison=x"], ["recipe=nothing"], ["optim.learning_rate=fast"], ["data.path=/nowhere.jsonl"],
    ["model.path=/nowhere", "data.path={data}"], ["train.epochs=-1"], ["hf_aaaaaaaaaaaaaaaaaaaa"], ["trian"],
    ["resume", "run=/nowhere"], ["data.path={bad}"], ["output_dir={data}"], ["adapter.target_modules=nothing"],
    ["generate", "run=/nowhere", "prompt=x"], ["optim=adamw", "optim.beta=1"], ["-m", "seed=1,x"],
)  # fmt: skip
"""Of a user's; {data} and {bad} are files of rows, good and bad."""


@dataclass
class Outcome:
    survived: int = 0
    tried: int = 0
    seconds: float = 0.0

    def add(self, case: ElementTree.Element) -> None:
        """One test of the report."""
        found = {p.get("name"): int(p.get("value")) for p in case.iter("property")}
        tried, broken = found.get("attacks", 1), case.find("failure") is not None or case.find("error") is not None
        self.tried += tried
        self.survived += tried - found.get("failed", tried) if broken else tried
        self.seconds += float(case.get("time"))


def ids() -> dict[str, set[tuple[str, str]]]:
    """File and function of the tests of each row."""
    return {row: {(f, f"test_{n}") for f, names in files.items() for n in names} for row, files in ATTACKS.items()}


def attack(short: bool) -> dict[str, Outcome]:
    """Runs all tests once, each counting in every row that names it. One that is skipped was not tried."""
    wanted = sorted({f"tests/{file}::{test}" for tests in ids().values() for file, test in tests})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "not slow" if short else "", f"--junitxml={report}", *wanted]
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words], cwd=REPO, check=False)
        cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    outcomes = {row: Outcome() for row in ATTACKS}
    for case in cases:
        file = case.get("classname").removeprefix("tests.").replace(".", "/") + ".py"
        test = case.get("name").partition("[")[0]
        for row, tests in ids().items():
            if (file, test) in tests:
                outcomes[row].add(case)
    return outcomes


def seconds_to_an_error() -> list[float]:
    """Of each mistake, in a process of its own."""
    taken = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {"data": write_jsonl(folder / "rows.jsonl", chat_rows()), "bad": write_jsonl(folder / "bad.jsonl", [7])}
        for words in MISTAKES:
            start = time.perf_counter()
            done = cli(*(word.format(**files) for word in words), cwd=folder)
            taken.append(time.perf_counter() - start)
            assert done.returncode in (2, 3, 4, 5) and "Traceback" not in done.stderr, (words, done.stderr)
    return taken


def slopes(steps: int) -> tuple[float, float]:
    """Growth a step of resident memory (KiB) and of open files over the second half of a run (least squares)."""
    from trainer.training.watch import Watch

    seen: list[tuple[int, int]] = []
    real = Watch.after_step

    def after_step(self, state, grad_norm):
        real(self, state, grad_norm)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        seen.append((pages * resource.getpagesize() // 1024, len(os.listdir("/proc/self/fd"))))

    Watch.after_step = after_step
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, data = make_model(Path(folder) / "model"), write_jsonl(Path(folder) / "rows.jsonl", chat_rows())
            words = [*model.overrides(), "data=file", f"data.path={data}", "data.max_length=128", "device=cpu"]
            words += ["train.micro_batch_tokens=128", "train.accumulation_steps=1", "data.eval_fraction=0.2"]
            words += [f"train.max_steps={steps}", "train.eval_every=50", "train.save_every=50"]
            train_here(words, Path(folder) / "run")
    finally:
        Watch.after_step = real
    late = seen[len(seen) // 2 :]
    memory, files = (statistics.linear_regression(range(len(late)), column).slope for column in zip(*late, strict=True))
    return memory, files


def table(short: bool) -> Iterator[str]:
    """The lines of RELIABILITY.md."""
    yield "# Reliability\n"
    command = "python -m tests.reliability" + " short" * short
    yield f"Made by `{command}`; which tests, says `tests/attacks/attacks.yaml`.\n"
    yield "| attack | survived | tried |\n|---|---:|---:|"
    outcomes = attack(short)
    for row, outcome in outcomes.items():
        yield f"| {row} | {outcome.survived:,} | {outcome.tried:,} |"
    searches = outcomes["searches for a secret that found none"]
    yield f"\nSecret hits: {searches.tried - searches.survived}."
    taken = seconds_to_an_error()
    median, largest = statistics.median(taken), max(taken)
    yield f"\nSeconds to an error, {len(taken)} mistakes: median {median:.1f}, largest {largest:.1f}."
    steps = 200 if short else 1600
    memory, files = slopes(steps)
    yield f"\nSecond half of {steps:,} steps: {memory:+.2f} KiB of resident memory and {files:+.4f} open files a step."
    from trainer.tracking.run_folder import versions

    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    yield f"\n{platform.system()} {platform.machine()}, {os.cpu_count()} cores shared with other work; {found}."


if __name__ == "__main__":
    lines = list(table(short="short" in sys.argv[1:]))
    (REPO / "tests" / "RELIABILITY.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
